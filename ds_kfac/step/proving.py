"""Decide in which steps a run checks its captured rows, and which layers lose their curvature.

The check is called the proof (:mod:`ds_kfac.model.proof`). A layer fails the proof if its captured
rows do not add up to its gradient. The layer then has no curvature until it passes a later proof.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
"""Largest number of captured steps from one proof to the next. The second proof follows the first
closely, because programs change most at their start. The number of captured steps between two
proofs doubles with every proof, up to this limit."""
FIRST = 4
"""After each of the first FIRST proofs, the next step collects statistics again for layers whose
gradient was zero, see :attr:`Proving.again`. A residual block whose last matrices are initialized
with zeros needs this many proofs."""
QUANTIZED = 1.0
"""Relative error that is assumed for gradients that are sent in 4 bits. With such an error, a layer
fails only if all of its rows are missing."""
RAISES = False
"""Whether to raise an error if a layer fails. Tests set this."""


def wait(proofs: int) -> int:
    """Return how many captured steps without a proof follow after the first ``proofs`` proofs."""
    return min(EVERY, 2**proofs) - 1


@dataclass(frozen=True)
class Verdict:
    """Result of a proof, which is the same on every rank.

    Attributes:
        checks: layer name -> result of its check.
        unfit: layer name -> reason, for each layer that has no curvature from this step on.
        open: whether the proof must be repeated in the next captured step, because a layer failed
            or the result of a check was not finite.
    """

    checks: Mapping[str, RowCheck]
    unfit: Mapping[str, str]
    open: bool


@dataclass
class ProofClock:
    """When proofs take place.

    Attributes:
        proofs: number of proofs so far. Extra proofs, such as the one after a checkpoint was
            loaded, do not count.
        wait: number of captured steps without a proof before the next proof is due.
        step: number of the captured step that began last; -1 if there was none.
        is_due: whether a proof is due in ``step``.
    """

    proofs: int = 0
    wait: int = 0
    step: int = -1
    is_due: bool = True


class Proving:
    """Runs the proofs for the layers of one domain.

    Attributes:
        unfit: layer name -> why the layer has no curvature.
        again: keys of factors for which the next step collects statistics even if the timetable
            does not say so. The layers of these factors had rows, but a gradient of zero. This
            happens to layers below a head that is initialized with zeros.
    """

    def __init__(self, layers: Sequence[LayerSpec], layout: ShardLayout, channel: Channel) -> None:
        self.layers = layers
        self.layout = layout
        self.channel = channel
        names = {p: name for name, p in layout.engine.module.named_parameters()}
        self._parameters = {names[p]: p for p in layout.params}
        self.load({})

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of :meth:`state`. An empty dict means that no proof has taken
        place yet.

        The next captured step always runs a proof, because the program may have changed since the
        checkpoint was saved. A proof that is not due changes nothing unless a layer fails it, so a
        resumed run equals an uninterrupted run.
        """
        self.unfit: Mapping[str, str] = state.get("unfit", {})
        self.again: frozenset[str] = state.get("again", frozenset())
        self._clock: ProofClock = replace(state.get("clock", ProofClock()))
        self._first_step: int | None = None  # the first step that was captured after load()

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: :attr:`unfit`, :attr:`again` and a copy of the
        :class:`ProofClock`."""
        return {"unfit": dict(self.unfit), "again": self.again, "clock": replace(self._clock)}

    def begin(
        self, step: int, key: Callable[[LayerSpec], str], *, lacks_rows: bool = False
    ) -> Proof | None:
        """Return a proof for this captured step, or None if the step runs no proof. If DeepSpeed
        skips a step, the step begins again, but is counted only once.

        Args:
            key: see :class:`ds_kfac.model.proof.Proof`.
            lacks_rows: whether gradients may contain rows that the hooks have dropped. If so, no
                layer can fail in this step. Rows are dropped if the last step or backward pass
                raised an error, or if a checkpoint was loaded between two micro-batches. At ZeRO-2
                the gradients may still contain them after ``zero_grad``.
        """
        clock = self._clock
        if step != clock.step:
            clock.step = step
            clock.is_due = clock.wait == 0
            clock.wait = max(0, clock.wait - 1)
        if self._first_step is None:
            self._first_step = step
        if not clock.is_due and step != self._first_step:
            return None
        proof = Proof(self.layers, key, clock.proofs, torch.device(self.layout.engine.device))
        if lacks_rows:
            for layer in proof.layers:
                proof.leave_out(layer)
        return proof if proof.layers else None

    def frozen(self, layer: LayerSpec) -> bool:
        """Whether the layer's weight was frozen after K-FAC was attached. Hooks then see no rows of
        the layer. Its bias may still have a gradient, but there are no rows to compare this
        gradient with."""
        return not self._parameters[layer.weight].requires_grad

    def hooked(self, layer: LayerSpec) -> bool:
        """Whether a gradient of the layer's parameters has a hook that is neither DeepSpeed's nor
        ours."""
        return any(is_hooked(self._parameters[name]) for name in layer.parameters)

    def numbers(self, proof: Proof) -> Tensor:
        """Return the numbers that the proof has computed from the rows, summed over all ranks.
        Collective."""
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
        """Compare each layer's numbers with its gradient. Collective. Waits for the device.

        Args:
            numbers: see :meth:`numbers`.
            gradients: layer name -> gradient [O, I] after DeepSpeed's unscaling and clipping, for
                this rank's layers.
            used: function that takes a layer name and returns a text about where the layer's weight
                is used.
            applied_factor: factor by which DeepSpeed has multiplied gradients or will multiply
                them; None: DeepSpeed does not multiply gradients.
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
        # the rows of a shared A come from only one of its layers, so all these layers fail together
        for factor in plan.assignment.factors:
            wrong = next((name for name in factor.layers if name in unfit and name in checks), None)
            if wrong is not None:
                unfit |= {
                    name: f"it shares its factor A with {wrong}"
                    for name in factor.layers
                    if name not in unfit
                }
        if unfit and RAISES:
            raise RuntimeError(
                f"ds_kfac: unfit: {[(name, why, checks[name]) for name, why in unfit.items()]}"
            )
        return Verdict(checks, unfit, bool(unfit) or not all(x.is_finite for x in checks.values()))

    def record(self, verdict: Verdict) -> None:
        """Store the verdict after its step was applied, and decide when the next proof takes
        place."""
        clock = self._clock
        self.unfit = verdict.unfit
        if not clock.is_due:
            if verdict.open:
                clock.wait = 0
            return
        zero = {name for name, check in verdict.checks.items() if check.is_zero}
        clock.proofs += 1
        self.again = frozenset()
        if zero and clock.proofs <= FIRST:
            self.again = frozenset(
                key for layer in self.layers if layer.name in zero for key in layer.keys
            )
        clock.wait = 0 if verdict.open or self.again else wait(clock.proofs)
