"""A PipelineModule of two stages, and the same layers in one process."""

import copy
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

import ds_kfac
from ds_kfac.checkpoint.files import CheckpointError
from tests.deepspeed.modes import MICRO_ROWS, STEPS, Mode
from tests.deepspeed.parallel import (
    build,
    compared,
    planned_refreshes,
    same,
    shared_folder,
    train_whole,
    whole_batch,
    whole_state,
)
from tests.deepspeed.parallel import refusals as refused
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch

WORDS, WIDTH = 13, 8


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


def lengths(mode: Mode) -> list[dict[str, Tensor]]:
    """Factors after a step of micro-batches of several lengths, without and with recomputation."""
    found = []
    for interval in (0, 1):
        torch.manual_seed(0)
        layers = [nn.Linear(FEATURES, 11), Block(), Block(), nn.Linear(11, CLASSES)]
        module = PipelineModule(
            layers,
            num_stages=2,
            loss_fn=cross_entropy,
            partition_method="uniform",
            dynamic_shape=True,
            activation_checkpoint_interval=interval,
            checkpointable_layers=["Block"],
        )
        engine = build(mode, module, 3)
        engine.train_batch(
            iter([make_batch(step, MICRO_ROWS, tokens) for step, tokens in enumerate((2, 5, 3))])
        )
        found.append(whole_state(engine.kfac.job))
        engine.kfac.detach()
        engine.destroy()
    return found


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


def compare(cases: list[tuple[Mode, int]]) -> list[dict]:
    """Per (mode, micro-batches): how far this rank's stage is from one process; "fork" in the
    mode's name: of a model whose first stage has two outputs."""
    world, results = dist.get_world_size(), []
    replicas = world // 2
    for mode, accumulation in cases:
        whole = make_fork() if "fork" in mode.name else make_layers()
        initial = {name: p.detach().clone() for name, p in whole.named_parameters()}
        stages = PipelineModule(list(copy.deepcopy(whole)), num_stages=2, loss_fn=cross_entropy)
        engine = build(mode, stages, accumulation, replicas)
        for step in range(STEPS):
            engine.train_batch(micro_batches(engine, step, accumulation))

        whole_loss = whole_batch(replicas * accumulation * MICRO_ROWS)
        refreshes = planned_refreshes(engine.kfac.job) if mode.name.endswith("scaled") else None
        expected = train_whole(mode, whole, whole_loss, refreshes=refreshes)
        results.append(compared(engine, mode, weights(engine), expected, initial))
    return results


def two_stages(mode: Mode):
    return build(mode, PipelineModule(list(make_layers()), num_stages=2, loss_fn=cross_entropy))


def refusals(modes: dict[str, Mode]) -> dict[str, str]:
    return refused(two_stages, {name: (mode,) for name, mode in modes.items()})


def ramped(mode: Mode) -> dict:
    """A pipeline with a batch ramp, and one whose batches and rates are set by hand between its
    steps."""
    found: dict = {"batches": []}
    for by_hand in (False, True):
        engine = two_stages(mode)
        rate = engine.get_lr()[0]
        if not by_hand:
            ds_kfac.BatchRamp(engine, largest=4 * MICRO_ROWS, at=[2 * MICRO_ROWS, 4 * MICRO_ROWS])
        for step, count in enumerate([1, 1, 2, 4, 4]):
            if by_hand:
                engine.set_train_batch_size(count * MICRO_ROWS)
                for group in engine.optimizer.param_groups:
                    group["lr"] = rate * count**0.5
            else:
                found["batches"].append(engine.micro_batches)
            found.setdefault(f"losses {by_hand}", []).append(
                float(engine.train_batch(micro_batches(engine, step, count)))
            )
        found[by_hand] = weights(engine)
        engine.kfac.detach()
        engine.destroy()
    return {
        **found,
        "same": all(torch.equal(found[True][name], value) for name, value in found[False].items()),
    }


def tied_and_saved(kfac: dict) -> dict:
    """A pipeline whose first and last layer are tied; trained, saved, loaded into another engine,
    trained on."""

    def make_engine(stages: int = 2, stage: int = 1):
        torch.manual_seed(0)
        layers = [
            TiedLayerSpec("ends", nn.Linear, FEATURES, FEATURES),
            LayerSpec(nn.Linear, FEATURES, 7),
            LayerSpec(nn.Linear, 7, FEATURES),
            TiedLayerSpec("ends", nn.Linear, FEATURES, FEATURES),
        ]
        model = PipelineModule(
            layers, num_stages=stages, loss_fn=cross_entropy, partition_method="uniform"
        )
        return build(Mode("pipe-tied", stage, kfac=kfac, clip=0.0), model, world=3 - stages)

    folder, first = shared_folder(), make_engine()
    for step in range(3):
        first.train_batch(micro_batches(first, step, 1))
    first.save_checkpoint(folder, tag="t")
    second = make_engine()
    second.load_checkpoint(folder, tag="t")
    saved = whole_state(first.kfac.job)
    loaded = second.kfac.preconditioner.steps == 3 and same(saved, whole_state(second.kfac.job))
    other, refused = make_engine(stages=1, stage=0), ""
    plain = make_engine(stage=0)
    plain.save_checkpoint(folder, tag="stages")
    for tag in ("stages", None):  # None: the latest
        try:
            other.load_checkpoint(folder, tag=tag)
        except CheckpointError as error:
            refused += str(error)
    alone = make_engine(stages=1, stage=0)
    alone.load_checkpoint(folder, tag="stages", load_module_only=True, load_optimizer_states=False)
    other.kfac.load_state(folder, "t")
    loaded_alone = weights(alone)
    for engine in (first, second):
        engine.train_batch(micro_batches(engine, 3, 1))
    after = weights(second)
    return {
        "layers": [layer.name for layer in first.kfac.preconditioner.layers],
        "report": first.kfac.report,
        "refused": refused,
        "weights alone": all(  # DeepSpeed ties the weight alone, not the bias
            torch.equal(value, loaded_alone[name])
            for name, value in weights(plain).items()
            if "bias" not in name
        ),
        "loaded": loaded,
        "loaded without stages": same(saved, whole_state(other.kfac.job)),
        "files": sorted(path.name for path in Path(folder, "t/kfac").glob("*/*.pt")),
        "same": all(torch.equal(value, after[name]) for name, value in weights(first).items()),
    }


def make_words() -> nn.Sequential:
    """A language model whose head has no name. The first stage's last layer has the shape of an
    embedding, too."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        nn.Linear(WIDTH, WORDS),
        nn.Linear(WORDS, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WORDS),
    )


def words_trained(stages: int) -> dict[str, Tensor]:
    """Weights of this rank after some steps of :func:`make_words` by KFACAdamW; ``stages`` 1:
    without a pipeline."""
    config = {
        "train_micro_batch_size_per_gpu": MICRO_ROWS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "KFACAdamW", "params": {"lr": 1e-3}},
        "kfac": {"factor": {"rows": "all"}, "report": "none"},
    }
    model = make_words()
    if stages > 1:
        model = PipelineModule(
            list(model), num_stages=stages, loss_fn=cross_entropy, partition_method="uniform"
        )
    engine, *_ = ds_kfac.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(STEPS):
        tokens = torch.randint(
            0, WORDS, (MICRO_ROWS, 5), generator=torch.Generator().manual_seed(step)
        )
        if stages > 1:
            engine.train_batch(iter([(tokens, tokens.roll(1, 1))]))
        else:
            engine.backward(cross_entropy(engine(tokens), tokens.roll(1, 1)))
            engine.step()
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}
