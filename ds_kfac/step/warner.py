"""Warnings about layers of this rank that are not trained as the user may expect. Each warning is
given once."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ds_kfac.log import logger
from ds_kfac.ops.host_copy import HostCopy

CAPTURES_BEFORE_WARNING = 5
"""Number of consecutive updates of a layer's factors after which a warning names the layer if it
still has no eigenbasis. Layers below a head that is initialized with zeros get an eigenbasis only
at the fourth update."""
NAMED = 3
"""Largest number of layers that a warning names."""
WITHOUT = (
    "these layers are updated without curvature, because they had no eigenbasis at {} updates of "
    "their factors in a row: {}. engine.kfac.explain(name) says why"
)
FROZEN = (
    "weights were frozen at the last {} updates of factors, so the factors of these layers stay as "
    "they are: {}. If you freeze two networks in turn, choose a kfac.factor.update_interval such "
    "that some updates fall into steps that train these layers"
)


@dataclass
class LayerWarner:
    """Warns about three kinds of layers of this rank: layers that had no eigenbasis at many updates
    of their factors, layers whose weights were frozen at many updates, and layers whose gradients
    were not used because they were too large for the moments.

    Attributes:
        names: names of the layers, in the order of :attr:`Direction.names`.
    """

    names: Sequence[str]
    # warning -> layer name -> number of consecutive updates of the layer's factors at which the
    # warning applied
    _rows: dict[str, dict[str, int]] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)
    _copy: HostCopy | None = None

    def step(
        self,
        without: Collection[str],
        frozen: Collection[str],
        captured: Collection[str],
        left_out: Tensor | float,
    ) -> None:
        """Warn if there is a reason to. Call this method after every applied step in which factors
        were updated.

        Args:
            without: names of layers that have no eigenbasis, except layers that failed the proof.
            frozen: names of layers whose weights are frozen.
            captured: names of the layers for which this step collected statistics.
            left_out: fp32 [layers], for each layer the number of steps so far in which its gradient
                was not used. 0.0 if the update rule uses every gradient. The tensor is copied to
                the host, and a later call reads the copy. So the host does not wait for the device.
        """
        for text, names in ((WITHOUT, without), (FROZEN, frozen)):
            before = self._rows.get(text, {})
            now = {name: before.get(name, 0) + 1 for name in names if name in captured}
            self._rows[text] = {name: n for name, n in before.items() if name not in captured} | now
            late = [name for name, n in now.items() if n == CAPTURES_BEFORE_WARNING]
            if late:
                named = ", ".join(late[:NAMED])
                if len(late) > NAMED:
                    named += f" and {len(late) - NAMED} more"
                logger.warning(f"ds_kfac: {text.format(CAPTURES_BEFORE_WARNING, named)}")
        if not isinstance(left_out, Tensor) or not (self._copy is None or self._copy.done):
            return
        counts = dict(zip(self.names, self._copy.tolist(), strict=True)) if self._copy else {}
        self._copy = HostCopy(left_out)
        for name, count in counts.items():
            if count and name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    f"ds_kfac: gradients of {name or '(model)'} were left out in {int(count)} "
                    "steps so far, because they had entries of 1e15 or more, which would stay in "
                    "Adam's second moment for long. These steps did not change the layer's weights."
                    ' To bound gradients, set "gradient_clipping" in the DeepSpeed config'
                )
