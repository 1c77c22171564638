"""Ulysses sequence parallelism, whose ranks have parts of the tokens of a sequence, trains like one
process with whole sequences."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor, nn

from ds_kfac.assignment import assign
from ds_kfac.zero.faults import faults
from tests.covering import some
from tests.deepspeed.modes import KFAC, STEPS, Mode
from tests.deepspeed.parallel import (
    COMM_OPT,
    EVERY_TYPE,
    SCALED,
    assert_alike,
    least_likely,
    train_whole,
)
from tests.deepspeed.runs import build, weights
from tests.deepspeed.said import error_of
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch, make_net

pytestmark = pytest.mark.ranks
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


def distributed_net() -> SequenceNet:
    if not parallel_state_sp._SEQUENCE_PARALLEL_GROUP:
        parallel_state_sp.initialize_sequence_parallel(2)
    group, model = parallel_state_sp.get_sequence_parallel_group(), make_net(SequenceNet)
    model.attention = DistributedAttention(Attention(), group, 2, 1)
    return model


SAMPLED = {"factor": {**KFAC["factor"], "fisher": "monte_carlo"}}
CLIP = {**EVERY_TYPE, "preconditioner": {"kl_clip": 5e-5}}
CASES = [
    *((Mode(f"sp-z{stage}", stage, kfac=CLIP), over) for stage in (0, 2, 3) for over in (1, 2)),
    (Mode("sp-adam-z2", 2, adam=True), 1),
    (Mode("sp-z2-monte_carlo", 2, kfac=SAMPLED), 1),
    (Mode("sp-z2-scaled", 2, kfac=SCALED), 1),
    (Mode("sp-z0-comm_opt", 0, kfac={**EVERY_TYPE, **COMM_OPT}), 1),
]
"""With the number of ranks over whose tokens a rank's loss is a mean."""
ONE_ROW = Mode("sp-z2-rows", 2, kfac={"factor": {**KFAC["factor"], "rows": 1}})
"""One rank has the rows, but not those of the other part of the sequence."""
ROWS = [(*case, world) for world in (2, 4) for case in some(CASES, world)] + [(ONE_ROW, 1, 2)]


@pytest.mark.parametrize(
    ("mode", "mean_over", "world"),
    ROWS,
    ids=[f"{mode.name}-{mean_over}-{world}" for mode, mean_over, world in ROWS],
)
def test_sequence_parallelism_matches_one_process(mode, mean_over, world):
    rank, replicas = dist.get_rank(), world // 2
    engine = build(mode, model=distributed_net(), given={"mpu": parallel_state_sp})
    sampled = "monte_carlo" in mode.name
    if sampled:
        engine.kfac.sampler = least_likely
    # all rows of those that contribute
    with patch.object(assign, "strides", lambda *factors, **options: {}):
        for step in range(STEPS):
            x, y = make_batch(step, replicas * SEQUENCES, TOKENS)
            x, y = (t.split(SEQUENCES)[rank // 2].chunk(2, dim=1)[rank % 2] for t in (x, y))
            engine.backward(cross_entropy(engine(x), y) / mean_over)
            engine.step()
    assert engine.kfac.preconditioner.observations.groups == (("q", "kv"),)
    known = faults(engine.kfac.preconditioner.layout)
    assert any("sequence" in fault for fault in known) == (mode.stage < 3)

    def losses(model, kfac, step, variation):
        x, y = variation.rows(*make_batch(step, replicas * SEQUENCES, TOKENS))
        loss = cross_entropy(model(x.to(next(model.parameters()).dtype)), y)
        if sampled:
            kfac.sampled(least_likely(model.prediction))
        yield loss / mean_over  # the mean of the ranks' losses

    # DeepSpeed sums gradients over a sequence's ranks up to stage 2
    scale = 1.0 if mode.stage == 3 else 2.0
    whole = train_whole(engine, mode, SequenceNet, losses, scale=scale)
    assert_alike(engine, mode, weights(engine), whole)


@pytest.mark.ranks(2)
def test_reduced_rows_are_refused_where_a_sequence_is_cut():
    factor = {**KFAC["factor"], "weight_sharing": "reduce"}
    mode, model = Mode("sp-reduce", 0, kfac={"factor": factor}), distributed_net()
    assert 'use "expand"' in error_of(
        lambda: build(mode, model=model, given={"mpu": parallel_state_sp})
    )
