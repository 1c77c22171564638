"""KFACOptimizer: the data flow of one step, read top to bottom, the same in every engine mode."""

from collections.abc import Hashable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ds_kfac.adam_direction import AdamDirection
from ds_kfac.adamw import KFACAdamWStep
from ds_kfac.batch_info import ArgumentReader
from ds_kfac.board import Board
from ds_kfac.capture import Capture
from ds_kfac.config import KFACConfig
from ds_kfac.curvature import Curvature
from ds_kfac.direction import Direction, KFACGradient, Local, Now, peak_rates
from ds_kfac.eigenbasis import Refreshed
from ds_kfac.layer_state import LayerState
from ds_kfac.mail import deliver
from ds_kfac.metrics import Metrics
from ds_kfac.notices import limited
from ds_kfac.planning import Plan
from ds_kfac.reducer import Reducer
from ds_kfac.refresher import Refresher
from ds_kfac.rows import RowRule
from ds_kfac.shared_inputs import SharedInputs
from ds_kfac.sharing import Sharing, copy_shared, with_common_bases
from ds_kfac.target import Target
from ds_kfac.timetable import FactorsDue
from ds_kfac.traffic import Channel
from ds_kfac.watch import Watch
from ds_kfac.zero.exchange import GradientExchange


class KFACOptimizer:
    """Turns the gradients of an engine into K-FAC's just before its own step; the user's optimizer follows.

    Attributes:
        state: layer name -> :class:`LayerState`, of the layers this rank is a gradient worker of.
        curvature: factors and eigenbases.
        steps: applied steps, the clock of every schedule: it changes in :meth:`commit` only, so all stages of a step
            see the same values, and a skipped step's are used again. DeepSpeed's global_steps counts skipped ones too.
        direction: what becomes of a gathered gradient.
        plan: who does what; ``unshared`` as it was before layers were found to share their inputs.
        groups: those layers, None as long as they are not known; fewer when some have got inputs of their own.
    """

    def __init__(self, target: Target, config: KFACConfig, plan: Plan) -> None:
        self.target, self.config, self.plan, self.unshared = target, config, plan, plan
        self.groups: tuple[tuple[str, ...], ...] | None = None
        self.layers, self.layout = target.layers, target.layout
        self.device, self.rank = self.layout.engine.device, self.layout.rank
        self.metrics = Metrics(timings=config.metrics.timings, device=self.device, timers=self.layout.timers)
        self.channel = Channel(self.layout.group)
        self.exchange = GradientExchange(self.layout, self.layers, plan.assignment.workers, plan.gradient_dtypes)
        self.owned = self.exchange.owned
        self.clip_lr = config.preconditioner.kl_clip_lr or ("peak" if target.scheduled_lr else "current")
        self.direction: Direction
        if isinstance(target.inner, KFACAdamWStep):
            self.direction = AdamDirection(config, self.layout, self.exchange, target.inner)
        else:
            self.direction = KFACGradient(config, self.layout, self.exchange, self.metrics, clip_lr=self.clip_lr)
        self.refresher: Refresher[Refreshed] = Refresher(self.device)
        self.curvature = self._curvature()
        self.state: dict[str, LayerState] = {}
        self.watch = Watch([layer.name for layer in self.owned], self.device)
        self.steps = 0
        self.peak_lr: dict[int, Tensor | float] = {}
        self._told: Mapping[Hashable, Tensor] = {}
        self.capture = Capture(
            target.model,
            self.layers,
            lambda: self.curvature.reducer.allocate(self.due.capture),
            self.layout.fallback_seed,
            rule=RowRule(config.factor.weight_sharing, config.factor.sample_rows),
            inputs=SharedInputs(plan.sharing_candidates),
            stage=lambda: self.metrics.stage("capture"),
            sampled=config.factor.fisher == "monte_carlo",
            read_batch=ArgumentReader(target.model, **config.padding.arguments),
            info_of=target.info_of,
        )
        self.capture.on_rows = lambda *rows: self.curvature.reducer.rows_added(*rows)
        self.capture.gone = lambda *rows: self.curvature.reducer.gone(*rows)
        self.sharing = Sharing(self.capture.inputs, self.channel)
        self._begin()

    def _curvature(self) -> Curvature:
        plan, config, world = self.plan, self.config, self.channel.world
        reducer = Reducer(
            self.layers,
            plan.assignment.factors,
            plan.assignment.decomposers,
            self.channel,
            self.device,
            dtype=plan.wire,
            error_feedback=config.communication.error_feedback,
            last_micro_batch=self.layout.last_micro_batch if config.communication.overlap and world > 1 else None,
            flag=lambda: bool(self.capture.inputs.broken),
        )
        return Curvature(plan, self.channel, reducer, self.refresher, config, self.metrics, self.device)

    @property
    def due(self) -> FactorsDue:
        """What this step has to do beside preconditioning."""
        return self.curvature.agenda.due(self.steps)

    def step(self) -> None:
        """Replace every layer's averaged gradient by its preconditioned one. Collective: enter on every rank.

        Nothing of it is kept until :meth:`commit`.
        """
        self.prepare()
        self.finish()

    @torch.no_grad()
    def prepare(self) -> Tensor:
        """The step up to this rank's results. Collective.

        Returns its part of the direction's numbers: their sum over all ranks is that over all layers.
        """
        with torch.autocast(self.device.type, enabled=False):  # a user may call engine.step() under autocast
            self._prepare(self.due)
            return torch.stack(self._local.numbers) / self.plan.workers

    @torch.no_grad()
    def finish(self, totals: Tensor | None = None) -> None:
        """The rest of the step. Collective.

        Args:
            totals: the sum of what :meth:`prepare` returned; None: other ranks than these have no layers.
        """
        with torch.autocast(self.device.type, enabled=False), self.metrics.stage("relayout"):
            self._scatter(self._local, totals)

    def _prepare(self, due: FactorsDue) -> None:
        stage, curvature = self.metrics.stage, self.curvature
        self.layout.begin()
        curvature.begin()
        self.metrics.begin()
        # Now, not in commit: DeepSpeed's scheduler steps in between.
        self._next_peak_lr = peak_rates(self.layout.optimizer.param_groups, self.peak_lr)
        self.capture.take()
        if due.capture:
            with stage("reduce"):
                curvature.fold(self.steps, due)
            if curvature.reducer.late:
                self.metrics.step_counts["late_calls"] += curvature.reducer.late
        with stage("refresh"):
            curvature.decompose(self.steps, due)
        with stage("relayout"):
            gradients, norm, told = self._gather(due)
        with stage("precondition"):
            self._next = self._states(told)
            self._local = self.direction.local(Now(self.steps, norm, self._next_peak_lr), gradients, self._next)
            self._next = self._local.states
        self._told = told

    def commit(self, *, applied: bool) -> None:
        """After the user's optimizer: keep the new state if its step was applied, else leave everything as it was."""
        due = self.due
        self.curvature.commit(self.steps, due, self._told, applied=applied)
        if applied:
            self.watch.step(self._local.left_out, look=bool(due.capture))
            self.state, self.peak_lr = self._next, self._next_peak_lr
            self.metrics.step_counts["factor_updates"] += bool(due.capture)
            self.metrics.step_counts["captured_elements"] += self.curvature.elements(due.capture)
            self.steps += 1
        self.metrics.end(applied=applied)
        if due.capture and self.capture.inputs.searching:
            self.share(self.sharing.found(self.curvature))
        elif self.groups and self.due.capture and self.sharing.parted():
            self.share(self.sharing.lasting(self.groups, self.curvature))
        elif due.capture:
            self.sharing.note(self.curvature.reducer.flagged)
        self.resume()

    def resume(self) -> None:
        """Make ready for the step after ``state`` and ``steps``, which a checkpoint may have set."""
        self._next, self._next_peak_lr = self.state, self.peak_lr
        self._told = {}
        self.capture.active, self.capture.rows.turn = bool(self.due.capture), self.steps

    def reset(self) -> None:
        """Start afresh: no factors, no eigenbases, step 0. Collective."""
        self.curvature.reducer.drain(self.due.capture)
        self._begin()

    def _begin(self) -> None:
        self.state = {
            layer.name: LayerState.empty(layer, self.device, moments=self.direction.moments, method=self.plan.method)
            for layer in self.owned
        }
        self.steps, self.peak_lr = 0, {}
        self.direction.rotations.clear()
        self.capture.take()
        self.sharing.forget()
        self.curvature.reset()
        self.resume()

    def redecompose(self) -> None:
        """Decompose all factors and deliver their eigenbases, outside of a step. Collective."""
        self.curvature.redecompose(self.steps)
        nothing = FactorsDue(frozenset(), frozenset())
        board = Board(self.curvature.told(nothing), self.rank)
        legs = (*self.curvature.legs(), board.leg(self.curvature.numbers(), self.device))
        *arrivals, received = deliver(legs, self.channel, self.device)
        told = board.named(received)
        self._bases, _ = self.curvature.arrived(arrivals, told)
        self.state = self._states(told)
        self.curvature.keep()
        self.resume()

    def close(self) -> None:
        """Give back hooks, thread and process group. Local, and harmless when repeated."""
        self.capture.remove()
        self.refresher.close()
        self.channel.close()

    @property
    def state_nbytes(self) -> int:
        """Bytes of factors, eigenbases and corrected eigenvalues on this rank."""
        bases = {id(basis): basis.nbytes for state in self.state.values() for basis in (state.A, state.G) if basis}
        corrected = sum(state.moments_nbytes for state in self.state.values() if state.corrected)
        return self.curvature.nbytes(bases) + corrected

    @property
    def adam_nbytes(self) -> int:
        """Bytes of Adam's moments of the layers preconditioned here; 0 unless the optimizer is KFACAdamW."""
        return sum(state.adam.nbytes for state in self.state.values() if state.adam)

    # the stages of a step

    def _gather(self, due: FactorsDue) -> tuple[dict[str, Tensor], Tensor | None, dict[Hashable, Tensor]]:
        """Own layers' gradients, the norm of all gradients if it is asked for, and what the ranks tell each other; new
        eigenbases arrive with them, in the same message."""
        norm = self.layout.squared_norm() + self.target.rest.squared_norm() if self.direction.needs_norm else None
        names, numbers = self.curvature.told(due), self.curvature.numbers()
        summed = norm is not None and not self.layout.replicated
        if norm is not None and summed:
            for rank in range(self.channel.world):
                names[rank].append(("norm", rank))
            numbers["norm", self.rank] = norm.sqrt()  # in fp32, where its square might be infinite
        board = Board(names, self.rank)
        legs = (self.exchange.gather_leg, *self.curvature.legs(), board.leg(numbers, self.device))
        gradients, *arrivals, received = deliver(legs, self.channel, self.device)
        told = board.named(received)
        if summed:
            norm = torch.stack([told["norm", rank] for rank in range(self.channel.world)]).double().square().sum()
        self._bases, self._failed = self.curvature.arrived(arrivals, told)
        return self.exchange.gathered(gradients), None if norm is None else norm.sqrt(), told

    def _states(self, told: Mapping[Hashable, Tensor]) -> dict[str, LayerState]:
        """Of own layers, with the eigenbases that have just arrived."""
        states, carry = dict(self.state), self.config.eigenbasis.carry_moments
        for layer in self.owned:
            state, keys = states[layer.name], self.curvature.of_layer.get(layer.name, {})
            terms = self.curvature.terms_of(layer, told)
            if terms is not None:
                state = replace(state, terms=torch.where(terms > 0, terms, state.terms))
            new = {side: self._bases[spec.key] for side, spec in keys.items() if spec.key in self._bases}
            states[layer.name] = state.rebased(**new, carry=carry) if new else state
        return states

    def _scatter(self, local: Local, sums: Tensor | None) -> None:
        """Results to whoever holds a shard of them, with what the direction and the metrics sum over all layers."""
        told = self.curvature.travels  # by the decomposers, who are others than the layers' workers
        failed = 0 if told else self.metrics.step_counts["refresh_failures"]
        counts = local.counts(failed, None if told else self.curvature.next.limited)
        prepared = torch.zeros(len(self.layers), device=self.device)
        for index, layer in enumerate(self.layers):
            if layer.name in local.states and local.states[layer.name].prepared:
                prepared[index].fill_(1.0)
        own = torch.cat([torch.stack([*local.numbers, *counts]), prepared])
        board = Board([range(len(own))] * self.channel.world, self.rank, self.plan.rows)
        leg, flats = self.exchange.scatter_leg(local.results)
        results, received = deliver((leg, board.leg(dict(enumerate(own)), self.device)), self.channel, self.device)
        totals = torch.stack(list(board.read(received).values())).sum(dim=0)
        rest = totals[len(local.numbers) :]
        numbers = totals[: len(local.numbers)] if sums is None else sums
        summary = self.metrics.step_summary
        summary[: len(counts)] = rest[: len(counts)]
        summary[2].add_(self._failed)  # a fill: numbers from a list would be copied from the host
        summary[-1].add_(limited(self._told))
        ready = {layer.name: flag > 0 for layer, flag in zip(self.layers, rest[len(counts) :], strict=True)}
        now = Now(self.steps, None, self._next_peak_lr)
        self.exchange.write(flats, results, self.direction.finish(now, local, numbers.unbind(), ready))

    # layers that share their input

    def share(self, groups: tuple[tuple[str, ...], ...]) -> None:
        """Keep one A for each of these groups of layers from now on. Call on every rank with the same groups."""
        self.capture.inputs.use(groups)
        self.groups = groups
        if not groups and self.plan is self.unshared:
            return
        self.plan = self.unshared.sharing(groups)
        old, self.curvature = self.curvature, self._curvature()
        self.curvature.take_over(old)
        copy_shared(old, self.curvature)
        self.state = with_common_bases(self.state, self.curvature, carry=self.config.eigenbasis.carry_moments)
