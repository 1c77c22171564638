"""Where K-FAC runs: at the first step of DeepSpeed's inner optimizer, which is called only when a step is certain.

The *outer* optimizer is DeepSpeed's wrapper. Its ``step`` looks for overflow, takes the norm, and may skip the step; only
then does it call the *inner* optimizer, the user's, once or once for each parameter group. torch calls a public hook
before an optimizer's step (``register_step_pre_hook``). So an outer step begins a step, and the first inner step in it
runs K-FAC. At stage 0 in fp32 there is no outer optimizer: every inner step that has gradients is a step.

    mode                             inner steps             gradients at the first one
    stage 0, 16-bit wrappers         one                     as they will be applied
    ZeRO 1, 2                        one for each group      group 0 as it will be applied, others raw
    ZeRO 3                           one for each sub-group  the same

Raw gradients are still to be multiplied by :attr:`Seam.factor`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_kfac.zero import deepspeed_versions
from ds_kfac.zero.deepspeed_versions import replaced, restore

NO_HOOKS = (
    "ds_kfac: {name} cannot be hooked: K-FAC runs before an optimizer's step, from torch's register_step_pre_hook. Let the "
    "class call torch.optim.Optimizer.__init__, or give DeepSpeed the optimizer that it wraps"
)

OUTSIDE_INFERENCE = torch.inference_mode(False)
"""A decorator. A program may call ``engine.step()`` in inference mode, but hooks of later passes change what a step
makes, and tensors made in inference mode could not be changed there."""


class Steps(Protocol):
    """What is told of an engine's steps."""

    def begin(self) -> None:
        """The outer optimizer's step begins; whether it will be applied is not known."""

    def step(self) -> None:
        """The step is certain, and weights have not moved. Collective."""

    def end(self, *, applied: bool) -> None:
        """The step is over. Collective."""

    def raised(self) -> None:
        """The step raised an error, here or in DeepSpeed. Local."""


class Seam:
    """Calls :class:`Steps` at an engine's steps.

    Attributes:
        inner: the user's optimizer.
        groups: its parameter groups. During a step DeepSpeed shows it one at a time.
        factor: what DeepSpeed multiplies this step's gradients by, a scalar on the device; None: by nothing.
        prepared: how many groups have been multiplied already.
        measures: whether the factor is needed at stage 0, too, where DeepSpeed does not tell how it clips.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        # not always engine.basic_optimizer: in place of an Adagrad ZeRO makes one of its own
        self.inner = getattr(engine.optimizer, "optimizer", None) or engine.optimizer
        self.factor: Tensor | None = None
        self.prepared = 0
        self.measures = False
        self._inverse: Tensor | None = None
        self._steps: Steps | None = None
        self._active = False
        self._removals: list[Callable[[], None]] = []
        self._groups: list[dict[str, Any]] | None = None
        self._depth = 0  # of nested inner steps: torch calls the hooks of a subclass and of its base
        self._ran = False

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups if self._groups is None else self._groups

    @property
    def outer(self) -> Any | None:
        """What decides whether a step is applied: DeepSpeed's wrapper, or at stage 0 a GradScaler; None: nothing."""
        if self.engine.optimizer is not self.inner:
            return self.engine.optimizer
        return deepspeed_versions.grad_scaler(self.engine)

    def open(self, steps: Steps) -> None:
        """Begin to call ``steps``. Raises ValueError for an optimizer that has no hooks."""
        self._steps = steps
        self._active = True
        outer = self.outer
        if outer is not None:
            self._wrap(outer, "step", self._outer_step)
        for optimizer in filter(None, (self.inner, deepspeed_versions.backup_optimizer(self.engine.optimizer))):
            hooked = _with_hooks(optimizer)
            self._removals.append(hooked.register_step_pre_hook(self._before_inner).remove)
            self._removals.append(hooked.register_step_post_hook(self._after_inner).remove)
        self._watch_factor()

    def close(self) -> None:
        """Remove hooks and wrappers. May be called twice."""
        self._active = False
        self._remove()

    def _remove(self, but: int = 0) -> None:
        while len(self._removals) > but:
            self._removals.pop()()

    def forget(self) -> None:
        """A step was interrupted: the next inner step begins a new one."""
        self._depth = 0

    # the factor

    @property
    def inverse(self) -> Tensor | None:
        """What results are multiplied by where DeepSpeed will still multiply by :attr:`factor`. 0 if the factor is 0, as
        where a norm is infinite: nothing moves then."""
        if self.factor is not None and self._inverse is None:
            self._inverse = torch.where(self.factor > 0, self.factor.reciprocal(), 0.0)
        return self._inverse

    def _watch_factor(self) -> None:
        """Of DeepSpeed's own functions that multiply gradients."""
        if hasattr(self.engine.optimizer, deepspeed_versions.UNSCALE):
            self._wrap(self.engine.optimizer, deepspeed_versions.UNSCALE, self._unscale)
        elif self.engine.optimizer is self.inner:
            self._wrap(self.engine, "clip_fp32_gradients", self._clip)

    def _unscale(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        if self.prepared == 0:
            self.factor = deepspeed_versions.unscaling(self.engine.optimizer, *arguments)
        self.prepared += 1
        return original(*arguments, **keywords)

    def _clip(self, original: Callable[..., Any]) -> Any:
        before = self._norm() if self.measures else None
        result = original()
        if before is not None:
            self.factor = (self._norm() / before).nan_to_num(1.0)
        return result

    def _norm(self) -> Tensor:
        gradients = [p.grad for group in self.groups for p in group["params"] if p.grad is not None]
        return torch.stack(torch._foreach_norm([x.coalesce().values() if x.is_sparse else x for x in gradients])).norm()

    def _finish_factor(self) -> None:
        """What else multiplies gradients: a GradScaler, and BF16_Optimizer, which has no function of its own for it."""
        self._inverse = None
        scaler = deepspeed_versions.grad_scaler(self.engine)
        if scaler is not None and scaler._scale is not None:
            unscaled = scaler._scale.reciprocal().reshape(())
            self.factor = unscaled if self.factor is None else self.factor * unscaled
            return
        clipping = deepspeed_versions.bf16_clipping(self.engine.optimizer)
        self.factor = clipping if clipping is not None else self.factor

    # an outer step

    @OUTSIDE_INFERENCE
    def _outer_step(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        steps = self._steps
        assert steps is not None
        try:
            with self._whole_groups():
                steps.begin()
                result = original(*arguments, **keywords)
            steps.end(applied=self._ran)
        except BaseException:
            steps.raised()
            raise
        finally:
            self.factor = None
        return result

    @contextmanager
    def _whole_groups(self) -> Iterator[None]:
        """DeepSpeed takes groups out of the inner optimizer while it steps one of them, and puts them back unless the
        step raises: every later step would fail."""
        optimizers = [self.inner, deepspeed_versions.backup_optimizer(self.engine.optimizer)]
        whole = [
            (x, x.param_groups, [group["params"] for group in x.param_groups]) for x in optimizers if x is not None
        ]
        self._groups = self.inner.param_groups
        self._begin()
        try:
            yield
        except BaseException:
            for optimizer, groups, params in whole:
                optimizer.param_groups = groups
                for group, own in zip(groups, params, strict=True):
                    group["params"] = own
            raise
        finally:
            self._groups = None

    def _begin(self) -> None:
        self._ran = False
        self._depth = 0
        self.prepared = 0
        if self.engine.optimizer is not self.inner:
            self.factor = None

    # an inner step

    def _before_inner(self, *_: Any) -> None:
        if self.outer is not None:
            if self._groups is not None and not self._ran:
                self._run()
            return
        self._depth += 1
        if self._depth == 1 and any(p.grad is not None for group in self.groups for p in group["params"]):
            self._run()

    @OUTSIDE_INFERENCE
    def _run(self) -> None:
        assert self._steps is not None
        self._ran = True
        self._finish_factor()
        try:
            with torch.no_grad():
                self._steps.step()
        except BaseException:
            self._depth = 0
            if self.outer is None:
                self._steps.raised()
            raise

    @OUTSIDE_INFERENCE
    def _after_inner(self, *_: Any) -> None:
        if self.outer is not None:
            return
        self._depth -= 1
        if self._depth == 0 and self._ran:
            assert self._steps is not None
            self._ran = False
            self.factor = None
            self._steps.end(applied=True)

    def _wrap(self, holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(holder, name)
        before = vars(holder).get(name)

        @wraps(original)
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            if not self._active:  # someone has wrapped ours, which stays in their chain
                return original(*arguments, **keywords)
            return wrapper(original, *arguments, **keywords)

        def remove() -> None:
            if vars(holder).get(name) is wrapped:
                restore(holder, name, before)

        setattr(holder, name, wrapped)
        self._removals.append(remove)

    # for the self-test

    @contextmanager
    def stubbed(self, stub: Callable[[], None]) -> Iterator[Callable[[], Any]]:
        """Replaces the inner optimizer's step by ``stub``. Yields the outer one's: it takes a step with the gradients that
        lie where DeepSpeed keeps them, and moves no weight."""
        outer = self.engine.optimizer
        stubs = [self.inner, deepspeed_versions.backup_optimizer(outer)]

        def inner_step(*_: Any, **__: Any) -> None:
            stub()

        installed, self._active = len(self._removals), True
        groups = [(x, x["params"], [master.grad for master in x["params"]]) for x in self.inner.param_groups]
        self._watch_factor()
        try:
            with deepspeed_versions.unchanged(outer), self._whole_groups():
                with replaced(stubs[0], "step", inner_step), replaced(stubs[1] or _Nothing(), "step", inner_step):
                    yield outer.step
        finally:
            self._remove(but=installed)
            self._active = self._steps is not None
            for group, masters, gradients in groups:
                group["params"] = masters
                for master, gradient in zip(masters, gradients, strict=True):
                    master.grad = gradient


class _Nothing:
    """In place of an optimizer that is not there."""


def _with_hooks(optimizer: Any) -> Any:
    """The optimizer, or the one that it wraps if it has no hooks of its own, as timm's Lookahead."""
    for candidate in (optimizer, *vars(optimizer).values()):
        if isinstance(candidate, torch.optim.Optimizer) and hasattr(candidate, "_optimizer_step_pre_hooks"):
            return candidate
    raise ValueError(NO_HOOKS.format(name=type(optimizer).__name__))
