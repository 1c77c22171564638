"""One step of each optimizer class that DeepSpeed gets in place of KFACAdamW, without an engine."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, cpu_adam
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ds_kfac.directions.kfac_adamw.optimizer import (
    FLAG,
    KFACAdamWStep,
    KFACCPUAdamW,
    KFACTorchAdamW,
    LayerSlice,
)
from tests.close import close, exact


@pytest.fixture
def _without_compilers(monkeypatch):
    """Let DeepSpeed's Adam on CPUs step by ``W <- W - lr gradient``: compiling it takes minutes."""

    def step(optimizer, step, lr, beta1, beta2, eps, decay, correction, parameter, gradient, *_):
        parameter.sub_(lr * gradient)

    compiled = SimpleNamespace(
        create_adam=lambda *_: None, destroy_adam=lambda *_: None, adam_update=step
    )
    monkeypatch.setattr(cpu_adam.CPUAdamBuilder, "load", lambda self: compiled)


def parameter(values: Tensor, gradient: Tensor) -> torch.nn.Parameter:
    made = torch.nn.Parameter(values.clone())
    made.grad = gradient.clone()
    return made


def attached(optimizer: KFACAdamWStep, slices: dict, used: Tensor) -> KFACAdamWStep:
    """The optimizer as K-FAC leaves it before a step."""
    optimizer.slices = {p: [LayerSlice(*entry) for entry in own] for p, own in slices.items()}
    optimizer.used = used
    return optimizer


@pytest.mark.usefixtures("_without_compilers")
@pytest.mark.parametrize("plain_was_made", [False, True])
@pytest.mark.parametrize(
    ("kind", "plain"), [(KFACTorchAdamW, torch.optim.AdamW), (KFACCPUAdamW, DeepSpeedCPUAdam)]
)
def test_hooks_run_once_around_the_whole_step(kind, plain, plain_was_made, monkeypatch):
    """K-FAC's own, which writes the direction, and a user's, such as an EMA of the weights; also in
    a process that has made an optimizer of the class below ours, into whose ``step`` torch then
    puts hooks of its own."""
    without_hooks = inspect.unwrap(plain.step, stop=lambda step: not hasattr(step, "hooked"))
    monkeypatch.setattr(plain, "step", without_hooks)
    if plain_was_made:
        plain([torch.nn.Parameter(torch.zeros(1))])
        assert plain.step.hooked, "torch has put hooks into it"
    layer, other = (parameter(torch.ones(4), torch.zeros(4)) for _ in range(2))
    groups = [{"params": [layer], FLAG: True}, {"params": [other], FLAG: False}]
    optimizer = kind(groups, lr=0.5, weight_decay=0.0)
    attached(optimizer, {layer: [(0, 4, 0)]}, torch.ones(1))
    calls, seen = [], []

    def kfac(*_):
        calls.append("kfac")
        for each in (layer, other):
            each.grad.fill_(1.0)

    def after(*_):
        calls.append("after")
        seen.append(torch.stack([layer.detach(), other.detach()]))

    optimizer.register_step_pre_hook(kfac)
    optimizer.register_step_post_hook(after)
    everywhere = register_optimizer_step_post_hook(after)
    try:
        optimizer.step()
    finally:
        everywhere.remove()
    assert calls == ["kfac", "after", "after"]
    for weights in seen:
        close(weights, torch.full((2, 4), 0.5), sums=8)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rates_and_decay_of_bfloat16_masters_are_not_rounded_to_bfloat16(device, rate):
    """CUDA rounds a tensor without dimensions to the other tensor's dtype, and CPUs the alpha of a
    sum: 0.99 would be 0.988, and 0.1 would be 0.1001."""
    torch.manual_seed(0)
    weight, direction = (torch.randn(1000).bfloat16() for _ in range(2))
    master = parameter(weight.to(device), direction.to(device))
    optimizer = KFACTorchAdamW([{"params": [master], FLAG: True}], lr=0.1, weight_decay=0.1)
    optimizer.param_groups[0]["lr"] = rate
    attached(optimizer, {master: [(0, 1000, 0)]}, torch.ones(1, device=device)).step()
    decayed = (weight.double() * (1 - 0.1 * 0.1)).bfloat16()
    exact(master.detach().cpu(), (decayed.double() - 0.1 * direction.double()).bfloat16())


def test_parts_of_a_channels_last_parameter_are_its_rows():
    torch.manual_seed(0)
    weight = torch.randn(4, 2, 3, 3).to(memory_format=torch.channels_last)
    kernel = parameter(weight, torch.zeros_like(weight))
    optimizer = KFACTorchAdamW([{"params": [kernel], FLAG: True}], lr=0.5, weight_decay=0.5)
    attached(optimizer, {kernel: [(0, 36, 0), (36, 36, 1)]}, torch.tensor([0.0, 1.0])).step()
    exact(kernel.detach(), torch.cat([weight[:2], 0.75 * weight[2:]]))
