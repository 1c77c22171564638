"""A mixture of experts over several ranks, by deepspeed.moe or by AutoEP, and all of its experts in
one process."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_kfac.config import keys as kfac_config
from tests.deepspeed.modes import CLIPPED, MICRO_ROWS, Mode
from tests.deepspeed.parallel import Parallelism, whole_batch
from tests.deepspeed.runs import build, used
from tests.models import CLASSES, FEATURES, make_batch, make_net
from tests.spread import Variation

EXPERTS, WIDTH, INNER, TOKENS = 4, 8, 16, 24
LOCAL = "moe.deepspeed_moe.experts.deepspeed_experts"
STACKS = {"w1": "gate", "w3": "up", "w2": "down"}
"""AutoEP's names, and those of the experts in one process."""


class Expert(nn.Module):
    """The first layers have no bias: an empty place of an expert, whose input is zero, is then zero
    in all layers."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class WholeNet(nn.Module):
    """All experts in one process, each called with its tokens only."""

    def __init__(self, experts: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.up = nn.Linear(FEATURES, WIDTH)
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(Expert(bias=top == 1) for _ in range(experts))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x)).flatten(0, 1)
        weights, chosen = torch.softmax(self.gate(h), -1).topk(self.top)
        if self.top > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.zeros_like(h)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            if len(token):
                mixed = mixed.index_add(0, token, expert(h[token]) * weights[token, place, None])
        return self.head(h + mixed)


class DistributedNet(nn.Module):
    """By deepspeed.moe."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, WIDTH)
        self.moe = MoE(
            WIDTH, Expert(), EXPERTS, ep_size, drop_tokens=False, use_rts=False, min_capacity=1
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        return self.head(h + self.moe(h)[0])


class Mixture(nn.Module):
    """As transformers' Mixtral has it; AutoEP puts its own layer in its place."""

    def __init__(self, whole: WholeNet) -> None:
        super().__init__()
        self.gate, self.experts = whole.gate, nn.Module()
        halves = [torch.cat([expert.gate.weight, expert.up.weight]) for expert in whole.experts]
        self.experts.gate_up_proj = nn.Parameter(torch.stack(halves).detach())
        downs = [expert.down.weight for expert in whole.experts]
        self.experts.down_proj = nn.Parameter(torch.stack(downs).detach())


class MixtralNet(nn.Module):
    """What AutoEP spreads."""

    def __init__(self, whole: WholeNet, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.config = SimpleNamespace(
            num_local_experts=len(whole.experts), num_experts_per_tok=whole.top
        )
        self.up, self.mlp, self.head = whole.up, Mixture(whole), whole.head

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        if self.recomputes:
            return self.head(h + checkpoint(self.mlp, h, use_reentrant=False))
        return self.head(h + self.mlp(h))


@dataclass(frozen=True)
class Experts(Parallelism):
    """How the experts are spread.

    Attributes:
        auto: by AutoEP, each token by two experts; else by deepspeed.moe, by one.
        recomputes: whether AutoEP's layer is checkpointed.
        grouped: whether AutoEP multiplies them at once.
        apart: whether each expert has an A of its own, as in the oracle.
        order: seed of a permutation of every batch's rows.
    """

    auto: bool = False
    ep_size: int = 2
    experts: int = EXPERTS
    recomputes: bool = False
    grouped: bool = True
    apart: bool = True
    order: int | None = None

    @property
    def whole(self) -> Callable[[], WholeNet]:
        return partial(WholeNet, self.experts, 1 + self.auto)

    @property
    def local(self) -> int:
        return self.experts // self.ep_size

    @property
    def first(self) -> int:
        """This rank's first expert."""
        return dist.get_rank() % self.ep_size * self.local

    def make(self, mode: Mode, given: Callable[[nn.Module], dict] = lambda model: {}):
        """Args:
        given: of a model, arguments of initialize besides.
        """
        whole = make_net(self.whole)
        if self.auto:
            return self._make_auto(mode, whole, given)
        model = DistributedNet(self.ep_size)
        initial = dict(whole.named_parameters())
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(initial[self.whole_name(name)])
        trained = {"params": list(model.parameters()), "name": "parameters"}
        groups = split_params_into_different_moe_groups_for_optimizer(trained)
        return build(mode, model=model, given={"model_parameters": groups})

    def _make_auto(self, mode: Mode, whole: WholeNet, given: Callable):
        block = {
            "enabled": True,
            "autoep_size": self.ep_size,
            "moe_layer_pattern": "mlp",
            "use_grouped_mm": self.grouped,
        }
        model = MixtralNet(whole, self.recomputes)
        if mode.zero_init:
            deepspeed.zero.Init(module=model, config_dict_or_path=mode.config(1))
        arguments = {"model_parameters": list(model.parameters()), **given(model)}
        with patch.object(kfac_config, "SHARES", not self.apart):
            return build(mode, model=model, given=arguments, expert_parallel=block)

    def batch(self, step: int) -> tuple[Tensor, ...]:
        whole = make_batch(step, dist.get_world_size() * MICRO_ROWS, TOKENS)
        own = (t.split(MICRO_ROWS)[dist.get_rank()] for t in whole)
        return Variation(order=self.order).rows(*own)

    def whole_name(self, name: str) -> str:
        """Of a parameter of the distributed model, in the whole one."""
        if name.startswith(LOCAL):
            index, rest = name.removeprefix(LOCAL + ".").split(".", 1)
            return f"experts.{self.first + int(index)}.{rest}"
        return "gate.weight" if "gate" in name else name

    def weights(self, engine) -> dict[str, Tensor]:
        found = {}
        for name, value in used(engine).items():
            place, _, stack = name.rpartition(".")
            if place == "mlp.experts":
                for index, matrix in enumerate(value, self.first):
                    found[f"experts.{index}.{STACKS[stack]}.weight"] = matrix
            else:
                found[self.whole_name(name)] = value
        return found

    def losses(self, mode: Mode):
        return whole_batch(dist.get_world_size() * MICRO_ROWS, 1, TOKENS)

    def check(self, engine, mode: Mode) -> None:
        kfacs = engine.kfac.job.preconditioners
        group = f"experts_ep_size_{self.ep_size}_rank_{dist.get_rank() % self.ep_size}"
        assert [(kfac.engine_view.domain.name, len(kfac.layers)) for kfac in kfacs] == [
            ("dense", 3),
            (group, 3 * self.local),
        ]
        assert not any(kfac.proving.unfit for kfac in kfacs)
        if mode.clip:
            assert float(engine.get_global_grad_norm()) > 2 * CLIPPED, "there is something to clip"
