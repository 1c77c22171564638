"""One step of each optimizer class that DeepSpeed gets in place of KFACAdamW, without an engine."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam, cpu_adam, fused_adam
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ds_kfac.directions.kfac_adamw.optimizer import (
    FLAG,
    KFACAdamWStep,
    KFACCPUAdamW,
    KFACFusedAdamW,
    KFACTorchAdamW,
    LayerSlice,
)
from tests.close import close, exact

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLAIN = {
    KFACTorchAdamW: torch.optim.AdamW,
    KFACFusedAdamW: FusedAdam,
    KFACCPUAdamW: DeepSpeedCPUAdam,
}
"""Our class -> the optimizer that it is made of."""


@pytest.fixture
def _without_compilers(monkeypatch):
    """Let DeepSpeed's two Adams step by ``W <- W - lr gradient``, since compiling their kernels
    takes minutes."""

    def fused_step(chunk, overflow, tensors, lr, *_):
        gradients, parameters, *_ = tensors
        torch._foreach_sub_(parameters, torch._foreach_mul(gradients, lr))

    def cpu_step(
        optimizer, step, lr, beta1, beta2, eps, decay, correction, parameter, gradient, *_
    ):
        parameter.sub_(lr * gradient)

    fused = SimpleNamespace(multi_tensor_adam=fused_step)
    cpu = SimpleNamespace(
        create_adam=lambda *_: None, destroy_adam=lambda *_: None, adam_update=cpu_step
    )
    monkeypatch.setattr(fused_adam.FusedAdamBuilder, "load", lambda self: fused)
    monkeypatch.setattr(cpu_adam.CPUAdamBuilder, "load", lambda self: cpu)


def parameter(values: Tensor, gradient: Tensor) -> torch.nn.Parameter:
    made = torch.nn.Parameter(values.clone())
    made.grad = gradient.clone()
    return made


def attached(
    optimizer: KFACAdamWStep, slices: dict[torch.nn.Parameter, list], used: Tensor
) -> KFACAdamWStep:
    """The optimizer as K-FAC leaves it before a step."""
    optimizer.slices = {
        parameter: [LayerSlice(*entry) for entry in entries]
        for parameter, entries in slices.items()
    }
    optimizer.used = used
    return optimizer


@pytest.mark.usefixtures("_without_compilers")
@pytest.mark.parametrize("plain_was_made", [False, True])
@pytest.mark.parametrize("kind", PLAIN)
def test_hooks_run_once_around_the_whole_step(kind, plain_was_made, monkeypatch):
    """K-FAC's own, which writes the direction, and a user's, such as an EMA of the weights; also in
    a process that has made an optimizer of the class below ours, into whose ``step`` torch then
    puts hooks of its own."""
    without_hooks = inspect.unwrap(PLAIN[kind].step, stop=lambda step: not hasattr(step, "hooked"))
    monkeypatch.setattr(PLAIN[kind], "step", without_hooks)
    if plain_was_made:
        PLAIN[kind]([torch.nn.Parameter(torch.zeros(1))])
        assert PLAIN[kind].step.hooked, "torch has put hooks into it"
    layer, other = (parameter(torch.ones(4), torch.zeros(4)) for _ in range(2))
    groups = [{"params": [layer], FLAG: True}, {"params": [other], FLAG: False}]
    optimizer = attached(
        kind(groups, lr=0.5, weight_decay=0.0), {layer: [(0, 4, 0)]}, torch.ones(1)
    )
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
    exact(layer.detach(), torch.full((4,), 0.5))
    close(other.detach(), torch.full((4,), 0.5), sums=8)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
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
