"""KFACOptimizer: the data flow of one step, read top to bottom, the same in every engine mode."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.utils import logger
from torch import Tensor, nn

from ds_kfac.adam_direction import AdamDirection
from ds_kfac.adamw import KFACAdamWStep
from ds_kfac.assignment import assign_owners
from ds_kfac.batch_info import ArgumentReader, BatchInfo
from ds_kfac.bucket import FactorBucket
from ds_kfac.capture import BatchSums, Capture
from ds_kfac.config import KFACConfig
from ds_kfac.direction import Direction, KFACGradient, Now
from ds_kfac.layer_state import LayerState, decomposable
from ds_kfac.layers.base import LayerSpec
from ds_kfac.metrics import Metrics
from ds_kfac.rows import RowRule
from ds_kfac.schedule import Due
from ds_kfac.zero.exchange import GradientExchange, parameter_names
from ds_kfac.zero.groups import Totals, clone_group
from ds_kfac.zero.layout import ShardLayout


@dataclass(frozen=True)
class Target:
    """What is preconditioned, and where its gradients are.

    Attributes:
        model: the engine's module.
        layers: what is preconditioned.
        layout: where the engine keeps the gradients of ``parameter_names(layers)``.
        rest: where it keeps all others.
        inner: the innermost optimizer, which DeepSpeed wraps.
        scheduled_lr: whether the learning rate follows a schedule.
        model_parallel: whether other ranks train other layers, or other parts of these.
        info_of: of a module's call, given the micro-batch's.
    """

    model: nn.Module
    layers: tuple[LayerSpec, ...]
    layout: ShardLayout
    rest: ShardLayout
    inner: Any
    scheduled_lr: bool
    model_parallel: bool = False
    info_of: Callable[[str, BatchInfo], BatchInfo] | None = None


class KFACOptimizer:
    """Turns the gradients of an engine into K-FAC's just before its own step; the user's optimizer follows.

    Attributes:
        state: layer name -> :class:`LayerState`, of the layers owned by this rank only.
        steps: applied steps, the clock of every schedule: it changes in :meth:`commit` only, so all stages of a step
            see the same values, and a skipped step's are used again. DeepSpeed's global_steps counts skipped ones too.
        direction: what becomes of a gathered gradient.
    """

    def __init__(self, target: Target, config: KFACConfig) -> None:
        self.target, self.config = target, config
        self.layers, self.layout = target.layers, target.layout
        self.device, self.rank = self.layout.engine.device, self.layout.rank
        self.schedule = config.schedule
        index = {name: i for i, name in enumerate(parameter_names(self.layers))}
        self.assignment = assign_owners(
            self.layers,
            {layer.name: self.layout.shards.held([index[name] for name in layer.parameters]) for layer in self.layers},
            world=self.layout.world,
            refresh_interval=self.schedule.final_refresh_interval,  # owners never change: balance the long run
            load_tolerance=config.assignment.load_tolerance,
        )
        self.group = clone_group(self.layout.group)
        self.totals = Totals(self.group, everywhere=target.model_parallel)
        self.exchange = GradientExchange(self.layout, self.layers, self.assignment.owners, self.group)
        self.owned = self.exchange.owned
        self.bucket = FactorBucket.plan(self.layers, self.assignment.owners, self.layout.world)
        self.metrics = Metrics(timings=config.metrics.timings, device=self.device)
        self.clip_lr = config.preconditioner.kl_clip_lr or ("peak" if target.scheduled_lr else "current")
        self.direction: Direction
        if isinstance(target.inner, KFACAdamWStep):
            self.direction = AdamDirection(config, self.layout, self.exchange, target.inner)
        else:
            self.direction = KFACGradient(config, self.layout, self.exchange, self.metrics, clip_lr=self.clip_lr)
        self.state: dict[str, LayerState] = {}
        self.steps = 0
        self.peak_lr: dict[int, Tensor | float] = {}
        self._flat: Tensor | None = None
        self.capture = Capture(
            target.model,
            self.layers,
            self._allocate,
            self._fallback_seed,
            rule=RowRule(config.factor.weight_sharing, config.factor.sample_rows),
            sampled=config.factor.fisher == "monte_carlo",
            read_batch=ArgumentReader(target.model, **config.padding.arguments),
            info_of=target.info_of,
        )
        self.reset()

    def step(self) -> None:
        """Replace every layer's averaged gradient by its preconditioned one. Collective: enter on every rank.

        Nothing of it is kept until :meth:`commit`.
        """
        self.finish(self.totals.sum(self.prepare()))

    @torch.no_grad()
    def prepare(self) -> Tensor:
        """The step up to the own layers' results; returns what has to be summed over all ranks. Collective."""
        with torch.autocast(self.device.type, enabled=False):  # a user may call engine.step() under autocast
            return self._prepare(self.schedule.due(self.steps))

    @torch.no_grad()
    def finish(self, totals: Tensor) -> None:
        """The rest of the step. Collective."""
        with torch.autocast(self.device.type, enabled=False):
            now, local = self._pending
            self.metrics.step_summary = totals[len(local.numbers) :]
            with self.metrics.stage("precondition"):
                results = self.direction.finish(now, local, totals[: len(local.numbers)].unbind())
            with self.metrics.stage("scatter"):
                self.exchange.scatter(results)

    def _prepare(self, due: Due) -> Tensor:
        stage = self.metrics.stage
        self.layout.begin()
        self._next = self.state
        self.metrics.begin()
        # Now, not in commit: DeepSpeed's scheduler steps in between.
        lrs = [group["lr"] for group in self.layout.optimizer.param_groups]
        self._next_peak_lr = {group: _larger(lr, self.peak_lr.get(group)) for group, lr in enumerate(lrs)}
        norm = self._local_squared_norm() if self.direction.needs_norm else None
        if due.capture:
            with stage("reduce"):
                sums, norm = self._reduce(norm)
                self._next = self._fold(sums)
        elif norm is not None and not self.layout.replicated:
            dist.all_reduce(norm, group=self.group)
        # A layer that has no eigenbasis yet, because it had no data at the last refresh, need not wait for the next.
        waiting = [name for name, state in self._next.items() if due.refresh or (due.capture and state.basis is None)]
        if waiting:
            with stage("refresh"):
                self._next = self._refresh(self._next, waiting)
        with stage("gather"):
            gradients = self.exchange.gather()
        with stage("precondition"):
            now = Now(self.steps, None if norm is None else norm.sqrt(), self._next_peak_lr)
            return self._precondition(gradients, now)

    def commit(self, *, applied: bool) -> None:
        """After the user's optimizer: keep the new state if its step was applied, else leave everything as it was."""
        if applied:
            self.state, self.peak_lr = self._next, self._next_peak_lr
            self.metrics.step_counts["factor_updates"] += self.schedule.due(self.steps).capture
            self.steps += 1
        self.metrics.end(applied=applied)
        self.resume()

    def resume(self) -> None:
        """Make ready for the step after ``state`` and ``steps``, which a checkpoint may have set."""
        self._next, self._next_peak_lr = self.state, self.peak_lr
        self.capture.active, self.capture.turn = self.schedule.due(self.steps).capture, self.steps

    def reset(self) -> None:
        """Start afresh: no factors, no eigenbases, step 0."""
        self.state = {
            layer.name: LayerState.empty(layer, self.device, moments=self.direction.moments) for layer in self.owned
        }
        self.steps, self.peak_lr = 0, {}
        self.capture.take()
        self._flat = None
        self.resume()

    @property
    def state_nbytes(self) -> int:
        """Bytes of factors, eigenbases and corrected eigenvalues on this rank."""
        return sum(state.kfac_nbytes for state in self.state.values())

    @property
    def adam_nbytes(self) -> int:
        """Bytes of Adam's moments of the layers owned here; 0 unless the optimizer is KFACAdamW."""
        return sum(state.adam_nbytes for state in self.state.values())

    # the stages of a step

    def _allocate(self) -> Mapping[str, tuple[BatchSums, ...]]:
        self._flat = torch.zeros(self.bucket.numel, device=self.device)
        return self.bucket.views(self._flat, self.layers)

    def _local_squared_norm(self) -> Tensor:
        """Of all gradients this rank holds."""
        return self.layout.squared_norm() + self.target.rest.squared_norm()

    def _reduce(self, norm: Tensor | None) -> tuple[dict[str, tuple[BatchSums, ...]], Tensor | None]:
        """This step's sums over all ranks, of the layers owned here, and the squared norm's. A rank that saw no rows
        sends zeros."""
        if self.capture.take() is None:
            self._allocate()
        flat, self._flat = self._flat, None
        assert flat is not None  # allocated with the sums
        if norm is not None:
            for place in self.bucket.norms:
                flat[place] = norm / (self.layout.world if self.layout.replicated else 1)
        own = self.bucket.reduce_to_owners(flat, self.rank, self.group)
        base = sum(self.bucket.splits[: self.rank])
        if norm is not None:
            norm = own[self.bucket.norms[self.rank] - base]
        return self.bucket.views(own, self.owned, base=base), norm

    def _fold(self, sums: Mapping[str, tuple[BatchSums, ...]]) -> dict[str, LayerState]:
        decay = self.config.factor.decay_at(self.steps)
        return {name: state.folded(sums[name], decay=decay) for name, state in self._next.items()}

    def _refresh(self, states: Mapping[str, LayerState], names: list[str]) -> dict[str, LayerState]:
        """Decompose the named layers' factors. Synchronises with the device, as any decomposition does."""
        refreshed, counts = dict(states), self.metrics.step_counts
        options = self.config.eigenbasis
        for name in decomposable({name: states[name] for name in names}):
            refreshed[name], failed = states[name].refreshed(method=options.method, carry=options.carry_moments)
            kept = refreshed[name] is states[name]
            counts["refreshes"] += not kept
            counts["refresh_retries"] += failed
            counts["refresh_failures"] += kept
            if kept:
                logger.warning(f"ds_kfac: no decomposition of {name}'s factors succeeded; its old eigenbasis stays")
        return refreshed

    def _precondition(self, gradients: Mapping[str, Tensor], now: Now) -> Tensor:
        """Own layers' results, and one small vector to sum over all ranks: what the direction needs, and what a run
        wants to know of every owner. A layer without an eigenbasis (no data yet) is counted."""
        local = self.direction.local(now, gradients, self._next)
        self._next, self._pending = local.states, (now, local)
        failures = self.metrics.step_counts["refresh_failures"]
        counts = (local.replaced.new_full((), n) for n in (local.unprepared, failures))
        return torch.stack([*local.numbers, local.replaced, *counts])

    def _fallback_seed(self) -> Tensor | float:
        """The scale of a backward that did not go through ``engine.backward``, as DeepSpeed would have applied it."""
        engine = self.layout.engine
        scale = self.layout.manual_scale() if engine._manual_backward_expected else 1.0
        return scale / engine.gradient_accumulation_steps()


def _larger(a: Tensor | float, b: Tensor | float | None) -> Tensor | float:
    if b is None:  # a copy: a tensor lr is changed in place by its scheduler
        return a.clone() if isinstance(a, Tensor) else a
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))
    return max(a, b)
