"""Pipeline stages."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

import ds_kfac
from tests.close import exact, near
from tests.deepspeed.modes import FP32_ACCUM, MICRO_ROWS, STEPS, Mode
from tests.deepspeed.parallel import (
    COMM_OPT,
    EVERY_TYPE,
    FP32_WIRE,
    INVERSE,
    SOME,
    Parallelism,
    adam,
    shared_folder,
    whole_batch,
    whole_state,
)
from tests.deepspeed.runs import build
from tests.deepspeed.said import error_of
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch
from tests.ranks import of_ranks


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


class Block(nn.Linear):
    """Checkpointed with reentrance."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


def tied_layers() -> list:
    torch.manual_seed(0)
    return [
        TiedLayerSpec("ends", nn.Linear, FEATURES, FEATURES),
        LayerSpec(nn.Linear, FEATURES, 7),
        LayerSpec(nn.Linear, 7, FEATURES),
        TiedLayerSpec("ends", nn.Linear, FEATURES, FEATURES),
    ]


def micro_batches(engine, step: int, accumulation: int):
    """Of this data-parallel rank."""
    count, index = engine.grid.data_parallel_size, engine.grid.get_data_parallel_rank()
    x, y = make_batch(step, count * accumulation * MICRO_ROWS)
    share = slice(index * accumulation * MICRO_ROWS, (index + 1) * accumulation * MICRO_ROWS)
    dtype = next(engine.module.parameters()).dtype
    return iter(zip(x[share].to(dtype).split(MICRO_ROWS), y[share].split(MICRO_ROWS), strict=True))


@dataclass(frozen=True)
class Stages(Parallelism):
    """Stages of a pipeline, each on one rank or more."""

    whole: Callable[[], Iterable] = make_layers
    accumulation: int = 1
    stages: int = 2

    def make(self, mode: Mode, **options):
        options = {"num_stages": self.stages, "loss_fn": cross_entropy, **options}
        if self.whole is tied_layers:
            options["partition_method"] = "uniform"
        model = PipelineModule(list(self.whole()), **options)
        return build(mode, self.accumulation, model=model)

    def train(self, engine, steps: int = STEPS, first: int = 0) -> None:
        for step in range(first, first + steps):
            engine.train_batch(micro_batches(engine, step, self.accumulation))

    def losses(self, mode: Mode):
        replicas = dist.get_world_size() // self.stages
        return whole_batch(replicas * self.accumulation * MICRO_ROWS, 1)

    def weights(self, engine) -> dict[str, Tensor]:
        bf16 = type(engine.optimizer).__name__ == "BF16_Optimizer"
        master = deepspeed.utils.safe_get_full_fp32_param if bf16 else Tensor.detach
        return {name: master(p).detach().clone() for name, p in engine.module.named_parameters()}


STAGES = Stages()
PIPELINES = [
    # at stage 0 DeepSpeed clips by the norm of the first stage alone
    (Stages(accumulation=4), Mode("pipe-z0", 0, clip=0.0, kfac=EVERY_TYPE)),
    (Stages(accumulation=4), Mode("pipe-z1", 1, kfac=SOME)),
    (Stages(), Mode("pipe-z1", 1, kfac=SOME)),
    (Stages(accumulation=3), Mode("pipe-bf16", 1, "bf16", extra=FP32_ACCUM, clip=0.0)),
    (Stages(accumulation=3), Mode("pipe-z1-wire", 1, kfac=FP32_WIRE)),
    (Stages(), Mode("pipe-z0-comm_opt", 0, clip=0.0, kfac=COMM_OPT)),
    (Stages(accumulation=4), Mode("pipe-z1-inverse", 1, kfac={**EVERY_TYPE, **INVERSE})),
    (Stages(accumulation=4), adam("pipe", 1, kfac=EVERY_TYPE)),
    (Stages(accumulation=4), adam("pipe", 0, clip=0.0)),
]


@pytest.mark.ranks(2)
def test_recomputed_micro_batches_of_other_lengths_have_their_own_loss_terms():
    batches, states = [make_batch(step, MICRO_ROWS, 2 + step * 2 % 3) for step in range(3)], []
    for interval in (0, 1):
        torch.manual_seed(0)
        layers = [nn.Linear(FEATURES, 11), Block(11, 11), Block(11, 11), nn.Linear(11, CLASSES)]
        engine = Stages(lambda: layers, 3).make(  # noqa: B023
            Mode("pipe-lengths", 0, clip=0.0),
            partition_method="uniform",
            dynamic_shape=True,
            activation_checkpoint_interval=interval,
            checkpointable_layers=["Block"],
        )
        engine.train_batch(iter(batches))
        states.append(whole_state(engine.kfac.job))
    plain, recomputed = states
    assert plain.keys() == recomputed.keys() and len(plain) > 8
    for name, value in plain.items():
        size = float(value.abs().max())
        near(recomputed[name], value, 1e-5 * size, "the same sums in another order", what=name)


@pytest.mark.ranks(2)
def test_a_batch_ramp_changes_the_micro_batches_of_a_pipeline():
    """As batches and rates that are set by hand between steps."""
    mode, counts = Mode("pipe-z1", 1, kfac=EVERY_TYPE), [1, 1, 2, 4, 4]
    ramped, by_hand = (STAGES.make(mode) for _ in range(2))
    rate = by_hand.get_lr()[0]
    ds_kfac.BatchRamp(ramped, largest=4 * MICRO_ROWS, at=[2 * MICRO_ROWS, 4 * MICRO_ROWS])
    for step, count in enumerate(counts):
        by_hand.set_train_batch_size(count * MICRO_ROWS)
        for group in by_hand.optimizer.param_groups:
            group["lr"] = rate * count**0.5
        assert ramped.micro_batches == count
        pairs = ((engine, micro_batches(engine, step, count)) for engine in (ramped, by_hand))
        one, other = (float(engine.train_batch(batches)) for engine, batches in pairs)
        assert one == other, "DeepSpeed divides by micro-batches after the step"
    exact(STAGES.weights(ramped), STAGES.weights(by_hand))


WORDS, WIDTH = 13, 8


def words_layers() -> list[nn.Module]:
    """A language model whose head has no name. The first stage's last layer has the shape of an
    embedding, too."""
    torch.manual_seed(0)
    narrow = nn.Sequential(nn.Linear(WORDS, WIDTH), nn.Tanh())
    first = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
    return [*first, narrow, nn.Linear(WIDTH, WORDS)]


@pytest.mark.ranks(2)
def test_a_head_is_found_by_its_shape_though_the_embedding_is_in_another_stage():
    options = {"num_stages": 2, "loss_fn": cross_entropy, "partition_method": "uniform"}
    mode, finals = Mode("pipe-words", 0, adam=True, orthogonal=True, clip=0.0), []
    for model in (nn.Sequential(*words_layers()), PipelineModule(words_layers(), **options)):
        engine = build(mode, model=model)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, WORDS, (MICRO_ROWS, 5), generator=generator)
            if isinstance(model, PipelineModule):
                engine.train_batch(iter([(tokens, tokens.roll(1, 1))]))
            else:
                engine.backward(cross_entropy(engine(tokens), tokens.roll(1, 1)))
                engine.step()
        finals.append(STAGES.weights(engine))
    whole, stage = finals
    assert set().union(*of_ranks(list(stage))) == whole.keys()
    for name, weight in stage.items():
        near(weight, whole[name], 1e-4, "rounding; with the other direction 0.03", what=name)


TIED = Mode("pipe-tied", 0, kfac=EVERY_TYPE, clip=0.0)


@pytest.mark.ranks(2)
def test_another_number_of_stages_takes_weights_or_kfacs_state_alone():
    folder, two = shared_folder(), Stages(tied_layers).make(TIED)
    one, alone = (Stages(tied_layers, stages=1).make(TIED) for _ in range(2))
    assert "TiedLayerSpec" in two.kfac.report
    two.train_batch(micro_batches(two, 0, 1))
    two.save_checkpoint(folder, tag="stages")
    for tag in ("stages", None):  # None: the latest
        error = error_of(lambda: one.load_checkpoint(folder, tag=tag))  # noqa: B023
        assert "saved with 2 pipeline stages, this engine has 1" in error
        assert "KFACAdamW" not in error, "these engines have another optimizer"
    alone.load_checkpoint(folder, tag="stages", load_module_only=True, load_optimizer_states=False)
    loaded = STAGES.weights(alone)
    for name, value in STAGES.weights(two).items():
        if "bias" not in name:  # DeepSpeed ties the weight alone, not the bias
            exact(loaded[name], value, what=name)
    one.kfac.load_state(folder, "stages")
    exact(whole_state(one.kfac.job), whole_state(two.kfac.job))
