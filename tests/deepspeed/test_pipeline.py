"""Pipeline stages train like the sequential model in one process."""

from collections.abc import Iterable
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

import ds_kfac
from tests.close import exact, near
from tests.covering import some
from tests.deepspeed.modes import FP32_ACCUM, KFAC, MICRO_ROWS, STEPS, Mode
from tests.deepspeed.parallel import (
    COMM_OPT,
    EVERY_TYPE,
    INVERSE,
    SCALED,
    assert_alike,
    shared_folder,
    train_whole,
    whole_state,
)
from tests.deepspeed.runs import build, whole_batch
from tests.deepspeed.said import error_of
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch
from tests.ranks import of_ranks

pytestmark = pytest.mark.ranks(2)


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


CLIP = {**EVERY_TYPE, "preconditioner": {"kl_clip": 5e-5}}
CASES = [
    # at stage 0 DeepSpeed clips by the norm of the first stage alone
    (Mode("pipe-z0", 0, clip=0.0, kfac=EVERY_TYPE), 4),
    (Mode("pipe-z1", 1, kfac=CLIP), 4),
    (Mode("pipe-z1", 1, kfac=CLIP), 1),
    (Mode("pipe-bf16", 1, "bf16", extra=FP32_ACCUM, clip=0.0), 3),
    (Mode("pipe-z1-scaled", 1, kfac=SCALED), 3),
    (Mode("pipe-z0-comm_opt", 0, clip=0.0, kfac=COMM_OPT), 1),
    (Mode("pipe-z1-inverse", 1, kfac={**EVERY_TYPE, **INVERSE}), 4),
    (Mode("pipe-adam-z1", 1, adam=True, kfac=EVERY_TYPE), 4),
    (Mode("pipe-adam-z0", 0, adam=True, clip=0.0), 4),
]
FORK = [(Mode(f"pipe-fork-z{stage}", stage, clip=0.0), 3) for stage in (0, 1)]
"""A layer's gradient is the sum of what comes by both outputs of its stage."""
ROWS = [(*case, world) for world in (2, 4) for case in some(CASES, world)]
ROWS += [(*case, 2) for case in FORK]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mode", "accumulation", "world"),
    ROWS,
    ids=[f"{mode.name}-{accumulation}-{world}" for mode, accumulation, world in ROWS],
)
def test_pipelines_match_one_process(mode, accumulation, world):
    assert_trained_alike(mode, accumulation)


def test_recomputed_micro_batches_of_other_lengths_have_their_own_loss_terms():
    batches, states = [make_batch(step, MICRO_ROWS, 2 + step * 2 % 3) for step in range(3)], []
    for interval in (0, 1):
        torch.manual_seed(0)
        layers = [nn.Linear(FEATURES, 11), Block(), Block(), nn.Linear(11, CLASSES)]
        engine = pipeline(
            layers,
            Mode("pipe-lengths", 0, clip=0.0),
            3,
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


def test_a_batch_ramp_changes_the_micro_batches_of_a_pipeline():
    """As batches and rates that are set by hand between steps."""
    mode, counts = Mode("pipe-z1", 1, kfac=EVERY_TYPE), [1, 1, 2, 4, 4]
    ramped, by_hand = (pipeline(make_layers(), mode) for _ in range(2))
    rate = by_hand.get_lr()[0]
    ds_kfac.BatchRamp(ramped, largest=4 * MICRO_ROWS, at=[2 * MICRO_ROWS, 4 * MICRO_ROWS])
    for step, count in enumerate(counts):
        by_hand.set_train_batch_size(count * MICRO_ROWS)
        for group in by_hand.optimizer.param_groups:
            group["lr"] = rate * count**0.5
        assert ramped.micro_batches == count
        losses = [
            float(engine.train_batch(micro_batches(engine, step, count)))
            for engine in (ramped, by_hand)
        ]
        assert losses[0] == losses[1], "DeepSpeed divides by micro-batches after the step"
    exact(weights(ramped), weights(by_hand))


WORDS, WIDTH = 13, 8


def test_a_head_is_found_by_its_shape_though_the_embedding_is_in_another_stage():
    """Of a language model whose head has no name. The first stage's last layer has the shape of an
    embedding, too."""
    config = {
        "train_micro_batch_size_per_gpu": MICRO_ROWS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "KFACAdamW", "params": {"lr": 1e-3}},
        "kfac": {"factor": {"rows": "all"}, "report": "none"},
    }

    def words() -> nn.Sequential:
        torch.manual_seed(0)
        inner = (nn.Linear(WIDTH, WORDS), nn.Linear(WORDS, WIDTH), nn.Tanh())
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), *inner, nn.Linear(WIDTH, WORDS))

    options = {"num_stages": 2, "loss_fn": cross_entropy, "partition_method": "uniform"}
    finals = []
    for model in (words(), PipelineModule(list(words()), **options)):
        engine, *_ = ds_kfac.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, WORDS, (MICRO_ROWS, 5), generator=generator)
            if isinstance(model, PipelineModule):
                engine.train_batch(iter([(tokens, tokens.roll(1, 1))]))
            else:
                engine.backward(cross_entropy(engine(tokens), tokens.roll(1, 1)))
                engine.step()
        finals.append({n: p.detach().clone() for n, p in engine.module.named_parameters()})
    whole, stage = finals
    assert set().union(*of_ranks(list(stage))) == whole.keys()
    for name, weight in stage.items():
        near(weight, whole[name], 1e-4, "rounding; with the other direction 0.03", what=name)


REFUSED = {
    "monte_carlo": Mode("pipe", 0, kfac={"factor": {**KFAC["factor"], "fisher": "monte_carlo"}}),
    "parameter groups": Mode("pipe", 1, adam=True, clip=0.0),  # only the first stage has a norm
    "no layer to precondition": Mode("pipe", 0, kfac={"layers": {"types": ["LayerNorm"]}}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_pipelines_cannot_do_is_refused_on_every_rank(words):
    assert words in error_of(lambda: pipeline(make_layers(), REFUSED[words]))


def tied_engine(stages: int = 2, stage: int = 1):
    torch.manual_seed(0)
    layers = [
        TiedLayerSpec("ends", nn.Linear, FEATURES, FEATURES),
        LayerSpec(nn.Linear, FEATURES, 7),
        LayerSpec(nn.Linear, 7, FEATURES),
        TiedLayerSpec("ends", nn.Linear, FEATURES, FEATURES),
    ]
    options = {"num_stages": stages, "loss_fn": cross_entropy, "partition_method": "uniform"}
    mode = Mode("pipe-tied", stage, kfac=EVERY_TYPE, clip=0.0)
    return build(mode, model=PipelineModule(layers, **options))


def test_tied_layers_are_left_to_the_optimizer_and_checkpoints_hold_every_stage():
    folder, first, second = shared_folder(), tied_engine(), tied_engine()
    for step in range(3):
        first.train_batch(micro_batches(first, step, 1))
    assert "TiedLayerSpec" in first.kfac.report
    assert of_ranks([layer.name for layer in first.kfac.preconditioner.layers]) == [["1"], ["2"]]
    first.save_checkpoint(folder, tag="t")
    second.load_checkpoint(folder, tag="t")
    state = whole_state(first.kfac.job)
    exact(whole_state(second.kfac.job), state)
    assert second.kfac.preconditioner.steps == 3
    parts = ("A.factor.pt", "G.factor.pt", "layer.pt")
    files = sorted(path.name for path in Path(folder, "t/kfac").glob("*/*.pt"))
    assert files == sorted(f"{layer}.{part}" for layer in "12" for part in parts), "each once"
    for engine in (first, second):
        engine.train_batch(micro_batches(engine, 3, 1))
    exact(weights(second), weights(first))


def test_another_number_of_stages_takes_weights_or_kfacs_state_alone():
    folder, two, one, alone = (
        shared_folder(),
        tied_engine(stage=0),
        *(tied_engine(stages=1, stage=0) for _ in range(2)),
    )
    two.train_batch(micro_batches(two, 0, 1))
    two.save_checkpoint(folder, tag="stages")
    for tag in ("stages", None):  # None: the latest
        error = error_of(lambda: one.load_checkpoint(folder, tag=tag))  # noqa: B023
        assert "saved with 2 pipeline stages, this engine has 1" in error
        assert "KFACAdamW" not in error, "these engines have another optimizer"
    alone.load_checkpoint(folder, tag="stages", load_module_only=True, load_optimizer_states=False)
    loaded = weights(alone)
    for name, value in weights(two).items():
        if "bias" not in name:  # DeepSpeed ties the weight alone, not the bias
            exact(loaded[name], value, what=name)
    one.kfac.load_state(folder, "stages")
    exact(whole_state(one.kfac.job), whole_state(two.kfac.job))
