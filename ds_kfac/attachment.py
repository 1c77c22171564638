"""K-FAC at work in one engine: four wrapped attributes of the instance, and module hooks. No class is patched.

``_take_model_step`` is where gradients are averaged but not yet checked, clipped or stepped, in every stage;
``backward`` tells the scale of the output gradients; the checkpoint methods carry our state.
"""

import inspect
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger

from ds_kfac import checkpoint
from ds_kfac.accounting import counters, events
from ds_kfac.adamw import FLAG, KFACAdamWStep
from ds_kfac.batch_info import ReadBatch
from ds_kfac.config import KFACConfig
from ds_kfac.costs import BUILTIN, CostModel, from_dict
from ds_kfac.loss_sampling import LossSampling
from ds_kfac.measured_costs import cached
from ds_kfac.metrics import STAGES, Metrics, timer_name
from ds_kfac.optimizer import KFACOptimizer
from ds_kfac.report import attach_report
from ds_kfac.sampling import Sampler
from ds_kfac.scan import scan
from ds_kfac.strategy import Setting, make_plan
from ds_kfac.target import Target, moments_of
from ds_kfac.zero.exchange import parameter_names
from ds_kfac.zero.layout import ShardLayout, scaler_scale
from ds_kfac.zero.registry import optimized_parameters, shard_layout
from ds_kfac.zero.selftest import self_test

HANDLE = "kfac"
"""Name under which an engine carries its :class:`Attachment`."""


class Attachment:
    """A K-FAC optimizer at work in one engine.

    Attributes:
        optimizer: the :class:`KFACOptimizer`.
        given: the config as it was given; ``optimizer.config`` has what depends on the optimizer filled in.
        report: the text printed at attach.
    """

    def __init__(self, engine: Any, config: KFACConfig) -> None:
        self.engine, self.given = engine, config
        config = config.for_optimizer(adam=isinstance(engine.basic_optimizer, KFACAdamWStep))
        optimized = optimized_parameters(engine)
        found = scan(engine.module, config.choice, optimized=optimized)
        named = dict(engine.module.named_parameters())
        ours = [named[name] for name in parameter_names(found.layers)]
        own_ids = {id(parameter) for parameter in ours}
        target = Target(
            model=engine.module,
            layers=found.layers,
            layout=shard_layout(engine, ours),
            rest=shard_layout(engine, [p for p in optimized if p.requires_grad and id(p) not in own_ids]),
            inner=engine.basic_optimizer,
            scheduled_lr=engine.lr_scheduler is not None,
        )
        check_groups(target)
        plan = make_plan(found.layers, setting(target, config), config, agreed_costs(target.layout, config))
        self.optimizer = KFACOptimizer(target, config, plan)
        self._active, self._warned = True, False
        self.sampling: LossSampling | None = None
        try:
            self_test(target.layout, self.optimizer.exchange.plan.workers, self.optimizer.channel)
            if config.factor.fisher == "monte_carlo":
                self.sampling = LossSampling(self.optimizer, engine)
        except Exception:
            self.optimizer.close()
            raise
        self._originals: dict[str, tuple[Any, Any]] = {}
        self._wrap("_take_model_step", self._take_model_step)
        self._wrap("backward", self._backward)
        self._wrap("save_checkpoint", self._save_checkpoint)
        self._wrap("load_checkpoint", self._load_checkpoint)
        self._printed = [timer_name(stage) for stage in STAGES] if self.metrics.timers is not None else []
        engine.engine_timers.global_timers += self._printed
        setattr(engine, HANDLE, self)
        self.report = attach_report(self.optimizer, found)
        if engine.global_rank == 0:
            print(self.report, flush=True)

    @property
    def metrics(self) -> Metrics:
        return self.optimizer.metrics

    def counters(self) -> dict[str, float]:
        """Steps, refreshes, failures, bytes and calls by kind, seconds per stage: see ds_kfac.accounting."""
        return counters(self.optimizer)

    @property
    def read_batch(self) -> ReadBatch:
        """Tells which rows of a batch count and how many loss terms it has; set your own function."""
        return self.optimizer.capture.read_batch

    @read_batch.setter
    def read_batch(self, function: ReadBatch) -> None:
        self.optimizer.capture.read_batch = function

    @property
    def sampler(self) -> Sampler:
        """Draws labels and forms the loss of a Monte-Carlo Fisher; set your own function."""
        return self._sampling().sampler

    @sampler.setter
    def sampler(self, function: Sampler) -> None:
        self._sampling().sampler = function

    def sample(self) -> None:
        """Monte-Carlo Fisher without ``engine.backward``: call it between forward and ``loss.backward()``."""
        self._sampling().sample()

    def _sampling(self) -> LossSampling:
        if self.sampling is None:
            raise ValueError('ds_kfac: nothing is sampled; set "fisher": "monte_carlo" in kfac.factor')
        return self.sampling

    def detach(self) -> None:
        """Restore the engine: remove hooks, wrappers and our process group. Call on every rank, between steps."""
        if not self._active:
            return
        self.optimizer.close()
        if self.sampling is not None:
            self.sampling.remove()
        self._active = False
        timers = self.engine.engine_timers
        timers.global_timers = [name for name in timers.global_timers if name not in self._printed]
        if isinstance(self.optimizer.target.inner, KFACAdamWStep):
            self.optimizer.target.inner.direction_scale = None
        for name, (wrapper, previous) in self._originals.items():
            # Someone may have wrapped ours since; then it stays in the chain and passes everything through.
            if vars(self.engine).get(name) is wrapper:
                if previous is None:
                    delattr(self.engine, name)
                else:
                    setattr(self.engine, name, previous)
        delattr(self.engine, HANDLE)

    def load_state(self, load_dir: str | os.PathLike, tag: str) -> None:
        """Load only the K-FAC state of a checkpoint, whatever stage and world size wrote it. Collective."""
        checkpoint.load(self.optimizer, Path(load_dir) / str(tag))

    # the four wrapped attributes

    def _wrap(self, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(self.engine, name)
        previous = vars(self.engine).get(name)

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs) if self._active else original(*args, **kwargs)

        self._originals[name] = (wrapped, previous)
        setattr(self.engine, name, wrapped)

    def _take_model_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kfac, engine = self.optimizer, self.engine
        monitored = kfac.capture.active and engine.monitor.enabled and engine.global_rank == 0
        self._warn_of_silent_layers()
        if self.sampling is not None:
            self.sampling.check()
        kfac.step()
        scaler = kfac.layout.grad_scaler
        scale = torch.as_tensor(scaler_scale(scaler) if scaler else 0.0).clone()
        result = original(*args, **kwargs)
        # A GradScaler skips the step by itself; only its falling scale tells. It has synchronised already.
        skipped = bool(scaler) and bool(torch.as_tensor(scaler_scale(scaler)) < scale)
        kfac.commit(applied=engine.was_step_applied() and not skipped)
        if monitored:
            engine.monitor.write_events(events(kfac, engine.global_samples))
        return result

    def _warn_of_silent_layers(self) -> None:
        """Once, after the first captured step: layers whose hooks never fired here pass through untouched."""
        kfac = self.optimizer
        if self._warned or not kfac.capture.active:
            return
        self._warned = True
        silent = [layer.name for layer in kfac.layers if layer.name not in kfac.capture.called]
        if silent:
            logger.warning(
                f"ds_kfac: rank {kfac.rank} saw no rows of {', '.join(silent)} in its first step. A layer that no rank "
                "calls is not preconditioned until it has data; if it is never called as a module, exclude it"
            )

    def _backward(self, original: Callable[..., Any], loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        capture = self.optimizer.capture
        if not capture.active or not loss.requires_grad:
            return original(loss, *args, **kwargs)
        scale_wrt_gas = kwargs.get("scale_wrt_gas", args[1] if len(args) > 1 else True)
        # The caller who switches that off has divided by the micro-batches himself.
        divisor = 1 if scale_wrt_gas else self.engine.gradient_accumulation_steps()
        if self.sampling is not None:
            self.sampling.sample()
            return original(loss, *args, **kwargs)
        hook = loss.register_hook(lambda seed: capture.begin_backward(seed.float() / divisor))
        try:
            return original(loss, *args, **kwargs)
        finally:
            hook.remove()
            capture.end_backward()

    def _save_checkpoint(
        self, original: Callable[..., Any], save_dir: str, tag: Any = None, client_state: Any = None, *args, **kwargs
    ) -> Any:
        if not save_dir:
            return original(save_dir, tag, client_state or {}, *args, **kwargs)  # DeepSpeed says what is wrong
        tag = f"global_step{self.engine.global_steps}" if tag is None else str(tag)
        header = checkpoint.save(self.optimizer, Path(save_dir) / tag)
        client_state = {**(client_state or {}), checkpoint.CLIENT_KEY: header}
        result = original(save_dir, tag, client_state, *args, **kwargs)
        checkpoint.finish(self.optimizer, Path(save_dir) / tag, header)
        return result

    def _load_checkpoint(self, original: Callable[..., Any], load_dir: str, *args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(original).bind(load_dir, *args, **kwargs).arguments
        path, client_state = original(load_dir, *args, **kwargs)
        if path is None:
            return path, client_state
        # DeepSpeed's files, the same on every rank, decide; what lies in the folder may be of another save.
        header = client_state.pop(checkpoint.CLIENT_KEY, None) if client_state else None
        tag_directory = Path(path).parent
        if arguments.get("load_module_only"):
            self.optimizer.reset()
            self._say(
                f"load_module_only: K-FAC starts afresh; engine.kfac.load_state loads the state of {tag_directory}"
            )
        elif header is None:
            self.optimizer.reset()
            self._say(f"WARNING: {tag_directory} has no K-FAC state, K-FAC starts afresh: expect some steps to recover")
        else:
            checkpoint.load(self.optimizer, tag_directory, header["save_id"])
            self._say(f"loaded K-FAC state of step {self.optimizer.steps} from {tag_directory}")
        return path, client_state

    def _say(self, text: str) -> None:
        if self.engine.global_rank == 0:
            logger.warning(f"ds_kfac: {text}")


def setting(target: Target, config: KFACConfig) -> Setting:
    """What a plan has to know of the engine."""
    layout, index = target.layout, {name: i for i, name in enumerate(parameter_names(target.layers))}
    kind = moments_of(config, target.inner)
    return Setting(
        world=layout.world,
        held=None
        if layout.replicated
        else {layer.name: layout.shards.held([index[name] for name in layer.parameters]) for layer in target.layers},
        parameters=layout.params[0].dtype,
        gradients=layout.dtype,
        moments={"adam": 2, "corrected": 1, None: 0}[kind],
    )


def agreed_costs(layout: ShardLayout, config: KFACConfig) -> CostModel:
    """The cost model, the same on every rank: measured by the first one. Collective."""
    given, device = config.assignment.costs, torch.device(layout.engine.device)
    base = BUILTIN["cpu" if device.type == "cpu" else "cuda"]
    if isinstance(given, dict):
        return from_dict(given, base)
    if given == "builtin":
        return base
    values = [cached(device).to_dict() if layout.rank == 0 else {}]
    source = torch.distributed.get_global_rank(layout.group, 0)
    torch.distributed.broadcast_object_list(values, src=source, group=layout.group)
    return from_dict(values[0], base)


def check_groups(target: Target) -> None:
    """KFACAdamW steps exactly the marked groups along K-FAC's directions: they must hold the layers, and only them.

    Raises:
        ValueError: some parameter is in the wrong kind of group.
    """
    if not isinstance(target.inner, KFACAdamWStep):
        return
    groups = target.layout.optimizer.param_groups
    for layout, ours in ((target.layout, True), (target.rest, False)):
        for parameter in layout.params:
            if bool(groups[layout.group_index(parameter)].get(FLAG)) != ours:
                name = next(n for n, p in target.model.named_parameters() if p is parameter)
                raise ValueError(
                    f"KFACAdamW: {name} is {'' if ours else 'not '}preconditioned, but its parameter group says "
                    "otherwise; the model or kfac.layers changed between ds_kfac.initialize and attach"
                )
