"""What the config leaves open is chosen by prediction; what it asks for is done or refused with a
reason."""

from dataclasses import replace

import pytest
import torch

from ds_kfac.assignment.costs import BUILTIN
from ds_kfac.curvature.factor import Side
from ds_kfac.curvature.methods import EIGEN, ITERATED, METHODS
from ds_kfac.plan import common
from ds_kfac.plan.plan import EngineFacts, Plan, make_plan, sharing_candidates
from tests.choices import STAGGERED, chosen, resolved
from tests.layer_tables import gpt2_small, zero_shards
from tests.models import linear_layer

LAYERS, FACTORS = gpt2_small(blocks=2, width=64)
COSTS = BUILTIN["cpu"]
SLOW_LINK, FAST_LINK = (replace(COSTS, link_bytes=rate, link_seconds=0.0) for rate in (1e6, 1e15))
FP32 = EngineFacts(world=4, held=None, parameters=torch.float32, gradients=torch.float32, moments=0)
BF16 = replace(FP32, parameters=torch.bfloat16, gradients=torch.bfloat16)
ZERO = replace(FP32, held=zero_shards(LAYERS, 4))


def plan(facts: EngineFacts = FP32, costs=COSTS, model=LAYERS, **config) -> Plan:
    config["factor"] = {"rows": "all", **config.get("factor", {})}
    with chosen(config) as block:
        return make_plan(model, facts, resolved(block), costs)


def fraction(value: float | None) -> dict:
    return {"assignment": {"gradient_worker_fraction": value}}


INVERSE = {"preconditioner": {"method": "inverse"}}


def test_tikhonov_inverses_keep_a_layer_together_and_its_a_to_itself():
    made = plan(damping={"kind": "tikhonov"}, **INVERSE, **fraction(1.0))
    assert made.method is METHODS["inverse"] and not made.sharing_candidates
    ranks = made.assignment.owners
    assert all(ranks[f"{layer.name}/A"] == ranks[f"{layer.name}/G"] for layer in LAYERS)
    assert [reason for reason in made.reasons if "do not share A" in reason]


def test_moments_in_the_eigenbasis_iterate_it_where_the_device_is_faster_so():
    gpu, rotating = BUILTIN["cuda"], replace(FP32, rotates=True, moments=2)
    assert plan(rotating, gpu).method is ITERATED
    assert plan(rotating).method is EIGEN, "on a CPU"
    assert plan(FP32, gpu).method is EIGEN, "the K-FAC gradient"
    assert plan(rotating, gpu, **INVERSE).method is METHODS["inverse"]


def test_layers_share_the_inverse_of_a_only_if_g_is_the_identity_for_all_or_none():
    """Its damping is in A's inverse then."""
    first, second = (replace(layer, A=Side.dense(9), bias=None) for layer in LAYERS[:2])
    without_G = replace(second, G=Side.identity(second.G.dim))
    for other, alike in ((second, True), (without_G, False)):
        for method, same in (("eigen", True), ("inverse", alike)):
            kinds = sharing_candidates((first, other), METHODS[method])
            assert (len(set(kinds.values())) == 1) == same, (method, alike)


@pytest.mark.parametrize(("given", "workers"), [(0.01, 1), (0.5, 2), (1, 4), (0.499, 2)])
@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_what_is_given_is_taken_without_a_word(given, workers, name, dtype):
    for facts, costs in ((FP32, FAST_LINK), (BF16, SLOW_LINK)):
        made = plan(facts, costs, communication={"dtype": name}, **fraction(given))
        assert (made.workers, made.wire, made.reasons) == (workers, dtype, ())
        assert {len(ranks) for ranks in made.assignment.workers.values()} == {workers}


@pytest.mark.parametrize(
    ("facts", "given", "told"),
    [
        (FP32, 0.7, r"^kfac\.assignment\.gradient_worker_fraction: .*got 0\.7, .*4 ranks.*0\.5 "),
        (ZERO, 0.5, r"gradient_worker_fraction is 0.5, but this ZeRO stage .* null"),
        (ZERO, 1.0, r"gradient_worker_fraction is 1.0, but this ZeRO stage .* null"),
    ],
)
def test_what_ranks_cannot_do_is_refused_with_what_they_can(facts, given, told):
    with pytest.raises(ValueError, match=told):
        plan(facts, **fraction(given))
    if facts is ZERO:
        made = plan(facts)
        assert made.workers == 1 and made.reasons == ()
        assert plan(facts, **fraction(0.25)).assignment == made.assignment


@pytest.mark.parametrize(
    "costs", [SLOW_LINK, COSTS, FAST_LINK], ids=["slow link", "builtin", "fast link"]
)
def test_without_a_fraction_the_fastest_is_taken_and_all_that_were_tried_are_named(costs):
    given = {n: plan(costs=costs, **fraction(n / 4)).assignment for n in (1, 2, 4)}
    best = min(given, key=lambda n: max(given[n].loads))
    made = plan(costs=costs)
    assert made.workers == best and made.assignment == given[best]
    assert costs is not SLOW_LINK or best == 4
    (reason,) = made.reasons
    assert reason.startswith(f"{best} of 4 ranks precondition a layer")
    for n, assignment in given.items():
        seconds, nbytes = max(assignment.loads), max(assignment.memory)
        assert f"{n}/4: {seconds * 1e3:.3g} ms per step and {nbytes:,} bytes" in reason


def fits_in(made: Plan) -> int:
    """Bytes of the fullest rank: state, and what a step takes beside it."""
    return max(made.assignment.peak)


def test_costly_memory_wants_few_workers():
    memory = {n: fits_in(plan(**fraction(n / 4))) for n in (1, 2, 4)}
    assert memory[1] < memory[2] < memory[4]
    for fits, over in ((2, 1), (1, 2)):
        allowed = (memory[fits] + memory[2 * fits]) / 2
        made = plan(costs=SLOW_LINK, assignment={"memory_budget_gb": allowed / 1e9})
        assert made.workers <= fits and fits_in(made) <= allowed
        (reason,) = made.reasons
        assert f"fractions over the budget of {allowed / 1e9} GB: {over}" in reason


@pytest.mark.parametrize("facts", [FP32, ZERO], ids=["replicated", "zero"])
@pytest.mark.parametrize("given", [None, 0.25])
def test_a_budget_that_nothing_fits_names_what_is_needed(facts, given):
    def within(gigabytes: float) -> Plan:
        budget = {"memory_budget_gb": gigabytes, "gradient_worker_fraction": given}
        return plan(facts, assignment=budget)

    told = r"^kfac\.assignment\.memory_budget_gb: .*cap is 10000 bytes"
    with pytest.raises(ValueError, match=told) as error:
        within(1e-5)
    needed = int(str(error.value).split("needs ")[1].split(" ")[0])
    made = within(needed / 1e9)
    assert needed == fits_in(made) > max(made.assignment.memory), "state, and what a step needs"
    with pytest.raises(ValueError, match=f"needs {needed} "):
        within((needed - 1) / 1e9)


def test_a_layer_s_factors_are_split_only_if_bases_travel_anyway():
    for given, split in ((0.25, False), (1, True)):
        where = plan(**fraction(given)).assignment.owners
        parted = [where[f"{layer.name}/A"] != where[f"{layer.name}/G"] for layer in LAYERS]
        assert any(parted) == split


@pytest.mark.parametrize(
    ("facts", "costs", "wire"),
    [
        (BF16, SLOW_LINK, torch.bfloat16),
        (replace(BF16, parameters=torch.float16), SLOW_LINK, torch.bfloat16),
        (BF16, FAST_LINK, torch.float32),
        (FP32, SLOW_LINK, torch.float32),
        (replace(BF16, world=1), SLOW_LINK, torch.float32),
    ],
)
def test_the_wire_has_16_bits_if_the_model_has_and_the_traffic_is_costly(facts, costs, wire):
    made = plan(facts, costs)
    told = "batch sums travel in bf16"
    assert made.wire == wire
    assert any(told in reason for reason in made.reasons) == (wire == torch.bfloat16)


COSTLY = replace(COSTS, eigh_seconds=((16, 0.02),))
"""An eigh that takes long: everything at once is over 50 ms."""


def offsets(costs=COSTS, **config) -> dict[str, int]:
    return dict(plan(costs=costs, **config).offsets)


def test_refreshes_are_spread_if_they_take_long_but_for_copies_of_other_ranks():
    """Their plans may differ, and the copies would."""
    keys = {factor.key for factor in FACTORS}
    assert offsets() == {} and keys == set(offsets(COSTLY)) == set(offsets(plan=STAGGERED))
    config = {"factor": {"update_interval": 1}, "eigenbasis": {"refresh_interval": 1}}
    assert offsets(COSTLY, **config) == {}, "an interval of one step has nothing to spread over"
    copied = [replace(layer, copies=1 + (index % 2)) for index, layer in enumerate(LAYERS)]
    spread = {layer.name for layer in copied if layer.copies == 1}
    assert {key[:-2] for key in offsets(COSTLY, model=copied)} == spread
    assert offsets(COSTLY, model=[replace(layer, copies=2) for layer in LAYERS]) == {}


def test_the_worst_step_has_what_is_not_spread():
    """Large layers that other ranks have copies of, beside small ones that are spread."""
    side = Side.dense(4096)
    copied = [
        replace(layer, name=f"copied.{i}", copies=2, A=side, G=side)
        for i, layer in enumerate(LAYERS[:6])
    ]
    made = plan(replace(FP32, world=1), BUILTIN["cuda"], [*copied, *LAYERS[:4]])
    assert made.offsets and not any(key.startswith("copied") for key in made.offsets)
    (spread,) = [reason for reason in made.reasons if reason.startswith("refreshes spread")]
    costly = 2 * len(copied) * BUILTIN["cuda"].decompose(side)
    assert float(spread.split("predicted ")[1].split(" ms")[0]) >= 990 * costly


def test_experts_have_one_a_where_own_ones_are_over_the_budget():
    stacked, one = 4, replace(FP32, world=1)
    own = [replace(LAYERS[0], name=f"stack.{i}", weight="stack", part=(i, 4)) for i in range(4)]
    model = (*own, *LAYERS[1:])
    apart, shared = (plan(one, model=each) for each in (model, common.common_inputs(model)))
    assert len(apart.assignment.factors) - len(shared.assignment.factors) == stacked - 1
    assert [layer.shares for layer in shared.layers[:stacked]] == [None] + ["stack.0"] * 3
    assert apart.layers == model and shared.layers[stacked:] == model[stacked:]
    for expected in (shared, apart):
        made = plan(one, model=model, assignment={"memory_budget_gb": fits_in(expected) / 1e9})
        assert made.layers == expected.layers and fits_in(made) == fits_in(expected)
        over = any(f"{stacked - 1} more As would exceed" in reason for reason in made.reasons)
        assert over == (expected is shared)


EXPERTS, ADAM = 4, replace(FP32, world=1, moments=2, rotates=True)


def mixture(width: int, inner: int, block: int = 0) -> list:
    """Gate and up, which see the same tokens, and down, as the scan leaves them: those that enter
    have one A, those of what an expert makes, too, if it is wider than the model."""
    layers = []
    for stack, rows, columns, first in (
        ("gate", inner, width, "gate"),
        ("up", inner, width, "gate"),
        ("down", width, inner, "down" if inner > width else None),
    ):
        for index in range(EXPERTS):
            own = linear_layer(f"{block}.{stack}.{index}", columns, 1)
            shares = f"{block}.{first}.0" if first and f"{block}.{first}.0" != own.name else None
            of_stack = {"weight": f"{block}.{stack}", "part": (index, EXPERTS), "shares": shares}
            layers.append(replace(own, G=Side.identity(rows), product=True, **of_stack))
    return layers


def owners(layers, block: int = 0) -> dict[str, bool]:
    """Stack -> whether its experts have an A each, as they are or as another stack's of the same
    index."""
    found = {}
    for stack in ("gate", "up", "down"):
        shares = [layer.shares for layer in layers if layer.weight == f"{block}.{stack}"]
        found[stack] = len(set(shares)) == EXPERTS or set(shares) == {None}
    return found


@pytest.mark.parametrize("part", [0.0, 0.3, 3.0])
def test_experts_have_an_a_each_within_the_bound_where_moments_turn_with_it(monkeypatch, part):
    """Of what enters where experts are wide: it takes less beside their moments than of what they
    make."""
    monkeypatch.setattr(common, "OWN_BYTES", 0)
    monkeypatch.setattr(common, "OWN_PART", part)
    model = [layer for block in range(2) for layer in mixture(32, 64, block)]
    made = plan(ADAM, model=model)
    expected = {"gate": part > 0, "up": part > 0, "down": part > 1}
    assert owners(made.layers, 0) == owners(made.layers, 1) == expected
    still = plan(replace(ADAM, rotates=False), model=model)
    assert not any(owners(still.layers).values())
    kinds = [
        each.assignment.work.bytes_of(each.assignment.workers, each.assignment.owners)
        for each in (made, still)
    ]
    more = sum(sum(kinds[0][kind]) - sum(kinds[1][kind]) for kind in ("factors", "eigenbases"))
    assert more <= part * sum(kinds[0]["moments"]) and (more > 0) == (part > 0)
    text = f"which takes {more / 1e6:,.1f} MB"
    assert any(text in reason for reason in made.reasons) == (part > 0)
