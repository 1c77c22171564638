"""A PipelineModule of two stages, and the same layers in one process."""

from collections.abc import Iterable

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from tests.deepspeed.modes import MICRO_ROWS, STEPS, Mode
from tests.deepspeed.parallel import assert_alike, train_whole
from tests.deepspeed.runs import build, whole_batch
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 17),
        nn.SiLU(),
        nn.LayerNorm(17),
        nn.Linear(17, 19, bias=False),
        nn.Tanh(),
        nn.Linear(19, 11),
        nn.Tanh(),
        nn.Linear(11, CLASSES),
    )


class Fork(nn.Module):
    """One layer whose output leaves a stage twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 11)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x)
        return torch.tanh(h), torch.sin(2 * h)


class Merge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(11, CLASSES)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(pair[0] + pair[1] * pair[0])


def make_fork() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Fork(), Merge())


class Block(nn.Module):
    """Checkpointed with reentrance."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(11, 11)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def micro_batches(engine, step: int, accumulation: int):
    """Of this data-parallel rank."""
    count, index = engine.grid.data_parallel_size, engine.grid.get_data_parallel_rank()
    x, y = make_batch(step, count * accumulation * MICRO_ROWS)
    share = slice(index * accumulation * MICRO_ROWS, (index + 1) * accumulation * MICRO_ROWS)
    dtype = next(engine.module.parameters()).dtype
    return iter(zip(x[share].to(dtype).split(MICRO_ROWS), y[share].split(MICRO_ROWS), strict=True))


def weights(engine) -> dict[str, Tensor]:
    bf16 = type(engine.optimizer).__name__ == "BF16_Optimizer"
    master = deepspeed.utils.safe_get_full_fp32_param if bf16 else Tensor.detach
    return {name: master(p).detach().clone() for name, p in engine.module.named_parameters()}


def pipeline(layers: Iterable[nn.Module], mode: Mode, accumulation: int = 1, **options):
    """An engine of two stages."""
    options = {"num_stages": 2, "loss_fn": cross_entropy, **options}
    return build(mode, accumulation, model=PipelineModule(list(layers), **options))


def assert_trained_alike(mode: Mode, accumulation: int) -> None:
    """This rank's stage is trained like all of them in one process; "fork" in the mode's name: of a
    model whose first stage has two outputs."""
    make = make_fork if "fork" in mode.name else make_layers
    engine, replicas = pipeline(make(), mode, accumulation), dist.get_world_size() // 2
    for step in range(STEPS):
        engine.train_batch(micro_batches(engine, step, accumulation))
    losses = whole_batch(replicas * accumulation * MICRO_ROWS, 1)
    assert_alike(engine, mode, weights(engine), train_whole(engine, mode, make, losses))
