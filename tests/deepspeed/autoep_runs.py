"""A mixture that DeepSpeed's AutoEP spreads over several ranks, and all of its experts in one process."""

import tempfile
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.deepspeed.modes import MICRO_ROWS, STEPS, Mode
from tests.deepspeed.parallel import build, same, train_whole, whole_state
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch
from tests.spread import Variation, difference

WIDTH, INNER, TOP, TOKENS = 8, 12, 2, 24
STACKS = {"w1": "gate", "w3": "up", "w2": "down"}
"""AutoEP's names, and those of the experts in one process."""


@dataclass(frozen=True)
class Case:
    """How the experts are spread.

    Attributes:
        grouped: whether they are multiplied at once.
    """

    mode: Mode
    ep_size: int
    grouped: bool = True
    experts: int = 4

    @property
    def name(self) -> str:
        return f"{self.mode.name} ep_size {self.ep_size} of {self.experts}{' grouped' if self.grouped else ''}"

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
    def __init__(self, whole: WholeNet) -> None:
        super().__init__()
        experts = len(whole.experts)
        self.config = SimpleNamespace(num_local_experts=experts, num_experts_per_tok=TOP)
        self.up, self.mlp, self.head = nn.Linear(FEATURES, WIDTH), Mixture(experts), nn.Linear(WIDTH, CLASSES)
        self.up.load_state_dict(whole.up.state_dict())
        self.head.load_state_dict(whole.head.state_dict())
        self.mlp.gate.load_state_dict(whole.gate.state_dict())
        with torch.no_grad():
            for index, expert in enumerate(whole.experts):
                self.mlp.experts.gate_up_proj[index] = torch.cat([expert.gate.weight, expert.up.weight])
                self.mlp.experts.down_proj[index] = expert.down.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        return self.head(h + self.mlp(h))


def make_whole(case: Case) -> WholeNet:
    torch.manual_seed(0)
    return WholeNet(case.experts)


def make_engine(case: Case, **options):
    block = {"enabled": True, "autoep_size": case.ep_size, "moe_layer_pattern": "mlp", "use_grouped_mm": case.grouped}
    mode = replace(case.mode, extra={**case.mode.extra, "expert_parallel": {**block, **options}})
    model = Net(make_whole(case))
    return build(mode, model, 1, dist.get_world_size(), model_parameters=list(model.parameters()))


def train(engine, steps: int = STEPS) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(steps):
        x, y = (t.chunk(world)[rank] for t in make_batch(step, world * MICRO_ROWS, TOKENS))
        engine.backward(cross_entropy(engine(x).flatten(0, 1), y))
        engine.step()


def whole_weights(engine, case: Case) -> dict[str, Tensor]:
    """Weights, in names of the whole model."""
    found = {}
    for name, p in engine.module.named_parameters():
        place, _, stack = name.rpartition(".")
        if place == "mlp.experts":
            for index, matrix in enumerate(p.detach().clone()):
                found[f"experts.{case.first + index}.{STACKS[stack]}.weight"] = matrix
        else:
            found[name.removeprefix("mlp.router.")] = p.detach().clone()
    return found


def compare(cases: list[Case]) -> list[dict]:
    """Per case: how far this rank's parameters are from one process."""
    world, results = dist.get_world_size(), []

    def whole_loss(model: nn.Module, step: int, variation: Variation) -> Tensor:
        x, y = variation.rows(*make_batch(step, world * MICRO_ROWS, TOKENS))
        return cross_entropy(model(x.to(next(model.parameters()).dtype)), y)

    for case in cases:
        whole = make_whole(case)
        initial = {name: p.detach().clone() for name, p in whole.named_parameters()}
        expected = train_whole(case.mode, whole, whole_loss, terms=world * MICRO_ROWS * TOKENS)
        engine = make_engine(case)
        train(engine)
        results.append({
            "difference": difference(whole_weights(engine, case), expected.weights, initial),
            "bound": expected.bound,
            "nu_bound": expected.nu_bound,
            "nu": [1.0, 1.0] if case.mode.adam else [float(engine.kfac.metrics.nu), expected.nu],
            "domains": [(kfac.target.domain.name, len(kfac.layers)) for kfac in engine.kfac.job.preconditioners],
            "layers": sorted(whole_weights(engine, case)),
        })  # fmt: skip
        engine.kfac.detach()
        engine.destroy()
    return results


def refusals(cases: dict[str, tuple[Case, dict, dict]]) -> dict[str, str]:
    """Name -> message of an engine with these options of AutoEP, and attributes of its stacks."""
    messages = {}
    for name, (case, options, attributes) in cases.items():
        init = {}
        from deepspeed.moe.ep_experts import GroupedExperts

        for key, value in attributes.items():
            init[key] = getattr(GroupedExperts, key, None)
        make, own = GroupedExperts.__init__, attributes

        def patched(self, *arguments, own=own, make=make, **named):
            make(self, *arguments, **named)
            for key, value in own.items():
                setattr(self, key, value)

        GroupedExperts.__init__ = patched
        try:
            make_engine(case, **options)
            messages[name] = ""
        except ValueError as error:
            messages[name] = str(error)
        finally:
            GroupedExperts.__init__ = make
    return messages


def shared(case: Case) -> dict:
    """With one A for all experts here: its counts, and whether all is finite."""
    engine = make_engine(case)
    train(engine, 2)
    kfac = engine.kfac.job.preconditioners[1]
    factors = {key: state.factor for key, state in kfac.curvature.factors.items()}
    return {
        "keys": sorted(key for key in factors if key.endswith("/A")),
        "finite": all(bool(torch.isfinite(factor.packed_P).all()) for factor in factors.values()),
        "summary": float(engine.kfac.metrics.summary.sum()),
    }


def saved(case: Case) -> dict:
    """Whether the state came back, also at another ep_size, and the steps of every domain."""
    directory = [tempfile.mkdtemp()]
    dist.broadcast_object_list(directory)
    first, second = make_engine(case), make_engine(case)
    train(first, 3)
    first.save_checkpoint(directory[0], tag="t")
    second.load_checkpoint(directory[0], tag="t")
    other = make_engine(replace(case, ep_size=1))
    other.kfac.load_state(directory[0], "t")
    state = whole_state(first.kfac.job)
    return {
        "keys": sorted(key for key in state if key.endswith("/A")),
        "loaded": [same(state, whole_state(engine.kfac.job)) for engine in (second, other)],
        "steps": [kfac.steps for kfac in second.kfac.job.preconditioners],
    }
