"""Every kind of model parallelism trains like the whole model in one process; its checkpoints hold
every layer of the job once; its ranks agree with everything on; and what it cannot do is refused.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor, nn

import ds_kfac
from ds_kfac.assignment import assign
from ds_kfac.zero.faults import faults
from tests.close import exact
from tests.covering import some
from tests.deepspeed.expert_runs import Experts
from tests.deepspeed.modes import CLIPPED, FP32_ACCUM, KFAC, STEPS, Mode
from tests.deepspeed.parallel import (
    COMM_OPT,
    EVERY_TYPE,
    EVERYTHING,
    FP32_WIRE,
    INVERSE,
    SOME,
    Parallelism,
    adam,
    assert_ranks_agree,
    assert_trained_alike,
    clip,
    shared_folder,
    whole_state,
)
from tests.deepspeed.runs import build
from tests.deepspeed.said import error_of
from tests.deepspeed.test_pipeline import PIPELINES, Stages, make_fork, tied_layers
from tests.deepspeed.test_tensor_parallel import Shards
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch, make_net
from tests.ranks import of_ranks
from tests.spread import FACTOR, FLOOR, difference, within

SEQUENCES, TOKENS, HEADS = 3, 16, 4


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, T, heads, D] -> [B, heads, T, D]
        return (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2)


class SequenceNet(nn.Module):
    """One block; every layer but the attention sees tokens one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 12)
        self.q, self.kv = nn.Linear(12, 12), nn.Linear(12, 24)
        self.out = nn.Linear(12, 12, bias=False)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, CLASSES)
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        parts = self.q(h), *self.kv(h).chunk(2, -1)
        parts = [part.unflatten(-1, (HEADS, -1)) for part in parts]
        if isinstance(self.attention, DistributedAttention):
            parts.append(0)
        mixed = self.attention(*parts)
        self.prediction = self.head(self.norm(h + self.out(mixed.flatten(2))))
        return self.prediction


def least_likely(prediction: Tensor, *ignored) -> Tensor:
    """A Monte-Carlo Fisher's loss whose labels are the same in every process."""
    return cross_entropy(prediction, prediction.argmin(-1))


@cache
def whole_sequences(rows: int, mean_over: int, sampled: bool):
    """The mean of the ranks' losses."""

    def losses(model, kfac, step, variation):
        x, y = variation.rows(*make_batch(step, rows, TOKENS))
        loss = cross_entropy(model(x.to(next(model.parameters()).dtype)), y)
        if sampled:
            kfac.sampled(least_likely(model.prediction))
        yield loss / mean_over

    return losses


@dataclass(frozen=True)
class Sequence(Parallelism):
    """Ulysses: pairs of ranks have the halves of the same sequences."""

    mean_over: int = 1

    whole = SequenceNet

    def make(self, mode: Mode):
        if not parallel_state_sp._SEQUENCE_PARALLEL_GROUP:
            parallel_state_sp.initialize_sequence_parallel(2)
        group, model = parallel_state_sp.get_sequence_parallel_group(), make_net(SequenceNet)
        model.attention = DistributedAttention(Attention(), group, 2, 1)
        engine = build(mode, model=model, given={"mpu": parallel_state_sp})
        if "monte_carlo" in mode.name:
            engine.kfac.sampler = least_likely
        return engine

    def train(self, engine, steps: int = STEPS, first: int = 0) -> None:
        # all rows of those that contribute
        with patch.object(assign, "strides", lambda *factors, **options: {}):
            super().train(engine, steps, first)

    def batch(self, step: int) -> list[Tensor]:
        pair, half = divmod(dist.get_rank(), 2)
        whole = make_batch(step, dist.get_world_size() // 2 * SEQUENCES, TOKENS)
        return [t.split(SEQUENCES)[pair].chunk(2, dim=1)[half] for t in whole]

    def losses(self, mode: Mode):
        rows = dist.get_world_size() // 2 * SEQUENCES
        return whole_sequences(rows, self.mean_over, "monte_carlo" in mode.name)

    def options(self, mode: Mode) -> dict:
        # DeepSpeed sums gradients over a sequence's ranks up to stage 2
        return {"scale": 1.0 if mode.stage == 3 else 2.0}

    def check(self, engine, mode: Mode) -> None:
        assert engine.kfac.preconditioner.observations.groups == (("q", "kv"),)
        known = faults(engine.kfac.preconditioner.layout)
        assert any("sequence" in fault for fault in known) == (mode.stage < 3)


# what it is combined with

BUDGET = {**COMM_OPT, "assignment": {**COMM_OPT["assignment"], "memory_budget_gb": 1.0}}
SAMPLED = {"factor": {**KFAC["factor"], "fisher": "monte_carlo"}}
ONE_ROW = {"factor": {**KFAC["factor"], "rows": 1}}
"""One rank has the rows, but not those of the other part of a sequence."""
REDUCED = {"factor": {**KFAC["factor"], "weight_sharing": "reduce"}}


TYPES = {**EVERY_TYPE, **clip(9e-5)}
FEW = clip(1e-5)


def moe(stage: int, words: str = "", **options) -> Mode:
    # at stage 0 DeepSpeed clips by an average of the ranks' norms
    return Mode(f"moe-z{stage}{words}", stage, **{"clip": 0.0, "kfac": FEW, **options})


MOE, AUTO = Experts(), Experts(auto=True)
MEGATRON, AUTOTP = Shards(), Shards("autotp")
ON_TWO_OR_FOUR = [
    [
        (Sequence(), Mode("sp-z0", 0, kfac=SOME)),
        (Sequence(2), Mode("sp-z2", 2, kfac=SOME)),
        (Sequence(2), Mode("sp-z3", 3, kfac=SOME)),
        (Sequence(), Mode("sp-z3", 3, kfac=SOME)),
        (Sequence(), adam("sp", 2)),
        (Sequence(), Mode("sp-z2-monte_carlo", 2, kfac=SAMPLED)),
        (Sequence(), Mode("sp-z0-comm_opt", 0, kfac={**EVERY_TYPE, **COMM_OPT})),
    ],
    PIPELINES,
    [
        *((Experts(ep_size=size), moe(stage)) for stage in (0, 2) for size in (1, 2)),
        (MOE, moe(1, "-inverse", kfac={**INVERSE, **FP32_WIRE})),
        (MOE, moe(0, "-comm_opt", kfac={**FEW, **BUDGET})),
        *((MOE, adam("moe", stage, clip=0.0)) for stage in (0, 1)),
    ],
    [
        *((MEGATRON, Mode(f"tp-z{stage}", stage, kfac=TYPES)) for stage in (0, 2)),
        (MEGATRON, Mode("tp-z0-comm_opt", 0, kfac={**TYPES, **COMM_OPT})),
        (MEGATRON, adam("tp", 1, clip=0.0)),
        # AutoTP leaves DeepSpeed's groups behind, so it comes last
        *((AUTOTP, Mode(f"autotp-z{stage}", stage, kfac=TYPES)) for stage in (0, 1, 2, 3)),
    ],
]
ON_TWO = [
    (Sequence(), Mode("sp-z2-rows", 2, kfac=ONE_ROW)),
    # a layer's gradient is the sum of what comes by both outputs of its stage
    (Stages(make_fork, 3), Mode("pipe-fork-z1", 1, clip=0.0)),
    # the norm is that of all experts, or of the whole model, whichever ranks have them
    *(
        (Experts(ep_size=size), adam("moe-clipped", stage, clip=CLIPPED))
        for stage, size in ((1, 1), (2, 2))
    ),
    *((MEGATRON, adam("tp-clipped", stage, clip=CLIPPED)) for stage in (0, 2)),
    (replace(AUTO, experts=2), moe(0)),
    (replace(AUTO, recomputes=True), moe(2)),
    (replace(AUTO, grouped=False), moe(3)),
    *((AUTO, adam("autoep", stage, clip=0.0)) for stage in (0, 1)),
    (replace(AUTO, ep_size=1), adam("autoep", 3, clip=0.0)),
]
ON_FOUR = [(AUTO, moe(1)), (AUTO, moe(3, zero_init=True)), (AUTO, adam("autoep", 3, clip=0.0))]
ROWS = [(*case, 2) for case in ON_TWO] + [(*case, 4) for case in ON_FOUR]
ROWS += [(*case, n) for cases in ON_TWO_OR_FOUR for n in (2, 4) for case in some(cases, n)]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "mode", "world"), ROWS, ids=lambda value: getattr(value, "name", None)
)
def test_model_parallelism_matches_one_process(kind, mode, world):
    assert_trained_alike(kind, mode)


HALF_WIRE = {"communication": {"dtype": "bf16"}, **clip(1e-4)}
UNEQUAL = Shards(first=13 / 16)
"""Tensor-parallel ranks, of 13 and 3 of 16, then have other owners of the layers that both have:
nothing may depend on the owner."""
SHARED = replace(AUTO, apart=False)
"""One A for all experts of a rank."""
TOGETHER = [
    (MOE, moe(1, "-everything", kfac=EVERYTHING)),
    (SHARED, Mode("autoep-everything", 2, "bf16", clip=0.0, kfac=EVERYTHING)),
    (
        UNEQUAL,
        Mode("tp-z0", 0, kfac={**HALF_WIRE, "assignment": {"gradient_worker_fraction": 0.5}}),
    ),
    (UNEQUAL, adam("tp-bf16", 2, dtype="bf16", kfac=HALF_WIRE, extra=FP32_ACCUM, clip=0.0)),
]


def owners_of_copies(kfac) -> list[tuple[str, object]]:
    """Who steps, and who decomposes, the layers that every tensor-parallel rank has."""
    roles, copied = kfac.plan.assignment, {layer.name for layer in kfac.layers if layer.copies > 1}
    owners = [*roles.workers.items(), *roles.owners.items()]
    return [(name, ranks) for name, ranks in owners if name.split("/")[0] in copied]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("kind", "mode"), TOGETHER, ids=[mode.name for _, mode in TOGETHER])
def test_with_everything_on_what_several_ranks_have_is_the_same_bits(kind, mode):
    engine = kind.make(mode)
    before = kind.weights(engine)
    kind.train(engine, 8)
    after = kind.weights(engine)
    assert not [name for name, value in after.items() if torch.equal(before[name], value)]
    assert_ranks_agree(after)
    if "everything" in mode.name:
        assert float(engine.kfac.metrics.summary.sum()) == 0, "layers in trouble"
        assert engine.kfac.counters()["job/calls_numbers"] == 8
        names = of_ranks(sorted(after))
        assert names[0] != names[1] and names[0] == names[2], "two have each expert"
    else:
        kfac = engine.kfac.preconditioner
        assert torch.bfloat16 in (kfac.plan.wire, kfac.plan.gradient_dtypes[1])
        owners = of_ranks(owners_of_copies(kfac))
        assert any(other != owners[0] for other in owners), "the ranks' plans are alike"


SAVED = [
    (MEGATRON, Mode("tp-saved", 1, kfac=EVERYTHING)),
    (Stages(tied_layers), Mode("pipe-tied", 1, kfac=EVERY_TYPE, clip=0.0)),
    (MOE, moe(2)),
    (AUTO, moe(2)),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "mode"), SAVED, ids=[mode.name for _, mode in SAVED])
def test_a_checkpoint_holds_every_layer_of_the_job_once(kind, mode):
    """And training goes on from it as if it had not stopped. Experts load at another ep_size."""
    folder, first, second = shared_folder(), kind.make(mode), kind.make(mode)
    kind.train(first, 5)
    first.save_checkpoint(folder, tag="t")
    second.load_checkpoint(folder, tag="t")
    state = whole_state(first.kfac.job)
    exact(whole_state(second.kfac.job), state)
    assert {kfac.steps for kfac in second.kfac.job.preconditioners} == {5}
    for engine in (first, second):
        kind.train(engine, 3, first=5)
    exact(kind.weights(second), kind.weights(first))
    factors = [key.replace("/", ".") for key in state if "eigenvalues" not in key]
    files = sorted(path.name for path in Path(folder, "t/kfac").glob("*/*.factor.pt"))
    assert files == sorted(f"{name}.factor.pt" for name in factors)
    if kind is MEGATRON:
        assert {"up.shard_0_of_2.A", "down.shard_1_of_2.A"} <= set(factors)
    if kind in (MOE, AUTO):
        other = replace(kind, ep_size=1).make(mode)
        other.kfac.load_state(folder, "t")
        exact(whole_state(other.kfac.job), state)
        before = "experts.w1." if kind.auto else "deepspeed_experts."
        experts = {key.split(before)[1][0] for key in state if before in key and "/A" in key}
        assert experts == set("0123"), "in global numbers"


REFUSED = [
    ('use "expand"', Sequence(), Mode("sp", 0, kfac=REDUCED)),
    ("weight_sharing", MOE, moe(0, kfac=REDUCED)),
    ("monte_carlo", MOE, moe(0, kfac=SAMPLED)),
    ("labels", MEGATRON, Mode("tp", 0, kfac=SAMPLED)),
    ("cuts the layers", AUTOTP, adam("tp", 0, clip=0.0)),
    ("monte_carlo", Stages(), Mode("pipe", 0, kfac=SAMPLED)),
    ("parameter groups", Stages(), adam("pipe", 1, clip=0.0)),  # only the first stage has a norm
    ("no layer", Stages(), Mode("pipe", 0, kfac={"layers": {"types": ["LayerNorm"]}})),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("words", "kind", "mode"), REFUSED)
def test_what_model_parallelism_cannot_do_is_refused_on_every_rank(words, kind, mode):
    assert words in error_of(lambda: kind.make(mode))


@pytest.mark.ranks(2)
def test_an_optimizer_made_before_the_layers_were_replaced_is_refused():
    def given(model) -> dict:
        return {"optimizer": ds_kfac.KFACAdamW(model.parameters()), "model_parameters": None}

    said = error_of(lambda: AUTO.make(Mode("autoep", 1), given))
    assert "in the DeepSpeed config" in said


IN_SHARED = Mode("autoep-shared", 2, clip=0.0)


@pytest.mark.ranks(2)
def test_grouped_experts_that_share_A_step_as_experts_in_a_loop():
    """The bound is of a loop over experts, in other orders of the rows."""
    finals = []
    for grouped, order in ((False, None), (False, 1), (False, 2), (True, None)):
        engine = replace(SHARED, grouped=grouped).make(IN_SHARED)
        initial = SHARED.weights(engine)
        replace(SHARED, order=order).train(engine)
        keys = {key for kfac in engine.kfac.job.preconditioners for key in kfac.curvature.factors}
        shared = {key for key in keys if key.startswith("mlp.experts") and key.endswith("/A")}
        assert shared == {"mlp.experts.w1.0/A", "mlp.experts.w2.0/A"}
        finals.append(SHARED.weights(engine))
    plain, *others, grouped = finals
    spread = max(difference(other, plain, initial) for other in others)
    assert not within("shared", difference(grouped, plain, initial), FACTOR * spread + FLOOR)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_an_A_that_experts_share_continues_at_another_ep_size(before, after):
    folder, leaders = shared_folder(), {1: (0,), 2: (0, 2)}
    sizes = (before, after)
    saved, loaded = (replace(SHARED, ep_size=size).make(IN_SHARED) for size in sizes)
    SHARED.train(saved, 3)
    saved.save_checkpoint(folder, tag="t")
    loaded.kfac.load_state(folder, "t")
    states = []
    for engine, size in zip((saved, loaded), sizes, strict=True):
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
