"""Mixtures that DeepSpeed's AutoEP has spread over ranks train like all experts in one process."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ds_kfac
from ds_kfac.config import keys as kfac_config
from tests.close import exact
from tests.deepspeed.modes import MICRO_ROWS, STEPS, Mode
from tests.deepspeed.parallel import (
    EVERYTHING,
    assert_alike,
    assert_experts_are_saved,
    assert_ranks_agree,
    data_parallel_part,
    shared_folder,
    train_whole,
    whole_state,
)
from tests.deepspeed.runs import build, whole_batch
from tests.deepspeed.said import error_of
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch, make_net
from tests.ranks import of_ranks
from tests.spread import FACTOR, FLOOR, Variation, difference, within

pytestmark = pytest.mark.ranks(2)
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


def sgd(stage: int, **options) -> Mode:
    kfac = {"preconditioner": {"kl_clip": 1e-5}}
    return Mode(f"autoep-z{stage}", stage, clip=0.0, kfac=kfac, **options)


def adam(stage: int, **options) -> Mode:
    return Mode(f"autoep-adam-z{stage}", stage, clip=0.0, adam=True, **options)


ROWS = [
    (Case(sgd(0), 2, grouped=False), 2),
    (Case(sgd(0), 2, experts=2), 2),
    (Case(sgd(1), 1), 2),
    (Case(sgd(2), 2, checkpointed=True), 2),
    (Case(sgd(3), 2, grouped=False), 2),
    (Case(adam(0), 2), 2),
    (Case(adam(1), 2), 2),
    (Case(adam(3), 1), 2),
    (Case(sgd(1), 2), 4),
    (Case(sgd(3, zero_init=True), 2), 4),
    (Case(adam(2), 2, grouped=False), 4),
    (Case(adam(3), 2), 4),
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "world"),
    ROWS,
    ids=[f"{case.mode.name}-{case.ep_size}-{case.experts}-{world}" for case, world in ROWS],
)
def test_experts_match_one_process(case, world):
    engine = make_engine(case)
    train(engine)
    kfacs = engine.kfac.job.preconditioners
    group = f"experts_ep_size_{case.ep_size}_rank_{dist.get_rank() % case.ep_size}"
    assert [(kfac.engine_view.domain.name, len(kfac.layers)) for kfac in kfacs] == [
        ("dense", 3),
        (group, 3 * case.local),
    ]
    stacks = {f"mlp.experts.w{n}.{index}" for n in (1, 2, 3) for index in range(case.local)}
    assert {layer.name for kfac in kfacs for layer in kfac.layers} == {
        "up",
        "head",
        "mlp.router.gate",
        *stacks,
    }
    assert not any(kfac.proving.unfit for kfac in kfacs)
    losses = whole_batch(world * MICRO_ROWS, 1, TOKENS)
    whole = train_whole(engine, case.mode, partial(make_whole, case), losses)
    assert_alike(engine, case.mode, weights(engine, case), whole)


SHARED = Case(Mode("autoep-shared", 2, clip=0.0), 2, apart=False)
"""One A for all experts of a rank."""


def shared_factors(engine) -> set[str]:
    keys = {key for kfac in engine.kfac.job.preconditioners for key in kfac.curvature.factors}
    return {key for key in keys if key.startswith("mlp.experts") and key.endswith("/A")}


def test_grouped_experts_that_share_A_step_as_experts_in_a_loop():
    """The bound is of a loop over experts, in other orders of the rows."""
    finals = []
    for grouped, order in ((False, None), (False, 1), (False, 2), (True, None)):
        engine = make_engine(replace(SHARED, grouped=grouped))
        initial = weights(engine, SHARED)
        train(engine, order=order)
        assert shared_factors(engine) == {"mlp.experts.w1.0/A", "mlp.experts.w2.0/A"}
        finals.append(weights(engine, SHARED))
    plain, *others, grouped = finals
    spread = max(difference(other, plain, initial) for other in others)
    assert not within("shared", difference(grouped, plain, initial), FACTOR * spread + FLOOR)


@pytest.mark.ranks(4)
def test_with_everything_on_all_ranks_have_the_same_weights():
    mode = Mode("autoep-everything", 2, dtype="bf16", clip=0.0, kfac=EVERYTHING)
    case = Case(mode, 2, apart=False)
    engine = make_engine(case)
    assert_ranks_agree(engine, partial(weights, case=case), train)
    names = of_ranks(sorted(weights(engine, case)))
    assert names[0] != names[1] and names[0] == names[2], "two have each expert"


PLAIN = Case(Mode("autoep", 1), 2)
REFUSED = {
    "disable_triton_grouped_mm to true": ({}, {"use_triton_grouped_mm": True}),
    'gate_up_impl to "separate"': ({"gate_up_impl": "fused"}, {}),
    'comm_backend to "comm"': ({}, {"comm_backend": "deepep"}),
    "autotp_size to 1": ({}, {"autotp_size": partial(int, 2)}),
}
"""Remedy -> options of AutoEP, and attributes of the engine, its mixture, or the stacks in that,
which cannot be had on a CPU or are DeepSpeed's to refuse."""


@pytest.mark.parametrize("words", REFUSED)
def test_what_autoep_cannot_do_is_refused(words):
    options, attributes = REFUSED[words]
    mode = replace(PLAIN.mode, kfac={"enabled": False})
    engine = make_engine(replace(PLAIN, mode=mode), **options)
    mixture = engine.module.mlp
    for key, value in attributes.items():
        owner = next(one for one in (mixture, mixture.experts, engine) if hasattr(one, key))
        setattr(owner, key, value)
    assert words in error_of(lambda: ds_kfac.attach(engine, {}))


def test_an_optimizer_made_before_the_layers_were_replaced_is_refused():
    def given(model) -> dict:
        return {"optimizer": ds_kfac.KFACAdamW(model.parameters()), "model_parameters": None}

    assert "name it in the DeepSpeed config" in error_of(lambda: make_engine(PLAIN, given))


def test_a_checkpoint_holds_the_experts_of_every_rank():
    case = Case(sgd(2), 2)
    assert_experts_are_saved(
        lambda ep_size: make_engine(replace(case, ep_size=ep_size)), train, "experts.w1."
    )


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_an_A_that_experts_share_continues_at_another_ep_size(before, after):
    folder, leaders = shared_folder(), {1: (0,), 2: (0, 2)}
    saved, loaded = (make_engine(replace(SHARED, ep_size=size)) for size in (before, after))
    train(saved, 3)
    saved.save_checkpoint(folder, tag="t")
    loaded.kfac.load_state(folder, "t")
    states = []
    for engine, size in ((saved, before), (loaded, after)):
        state = whole_state(engine.kfac.job)
        state = {k: v for k, v in state.items() if "experts" in k and k.endswith("/A")}
        names = {f"mlp.experts.{w}.{first}/A" for w in ("w1", "w2") for first in leaders[size]}
        assert state.keys() == names
        states.append(state)
    for key, factor in states[1].items():
        source = key if key in states[0] else key.replace(".2/", ".0/")
        exact(factor, states[0][source], what=key)
    for kfac in loaded.kfac.job.preconditioners:
        assert set(kfac.curvature.specs) <= set(kfac.curvature.ready), "decomposed again"
