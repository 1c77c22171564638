"""Connect K-FAC to one engine by hooks and by wrapping methods of the engine. Only the instance is
changed; no class is patched.

- :class:`ds_kfac.zero.seam.Seam` watches the step of the engine's optimizer.
- ``backward`` is wrapped to tell the hooks which backward passes are the engine's own.
- ``forward`` is wrapped to run captured steps (those in which hooks collect statistics) without
  torch.compile. If torch traced a hook, the graph would break inside a loop of torch's own code,
  and torch would then leave the module uncompiled for good. All other steps run the same graphs as
  without K-FAC.
- ``step`` is wrapped to drop captured data if an error occurs before the optimizer's step.
- ``save_checkpoint`` and ``load_checkpoint`` are wrapped to save and load our state.
- ``destroy`` is wrapped to detach.
"""

import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from ds_kfac.checkpoint.load import load, load_checkpoint
from ds_kfac.checkpoint.order import groups_of
from ds_kfac.checkpoint.save import save_checkpoint
from ds_kfac.comm.lost import telling
from ds_kfac.config.keys import KFACConfig
from ds_kfac.diagnostics.explain import explain
from ds_kfac.diagnostics.report import report
from ds_kfac.diagnostics.share import share_of
from ds_kfac.diagnostics.text import folded
from ds_kfac.directions.kfac_adamw.matrices import other_matrices
from ds_kfac.engine.monte_carlo import LossSampling, Sampler
from ds_kfac.engine.pipeline import announcing
from ds_kfac.factors.export import begin_from, export
from ds_kfac.factors.files import Factors, safetensors
from ds_kfac.log import logger, warn
from ds_kfac.metrics import STAGES, TIMER, Metrics
from ds_kfac.model.masks import ReadMask
from ds_kfac.model.scan import Scan
from ds_kfac.step.counters import PREFIX, constants, counters, health, selected
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner
from ds_kfac.zero.deepspeed_versions import INSTRUCTIONS, put_attribute, wrap_attribute
from ds_kfac.zero.weights import WeightRescaling

_ATTACHED: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Attachment]]" = (
    weakref.WeakKeyDictionary()
)
NEW = (
    "K-FAC does not update some parameters, because they were frozen or not in the model at "
    "attach. DeepSpeed updates these parameters only at stage 0 in fp32. A parameter that was not "
    "in the model must also be added to the optimizer. Add parameters before deepspeed.initialize, "
    "and freeze parameters after it (docs/howto/frameworks.md). The parameters: "
)
BY_HAND = (
    "optimizer.load_state_dict does not load K-FAC's state, so this state has not changed; "
    "engine.load_checkpoint loads the optimizer's state and K-FAC's state"
)
BROKEN = (
    "the step raised an error, so it may have changed only some of the parameters, moments and "
    "factors, as with any optimizer: load a checkpoint before you continue"
)
OUTSIDE = "gradients of other backwards"
"""Entry of ``Attachment._warned`` for the warning about backward passes outside of the engine."""
HANDLE = "kfac"
"""Name of the engine's attribute that holds the :class:`Attachment`."""


def attached(model: Any) -> "Attachment | None":
    """Return the attachment to a model's engine, or None. This is for code that has only the model,
    such as callbacks."""
    reference = _ATTACHED.get(model) if isinstance(model, nn.Module) else None
    found = reference() if reference else None
    return found if found and found._active else None


class Attachment:
    """K-FAC in one engine: its hooks and wrappers, and the methods of ``engine.kfac``.

    Attributes:
        job: the preconditioners of this rank's domains.
        given: the config as the user gave it. In ``preconditioner.config`` every null is replaced
            by the value that was chosen for it.
        report: text that describes what was attached. The config key ``report`` decides how much of
            it is printed.
        sampling: draws the labels of the Monte-Carlo Fisher; None if the config asks for another
            Fisher.
        by_hand: whether a call of the optimizer's ``load_state_dict`` comes from the user's program
            and not from ``engine.load_checkpoint``.
    """

    def __init__(self, engine: Any, given: KFACConfig, job: Job, found: Scan) -> None:
        self.engine = engine
        self.given = given
        self.job = job
        self._active = True
        self._warned = set[str]()
        self._reports = given.report != "none"
        self._monitored = False
        self.by_hand = True
        self._found = found
        self._share = share_of(engine.module, found)
        self._known = {id(p) for p in engine.module.parameters() if p.requires_grad}
        self._captures = [kfac.capture for kfac in job.preconditioners]
        kfac = job.preconditioners[0]
        config = kfac.config
        self.sampling: LossSampling | None = None
        if config.factor.fisher == "monte_carlo":
            self.sampling = LossSampling(kfac, engine)
        self._rescalings: list[WeightRescaling] = []
        if config.rescale_weights:
            rescalings = [WeightRescaling(k.layout, k.layers) for k in job.preconditioners]
            # a domain may have no weights to rescale, for example stacked experts or a pipeline
            # stage with norms only
            self._rescalings = [rescaling for rescaling in rescalings if rescaling.weights]
        self._installed = ExitStack()  # removes wrappers and hooks
        self._captured = False
        # torch.compiler.disable is not used as a decorator, because a decorator would import
        # torch's compiler when this file is imported
        self._uncompiled = torch.compiler.disable(self._captured_forward)
        self._wrap_engine(config)
        self._warn_of_loads_by_hand(kfac.engine_view.inner)
        self._printed: list[str] = []
        if kfac.metrics.timers is not None:
            self._printed = [TIMER + stage for stage in STAGES]
        engine.engine_timers.global_timers += self._printed
        kfac.seam.open(self)
        setattr(engine, HANDLE, self)
        _ATTACHED[engine.module] = weakref.ref(self)
        self.report = report(job.preconditioners, found, given)

    def _wrap_engine(self, config: KFACConfig) -> None:
        """Wrap the engine's methods. The top of this file says why."""
        engine = self.engine
        job = self.job
        groups = groups_of(engine, job)
        grams = None
        if config.checkpoint.grams:
            safetensors()  # fail here if it is missing, not when the first checkpoint is written
            grams = partial(export, job, sides="A", dtype=torch.bfloat16, bases=False)
        self._wrap("forward", self._forward)
        # a program may compile a function that calls the engine
        self._wrap("backward", torch.compiler.disable(self._backward))
        self._wrap("step", torch.compiler.disable(self._engine_step))
        self._wrap("save_checkpoint", partial(save_checkpoint, engine, job, groups, grams))
        self._wrap("load_checkpoint", partial(load_checkpoint, engine, job, groups))
        self._wrap("destroy", self._destroy)
        if isinstance(engine, PipelineEngine):
            remove = put_attribute(engine, INSTRUCTIONS, announcing(engine, job))
            self._installed.callback(remove)

    def _warn_of_loads_by_hand(self, inner: Any) -> None:
        """Warn when a program calls the optimizer's ``load_state_dict``, which does not load
        K-FAC's state.

        If the optimizer holds another optimizer, that one is also hooked, because timm's Lookahead
        itself does not support hooks. A module that the optimizer holds is not hooked, because a
        module passes other arguments to its hooks.
        """

        def hook(optimizer: Any) -> None:
            if self.by_hand:
                warn(BY_HAND)

        wrapped = [x for x in vars(inner).values() if isinstance(x, torch.optim.Optimizer)]
        for optimizer in (inner, *wrapped):
            with suppress(AttributeError):
                handle = optimizer.register_load_state_dict_post_hook(hook)
                self._installed.callback(handle.remove)

    def __repr__(self) -> str:
        rule = self.preconditioner.rule
        kfac = self.preconditioner
        by = rule.optimizer_type or type(kfac.engine_view.inner).__name__
        steps = kfac.metrics.counts["steps"]
        stage = f"ZeRO stage {int(self.engine.zero_optimization_stage())}"
        layers = (
            f"{len(self._found.layers)} K-FAC layers, {self._share.fraction:.0%} of the trained "
            "matrix parameters"
        )
        return (
            f"<ds_kfac.Attachment: {by}, {stage}, {layers}, {steps} "
            f"steps{'' if self._active else ', detached'}>"
        )

    @property
    def preconditioner(self) -> KFACPreconditioner:
        """The preconditioner of the dense layers, which is the only preconditioner in a model
        without experts."""
        return self.job.preconditioners[0]

    @property
    def metrics(self) -> Metrics:
        return self.preconditioner.metrics

    def counters(self) -> dict[str, float]:
        """Return all numbers that docs/reference/counters.md lists. DeepSpeed's monitor gets the
        same numbers. Synchronises with the device."""
        return {**counters(self.job), **health(self.job), **self._constants()}

    def explain(self, layer: str | None = None) -> str:
        """Describe a layer's state. The text lists the updates of the layer's factors, and says
        which eigenbasis is in use or why there is none. It also says in which steps the next update
        and refresh happen, and which ranks compute them.

        Call this method between steps. It is local, so a single rank may call it.

        Args:
            layer: the layer's name; None for a table of this rank's layers.

        Raises:
            ValueError: no module of this rank has the name.
        """
        return explain(self.job, self._found, layer)

    def log_line(self) -> dict[str, float]:
        """Return numbers for a framework's logs, under the names that DeepSpeed's monitor uses. The
        result is empty if the config has ``"report": "none"``. Synchronises with the device."""
        if self._reports:
            return {PREFIX + name: value for name, value in selected(self.job).items()}
        return {}

    def log_constants(self) -> dict[str, float]:
        """Return numbers for the first line of a framework's logs: the fraction of the trained
        matrix parameters that is in K-FAC's layers, the fraction that is in layers with curvature,
        and learning rates as multiples of the optimizer's learning rate. The result is empty if the
        config has ``"report": "none"``."""
        if self._reports:
            return {PREFIX + name: value for name, value in self._constants().items()}
        return {}

    def _constants(self) -> dict[str, float]:
        return {
            "updated": self._share.fraction,
            "curved": self._share.curved_fraction,
            **constants(self.job),
        }

    @property
    def mask(self) -> ReadMask:
        """Replaceable function that finds the attention masks [N, T] among the arguments of the
        model's forward.

        It is called with the arguments and the keyword arguments of the forward, and returns one
        mask, several masks or None. By default it returns the arguments whose names end in
        ``attention_mask``.
        """
        return self.preconditioner.capture.read_mask

    @mask.setter
    def mask(self, function: ReadMask) -> None:
        for kfac in self.job.preconditioners:
            kfac.capture.read_mask = function

    @property
    def sampler(self) -> Sampler:
        """Replaceable function that draws labels and computes the loss of a Monte-Carlo Fisher."""
        return self._sampling().sampler

    @sampler.setter
    def sampler(self, function: Sampler) -> None:
        self._sampling().sampler = function

    def sample(self, loss: torch.Tensor) -> None:
        """Draw labels, and compute the gradients for the Monte-Carlo Fisher. A program that calls
        ``loss.backward()`` instead of ``engine.backward(loss)`` must call this method just before
        that call."""
        self._sampling().sample(loss)

    def _sampling(self) -> LossSampling:
        if self.sampling is None:
            raise ValueError(
                "ds_kfac: with this config K-FAC draws no labels, so there is nothing to sample; "
                'set "fisher": "monte_carlo" in kfac.factor'
            )
        return self.sampling

    def export(self, path: str | os.PathLike) -> Path:
        """Write the running factors and the eigenbases in use to a folder, for
        :class:`ds_kfac.Factors` and ``python -m ds_kfac convert``. Collective; call this method
        between steps.

        Raises:
            FactorsError: on every rank, if the folder could not be written, or if there has been no
                training step.
        """
        return export(self.job, Path(path))

    def begin_from(self, path: str | os.PathLike) -> None:
        """Load factors from a folder that :func:`ds_kfac.fit` or :meth:`export` has written, and
        decompose them. K-FAC then begins with these factors instead of those of the first batches.

        Collective. Call this method between steps: before the first step, or after a switch from
        AdamW.

        Raises:
            FactorsError: on every rank, if the factors do not fit the model and config. Nothing
                changes in this case.
        """
        begin_from(self.job, Factors.load(path))

    def detach(self) -> None:
        """Restore the engine: remove hooks, wrappers and our process group. May be called twice.

        Call this method between steps. It is local, so it does not wait for a rank that has failed.
        ``engine.destroy()`` also calls it.
        """
        if not self._active:
            return
        self._active = False
        self._installed.close()
        self.preconditioner.seam.close()
        delattr(self.engine, HANDLE)
        timers = self.engine.engine_timers.global_timers
        timers[:] = [name for name in timers if name not in self._printed]
        self.preconditioner.rule.release(self.preconditioner.engine_view.inner)
        if self.sampling is not None:
            self.sampling.remove()
        self.job.close()

    def _destroy(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Detach, then destroy the engine. DeepSpeed also calls ``destroy`` when an engine is
        garbage-collected."""
        self.detach()
        return original(*args, **kwargs)

    def load_state(self, load_dir: str | os.PathLike, tag: str) -> None:
        """Load only the K-FAC state of a checkpoint. The checkpoint may have been written with any
        ZeRO stage and world size. Collective."""
        load(self.job, Path(load_dir) / str(tag))

    # the wrapped attributes

    def _wrap(self, name: str, wrapper: Callable[..., Any]) -> None:
        self._installed.callback(wrap_attribute(self.engine, name, wrapper, lambda: self._active))

    # what the seam calls

    @property
    def proves(self) -> bool:
        """Whether the next step compares gradients with captured rows."""
        return any(capture.proof is not None for capture in self._captures)

    def begin(self) -> None:
        """Prepare for a step that DeepSpeed begins but may still skip."""
        if self.sampling is not None:
            self.sampling.check()
        if self.job.active or not self.preconditioner.curvature.specs:
            self._warn()
        self.job.begin()

    def step(self) -> None:
        """Run K-FAC's step. DeepSpeed will not skip the step any more. Collective."""
        self._captured = self.job.active
        with telling(
            lambda: (
                "K-FAC's step "
                f"({', '.join(part.metrics.current for part in self.job.preconditioners)})"
            )
        ):
            self.job.step()

    def end(self, *, applied: bool) -> None:
        """Finish a step that DeepSpeed has applied or skipped. Collective."""
        with telling(lambda: "K-FAC's preparation of the next step"):
            self.job.end(applied=applied)
        if not applied:
            return
        if any(kfac.judged for kfac in self.job.preconditioners):
            self._tell()
        for rescale in self._rescalings:
            rescale()
        engine = self.engine
        if self._captured and engine.monitor.enabled and engine.global_rank == 0:
            known = self._constants() if self._monitored else {}
            self._monitored = True
            shown = {
                PREFIX + name: value for name, value in self.counters().items() if name not in known
            }
            samples = engine.global_samples + engine.train_batch_size()
            engine.monitor.write_events([(name, value, samples) for name, value in shown.items()])

    def raised(self, *, begun: bool) -> None:
        """Clean up after a step that raised an error. If K-FAC's step had begun, its state and the
        optimizer's state are inconsistent, and the user is warned."""
        self.job.drop_step()
        for kfac in self.job.preconditioners:
            # otherwise ZeRO would add the gradients of the next backward pass to those of the
            # failed step
            kfac.layout.clear()
        if begun and BROKEN not in self._warned:
            self._warned.add(BROKEN)
            logger.warning(f"ds_kfac: rank {self.engine.global_rank}: {BROKEN}")

    def _warn(self) -> None:
        """Warn about parameters that were unfrozen or added after K-FAC was attached, and about
        captured steps without a backward pass of this engine. Each warning appears once.

        If all gradients come from backward passes outside of this engine, the step updates no
        factors. This method runs in captured steps, or in all steps if nothing is ever captured.
        """
        model = self.engine.module
        trained = {id(p) for p in model.parameters() if p.requires_grad}
        added = trained - self._known
        if added:
            self._known = self._known | added
            matrices = sorted(other_matrices(model, Scan((), ())))
            named = [(name,) for name in matrices if id(model.get_parameter(name)) in added]
            if named:
                warn(NEW + ", ".join(name for name, *_ in folded(named)))
        outside = sum(capture.outside for capture in self._captures)
        if (
            outside
            and not any(capture.counted for capture in self._captures)
            and OUTSIDE not in self._warned
        ):
            self._warned.add(OUTSIDE)
            logger.warning(
                f"ds_kfac: rank {self.engine.global_rank}: gradients reached {outside} calls of "
                "layers, but none of them in this engine's own backward pass, so the factors were "
                "not updated. "
                "Call backward(loss) of the engine whose model computed the loss"
            )

    def _tell(self) -> None:
        """Warn once about each layer whose captured rows did not add up to its gradient. The
        warning is added to the report, and rank 0 prints it on standard error."""
        kfacs = self.job.preconditioners
        texts = []
        unfit = {
            name: f"a hook failed: {kfac.capture.failed[name]}"
            if name in kfac.capture.failed
            else why
            for kfac in kfacs
            for name, why in kfac.proving.unfit.items()
        }
        new = [(name, why) for name, why in unfit.items() if name not in self._warned]
        if new:
            self._warned.update(name for name, _ in new)
            layers = "; ".join(f"{name}: {why}" for name, why in folded(new))
            left = share_of(self.engine.module, self._found, without=unfit).curved_fraction
            texts.append(
                "the captured rows of these layers do not make up their gradients, and until "
                f"they do, {kfacs[0].rule.facts.without_curvature}: {layers}. Now "
                f"{left:.0%} of the trained matrix parameters have curvature, instead of "
                f"{self._share.curved_fraction:.0%} (docs/explanation/capture.md)"
            )
        for text in texts:
            self.report += f"\n  WARNING: {text}"
            warn(text, here=any(kfac.rank == 0 for kfac in kfacs))

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not any(capture.active for capture in self._captures):
            return original(*args, **kwargs)
        return self._uncompiled(original, *args, **kwargs)

    def _captured_forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for capture in self._captures:
                stack.callback(capture.leave)  # even after Ctrl-C, when torch runs no hooks
                if capture.uses is not None:
                    stack.enter_context(capture.uses)
            return original(*args, **kwargs)

    def _engine_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        steps = self.job.steps
        try:
            return original(*args, **kwargs)
        except BaseException:
            self.preconditioner.seam.forget()
            # The error came before K-FAC's step. At stage 0 the seam does not notice such an error.
            if self.job.steps == steps:
                self.job.drop_step()
            raise

    def _backward(
        self, original: Callable[..., Any], loss: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        with ExitStack() as stack:
            # on an error, for example out of memory, drop the step
            stack.push(lambda kind, *_: self.job.drop_step() if kind is not None else None)
            self.preconditioner.seam.forget()
            if self.sampling is not None and loss.requires_grad:
                self.sampling.sample(loss)
            # activation checkpointing recomputes the forward pass, which must run eagerly again
            if any(capture.active for capture in self._captures):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for capture in self._captures:
                stack.enter_context(capture.own_backward())
            return original(loss, *args, **kwargs)
