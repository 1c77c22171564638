"""Clipping of raw gradients, where the update rule does it: DeepSpeed would see preconditioned ones.

The bound is the user's "gradient_clipping", on the norm of all raw gradients. K-FAC preconditions what is left of them,
and kl-clip bounds the step; the other parameters' gradients are clipped by the same factor here.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ds_kfac.step.draft import Draft
from ds_kfac.step.preconditioner import KFACPreconditioner


@contextmanager
def clipped(kfac: KFACPreconditioner, draft: Draft) -> Iterator[None]:
    """Around DeepSpeed's step, which then neither clips nor reports the norm of what K-FAC made of the gradients."""
    if draft.norm is None or not kfac.rule.clips:
        yield
        return
    engine = kfac.layout.engine
    kfac.target.rest.multiply(torch.as_tensor(draft.local.clip, device=kfac.device))
    norm = (draft.norm / kfac.layout.grad_scale()).float()  # now: the scale may change in the step
    with kfac.layout.unclipped():
        yield
    if engine.was_step_applied() and engine.get_global_grad_norm() is not None:
        engine._global_grad_norm = norm
