"""Ulysses: attention over a sequence whose tokens lie on several ranks; the same model in one
process."""

from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor, nn

from ds_kfac.assignment import assign
from ds_kfac.zero.faults import faults
from tests.deepspeed.modes import STEPS, Mode
from tests.deepspeed.parallel import (
    build,
    compared,
    least_likely,
    planned_refreshes,
    train_whole,
    whole_batch,
)
from tests.deepspeed.runs import weights
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch

ROWS, TOKENS, HEADS = 3, 16, 4


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, T, heads, D] -> [B, heads, T, D]
        return (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2)


class SequenceNet(nn.Module):
    """One block; every layer but the attention sees tokens one by one."""

    def __init__(self, group=None) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 12)
        self.q, self.kv = nn.Linear(12, 12), nn.Linear(12, 24)
        self.out = nn.Linear(12, 12, bias=False)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, CLASSES)
        self.attention = (
            Attention() if group is None else DistributedAttention(Attention(), group, 2, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)) for part in (self.q(h), *self.kv(h).chunk(2, -1))
        )
        distributed = isinstance(self.attention, DistributedAttention)
        mixed = self.attention(q, k, v, 0) if distributed else self.attention(q, k, v)
        self.prediction = self.head(self.norm(h + self.out(mixed.flatten(2))))
        return self.prediction


def make_model(group=None) -> SequenceNet:
    torch.manual_seed(0)
    return SequenceNet(group)


def compare(cases: list[tuple[Mode, str]]) -> list[dict]:
    """Per (mode, "own" or "whole": what a rank's loss is a mean over): how far from one process."""
    world, rank = dist.get_world_size(), dist.get_rank()
    parallel_state_sp.initialize_sequence_parallel(2)
    group, replicas = parallel_state_sp.get_sequence_parallel_group(), world // 2
    whole_loss, results = whole_batch(replicas * ROWS, TOKENS), []
    for mode, mean_over in cases:
        engine = build(mode, make_model(group), world=world // 2, mpu=parallel_state_sp)
        if mode.name.endswith("monte_carlo"):
            engine.kfac.sampler = least_likely
        initial = weights(engine)
        # all rows of those that contribute
        with patch.object(assign, "strides", lambda *factors, **options: {}):
            for step in range(STEPS):
                x, y = make_batch(step, replicas * ROWS, TOKENS)
                x, y = (t.split(ROWS)[rank // 2].chunk(2, dim=1)[rank % 2] for t in (x, y))
                loss = cross_entropy(engine(x), y)
                engine.backward(loss if mean_over == "own" else loss / 2)
                engine.step()
        # "own": the mean of the ranks' losses is that of one process; DeepSpeed sums over the
        # sequence up to stage 2
        part = {"own": 1.0, "whole": 0.5}[mean_over]
        scale = part * (1.0 if mode.stage == 3 else 2.0)
        final = weights(engine)
        refreshes = planned_refreshes(engine.kfac.job) if mode.name.endswith("scaled") else None
        options = {"gradient_scale": scale, "part": part, "refreshes": refreshes}
        expected = train_whole(mode, make_model(), whole_loss, **options)
        known = faults(engine.kfac.preconditioner.layout)
        of_sequence = [fault for fault in known if "sequence" in fault]
        results.append(compared(engine, mode, final, expected, initial, faults=of_sequence))
    return results
