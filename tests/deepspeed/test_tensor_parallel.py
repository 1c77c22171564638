"""Tensor-parallel shards, by AutoTP and by layers and an mpu that look like Megatron's, train like
the whole model in one process, with the cut sides block-diagonal."""

from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_kfac.model.scan import scan
from tests.close import exact, near
from tests.covering import some
from tests.deepspeed.modes import CLIPPED, FP32_ACCUM, KFAC, MICRO_ROWS, STEPS, Mode
from tests.deepspeed.parallel import (
    COMM_OPT,
    EVERY_TYPE,
    EVERYTHING,
    INVERSE,
    SCALED,
    assert_alike,
    shared_folder,
    train_whole,
    whole_state,
)
from tests.deepspeed.runs import build, whole_batch
from tests.deepspeed.said import error_of
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch, make_net
from tests.oracle import ReferenceKFAC
from tests.ranks import of_ranks

pytestmark = pytest.mark.ranks(2)
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


TYPES = {**EVERY_TYPE, "preconditioner": {"kl_clip": 9e-5}}
CASES = [
    *(("megatron", Mode(f"tp-z{stage}", stage, kfac=TYPES)) for stage in (0, 1, 2)),
    ("megatron", Mode("tp-z1-inverse", 1, kfac=INVERSE)),
    ("megatron", Mode("tp-z1-scaled", 1, kfac={**SCALED, "preconditioner": {"kl_clip": 1e-4}})),
    ("megatron", Mode("tp-z0-comm_opt", 0, kfac={**TYPES, **COMM_OPT})),
    ("megatron", Mode("tp-adam", 1, adam=True, clip=0.0)),
    # AutoTP leaves DeepSpeed's groups behind, so it comes last
    *(("autotp", Mode(f"autotp-z{stage}", stage, kfac=TYPES)) for stage in (0, 1, 2, 3)),
]
CLIPPING = [
    ("megatron", Mode(f"tp-adam-z{stage}-clipped", stage, adam=True, clip=CLIPPED))
    for stage in (0, 1, 2)
]
"""The norm is that of the whole model, whose shards are on several ranks."""
ROWS = [(*case, 2) for case in CLIPPING]
ROWS += [(*case, world) for world in (2, 4) for case in some(CASES, world)]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "mode", "world"), ROWS, ids=[f"{mode.name}-{world}" for _, mode, world in ROWS]
)
def test_shards_match_one_process(kind, mode, world):
    engine, parts = make_engine(kind, mode), dict(PARTS)
    if kind == "megatron":
        del parts["gathered"]
    train(engine)
    layers = engine.kfac.preconditioner.layers
    assert {x.name for x in layers if x.kind not in ("Linear", "LayerNorm")} == set(parts)
    assert engine.kfac.preconditioner.observations.groups == (("up", "gate"),)
    assert "down.bias" in engine.kfac.report and "belongs to no shard" in engine.kfac.report
    if mode.clip == CLIPPED and mode.stage:
        assert float(engine.get_global_grad_norm()) > 2 * CLIPPED, "there is something to clip"
    inverse = mode.kfac.get("preconditioner", {}).get("method") == "inverse"
    options = (
        {} if "plan" in mode.kfac else {"kind": BlockwiseInverse if inverse else ReferenceKFAC}
    )
    losses = whole_batch(world // 2 * MICRO_ROWS, 1, TOKENS)
    whole, final = (
        train_whole(engine, mode, ShardedNet, losses, parts=parts, **options),
        weights(engine),
    )
    for layer in layers:  # a bias that belongs to no shard is in none
        shape = tuple(whole.initial[layer.weight].shape)
        if len(shape) > 1:
            outputs, inputs = layer.whole_shape
            assert outputs == shape[0] and 0 <= inputs - shape[1] <= 1, layer.name
    for values in (whole.initial, whole.weights):
        for name in values:
            if name.split(".")[0] in parts:
                values[name] = part(name, values[name], dist.get_rank() % 2)
    assert_alike(engine, mode, final, whole)
    copies = {name: value for name, value in final.items() if name.split(".")[0] not in parts}
    for other in of_ranks(copies):
        exact(other, copies)


WIRE = {"communication": {"dtype": "bf16"}, "preconditioner": {"kl_clip": 1e-4}}
HALF = [
    Mode("tp-z0-mem_opt", 0, kfac={**WIRE, "assignment": {"gradient_worker_fraction": 0.5}}),
    Mode("tp-z0-comm_opt", 0, kfac={**WIRE, "assignment": {"gradient_worker_fraction": 1.0}}),
    Mode("tp-z0", 0, "bf16", kfac=WIRE),
    Mode("tp-z2-adam-bf16-accum32", 2, "bf16", kfac=WIRE, extra=FP32_ACCUM, adam=True, clip=0.0),
]


@pytest.mark.ranks(4)
def test_copies_are_the_same_bits_where_shards_differ_in_size_and_results_travel_in_16_bits():
    """Tensor-parallel ranks, of 13 and 3 of 16, then have other owners of the layers that both
    have: nothing may depend on the owner."""
    apart = set()
    for mode in HALF:
        engine = make_engine("megatron", mode, first=13 / 16)
        train(engine, range(10))
        kfac = engine.kfac.preconditioner
        assert torch.bfloat16 in (kfac.plan.wire, kfac.plan.gradient_dtypes[1])
        copied = {layer.name for layer in kfac.layers if layer.copies > 1}
        roles = kfac.plan.assignment
        owners = {
            "workers": {name: roles.workers[name] for name in copied},
            "eigen_workers": {k: v for k, v in roles.eigen_workers.items() if k[:-2] in copied},
        }
        apart |= {what for what in owners if any(o[what] != owners[what] for o in of_ranks(owners))}
        copies = {n: v for n, v in weights(engine).items() if n.split(".")[0] not in PARTS}
        for other in of_ranks(copies):
            exact(other, copies, what=mode.name)
    assert apart == {"eigen_workers", "workers"}, "the ranks' plans are alike: nothing was tested"


def test_a_shard_takes_steps_of_the_size_of_a_whole_layers():
    """KFACAdamW orthogonalizes every shard by itself, at the same size per entry: its root mean
    square times the root of the whole layer's shorter side, the mean singular value but for the
    sides' ratio."""
    engine = make_engine("megatron", Mode("tp", 1, adam=True, orthogonal=True, clip=0.0))
    before = weights(engine)
    train(engine, range(1))
    after, group, sizes = weights(engine), engine.optimizer.param_groups[0], {}
    kept = 1 - group["lr"] * group["weight_decay"]
    for layer in engine.kfac.preconditioner.layers:
        moved = [((after[n] - kept * before[n]) / group["lr"]).flatten() for n in layer.parameters]
        size = float(torch.cat(moved).square().mean().sqrt())
        sizes[layer.name] = size * min(layer.whole_shape) ** 0.5
    assert sizes.pop("head") > 4 / 3, "Adam's own, which is larger"
    assert sizes.keys() >= {"plain", "up", "gate", "down"}
    why = "steps are read back from weights a thousand times as large"
    near(sizes, dict.fromkeys(sizes, 1.0), 1e-3, why)


def test_a_checkpoint_holds_every_shard_and_every_copy_once():
    mode, folder = Mode("tp-everything", 1, kfac=EVERYTHING), shared_folder()
    first, second = (make_engine("megatron", mode) for _ in range(2))
    train(first, range(7))
    first.save_checkpoint(folder, tag="t")
    second.load_checkpoint(folder, tag="t")
    exact(whole_state(second.kfac.job), whole_state(first.kfac.job))
    for engine in (first, second):
        train(engine, range(7, 10))
    exact(weights(second), weights(first))
    # gate has up's A
    shards = [f"{name}.shard_{index}_of_2" for name in ("up", "down") for index in (0, 1)]
    files = sorted(path.name for path in Path(folder, "t/kfac").glob("*/*.A.factor.pt"))
    assert files == sorted(f"{n}.A.factor.pt" for n in ["plain", "gathered", "head", *shards])
    copies = {n: v for n, v in weights(first).items() if n.split(".")[0] not in PARTS}
    for other in of_ranks(copies):
        exact(other, copies)


SAMPLED = {"factor": {**KFAC["factor"], "fisher": "monte_carlo"}}


@pytest.mark.parametrize(
    ("words", "kind", "mode"),
    [
        ("labels", "megatron", Mode("tp", 0, kfac=SAMPLED)),
        ("cuts the layers", "autotp", Mode("tp", 0, adam=True, clip=0.0)),
    ],
)
def test_what_shards_cannot_do_is_refused(words, kind, mode):
    assert words in error_of(lambda: make_engine(kind, mode))


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
