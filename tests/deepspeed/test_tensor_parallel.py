"""Tensor-parallel shards train like the whole model in one process, with the cut sides
block-diagonal."""

import pytest
import torch
from torch import nn

from ds_kfac.model.scan import scan
from tests.close import near
from tests.covering import some
from tests.deepspeed.modes import CLIPPED, FP32_ACCUM, KFAC, Mode
from tests.deepspeed.parallel import EVERYTHING, INVERSE, SCALED, check, clipped
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

TYPES = {"layers": {"types": ["Linear", "LayerNorm"]}, "preconditioner": {"kl_clip": 1e-4}}


SCALE = [
    Mode("tp-z1-inverse", 1, kfac=INVERSE),
    Mode("tp-z1-scaled", 1, kfac={**SCALED, "preconditioner": {"kl_clip": 1e-4}}),
    Mode(
        "tp-z0-comm_opt",
        0,
        kfac={
            **TYPES,
            "assignment": {"gradient_worker_fraction": 1.0},
            "offload": {"device": "cpu"},
        },
    ),
]


def cases() -> list[tuple[str, Mode]]:
    megatron = [("megatron", Mode(f"tp-z{stage}", stage, kfac=TYPES)) for stage in (0, 1, 2)]
    autotp = [("autotp", Mode(f"autotp-z{stage}", stage, kfac=TYPES)) for stage in (0, 1, 2, 3)]
    megatron += [("megatron", mode) for mode in SCALE]
    adam = [("megatron", Mode("tp-adam", 1, adam=True, clip=0.0))]
    return megatron + adam + autotp  # AutoTP leaves DeepSpeed's groups behind, so it comes last


@pytest.mark.parametrize("world", [2, 4])
def test_shards_match_one_process(world):
    chosen = some(cases(), world)
    results = run_ranks("tests.deepspeed.tensor_runs:compare", world=world, payload=chosen)
    for rank, of_rank in enumerate(results):
        for (kind, mode), result in zip(chosen, of_rank, strict=True):
            where = f"{kind} {mode.name} rank {rank}"
            shards = {
                name
                for name, found in result["kinds"].items()
                if found != "Linear" and name != "norm"
            }
            assert shards == (
                {"up", "gate", "down"} | ({"gathered"} if kind == "autotp" else set())
            ), where
            assert result["shared"] == (("up", "gate"),), where
            for (O, I), weight in result["whole"]:  # noqa: E741
                assert len(weight) == 1 or (O == weight[0] and 0 <= I - weight[1] <= 1), (
                    where,
                    O,
                    I,
                    weight,
                )
            check(where, result)
            assert "down.bias" in result["report"] and "belongs to no shard" in result["report"]
        assert clipped(of_rank), "kl-clip never acted, so it was not tested"
    for first, second in zip(results[0], results[1], strict=True):
        for name, value in first["replicated"].items():
            assert torch.equal(value, second["replicated"][name]), (
                f"{name} differs between tensor-parallel ranks"
            )


CLIPPING = [
    ("megatron", Mode(f"tp-adam-z{stage}-clipped", stage, adam=True, clip=CLIPPED))
    for stage in (0, 1, 2)
]


def test_kfac_adamw_steps_shards_by_the_clipped_gradients_of_one_process():
    """The norm is that of the whole model, whose shards are on several ranks."""
    for of_rank in run_ranks("tests.deepspeed.tensor_runs:compare", world=2, payload=CLIPPING):
        for (_, mode), result in zip(CLIPPING, of_rank, strict=True):
            check(mode.name, result)
            assert not mode.stage or result["norm"] > 2 * CLIPPED, (
                f"{mode.name} has something to clip"
            )


WIRE = {"communication": {"dtype": "bf16"}, "preconditioner": {"kl_clip": 1e-4}}
HALF = [
    Mode("tp-z0-mem_opt", 0, kfac={**WIRE, "assignment": {"gradient_worker_fraction": 0.5}}),
    Mode("tp-z0-comm_opt", 0, kfac={**WIRE, "assignment": {"gradient_worker_fraction": 1.0}}),
    Mode("tp-z0", 0, "bf16", kfac=WIRE),
    Mode("tp-z2-adam-bf16-accum32", 2, "bf16", kfac=WIRE, extra=FP32_ACCUM, adam=True, clip=0.0),
]


def test_copies_are_the_same_bits_where_shards_differ_in_size_and_results_travel_in_16_bits():
    """Tensor-parallel ranks then have other owners of the layers that both have: nothing may depend
    on the owner."""
    results, apart = run_ranks("tests.deepspeed.tensor_runs:unequal", world=4, payload=HALF), set()
    for mode, *of_ranks in zip(HALF, *results, strict=True):
        assert torch.bfloat16 in (of_ranks[0]["dtypes"][0], of_ranks[0]["dtypes"][1][1])
        for what in ("eigen_workers", "workers"):
            if of_ranks[0][what] != of_ranks[1][what]:
                apart.add(what)
        for rank, result in enumerate(of_ranks):
            for name, value in of_ranks[0]["copies"].items():
                assert torch.equal(result["copies"][name], value), (
                    f"{mode.name}: {name} of rank {rank} is another"
                )
    assert apart == {"eigen_workers", "workers"}, (
        "the ranks' plans are alike, so nothing was tested"
    )


def test_a_shard_takes_steps_of_the_size_of_a_whole_layers():
    """KFACAdamW orthogonalizes every shard by itself, at the same size per entry."""
    mode = Mode("tp-adam-orthogonal", 1, adam=True, orthogonal=True, clip=0.0)
    for sizes in run_ranks("tests.deepspeed.tensor_runs:step_sizes", world=2, payload=mode):
        assert sizes.pop("head") > 4 / 3, "Adam's own, which is larger"
        assert sizes.keys() >= {"plain", "up", "gate", "down"}
        near(
            sizes,
            dict.fromkeys(sizes, 1.0),
            1e-3,
            "steps are read back from weights a thousand times as large",
        )


def test_a_head_that_is_cut_is_found_by_its_shape():
    mode = Mode("tensor-adam-z1", 1, adam=True, kfac={"adam": {}, "report": "full"})
    for reports in run_ranks("tests.deepspeed.tensor_runs:rules_of_layers", world=2, payload=mode):
        for report in reports:
            heads = [
                line.split()[0] for line in report.splitlines() if "shape of an embedding" in line
            ]
            assert heads == ["output_layer"], report


def test_a_checkpoint_holds_every_shard_and_every_copy_once():
    mode = Mode("tp-everything", 1, kfac=EVERYTHING)
    results = run_ranks("tests.deepspeed.tensor_runs:saved", world=2, payload=mode)
    # gate has up's A
    shards = [f"{name}.shard_{index}_of_2" for name in ("up", "down") for index in (0, 1)]
    for result in results:
        assert result["loaded"] and result["same"]
        assert result["files"] == sorted(
            f"{name}.A.factor.pt" for name in ["plain", "gathered", "head", *shards]
        )
        for name, value in result["replicated"].items():
            assert torch.equal(value, results[0]["replicated"][name]), (
                f"{name} differs between tensor-parallel ranks"
            )


REFUSED = {
    "labels": (
        "megatron",
        Mode("tp", 0, kfac={"factor": {**KFAC["factor"], "fisher": "monte_carlo"}}),
    ),
    "cuts the layers": ("autotp", Mode("tp", 0, adam=True, clip=0.0)),
}


def test_what_shards_cannot_do_is_refused():
    for messages in run_ranks("tests.deepspeed.tensor_runs:refusals", world=2, payload=REFUSED):
        for words, message in messages.items():
            assert words in message, (words, message)


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
    ("module", "words"),
    [
        (ColumnParallelLinear(gather_output=True), "gather_output"),
        (ColumnParallelLinear(sequence_parallel=True), "sequence_parallel"),
        (RowParallelLinear(input_size_per_partition=4), "input_is_parallel"),
        (RowParallelLinear(), "input_size_per_partition"),
    ],
)
def test_a_megatron_layer_whose_tensors_are_not_its_shards_is_left_alone(module, words):
    (skipped,) = scan(nn.ModuleDict({"known": nn.Linear(4, 3), "unknown": module})).skipped
    assert skipped.name == "unknown" and words in skipped.reason


@pytest.mark.parametrize(("words", "is_head"), [(3, True), (12, True), (13, False)])
def test_a_shard_of_a_head_is_found_beside_an_embedding_of_all_words(words, is_head):
    model = nn.Sequential(
        nn.Embedding(words, 4), nn.Linear(4, 4), ColumnParallelLinear(gather_output=False)
    )
    *_, last = scan(model).layers
    assert last.kind == "ColumnParallelLinear" and last.makes_words is is_head
