"""A mixture of experts of deepspeed.moe over several ranks, and all of its experts in one
process."""

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.deepspeed.modes import MICRO_ROWS, STEPS, Mode
from tests.deepspeed.parallel import data_parallel_part
from tests.deepspeed.runs import build
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch

EXPERTS, WIDTH, TOKENS = 4, 8, 24
INNER = "moe.deepspeed_moe.experts.deepspeed_experts"


def make_expert() -> nn.Sequential:
    """The first layer has no bias: an empty place of an expert, whose input is zero, is then zero
    in both layers."""
    return nn.Sequential(nn.Linear(WIDTH, 10, bias=False), nn.SiLU(), nn.Linear(10, WIDTH))


class ExpertNet(nn.Module):
    """All experts in one process, each called with its tokens only.

    Args:
        starved: the last expert never wins: its logit is the mean of the others'.
    """

    def __init__(self, starved: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(make_expert() for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, CLASSES)
        if starved:
            with torch.no_grad():
                self.gate.weight[-1] = self.gate.weight[:-1].mean(0)
            self.gate.requires_grad_(False)

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
    """Args:
    recomputes: "", or whether its checkpoints are "reentrant" or "not".
    """

    def __init__(self, ep_size: int, recomputes: str = "") -> None:
        super().__init__()
        self.recomputes = recomputes
        self.up = nn.Linear(FEATURES, WIDTH)
        self.moe = MoE(
            WIDTH, make_expert(), EXPERTS, ep_size, drop_tokens=False, use_rts=False, min_capacity=1
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        if not self.recomputes:
            return self.head(h + self.moe(h)[0])
        reentrant = self.recomputes == "reentrant"
        return self.head(h + checkpoint(lambda h: self.moe(h)[0], h, use_reentrant=reentrant))


def first_expert(ep_size: int) -> int:
    """Of this rank."""
    return dist.get_rank() % ep_size * (EXPERTS // ep_size)


def whole_name(name: str, first_expert: int) -> str:
    """Of a parameter of the distributed model, in the whole one."""
    if name.startswith(INNER):
        index, rest = name.removeprefix(INNER + ".").split(".", 1)
        return f"experts.{first_expert + int(index)}.{rest}"
    return "gate.weight" if "gate" in name else name


def whole_layer(name: str, first_expert: int) -> str:
    return whole_name(f"{name}.weight", first_expert).removesuffix(".weight")


def make_engine(mode: Mode, model: DistributedNet):
    trained = {"params": [p for p in model.parameters() if p.requires_grad], "name": "parameters"}
    groups = split_params_into_different_moe_groups_for_optimizer(trained)
    return build(mode, model=model, given={"model_parameters": groups})


def train(engine, steps: int = STEPS) -> None:
    for step in range(steps):
        x, y = data_parallel_part(*make_batch(step, dist.get_world_size() * MICRO_ROWS, TOKENS))
        engine.backward(cross_entropy(engine(x), y))
        engine.step()


def weights(engine, first: int) -> dict[str, Tensor]:
    """In names of the whole model."""
    parameters = engine.module.named_parameters()
    return {whole_name(name, first): p.detach().clone() for name, p in parameters}
