"""A mixture that DeepSpeed's AutoEP spreads over several ranks, and all of its experts in one
process."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ds_kfac
from ds_kfac.config import keys as kfac_config
from tests.deepspeed import parallel
from tests.deepspeed.modes import MICRO_ROWS, STEPS, Mode
from tests.deepspeed.parallel import (
    build,
    compared,
    shared_folder,
    train_whole,
    whole_batch,
    whole_state,
)
from tests.deepspeed.said import error_of
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch
from tests.spread import FACTOR, FLOOR, Variation, difference

WIDTH, INNER, TOP, TOKENS = 8, 16, 2, 24
Arguments = Callable[[nn.Module], dict]
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
    def name(self) -> str:
        return (
            f"{self.mode.name} ep_size {self.ep_size} of "
            f"{self.experts}{' grouped' if self.grouped else ''}"
        )

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
    torch.manual_seed(0)
    return WholeNet(case.experts)


def make_engine(case: Case, arguments: Arguments = lambda model: {}, **options):
    """Args:
    arguments: of initialize, besides, of a model.
    options: of AutoEP.
    """
    block = {
        "enabled": True,
        "autoep_size": case.ep_size,
        "moe_layer_pattern": "mlp",
        "use_grouped_mm": case.grouped,
    }
    mode = replace(case.mode, extra={**case.mode.extra, "expert_parallel": {**block, **options}})
    model = Net(make_whole(case), case.checkpointed)
    if mode.zero_init:
        deepspeed.zero.Init(module=model, config_dict_or_path=mode.config(1, dist.get_world_size()))
    parameters = {"model_parameters": list(model.parameters())}
    with patch.object(kfac_config, "SHARES", not case.apart):
        return build(mode, model, 1, dist.get_world_size(), **{**parameters, **arguments(model)})


def train(engine, steps: int = STEPS, order: int | None = None) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(steps):
        x, y = (t.chunk(world)[rank] for t in make_batch(step, world * MICRO_ROWS, TOKENS))
        x, y = Variation(order=order).rows(x, y)
        engine.backward(cross_entropy(engine(x.to(engine.get_data_types()[0])), y))
        engine.step()


def whole_weights(engine, case: Case) -> dict[str, Tensor]:
    """Weights, in names of the whole model."""
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


def compare(cases: list[Case]) -> list[dict]:
    """Per case: how far this rank's parameters are from one process."""
    world, results = dist.get_world_size(), []
    for case in cases:
        whole = make_whole(case)
        initial = {name: p.detach().clone() for name, p in whole.named_parameters()}
        expected = train_whole(case.mode, whole, whole_batch(world * MICRO_ROWS, TOKENS))
        engine = make_engine(case)
        train(engine)
        seen = sorted(
            layer.name
            for kfac in engine.kfac.job.preconditioners
            for layer in kfac.layers
            if layer.name not in kfac.proving.unfit
        )
        results.append(
            compared(engine, case.mode, whole_weights(engine, case), expected, initial, seen=seen)
        )
    return results


def refusals(cases: dict[str, tuple[Case, dict, dict]]) -> dict[str, str]:
    """Name -> message about an engine with these options of AutoEP, and attributes of the engine,
    its mixture, or the stacks in that, which cannot be had on a CPU or are DeepSpeed's to
    refuse."""
    messages = {}
    for name, (case, options, attributes) in cases.items():
        engine = make_engine(
            replace(case, mode=replace(case.mode, kfac={**case.mode.kfac, "enabled": False})),
            **options,
        )
        mixture = engine.module.mlp
        for key, value in attributes.items():
            setattr(
                next(one for one in (mixture, mixture.experts, engine) if hasattr(one, key)),
                key,
                value,
            )
        try:
            ds_kfac.attach(engine, {})
            messages[name] = ""
        except ValueError as error:
            messages[name] = str(error)
        engine.destroy()
    return messages


def object_refused(case: Case) -> str:
    def arguments(model: nn.Module) -> dict:
        return {"optimizer": ds_kfac.KFACAdamW(model.parameters()), "model_parameters": None}

    return error_of(lambda: make_engine(case, arguments))


def sharing(case: Case) -> dict:
    """With one A for all experts here: grouped products against a loop over experts, which is what
    ``bound`` is of."""
    runs, keys = {}, []
    for grouped, order in ((False, None), (False, 1), (False, 2), (True, None)):
        engine = make_engine(replace(case, grouped=grouped))
        initial = whole_weights(engine, case)
        train(engine, order=order)
        runs[grouped, order] = whole_weights(engine, case)
        keys.append(
            sorted(
                key for kfac in engine.kfac.job.preconditioners for key in kfac.curvature.factors
            )
        )
        engine.destroy()
    plain = runs[False, None]
    spread = max(difference(runs[False, order], plain, initial) for order in (1, 2))
    bound = FACTOR * spread + FLOOR
    return {
        "difference": difference(runs[True, None], plain, initial),
        "bound": bound,
        "keys": keys,
    }


def everything_on(case: Case) -> dict[str, Tensor]:
    return parallel.everything_on(
        make_engine(case), lambda engine: whole_weights(engine, case), train
    )


def saved(case: Case) -> dict:
    return parallel.saved_experts(
        lambda ep_size: make_engine(replace(case, ep_size=ep_size)), train
    )


def saved_sharing(case: Case) -> list[dict]:
    """One A for all experts here, saved at an ep_size and loaded at another, both ways: those
    saved, those loaded, and what is decomposed again. In global names."""
    folder, results = shared_folder(), []
    for ep_size in (case.ep_size, 1):
        first, second = (
            make_engine(replace(case, ep_size=size))
            for size in (ep_size, 1 + case.ep_size - ep_size)
        )
        train(first, 3)
        first.save_checkpoint(folder, tag=f"{ep_size}")
        second.kfac.load_state(folder, f"{ep_size}")
        found = []
        for engine in (first, second):
            state = whole_state(engine.kfac.job)
            found.append(
                {
                    key: value
                    for key, value in state.items()
                    if "experts" in key and key.endswith("/A")
                }
            )
        ready = [key for kfac in second.kfac.job.preconditioners for key in kfac.curvature.ready]
        wanted = [key for kfac in second.kfac.job.preconditioners for key in kfac.curvature.specs]
        results.append(
            {"saved": found[0], "loaded": found[1], "again": sorted(set(wanted) - set(ready))}
        )
    return results
