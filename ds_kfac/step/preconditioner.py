"""KFACPreconditioner: the data flow of one step, read top to bottom, the same in every engine mode.

precondition    factors are updated and decomposed; gradients and new eigenbases come to the gradient workers; results
scatter         results go to whoever holds a slice of them; then DeepSpeed's inner optimizer steps with what it finds

It runs when the step is certain (``ds_kfac/zero/seam.py``), so state changes in place, and once.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_kfac.assignment.costs import FactorSpec
from ds_kfac.comm.message import Channel, SummedVector, deliver
from ds_kfac.curvature.methods import Decomposition
from ds_kfac.directions.direction import StepContext
from ds_kfac.directions.kfac_gradient import peak_rates
from ds_kfac.metrics import SUMMARY, Metrics
from ds_kfac.model.capture import Capture
from ds_kfac.model.rows import RowSums
from ds_kfac.model.shared import SharedInputs
from ds_kfac.ops.host_copy import HostCopy
from ds_kfac.plan.plan import Observations, Plan
from ds_kfac.schedule.timetable import FactorsDue
from ds_kfac.step.factors import FactorStep, FactorUpdates
from ds_kfac.step.messages import FAILED, NONE_UNUSUAL, UNUSUAL, Sharing, unusual
from ds_kfac.step.proving import Proving, Verdict
from ds_kfac.step.view import EngineView
from ds_kfac.step.warner import LayerWarner
from ds_kfac.update.state import LayerState
from ds_kfac.zero.exchange import GradientExchange, Gradients, Results


class KFACPreconditioner:
    """Turns the gradients of an engine into K-FAC's just before its inner optimizer steps.

    Attributes:
        steps: applied steps, the clock of every schedule. DeepSpeed's global_steps counts skipped steps, too.
        due: factors that the next step updates, and those that it decomposes.
        curvature: the factors.
        direction: the rule's steps, and what is kept of this rank's layers for them.
        observations: what the first captured batch has shown.
        moments: what is kept of gradients; None: nothing.
        names: layer name -> its name in checkpoints.
        left_out: see :meth:`LayerWarner.step`.
        saved: names of layers that this domain writes to checkpoints.
        outcome: of this step's first half; None between steps.
        judged: whether the last step has proven rows.
    """

    def __init__(self, engine_view: EngineView, plan: Plan) -> None:
        self.engine_view, self.config, self.plan = engine_view, plan.config, plan
        self.observations = Observations()
        self.layers, self.layout, self.seam = plan.layers, engine_view.layout, engine_view.seam
        self.names = {layer.name: engine_view.domain.global_name(layer) for layer in self.layers}
        first = engine_view.domain.shard[0] == 0  # of those that have copies of a layer
        self.saved = {layer.name for layer in self.layers if layer.copies == 1 or first}
        self.device, self.rank = self.layout.engine.device, self.layout.rank
        engine = self.layout.engine
        self.metrics = Metrics(self.device, engine.timers if engine.wall_clock_breakdown() else None)
        self.channel = Channel(self.layout.group)
        self.exchange = GradientExchange(self.layout, self.layers, plan.assignment.workers, plan.gradient_dtypes)
        self.owned = self.exchange.owned
        self.rule = engine_view.rule
        self.moments = self.rule.moments(self.config)
        self.direction = self.rule.direction(plan, self.exchange, engine_view.inner, self.metrics)
        self.places = {
            name: (group, index) for group in self.direction.layer_groups for index, name in enumerate(group.names)
        }
        self.sharing = Sharing(SharedInputs(plan.sharing_candidates), self.channel)
        self.curvature = self._factor_updates()
        self.warner = LayerWarner(self.direction.names)
        self.left_out: Tensor | float = 0.0
        self.capture = Capture(
            engine_view.model,
            self.layers,
            self.layout.backward_scale,
            device=torch.device(self.device),
            rows=RowSums(
                self.config.factor.weight_sharing,
                self.config.factor.rows != "all",
                partial(self.metrics.stage, "capture"),
            ),
            inputs=self.sharing.inputs,
            sampled=self.config.factor.fisher == "monte_carlo",
            counts_terms=plan.counts_terms,
        )
        self.proving = Proving(self.layers, self.layout, self.channel)
        self.judged = False
        self.outcome: Any = None
        self._results: Any = None
        self._numbers: Tensor | None = None
        self._context: Any = None
        self._with_flags = self.rule.flags(self.config)
        place = {layer.name: index for index, layer in enumerate(self.layers)}
        places = [place[name] for name in self.direction.names]
        self._flag_places = torch.tensor(places, dtype=torch.long, device=self.device)
        totals = self.rule.numbers + len(SUMMARY) + len(self.layers) * self._with_flags
        self._totals = SummedVector(totals, self.channel.world, self.rank, plan.rows)
        self.peak_lr: dict[int, Tensor | float] = {}
        self.load_state_dict({})

    def _factor_updates(self) -> FactorUpdates:
        averaged_over = self.layout.averaged_over
        return FactorUpdates(self.plan, self.channel, self.metrics, self.device, averaged_over=averaged_over)

    @property
    def state(self) -> dict[str, LayerState]:
        """Layer name -> views of what is kept of the layers that this rank is a gradient worker of."""
        return {name: group.state(index) for name, (group, index) in self.places.items()}

    # a step

    def precondition(self) -> None:
        """The first half: this rank's results. Collective."""
        with torch.autocast(self.device.type, enabled=False):  # a user may call engine.step() under autocast
            update, verdict = None, None
            if self.due.capture:
                update = self._update_factors()
                with self.metrics.stage("relayout"):
                    self._deliver(update)
                self._rebase(update, self.proving.unfit)
            with self.metrics.stage("relayout"):
                (arrived,) = deliver((self.exchange.gather_part,), self.channel, self.device)
                gradients = self.exchange.gathered(arrived)
                del arrived  # which keeps the message
            if self._numbers is not None:
                verdict = self._judge(gradients)
            with self.metrics.stage("precondition"):
                self._context = StepContext(self.steps, self.seam.groups, self._peak_rates())
                self._results = Results(self.exchange)
                self.outcome = self.direction.step(self._context, gradients, self._results)
            self._update, self._verdict = update, verdict

    def scatter(self, sums: Tensor | None = None) -> None:
        """The second half: results go to whoever holds a slice of them, and numbers that are summed over all layers
        travel along. Collective.

        Args:
            sums: of the direction's numbers over the layers of all domains, if there are several.
        """
        outcome, results = self.outcome, self._results
        with torch.autocast(self.device.type, enabled=False), self.metrics.stage("relayout"):
            parts = results.part, self._totals.part(self._own_totals(outcome))
            arrived, received = deliver(parts, self.channel, self.device, results.release)
            counts = self.rule.numbers, self.rule.numbers + len(SUMMARY)
            numbers, summary, flags = self._totals.total(received).tensor_split(counts)
            totals = (numbers if sums is None else sums).unbind()
            scales = self.direction.finish(self._context, outcome, totals, flags > 0 if self._with_flags else None)
            self.exchange.write(results, arrived, scales)
        self._end_step(summary)

    def _captured_sums(self) -> dict[str, Any]:
        """The batch sums of this step's rows, reduced to the factors' owners. What the first batch shows may change the
        plan, before any of its sums are kept. Collective."""
        self.capture.end_step()
        proof = self.capture.proof
        self._numbers = None if proof is None else self.proving.numbers(proof)
        with self.metrics.stage("reduce"):
            sums, self.capture.sums = self.curvature.reducer.reduce(self.capture.sums), {}
        measured = self.capture.measured or {}
        observations = self.sharing.observed(self.observations, self.plan, self.curvature.ready, measured)
        if observations is not None:
            self.observe(observations)
        return sums

    def _update_factors(self) -> FactorStep:
        """Average this step's sums into the factors, and decompose those that are due. Collective."""
        sums = self._captured_sums()
        with self.metrics.stage("reduce"):
            update = self.curvature.update(self.steps, self.due, sums)
        sums.clear()  # before new eigenbases are there
        with self.metrics.stage("refresh"):
            unproven = self.curvature.of_none_but(self.proving.unfit)
            self.curvature.decompose(self.steps, update, self._last_basis, unproven)
        return update

    def _last_basis(self, factor: FactorSpec) -> Decomposition | None:
        """The decomposition of a factor that is in use. An eigen worker has it: it is a gradient worker of one of the
        factor's layers, not always of the first."""
        group, index = next(self.places[name] for name in factor.layers if name in self.places)
        state = group.state(index)
        return state.A if factor.is_A else state.G

    def _deliver(self, update: FactorStep) -> None:
        """Send scalars and new eigenbases, in as many messages as these need. Collective."""
        curvature = self.curvature
        table = curvature.scalars(update)
        numbers = table.part(curvature.values(update), self.device)
        first, *others = curvature.delivery.parts(update.arriving, update.bases, self.device) or [()]
        arrivals = deliver((*first, numbers), self.channel, self.device)
        scalars = table.read(arrivals.pop())
        bases = curvature.delivery.received(arrivals)
        for parts in others:
            del arrivals  # which keep the last message
            arrivals = deliver(parts, self.channel, self.device)
            bases |= curvature.delivery.received(arrivals)
        curvature.receive(self.steps, update, bases, scalars)

    def _judge(self, gradients: Gradients) -> Verdict:
        """Compare the captured rows with the gradients. Layers that fail go on without curvature. Collective."""
        proof, numbers = self.capture.proof, self._numbers
        assert proof is not None and numbers is not None
        verdict = self.proving.verdict(proof, numbers, gradients, self.plan, self.capture.used, self.seam.factor)
        for name in verdict.unfit.keys() & self.places.keys():
            group, index = self.places[name]
            if group.prepared[index]:
                group.leave_basis(index)
        self.curvature.forget(self.curvature.of_none_but(verdict.unfit))
        return verdict

    def _rebase(self, update: FactorStep, unfit: Collection[str] = ()) -> None:
        """Bring layers into their new eigenbases, and moments with them; and take in numbers of loss terms.

        Args:
            unfit: layers that get none, as their rows are not what their gradients are made of.
        """
        for name, (group, index) in self.places.items():
            terms = update.terms.get(name)
            if terms is not None:
                group.terms[index].copy_(torch.where(terms > 0, terms, group.terms[index]))
            keys = self.curvature.of_layer.get(name, {})
            bases = {side: update.bases[spec.key] for side, spec in keys.items() if spec.key in update.bases}
            if bases and name not in unfit:
                group.rebase(index, **bases)
        update.bases.clear()

    def _peak_rates(self) -> dict[int, Tensor | float]:
        if self.rule.optimizer_type is None:  # now: DeepSpeed's scheduler steps before the next step
            scheduler = self.layout.engine.lr_scheduler if self.plan.clip_lr == "peak" else None
            self.peak_lr = peak_rates(self.seam.groups, self.peak_lr, scheduler)
        return self.peak_lr

    def _own_totals(self, outcome: Any) -> Tensor:
        """This rank's part of what is summed over ranks, fp32: the direction's numbers; counts in the order of
        :data:`SUMMARY`; and a flag of each layer, if the direction asks for it."""
        if len(outcome.numbers) != self.rule.numbers:
            raise ValueError(
                f"ds_kfac: {type(self.rule).__name__}.numbers is {self.rule.numbers}, but its Direction.step gave "
                f"{len(outcome.numbers)} scalars in Outcome.numbers; make them the same number"
            )
        update, travels = self._update, self.curvature.travels
        # where eigenbases travel the counts of refreshes and updates have come with them
        failed = 0 if travels or update is None else [*update.outcomes.values()].count(FAILED)
        limited, *empty = NONE_UNUSUAL if travels or update is None else update.unusual
        left_out = outcome.left_out.sum() if isinstance(outcome.left_out, Tensor) else 0.0
        unprepared = sum(not prepared for group in self.direction.layer_groups for prepared in group.prepared)
        counts = [outcome.replaced, unprepared, failed, outcome.unused, left_out, outcome.limited + limited, *empty]
        own = _vector([*outcome.numbers, *counts], self.device)
        if not self._with_flags:
            return own
        flags = torch.zeros(len(self.layers), dtype=torch.float32, device=self.device)
        return torch.cat([own, flags.index_copy_(0, self._flag_places, outcome.flags)])

    def _end_step(self, summary: Tensor) -> None:
        update, outcome = self._update, self.outcome
        if update is not None and self.curvature.travels:
            failed = [*update.outcomes.values()].count(FAILED)  # of all ranks
            summary[[*SUMMARY].index("refresh_failures")].add_(failed)  # numbers from a list would be copied
            summary[-len(UNUSUAL) :].add_(unusual(update.scalars))
        self.metrics.step(summary)
        self.left_out = self.left_out + outcome.left_out
        due = FactorsDue(self.due.capture, self.due.refresh) if update is None else update.due
        similar: Any = {}
        if update is not None and due.capture and self.plan.adaptive is not None:
            similar = HostCopy(torch.stack([update.scalars["similar", key] for key in sorted(due.capture)])).tolist
        self.curvature.timetable.record(self.steps, due, similar)
        self.judged = self._verdict is not None
        if self._verdict is not None:
            self.curvature.decompose_soon(self.proving.record(self._verdict))
        if update is not None:
            self._end_update(update, summary)
        self.outcome = self._results = self._update = self._verdict = self._numbers = None
        self.steps += 1

    def _end_update(self, update: FactorStep, summary: Tensor) -> None:
        due, metrics = update.due, self.metrics
        without = [name for name, (group, index) in self.places.items() if not group.prepared[index]]
        without = [name for name in without if name not in self.proving.unfit]
        frozen = [x for x in self.direction.names if not self.exchange.params[x][0].requires_grad]
        self.warner.step(without, frozen, self.curvature.layers_of(due.capture), self.left_out)
        if self.plan.contributors.counts:
            self.sharing.updates = HostCopy(summary[-1:]), update.missed, self.capture.seen
        metrics.counts["factor_updates"] += 1
        metrics.counts["captured_elements"] += sum(self.curvature.specs[key].side.numel for key in due.capture)

    # between steps

    def skipped(self) -> None:
        """DeepSpeed has skipped a step: what its hooks have seen is dropped."""
        self.metrics.counts["skipped_steps"] += 1

    def resume(self, *, whole: bool = True) -> None:
        """Prepare the hooks for the next step. Call after :attr:`steps` has changed. Collective. After a step that raised
        (``whole`` False) it is local, and drops what that step's hooks have seen."""
        self._numbers = None
        self.due = self.curvature.timetable.due(self.steps)
        if still := self.proving.again:
            self.due = FactorsDue(self.due.capture | (still & self.curvature.specs.keys()), self.due.refresh)
        if self.due.capture and whole:
            self.settle()
        self.seam.measures = False
        if self.due.capture or self.capture.active:
            keys = self.curvature.reducer.begin(self.due.capture, self.steps) if self.due.capture else None
            proof = self.proving.begin(self.steps, self.sharing.inputs.key, whole=whole) if self.due.capture else None
            measure = self.plan.measures and self.observations.rows is None
            self.capture.begin_step(keys, self.steps, measure=measure, proof=proof)
            self.seam.measures = proof is not None

    def settle(self) -> None:
        """Observe what the last applied updates have shown, see :meth:`Sharing.settled`. Collective."""
        if (observations := self.sharing.settled(self.observations, self.plan)) is not None:
            self.observe(observations)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of what a resumed run needs; factors: see :meth:`FactorUpdates.state_dict`. Tensors change with
        the next step."""
        return {
            "steps": self.steps,
            "peak_lr": dict(self.peak_lr),
            "observations": self.observations,
            "layers": self.state,
            "factors": self.curvature.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, decompose: bool = False) -> None:
        """Continue from :meth:`state_dict`; what is missing in it begins empty. Collective.

        Args:
            decompose: all factors, now: the state has no eigenbases, or those of another method.
        """
        if state.get("observations", self.observations) not in (Observations(), self.observations):
            self.observe(state["observations"])
        self.curvature.load_state_dict(state.get("factors", {}))
        layers = state.get("layers", {})
        for name, (group, index) in self.places.items():
            group.load(index, layers.get(name))
        self.steps, self.peak_lr = state.get("steps", 0), dict(state.get("peak_lr", {}))
        self.proving.restart(resumed=self.steps > 0)
        self.direction.loaded()
        self.sharing.updates = None
        self._update = self._verdict = self._numbers = None
        if decompose:
            self._decompose_all()
        self.resume()

    def _decompose_all(self) -> None:
        """Decompose every factor that has data, from scratch. Collective."""
        update = FactorStep(FactorsDue(frozenset(), frozenset(self.curvature.specs)))
        self.curvature.ready.clear()
        self.curvature.decompose(self.steps, update)
        self._deliver(update)
        self._rebase(update)

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


def _vector(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """fp32, of scalars on the device and of what the host knows, of which each is filled in: a list would be copied."""
    known = {x for x in values if not isinstance(x, Tensor)}
    filled = {x: torch.full((), x, device=device, dtype=torch.float32) for x in known}
    return torch.stack([x.float().reshape(()) if isinstance(x, Tensor) else filled[x] for x in values])
