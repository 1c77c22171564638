"""KFACOptimizer: the data flow of one step, read top to bottom, the same in every engine mode."""

from collections.abc import Mapping

import deepspeed.comm as dist
import torch
from deepspeed.utils import logger
from torch import Tensor, nn

from ds_kfac.assignment import assign_owners
from ds_kfac.bucket import FactorBucket
from ds_kfac.capture import BatchSums, Capture
from ds_kfac.config import KFACConfig
from ds_kfac.layer_state import LayerState, decomposable
from ds_kfac.layers.base import LayerSpec
from ds_kfac.metrics import Metrics
from ds_kfac.preconditioner import finite_or, kl_clip_scale, precondition
from ds_kfac.schedule import Due
from ds_kfac.zero.exchange import GradientExchange, parameter_names
from ds_kfac.zero.layout import ShardLayout


class KFACOptimizer:
    """Preconditions the gradients of an engine just before its own step; the user's optimizer follows.

    Args:
        model: the engine's module.
        layers: what is preconditioned.
        layout: where the engine keeps the gradients of ``parameter_names(layers)``.
        config: the checked ``"kfac"`` block.
        scheduled_lr: whether the learning rate follows a schedule.

    Attributes:
        state: layer name -> :class:`LayerState`, of the layers owned by this rank only.
        steps: applied steps, the clock of every schedule: it changes in :meth:`commit` only, so all stages of a step
            see the same values, and a skipped step's are used again. DeepSpeed's global_steps counts skipped ones too.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: tuple[LayerSpec, ...],
        layout: ShardLayout,
        config: KFACConfig,
        *,
        scheduled_lr: bool,
    ) -> None:
        self.layers, self.layout, self.config = layers, layout, config
        self.device, self.rank = layout.engine.device, layout.rank
        self.schedule = config.schedule
        index = {name: i for i, name in enumerate(parameter_names(layers))}
        self.assignment = assign_owners(
            layers,
            {layer.name: layout.shards.held([index[name] for name in layer.parameters]) for layer in layers},
            world=layout.world,
            refresh_interval=self.schedule.final_refresh_interval,  # owners never change: balance the long run
            load_tolerance=config.assignment.load_tolerance,
        )
        # Own group: our traffic must not be ordered against DeepSpeed's reductions and prefetches.
        self.group = torch.distributed.new_group(torch.distributed.get_process_group_ranks(layout.group))
        self.exchange = GradientExchange(layout, layers, self.assignment.owners, self.group)
        self.owned = self.exchange.owned
        self.bucket = FactorBucket.plan(layers, self.assignment.owners, layout.world)
        self.metrics = Metrics(timings=config.metrics.timings, device=self.device)
        self.clip_lr = config.preconditioner.kl_clip_lr or ("peak" if scheduled_lr else "current")
        self.state: dict[str, LayerState] = {}
        self.steps = 0
        self.peak_lr: dict[int, Tensor | float] = {}
        self._flat: Tensor | None = None
        self.capture = Capture(model, layers, self._allocate, self._fallback_seed)
        self.reset()

    @torch.no_grad()
    def step(self) -> None:
        """Replace every layer's averaged gradient by its preconditioned one. Collective: enter on every rank.

        Nothing of it is kept until :meth:`commit`.
        """
        with torch.autocast(self.device.type, enabled=False):  # a user may call engine.step() under autocast
            self._step(self.schedule.due(self.steps))

    def _step(self, due: Due) -> None:
        stage = self.metrics.stage
        self.layout.begin()
        self._next = self.state
        self.metrics.begin()
        # Now, not in commit: DeepSpeed's scheduler steps in between.
        lrs = [group["lr"] for group in self.layout.optimizer.param_groups]
        self._next_peak_lr = {group: _larger(lr, self.peak_lr.get(group)) for group, lr in enumerate(lrs)}
        if due.capture:
            with stage("reduce"):
                self._next = self._fold(self._reduce())
        # A layer that has no eigenbases yet, because it had no data at the last refresh, need not wait for the next.
        waiting = [name for name, state in self._next.items() if due.refresh or (due.capture and state.basis_A is None)]
        if waiting:
            with stage("refresh"):
                self._next = self._refresh(self._next, waiting)
        with stage("gather"):
            gradients = self.exchange.gather()
        with stage("precondition"):
            results = self._precondition(gradients)
        with stage("scatter"):
            self.exchange.scatter(results)

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
        self.capture.active = self.schedule.due(self.steps).capture

    def reset(self) -> None:
        """Start afresh: no factors, no eigenbases, step 0."""
        self.state = {layer.name: LayerState.empty(layer, self.device) for layer in self.owned}
        self.steps, self.peak_lr = 0, {}
        self.capture.take()
        self._flat = None
        self.resume()

    @property
    def state_nbytes(self) -> int:
        """Bytes of factors and eigenbases on this rank."""
        return sum(state.nbytes for state in self.state.values())

    # the stages of a step

    def _allocate(self) -> Mapping[str, BatchSums]:
        self._flat = torch.zeros(self.bucket.numel, device=self.device)
        return self.bucket.views(self._flat, self.layers)

    def _reduce(self) -> dict[str, BatchSums]:
        """This step's sums over all ranks, of the layers owned here. A rank that saw no rows sends zeros."""
        if self.capture.take() is None:
            self._allocate()
        flat, self._flat = self._flat, None
        assert flat is not None  # allocated with the sums
        own = self.bucket.reduce_to_owners(flat, self.rank, self.group)
        return self.bucket.views(own, self.owned, base=sum(self.bucket.splits[: self.rank]))

    def _fold(self, sums: Mapping[str, BatchSums]) -> dict[str, LayerState]:
        decay = self.config.factor.decay_at(self.steps)
        return {name: state.folded(sums[name], decay=decay) for name, state in self._next.items()}

    def _refresh(self, states: Mapping[str, LayerState], names: list[str]) -> dict[str, LayerState]:
        """Decompose the named layers' factors. Synchronises with the device, as any decomposition does."""
        refreshed, counts = dict(states), self.metrics.step_counts
        for name in decomposable({name: states[name] for name in names}):
            refreshed[name], failed = states[name].refreshed(method=self.config.eigenbasis.method)
            kept = refreshed[name] is states[name]
            counts["refreshes"] += not kept
            counts["refresh_retries"] += failed
            counts["refresh_failures"] += kept
            if kept:
                logger.warning(f"ds_kfac: no decomposition of {name}'s factors succeeded; its old eigenbases stay")
        return refreshed

    def _precondition(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Own layers' nu V. A layer without eigenbases (no data yet) passes through and is counted."""
        damping, kind = self.config.damping.at(self.steps), self.config.damping.kind
        results = dict(gradients)
        quadratic, not_finite = torch.zeros(2, device=self.device).unbind()
        ready = [layer for layer in self.owned if self._next[layer.name].basis_A is not None]
        for layer in ready:
            state, gradient = self._next[layer.name], gradients[layer.name]
            assert state.basis_A is not None and state.basis_G is not None  # set together
            V = precondition(gradient, state.basis_G, state.basis_A, damping=damping, damping_kind=kind)
            V, finite = finite_or(V, gradient)
            not_finite += ~finite
            results[layer.name] = V
            quadratic += self._quadratic(layer, V, gradient)
        failures = self.metrics.step_counts["refresh_failures"]
        # One small vector over all ranks: what kl-clip needs, and what a run wants to know of every owner.
        summary = torch.stack(
            [quadratic, not_finite, *(quadratic.new_full((), n) for n in (len(self.owned) - len(ready), failures))]
        )
        if self.layout.world > 1:
            dist.all_reduce(summary, group=self.group)
        self.metrics.step_summary = summary[1:]
        nu = self._kl_clip(summary[0])
        if nu is not None:
            for layer in ready:
                results[layer.name] = results[layer.name] * nu
        return results

    def _quadratic(self, layer: LayerSpec, V_OI: Tensor, gradient_OI: Tensor) -> Tensor:
        """lr^2 <V, gradient> of the unscaled gradient; weight and bias may have different rates."""
        products = (V_OI * gradient_OI).sum(dim=0)
        groups = self.exchange.group_indices(layer)
        total = products[: layer.in_features].sum() * self._lr_in_clip(groups[0]) ** 2
        if layer.bias:
            total = total + products[-1] * self._lr_in_clip(groups[1]) ** 2
        return total / self.layout.grad_scale() ** 2

    def _lr_in_clip(self, group: int) -> Tensor | float:
        return self._next_peak_lr[group] if self.clip_lr == "peak" else self.layout.optimizer.param_groups[group]["lr"]

    def _kl_clip(self, quadratic: Tensor) -> Tensor | None:
        kl_clip = self.config.preconditioner.kl_clip_at(self.steps)
        self.metrics.nu = kl_clip_scale(quadratic, kl_clip=kl_clip) if kl_clip else None
        return self.metrics.nu

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
