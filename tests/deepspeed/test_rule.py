"""The factors of an engine after one captured step are those of the rule, tests/truth.py, on the cases of
tests/rule_cases.py."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_kfac
from tests.close import near
from tests.models import make_net
from tests.ranks import run_ranks
from tests.rule_cases import CASES, Case, truth_of
from tests.truth import factors_of_ranks

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-4
"""Relative to a factor's norm."""
FORMATS = {"fp32": {}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}


def make_engine(case: Case, stage: int = 0, **more):
    """An engine whose first step captures every row. The averages after it are those of the batch."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.passes,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "kfac": {
            "factor": {
                "rows": "all",
                "update_interval": 1,
                "fisher": "empirical",
                "weight_sharing": case.sharing,
            },
            "burn_in": {"steps": 0},
            "layers": case.layers,
        },
        **more,
    }
    model = make_net(case.make)
    trained = [p for p in model.parameters() if p.requires_grad]
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = ds_kfac.initialize(model=model, model_parameters=trained, config=config)
    if case.mask is not None:
        engine.kfac.mask = case.mask
    return engine


def take_step(engine, case: Case, rank: int) -> None:
    def backward(loss: Tensor, **options) -> None:
        engine.backward(loss, **options)
        engine.step()

    case.step(engine, backward, rank)


def factors_of(engine) -> dict[str, tuple[Tensor, Tensor]]:
    """{layer: (A, G)}: the averages that this rank has, dense and in float64; a layer without rows is left out.

    A group of a convolution is a layer of its own, "<name>:<group>". Layers that share an input have one A.
    """
    curvature = engine.kfac.preconditioner.curvature
    keys = {(layer, key[-1]): key for key, spec in curvature.specs.items() for layer in spec.layers}
    found = {}
    for layer in engine.kfac.preconditioner.layers:
        sides = []
        for which in "AG":
            factor = curvature.factors[keys[layer.name, which]]
            if not factor.updates:
                break
            blocks = [block for part in factor.side.blocks(factor.packed_P) for block in part]
            dense = torch.block_diag(*blocks).double()
            width = len(dense) // layer.groups
            sides.append([dense[i : i + width, i : i + width] for i in range(0, len(dense), width)])
        else:
            for group, (A, G) in enumerate(zip(*sides, strict=True)):
                name = layer.name if layer.groups == 1 else f"{layer.name}:{group}"
                found[name] = A, G
    return found


def engine_factors(runs: list[tuple[str, int]]) -> dict:
    """[(case, stage)] -> {(case, stage): factors after a step}."""
    found = {}
    for name, stage in runs:
        case = CASES[name]
        try:
            engine = make_engine(case, stage)
            take_step(engine, case, dist.get_rank())
            found[name, stage] = factors_of(engine)
            engine.destroy()
        except Exception as error:
            found[name, stage] = f"{type(error).__name__}: {error}"
    return found


def expected_factors(case: Case, world: int) -> dict[str, tuple[Tensor, Tensor]]:
    factors = factors_of_ranks([truth_of(case, rank)[1].sums() for rank in range(world)])
    excluded = case.layers.get("exclude", ())
    return {name: (A, G) for name, (A, G, _) in factors.items() if name not in excluded}


RUNS = [(name, stage) for name in CASES for stage in (0,)]
RUNS += [("llama, padded micro-batches", stage) for stage in (2, 3)]


@pytest.fixture(scope="module")
def found() -> dict[int, dict]:
    """World -> factors of every run, on the ranks that keep them."""
    results = {}
    for world in (1, 2):
        results[world] = {}
        of_ranks = run_ranks("tests.deepspeed.test_rule:engine_factors", world=world, payload=RUNS)
        for run in RUNS:
            errors = [of_rank[run] for of_rank in of_ranks if isinstance(of_rank[run], str)]
            merged = {}
            for of_rank in of_ranks if not errors else ():
                merged |= of_rank[run]
            results[world][run] = errors[0] if errors else merged
    return results


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]}, ZeRO {run[1]}")
def test_an_engines_factors_are_those_of_the_rule(found, run, world):
    factors, expected = found[world][run], expected_factors(CASES[run[0]], world)
    assert not isinstance(factors, str), factors
    assert factors.keys() == expected.keys()
    for name, sides in expected.items():
        for side, actual, wanted in zip("AG", factors[name], sides, strict=True):
            near(
                (actual - wanted).norm() / wanted.norm(),
                0.0,
                TOLERANCE,
                "fp32 through a few layers; a row too many or too few is 1e-2 and more",
                what=f"{side} of {name}",
            )
