"""A mixture of experts of deepspeed.moe over several ranks, and all of its experts in one
process."""

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.deepspeed import parallel
from tests.deepspeed.modes import MICRO_ROWS, STEPS, Mode
from tests.deepspeed.parallel import build, compared, planned_refreshes, train_whole, whole_batch
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch

EXPERTS, WIDTH, TOKENS = 4, 8, 24
INNER = "moe.deepspeed_moe.experts.deepspeed_experts"


def make_expert() -> nn.Sequential:
    """The first layer has no bias: an empty place of an expert, whose input is zero, is then zero
    in both layers."""
    return nn.Sequential(nn.Linear(WIDTH, 10, bias=False), nn.SiLU(), nn.Linear(10, WIDTH))


class ExpertNet(nn.Module):
    """All experts in one process, each called with its tokens only."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(make_expert() for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x)).flatten(0, 1)
        gates = torch.softmax(self.gate(h), -1)
        chosen, mixed = gates.argmax(-1), torch.zeros_like(h)
        for index, expert in enumerate(self.experts):
            own = (chosen == index).nonzero().flatten()
            if len(own):
                mixed = mixed.index_add(0, own, expert(h[own]) * gates[own, index, None])
        return self.head(h + mixed)


class DistributedNet(nn.Module):
    recomputes = ""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, WIDTH)
        self.moe = MoE(
            WIDTH, make_expert(), EXPERTS, ep_size, drop_tokens=False, use_rts=False, min_capacity=1
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        if self.recomputes:
            return self.head(
                h
                + checkpoint(
                    lambda h: self.moe(h)[0], h, use_reentrant=self.recomputes == "reentrant"
                )
            )
        return self.head(h + self.moe(h)[0])


def whole_name(name: str, first_expert: int) -> str:
    """Of a parameter of the distributed model, in the whole one."""
    if name.startswith(INNER):
        index, rest = name.removeprefix(INNER + ".").split(".", 1)
        return f"experts.{first_expert + int(index)}.{rest}"
    return "gate.weight" if "gate" in name else name


def whole_layer(name: str, first_expert: int) -> str:
    return whole_name(f"{name}.weight", first_expert).removesuffix(".weight")


def make_whole(starved: bool) -> ExpertNet:
    """``starved``: the last expert never wins: its logit is the mean of the others'."""
    torch.manual_seed(0)
    model = ExpertNet()
    if starved:
        with torch.no_grad():
            model.gate.weight[-1] = model.gate.weight[:-1].mean(0)
        model.gate.requires_grad_(False)
    return model


def make_engine(mode: Mode, model: DistributedNet):
    trained = {"params": [p for p in model.parameters() if p.requires_grad], "name": "parameters"}
    groups = split_params_into_different_moe_groups_for_optimizer(trained)
    return build(mode, model, 1, dist.get_world_size(), model_parameters=groups)


def train(engine, steps: int = STEPS) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(steps):
        x, y = (t.chunk(world)[rank] for t in make_batch(step, world * MICRO_ROWS, TOKENS))
        engine.backward(cross_entropy(engine(x), y))
        engine.step()


SEQUENCES = 3, 3
"""Of each rank."""


def expert_factors(mode: Mode) -> list[dict]:
    return [expert_factors_once(mode, recomputes) for recomputes in ("", "reentrant", "not")]


def expert_factors_once(mode: Mode, recomputes: str) -> dict:
    """G of every expert's layers after a step, and of one process."""
    rank, whole, model = dist.get_rank(), make_whole(False), DistributedNet(2)
    first, model.recomputes = rank * (EXPERTS // 2), recomputes
    initial = {name: p.detach().clone() for name, p in whole.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial[whole_name(name, first)])
    x, y = make_batch(0, sum(SEQUENCES), TOKENS)
    parts = list(zip(x.split(SEQUENCES), y.split(SEQUENCES), strict=True))
    engine = make_engine(mode, model)
    engine.backward(cross_entropy(engine(parts[rank][0]), parts[rank][1]))
    engine.step()
    found = {
        whole_layer(key[:-2], first): factor.side.blocks(factor.packed_P)[0][0]
        for kfac in engine.kfac.job.preconditioners
        for key, factor in kfac.curvature.factors.items()
        if key.endswith("/G")
    }
    sums: dict[str, Tensor] = {}
    for x, y in parts:  # each rank's mean loss by itself
        handles, terms = [], y.numel()
        for name, module in whole.named_modules():

            def hook(module, inputs, output, name=name, terms=terms) -> None:
                def add(gradient: Tensor) -> None:
                    g = gradient.flatten(0, -2) * terms
                    sums[name] = sums.get(name, 0) + g.T @ g

                output.register_hook(add)

            handles += [module.register_forward_hook(hook)] if isinstance(module, nn.Linear) else []
        cross_entropy(whole(x), y).backward()
        for handle in handles:
            handle.remove()
    return {
        "found": found,
        "expected": {name: sums[name] / (sum(SEQUENCES) * TOKENS) for name in found},
    }


def refusals(modes: dict[str, Mode]) -> dict[str, str]:
    return parallel.refusals(
        make_engine, {name: (mode, DistributedNet(2)) for name, mode in modes.items()}
    )


def weights(engine, first: int) -> dict[str, Tensor]:
    """In names of the whole model."""
    return {
        whole_name(name, first): p.detach().clone() for name, p in engine.module.named_parameters()
    }


def everything_on(mode: Mode) -> dict[str, Tensor]:
    first = dist.get_rank() % 2 * (EXPERTS // 2)
    return parallel.everything_on(
        make_engine(mode, DistributedNet(2)), lambda engine: weights(engine, first), train
    )


def saved(mode: Mode) -> dict:
    return parallel.saved_experts(lambda ep_size: make_engine(mode, DistributedNet(ep_size)), train)


def compare(cases: list[tuple[Mode, int, bool]]) -> list[dict]:
    """Per (mode, ep_size, whether an expert has no tokens): how far this rank's parameters are from
    one process."""
    world, rank, results = dist.get_world_size(), dist.get_rank(), []
    for mode, ep_size, starved in cases:
        whole, model = make_whole(starved), DistributedNet(ep_size)
        model.moe.deepspeed_moe.gate.requires_grad_(not starved)
        first = rank % ep_size * (EXPERTS // ep_size)
        initial = {name: p.detach().clone() for name, p in whole.named_parameters()}
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(initial[whole_name(name, first)])
        engine = make_engine(mode, model)
        train(engine)
        exclude = ("gate", "experts.3.0", "experts.3.2") if starved else ()
        refreshes = None
        if mode.name.endswith("scaled"):
            refreshes = planned_refreshes(
                engine.kfac.job, lambda name, first=first: whole_layer(name, first)
            )
        expected = train_whole(
            mode,
            whole,
            whole_batch(world * MICRO_ROWS, TOKENS),
            exclude=exclude,
            refreshes=refreshes,
        )
        results.append(compared(engine, mode, weights(engine, first), expected, initial))
    return results
