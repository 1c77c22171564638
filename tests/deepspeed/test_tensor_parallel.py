"""Tensor-parallel shards, by AutoTP and by layers and an mpu that look like Megatron's. Their sides
that are cut are block-diagonal."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_kfac.model.scan import scan
from tests.close import near
from tests.deepspeed.modes import CLIPPED, MICRO_ROWS, Mode
from tests.deepspeed.parallel import Parallelism, whole_batch
from tests.deepspeed.runs import build, used
from tests.models import CLASSES, FEATURES, make_batch, make_net

TOKENS = 12  # more rows than any side is wide: else Adam's eigenbasis is not unique
PARTS = {"up": (None, 8), "gate": (None, 8), "down": (8, None), "gathered": (None, 5)}
"""Layers that AutoTP cuts: the oracle's blocks of A and G."""


def pattern(names: str, kind: str, **options) -> dict:
    return {"patterns": [f".*({names})\\.weight$"], "partition_type": kind, **options}


AUTOTP = {
    "autotp_size": 2,
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            pattern("up|gate", "column"),
            pattern("down", "row"),
            pattern("gathered", "column", gather_output=True),
            pattern("plain|head", "skip"),
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


def same(group):
    return group


def make_grid() -> SimpleNamespace:
    """A Megatron mpu's groups: ranks (0, 1), (2, 3) hold shards of one model."""
    grid, pairs = SimpleNamespace(), torch.arange(dist.get_world_size()).view(-1, 2)
    for name, rows in (("model", pairs.tolist()), ("data", pairs.T.tolist())):
        groups = [(ranks, dist.new_group(ranks)) for ranks in rows]
        group = next(group for ranks, group in groups if dist.get_rank() in ranks)
        setattr(grid, f"get_{name}_parallel_group", partial(same, group))
        setattr(grid, f"get_{name}_parallel_rank", partial(dist.get_rank, group))
        setattr(grid, f"get_{name}_parallel_world_size", partial(dist.get_world_size, group))
    return grid


def summed(x: Tensor, group) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return summed(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Parallel(nn.Module):
    """``first``: the first rank's part of the layer."""

    def __init__(self, whole: nn.Linear, grid: SimpleNamespace, first: float, dim: int) -> None:
        super().__init__()
        self.group, index = grid.get_model_parallel_group(), grid.get_model_parallel_rank()
        first = int(first * whole.weight.shape[dim])
        sizes = first, whole.weight.shape[dim] - first
        self.weight = nn.Parameter(whole.weight.detach().split(sizes, dim)[index].clone())
        self.weight.tensor_model_parallel = True
        bias = whole.bias.detach()
        self.bias = nn.Parameter((bias.split(sizes)[index] if dim == 0 else bias).clone())
        self.bias.tensor_model_parallel = dim == 0


class ColumnParallelLinear(_Parallel):
    def __init__(self, *given) -> None:
        super().__init__(*given, 0)
        self.gather_output, self.output_size_per_partition = False, len(self.weight)

    def forward(self, x: Tensor):
        x = x.view_as(x)
        x.register_hook(lambda gradient: summed(gradient, self.group))
        return nn.functional.linear(x, self.weight, self.bias), None


class RowParallelLinear(_Parallel):
    def __init__(self, *given) -> None:
        super().__init__(*given, 1)
        self.input_is_parallel, self.input_size_per_partition = True, self.weight.shape[1]

    def forward(self, x: Tensor):
        return _Sum.apply(nn.functional.linear(x, self.weight), self.group) + self.bias, None


@dataclass(frozen=True)
class Shards(Parallelism):
    """Pairs of ranks have shards of one model.

    Attributes:
        by: "autotp", or "megatron".
        first: the first rank's part of a layer of Megatron's.
    """

    by: str = "megatron"
    first: float = 0.5

    whole = ShardedNet

    def make(self, mode: Mode):
        model = make_net(ShardedNet)
        if self.by == "autotp":
            return build(mode, model=model, tensor_parallel=AUTOTP)
        grid = make_grid()
        for name in ("up", "gate", "down"):
            kind = RowParallelLinear if name == "down" else ColumnParallelLinear
            setattr(model, name, kind(getattr(model, name), grid, self.first))
        return build(mode, model=model, given={"mpu": grid})

    def batch(self, step: int) -> list[Tensor]:
        whole = make_batch(step, dist.get_world_size() // 2 * MICRO_ROWS, TOKENS)
        return [t.split(MICRO_ROWS)[dist.get_rank() // 2] for t in whole]

    def losses(self, mode: Mode):
        return whole_batch(dist.get_world_size() // 2 * MICRO_ROWS, 1, TOKENS)

    @property
    def parts(self) -> dict[str, tuple]:
        """Layers that are cut: the oracle's blocks of A and G."""
        return PARTS if self.by == "autotp" else {k: PARTS[k] for k in PARTS if k != "gathered"}

    def dim(self, name: str) -> int | None:
        """In which dimension a parameter is cut; None: in none, as the bias of ``down``."""
        module = name.split(".")[0]
        rows = {"up": 0, "gate": 0, "gathered": 0, "down": 1 if name == "down.weight" else None}
        return rows[module] if module in self.parts else None

    def options(self, mode: Mode) -> dict:
        return {"parts": self.parts}

    def named(self, name: str) -> str:
        """With the number of this rank's shard."""
        return name if self.dim(name) is None else f"{name}/{dist.get_rank() % 2}"

    def weights(self, engine) -> dict[str, Tensor]:
        return {self.named(name): value for name, value in used(engine).items()}

    def part(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, value in values.items():
            dim = self.dim(name)
            own = value if dim is None else value.chunk(2, dim)[dist.get_rank() % 2]
            found[self.named(name)] = own
        return found

    def check(self, engine, mode: Mode) -> None:
        kfac = engine.kfac.preconditioner
        kinds = {layer.name: layer.kind for layer in kfac.layers}
        cut = {name for name, kind in kinds.items() if kind not in ("Linear", "LayerNorm")}
        assert cut == set(self.parts)
        assert kfac.observations.groups == (("up", "gate"),)
        assert "down.bias" in engine.kfac.report and "belongs to no shard" in engine.kfac.report
        if mode.clip == CLIPPED and mode.stage:
            assert float(engine.get_global_grad_norm()) > 2 * CLIPPED, "there is something to clip"


@pytest.mark.ranks(2)
def test_a_shard_takes_steps_of_the_size_of_a_whole_layers():
    """KFACAdamW orthogonalizes every shard by itself, at the same size per entry: its root mean
    square times the root of the whole layer's shorter side, the mean singular value but for the
    sides' ratio."""
    shards = Shards()
    engine = shards.make(Mode("tp", 1, adam=True, orthogonal=True, clip=0.0))
    before = used(engine)
    shards.train(engine, 1)
    after, group, sizes = used(engine), engine.optimizer.param_groups[0], {}
    kept = 1 - group["lr"] * group["weight_decay"]
    for layer in engine.kfac.preconditioner.layers:
        moved = [((after[n] - kept * before[n]) / group["lr"]).flatten() for n in layer.parameters]
        size = float(torch.cat(moved).square().mean().sqrt())
        sizes[layer.name] = size * min(layer.whole_shape) ** 0.5
    assert sizes.pop("head") > 4 / 3, "Adam's own, which is larger"
    assert sizes.keys() >= {"plain", "up", "gate", "down"}
    why = "steps are read back from weights a thousand times as large"
    near(sizes, dict.fromkeys(sizes, 1.0), 1e-3, why)


def alike(kind: str, **attributes) -> nn.Module:
    """A module that looks like Megatron's, with whatever a test says."""
    # of a module whose code cannot be read: this file has a class of the same name
    module = type(kind, (nn.Module,), {"__module__": "elsewhere"})()
    module.weight, module.bias = nn.Parameter(torch.zeros(3, 4)), None
    module.output_size_per_partition = 3
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("kind", "attributes", "words"),
    [
        ("ColumnParallelLinear", {"gather_output": True}, "gather_output"),
        ("ColumnParallelLinear", {"sequence_parallel": True}, "sequence_parallel"),
        ("RowParallelLinear", {"input_size_per_partition": 4}, "input_is_parallel"),
        ("RowParallelLinear", {}, "input_size_per_partition"),
    ],
)
def test_a_megatron_layer_whose_tensors_are_not_its_shards_is_left_alone(kind, attributes, words):
    model = nn.ModuleDict({"known": nn.Linear(4, 3), "unknown": alike(kind, **attributes)})
    (skipped,) = scan(model).skipped
    assert skipped.name == "unknown" and words in skipped.reason


@pytest.mark.parametrize(
    ("words", "is_head"), [(3, True), (12, True), (13, False), ("3 of this rank", True)]
)
def test_a_head_that_is_cut_is_found_by_its_shape(words, is_head):
    """Beside an embedding of all words, or one that is cut, too."""
    whole = isinstance(words, int)
    embedding = nn.Embedding(words, 4) if whole else alike("VocabParallelEmbedding")
    head = alike("ColumnParallelLinear", gather_output=False)
    *_, last = scan(nn.Sequential(embedding, nn.Linear(4, 4), head)).layers
    assert last.kind == "ColumnParallelLinear" and last.makes_words is is_head
