"""What a rank says of its layers that are stepped otherwise than the user may think, once each."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ds_kfac.log import logger
from ds_kfac.ops.host_copy import HostCopy

PATIENCE = 5
"""Captures of a layer in a row in which it may lack a basis: below a head that begins with zeros it needs four."""
NAMED = 3
"""Layers that a warning names."""


@dataclass
class LayerWarner:
    """Warns of this rank's layers that have no basis for long, and of those whose gradients were left out because
    moments could not have held them.

    Attributes:
        names: of the layers, in the order of :attr:`Direction.names`.
    """

    names: Sequence[str]
    _without: Counter[str] = field(default_factory=Counter)
    _warned: set[str] = field(default_factory=set)
    _copy: HostCopy | None = None

    def step(self, without: Collection[str], captured: Collection[str], left_out: Tensor | float) -> None:
        """Call after an applied step that captured.

        Args:
            without: layers without a basis of which the user does not know.
            captured: layers that this step captured.
            left_out: fp32 [layers], how often the gradient of each was left out so far; 0 where the direction leaves
                none out. The warning is by those that the last call has copied to the host, if they have arrived.
        """
        self._without = Counter({name: self._without[name] + (name in captured) for name in without})
        if late := [name for name, n in self._without.items() if n == PATIENCE and name in captured]:
            more = f" and {len(late) - NAMED} more" if len(late) > NAMED else ""
            logger.warning(
                f"ds_kfac: stepped without curvature, for {PATIENCE} updates of theirs in a row: "
                f"{', '.join(late[:NAMED])}{more}; engine.kfac.explain(name) says why"
            )
        if not isinstance(left_out, Tensor) or not (self._copy is None or self._copy.done):
            return
        counts = dict(zip(self.names, self._copy.tolist(), strict=True)) if self._copy else {}
        self._copy = HostCopy(left_out)
        for name, count in counts.items():
            if count and name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    f"ds_kfac: gradients of {name or '(model)'} were left out, {int(count)} so far: their norm exceeds "
                    "1e15, which Adam's second moment would not recover from. Its weights were not touched in these "
                    'steps; "gradient_clipping" in the DeepSpeed config bounds gradients'
                )
