"""The Triton second moment of convolution patches, interpreted, against float64 and ``unfold``."""

import pytest
import torch

from ds_kfac.ops.reference import packed_numel, symmetric_pack
from tests.triton_tools import interpreted

pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")

CASES = {
    "3x3 padded": ((2, 4, 5, 7), {"kernel": (3, 3), "padding": (1, 1)}),
    "strided": ((1, 3, 9, 8), {"kernel": (3, 2), "stride": (2, 3), "padding": (1, 0)}),
    "dilated": ((2, 1, 9, 9), {"kernel": (2, 3), "dilation": (3, 2), "padding": (0, 2)}),
    "1x1": ((3, 33, 2, 3), {"kernel": (1, 1)}),
    "one patch": ((1, 2, 3, 3), {"kernel": (3, 3)}),
}


@pytest.fixture(scope="module")
def patch_syrk():
    with interpreted("patch_syrk") as (module,):
        yield module


def assert_adds(patch_syrk, x, ones, options):
    names = {"kernel": "kernel_size"}
    rows = torch.nn.functional.unfold(x.double(), **{names.get(key, key): value for key, value in options.items()})
    rows = rows.transpose(1, 2).flatten(0, 1)
    wide = torch.cat([rows, torch.ones(len(rows), 1)], 1) if ones else rows
    start = torch.arange(packed_numel(wide.shape[1])).float()
    total = start.clone()
    assert patch_syrk.patch_syrk_accumulate_(total, x, ones=ones, **options) is total
    torch.testing.assert_close(total.double(), start.double() + symmetric_pack(wide.T @ wide), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_it_adds_the_second_moment_of_unfold(patch_syrk, case, dtype):
    shape, options = CASES[case]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert_adds(patch_syrk, x, dtype == torch.float32, options)


def test_channels_last_and_views_give_the_same(patch_syrk):
    shape, options = CASES["3x3 padded"]
    wide = torch.full((*shape[:3], shape[3] + 2), float("nan"))
    wide[..., :-2] = torch.randn(shape)
    assert_adds(patch_syrk, wide[..., :-2], True, options)
    assert_adds(patch_syrk, wide[..., :-2].contiguous(memory_format=torch.channels_last), True, options)


def test_wrong_arguments_are_named(patch_syrk):
    with pytest.raises(ValueError, match=r"shape \(55,\) for patches of 9 and ones, got torch.float32 \(45,\)"):
        patch_syrk.patch_syrk_accumulate_(torch.zeros(45), torch.zeros(1, 1, 4, 4), kernel=(3, 3), ones=True)
