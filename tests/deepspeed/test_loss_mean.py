"""G is the second moment of the gradients of single terms, whether a step's loss is a mean over the
terms of each micro-batch or over those of the whole step (``kfac.factor.loss_mean``)."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import ds_kfac
from ds_kfac.comm.message import gathered
from tests.close import close
from tests.models import CLASSES, FEATURES

pytestmark = pytest.mark.ranks()
SIZES = {1: [[60, 4, 19, 13]], 2: [[60, 4], [19, 13]]}
"""Number of ranks -> rows of each micro-batch on each rank."""
TOTAL = 96


class TokenLoss(nn.Module):
    """As a causal model of transformers: it divides the sum of its losses by the number it is
    given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(FEATURES, 16)
        self.head = nn.Linear(16, CLASSES)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))

    def forward(self, x: Tensor, y: Tensor, num_items_in_batch: int | None = None) -> Tensor:
        if num_items_in_batch is None:
            return F.cross_entropy(self.logits(x), y)
        return F.cross_entropy(self.logits(x), y, reduction="sum") / num_items_in_batch


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOTAL, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (TOTAL,), generator=generator)


def micro_batches(world: int) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's part of the batch."""
    rank = dist.get_rank()
    sizes = SIZES[world]
    start = sum(map(sum, sizes[:rank]))
    end = start + sum(sizes[rank])
    x, y = (part[start:end].split(sizes[rank]) for part in batch())
    return list(zip(x, y, strict=True))


def gradients_of_terms(model: TokenLoss, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient [N, C] of each term's loss with respect to the logits, in float64."""
    logits = model.double().logits(x.double())
    return logits.softmax(-1) - F.one_hot(y, CLASSES)


def engine_of(stage: int, accumulation: int, loss_mean: str):
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "kfac": {"factor": {"rows": "all", "loss_mean": loss_mean}, "report": "none"},
    }
    model = TokenLoss()
    return ds_kfac.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def check_G(engine, expected: Tensor) -> None:
    """Compare the head's G where it is kept."""
    kfac = engine.kfac.preconditioner
    head = next(layer for layer in kfac.layers if layer.name == "head")
    factor = kfac.curvature.factors.get(head.keys[1])
    if factor is not None:
        close(head.G.blocks(factor.packed_P)[0][0], expected.float(), sums=2 * TOTAL)
    assert sum(gathered(factor is not None)) == 1


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_mean_over_the_step_has_the_G_of_one_batch(world, stage):
    parts = micro_batches(world)
    engine = engine_of(stage, len(parts), "step")
    for x, y in parts:
        loss = engine(x, y, num_items_in_batch=TOTAL)
        # DeepSpeed divides by the ranks and the micro-batches
        engine.backward(loss * world * len(parts))
        engine.step()
    g = gradients_of_terms(TokenLoss(), *batch())
    check_G(engine, g.T @ g / TOTAL)


@pytest.mark.parametrize("world", [1, 2])
def test_a_mean_over_each_micro_batch_weighs_micro_batches_alike(world):
    parts = micro_batches(world)
    engine = engine_of(0, len(parts), "micro_batch")
    for x, y in parts:
        engine.backward(engine(x, y))
        engine.step()
    g_parts = gradients_of_terms(TokenLoss(), *batch()).split(SIZES[1][0])
    means = [g.T @ g / len(g) for g in g_parts]
    check_G(engine, sum(means) / len(means))
