"""A mixture that DeepSpeed's AutoEP spreads over several ranks, and all of its experts in one
process."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_kfac.config import keys as kfac_config
from tests.deepspeed.modes import MICRO_ROWS, STEPS, Mode
from tests.deepspeed.parallel import data_parallel_part
from tests.deepspeed.runs import build
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch, make_net
from tests.spread import Variation

WIDTH, INNER, TOP, TOKENS = 8, 16, 2, 24
Given = Callable[[nn.Module], dict]
STACKS = {"w1": "gate", "w3": "up", "w2": "down"}
"""AutoEP's names, and those of the experts in one process."""


@dataclass(frozen=True)
class Case:
    """How the experts are spread.

    Attributes:
        grouped: whether they are multiplied at once.
        checkpointed: whether backward runs the mixture again.
        apart: whether each expert has an A of its own, as in the oracle.
    """

    mode: Mode
    ep_size: int
    grouped: bool = True
    experts: int = 4
    checkpointed: bool = False
    apart: bool = True

    @property
    def local(self) -> int:
        return self.experts // self.ep_size

    @property
    def first(self) -> int:
        """This rank's first expert."""
        return dist.get_rank() % self.ep_size * self.local


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class WholeNet(nn.Module):
    """All experts in one process, each called with its tokens only."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, WIDTH)
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x)).flatten(0, 1)
        weights, chosen = torch.softmax(self.gate(h), -1).topk(TOP)
        weights, mixed = weights / weights.sum(-1, keepdim=True), torch.zeros_like(h)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            if len(token):
                mixed = mixed.index_add(0, token, expert(h[token]) * weights[token, place, None])
        return self.head(h + mixed)


class Stacks(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * INNER, WIDTH))
        self.down_proj = nn.Parameter(torch.empty(experts, WIDTH, INNER))


class Mixture(nn.Module):
    """As transformers' Mixtral has it; AutoEP puts its own layer in its place."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, experts, bias=False), Stacks(experts)


class Net(nn.Module):
    def __init__(self, whole: WholeNet, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        experts = len(whole.experts)
        self.config = SimpleNamespace(num_local_experts=experts, num_experts_per_tok=TOP)
        self.up, self.mlp, self.head = (
            nn.Linear(FEATURES, WIDTH),
            Mixture(experts),
            nn.Linear(WIDTH, CLASSES),
        )
        self.up.load_state_dict(whole.up.state_dict())
        self.head.load_state_dict(whole.head.state_dict())
        self.mlp.gate.load_state_dict(whole.gate.state_dict())
        with torch.no_grad():
            for index, expert in enumerate(whole.experts):
                self.mlp.experts.gate_up_proj[index] = torch.cat(
                    [expert.gate.weight, expert.up.weight]
                )
                self.mlp.experts.down_proj[index] = expert.down.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        return self.head(
            h + (checkpoint(self.mlp, h, use_reentrant=False) if self.checkpointed else self.mlp(h))
        )


def make_whole(case: Case) -> WholeNet:
    return make_net(partial(WholeNet, case.experts))


def make_engine(case: Case, given: Given = lambda model: {}, **options):
    """Args:
    given: of a model, arguments of initialize besides.
    options: of AutoEP.
    """
    block = {
        "enabled": True,
        "autoep_size": case.ep_size,
        "moe_layer_pattern": "mlp",
        "use_grouped_mm": case.grouped,
    }
    model = Net(make_whole(case), case.checkpointed)
    if case.mode.zero_init:
        deepspeed.zero.Init(module=model, config_dict_or_path=case.mode.config(1))
    arguments = {"model_parameters": list(model.parameters()), **given(model)}
    overrides = {"expert_parallel": {**block, **options}}
    with patch.object(kfac_config, "SHARES", not case.apart):
        return build(case.mode, model=model, given=arguments, **overrides)


def train(engine, steps: int = STEPS, order: int | None = None) -> None:
    for step in range(steps):
        batch = make_batch(step, dist.get_world_size() * MICRO_ROWS, TOKENS)
        x, y = Variation(order=order).rows(*data_parallel_part(*batch))
        engine.backward(cross_entropy(engine(x.to(engine.get_data_types()[0])), y))
        engine.step()


def weights(engine, case: Case) -> dict[str, Tensor]:
    """In names of the whole model."""
    found = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=case.mode.stage == 3):
            value = p.detach().clone()
        place, _, stack = name.rpartition(".")
        if place == "mlp.experts":
            for index, matrix in enumerate(value):
                found[f"experts.{case.first + index}.{STACKS[stack]}.weight"] = matrix
        else:
            found[name.removeprefix("mlp.router.")] = value
    return found
