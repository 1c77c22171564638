"""The factors of an engine after one captured step are those of the rule, tests/truth.py, on the
cases of tests/rule_cases.py."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from tests.close import exact, near
from tests.deepspeed.still import still_engine
from tests.models import make_net
from tests.ranks import run_ranks
from tests.rule_cases import CASES, Case, truth_of
from tests.truth import factors_of_ranks

pytestmark = pytest.mark.distributed
TOLERANCES = {"fp32": 1e-4, "fp16": 1e-2}
"""Relative to a factor's norm."""
FORMATS = {"fp32": {}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}


def make_engine(case: Case, stage: int = 0, **more):
    """An engine whose first step captures every row. The averages after it are those of the
    batch."""
    kfac = {
        "factor": {
            "rows": "all",
            "update_interval": 1,
            "fisher": "empirical",
            "weight_sharing": case.sharing,
        },
        "burn_in": {"steps": 0},
        "layers": case.layers,
    }
    more["gradient_accumulation_steps"] = case.passes
    engine = still_engine(make_net(case.make), stage=stage, micro_batch=1, kfac=kfac, **more)
    if case.mask is not None:
        engine.kfac.mask = case.mask
    return engine


def take_step(engine, case: Case, rank: int) -> None:
    def backward(loss: Tensor, **options) -> None:
        engine.backward(loss, **options)
        engine.step()

    case.step(engine, backward, rank)


def factors_of(engine) -> dict[str, tuple[Tensor, Tensor]]:
    """{layer: (A, G)}: the averages of all ranks, dense and in float64; a layer without rows is
    left out. Collective.

    A group of a convolution is a layer of its own, "<name>:<group>". Layers that share an input
    have one A, of the rows of one of them.
    """
    curvature = engine.kfac.preconditioner.curvature
    own = {key: dense(factor) for key, factor in curvature.factors.items() if factor.updates}
    of_ranks: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    averages = {key: average for of_rank in of_ranks for key, average in of_rank.items()}
    keys = {(layer, key[-1]): key for key, spec in curvature.specs.items() for layer in spec.layers}
    found = {}
    for layer in engine.kfac.preconditioner.layers:
        A, G = (averages.get(keys[layer.name, side]) for side in "AG")
        if A is None or G is None:
            continue
        groups = zip(of_groups(A, layer.groups), of_groups(G, layer.groups), strict=True)
        for group, sides in enumerate(groups):
            found[layer.name if layer.groups == 1 else f"{layer.name}:{group}"] = sides
    return found


def dense(factor) -> Tensor:
    blocks = [block for part in factor.side.blocks(factor.packed_P) for block in part]
    return torch.block_diag(*blocks).double()


def of_groups(C: Tensor, groups: int) -> list[Tensor]:
    """The diagonal blocks of a convolution's groups."""
    width = len(C) // groups
    return [C[i : i + width, i : i + width] for i in range(0, len(C), width)]


Run = tuple[str, int, str]
"""A case, the ZeRO stage, and the format of the model."""


def engine_factors(runs: list[Run]) -> dict[Run, dict | str]:
    """Factors after a step of each run, or the error that it ended with."""
    found: dict[Run, dict | str] = {}
    for name, stage, dtype in runs:
        case = CASES[name]
        with patch.object(get_accelerator(), "is_fp16_supported", lambda: True):
            try:
                engine = make_engine(case, stage, **FORMATS[dtype])
                take_step(engine, case, dist.get_rank())
                found[name, stage, dtype] = factors_of(engine)
                engine.destroy()
            except Exception as error:
                found[name, stage, dtype] = f"{type(error).__name__}: {error}"
    return found


def kept_factors(_) -> tuple[dict, dict]:
    """Of two tasks' model: after a step of both tasks, and after one more of one of them."""
    case = CASES["two tasks"]
    engine = make_engine(case)
    take_step(engine, case, dist.get_rank())
    first = factors_of(engine)
    take_step(engine, replace(case, step=CASES["micro-batches"].step), dist.get_rank())
    second = factors_of(engine)
    engine.destroy()
    return first, second


def expected_factors(case: Case, world: int) -> dict[str, tuple[Tensor, Tensor]]:
    factors = factors_of_ranks([truth_of(case, rank)[1].sums() for rank in range(world)])
    excluded = case.layers.get("exclude", ())
    return {name: (A, G) for name, (A, G, _) in factors.items() if name not in excluded}


def off(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


RUNS: list[Run] = [(name, 0, "fp32") for name in CASES]
RUNS += [("llama, padded micro-batches", stage, "fp32") for stage in (2, 3)]
RUNS += [("micro-batches", stage, "fp16") for stage in (1, 2)]


@pytest.fixture(scope="module")
def found() -> dict[int, dict[Run, dict | str]]:
    """World -> factors of every run."""
    target = "tests.deepspeed.test_rule:engine_factors"
    return {world: run_ranks(target, world=world, payload=RUNS)[0] for world in (1, 2)}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]}, ZeRO {run[1]}, {run[2]}")
def test_an_engines_factors_are_those_of_the_rule(found, run, world):
    name, _, dtype = run
    factors, expected = found[world][run], expected_factors(CASES[name], world)
    assert not isinstance(factors, str), factors
    assert factors.keys() == expected.keys()
    because = f"{dtype} through a few layers; a row too many or too few is more"
    for layer, (A, G) in expected.items():
        shared = [
            expected[other][0]
            for other in expected
            if torch.equal(factors[other][0], factors[layer][0])
        ]
        off_A = min(off(factors[layer][0], wanted) for wanted in [A, *shared])
        near(off_A, 0.0, TOLERANCES[dtype], because, what=f"A of {layer}")
        near(off(factors[layer][1], G), 0.0, TOLERANCES[dtype], because, what=f"G of {layer}")


def test_a_layer_without_a_row_in_a_step_keeps_its_factors():
    (of_rank,) = run_ranks("tests.deepspeed.test_rule:kept_factors", world=1)
    first, second = of_rank
    exact(second["other"], first["other"])
    assert not torch.equal(second["first"][0], first["first"][0])
