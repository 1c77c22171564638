"""The Triton kernels over a layer's matrix, interpreted, against float64 on odd sizes with poisoned
outputs."""

import pytest
import torch

from ds_kfac.ops.check import NotMadeFor
from tests.close import close
from tests.ops.test_ops_layers import adam_wanted
from tests.ops.triton_tools import interpreted

pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")


@pytest.fixture(scope="module")
def scale():
    with interpreted("scale") as (module,):
        yield module


@pytest.mark.parametrize("updates", [0.0, 1.0, 2.0, 100.0, 1e6])
def test_adam_step_corrects_the_bias_as_float64_does(scale, updates, poisoned):
    """fp32 powers near 1 would lose half of the digits."""
    ones, usable = torch.ones(1, 1, 1), torch.tensor([True])
    for betas in ((0.9, 0.999), (0.99999, 0.9999)):
        moments = [ones * bool(updates) for _ in range(2)]
        state, direction = (*moments, torch.tensor([updates])), torch.empty_like(ones)
        wanted = adam_wanted(ones, *state, betas, 0.0)
        scale.adam_step_(direction, ones, *state, usable, betas=betas, eps=0.0)
        close([direction, *moments], wanted, sums=10)


def test_wrong_arguments_are_named(scale):
    one, vector, flag = torch.zeros(1, 2, 2), torch.zeros(1), torch.tensor([True])
    larger, gaps, options = (
        torch.zeros(1, 3, 2),
        torch.zeros(1, 4, 4)[:, ::2],
        {"betas": (0.9, 0.99), "eps": 0.1},
    )
    with pytest.raises(
        ValueError, match=r"adam_step_: .* do not fit, got torch.float32 \(1, 2, 2\)"
    ):
        scale.adam_step_(one, one, larger, one, vector, flag, **options)
    with pytest.raises(ValueError, match=r"adam_step_: .* do not fit, got .* torch.bool \(2,\)"):
        scale.adam_step_(one, one, one, one, vector, flag.repeat(2), **options)
    with pytest.raises(
        NotMadeFor, match=r"expected contiguous fp32 \[n, O, I\] and \[n\], and bool \[n\], got"
    ):
        scale.adam_step_(one, one, one.double(), one, vector, flag, **options)
    with pytest.raises(
        NotMadeFor, match=r"and bool \[n\], got .* torch.float32 \(1,\) strides \(1,\)$"
    ):
        scale.adam_step_(one, one, one, one, vector, vector, **options)
    with pytest.raises(
        NotMadeFor, match="adam_step_: expected betas and eps as numbers, got tensors"
    ):
        scale.adam_step_(one, one, one, one, vector, flag, betas=(torch.tensor(0.9), 0.99), eps=0.1)
    with pytest.raises(
        NotMadeFor, match=r"finish_direction_: expected contiguous fp32 \[n, O, I\]"
    ):
        scale.finish_direction_(gaps, gaps, vector, None, vector, vector, flag)
    with pytest.raises(
        ValueError, match=r"finish_direction_: .* do not fit, got .* torch.float32 \(2,\)"
    ):
        scale.finish_direction_(one, one, vector, torch.zeros(2), vector, vector, flag)
    with pytest.raises(
        ValueError,
        match=r"finish_direction_: the result does not fit, got torch.float32 \(1, 3, 2\)",
    ):
        scale.finish_direction_(larger, one, vector, None, vector, vector, flag)
