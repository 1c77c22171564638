"""KFACPreconditioner: the data flow of one step, read top to bottom, the same in every engine mode.

prepare         factors are updated and decomposed; gradients and new eigenbases come to the gradient workers
precondition    each worker's results
finish          results go to whoever holds a slice of them; then DeepSpeed and its optimizer step
commit          the new state is kept if DeepSpeed applied the step
"""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_kfac.assignment.costs import FactorSpec
from ds_kfac.comm.message import Channel, MessagePart, Scalars, deliver
from ds_kfac.curvature.methods import Decomposition
from ds_kfac.directions.base import StepContext
from ds_kfac.directions.kfac_gradient import peak_rates
from ds_kfac.metrics import SUMMARY, Metrics
from ds_kfac.model.capture import Capture
from ds_kfac.model.rows import RowSums
from ds_kfac.model.shared import SharedInputs
from ds_kfac.ops.host_copy import HostCopy
from ds_kfac.plan.plan import Observations, Plan
from ds_kfac.schedule.timetable import FactorsDue
from ds_kfac.step.draft import TORN, EngineView, StepDraft
from ds_kfac.step.factors import FactorDraft, FactorUpdates
from ds_kfac.step.messages import FAILED, NONE_UNUSUAL, UNUSUAL, Sharing, unusual
from ds_kfac.step.proving import Proving
from ds_kfac.step.warner import LayerWarner
from ds_kfac.update.state import LayerState
from ds_kfac.zero.exchange import GradientExchange


class KFACPreconditioner:
    """Turns the gradients of an engine into K-FAC's just before its own step; the user's optimizer follows.

    Attributes:
        state: layer name -> :class:`LayerState`, of the layers this rank is a gradient worker of.
        steps: applied steps, the clock of every schedule; changed in :meth:`commit` alone. DeepSpeed's global_steps
            counts skipped steps, too.
        begins: layers with empty moments, which use a new eigenbasis at once, others from the next step on.
        due: factors that the next step updates, and those that it decomposes.
        observations: what the first captured batch has shown.
        names: layer name -> its name in checkpoints.
        left_out: see :meth:`LayerWarner.step`.
        torn: whether a commit began and did not end.
        saved: names of layers that this domain writes to checkpoints.
        flagged: layers of which every step tells all ranks whether they have eigenbases.
    """

    def __init__(self, engine_view: EngineView, plan: Plan) -> None:
        self.engine_view, self.config, self.plan = engine_view, plan.config, plan
        config = plan.config
        self.observations = Observations()
        self.layers, self.layout = plan.layers, engine_view.layout
        self.names = {layer.name: engine_view.domain.global_name(layer) for layer in self.layers}
        first = engine_view.domain.shard[0] == 0  # of those that have copies of a layer
        self.saved = {layer.name for layer in self.layers if layer.copies == 1 or first}
        self.device, self.rank = self.layout.engine.device, self.layout.rank
        engine = self.layout.engine
        self.metrics = Metrics(self.device, engine.timers if engine.wall_clock_breakdown() else None)
        self.channel = Channel(self.layout.group)
        self.exchange = GradientExchange(self.layout, self.layers, plan.assignment.workers, plan.gradient_dtypes)
        self.owned = self.exchange.owned
        self.rule, self.moments = engine_view.rule, engine_view.rule.moments(config)
        self.flagged = self.layers if self.rule.asks_prepared(config) else ()
        self.direction = self.rule.direction(plan, self.layout, self.exchange, engine_view.inner, self.metrics)
        self.sharing = Sharing(SharedInputs(plan.sharing_candidates), self.channel)
        self.curvature = self._factor_updates()
        self.warner = LayerWarner(self.direction.names)
        self.left_out: Tensor | float = 0.0
        stage = partial(self.metrics.stage, "capture")
        self.capture = Capture(
            engine_view.model,
            self.layers,
            self.layout.backward_scale,
            device=torch.device(self.device),
            rows=RowSums(config.factor.weight_sharing, config.factor.rows != "all", stage),
            inputs=self.sharing.inputs,
            sampled=config.factor.fisher == "monte_carlo",
            counts_terms=plan.counts_terms,
        )
        self.proving = Proving(self.layers, self.layout, self.channel)
        totals = range(self.rule.numbers + len(SUMMARY) + len(self.flagged))
        self._totals = Scalars([totals] * self.channel.world, self.rank, plan.rows)
        self._norms = Scalars([[("norm", rank)] for rank in range(self.channel.world)], self.rank)
        self._empty = partial(LayerState.empty, device=self.device, moments=self.moments, method=plan.method)
        self.state: dict[str, LayerState] = {}
        self.peak_lr: dict[int, Tensor | float] = {}
        self.load_state_dict({})

    def _factor_updates(self) -> FactorUpdates:
        averaged_over = self.layout.averaged_over
        return FactorUpdates(self.plan, self.channel, self.metrics, self.device, averaged_over=averaged_over)

    @torch.no_grad()
    def prepare(self) -> StepDraft:
        """The step up to the point where this rank has whole gradients and new eigenbases of its layers. Collective."""
        if self.torn:
            raise RuntimeError(TORN)
        with torch.autocast(self.device.type, enabled=False):  # a user may call engine.step() under autocast
            self.layout.begin()
            self.metrics.step_counts.clear()  # of a step that raised
            draft = StepDraft(self.due, self.peak_lr)
            if self.rule.optimizer_type is None:  # now, not in commit: DeepSpeed's scheduler steps in between
                scheduler = self.layout.engine.lr_scheduler if self.plan.clip_lr == "peak" else None
                draft.peak_lr = peak_rates(self.layout.optimizer.param_groups, self.peak_lr, scheduler)
            proof, numbers = self.capture.proof, None
            if draft.due.capture:
                self.capture.end_step()
                numbers = None if proof is None else self.proving.numbers(proof)
                with self.metrics.stage("reduce"):
                    sums, self.capture.sums = self.curvature.reducer.reduce(self.capture.sums), {}
                # the plan may change by what the first batch shows, before any of its sums are kept
                measured = self.capture.measured or {}
                observations = self.sharing.observed(self.observations, self.plan, self.curvature.ready, measured)
                if observations is not None:
                    self.observe(observations)
                factors = draft.factors = self.curvature.draft(self.steps, draft.due)
                factors.unproven = self.curvature.of_none_but(self.proving.unfit)
                with self.metrics.stage("reduce"):
                    self.curvature.update(factors, sums)
                del sums
                with self.metrics.stage("refresh"):
                    self.curvature.decompose(factors, self._last_basis)
            with self.metrics.stage("relayout"):
                self._gather(draft)
            if proof is not None and numbers is not None:
                draft.verdict = self.proving.verdict(proof, numbers, draft.gradients, self.plan, self.capture.used)
                unfit = (layer for layer in self.owned if layer.name in draft.verdict.unfit)
                draft.give_up({layer.name: self._empty(layer) for layer in unfit})
                if draft.factors is not None:
                    self.curvature.forget(draft.factors, self.curvature.of_none_but(draft.verdict.unfit))
            return draft

    def _last_basis(self, factor: FactorSpec) -> Decomposition | None:
        """The decomposition of a factor that is in use. An eigen worker has it: it is a gradient worker of one of the
        factor's layers, not always of the first."""
        state = next(self.state[name] for name in factor.layers if name in self.state)
        return state.A if factor.is_A else state.G

    def _gather(self, draft: StepDraft) -> None:
        """Fetch whole gradients of this rank's layers, and the global norm if the engine clips. New eigenbases and
        scalars travel in the same message."""
        factors, curvature, world = draft.factors, self.curvature, self.channel.world
        names, scalars = [list[Hashable]() for _ in range(world)], dict[Hashable, Tensor | float]()
        if factors is not None:
            names, scalars = curvature.scalars(factors)
        # raw gradients are clipped: the norm of preconditioned ones says nothing of a spike. No domain knows others'
        if self.layout.bound(self.layout.engine) and not self.engine_view.domain.name:
            draft.norm = (self.layout.squared_norm() + self.engine_view.other_params.squared_norm()).sqrt()
            if not self.layout.replicated:  # the norm travels, since its square might be infinite in fp32
                names = [[*others, ("norm", rank)] for rank, others in enumerate(names)]
                scalars["norm", self.rank] = draft.norm
        gradients, received = self._broadcast(factors, names, scalars, self.exchange.gather_part)
        if draft.norm is not None and not self.layout.replicated:
            norms = torch.stack([received["norm", rank] for rank in range(world)])
            draft.norm = norms.double().square().sum().sqrt()
        draft.gradients = self.exchange.gathered(gradients)
        draft.states = dict(self.state)
        if factors is not None:
            draft.next_bases = self._take_arrivals(factors, draft.states)
            for name in self.begins & draft.next_bases.keys():
                bases: Any = draft.next_bases.pop(name)
                draft.states[name] = replace(draft.states[name], **bases)

    def _broadcast(
        self, draft: FactorDraft | None, names: list[list[Hashable]], scalars: dict[Hashable, Tensor | float],
        *others: MessagePart,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Send new eigenbases of the draft, scalars and ``others`` in one message. Returns what arrived of each of
        ``others``, and the scalars by name; arriving eigenbases go to the draft.

        Args:
            names: of each rank's scalars.
        """
        table = self._norms if names == self._norms.names else Scalars(names, self.rank)
        bases = () if draft is None else self.curvature.delivery.parts(draft.arriving, draft.bases, self.device)
        *arrivals, values = deliver((*others, *bases, table.part(scalars, self.device)), self.channel, self.device)
        received = table.named(values)
        if draft is not None:
            self.curvature.receive(draft, arrivals[len(others) :], received)
        return (*arrivals[: len(others)], received)

    def _take_arrivals(self, draft: FactorDraft, states: dict[str, LayerState]) -> dict[str, dict[str, Decomposition]]:
        """Put numbers of loss terms and new decompositions into ``states``. Returns, layer name -> side -> eigenbasis,
        those that are used from the next step on: moments have to be turned into them, at the commit."""
        next_bases: dict[str, dict[str, Decomposition]] = {}
        if counted := [name for name in states if name in draft.terms]:
            now = torch.stack([draft.terms[name] for name in counted])
            terms = torch.where(now > 0, now, torch.stack([states[name].terms for name in counted]))
            states |= {name: replace(states[name], terms=n) for name, n in zip(counted, terms.unbind(), strict=True)}
        for layer in self.owned:
            state, keys = states[layer.name], self.curvature.of_layer.get(layer.name, {})
            keys = {} if layer.name in self.proving.unfit else keys
            bases = {side: draft.bases[spec.key] for side, spec in keys.items() if spec.key in draft.bases}
            if bases and state.moments_rotate:
                next_bases[layer.name] = bases
            elif bases:
                states[layer.name] = state.rebased(**bases)
        return next_bases

    @staticmethod
    def _rebase(states: dict[str, LayerState], next_bases: dict[str, dict[str, Decomposition]]) -> None:
        """Bring layers into these eigenbases. ``next_bases`` is emptied, so that no basis is held twice for long."""
        while next_bases:
            name, bases = next_bases.popitem()
            states[name] = states[name].rebased(**bases)

    @torch.no_grad()
    def precondition(self, draft: StepDraft) -> None:
        """Compute the results of this rank's layers."""
        with torch.autocast(self.device.type, enabled=False), self.metrics.stage("precondition"):
            pairs = [(name, now, self.state[name]) for name, now in draft.states.items()] if draft.factors else []
            fresh = {name for name, now, last in pairs if now.A is not last.A or now.G is not last.G}
            draft.unprepared = [name for name, state in draft.states.items() if state.preconditioner is None]
            if draft.norm is not None and self.rule.optimizer_type is None:  # else DeepSpeed clips the results
                factor = self.layout.clip_factor(draft.norm).float()
                finite = draft.norm.float().isfinite()  # a norm that is no number DeepSpeed finds itself
                draft.clip = torch.where(finite, factor, 1.0)
            context = StepContext(self.steps, draft.norm, draft.peak_lr, fresh, draft.clip)
            draft.local = self.direction.local(context, draft.gradients, draft.states)

    @torch.no_grad()
    def finish(self, draft: StepDraft, sums: Tensor | None = None) -> None:
        """Send results to whoever holds a slice of them, and write them where the optimizer reads gradients. Numbers
        that are summed over all layers travel along. Collective.

        Args:
            sums: of the direction's numbers over the layers of all domains, if there are several.
        """
        with torch.autocast(self.device.type, enabled=False), self.metrics.stage("relayout"):
            outbox = draft.local.outbox
            parts = outbox.part, self.totals(draft)
            results, received = deliver(parts, self.channel, self.device, outbox.release)
            numbers, ready = self.summed(draft, self._totals.read(received))
            totals = (numbers if sums is None else sums).unbind()
            scales = self.direction.finish(self.steps, draft.local, totals, ready)
            self.exchange.write(outbox, results, scales)

    def totals(self, draft: StepDraft) -> MessagePart:
        """The scalars that travel with the results: the direction's numbers, of which a wrong number is a ValueError;
        counts in the order of :data:`SUMMARY`; and, if the direction asks for it, whether each layer has eigenbases."""
        local, factors, travels = draft.local, draft.factors, self.curvature.travels
        if len(local.numbers) != self.rule.numbers:
            raise ValueError(
                f"ds_kfac: {type(self.rule).__name__}.numbers is {self.rule.numbers}, but its Direction.local gave "
                f"{len(local.numbers)} scalars in LocalResult.numbers; make them the same number"
            )
        # where eigenbases travel the counts of refreshes and updates have come with them
        failed = 0 if travels else self.metrics.step_counts["refresh_failures"]
        limited, *empty = NONE_UNUSUAL if travels or factors is None else factors.unusual
        left_out = local.left_out.sum() if isinstance(local.left_out, Tensor) else 0.0
        counts = [local.replaced, len(draft.unprepared), failed, local.unused, left_out]
        counts += [local.limited + limited, *empty]
        ready = draft.states.keys() - set(draft.unprepared)
        flags = (layer.name in ready for layer in self.flagged)
        return self._totals.part(dict(enumerate([*local.numbers, *counts, *flags])), self.device)

    def summed(self, draft: StepDraft, received: Mapping[int, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum :meth:`totals` over all ranks. Returns the direction's numbers, and layer name -> bool scalar, which of
        :attr:`flagged` have eigenbases; the counts go to the metrics."""
        total, first = torch.stack(list(received.values())).sum(dim=0), len(draft.local.numbers)
        numbers, counts, ready = total.tensor_split((first, len(total) - len(self.flagged)))
        summary = self.metrics.step_summary
        summary[: len(counts)] = counts
        if draft.factors is not None and self.curvature.travels:
            failed = [*draft.factors.outcomes.values()].count(FAILED)  # of all ranks
            summary[[*SUMMARY].index("refresh_failures")].add_(failed)  # numbers from a list would be copied
            summary[-len(UNUSUAL) :].add_(unusual(draft.factors.scalars))
        return numbers, dict(zip((layer.name for layer in self.flagged), (ready > 0).unbind(), strict=True))

    def commit(self, draft: StepDraft, *, applied: bool, whole: bool = True) -> None:
        """Call after the engine's optimizer. If its step was applied, the new state is kept; if DeepSpeed skipped it,
        everything is as before the step. ``whole``: of :meth:`resume`."""
        due = draft.due if draft.factors is None else draft.factors.due  # of the factors that the step found
        self.layout.end()
        self.torn = applied
        if applied:
            if draft.factors is not None:
                self.curvature.commit(draft.factors)
            similar: Any = {}
            if due.capture and draft.factors is not None and self.plan.adaptive is not None:
                flags = [draft.factors.scalars["similar", key] for key in sorted(due.capture)]
                similar = HostCopy(torch.stack(flags)).tolist
            self.curvature.timetable.record(self.steps, due, similar)
            if draft.verdict is not None:
                self.curvature.decompose_soon(self.proving.record(draft.verdict))
            self.left_out = self.left_out + draft.local.left_out
            for pending in draft.local.pending:
                pending.commit()
            draft.local.pending = ()  # frees gradients
            self.state, self.peak_lr = draft.states, draft.peak_lr
            if draft.next_bases:
                self._rebase(self.state, draft.next_bases)
            if due.capture:
                without = [name for name in draft.unprepared if name not in self.proving.unfit]
                frozen = [x for x in self.direction.names if not self.exchange.params[x][0].requires_grad]
                self.warner.step(without, frozen, self.curvature.layers_of(due.capture), self.left_out)
                if self.plan.contributors.counts and draft.factors is not None:
                    count = HostCopy(self.metrics.step_summary[-1:])
                    self.sharing.updates = count, draft.factors.missed, self.capture.seen
                self.metrics.step_counts["factor_updates"] += 1
                elements = sum(self.curvature.specs[key].side.numel for key in due.capture)
                self.metrics.step_counts["captured_elements"] += elements
            self.begins.clear()
            self.steps += 1
            self.torn = False
        self.metrics.end(applied=applied)
        self.resume(whole=whole)

    def resume(self, *, whole: bool = True) -> None:
        """Prepare the hooks for the next step. Call after :attr:`state` and :attr:`steps` have changed. Collective.
        After a step that raised (``whole`` False) it is local, and drops what that step's hooks have seen."""
        self.due = self.curvature.timetable.due(self.steps)
        if still := self.proving.again:
            self.due = FactorsDue(self.due.capture | (still & self.curvature.specs.keys()), self.due.refresh)
        if self.due.capture and whole:
            self.settle()
        if self.due.capture or self.capture.active:
            keys = self.curvature.reducer.begin(self.due.capture, self.steps) if self.due.capture else None
            proof = self.proving.begin(self.steps, self.sharing.inputs.key, whole=whole) if self.due.capture else None
            measure = self.plan.measures and self.observations.rows is None
            self.capture.begin_step(keys, self.steps, measure=measure, proof=proof)

    def settle(self) -> None:
        """Observe what the last applied updates have shown, see :meth:`Sharing.settled`. Collective."""
        if (observations := self.sharing.settled(self.observations, self.plan)) is not None:
            self.observe(observations)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of what a resumed run needs; factors: see :meth:`FactorUpdates.state_dict`."""
        return {
            "steps": self.steps,
            "peak_lr": dict(self.peak_lr),
            "observations": self.observations,
            "layers": dict(self.state),
            "factors": self.curvature.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, decompose: bool = False) -> None:
        """Continue from :meth:`state_dict`; what is missing in it begins empty. Collective.

        Args:
            decompose: all factors, now: the state has no eigenbases, or those of another method.
        """
        self.torn = False
        if state.get("observations", self.observations) not in (Observations(), self.observations):
            self.observe(state["observations"])
        self.curvature.load_state_dict(state.get("factors", {}))
        self.state = dict(state.get("layers", {}))
        self.state |= {layer.name: self._empty(layer) for layer in self.owned if layer.name not in self.state}
        self.steps, self.peak_lr = state.get("steps", 0), dict(state.get("peak_lr", {}))
        self.begins = {name for name, of in self.state.items() if not (self.steps or (state and of.moments_begun))}
        self.proving.restart(resumed=self.steps > 0)
        self.direction.forget()
        self.sharing.updates = None
        if decompose:
            draft = self.curvature.redecomposed(self.steps)
            self._broadcast(draft, *self.curvature.scalars(draft))
            self._rebase(self.state, self._take_arrivals(draft, self.state))
            self.curvature.commit(draft)
        self.resume()

    def close(self) -> None:
        """Give back hooks and process group. Local, and harmless when repeated."""
        self.capture.remove()
        self.channel.close()

    def observe(self, observations: Observations) -> None:
        """Change the plan by these observations, the same on every rank: which layers share an A, a factor's rows."""
        if observations.groups is not None:
            self.sharing.inputs.use(observations.groups)
        self.observations, before, self.plan = observations, self.plan, self.plan.with_observations(observations)
        if self.plan != before:
            state = self.curvature.state_dict()  # empty, but after a checkpoint that did not know it
            self.curvature = self._factor_updates()
            self.curvature.load_state_dict(state)
            self.curvature.reducer.begin(self.due.capture, self.steps)  # of a step whose hooks are prepared already
