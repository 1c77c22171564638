"""Tensor-parallel shards train like the whole model in one process, with the cut sides
block-diagonal."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_kfac.model.scan import scan
from tests.close import exact, near
from tests.covering import some
from tests.deepspeed.modes import CLIPPED, FP32_ACCUM, KFAC, MICRO_ROWS, Mode
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
from tests.deepspeed.ranked import of_ranks
from tests.deepspeed.runs import build, whole_batch
from tests.deepspeed.said import error_of
from tests.deepspeed.tensor_runs import (
    PARTS,
    TOKENS,
    BlockwiseInverse,
    Grid,
    ShardedNet,
    Words,
    make_engine,
    part,
    train,
    weights,
)
from tests.oracle import ReferenceKFAC

pytestmark = pytest.mark.ranks(2)
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


def test_a_head_that_is_cut_is_found_by_its_shape():
    mode = Mode("tp", 1, adam=True, kfac={"adam": {}, "report": "full"})
    for mpu in (None, Grid()):
        engine = build(mode, model=Words(mpu), given={"mpu": mpu} if mpu else {})
        lines = engine.kfac.report.splitlines()
        heads = [line.split()[0] for line in lines if "shape of an embedding" in line]
        assert heads == ["output_layer"], engine.kfac.report


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


class ColumnParallelLinear(nn.Module):
    """Looks like Megatron's, with whatever a test says."""

    def __init__(self, **attributes) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(3, 4)), None
        self.output_size_per_partition = 3
        for name, value in attributes.items():
            setattr(self, name, value)


class RowParallelLinear(ColumnParallelLinear):
    pass


@pytest.mark.parametrize(
    ("kind", "attributes", "words"),
    [
        (ColumnParallelLinear, {"gather_output": True}, "gather_output"),
        (ColumnParallelLinear, {"sequence_parallel": True}, "sequence_parallel"),
        (RowParallelLinear, {"input_size_per_partition": 4}, "input_is_parallel"),
        (RowParallelLinear, {}, "input_size_per_partition"),
    ],
)
def test_a_megatron_layer_whose_tensors_are_not_its_shards_is_left_alone(kind, attributes, words):
    model = nn.ModuleDict({"known": nn.Linear(4, 3), "unknown": kind(**attributes)})
    (skipped,) = scan(model).skipped
    assert skipped.name == "unknown" and words in skipped.reason


@pytest.mark.parametrize(("words", "is_head"), [(3, True), (12, True), (13, False)])
def test_a_shard_of_a_head_is_found_beside_an_embedding_of_all_words(words, is_head):
    model = nn.Sequential(
        nn.Embedding(words, 4), nn.Linear(4, 4), ColumnParallelLinear(gather_output=False)
    )
    *_, last = scan(model).layers
    assert last.kind == "ColumnParallelLinear" and last.makes_words is is_head
