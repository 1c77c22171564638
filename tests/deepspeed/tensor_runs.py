"""Tensor parallelism by AutoTP, and by layers and an mpu that look like Megatron's; the whole model
in one process."""

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.deepspeed.modes import MICRO_ROWS, STEPS, Mode
from tests.deepspeed.runs import build
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch, make_net
from tests.oracle import ReferenceKFAC

TOKENS = 12  # more rows than any side is wide: else Adam's eigenbasis is not unique
PARTS = {"up": (None, 8), "gate": (None, 8), "down": (8, None), "gathered": (None, 5)}
"""Layers that AutoTP cuts: the oracle's blocks of A and G."""
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
        ranks = torch.arange(dist.get_world_size()).view(-1, 2)
        self.model, self.data = (
            next(g for r, g in [(r, dist.new_group(r)) for r in rows] if dist.get_rank() in r)
            for rows in (ranks.tolist(), ranks.T.tolist())
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


def make_engine(kind: str, mode: Mode, first: float = 0.5):
    """Args:
    kind: "autotp" or "megatron".
    first: the first rank's part of a layer of Megatron's.
    """
    model = make_net(ShardedNet)
    if kind == "autotp":
        return build(mode, model=model, tensor_parallel=AUTOTP)
    grid = Grid(first)
    model.up, model.gate = (ColumnParallelLinear(layer, grid) for layer in (model.up, model.gate))
    model.down = RowParallelLinear(model.down, grid)
    return build(mode, model=model, given={"mpu": grid})


def train(engine, steps: range = range(STEPS)) -> None:
    rank, replicas = dist.get_rank(), dist.get_world_size() // 2
    dtype = next(engine.module.parameters()).dtype
    for step in steps:
        x, y = make_batch(step, replicas * MICRO_ROWS, TOKENS)
        x, y = (t.chunk(replicas)[rank // 2] for t in (x, y))
        engine.backward(cross_entropy(engine(x.to(dtype)), y))
        engine.step()


class BlockwiseInverse(ReferenceKFAC):
    """Method "inverse" with damping "relative": a piece of a side that is cut over ranks is damped
    by its own mean."""

    def step(self, lr: float) -> None:
        assert self.method == "inverse" and self.damping_kind == "relative"
        self.update()
        results, quadratic = {}, 0.0
        for name, layer in self.layers.items():
            dW = layer.matrix()
            at_refresh = [Q @ torch.diag(e) @ Q.T for e, Q in layer.bases]
            A, G = (
                inverses(C, block, layer.damping)
                for C, block in zip(at_refresh, layer.blocks, strict=True)
            )
            results[name] = V = G @ dW @ A
            quadratic += float((V * dW).sum()) * lr**2
        self.nu = min(1.0, (self.kl_clip / quadratic) ** 0.5) if self.kl_clip else 1.0
        for name, layer in self.layers.items():
            layer.write(self.nu * results[name])


def inverses(C: Tensor, block: int, damping: float) -> Tensor:
    """Of every block, damped by sqrt(damping) times its own mean."""
    parts = [C[i : i + block, i : i + block] for i in range(0, len(C), block)]
    damped = [
        part + damping**0.5 * part.trace() / len(part) * torch.eye(len(part)) for part in parts
    ]
    return torch.block_diag(*map(torch.linalg.inv, damped))


class VocabParallelEmbedding(nn.Module):
    """Megatron's: each rank has the rows of some words."""

    def __init__(self, whole: nn.Embedding, mpu: Grid) -> None:
        super().__init__()
        self.group, self.num_embeddings = mpu.get_model_parallel_group(), whole.num_embeddings
        rank = mpu.get_model_parallel_rank()
        self.weight = nn.Parameter(whole.weight.detach().chunk(2)[rank].clone())
        self.weight.tensor_model_parallel = True
        self.first = rank * len(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        places = tokens - self.first
        here = (places >= 0) & (places < len(self.weight))
        rows = nn.functional.embedding(places * here, self.weight) * here[..., None]
        return _Sum.apply(rows, self.group)


class Words(nn.Module):
    """A language model whose head has no head's name; cut if there is an mpu."""

    def __init__(self, mpu: Grid | None) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(20, 12), nn.Linear(12, 12)
        self.output_layer = nn.Linear(12, 20)
        if mpu is not None:
            self.words = VocabParallelEmbedding(self.words, mpu)
            self.output_layer = ColumnParallelLinear(self.output_layer, mpu)

    def forward(self, tokens: Tensor) -> Tensor:
        return _first(self.output_layer(torch.tanh(self.mix(self.words(tokens)))))
