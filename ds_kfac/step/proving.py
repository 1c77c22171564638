"""When a run proves its captured rows (:mod:`ds_kfac.model.proof`), and what follows for a layer
whose rows do not make up its gradient: it has no curvature until a captured step in which they do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_kfac.comm.message import Channel
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.proof import Proof, RowCheck, eps_of, row_checks
from ds_kfac.plan.plan import Plan
from ds_kfac.zero.exchange import Gradients
from ds_kfac.zero.layout import ShardLayout, is_hooked

EVERY = 1000
"""Most captured steps from one proof to the next. The first proofs are close, each twice as far
from the last: programs change most when they begin."""
FIRST = 4
"""First captured steps in which layers that had no gradient are captured again one step later, see
:attr:`Proving.again`: a residual block whose last matrices begin with zeros needs as many."""
QUANTIZED = 1.0
"""Relative accuracy of gradients that travel in 4 bits: only rows that are missing altogether
show."""
RAISES = False
"""Set by tests: a layer that does not fit is an error."""


def wait(proofs: int) -> int:
    """Captured steps without a proof that follow this number of proofs."""
    return min(EVERY, 2**proofs) - 1


@dataclass(frozen=True)
class Verdict:
    """Result of a proof, the same on every rank.

    Attributes:
        checks: layer name -> its check.
        unfit: name of a layer without curvature from this step on -> why.
        open: whether the next captured step must prove again: a layer does not fit, or a number was
            not finite.
    """

    checks: Mapping[str, RowCheck]
    unfit: Mapping[str, str]
    open: bool


class Proving:
    """Proves the rows of one domain's layers.

    Attributes:
        unfit: layer name -> why it is without curvature.
        again: keys of factors that the next step captures, too: their layers had rows but no
            gradient, as all layers below a head that begins with zeros.
    """

    def __init__(self, layers: Sequence[LayerSpec], layout: ShardLayout, channel: Channel) -> None:
        self.layers = layers
        self.layout = layout
        self.channel = channel
        names = {id(p): name for name, p in layout.engine.module.named_parameters()}
        self._parameters = {names[id(p)]: p for p in layout.params}
        self.restart()

    def restart(self, *, resumed: bool = False) -> None:
        """Forget all proofs: the next captured step proves. ``resumed``: from a checkpoint, after
        which no extra step is captured (:attr:`again`), so that a resumed run equals an unbroken
        one."""
        self.unfit: Mapping[str, str] = {}
        self.again: frozenset[str] = frozenset()
        self._number = 0  # proofs so far
        self._wait = 0  # captured steps until the next one
        self._last_step = -1  # the last captured step that began
        self._proves = True  # whether it proves
        self._resumed = resumed

    def begin(
        self, step: int, key: Callable[[LayerSpec], str], *, after_error: bool = False
    ) -> Proof | None:
        """A proof for this step, which captures; None if it is not to prove. A step that DeepSpeed
        skips begins again, and counts once.

        Args:
            key: see :class:`ds_kfac.model.proof.Proof`.
            after_error: whether the last step or backward pass raised: gradients may stay of rows
                that were dropped, at ZeRO-2 after ``zero_grad``, too. No layer is judged by such a
                step.
        """
        if step != self._last_step:
            self._last_step = step
            self._proves = self._wait == 0
            self._wait = max(0, self._wait - 1)
        if not self._proves:
            return None
        proof = Proof(self.layers, key, self._number, torch.device(self.layout.engine.device))
        if after_error:
            for layer in proof.layers:
                proof.leave_out(layer)
        return proof if proof.layers else None

    def frozen(self, layer: LayerSpec) -> bool:
        """Whether a weight was frozen since attach: hooks see its rows no more, though its bias may
        have a gradient."""
        return not self._parameters[layer.weight].requires_grad

    def hooked(self, layer: LayerSpec) -> bool:
        """Whether a hook on a parameter's gradient is neither DeepSpeed's nor ours."""
        return any(is_hooked(self._parameters[name]) for name in layer.parameters)

    def numbers(self, proof: Proof) -> Tensor:
        """The proof's numbers, summed over all ranks. Collective."""
        for layer in proof.layers:
            if self.frozen(layer):
                proof.leave_out(layer)
            if self.hooked(layer):
                proof.note_hook(layer)
        return self.channel.sum(proof.numbers(), "proof")

    def verdict(
        self,
        proof: Proof,
        numbers: Tensor,
        gradients: Gradients | Mapping[str, Tensor],
        plan: Plan,
        used: Callable[[str], str],
        applied_factor: Tensor | None = None,
    ) -> Verdict:
        """Compare each layer's numbers with its gradient. Collective; waits for the device.

        Args:
            numbers: see :meth:`numbers`.
            gradients: layer name -> gradient as it will be applied, [O, I], for this rank's layers.
            used: layer name -> text that says where its weight is used.
            applied_factor: by which DeepSpeed has multiplied gradients, or will; None: it does not.
        """
        layout = self.layout
        workers = plan.assignment.workers
        dtypes = layout.rounded_to | {plan.gradient_dtypes[0]}
        eps = QUANTIZED if layout.quantized else max(map(eps_of, dtypes))
        floor = max(torch.finfo(dtype).smallest_normal * eps_of(dtype) for dtype in dtypes)
        applied: Tensor | float = 1.0
        if applied_factor is not None:
            applied = applied_factor.double().to(numbers.device)
        limits: dict[str, Any] = {
            "divisor": layout.divisor / applied,
            "world": layout.world,
            "eps": eps,
            "floor": floor * applied,
        }
        names = [layer.name for layer in proof.layers]
        own = [name for name in names if workers[name][0] == layout.rank]
        ratios = self.channel.sum(proof.ratios(numbers, gradients, own, **limits), "proof")
        checks = dict(zip(names, row_checks(numbers, ratios, [*map(used, names)]), strict=True))
        unfit = {
            name: str(check) for name, check in checks.items() if check.is_finite and not check.fits
        }
        # a shared A has the rows of the layer that gives them
        for factor in plan.assignment.factors:
            wrong = next((name for name in factor.layers if name in unfit and name in checks), None)
            if wrong is not None:
                unfit |= {
                    name: f"its A is that of {wrong}" for name in factor.layers if name not in unfit
                }
        if unfit and RAISES:
            raise RuntimeError(
                f"ds_kfac: unfit: {[(name, why, checks[name]) for name, why in unfit.items()]}"
            )
        return Verdict(checks, unfit, bool(unfit) or not all(x.is_finite for x in checks.values()))

    def record(self, verdict: Verdict) -> None:
        """Remember the verdict of an applied step, and decide when the next proof is."""
        zero = {name for name, check in verdict.checks.items() if check.is_zero}
        self._number += 1
        self.again = frozenset()
        if zero and self._number <= FIRST and not self._resumed:
            self.again = frozenset(
                key for layer in self.layers if layer.name in zero for key in layer.keys
            )
        self._wait = 0 if verdict.open or self.again else wait(self._number)
        self.unfit = verdict.unfit
