"""The plan of a run, and what becomes of it when layers are found to share their inputs."""

from dataclasses import replace

import pytest
import torch

from ds_kfac.assignment.costs import BUILTIN
from ds_kfac.config import keys as kfac_config
from ds_kfac.curvature.factor import Side
from ds_kfac.plan.plan import EngineFacts, Observations, Plan, make_plan
from tests.choices import STAGGERED, chosen, resolved
from tests.layer_tables import llama, zero_shards
from tests.models import linear_layer

LAYERS, _ = llama(blocks=2, width=32, inner=80, key_width=8)
GROUPS = [
    tuple(f"{block}.{name}" for name in names)
    for block in range(2)
    for names in (("q", "k", "v"), ("gate", "up"))
]
FOLLOWERS = {name for group in GROUPS for name in group[1:]}


def plan(
    world: int = 4, fraction: float | None = None, model=LAYERS, zero: bool = False, **config
) -> Plan:
    held = zero_shards(model, world) if zero else None
    facts = EngineFacts(world, held, torch.float32, torch.float32, moments=0)
    config = {"assignment": {"gradient_worker_fraction": fraction}} | config
    with chosen(config) as block:
        return make_plan(model, facts, resolved(block), BUILTIN["cpu"])


@pytest.mark.parametrize("zero", [False, True])
def test_sharing_moves_nothing_and_drops_the_followers_factors(zero):
    before = plan(zero=zero, plan=STAGGERED)
    assert before.sharing([]) == before
    after = before.sharing(GROUPS)
    gone = {f"{name}/A" for name in FOLLOWERS}
    keys, fewer = ({f.key for f in made.assignment.factors} for made in (before, after))
    assert keys - fewer == gone
    for kept in ("owners", "workers"):
        assert getattr(after.assignment, kept) == getattr(before.assignment, kept)
    for kept in ("offsets", "layers", "schedule", "wire"):
        assert getattr(after, kept) == getattr(before, kept)
    assert set(after.timetable().keys) == set(before.timetable().keys) - gone
    assert after.sharing(()) == before, "and back"


def test_candidates_are_layers_whose_rows_are_their_inputs(monkeypatch):
    other = {
        "linear": {},
        "with_bias": {"bias": "with_bias.bias"},
        "conv1d": {"kind": "Conv1D"},
        "wide": {"A": Side.diagonal(9)},
        "identity": {"A": Side.identity(9)},
        "norm": {"kind": "LayerNorm"},
        "copied": {"copies": 2},
    }
    layers = [replace(linear_layer(name, 6, 3), **values) for name, values in other.items()]
    candidates = plan(model=layers).sharing_candidates
    assert list(candidates) == ["linear", "with_bias", "conv1d", "wide", "copied"]
    # a 1 for the bias is a row's last entry: 5 inputs and a 1 are not 6 inputs
    assert candidates["linear"] == candidates["conv1d"] != candidates["with_bias"]
    # another tensor-parallel rank plans a copied layer's A otherwise
    assert candidates["linear"] != candidates["copied"]
    monkeypatch.setattr(kfac_config, "SHARES", False)
    assert plan(model=layers).sharing_candidates == {}


def test_a_stacks_common_A_has_the_rows_of_all_its_layers_and_each_G_its_own():
    stack = [
        replace(
            linear_layer(f"{name}.{index}", 60, 30),
            weight=f"experts.{name}",
            product=True,
            part=(index, 4),
            shares=None if (name, index) == ("gate", 0) else "gate.0",
        )
        for name in ("gate", "up")
        for index in range(4)
    ]
    made = plan(16, model=stack).with_observations(
        Observations(rows={layer.name: 15.0 for layer in stack})
    )
    assert made.contributors.counts == {
        "gate.0/A": 4 * 60 / (4 * 15),  # the rows of up are the same
        **{f"{layer.name}/G": 4 * 30 / 15 for layer in stack},
    }
