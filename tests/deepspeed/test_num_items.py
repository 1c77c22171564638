"""Hugging Face's way to average: a sum over the labels of all micro-batches and ranks, unequally many on each."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ds_kfac.model.batch import ArgumentReader
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import ReferenceStep, build, difference, reference_options, weights
from tests.models import TokenNet, make_net, make_tokens
from tests.oracle import ReferenceKFAC
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
STEPS, ROWS, ACCUMULATION = 3, 4, 2


class TrainerNet(TokenNet):
    """The signature and loss of a transformers model: a mean, or a sum over ``num_items_in_batch``."""

    def forward(self, tokens: Tensor, labels: Tensor, **kwargs) -> dict[str, Tensor]:
        x = self.embedding(tokens)
        h = self.down(torch.tanh(self.rms(self.up(self.norm(x)))))
        logits = self.lm_head(x + h + 0.3 * torch.cumsum(x, dim=1))
        items = kwargs.get("num_items_in_batch")
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": total / ((labels >= 0).sum() if items is None else items), "logits": logits}


def batch(step: int, world: int) -> tuple[Tensor, Tensor]:
    """Micro-batches have 1 to 12 labels."""
    tokens, labels = make_tokens(step, world * ACCUMULATION * ROWS)
    kept = (torch.arange(len(labels)) // ROWS * 5 + step) % 4  # of each row of a micro-batch
    labels[torch.arange(3) >= kept[:, None]] = -100
    labels[::ROWS, 0] = 1  # none is empty
    return tokens, labels


def expected(mode, initial: dict, world: int, permuted: bool = False) -> dict:
    """The whole batch at once, in one process; in another order: what rounding makes of it."""
    model = make_net(TrainerNet)
    model.load_state_dict(initial)
    kfac = ReferenceKFAC(model, **reference_options(mode.kfac))
    step = ReferenceStep(mode, model, model, kfac)
    for index in range(STEPS):
        tokens, labels = (t.flip(0) if permuted else t for t in batch(index, world))
        kfac.rows, kfac.terms = labels >= 0, float((labels >= 0).sum())
        model(tokens, labels)["loss"].backward()
        step(1.0)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(engine, world: int) -> None:
    """As transformers' Trainer does with average_tokens_across_devices."""
    rank = dist.get_rank()
    for index in range(STEPS):
        tokens, labels = batch(index, world)
        for micro in range(ACCUMULATION):
            first = (rank * ACCUMULATION + micro) * ROWS
            own = slice(first, first + ROWS)
            loss = engine(tokens[own], labels=labels[own], num_items_in_batch=(labels >= 0).sum())["loss"]
            engine.backward(loss * world, scale_wrt_gas=False)
            engine.step()


def worker(names) -> dict:
    world, rank, results = dist.get_world_size(), dist.get_rank(), {}
    for name in names:
        for reads in (True, False):
            mode = BY_NAME[name]
            mode = replace(mode, kfac={"layers": {"types": ["Linear", "LayerNorm", "RMSNorm"]}})
            mode = replace(mode, kfac={**mode.config(1, world)["kfac"], **mode.kfac})
            engine = build(mode, ACCUMULATION, model=make_net(TrainerNet), train_micro_batch_size_per_gpu=ROWS)
            if not reads:
                read = ArgumentReader(engine.module)
                engine.kfac.read_batch = lambda *given, read=read: replace(read(*given), items=None)
            initial = weights(engine)
            train(engine, world)
            final = weights(engine)
            if rank == 0:
                whole, other = expected(mode, initial, world), expected(mode, initial, world, permuted=True)
                results[name, reads] = difference(final, whole, initial), difference(other, whole, initial)
            engine.destroy()
    return results


def test_unequal_labels_on_ranks_and_micro_batches_train_like_the_whole_batch():
    results = run_ranks("tests.deepspeed.test_num_items:worker", world=2, payload=["z0", "z2", "z3"])[0]
    for (name, reads), (error, rounding) in results.items():
        allowed = 20 * rounding + 1e-6
        if reads:
            assert error < allowed, f"{name}: differs by {error:.1e}, rounding by {rounding:.1e}"
        else:
            assert error > 100 * allowed, f"{name}: without the number the same, so this test shows nothing"
