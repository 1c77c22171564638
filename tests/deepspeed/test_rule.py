"""The factors of an engine after one captured step are those of the rule, tests/truth.py, on the
cases of tests/rule_cases.py."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from tests.close import close, exact, near
from tests.deepspeed.modes import Mode
from tests.deepspeed.runs import build
from tests.models import CLASSES, FEATURES, make_net
from tests.ranks import of_ranks
from tests.rule_cases import CASES, Case, Tasks, truth_of, vectors
from tests.truth import factors_of_ranks

TOLERANCES = {"fp32": 1e-4, "fp16": 1e-2}
"""Relative to a factor's norm."""
STILL = {"type": "SGD", "params": {"lr": 0.0}}


def make_engine(case: Case, stage: int = 0, dtype: str = "fp32"):
    """An engine at rate 0 whose first step captures every row. The averages after it are those of
    the batch."""
    factor = {"rows": "all", "update_interval": 1, "weight_sharing": case.sharing}
    kfac = {"factor": factor, "burn_in": {"steps": 0}, "layers": case.layers}
    extra = {"fp16": {"initial_scale_power": 8}} if dtype == "fp16" else {}
    mode = Mode("rule", stage, dtype, clip=0.0, kfac=kfac, inner=STILL, extra=extra)
    model = make_net(case.make)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = build(
        mode,
        case.passes,
        model=model,
        given={"model_parameters": trained},
        train_micro_batch_size_per_gpu=1,
    )
    if case.mask is not None:
        engine.kfac.mask = case.mask
    return engine


def take_step(engine, case: Case) -> None:
    def backward(loss: Tensor, **options) -> None:
        engine.backward(loss, **options)
        engine.step()

    with patch.object(get_accelerator(), "is_fp16_supported", lambda: True):
        case.step(engine, backward, dist.get_rank())


def dense(factor) -> Tensor:
    blocks = [block for part in factor.side.blocks(factor.packed_P) for block in part]
    return torch.block_diag(*blocks).double()


def of_groups(C: Tensor, groups: int) -> list[Tensor]:
    """The diagonal blocks of a convolution's groups."""
    width = len(C) // groups
    return [C[i : i + width, i : i + width] for i in range(0, len(C), width)]


def factors_of(engine) -> dict[str, tuple[Tensor, Tensor]]:
    """{layer: (A, G)}: the averages of all ranks, dense and in float64; a layer without rows is
    left out. Collective.

    A group of a convolution is a layer of its own, "<name>:<group>". Layers that share an input
    have one A, of the rows of one of them.
    """
    curvature = engine.kfac.preconditioner.curvature
    own = {key: dense(factor) for key, factor in curvature.factors.items() if factor.updates}
    averages = {key: average for of_rank in of_ranks(own) for key, average in of_rank.items()}
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


def off(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def a_task_of_each_rank(forward, backward, rank: int) -> None:
    backward(forward(*vectors(rank), task=("head", "other")[rank]))


ON_RANKS = CASES | {"a task of each rank": Case(Tasks, a_task_of_each_rank)}
RUNS = [(name, 0, "fp32") for name in ON_RANKS]
RUNS += [("llama, padded micro-batches", stage, "fp32") for stage in (2, 3)]
RUNS += [("micro-batches", stage, "fp16") for stage in (1, 2)]


@pytest.mark.ranks(2)  # tests/model/test_rule.py has one
@pytest.mark.parametrize(("name", "stage", "dtype"), RUNS)
def test_an_engines_factors_are_those_of_the_rule(name, stage, dtype):
    case = ON_RANKS[name]
    engine = make_engine(case, stage, dtype)
    take_step(engine, case)
    factors = factors_of(engine)
    rule = factors_of_ranks([truth_of(case, rank)[1].sums() for rank in (0, 1)])
    excluded = case.layers.get("exclude", ())
    expected = {layer: (A, G) for layer, (A, G, _) in rule.items() if layer not in excluded}
    assert factors.keys() == expected.keys()
    because = f"{dtype} through a few layers; a row too many or too few is more"
    for layer, (A, G) in expected.items():
        found_A, found_G = factors[layer]
        shared = [
            expected[other][0] for other in expected if torch.equal(factors[other][0], found_A)
        ]
        off_A = min(off(found_A, wanted) for wanted in [A, *shared])
        near(off_A, 0.0, TOLERANCES[dtype], because, what=f"A of {layer}")
        near(off(found_G, G), 0.0, TOLERANCES[dtype], because, what=f"G of {layer}")


@pytest.mark.ranks(1)
def test_a_layer_without_a_row_in_a_step_keeps_its_factors():
    """After a step of two tasks, a step of one of them."""
    case = CASES["two tasks"]
    engine = make_engine(case)
    take_step(engine, case)
    first = factors_of(engine)
    take_step(engine, replace(case, step=CASES["micro-batches"].step))
    second = factors_of(engine)
    exact(second["other"], first["other"])
    assert not torch.equal(second["first"][0], first["first"][0])


# what a step's loss is a mean over: ``kfac.factor.loss_mean``

SIZES = [60, 4], [19, 13]
"""Rows of each micro-batch on each rank."""
TERMS = 96


class TermLoss(nn.Linear):
    """As a causal model of transformers: it divides the sum of its losses by the number it is
    given."""

    def forward(self, x: Tensor, y: Tensor, num_items_in_batch: int | None = None) -> Tensor:
        logits = super().forward(x)
        if num_items_in_batch is None:
            return F.cross_entropy(logits, y)
        return F.cross_entropy(logits, y, reduction="sum") / num_items_in_batch


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("stage", "loss_mean"), [(0, "step"), (2, "step"), (0, "micro_batch"), (2, "micro_batch")]
)
def test_G_is_the_second_moment_of_gradients_of_single_terms(stage, loss_mean):
    """Whether a step's loss is a mean over the terms of each micro-batch or over those of the whole
    step. Micro-batches, each a mean over its terms, weigh alike."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TERMS, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (TERMS,), generator=generator)
    model = make_net(lambda: TermLoss(FEATURES, CLASSES))
    g = (x @ model.weight.T + model.bias).softmax(-1).detach() - F.one_hot(y, CLASSES)
    own, first = SIZES[dist.get_rank()], dist.get_rank() * sum(SIZES[0])
    parts = (t[first : first + sum(own)].split(own) for t in (x, y))
    factor = {"rows": "all", "update_interval": 1, "loss_mean": loss_mean}
    engine = build(Mode("terms", stage, clip=0.0, kfac={"factor": factor}), 2, model=model)
    for inputs, labels in zip(*parts, strict=True):
        if loss_mean == "step":  # DeepSpeed divides by the ranks and the micro-batches
            loss = engine(inputs, labels, num_items_in_batch=TERMS) * 2 * 2
        else:
            loss = engine(inputs, labels)
        engine.backward(loss)
        engine.step()
    parts = [g] if loss_mean == "step" else g.split([*SIZES[0], *SIZES[1]])
    G = sum(part.T @ part / len(part) for part in parts) / len(parts)
    ((_, found),) = factors_of(engine).values()
    close(found, G.double(), sums=2 * TERMS, dtype=torch.float32)
