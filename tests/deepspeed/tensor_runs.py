"""Tensor parallelism by AutoTP, and by layers and an mpu that look like Megatron's; the whole model
in one process."""

import copy
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.deepspeed import parallel
from tests.deepspeed.blockwise import BlockwiseInverse
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
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch
from tests.oracle import ReferenceKFAC

TOKENS = 12  # more rows than any side is wide: else Adam's eigenbasis is not unique
UNEQUAL_STEPS = 10
PARTS = {"up": (None, 8), "gate": (None, 8), "down": (8, None), "gathered": (None, 5)}
AUTOTP = {
    "autotp_size": 2,
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [".*(up|gate)\\.weight$"], "partition_type": "column"},
            {"patterns": [".*down\\.weight$"], "partition_type": "row"},
            {
                "patterns": [".*gathered\\.weight$"],
                "partition_type": "column",
                "gather_output": True,
            },
            {"patterns": [".*(plain|head)\\.weight$"], "partition_type": "skip"},
        ],
    },
}


class ShardedNet(nn.Module):
    """up, gate, down and gathered are cut; plain, norm and head are the same on all tensor-parallel
    ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(FEATURES, 12)
        self.up, self.gate = nn.Linear(12, 16), nn.Linear(12, 16)
        self.down = nn.Linear(16, 12)
        self.norm = nn.LayerNorm(12)
        self.gathered = nn.Linear(12, 10, bias=False)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.plain(x))
        h = self.norm(h + _first(self.down(torch.tanh(_first(self.up(h))) * _first(self.gate(h)))))
        return self.head(torch.tanh(self.gathered(h)))


def _first(output):
    return output[0] if isinstance(output, tuple) else output


class Grid:
    """A Megatron mpu's groups: ranks (0, 1), (2, 3) hold shards of one model. ``first``: the first
    one's part of it."""

    def __init__(self, first: float = 0.5) -> None:
        self.first = first
        rank, world = dist.get_rank(), dist.get_world_size()
        model = [list(range(first, first + 2)) for first in range(0, world, 2)]
        data = [list(range(first, world, 2)) for first in range(2)]
        self.model, self.data = (
            [(ranks, dist.new_group(ranks)) for ranks in groups] for groups in (model, data)
        )
        self.model, self.data = (
            next(g for r, g in one if rank in r) for one in (self.model, self.data)
        )

    def get_model_parallel_group(self):
        return self.model

    def get_data_parallel_group(self):
        return self.data

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.model)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.model)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.data)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Parallel(nn.Module):
    def __init__(self, whole: nn.Linear, mpu: Grid, dim: int) -> None:
        super().__init__()
        self.group, index = mpu.get_model_parallel_group(), mpu.get_model_parallel_rank()
        first = int(mpu.first * whole.weight.shape[dim])
        sizes = first, whole.weight.shape[dim] - first
        self.weight = nn.Parameter(whole.weight.detach().split(sizes, dim)[index].clone())
        self.weight.tensor_model_parallel = True
        bias = whole.bias.detach()
        self.bias = nn.Parameter((bias.split(sizes)[index] if dim == 0 else bias).clone())
        self.bias.tensor_model_parallel = dim == 0


class ColumnParallelLinear(_Parallel):
    def __init__(self, whole: nn.Linear, mpu: Grid) -> None:
        super().__init__(whole, mpu, 0)
        self.gather_output, self.output_size_per_partition = False, len(self.weight)

    def forward(self, x: Tensor):
        return nn.functional.linear(_Copy.apply(x, self.group), self.weight, self.bias), None


class RowParallelLinear(_Parallel):
    def __init__(self, whole: nn.Linear, mpu: Grid) -> None:
        super().__init__(whole, mpu, 1)
        self.input_is_parallel, self.input_size_per_partition = True, self.weight.shape[1]

    def forward(self, x: Tensor):
        return _Sum.apply(nn.functional.linear(x, self.weight), self.group) + self.bias, None


def make_model() -> ShardedNet:
    torch.manual_seed(0)
    return ShardedNet()


def part(name: str, value: Tensor, index: int) -> Tensor:
    """This rank's part of a whole parameter."""
    module = name.split(".")[0]
    if module in ("up", "gate", "gathered"):
        return value.chunk(2)[index]
    return value.chunk(2, 1)[index] if name == "down.weight" else value


def weights(engine) -> dict[str, Tensor]:
    full = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            full[name] = p.detach().clone()
    return full


def make_engine(kind: str, mode: Mode, model: ShardedNet, grid: Grid):
    if kind == "autotp":
        mode.extra["tensor_parallel"] = AUTOTP
        return build(mode, model)
    model.up, model.gate = (ColumnParallelLinear(layer, grid) for layer in (model.up, model.gate))
    model.down = RowParallelLinear(model.down, grid)
    return build(mode, model, mpu=grid)


def refusals(cases: dict[str, tuple[str, Mode]]) -> dict[str, str]:
    grid = Grid()
    return parallel.refusals(
        make_engine, {name: (*case, make_model(), grid) for name, case in cases.items()}
    )


def saved(mode: Mode) -> dict:
    """Trained with everything on, saved, loaded into another engine, trained on."""
    grid, folder = Grid(), shared_folder()

    def train(engine, steps: range) -> None:
        for step in steps:
            x, y = make_batch(step, MICRO_ROWS, TOKENS)
            engine.backward(cross_entropy(engine(x), y))
            engine.step()

    first, second = (make_engine("megatron", mode, make_model(), grid) for _ in range(2))
    train(first, range(7))
    first.save_checkpoint(folder, tag="t")
    second.load_checkpoint(folder, tag="t")
    loaded = same(whole_state(first.kfac.job), whole_state(second.kfac.job))
    for engine in (first, second):
        train(engine, range(7, 10))
    final, after = weights(first), weights(second)
    return {
        "loaded": loaded,
        "same": all(torch.equal(value, after[name]) for name, value in final.items()),
        "replicated": {name: final[name] for name in final if name.split(".")[0] not in PARTS},
        "files": sorted(path.name for path in Path(folder, "t/kfac").glob("*/*.A.factor.pt")),
    }


def unequal(modes: list[Mode]) -> list[dict]:
    """Trained with shards of 13 and 3 of 16: what is not cut, as this rank has it, and who works on
    it."""
    rank, replicas, results, grid = dist.get_rank(), dist.get_world_size() // 2, [], Grid(13 / 16)
    for mode in modes:
        engine = make_engine("megatron", mode, make_model(), grid)
        dtype = next(engine.module.parameters()).dtype
        for step in range(UNEQUAL_STEPS):
            x, y = (
                t.chunk(replicas)[rank // 2]
                for t in make_batch(step, replicas * MICRO_ROWS, TOKENS)
            )
            engine.backward(cross_entropy(engine(x.to(dtype)), y))
            engine.step()
        kfac = engine.kfac.preconditioner
        copied = [layer.name for layer in kfac.layers if layer.copies > 1]
        roles = kfac.plan.assignment
        results.append(
            {
                "copies": {
                    n: v
                    for n, v in weights(engine).items()
                    if n.split(".")[0] not in PARTS | {"gathered": 0}
                },
                "eigen_workers": {
                    key: roles.eigen_workers[key] for n in copied for key in (f"{n}/A", f"{n}/G")
                },
                "workers": {name: roles.workers[name] for name in copied},
                "dtypes": (kfac.plan.wire, kfac.plan.gradient_dtypes),
                "groups": kfac.observations.groups,
            }
        )
        engine.kfac.detach()
        engine.destroy()
    return results


def step_sizes(mode: Mode) -> dict[str, float]:
    """Root mean square, over a layer or this rank's shard of it, of what one step adds to it per
    unit of rate, times the root of the whole layer's shorter side: the mean singular value, but for
    the sides' ratio."""
    engine = make_engine("megatron", mode, make_model(), Grid())
    before = weights(engine)
    engine.backward(
        cross_entropy(
            engine(make_batch(0, MICRO_ROWS, TOKENS)[0]), make_batch(0, MICRO_ROWS, TOKENS)[1]
        )
    )
    engine.step()
    after, group = weights(engine), engine.optimizer.param_groups[0]
    sizes = {}
    for layer in engine.kfac.preconditioner.layers:
        kept = 1 - group["lr"] * group["weight_decay"]
        moved = [
            (after[name] - kept * before[name]).flatten() / group["lr"] for name in layer.parameters
        ]
        sizes[layer.name] = (
            float(torch.cat(moved).square().mean().sqrt()) * min(layer.whole_shape) ** 0.5
        )
    return sizes


def compare(cases: list[tuple[str, Mode]]) -> list[dict]:
    """Per ("autotp" or "megatron", mode): how far this rank's shards are from one process."""
    rank, replicas, results = dist.get_rank(), dist.get_world_size() // 2, []
    index, grid = rank % 2, Grid()
    for kind, mode in cases:
        whole = make_model()
        initial = {name: p.detach().clone() for name, p in whole.named_parameters()}
        model = copy.deepcopy(whole)
        parts = dict(PARTS)
        if kind == "megatron":
            parts.pop("gathered")
        engine = make_engine(kind, mode, model, grid)
        for step in range(STEPS):
            x, y = (
                t.chunk(replicas)[rank // 2]
                for t in make_batch(step, replicas * MICRO_ROWS, TOKENS)
            )
            engine.backward(cross_entropy(engine(x), y))
            engine.step()
        whole_loss = whole_batch(replicas * MICRO_ROWS, TOKENS)
        refreshes = planned_refreshes(engine.kfac.job) if mode.name.endswith("scaled") else None
        inverse = mode.kfac.get("preconditioner", {}).get("method") == "inverse"
        kind = BlockwiseInverse if inverse else ReferenceKFAC
        expected = train_whole(mode, whole, whole_loss, parts=parts, refreshes=refreshes, kind=kind)
        expected.weights = {
            n: part(n, v, index) if n.split(".")[0] in parts else v
            for n, v in expected.weights.items()
        }
        start = {
            n: part(n, v, index) if n.split(".")[0] in parts else v for n, v in initial.items()
        }
        kfac, final = engine.kfac.preconditioner, weights(engine)
        results.append(
            compared(
                engine,
                mode,
                final,
                expected,
                start,
                kinds={layer.name: layer.kind for layer in kfac.layers},
                whole=[
                    (layer.whole_shape, tuple(initial[layer.weight].shape)) for layer in kfac.layers
                ],
                replicated={n: final[n] for n in final if n.split(".")[0] not in parts},
            )
        )
    return results


class VocabParallelEmbedding(nn.Module):
    """Megatron's: each rank has the rows of some words."""

    def __init__(self, whole: nn.Embedding, mpu: Grid) -> None:
        super().__init__()
        self.group, self.num_embeddings = mpu.get_model_parallel_group(), whole.num_embeddings
        self.weight = nn.Parameter(
            whole.weight.detach().chunk(2)[mpu.get_model_parallel_rank()].clone()
        )
        self.weight.tensor_model_parallel = True
        self.first = mpu.get_model_parallel_rank() * len(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        places = tokens - self.first
        here = (places >= 0) & (places < len(self.weight))
        rows = nn.functional.embedding(places * here, self.weight) * here[..., None]
        return _Sum.apply(rows, self.group)


class Words(nn.Module):
    """A language model whose head has no head's name; cut if there is an mpu."""

    def __init__(self, mpu: Grid | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.mix, self.output_layer = (
            nn.Embedding(20, 12),
            nn.Linear(12, 12),
            nn.Linear(12, 20),
        )
        if mpu is not None:
            self.words = VocabParallelEmbedding(self.words, mpu)
            self.output_layer = ColumnParallelLinear(self.output_layer, mpu)

    def forward(self, tokens: Tensor) -> Tensor:
        return _first(self.output_layer(torch.tanh(self.mix(self.words(tokens)))))


def rules_of_layers(mode: Mode) -> list[str]:
    """Report of each layer, of the model whole and of its shards."""
    grid = Grid()
    reports = []
    for mpu in (None, grid):
        engine = build(mode, Words(mpu), mpu=mpu) if mpu else build(mode, Words(None))
        reports.append(engine.kfac.report)
        engine.destroy()
    return reports
