"""KFACPreconditioner: the data flow of one step, read top to bottom, the same in every engine mode."""

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_kfac.comm.message import Arrivals, Channel, Part, Scalars, deliver
from ds_kfac.comm.reduce import Reducer
from ds_kfac.curvature.eigen import Refreshed
from ds_kfac.directions.base import DirectionSetup, StepContext
from ds_kfac.directions.kfac_gradient import peak_rates
from ds_kfac.metrics import Metrics
from ds_kfac.model.batch import ArgumentReader
from ds_kfac.model.calls import SharedInputs
from ds_kfac.model.capture import Capture
from ds_kfac.model.rows import RowRule
from ds_kfac.plan.plan import Known, Plan
from ds_kfac.schedule.timetable import FactorsDue
from ds_kfac.step.background import Refresher
from ds_kfac.step.draft import Draft, FactorDraft
from ds_kfac.step.factors import FactorUpdates
from ds_kfac.step.gradient_norm import GradientNorm
from ds_kfac.step.layer_states import empty_states, with_new_bases
from ds_kfac.step.sharing import Sharing
from ds_kfac.step.target import Target
from ds_kfac.step.totals import Totals
from ds_kfac.step.watch import Watch
from ds_kfac.update.layer_state import LayerState
from ds_kfac.zero.exchange import GradientExchange


class KFACPreconditioner:
    """Turns the gradients of an engine into K-FAC's just before its own step; the user's optimizer follows.

    Attributes:
        state: layer name -> :class:`LayerState`, of the layers this rank is a gradient worker of.
        curvature: the factors.
        steps: applied steps, the clock of every schedule: it changes in :meth:`commit` only, so all stages of a step
            see the same values, and a skipped step's are used again. DeepSpeed's global_steps counts skipped ones too.
        rule, direction: what becomes of a gathered gradient.
        plan: who does what.
        known: what the first captured batch has shown.
        names: layer -> its name in checkpoints.
        saved: layers that this domain writes there.
    """

    def __init__(self, target: Target, plan: Plan) -> None:
        self.target, self.config, self.plan = target, plan.config, plan
        config = plan.config
        self.known = Known()
        self.layers, self.layout = plan.layers, target.layout
        self.names = {layer.name: target.domain.global_name(layer) for layer in self.layers}
        self.saved = {layer.name for layer in self.layers if target.domain.saves(layer)}
        self.device, self.rank = self.layout.engine.device, self.layout.rank
        self.metrics = Metrics(timings=config.metrics.timings, device=self.device, timers=self.layout.timers)
        self.channel = Channel(self.layout.group)
        self.exchange = GradientExchange(self.layout, self.layers, plan.assignment.workers, plan.gradient_dtypes)
        self.owned = self.exchange.owned
        self.rule, self.moments = target.rule, target.rule.moments(config)
        self.needs_norm = self.rule.needs_norm(target.clips)
        self.setup = DirectionSetup(plan, self.layout, self.exchange, target.inner, self.metrics)
        self.direction = self.rule.direction(self.setup)
        self.refresher: Refresher[Refreshed] = Refresher(self.device)
        self.sharing = Sharing(SharedInputs(plan.sharing_candidates), self.channel)
        self.curvature = self._factor_updates()
        self.watch = Watch([layer.name for layer in self.owned], self.device)
        self.capture = Capture(
            target.model,
            self.layers,
            self.layout.fallback_seed,
            rule=RowRule(config.factor.weight_sharing, config.factor.sample_rows, config.factor.sample_positions),
            inputs=self.sharing.inputs,
            stage=partial(self.metrics.stage, "capture"),
            sampled=config.factor.fisher == "monte_carlo",
            read_batch=ArgumentReader(target.model, count=config.padding.count),
            info_of=target.info_of,
        )
        self.state: dict[str, LayerState] = {}
        self.peak_lr: dict[int, Tensor | float] = {}
        self.damping_scale: Tensor | None = None
        self._begin()

    def _factor_updates(self) -> FactorUpdates:
        plan = self.plan
        reducer = Reducer(
            plan.assignment.factors, plan.assignment.decomposers, self.channel, self.device,
            contributors=plan.contributors, dtype=plan.wire, nbytes=plan.bucket_bytes,
        )  # fmt: skip
        return FactorUpdates(plan, self.channel, reducer, self.refresher, self.metrics, self.device)

    @property
    def due(self) -> FactorsDue:
        """What this step does in addition to preconditioning."""
        return self.curvature.schedule.due(self.steps)

    def step(self) -> Draft:
        """Replace every layer's averaged gradient by its preconditioned one. Collective: enter on every rank.

        Returns what the step computed; nothing of it is kept until :meth:`commit`.
        """
        draft = self.prepare()
        self.precondition(draft)
        self.finish(draft)
        return draft

    @torch.no_grad()
    def prepare(self) -> Draft:
        """The step up to the gradients and eigenbases of this rank's layers. Collective."""
        with torch.autocast(self.device.type, enabled=False):  # a user may call engine.step() under autocast
            stage = self.metrics.stage
            self.layout.begin()
            self.metrics.begin()
            # Now, not in commit: DeepSpeed's scheduler steps in between.
            scheduler = self.layout.engine.lr_scheduler if self.plan.clip_lr == "peak" else None
            peak_lr = peak_rates(self.layout.optimizer.param_groups, self.peak_lr, scheduler)
            measured, due, sums, reducer = self.capture.measured or {}, self.due, {}, self.curvature.reducer
            self.capture.end_backward()
            if due.capture:
                self.metrics.step_counts["parted_inputs"] += self.sharing.leave_out(self.capture.sums)
                with stage("reduce"):
                    sums = reducer.reduce(self.capture.sums, due.capture, self.steps)
                self.capture.sums = {}
                if (known := self.sharing.learned(self.known, self.curvature, measured)) is not None:
                    self.learn(known)
            curvature, factors = self.curvature, self.curvature.draft(self.steps, due)
            if due.capture:
                with stage("reduce"):
                    curvature.update(factors, sums, reducer.contributors)
                sums = {}
            with stage("refresh"):
                curvature.decompose(factors)
            with stage("relayout"):
                gradients, norm = self._gather(factors)
                states = with_new_bases(self.state, self.owned, curvature, factors)
            return Draft(factors, peak_lr, norm, states, gradients)

    @torch.no_grad()
    def precondition(self, draft: Draft, damping_scale: Tensor | None = None) -> None:
        """This rank's results. ``damping_scale``: of adaptive damping, where it begins."""
        with torch.autocast(self.device.type, enabled=False), self.metrics.stage("precondition"):
            draft.damping_scale = self.damping_scale if damping_scale is None else damping_scale
            context = StepContext(self.steps, draft.norm, draft.peak_lr, draft.damping_scale)
            draft.local = self.direction.local(context, draft.gradients, draft.states)

    def numbers(self, draft: Draft) -> Tensor:
        """This rank's part of the direction's numbers: their sum over all ranks is that over all layers."""
        return torch.stack(draft.local.numbers) / self.plan.workers

    @torch.no_grad()
    def finish(self, draft: Draft, totals: Tensor | None = None) -> None:
        """The rest of the step. ``totals``: the sum of :meth:`numbers`, if other ranks have layers too. Collective."""
        with torch.autocast(self.device.type, enabled=False), self.metrics.stage("relayout"):
            self._scatter(draft, totals)

    def commit(self, draft: Draft, *, applied: bool) -> None:
        """After the user's optimizer: keep the new state if its step was applied, else leave everything as it was."""
        captured = draft.factors.due.capture
        self.layout.end()
        self.curvature.commit(draft.factors, applied=applied)
        if applied:
            self.watch.step(draft.local.left_out, look=bool(captured))
            self.state, self.peak_lr, self.damping_scale = draft.local.kept(), draft.peak_lr, draft.damping_scale
            self.metrics.step_counts["factor_updates"] += bool(captured)
            self.metrics.step_counts["captured_elements"] += self.curvature.elements(captured)
            self.steps += 1
        self.metrics.end(applied=applied)
        self.resume()

    def resume(self) -> None:
        """Make ready for the step after ``state`` and ``steps``, which a checkpoint may have set."""
        keys, measure = self.due.capture, self.plan.measures and self.known.rows is None
        sums = self.curvature.reducer.empty(keys, self.steps) if keys else None
        self.capture.begin_step(sums, self.steps, measure=measure)

    def reset(self) -> None:
        """Start afresh: no factors, no eigenbases, step 0."""
        self._begin()

    def _begin(self) -> None:
        self.state = empty_states(self.owned, self.device, self.moments, self.plan.form)
        self.steps, self.peak_lr, self.damping_scale = 0, {}, None
        self.direction.rotations.clear()
        self.curvature.reset()
        self.resume()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of this rank, in its own names: steps, peak_lr, known, layers (name -> state),
        factors (see :meth:`FactorUpdates.state_dict`)."""
        return {
            "steps": self.steps,
            "peak_lr": dict(self.peak_lr),
            "damping_scale": self.damping_scale,
            "known": self.known,
            "layers": dict(self.state),
            "factors": self.curvature.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, decompose: bool = False) -> None:
        """Continue from :meth:`state_dict`. Collective. Layers and factors that it lacks begin empty; ``decompose`` all
        factors if eigenbases are missing, or of another form."""
        self.reset()
        if state["known"] != Known():
            self.learn(state["known"])
        self.curvature.load_state_dict(state["factors"])
        self.state |= state["layers"]
        self.steps, self.peak_lr = state["steps"], dict(state["peak_lr"])
        self.damping_scale = state["damping_scale"]
        if decompose:
            self.redecompose()
        else:
            self.resume()

    def redecompose(self) -> None:
        """Decompose all factors and deliver their eigenbases, outside of a step. Collective."""
        draft = self.curvature.redecomposed(self.steps)
        self._broadcast(draft, self.curvature.scalar_names(draft), self.curvature.scalars(draft))
        self.state = with_new_bases(self.state, self.owned, self.curvature, draft)
        self.curvature.keep(draft)
        self.resume()

    def close(self) -> None:
        """Give back hooks, thread and process group. Local, and harmless when repeated."""
        self.capture.remove()
        self.refresher.close()
        self.channel.close()

    @property
    def state_nbytes(self) -> int:
        """Bytes of factors and eigenbases on this rank."""
        bases = {id(basis): basis.nbytes for state in self.state.values() for basis in (state.A, state.G) if basis}
        return sum(state.nbytes for state in self.curvature.factors.values()) + sum(bases.values())

    @property
    def moments_nbytes(self) -> int:
        """Bytes of the moments of the layers preconditioned here."""
        return sum(state.moments_nbytes for state in self.state.values())

    def _gather(self, draft: FactorDraft) -> tuple[dict[str, Tensor], Tensor | None]:
        """Own layers' gradients, and the norm of all gradients if it is asked for; new eigenbases and scalars arrive in
        the same message and go to the draft."""
        names, scalars = self.curvature.scalar_names(draft), self.curvature.scalars(draft)
        norm = GradientNorm(self.target, names, scalars, self.rank) if self.needs_norm else None
        (gradients,) = self._broadcast(draft, names, scalars, self.exchange.gather_part)
        return self.exchange.gathered(gradients), None if norm is None else norm.total(draft.scalars)

    def _broadcast(
        self, draft: FactorDraft, names: list[list[Hashable]], scalars: dict[Hashable, Tensor], *others: Part
    ) -> list[Arrivals]:
        """New eigenbases and scalars, which go to the draft; returns what arrived of ``others`` in the same message."""
        table = Scalars(names, self.rank)
        parts = (*others, *self.curvature.parts(draft), table.part(scalars, self.device))
        *arrivals, received = deliver(parts, self.channel, self.device)
        self.curvature.receive(draft, arrivals[len(others) :], table.named(received))
        return arrivals[: len(others)]

    def totals(self, draft: Draft) -> Totals:
        """What travels with the results."""
        return Totals(self.plan, self.rank, self.device, draft, self.metrics, travels=self.curvature.travels)

    def _scatter(self, draft: Draft, sums: Tensor | None) -> None:
        """Results to whoever holds a shard of them, with what the direction and the metrics sum over all layers."""
        totals, outbox, rest = self.totals(draft), draft.local.outbox, draft.local.results
        for layer in self.owned:
            if layer.name in rest:
                outbox.add(layer, rest.pop(layer.name))
        results, received = deliver((outbox.part, totals.part), self.channel, self.device, outbox.packed)
        numbers, ready = totals.read(received)
        numbers, context = numbers if sums is None else sums, StepContext(self.steps, None, draft.peak_lr)
        scales = self.direction.finish(context, draft.local, numbers.unbind(), ready)
        self.exchange.write(outbox.own, results, scales)

    def learn(self, known: Known) -> None:
        """Keep one A for each of these groups of layers from now on, and take its rows from as many ranks as have them.
        Call on every rank with the same."""
        if known.groups is not None:
            self.sharing.inputs.use(known.groups)
        self.known, before, self.plan = known, self.plan, self.plan.knowing(known)
        if self.plan != before:
            state = self.curvature.state_dict()  # empty, but after a checkpoint that did not know it
            self.curvature = self._factor_updates()
            self.curvature.load_state_dict(state)
