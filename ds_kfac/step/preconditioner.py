"""The data flow of one K-FAC step. It has two stages, which are the same in every engine mode.

precondition    Factors are updated and decomposed. Gradients and new eigenbases are sent to the
                gradient workers (the ranks that precondition a layer), which compute the results.
scatter         Each rank receives the results for the gradients that it holds. DeepSpeed's inner
                optimizer then steps with these results in place of the gradients.

A step runs only when DeepSpeed is certain to apply it (``ds_kfac/zero/seam.py``). K-FAC's state can
therefore change in place, without a backup copy.
"""

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_kfac.assignment.costs import FactorSpec
from ds_kfac.comm.message import Channel, deliver
from ds_kfac.curvature.methods import Decomposition
from ds_kfac.directions.direction import StepContext
from ds_kfac.metrics import Metrics
from ds_kfac.model.capture import Capture
from ds_kfac.model.proof import Proof
from ds_kfac.model.rows import RowSums
from ds_kfac.model.shared import SharedInputs
from ds_kfac.ops.host_copy import HostCopy
from ds_kfac.plan.plan import Observations, Plan
from ds_kfac.schedule.timetable import FactorsDue
from ds_kfac.step.factors import FactorStep, FactorUpdates
from ds_kfac.step.messages import CapturedStep, Sharing
from ds_kfac.step.proving import Proving, Verdict
from ds_kfac.step.totals import Running, Totals
from ds_kfac.step.view import EngineView
from ds_kfac.step.warner import LayerWarner
from ds_kfac.update.state import LayerState
from ds_kfac.zero.exchange import GradientExchange, Gradients


class KFACPreconditioner:
    """Replaces the gradients of an engine by K-FAC's results, just before the engine's inner
    optimizer steps.

    Attributes:
        steps: number of applied steps. All schedules count these steps. (DeepSpeed's global_steps
            also counts skipped steps.)
        due: keys of the factors for which the next step collects statistics, and keys of the
            factors that it decomposes.
        curvature: the factors of this rank.
        direction: computes the update rule's results, and keeps the state of this rank's layers.
        observations: what captured batches have shown, see :class:`Observations`.
        moments: class of the moments that the update rule keeps; None if it keeps no moments.
        names: layer name -> the layer's name in checkpoints.
        left_out: fp32 [layers on this rank], for each layer the number of steps in which its
            gradient was not used, because it was too large for the moments. 0.0 if the update rule
            uses every gradient.
        saved: names of the layers that this domain writes to checkpoints.
        judged: whether the previous step ran the proof, which compares captured rows with
            gradients.
    """

    def __init__(self, engine_view: EngineView, plan: Plan) -> None:
        self.engine_view = engine_view
        self.config = plan.config
        self.plan = plan
        self.observations = Observations()
        self.layers = plan.layers
        self.layout = engine_view.layout
        self.seam = engine_view.seam
        self.names = {layer.name: engine_view.domain.global_name(layer) for layer in self.layers}
        # each tensor-parallel rank has a copy of the layers that are not sharded, but only the
        # first of these ranks saves them
        saves_copies = engine_view.domain.shard[0] == 0
        self.saved = {layer.name for layer in self.layers if layer.copies == 1 or saves_copies}
        self.device = self.layout.engine.device
        self.rank = self.layout.rank
        engine = self.layout.engine
        self.metrics = Metrics(
            self.device, engine.timers if engine.wall_clock_breakdown() else None
        )
        self.channel = Channel(self.layout.group)
        self.exchange = GradientExchange(
            self.layout, self.layers, plan.assignment.workers, plan.gradient_dtypes
        )
        self.worker_layers = self.exchange.worker_layers
        self.rule = engine_view.rule
        self.moments = self.rule.moments(self.config)
        self.direction = self.rule.direction(plan, self.exchange, engine_view.inner, self.metrics)
        self.places = {
            name: (group, index)
            for group in self.direction.layer_groups
            for index, name in enumerate(group.names)
        }
        self.sharing = Sharing(SharedInputs(plan.sharing_candidates), self.channel)
        self._unsettled: deque[CapturedStep] = deque()
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
            mean_over_step=self.config.factor.mean_over_step,
        )
        self.proving = Proving(self.layers, self.layout, self.channel)
        self.judged = False
        self._numbers: Tensor | None = None
        self.totals = Totals(self.rule, plan, self.direction, self.channel, self.device)
        self.load_state_dict({})

    def _factor_updates(self) -> FactorUpdates:
        averaged_over = self.layout.averaged_over
        return FactorUpdates(
            self.plan, self.channel, self.metrics, self.device, averaged_over=averaged_over
        )

    @property
    def state(self) -> dict[str, LayerState]:
        """Layer name -> views of the layer's state, for the layers that this rank preconditions."""
        return {name: group.state(index) for name, (group, index) in self.places.items()}

    # a step

    def compute_results(self) -> Running:
        """Update the factors and eigenbases that are due, gather gradients, and precondition them.

        Write the results to the exchange's outbox or to DeepSpeed's memory. Return the state that
        :meth:`scatter` needs. Collective.
        """
        # a user may call engine.step() under autocast
        with torch.autocast(self.device.type, enabled=False):
            update = self._update_factors() if self.due.capture else None
            gradients = self._gather()
            verdict = None
            if self.capture.proof is not None:
                verdict = self._judge(self.capture.proof, gradients)
            factor = self.seam.factor
            context = StepContext(
                self.steps,
                self.seam.groups,
                factor_is_zero=None if factor is None else factor == 0,
            )
            with self.metrics.stage("precondition"):
                outcome = self.direction.step(context, gradients)
            return Running(context, outcome, update, verdict)

    def scatter(self, running: Running, sums: Tensor | None = None) -> None:
        """Send results to the ranks that hold their shards, and scale them by kl-clip. Collective.

        Args:
            sums: the scalars in ``Outcome.numbers``, summed over the layers of all domains. None if
                the job has only one domain. The scalars are then sent with the results.
        """
        context = running.context
        outcome = running.outcome
        with torch.autocast(self.device.type, enabled=False), self.metrics.stage("relayout"):
            parts = self.exchange.scatter_part(), self.totals.part(running)
            results, received = deliver(parts, self.channel, self.device, self.exchange.sent_off)
            numbers, summary, flags = self.totals.read(received, running)
            if sums is not None:
                numbers = sums
            scales = self.direction.finish(context, outcome, numbers.unbind(), flags)
            self.exchange.write(results, scales)
        self._record(running, summary)
        self.steps += 1

    def _update_factors(self) -> FactorStep:
        """Send this step's batch sums to the owners, which add them to the running averages
        and decompose the factors that are due. Rotate the layers' state into the new eigenbases.
        Collective."""
        self.capture.end_step()
        if self.capture.proof is not None:
            self._numbers = self.proving.numbers(self.capture.proof)
        with self.metrics.stage("reduce"):
            sums = self.curvature.reducer.reduce(self.capture.sums)
            self.capture.sums = {}
            self._observe_first_batch()
            update = self.curvature.update(self.steps, self.due, sums)
        sums.clear()  # frees memory before new eigenbases are allocated
        with self.metrics.stage("refresh"):
            unproven = self.curvature.of_none_but(self.proving.unfit)
            self.curvature.decompose(self.steps, update, self._last_basis, unproven)
        with self.metrics.stage("relayout"):
            self.curvature.deliver(self.steps, update)
        self._rebase(update)
        return update

    def _observe_first_batch(self) -> None:
        """Agree with the other ranks on what the first captured batch shows (see :class:`Sharing`).
        This may replace ``self.curvature``, whose factors are still empty. Local if earlier steps
        have already shown everything, otherwise collective."""
        observations = self.sharing.observed(
            self.observations, self.plan, self.curvature.ready, self.capture.measured or {}
        )
        if observations is not None:
            self.observe(observations)

    def _last_basis(self, factor: FactorSpec) -> Decomposition | None:
        """Return the decomposition that the factor's layers use now, or None if the factor was
        never decomposed. This rank must be the factor's owner. An owner is a gradient
        worker of at least one of the factor's layers, but not always of the first one."""
        group, index = next(self.places[name] for name in factor.layers if name in self.places)
        state = group.state(index)
        return state.A if factor.is_A else state.G

    def _gather(self) -> Gradients:
        """Return the complete gradients of this rank's layers. Collective."""
        with self.metrics.stage("relayout"):
            self.exchange.begin()
            (arrived,) = deliver((self.exchange.gather_part,), self.channel, self.device)
            return self.exchange.gathered(arrived)

    def _judge(self, proof: Proof, gradients: Gradients) -> Verdict:
        """Compare the captured rows with the gradients. Layers that fail lose their curvature.
        Collective."""
        numbers = self._numbers
        assert numbers is not None, "a step that proves also captures, so _update_factors() has run"
        self._numbers = None
        verdict = self.proving.verdict(
            proof, numbers, gradients, self.plan, self.capture.used, self.seam.factor
        )
        for name in verdict.unfit.keys() & self.places.keys():
            group, index = self.places[name]
            if group.prepared[index]:
                group.leave_basis(index)
        self.curvature.forget(self.curvature.of_none_but(verdict.unfit))
        return verdict

    def _rebase(self, update: FactorStep) -> None:
        """Replace the eigenbases of layers, rotate the layers' moments into the new eigenbases, and
        update the layers' numbers of loss terms.

        Layers whose rows failed the last proof get no new eigenbases, because their factors are not
        decomposed. (All layers of a factor fail together, see :meth:`Proving.verdict`.)
        """
        for name, (group, index) in self.places.items():
            terms = update.terms.get(name)
            if terms is not None:
                # a batch without loss terms leaves the number as it is
                torch.where(terms > 0, terms, group.terms[index], out=group.terms[index])
            keys = self.curvature.of_layer.get(name, {})
            bases = {
                side: update.bases[spec.key]
                for side, spec in keys.items()
                if spec.key in update.bases
            }
            if bases:
                group.rebase(index, **bases)
        update.bases.clear()

    def _record(self, running: Running, summary: Tensor) -> None:
        """Record the results of a step for schedules, counters and warnings."""
        update = running.update
        verdict = running.verdict
        self.metrics.step(summary)
        self.left_out = self.left_out + running.outcome.left_out
        self.judged = verdict is not None
        if verdict is not None:
            self.proving.record(verdict)
        if update is None:
            self.curvature.timetable.record(self.steps, self.due, {})
            return
        due = update.due
        similar: Any = {}
        if self.plan.adaptive is not None and due.capture:
            similar = HostCopy(
                torch.stack([update.scalars["similar", key] for key in sorted(due.capture)])
            ).tolist
        self.curvature.timetable.record(self.steps, due, similar)
        without = [
            name for name, (group, index) in self.places.items() if not group.prepared[index]
        ]
        without = [name for name in without if name not in self.proving.unfit]
        frozen = [x for x in self.direction.names if not self.exchange.params[x][0].requires_grad]
        self.warner.step(without, frozen, self.curvature.layers_of(due.capture), self.left_out)
        if self.plan.contributors.counts:
            count = HostCopy(summary[-1:])
            self._unsettled.append(
                CapturedStep(self.steps, self.plan, count, update.missed, self.capture.seen)
            )
        self.metrics.counts["factor_updates"] += 1
        elements = sum(self.curvature.specs[key].side.numel for key in due.capture)
        self.metrics.counts["captured_elements"] += elements

    # between steps

    def skipped(self) -> None:
        """Count a step that DeepSpeed has skipped."""
        self.metrics.counts["skipped_steps"] += 1

    def resume(self, *, after_error: bool = False, pending: bool = False) -> None:
        """Prepare the hooks for the next step, and drop the rows that they have captured. Call this
        after :attr:`steps` has changed.

        Args:
            after_error: whether a step or a backward pass has raised an error. If so, the call is
                local, otherwise it is collective.
            pending: whether this rank has gradients of earlier micro-batches. The next step will
                apply these gradients, although their rows are dropped.
        """
        self._numbers = None
        if after_error:
            # frees memory that the next attempt needs
            self.exchange.gradients = {}
            self.exchange.sent_off()
        self.due = self.curvature.timetable.due(self.steps)
        still = self.proving.again
        if still:
            self.due = FactorsDue(
                self.due.capture | (still & self.curvature.specs.keys()), self.due.refresh
            )
        if self.due.capture and not after_error:
            # The step that has just ended is not checked yet, because the host would have to wait
            # for its counts.
            self.settle(before=self.steps - 1)
        if self.due.capture:
            keys = self.curvature.reducer.begin(self.due.capture, self.steps)
            proof = self.proving.begin(
                self.steps, self.sharing.inputs.key, lacks_rows=after_error or pending
            )
            measure = self.plan.measures and self.observations.rows is None
            self.capture.begin_step(keys, self.steps, measure=measure, proof=proof)
        elif self.capture.active:
            self.capture.begin_step(None, self.steps)

    def settle(self, before: int | None = None) -> None:
        """Adapt the plan to "missed" batches of earlier steps, see :meth:`Sharing.settled`.
        Collective.

        Args:
            before: check only steps before this one; None: check all steps.
        """
        while self._unsettled and (before is None or self._unsettled[0].step < before):
            captured = self._unsettled.popleft()
            # skip steps that ran with an older plan, because other ranks contributed to them
            if captured.plan is self.plan:
                observations = self.sharing.settled(captured, self.observations)
                if observations is not None:
                    self.observe(observations)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state that a resumed run needs. The entry "factors" is
        explained in :meth:`FactorUpdates.state_dict`. The tensors are not copies, so the next step
        changes them."""
        return {
            "steps": self.steps,
            **self.direction.state(),
            "observations": self.observations,
            "proofs": self.proving.state(),
            "layers": self.state,
            "factors": self.curvature.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, decompose: bool = False) -> None:
        """Continue from the result of :meth:`state_dict`. Anything missing from that result starts
        empty. Collective.

        Args:
            decompose: whether to decompose all factors now. This is necessary if the state has no
                eigenbases, or if it has the decompositions of another method.
        """
        if state.get("observations", self.observations) not in (Observations(), self.observations):
            self.observe(state["observations"])
        self.curvature.load_state_dict(state.get("factors", {}))
        layers = state.get("layers", {})
        for name, (group, index) in self.places.items():
            group.load(index, layers.get(name))
        self.steps = state.get("steps", 0)
        self.proving.load(state.get("proofs", {}))
        self.direction.load_state(state)
        self._unsettled.clear()
        self._numbers = None
        if decompose:
            self._decompose_all()
        # a program may load between two micro-batches
        self.resume(pending=self.layout.is_waiting(self.layout.engine))

    def _decompose_all(self) -> None:
        """Decompose every factor that has data, from scratch. Collective."""
        update = FactorStep(
            FactorsDue(frozenset(), frozenset(self.curvature.specs)), self.curvature.travels
        )
        self.curvature.ready.clear()
        self.curvature.decompose(self.steps, update)
        self.curvature.deliver(self.steps, update)
        self._rebase(update)

    def close(self) -> None:
        """Remove the hooks and leave the process group. Local. May be called twice."""
        self.capture.remove()
        self.channel.close()

    def observe(self, observations: Observations) -> None:
        """Change the plan to fit these observations, which must be the same on every rank."""
        if observations.groups is not None:
            self.sharing.inputs.use(observations.groups)
        before = self.plan
        self.observations = observations
        self.plan = before.with_observations(observations)
        if self.plan != before:
            # the factors are empty, unless a checkpoint without these observations was loaded
            state = self.curvature.state_dict()
            self.curvature = self._factor_updates()
            self.curvature.load_state_dict(state)
            # the hooks are already prepared for the next step, so prepare the reducer as well
            self.curvature.reducer.begin(self.due.capture, self.steps)
