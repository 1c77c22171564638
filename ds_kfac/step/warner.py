"""What a rank says of its layers that are stepped otherwise than the user may think, once each."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ds_kfac.log import logger
from ds_kfac.ops.host_copy import HostCopy

PATIENCE = 5
"""Captures of a layer in a row in which it may lack a basis: below a head that begins with zeros it
needs four."""
NAMED = 3
"""Layers that a warning names."""
WITHOUT = (
    "stepped without curvature, for {} updates of theirs in a row: {}; "
    "engine.kfac.explain(name) says why"
)
FROZEN = (
    "weights were frozen at the last {} updates, so their factors stay as they are: {}. If other "
    "steps train "
    "them, as of two nets that are frozen in turn, choose kfac.factor.update_interval so that it "
    "meets all turns"
)


@dataclass
class LayerWarner:
    """Warns of this rank's layers that have no basis for long, or no update of it, and of those
    whose gradients were left out because moments could not have held them.

    Attributes:
        names: of the layers, in the order of :attr:`Direction.names`.
    """

    names: Sequence[str]
    # warning -> layer -> its updates in a row
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
        """Call after an applied step that captured.

        Args:
            without: layers without a basis of which the user does not know.
            frozen: layers whose weight is.
            captured: layers that this step captured.
            left_out: fp32 [layers], how often the gradient of each was left out so far; 0 where the
                direction leaves none out. The warning is by those that the last call has copied to
                the host, if they have arrived.
        """
        for text, names in ((WITHOUT, without), (FROZEN, frozen)):
            before = self._rows.get(text, {})
            now = {name: before.get(name, 0) + 1 for name in names if name in captured}
            self._rows[text] = {name: n for name, n in before.items() if name not in captured} | now
            if late := [name for name, n in now.items() if n == PATIENCE]:
                more = f" and {len(late) - NAMED} more" if len(late) > NAMED else ""
                logger.warning(f"ds_kfac: {text.format(PATIENCE, ', '.join(late[:NAMED]) + more)}")
        if not isinstance(left_out, Tensor) or not (self._copy is None or self._copy.done):
            return
        counts = dict(zip(self.names, self._copy.tolist(), strict=True)) if self._copy else {}
        self._copy = HostCopy(left_out)
        for name, count in counts.items():
            if count and name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    f"ds_kfac: gradients of {name or '(model)'} were left out, {int(count)} so "
                    f"far: their norm exceeds "
                    "1e15, which Adam's second moment would not recover from. Its weights were "
                    "not touched in these "
                    'steps; "gradient_clipping" in the DeepSpeed config bounds gradients'
                )
