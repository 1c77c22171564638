"""What the Triton kernels do beyond the calls of every op, interpreted: tiles of every shape,
descriptors, masks, and powers near 1."""

import sys
from dataclasses import replace

import pytest
import torch

from ds_kfac.ops.triton import syrk as compiled_syrk
from tests.close import close
from tests.ops import specification
from tests.ops.calls import configured, copied, laid_out
from tests.ops.triton_tools import interpreted_ops

SyrkConfig = compiled_syrk.SyrkConfig
PLAIN = SyrkConfig(32, 16, 4, 1, 1)
TILES = {
    "narrow": replace(PLAIN, block=16),
    "wide": replace(PLAIN, block=128),
    "half as wide": replace(PLAIN, columns=16),
    "in groups of 3": replace(PLAIN, block=16, group=3),
    "half as wide, in groups": replace(PLAIN, columns=16, group=2),
}


@pytest.fixture(scope="module")
def triton_ops():
    with interpreted_ops() as ops:
        yield ops


@pytest.fixture
def syrk(triton_ops):
    return sys.modules["ds_kfac.ops.triton.syrk"]


@pytest.mark.parametrize("descriptor", [False, True])
@pytest.mark.parametrize("tiles", TILES)
def test_tiles_of_every_shape_cover_the_triangle_once(syrk, tiles, descriptor, monkeypatch):
    monkeypatch.setattr(syrk, "split_for", lambda *_: 1)
    config = syrk.SyrkConfig(**vars(replace(TILES[tiles], descriptor=descriptor)))
    shapes = (18, 5), (18, 2 * config.block + 3 if config.block < 128 else 130)
    assert not configured(syrk, config, "cpu", torch.float32, shapes)


@pytest.mark.parametrize("descriptor", [False, True])
@pytest.mark.parametrize("split", [2, 3, 8])
def test_programs_that_share_a_tile_add_up(syrk, split, descriptor, monkeypatch):
    """Of 8 programs some have no rows."""
    monkeypatch.setattr(syrk, "split_for", lambda *_: split)
    config = syrk.SyrkConfig(**vars(replace(PLAIN, descriptor=descriptor)))
    assert not configured(syrk, config, "cpu", torch.bfloat16, ((65, 40),))


def test_rows_that_no_descriptor_describes_go_without():
    x, odd = torch.zeros(20, 64).bfloat16(), torch.zeros(20, 33).half()
    for described in (x, x[:, 8:], x[::3], laid_out(odd, "apart")):
        assert compiled_syrk.describable(described)
    for broken in (x[:, 1:], x.T, odd, x[:1].expand(20, 64)):
        assert not compiled_syrk.describable(broken)


def test_no_rows_add_nothing(syrk):
    assert torch.equal(syrk.syrk_accumulate_(torch.ones(10), torch.zeros(0, 4)), torch.ones(10))


def test_small_sides_share_tiles_and_large_ones_do_not(monkeypatch):
    tiles = {dim: compiled_syrk.tile_count(dim, 128, 128) for dim in (768, 2048, 4096, 8192)}
    split = {dim: compiled_syrk.split_for(count, 128, 264) for dim, count in tiles.items()}
    assert split[768] > 2 and split[2048] > 2 and split[4096] == split[8192] == 1
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert compiled_syrk.split_for(1, 128, 264) == 1


@pytest.mark.parametrize("updates", [0.0, 1.0, 100.0, 1e6])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.99999, 0.9999)])
def test_adam_corrects_the_bias_as_float64_does(triton_ops, updates, betas):
    """fp32 powers near 1 would lose half of the digits."""
    x = torch.ones(1, 1, 1)
    moments = [x * bool(updates), x * bool(updates)]
    given = (torch.empty_like(x), x, *moments, torch.tensor([updates]), torch.tensor([True]))
    expected = copied(given, torch.float64)
    specification.adam_step_(*expected, betas=betas, eps=0.0)
    triton_ops["adam_step_"](*given, betas=betas, eps=0.0)
    close(given[:4], expected[:4], sums=10, dtype=torch.float32)
