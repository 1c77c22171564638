"""Run K-FAC at the right moment: just before the first step of DeepSpeed's inner optimizer in a
training step.

The *outer* optimizer is DeepSpeed's wrapper. The *inner* optimizer is the user's optimizer. The
outer ``step`` checks for overflow, computes the norm, and may skip the training step. If it does
not, it calls the inner ``step``, either once in total or once for each parameter group. Before an
optimizer's step, torch calls the hooks that were added with ``register_step_pre_hook``. A training
step begins with the outer step, and K-FAC runs in such a hook before the first inner step. At stage
0 in fp32 there is no outer optimizer, so every inner step that has gradients is a training step.

    mode                        inner steps             gradients at the first inner step
    stage 0, 16-bit wrappers    one                     unscaled and clipped
    ZeRO 1, 2                   one for each group      group 0 unscaled and clipped, others raw
    ZeRO 3                      one for each sub-group  sub-group 0 unscaled and clipped, others raw

"Raw" gradients are those that DeepSpeed will still multiply by :attr:`Seam.factor`, which unscales
and clips them. DeepSpeed checks for overflow and computes norms before K-FAC runs, so it sees the
same gradients as without K-FAC.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_kfac.zero import deepspeed_versions
from ds_kfac.zero.deepspeed_versions import replaced, wrap_attribute

NO_HOOKS = (
    "ds_kfac: {name} does not support torch's step hooks, but K-FAC runs in such a hook "
    "(register_step_pre_hook). Let the class call torch.optim.Optimizer.__init__, or, if it wraps "
    "another optimizer, pass that optimizer to DeepSpeed"
)
CLOSURE = (
    "ds_kfac: the optimizer's step got an argument. K-FAC works with gradients that were computed "
    "before the step, so it does not support closures"
)
BYPASSED = (
    "ds_kfac: the inner optimizer was stepped outside of engine.optimizer.step. K-FAC watches only "
    "this method, so this step would train without K-FAC. If the program saves "
    "engine.optimizer.step to call or restore it later, it must save the method after attach. To "
    "train without K-FAC, call engine.kfac.detach()"
)

OUTSIDE_INFERENCE = torch.inference_mode(False)
"""Decorator for functions that must run outside of inference mode, even if a program calls
``engine.step()`` in inference mode. The hooks of later passes change tensors that a step has
created, and torch forbids changing tensors that were created in inference mode."""


class State(Enum):
    """The phases of an engine's step that the seam distinguishes."""

    CLOSED = "K-FAC does not watch"
    IDLE = "between two steps"
    DECIDING = "the outer step has begun, and DeepSpeed may still skip it"
    STEPPED = "K-FAC's step has run, and the inner optimizer steps"


class Steps(Protocol):
    """The methods that a :class:`Seam` calls during an engine's steps."""

    @property
    def proves(self) -> bool:
        """Whether the next step compares gradients with captured rows. The comparison needs the
        factor by which DeepSpeed has multiplied the gradients."""

    def begin(self) -> None:
        """Prepare for a step that DeepSpeed has begun but may still skip."""

    def step(self) -> None:
        """Run K-FAC's step. DeepSpeed will not skip the step any more, and the weights have not
        changed yet. Collective."""

    def end(self, *, applied: bool) -> None:
        """Finish a step that was applied or skipped. Collective."""

    def raised(self, *, begun: bool) -> None:
        """Clean up after a step in which K-FAC or DeepSpeed raised an error. Not collective.

        Args:
            begun: True if :meth:`step` was called. K-FAC's state is then inconsistent.
        """


class Seam:
    """Watches an engine's steps and calls the methods of :class:`Steps`.

    Attributes:
        inner: the user's optimizer.
        outer: object that decides whether a step is applied: DeepSpeed's wrapper, or at stage 0 a
            GradScaler. None if every step is applied.
        groups: all parameter groups of the inner optimizer. During a step, DeepSpeed gives the
            inner optimizer only one group at a time.
        factor: scalar on the device by which DeepSpeed multiplies this step's gradients: 1 / loss
            scale, times the clipping factor. None if DeepSpeed does not multiply gradients, or if
            K-FAC does not need the factor.
        inverse: 1 / factor. A result that DeepSpeed will multiply by ``factor`` is multiplied by
            ``inverse`` first. If ``factor`` is 0, for example because DeepSpeed clips by an
            infinite norm, ``inverse`` is 0, so that no weight changes.
        prepared: number of masters (tensors that the inner optimizer updates) whose gradients
            DeepSpeed has already multiplied by ``factor``. DeepSpeed begins with the first master.
    """

    def __init__(self, engine: Any) -> None:
        optimizer = engine.optimizer
        self.engine = engine
        self.scaler = deepspeed_versions.grad_scaler(engine)
        self._is_bare = isinstance(optimizer, torch.optim.Optimizer)
        # not always engine.basic_optimizer, because ZeRO replaces the user's Adagrad by its own
        self.inner = optimizer if self._is_bare else optimizer.optimizer
        self.outer = self.scaler if self._is_bare else optimizer
        self._optimizers = [self.inner]
        backup = deepspeed_versions.backup_optimizer(optimizer)
        if backup is not None:
            self._optimizers.append(backup)
        self.groups: list[dict[str, Any]] = self.inner.param_groups
        self.factor: Tensor | None = None
        self.inverse: Tensor | None = None
        self.prepared = 0
        self._steps: Any = None
        self._state = State.CLOSED
        self._installed = ExitStack()  # removes hooks and wrappers
        # depth of nested inner steps: if an optimizer's step calls the step of its base class,
        # torch runs the hooks in both
        self._depth = 0

    def open(self, steps: Steps) -> None:
        """Install hooks and wrappers, and call the methods of ``steps`` from now on. Raise
        ValueError if the optimizer does not support hooks."""
        self._steps = steps
        self._state = State.IDLE
        if self.outer is not None:
            self._wrap(self._installed, self.outer, "step", self._outer_step)
        for optimizer in self._optimizers:
            hooked = _with_hooks(optimizer)
            self._installed.callback(hooked.register_step_pre_hook(self._before_inner).remove)
            if self.outer is None:
                self._installed.callback(hooked.register_step_post_hook(self._after_inner).remove)
        self._watch_factor(self._installed)

    def close(self) -> None:
        """Remove hooks and wrappers. May be called twice."""
        self._state = State.CLOSED
        self._installed.close()

    def forget(self) -> None:
        """Drop a step that was interrupted after it had begun. The next inner step then begins a
        new step. Call this only when no step is running."""
        if self._depth:
            self._interrupted()

    def _interrupted(self) -> None:
        begun = self._state is State.STEPPED
        self._depth = 0
        self._leave_step()
        self._steps.raised(begun=begun)

    def _leave_step(self) -> None:
        self.factor = None
        if self._state is not State.CLOSED:  # a program may detach K-FAC in the middle of a step
            self._state = State.IDLE

    # steps

    @OUTSIDE_INFERENCE
    def _outer_step(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        self._begin_outer()
        try:
            with self._restored_groups():
                self._steps.begin()
                result = original(*arguments, **keywords)
            self._steps.end(applied=self._state is State.STEPPED)
        except BaseException:
            self._interrupted()
            raise
        self._leave_step()
        return result

    def _begin_outer(self) -> None:
        self._state = State.DECIDING
        self.groups = self.inner.param_groups
        self.prepared = 0
        # with a bare optimizer, engine.step() has already clipped and set ``factor``
        if not self._is_bare:
            self.factor = None

    @contextmanager
    def _restored_groups(self) -> Iterator[None]:
        """Restore the inner optimizers' parameter groups if an outer step raises an error.

        While DeepSpeed updates one group, it removes all other groups from the inner optimizer.
        After an error it does not add them again, so every later step would fail.
        """
        before = [
            (
                optimizer,
                optimizer.param_groups,
                [group["params"] for group in optimizer.param_groups],
            )
            for optimizer in self._optimizers
        ]
        try:
            yield
        except BaseException:
            for optimizer, groups, params in before:
                optimizer.param_groups = groups
                for group, own in zip(groups, params, strict=True):
                    group["params"] = own
            raise

    def _before_inner(
        self, optimizer: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> None:
        given = [*arguments[1:], *keywords.values()]  # arguments[0] is the optimizer
        if any(x is not None for x in given):
            raise ValueError(CLOSURE)
        if self.outer is not None:
            if self._state is State.IDLE:
                raise RuntimeError(BYPASSED)
            if self._state is State.DECIDING:
                self._run()
            return
        self._depth += 1
        self.groups = self.inner.param_groups
        if self._depth == 1 and self._has_gradients():
            try:
                self._steps.begin()
                self._run()
            except BaseException:
                self._interrupted()
                raise

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for group in self.groups for p in group["params"])

    @OUTSIDE_INFERENCE
    def _after_inner(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._state is State.STEPPED:
            self._leave_step()
            self._steps.end(applied=True)

    @OUTSIDE_INFERENCE
    @torch.no_grad()
    def _run(self) -> None:
        self._state = State.STEPPED
        self.complete_factor()
        self._steps.step()

    # the factor

    def complete_factor(self) -> None:
        """Complete :attr:`factor` and set :attr:`inverse`. Two multipliers are included only here,
        because DeepSpeed has no method that could be wrapped to observe them: the scale of a
        GradScaler, and the clipping factor of BF16_Optimizer."""
        if self.scaler is not None and self.scaler._scale is not None:
            unscaled = self.scaler._scale.reciprocal().reshape(())
            self.factor = unscaled if self.factor is None else self.factor * unscaled
        elif not self._is_bare and self.factor is None and self._needs_factor:
            self.factor = deepspeed_versions.bf16_clipping(self.engine.optimizer)
        self.inverse = None
        if self.factor is not None:
            self.inverse = torch.where(self.factor > 0, self.factor.reciprocal(), 0.0)

    @property
    def _needs_factor(self) -> bool:
        """Whether K-FAC needs the factor even if DeepSpeed has already multiplied all gradients by
        it. This is so in a step that compares gradients with captured rows, and in the self-test,
        which runs before :meth:`open`."""
        return self._steps is None or self._steps.proves

    def _watch_factor(self, installed: ExitStack) -> None:
        """Wrap the DeepSpeed functions that multiply gradients, until ``installed`` is closed."""
        if self._is_bare:
            self._wrap(installed, self.engine, "clip_fp32_gradients", self._clip)
        elif hasattr(self.engine.optimizer, deepspeed_versions.UNSCALE):
            self._wrap(installed, self.engine.optimizer, deepspeed_versions.UNSCALE, self._unscale)

    def _wrap(
        self, installed: ExitStack, holder: Any, name: str, wrapper: Callable[..., Any]
    ) -> None:
        remove = wrap_attribute(holder, name, wrapper, lambda: self._state is not State.CLOSED)
        installed.callback(remove)

    def _unscale(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        if self.prepared == 0:
            self.factor = deepspeed_versions.unscaling(self.engine.optimizer, *arguments)
        self.prepared += 1
        return original(*arguments, **keywords)

    def _clip(self, original: Callable[..., Any]) -> Any:
        # DeepSpeed does not report its clipping factor, so compare the norms before and after
        # clipping
        if not self._needs_factor:
            return original()
        gradients = [p.grad for group in self.groups for p in group["params"] if p.grad is not None]
        # DeepSpeed does not clip sparse gradients
        gradients = [gradient for gradient in gradients if not gradient.is_sparse]
        if not gradients:
            return original()
        before = torch.stack(torch._foreach_norm(gradients)).norm()
        result = original()
        self.factor = (torch.stack(torch._foreach_norm(gradients)).norm() / before).nan_to_num(1.0)
        return result

    # the self-test

    @contextmanager
    def stubbed(self, stub: Callable[[], None]) -> Iterator[Callable[[], Any]]:
        """Replace the inner optimizer's step by ``stub`` during the self-test.

        Yields the outer optimizer's ``step``. Calling it takes a step with the gradients in
        DeepSpeed's buffers, but does not change the weights.
        """
        state = self._state
        groups = [
            (group, group["params"], [master.grad for master in group["params"]])
            for group in self.inner.param_groups
        ]
        self._begin_outer()
        try:
            with (
                deepspeed_versions.unchanged(self.engine.optimizer),
                self._restored_groups(),
                ExitStack() as installed,
            ):
                # the artificial gradients were not multiplied by the GradScaler's scale
                installed.enter_context(replaced(self, "scaler", None))
                self._watch_factor(installed)
                for optimizer in self._optimizers:
                    installed.enter_context(replaced(optimizer, "step", lambda *_, **__: stub()))
                yield self.engine.optimizer.step
        finally:
            self._state = state
            for group, masters, gradients in groups:
                group["params"] = masters
                for master, gradient in zip(masters, gradients, strict=True):
                    master.grad = gradient


def _with_hooks(optimizer: Any) -> Any:
    """Return the optimizer if it supports hooks, else the optimizer that it wraps. For example,
    timm's Lookahead does not support hooks. Raise ValueError if neither supports hooks."""
    for candidate in (optimizer, *vars(optimizer).values()):
        if isinstance(candidate, torch.optim.Optimizer) and hasattr(
            candidate, "_optimizer_step_pre_hooks"
        ):
            return candidate
    raise ValueError(NO_HOOKS.format(name=type(optimizer).__name__))
