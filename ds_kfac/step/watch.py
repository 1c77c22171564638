"""What only the device knows of a layer, said when the host can learn it without waiting: once per layer."""

from collections.abc import Mapping, Sequence

import torch
from deepspeed.utils import logger
from torch import Tensor

from ds_kfac.step.host_copy import HostCopy


class Watch:
    """Warns of layers whose gradients were left out because moments could not have held them.

    Args:
        names: this rank's layers.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self._seen = torch.zeros(len(self.names), device=device)
        self._said: set[str] = set()
        self._copy: HostCopy | None = None

    def step(self, flags: Mapping[str, Tensor], *, look: bool) -> None:
        """After a step that was applied.

        Args:
            flags: layer name -> bool scalar, of none or of all layers.
            look: say what an earlier look asked for, if it has arrived, and ask again. Now and then is enough.
        """
        if flags:
            self._seen = self._seen + torch.stack([flags[name] for name in self.names])
        if look and (self._copy is None or self._copy.done):
            self._say([] if self._copy is None else self._copy.tolist())
            self._copy = HostCopy(self._seen)

    def _say(self, counts: Sequence[float]) -> None:
        for name, count in zip(self.names, counts, strict=False):
            if count and name not in self._said:
                self._said.add(name)
                logger.warning(
                    f"ds_kfac: gradients of {name} were left out, {int(count)} so far: of norm 1e15 and more "
                    "they are none, and Adam's moments would not get over them. Its weights were not touched in these "
                    'steps; "gradient_clipping" in the DeepSpeed config bounds them'
                )
