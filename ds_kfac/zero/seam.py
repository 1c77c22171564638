"""Where K-FAC runs: at the first step of DeepSpeed's inner optimizer, which is called only when a
step is certain.

The *outer* optimizer is DeepSpeed's wrapper. Its ``step`` looks for overflow, takes the norm, and
may skip the step; only then does it call the *inner* optimizer, the user's, once or once for each
parameter group. torch calls a public hook before an optimizer's step (``register_step_pre_hook``).
So an outer step begins a step, and the first inner step in it runs K-FAC. At stage 0 in fp32 there
is no outer optimizer: every inner step that has gradients is a step.

    mode                        inner steps             gradients at the first one
    stage 0, 16-bit wrappers    one                     as they will be applied
    ZeRO 1, 2                   one for each group      group 0 as it will be applied, others raw
    ZeRO 3                      one for each sub-group  the same

Raw gradients are still to be multiplied by :attr:`Seam.factor`. DeepSpeed's own view of gradients,
in its overflow check, its norm and its clipping, is that of training without K-FAC.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_kfac.zero import deepspeed_versions
from ds_kfac.zero.deepspeed_versions import replaced, restore

NO_HOOKS = (
    "ds_kfac: {name} cannot be hooked: K-FAC runs before an optimizer's step, from torch's "
    "register_step_pre_hook. Let "
    "the class call torch.optim.Optimizer.__init__, or give DeepSpeed the optimizer that it wraps"
)
CLOSURE = (
    "ds_kfac: the optimizer's step got an argument. K-FAC works with the gradients that are "
    "there, so it takes "
    "no closure"
)
BYPASSED = (
    "ds_kfac: the inner optimizer was stepped outside of the step of the optimizer around it, "
    "which K-FAC watches, so it would train without K-FAC. A program that kept engine.optimizer.step "
    "from before attach, and calls it or puts it back, must take it after attach; to train without "
    "K-FAC call engine.kfac.detach()"
)

OUTSIDE_INFERENCE = torch.inference_mode(False)
"""A decorator. A program may call ``engine.step()`` in inference mode, but hooks of later passes
change what a step makes, and tensors made in inference mode could not be changed there."""


class Steps(Protocol):
    """What is told of an engine's steps."""

    def begin(self) -> None:
        """DeepSpeed begins to look at the gradients of a step, which it may still skip."""

    def step(self) -> None:
        """The step is certain, and weights have not moved. Collective."""

    def end(self, *, applied: bool) -> None:
        """The step was applied, or skipped. Collective."""

    def raised(self, *, begun: bool) -> None:
        """The step raised an error, here or in DeepSpeed. Local.

        Args:
            begun: whether :meth:`step` was called: the state is that of no step then.
        """


class Seam:
    """Calls :class:`Steps` at an engine's steps.

    Attributes:
        inner: the user's optimizer.
        outer: what decides whether a step is applied: DeepSpeed's wrapper, or at stage 0 a
            GradScaler; None: nothing.
        groups: the inner optimizer's parameter groups. During a step DeepSpeed shows it one at a
            time.
        factor: what DeepSpeed multiplies this step's gradients by, a scalar on the device; None: by
            nothing.
        prepared: how many masters' gradients it has multiplied already.
        measuring: domains that need the factor even if all gradients are prepared, for a proof of
            rows. At stage 0 DeepSpeed does not tell how it clips.
    """

    def __init__(self, engine: Any) -> None:
        optimizer = engine.optimizer
        self.engine, self.scaler = engine, deepspeed_versions.grad_scaler(engine)
        self._is_bare = isinstance(optimizer, torch.optim.Optimizer)
        # not always engine.basic_optimizer: in place of an Adagrad ZeRO makes one of its own
        self.inner = optimizer if self._is_bare else optimizer.optimizer
        self.outer = self.scaler if self._is_bare else optimizer
        self._optimizers = [self.inner]
        if (backup := deepspeed_versions.backup_optimizer(optimizer)) is not None:
            self._optimizers.append(backup)
        self.groups: list[dict[str, Any]] = self.inner.param_groups
        self.factor: Tensor | None = None
        self.prepared = 0
        self.measuring: set[str] = set()
        self._inverse: Tensor | None = None
        self._steps: Any = None
        self._active = False
        self._removals: list[Callable[[], None]] = []
        self._inside = False  # an outer step
        # of nested inner steps: torch runs the hooks of a class and of the one it is derived from
        self._depth = 0
        self._ran = False

    def open(self, steps: Steps) -> None:
        """Begin to call ``steps``. Raises ValueError for an optimizer that has no hooks."""
        self._steps, self._active = steps, True
        if self.outer is not None:
            self._wrap(self.outer, "step", self._outer_step)
        for optimizer in self._optimizers:
            hooked = _with_hooks(optimizer)
            self._removals.append(hooked.register_step_pre_hook(self._before_inner).remove)
            if self.outer is None:
                self._removals.append(hooked.register_step_post_hook(self._after_inner).remove)
        self._watch_factor()

    def close(self) -> None:
        """Remove hooks and wrappers. May be called twice."""
        self._active = False
        self._remove()

    def forget(self) -> None:
        """No step is going on. One that has not ended was interrupted, and the next inner step
        begins a new one."""
        if self._depth:
            self._interrupted()

    def _interrupted(self) -> None:
        begun, self._ran = self._ran, False
        self._depth = 0
        self.factor = None
        self._steps.raised(begun=begun)

    # steps

    @OUTSIDE_INFERENCE
    def _outer_step(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        try:
            with self._whole_groups():
                self._steps.begin()
                result = original(*arguments, **keywords)
            self._steps.end(applied=self._ran)
        except BaseException:
            self._interrupted()
            raise
        self.factor = None
        return result

    @contextmanager
    def _whole_groups(self) -> Iterator[None]:
        """Wraps an outer step. DeepSpeed takes groups out of the inner optimizer while it steps one
        of them, and puts them back unless the step raises: every later step would fail."""
        self.groups, self.prepared, self._ran, self._inside = (
            self.inner.param_groups,
            0,
            False,
            True,
        )
        if not self._is_bare:  # else it is what was clipped by before the step
            self.factor = None
        whole = [
            (x, x.param_groups, [group["params"] for group in x.param_groups])
            for x in self._optimizers
        ]
        try:
            yield
        except BaseException:
            for optimizer, groups, params in whole:
                optimizer.param_groups = groups
                for group, own in zip(groups, params, strict=True):
                    group["params"] = own
            raise
        finally:
            self._inside = False

    def _before_inner(
        self, optimizer: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> None:
        # the first is the optimizer
        if any(x is not None for x in (*arguments[1:], *keywords.values())):
            raise ValueError(CLOSURE)
        if self.outer is not None:
            if not self._inside:
                raise RuntimeError(BYPASSED)
            if not self._ran:
                self._run()
            return
        self._depth += 1
        self.groups = self.inner.param_groups
        if self._depth == 1 and any(
            p.grad is not None for group in self.groups for p in group["params"]
        ):
            try:
                self._steps.begin()
                self._run()
            except BaseException:
                self._interrupted()
                raise

    @OUTSIDE_INFERENCE
    def _after_inner(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._ran:
            self._ran, self.factor = False, None
            self._steps.end(applied=True)

    @OUTSIDE_INFERENCE
    @torch.no_grad()
    def _run(self) -> None:
        self._ran = True
        self.complete_factor()
        self._steps.step()

    # the factor

    @property
    def inverse(self) -> Tensor | None:
        """What results are multiplied by where DeepSpeed will still multiply by :attr:`factor`. 0
        if that is 0, as where a norm is infinite: nothing moves then."""
        if self.factor is not None and self._inverse is None:
            self._inverse = torch.where(self.factor > 0, self.factor.reciprocal(), 0.0)
        return self._inverse

    def complete_factor(self) -> None:
        """Add what else multiplies gradients: a GradScaler, and BF16_Optimizer, which has no method
        of its own for it."""
        self._inverse = None
        if self.scaler is not None and self.scaler._scale is not None:
            unscaled = self.scaler._scale.reciprocal().reshape(())
            self.factor = unscaled if self.factor is None else self.factor * unscaled
        elif self.measuring and not self._is_bare and self.factor is None:
            self.factor = deepspeed_versions.bf16_clipping(self.engine.optimizer)

    def _watch_factor(self) -> None:
        """Wrap DeepSpeed's own functions that multiply gradients."""
        if self._is_bare:
            self._wrap(self.engine, "clip_fp32_gradients", self._clip)
        elif hasattr(self.engine.optimizer, deepspeed_versions.UNSCALE):
            self._wrap(self.engine.optimizer, deepspeed_versions.UNSCALE, self._unscale)

    def _unscale(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        if self.prepared == 0:
            self.factor = deepspeed_versions.unscaling(self.engine.optimizer, *arguments)
        self.prepared += 1
        return original(*arguments, **keywords)

    def _clip(self, original: Callable[..., Any]) -> Any:
        if not self.measuring:
            return original()
        gradients = [p.grad for group in self.groups for p in group["params"] if p.grad is not None]
        # which DeepSpeed does not clip
        gradients = [gradient for gradient in gradients if not gradient.is_sparse]
        if not gradients:
            return original()
        before = torch.stack(torch._foreach_norm(gradients)).norm()
        result = original()
        self.factor = (torch.stack(torch._foreach_norm(gradients)).norm() / before).nan_to_num(1.0)
        return result

    # wrappers

    def _wrap(self, holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original, before = getattr(holder, name), vars(holder).get(name)

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

    def _remove(self, but: int = 0) -> None:
        while len(self._removals) > but:
            self._removals.pop()()

    @contextmanager
    def stubbed(self, stub: Callable[[], None]) -> Iterator[Callable[[], Any]]:
        """Wraps the self-test: the inner optimizer's step is ``stub``. Yields the outer one's,
        which takes a step with the gradients that lie where DeepSpeed keeps them, and moves no
        weight."""
        installed, self._active = len(self._removals), True
        groups = [
            (x, x["params"], [master.grad for master in x["params"]])
            for x in self.inner.param_groups
        ]
        self._watch_factor()
        try:
            with (
                deepspeed_versions.unchanged(self.engine.optimizer),
                self._whole_groups(),
                ExitStack() as stack,
            ):
                for optimizer in self._optimizers:
                    stack.enter_context(replaced(optimizer, "step", lambda *_, **__: stub()))
                yield self.engine.optimizer.step
        finally:
            self._remove(but=installed)
            self._active = self._steps is not None
            for group, masters, gradients in groups:
                group["params"] = masters
                for master, gradient in zip(masters, gradients, strict=True):
                    master.grad = gradient


def _with_hooks(optimizer: Any) -> Any:
    """The optimizer, or the one that it wraps if it has no hooks of its own, as timm's
    Lookahead."""
    for candidate in (optimizer, *vars(optimizer).values()):
        if isinstance(candidate, torch.optim.Optimizer) and hasattr(
            candidate, "_optimizer_step_pre_hooks"
        ):
            return candidate
    raise ValueError(NO_HOOKS.format(name=type(optimizer).__name__))
