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
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import logger

from ds_kfac import checkpoint, parallelism
from ds_kfac.adam_groups import check_groups
from ds_kfac.adamw import KFACAdamWStep
from ds_kfac.batch_info import ReadBatch
from ds_kfac.config import KFACConfig
from ds_kfac.experts import ExpertRows
from ds_kfac.loss_sampling import LossSampling
from ds_kfac.metrics import Metrics
from ds_kfac.optimizer import KFACOptimizer, Target
from ds_kfac.pipeline import announce_backwards
from ds_kfac.report import attach_report
from ds_kfac.sampling import Sampler
from ds_kfac.scan import Scan, scan
from ds_kfac.zero.domains import Domain, domains
from ds_kfac.zero.exchange import parameter_names
from ds_kfac.zero.layout import scaler_scale
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
        parallelism.check(engine, config)
        optimized = optimized_parameters(engine)
        self.domains = domains(engine, optimized)
        with parallelism.agreeing(engine):  # a stage may have no layers
            found = scan(engine.module, config.choice, optimized=optimized)
        self._experts = ExpertRows(engine.module) if engine.has_moe_layers else None
        scans = parallelism.by_domain(found, self.domains, engine)
        filled = [(domain, part) for domain, part in zip(self.domains, scans, strict=True) if part.layers]
        self.domains, scans = tuple(d for d, _ in filled), [part for _, part in filled]
        targets = [self._target(domain, part) for domain, part in zip(self.domains, scans, strict=True)]
        self.optimizers = [KFACOptimizer(target, config) for target in targets]
        self.optimizer = self.optimizers[0]
        self._active, self._warned = True, False
        self.sampling: LossSampling | None = None
        try:
            for kfac in self.optimizers:
                check_groups(kfac.target)
                self_test(kfac.layout, kfac.exchange.owners)
            if config.factor.fisher == "monte_carlo":
                self.sampling = LossSampling(self.optimizer, engine)
        except Exception:
            self._remove_hooks()
            raise
        self._originals: dict[str, tuple[Any, Any]] = {}
        self._wrap("_take_model_step", self._take_model_step)
        self._wrap("backward", self._backward)
        self._wrap("save_checkpoint", self._save_checkpoint)
        self._wrap("load_checkpoint", self._load_checkpoint)
        self._undo = announce_backwards(engine, self.optimizers) if isinstance(engine, PipelineEngine) else None
        setattr(engine, HANDLE, self)
        self.report = ""
        for domain, kfac, part in zip(self.domains, self.optimizers, scans, strict=True):
            report = attach_report(kfac, part)
            report = f"{domain.name}:\n{report}" if domain.name else report
            if kfac.rank == 0:  # of every domain
                print(report, flush=True)
            self.report += f"\n{report}" if self.report else report

    def _target(self, domain: Domain, found: Scan) -> Target:
        engine, named = self.engine, dict(self.engine.module.named_parameters())
        ours = [named[name] for name in parameter_names(found.layers)]
        own_ids = {id(parameter) for parameter in ours}
        return Target(
            model=engine.module,
            layers=found.layers,
            layout=shard_layout(engine, ours, domain.group),
            rest=shard_layout(engine, [p for p in domain.params if id(p) not in own_ids], domain.group),
            inner=engine.basic_optimizer,
            scheduled_lr=engine.lr_scheduler is not None,
            model_parallel=bool(domain.name) or len(self.domains) > 1,
            info_of=self._experts,
        )

    @property
    def metrics(self) -> Metrics:
        return self.optimizer.metrics

    @property
    def read_batch(self) -> ReadBatch:
        """Tells which rows of a batch count and how many loss terms it has; set your own function."""
        return self.optimizer.capture.read_batch

    @read_batch.setter
    def read_batch(self, function: ReadBatch) -> None:
        for kfac in self.optimizers:
            kfac.capture.read_batch = function

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
        self._remove_hooks()
        if self._undo is not None:
            self._undo()
        self._active = False
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
        for kfac in self.optimizers:
            kfac.totals.remove()
            torch.distributed.destroy_process_group(kfac.group)

    def _remove_hooks(self) -> None:
        for kfac in self.optimizers:
            kfac.capture.remove()
        if self.sampling is not None:
            self.sampling.remove()
        if self._experts is not None:
            self._experts.remove()

    def load_state(self, load_dir: str | os.PathLike, tag: str) -> None:
        """Load only the K-FAC state of a checkpoint, whatever stage and world size wrote it. Collective."""
        for domain, kfac in zip(self.domains, self.optimizers, strict=True):
            checkpoint.load(kfac, Path(load_dir) / str(tag) / domain.name)

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
        monitored = kfac.schedule.due(kfac.steps).capture and engine.monitor.enabled and engine.global_rank == 0
        self._warn_of_silent_layers()
        if self.sampling is not None:
            self.sampling.check()
        self._step()
        scaler = kfac.layout.grad_scaler
        scale = torch.as_tensor(scaler_scale(scaler) if scaler else 0.0).clone()
        result = original(*args, **kwargs)
        # A GradScaler skips the step by itself; only its falling scale tells. It has synchronised already.
        skipped = bool(scaler) and bool(torch.as_tensor(scaler_scale(scaler)) < scale)
        for one in self.optimizers:
            one.commit(applied=engine.was_step_applied() and not skipped)
        if monitored:
            engine.monitor.write_events(self.metrics.events(engine.global_samples))
        return result

    def _step(self) -> None:
        """Of all domains at once: kl-clip is over all of them."""
        if len(self.optimizers) == 1:
            self.optimizer.step()
            return
        total = torch.stack([kfac.prepare() for kfac in self.optimizers]).sum(0)
        total = self.optimizer.totals.sum(total)
        for kfac in self.optimizers:
            kfac.finish(total)

    def _warn_of_silent_layers(self) -> None:
        """Once, after the first captured step: layers whose hooks never fired here pass through untouched."""
        kfac = self.optimizer
        if self._warned or not kfac.capture.active:
            return
        self._warned = True
        silent = [layer.name for k in self.optimizers for layer in k.layers if layer.name not in k.capture.called]
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

        def announce(seed: torch.Tensor) -> None:
            for kfac in self.optimizers:
                kfac.capture.begin_backward(seed.float() / divisor)

        hook = loss.register_hook(announce)
        try:
            return original(loss, *args, **kwargs)
        finally:
            hook.remove()
            for kfac in self.optimizers:
                kfac.capture.end_backward()

    def _save_checkpoint(
        self, original: Callable[..., Any], save_dir: str, tag: Any = None, client_state: Any = None, *args, **kwargs
    ) -> Any:
        if not save_dir:
            return original(save_dir, tag, client_state or {}, *args, **kwargs)  # DeepSpeed says what is wrong
        tag = f"global_step{self.engine.global_steps}" if tag is None else str(tag)
        places = [Path(save_dir) / tag / domain.name for domain in self.domains]
        headers = [checkpoint.save(kfac, place) for kfac, place in zip(self.optimizers, places, strict=True)]
        client_state = {**(client_state or {}), checkpoint.CLIENT_KEY: headers[0]}
        result = original(save_dir, tag, client_state, *args, **kwargs)
        for kfac, place, header in zip(self.optimizers, places, headers, strict=True):
            checkpoint.finish(kfac, place, header)
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
            self._reset()
            self._say(
                f"load_module_only: K-FAC starts afresh; engine.kfac.load_state loads the state of {tag_directory}"
            )
        elif header is None:
            self._reset()
            self._say(f"WARNING: {tag_directory} has no K-FAC state, K-FAC starts afresh: expect some steps to recover")
        else:
            for index, (domain, kfac) in enumerate(zip(self.domains, self.optimizers, strict=True)):
                # one header is in DeepSpeed's files, that of the first domain
                checkpoint.load(kfac, tag_directory / domain.name, None if index else header["save_id"])
            self._say(f"loaded K-FAC state of step {self.optimizer.steps} from {tag_directory}")
        return path, client_state

    def _reset(self) -> None:
        for kfac in self.optimizers:
            kfac.reset()

    def _say(self, text: str) -> None:
        if self.engine.global_rank == 0:
            logger.warning(f"ds_kfac: {text}")
