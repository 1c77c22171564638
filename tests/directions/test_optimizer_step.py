"""One step of each optimizer class that DeepSpeed gets in place of KFACAdamW, without an engine."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam, cpu_adam, fused_adam
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ds_kfac.directions.kfac_adamw.optimizer import (
    FLAG,
    KFACAdamWStep,
    KFACCPUAdamW,
    KFACFusedAdamW,
    KFACTorchAdamW,
)

PLAIN = {
    KFACTorchAdamW: torch.optim.AdamW,
    KFACFusedAdamW: FusedAdam,
    KFACCPUAdamW: DeepSpeedCPUAdam,
}
"""Our class -> the optimizer that it is made of."""


@pytest.fixture
def _without_compilers(monkeypatch):
    """Let DeepSpeed's two Adams step by ``W <- W - lr gradient``, since compiling their kernels takes minutes."""

    def fused_step(chunk, overflow, tensors, lr, *_):
        gradients, parameters, *_ = tensors
        torch._foreach_sub_(parameters, torch._foreach_mul(gradients, lr))

    def cpu_step(optimizer, step, lr, beta1, beta2, eps, decay, correction, parameter, gradient, *_):
        parameter.sub_(lr * gradient)

    fused = SimpleNamespace(multi_tensor_adam=fused_step)
    cpu = SimpleNamespace(create_adam=lambda *_: None, destroy_adam=lambda *_: None, adam_update=cpu_step)
    monkeypatch.setattr(fused_adam.FusedAdamBuilder, "load", lambda self: fused)
    monkeypatch.setattr(cpu_adam.CPUAdamBuilder, "load", lambda self: cpu)


def parameter(values: Tensor, gradient: Tensor) -> torch.nn.Parameter:
    made = torch.nn.Parameter(values.clone())
    made.grad = gradient.clone()
    return made


def attached(optimizer: KFACAdamWStep, slices: dict[torch.nn.Parameter, list], used: Tensor) -> KFACAdamWStep:
    """The optimizer as K-FAC has left it before a step."""
    optimizer.slices = {id(parameter): entries for parameter, entries in slices.items()}
    optimizer.used = used
    return optimizer


@pytest.mark.usefixtures("_without_compilers")
@pytest.mark.parametrize("plain_was_made", [False, True])
@pytest.mark.parametrize("kind", PLAIN)
def test_hooks_run_once_around_the_whole_step(kind, plain_was_made, monkeypatch):
    """K-FAC's own, which writes the direction, and a user's, such as an EMA of the weights; also in a process that has
    made an optimizer of the class below ours, into whose ``step`` torch then puts hooks of its own."""
    without_hooks = inspect.unwrap(PLAIN[kind].step, stop=lambda step: not hasattr(step, "hooked"))
    monkeypatch.setattr(PLAIN[kind], "step", without_hooks)
    if plain_was_made:
        PLAIN[kind]([torch.nn.Parameter(torch.zeros(1))])
        assert PLAIN[kind].step.hooked, "torch has put hooks into it"
    layer, other = (parameter(torch.ones(4), torch.zeros(4)) for _ in range(2))
    groups = [{"params": [layer], FLAG: True}, {"params": [other], FLAG: False}]
    optimizer = attached(kind(groups, lr=0.5, weight_decay=0.0), {layer: [(0, 4, 0)]}, torch.ones(1))
    calls = []

    def kfac(optimizer, arguments, keywords):
        calls.append("kfac")
        for each in (layer, other):
            each.grad.fill_(1.0)

    def before(optimizer, arguments, keywords):
        calls.append("before")

    def after(optimizer, arguments, keywords):
        calls.append("after")
        averages.append([layer.detach().clone(), other.detach().clone()])

    averages = []
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_pre_hook(kfac)
    optimizer.register_step_post_hook(after)
    everywhere = [
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ]
    try:
        optimizer.step()
    finally:
        for hook in everywhere:
            hook.remove()
    assert calls == ["before", "before", "kfac", "after", "after"]
    assert len(averages) == 2
    for of_layer, of_other in averages:
        assert of_layer.equal(layer.detach()) and of_other.equal(other.detach())
    assert layer.tolist() == [0.5] * 4
    assert other.tolist() == pytest.approx([0.5] * 4)
