"""The sums of a step: what of a call waits for its gradient, and what counts when that comes."""

import logging
from collections.abc import Callable

from torch import Tensor

from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.noise import NoiseScale
from ds_kfac.model.proof import Proof
from ds_kfac.model.rows import BatchSum, Call, RowSums
from ds_kfac.model.shared_inputs import SharedInputs
from ds_kfac.model.uses import Uses

logger = logging.getLogger("ds_kfac")


class StepSums:
    """The sums of a step, and what waits for its gradient to be added to them.

    Args:
        inputs: receives every input of a captured call, to find and verify layers that share theirs.
        fallback_seed: the scale of a backward whose own is not known.
        asked: whether A is summed with the gradients.

    Attributes:
        sums: factor key -> rows of the step so far; missing where there are none.
        keys: of the factors that are summed.
        noise: measures samples' gradients, if there is one.
        proof, uses: of the step, if it proves; uses of weights are noted while it is entered.
        failed: layer name -> what a hook raised; such a layer has no rows any more.
        counted: calls whose gradients came.
        seed: by what the gradients of this backward are scaled, if that was measured.
        arrived: calls of this backward with an input to be released after it.
    """

    def __init__(
        self, rows: RowSums, inputs: SharedInputs, fallback_seed: Callable[[], Tensor | float], *, asked: bool
    ) -> None:
        self.rows, self.inputs, self.asked, self._fallback_seed = rows, inputs, asked, fallback_seed
        self.sums: dict[str, BatchSum] = {}
        self.keys = frozenset[str]()
        self.noise: NoiseScale | None = None
        self.proof: Proof | None = None
        self.uses: Uses | None = None
        self.failed: dict[str, str] = {}
        self.counted = 0
        self.seed: Tensor | float | None = None
        self.arrived: list[Call] = []

    def keep(self, call: Call, x: Tensor, *, makes_A: bool) -> None:
        """What of a call's input waits for its gradient."""
        of_gradients, layer = call.kind.needs_gradients, call.layer
        call.late = makes_A and not of_gradients and (call.recomputed or self.asked or call.rows.late)
        if call.late or call.noted or self.asked or (of_gradients and (makes_A or call.proof is not None)):
            call.x = x
        if not makes_A or call.late or of_gradients or not x.numel():
            return
        if layer.name in call.forward.summed and x.numel() <= layer.A.numel:
            call.x, call.late = x.clone(), True  # someone may change it in place
            return
        call.forward.summed.add(layer.name)
        call.waiting = BatchSum.empty(layer.A.numel, x.device)
        self.rows.add_input(call, x, call.waiting)

    def add(self, call: Call, gradient: Tensor, seed: Tensor | float | None = None) -> None:
        """Rows of both sides; a call with an empty batch has none. ``seed``: where none was measured."""
        self.counted += 1
        layer, of_gradients = call.layer, call.kind.needs_gradients  # even A
        A, G = call.key_A, layer.keys[1]
        rows = call.gradient_of(gradient)
        if call.proof is not None:
            call.probed_G = call.proof.see_gradient(call, rows)
        alive = None if self.asked or not gradient.numel() else rows.any()
        if call.waiting is not None and A in self.keys:
            self._count_input(call, call.waiting, alive)
        elif call.late and call.x is not None and call.x.numel() and A in self.keys:
            own = BatchSum.empty(layer.A.numel, gradient.device)
            self.rows.add_input(call, call.x, own)
            self._count_input(call, own, alive)
        call.waiting, call.late = None, False  # once, whatever the backwards
        makes_A, makes_G = "A" in call.sides and A in self.keys, "G" in call.sides and G in self.keys
        if gradient.numel() and (makes_A and call.x is not None if of_gradients else makes_G):
            if self.seed is not None:
                seed = self.seed
            elif seed is None:
                seed = self._fallback_seed()
            key, numel = (A, layer.A.numel) if of_gradients else (G, layer.G.numel)
            if key not in self.sums:
                self.sums[key] = BatchSum.empty(numel, gradient.device)
            self.rows.add_gradient(call, rows, self.sums[key], seed)
        if call.noted and call.x is not None and self.noise is not None:
            self.noise.add(layer, call.x, rows, call.rows.examples)
        if call.recomputed:
            call.x = None
        elif call.x is not None:
            self.arrived.append(call)

    def _count_input(self, call: Call, own: BatchSum, alive: Tensor | None) -> None:
        """A call's sum goes to that of the step; nothing of it where its gradient is zero to the last bit."""
        if alive is not None:
            own.sum_P.masked_fill_(~alive, 0.0)
            own.count.mul_(alive)
        if call.proof is not None:
            call.proof.counted_input(call, self.rows.weight_sharing, alive)
        total = self.sums.setdefault(call.key_A, own)
        if total is not own:
            total.sum_P.add_(own.sum_P)
            total.count.add_(own.count)

    def fail(self, layer: LayerSpec, error: Exception) -> None:
        """A hook raised: the layer has no rows from here on, and none of this step."""
        self.failed[layer.name] = f"{type(error).__name__}: {error}"
        logger.warning(
            f"ds_kfac: the rows of {layer.name} ({layer.kind}) are not known, so it is left without curvature from "
            f"here on: {self.failed[layer.name]}"
        )
        for key in (self.inputs.key(layer), layer.keys[1]):
            self.sums.pop(key, None)

    def used(self, layer: str) -> str:
        """Where a layer's weight is, in words; "" if that was not noted."""
        return "" if self.uses is None else self.uses.of(layer)
