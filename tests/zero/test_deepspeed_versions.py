"""What is known of DeepSpeed's versions: which are refused, and their faults."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from packaging.version import Version

from ds_kfac.zero import deepspeed_versions
from ds_kfac.zero.layout import Half
from tests import versions


def test_offsets_are_those_that_deepspeed_keeps_or_follow_from_the_numels():
    params = [torch.empty(size) for size in (3, 5, 2)]
    optimizer = SimpleNamespace(round_robin_bit16_groups=[params])
    assert list(deepspeed_versions.offsets(optimizer, 0)) == [0, 3, 8]
    optimizer.round_robin_bit16_offsets = [[0, 4, 12]]
    assert list(deepspeed_versions.offsets(optimizer, 0)) == [0, 4, 12]


@pytest.mark.parametrize(
    ("installed", "refused", "untested"),
    [
        ("0.16.9", True, False),
        ("0.17.0", False, False),
        (f"{deepspeed_versions.TESTED[-1]}+cu121", False, False),
        ("0.20.1", False, True),
    ],
)
def test_an_older_deepspeed_is_refused_and_a_newer_one_is_named(
    installed, refused, untested, monkeypatch
):
    monkeypatch.setattr(deepspeed, "__version__", installed)
    refusal = pytest.raises(ImportError, match=rf"{installed}.*pip install 'deepspeed>=0\.17'")
    with refusal if refused else nullcontext():
        deepspeed_versions.check()
    line, newest = deepspeed_versions.untested(), deepspeed_versions.TESTED[-1]
    said = (
        f"deepspeed {installed} is newer than the tested {newest}; the self-test at attach passed"
    )
    assert line == (said if untested else None)


# DeepSpeed's code as it was in a version, and as it is


class Forgets:  # a ZeRO-2 as in 0.18.0
    partition_gradients = True

    def independent_gradient_partition_epilogue(self):
        if 0 not in self.averaged_gradients:
            i = 0
            self.all_grad_tensors[i] = self.new


class Keeps(Forgets):  # 0.18.9
    def independent_gradient_partition_epilogue(self):
        i = 0
        if i not in self.all_grad_tensors:
            self.all_grad_tensors[i] = self.new


class LooksAlone:  # a ZeRO-1 as in 0.17.6
    partition_gradients, check_grad_overflow = False, True

    def step(self):
        self.check_overflow(partition_gradients=self.partition_gradients)

    def has_overflow(self, partition_gradients):
        if partition_gradients:
            self.reduce()


class LooksTogether(LooksAlone):  # 0.18.0
    def has_overflow(self, partition_gradients):
        self.reduce()


class AveragesACopy:  # a ZeRO-1 as in 0.19.4 with grad_accum_dtype
    use_grad_accum_attribute, contiguous_gradients = True, True

    def get_gradient_for_reduction(self, param):
        return param.grad_accum.to(self.dtype)


class AveragesInPlace(AveragesACopy):  # 0.19.8
    def get_gradient_for_reduction(self, param):
        return param.grad_accum


def splits_by_name_of_device(tensors):  # 0.19.4
    return [one for one in tensors if one.type() == get_accelerator().device_name()]  # noqa: F821


def splits_by_dtype(tensors):  # 0.19.8
    return [one for one in tensors if one.dtype is torch.float16]


def waits_for_the_last(launch_handles):  # 0.19.4
    launch_handles[-1].wait()


def waits_for_all(launch_handles):
    for handle in launch_handles:
        handle.wait()


def returns_before_every_step(self):
    """As in 0.18.0."""
    if self.overflow:
        self.skipped += 1
    return self.overflow


def returns_on_overflow(self):
    """As in 0.18.9."""
    if self.overflow:
        self.skipped += 1
        return self.overflow
    return self.optimizer.step()


def with_(one, **attributes):
    for name, value in attributes.items():
        setattr(one, name, value)
    return one


def test_faults_are_found_in_the_code_of_a_version(monkeypatch):
    accumulation = deepspeed_versions.accumulation_faults
    assert len(accumulation(Forgets(), 2)) == 1
    assert accumulation(Forgets(), 1) == accumulation(Keeps(), 2) == ()

    assert deepspeed_versions.looks_alone(LooksAlone())
    in_zero_2 = with_(LooksAlone(), partition_gradients=True)
    never_looks = with_(LooksAlone(), check_grad_overflow=False)
    for optimizer in (LooksTogether(), in_zero_2, never_looks):
        assert not deepspeed_versions.looks_alone(optimizer), optimizer

    reduction, module = deepspeed_versions.reduction_faults, deepspeed_versions.stage_1_and_2
    scattered = with_(AveragesInPlace(), contiguous_gradients=False)
    for splits, optimizer, text in (
        (splits_by_dtype, AveragesACopy(), "remove data_types.grad_accum_dtype"),
        (splits_by_dtype, AveragesInPlace(), ""),
        (splits_by_dtype, scattered, ""),
        (splits_by_name_of_device, scattered, "contiguous_gradients"),
        (splits_by_name_of_device, AveragesInPlace(), ""),
    ):
        monkeypatch.setattr(module, "split_half_float_double", splits)
        faults = reduction(optimizer)
        assert len(faults) == bool(text) and text in "".join(faults), (splits, optimizer, faults)

    init, gather = deepspeed_versions.partition_parameters.Init, deepspeed_versions.gather_faults
    for code in (waits_for_the_last, waits_for_all):
        monkeypatch.setattr(init, "_allgather_params_coalesced", code)
        assert len(gather("gloo")) == (code is waits_for_the_last) and gather("nccl") == ()

    optimizer = object.__new__(FP16_Optimizer)
    for step, dtype, never in (
        (returns_before_every_step, torch.float16, True),
        (returns_before_every_step, torch.bfloat16, False),
        (returns_on_overflow, torch.float16, False),
    ):
        monkeypatch.setattr(FP16_Optimizer, "step", step)
        optimizer.fp16_groups = [[torch.zeros(1, dtype=dtype)]]
        assert deepspeed_versions.never_steps(optimizer) is never, (step, dtype)


@pytest.mark.parametrize(
    ("installed", "offload", "bf16_optimizer", "pipelines"),
    [("0.18.0", 1, 0, 1), ("0.18.9", 1, 1, 1), ("0.19.0", 0, 0, 1), ("0.19.4", 0, 0, 0)],
)
def test_what_a_version_mended_is_a_known_fault_of_those_before(
    installed, offload, bf16_optimizer, pipelines, monkeypatch
):
    monkeypatch.setattr(deepspeed, "__version__", installed)
    assert len(deepspeed_versions.offload_faults(3)) == offload
    assert len(deepspeed_versions.bf16_optimizer_faults()) == bf16_optimizer
    assert len(deepspeed_versions.pipeline_faults(2)) == pipelines
    assert deepspeed_versions.offload_faults(2) == deepspeed_versions.pipeline_faults(1) == ()


@pytest.mark.parametrize("kind", [DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3])
def test_a_stage_that_looks_for_overflow_itself_skips_on_all_ranks(kind):
    skips = deepspeed_versions.skips_by_rank(object.__new__(kind))
    assert skips == (Version(deepspeed.__version__) < Version("0.19.8"))


def test_a_step_in_16_bits_at_stage_0_leaves_no_gradient():
    """Up to 0.18.0 DeepSpeed leaves those of bf16, and the next backward adds to them."""
    layout, weight = object.__new__(Half), torch.nn.Parameter(torch.ones(2))
    layout.optimizer, weight.grad = torch.optim.SGD([weight], lr=0.1), torch.ones(2)
    layout.end()
    assert weight.grad is None


def test_the_table_of_versions_has_a_row_a_tested_version_and_a_cell_a_column():
    columns, tested = versions.COLUMNS, deepspeed_versions.TESTED
    page = (versions.ROOT / "docs/reference/supported.md").read_text().replace("\n", " ")
    said = f" are {', '.join(tested[:-1])} and {tested[-1]},"
    assert said in page, "errors say that this page names them"
    assert f"| deepspeed | {' | '.join(columns)} |" in versions.DOCUMENT.read_text()
    rows = versions.rows()
    assert tuple(rows) == tested == versions.tested()
    for name, row in rows.items():
        cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
        for cell, (column, modes) in zip(cells, columns.items(), strict=True):
            if (name, column) in versions.LACKING:
                assert cell == "-", f"{name}, {column}"
                continue
            ran, of, failed = re.fullmatch(r"(\d+) of (\d+)(?:: not (.+))?", cell).groups()
            missing = set(failed.split(", ")) if failed else set()
            assert int(of) == len(modes) == int(ran) + len(missing), f"{name}, {column}"
            assert missing <= set(modes), f"{name}, {column}"
