"""The Triton second moment into a packed triangle, interpreted, against float64 on odd sizes."""

import pytest
import torch

from ds_kfac.ops.check import NotMadeFor
from ds_kfac.ops.functional import packed_numel
from tests.close import close
from tests.ops.calls import counted_rows
from tests.ops.specification import symmetric_pack
from tests.ops.triton_tools import interpreted

pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")


@pytest.fixture(scope="module")
def syrk():
    with interpreted("syrk") as (module,):
        yield module


def rows_of(count: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(count * 1000 + dim)).to(
        dtype
    )


def padded(count: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows at multiples of 16 bytes, NaN between them."""
    wide = torch.full((count, -(-dim // 8) * 8 + 8), float("nan"), dtype=dtype)
    wide[:, :dim] = rows_of(count, dim, dtype)
    return wide[:, :dim]


class Recorder:
    """A kernel that notes the left descriptor of its launches."""

    def __init__(self, kernel, launched: list):
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid):
        def launch(sum_P, left, *arguments, **options):
            self.launched.append(left)
            return self.kernel[grid](sum_P, left, *arguments, **options)

        return launch


def assert_adds(syrk, x, *, bias=True, kept=None, scale=1.0):
    wide = counted_rows(x, kept, bias)
    start = torch.arange(packed_numel(wide.shape[1])).float()
    total = start.clone()
    assert syrk.syrk_accumulate_(total, x, kept=kept, bias=bias, scale=scale) is total
    expected = start.double() + float(scale) * symmetric_pack(wide.T @ wide)
    close(total, expected, sums=len(x))


@pytest.mark.parametrize("descriptor", [False, True])
@pytest.mark.parametrize("block", [16, 64, 128])
def test_a_tile_is_added_whole_in_every_width(syrk, block, descriptor, monkeypatch):
    monkeypatch.setattr(
        syrk, "config_for", lambda *_: syrk.SyrkConfig(block, 16, 4, 1, 1, descriptor=descriptor)
    )
    assert_adds(syrk, padded(18, block + 2, torch.float32))


@pytest.mark.parametrize(("block", "columns"), [(16, 32), (32, 16), (128, 256)])
@pytest.mark.parametrize(("descriptor", "group"), [(False, 1), (True, 2)])
def test_tiles_that_are_not_square_cover_the_triangle_once(
    syrk, block, columns, descriptor, group, monkeypatch
):
    config = syrk.SyrkConfig(
        block, 16, 4, 1, 1, group=group, descriptor=descriptor, columns=columns
    )
    monkeypatch.setattr(syrk, "config_for", lambda *_: config)
    for dim in (5, 4 * 32 + 3):
        assert_adds(syrk, padded(18, dim, torch.float32))


@pytest.mark.parametrize(
    "scale", [0.37, torch.tensor(0.37), torch.tensor([0.37]).double()], ids=str
)
@pytest.mark.parametrize(("descriptor", "split"), [(False, 1), (False, 3), (True, 1), (True, 3)])
def test_a_tile_and_the_bias_row_are_scaled(syrk, descriptor, split, scale, monkeypatch):
    monkeypatch.setattr(
        syrk, "config_for", lambda *_: syrk.SyrkConfig(32, 16, 4, 1, 1, descriptor=descriptor)
    )
    monkeypatch.setattr(syrk, "split_for", lambda *_: split)
    assert_adds(syrk, padded(37, 63, torch.float16), scale=scale)


@pytest.mark.parametrize("group", [1, 2, 3, 16])
def test_tiles_in_groups_are_each_computed_once(syrk, group, monkeypatch):
    for dim in (3, 16 * 4 + 3):
        monkeypatch.setattr(
            syrk, "config_for", lambda *_: syrk.SyrkConfig(16, 16, 4, 1, 1, group=group)
        )
        assert_adds(syrk, rows_of(5, dim, torch.float32))


@pytest.mark.parametrize(
    ("count", "dim", "dtype"), [(1, 1, torch.bfloat16), (37, 97, torch.float16)]
)
@pytest.mark.parametrize("split", [1, 3])
def test_descriptors_read_zeros_outside_of_the_rows(syrk, count, dim, dtype, split, monkeypatch):
    monkeypatch.setattr(syrk, "split_for", lambda *_: split)
    x = padded(count, dim, dtype)
    launched: list = []
    monkeypatch.setattr(syrk, "syrk_kernel", Recorder(syrk.syrk_kernel, launched))
    assert_adds(syrk, x)
    assert launched and None not in launched


def test_rows_that_no_descriptor_describes_go_without(syrk):
    from ds_kfac.ops.triton.syrk import describable

    x = rows_of(20, 64, torch.bfloat16)
    for whole in (x, x[:, 8:], x[::3], padded(20, 33, torch.float16)):
        assert describable(whole)
    for broken in (x[:, 1:], x.T, rows_of(20, 33, torch.bfloat16), x[:1].expand(20, 64)):
        assert not describable(broken)


@pytest.mark.parametrize("split", [2, 3, 8])
def test_programs_that_share_a_tile_add_up(syrk, split, monkeypatch):
    monkeypatch.setattr(syrk, "split_for", lambda *_: split)
    assert_adds(syrk, rows_of(65, 40, torch.float32))  # 8 parts of 5 chunks: three are empty


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_do_not_count_add_nothing_whatever_they_hold(
    syrk, value, split, bias, monkeypatch
):
    monkeypatch.setattr(syrk, "split_for", lambda *_: split)
    launched: list = []
    monkeypatch.setattr(syrk, "syrk_kernel", Recorder(syrk.syrk_kernel, launched))
    for name, kept in masks(65).items():
        x = padded(65, 40, torch.bfloat16)
        x[~kept] = value
        before = len(launched)
        assert_adds(syrk, x, bias=bias, kept=kept)
        assert launched[before:] == [None], f"{name}: a descriptor has no mask"


def masks(count: int) -> dict[str, torch.Tensor]:
    """Which of the rows count, by name."""
    index = torch.arange(count)
    return {
        "all": index >= 0,
        "none": index < 0,
        "the last": index == count - 1,
        "some whole chunks": index // 16 % 2 == 0,
        "every third, as a view with gaps": (torch.arange(3 * count) % 9 == 0)[::3],
    }


def test_nothing_beyond_a_view_is_read(syrk):
    wide = torch.full((30, 100), float("nan"))
    wide[:20, :35] = rows_of(20, 35, torch.float32)
    assert_adds(syrk, wide[:20, :35], bias=False)
    assert_adds(syrk, rows_of(35, 20, torch.float32).T, bias=False)


def test_no_rows_add_nothing(syrk):
    total = torch.ones(10)
    assert torch.equal(syrk.syrk_accumulate_(total, torch.zeros(0, 4)), torch.ones(10))


def test_wrong_arguments_are_named(syrk):
    with pytest.raises(
        ValueError, match=r"of shape \(10,\) for rows of 3 and a bias, got torch.float32 \(6,\)"
    ):
        syrk.syrk_accumulate_(torch.zeros(6), torch.zeros(4, 3), bias=True)
    with pytest.raises(
        ValueError,
        match=r"kept must be bool of shape \(4,\), one for each row, got torch.bool \(3,\)",
    ):
        syrk.syrk_accumulate_(
            torch.zeros(6), torch.zeros(4, 3), kept=torch.ones(3, dtype=torch.bool)
        )
    with pytest.raises(
        NotMadeFor, match=r"bf16, fp16 or fp32 and a contiguous sum, got torch\.float64"
    ):
        syrk.syrk_accumulate_(torch.zeros(6), torch.zeros(4, 3).double())


def test_small_sides_share_tiles_and_large_ones_do_not(syrk):

    splits = {
        dim: syrk.split_for(syrk.tile_count(dim, 128, 128), 128, 264)
        for dim in (768, 2048, 3072, 4096, 8192)
    }
    assert splits[768] > 2 and splits[2048] > 2 and splits[4096] == splits[8192] == 1
    torch.use_deterministic_algorithms(True)
    try:
        assert syrk.split_for(1, 128, 264) == 1
    finally:
        torch.use_deterministic_algorithms(False)
