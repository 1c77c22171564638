"""DeepSpeed's TiledMLP on a padded batch trains as the model in one piece, which counts the same rows."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
from torch import Tensor
from torch.nn import functional as F

from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, difference, weights
from tests.deepspeed.test_num_items import ACCUMULATION, ROWS, TrainerNet, expected, train
from tests.models import make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


class TiledNet(TrainerNet):
    """In tiles of a micro-batch's 12 rows, which are 4 sequences: of 6, or of 4."""

    tiles = 2

    def forward(self, tokens: Tensor, labels: Tensor, **kwargs) -> dict[str, Tensor]:
        def mlp(own: TiledNet, x: Tensor) -> Tensor:
            return own.down(torch.tanh(own.rms(own.up(x))))

        params = [p for part in (self.up, self.rms, self.down) for p in part.parameters()]
        x = self.embedding(tokens)
        h = TiledMLP.apply(mlp, self, self.norm(x), self.tiles, params)
        logits = self.lm_head(x + h + 0.3 * torch.cumsum(x, dim=1))
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": total / kwargs["num_items_in_batch"], "logits": logits}


class CutNet(TiledNet):
    tiles = 3


def worker(names) -> dict:
    world, rank, results = dist.get_world_size(), dist.get_rank(), {}
    for name, net in names:
        mode = BY_NAME[name]
        mode = replace(mode, kfac={"layers": {"types": ["Linear", "LayerNorm", "RMSNorm"]}})
        mode = replace(mode, kfac={**mode.config(1, world)["kfac"], **mode.kfac})
        engine = build(mode, ACCUMULATION, model=make_net(net), train_micro_batch_size_per_gpu=ROWS)
        initial = weights(engine)
        train(engine, world)
        final = weights(engine)
        if rank == 0:
            whole, other = expected(mode, initial, world), expected(mode, initial, world, permuted=True)
            results[name, net.__name__] = difference(final, whole, initial), difference(other, whole, initial)
        engine.destroy()
    return results


def test_tiles_train_like_the_whole_batch():
    cases = [(name, net) for name in ("z0", "z2", "z3") for net in (TiledNet, CutNet)]
    for case, (error, rounding) in run_ranks("tests.deepspeed.test_slices:worker", world=2, payload=cases)[0].items():
        # two orders of rows, and what fp32 has of nothing
        assert error < 20 * rounding + 1e-6, f"{case}: differs by {error:.1e}, rounding by {rounding:.1e}"
