"""Mixtures of experts train like all experts in one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.covering import some
from tests.deepspeed.expert_runs import (
    TOKENS,
    DistributedNet,
    ExpertNet,
    first_expert,
    make_engine,
    train,
    weights,
    whole_layer,
    whole_name,
)
from tests.deepspeed.modes import CLIPPED, KFAC, MICRO_ROWS, Mode
from tests.deepspeed.parallel import (
    COMM_OPT,
    EVERYTHING,
    INVERSE,
    SCALED,
    assert_alike,
    assert_experts_are_saved,
    assert_ranks_agree,
    train_whole,
)
from tests.deepspeed.runs import whole_batch
from tests.deepspeed.said import error_of
from tests.models import make_net

pytestmark = pytest.mark.ranks(2)
CLIP = {"preconditioner": {"kl_clip": 1e-5}}
FP32 = {"communication": {"dtype": "fp32"}}


def moe(stage: int, form: str = "", **options) -> Mode:
    # at stage 0 DeepSpeed clips by an average of the ranks' norms
    options = {"clip": 0.0, "kfac": CLIP, **options}
    return Mode(f"moe-z{stage}{form}", stage, **options)


ADAM = {"adam": True, "kfac": {}}
BUDGET = {**COMM_OPT, "assignment": {**COMM_OPT["assignment"], "memory_budget_gb": 1.0}}
CASES = [
    *((moe(stage), ep_size, "") for stage in (0, 1, 2) for ep_size in (1, 2)),
    (moe(1), 2, "starved"),
    (moe(1, "-scaled", kfac={**SCALED, **CLIP}), 2, ""),
    (moe(1, "-inverse", kfac={**INVERSE, **FP32}), 2, ""),
    (moe(0, "-comm_opt", kfac={**CLIP, **BUDGET}), 2, ""),
    *((moe(stage, "-adam", **ADAM), 2, "") for stage in (0, 1)),
]
ON_TWO_RANKS = [
    *((moe(1), 2, recomputes) for recomputes in ("reentrant", "not")),
    # the norm is that of all experts, whichever ranks have them
    *(
        (moe(stage, "-adam-clipped", **ADAM, clip=CLIPPED), ep_size, "")
        for stage, ep_size in ((1, 1), (1, 2), (2, 2))
    ),
]
ROWS = [(*case, world) for world in (2, 4) for case in some(CASES, world)]
ROWS += [(*case, 2) for case in ON_TWO_RANKS]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mode", "ep_size", "form", "world"),
    ROWS,
    ids=[f"{mode.name}-{ep_size}-{form}-{world}" for mode, ep_size, form, world in ROWS],
)
def test_experts_match_one_process(mode, ep_size, form, world):
    starved, first = form == "starved", first_expert(ep_size)
    whole_net = partial(ExpertNet, starved)
    model = DistributedNet(ep_size, "" if starved else form)
    model.moe.deepspeed_moe.gate.requires_grad_(not starved)
    initial = dict(make_net(whole_net).named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial[whole_name(name, first)])
    engine = make_engine(mode, model)
    train(engine)
    domains = [(x.engine_view.domain.name, len(x.layers)) for x in engine.kfac.job.preconditioners]
    assert domains == [
        ("dense", 2 if starved else 3),  # a gate without gradients is no layer
        (f"experts_ep_size_{ep_size}_rank_{dist.get_rank() % ep_size}", 8 // ep_size),
    ]
    assert ("weight is frozen" in engine.kfac.report) == starved  # the gate's
    if mode.clip:
        assert float(engine.get_global_grad_norm()) > 2 * CLIPPED, "there is something to clip"
    whole = train_whole(
        engine,
        mode,
        whole_net,
        whole_batch(world * MICRO_ROWS, 1, TOKENS),
        whole_name=partial(whole_layer, first_expert=first),
        exclude=("gate", "experts.3.0", "experts.3.2") if starved else (),
    )
    assert_alike(engine, mode, weights(engine, first), whole)


@pytest.mark.parametrize(
    ("word", "factor"),
    [("weight_sharing", {"weight_sharing": "reduce"}), ("monte_carlo", {"fisher": "monte_carlo"})],
)
def test_what_experts_cannot_do_is_refused(word, factor):
    mode = moe(0, kfac={"factor": {**KFAC["factor"], **factor}})
    assert word in error_of(lambda: make_engine(mode, DistributedNet(2)))


@pytest.mark.ranks(4)
def test_with_everything_on_all_ranks_have_the_same_weights():
    engine = make_engine(moe(1, "-everything", kfac=EVERYTHING), DistributedNet(2))
    assert_ranks_agree(engine, partial(weights, first=first_expert(2)), train)


def test_a_checkpoint_holds_the_experts_of_every_rank():
    assert_experts_are_saved(
        lambda ep_size: make_engine(moe(2), DistributedNet(ep_size)), train, "deepspeed_experts."
    )
