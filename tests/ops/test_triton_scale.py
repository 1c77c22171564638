"""The Triton kernels over a layer's matrix, interpreted, against float64 on odd sizes with poisoned outputs."""

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
def test_adam_scale_corrects_the_bias_as_float64_does(scale, updates, poisoned):
    """fp32 powers near 1 would lose half of the digits."""
    ones, yes = torch.ones(1, 1, 1), torch.tensor([True])
    for betas in ((0.9, 0.999), (0.99999, 0.9999)):
        state = (0 * ones, 0 * ones, torch.tensor([updates])) if not updates else (ones, ones, torch.tensor([updates]))
        found, waiting = torch.empty_like(ones), torch.empty_like(ones)
        scale.adam_scale_(found, waiting, ones, *state, yes, betas=betas, eps=0.0)
        close(found, adam_wanted(ones, *state, betas, 0.0)[0], sums=10)


def test_wrong_arguments_are_named(scale):
    one, vectors = torch.zeros(1, 2, 2), (torch.zeros(1), torch.tensor([True]))
    betas = {"betas": (0.9, 0.99), "eps": 0.1}
    with pytest.raises(ValueError, match=r"do not fit, got torch.float32 \(1, 2, 2\)"):
        scale.adam_scale_(one, one, one, torch.zeros(1, 3, 2), one, *vectors, **betas)
    with pytest.raises(ValueError, match=r"waiting or usable does not fit, got torch.float32 \(1, 3, 2\)"):
        scale.adam_fold_(one, one, vectors[0], torch.zeros(1, 3, 2), vectors[1], betas=(0.9, 0.99))
    with pytest.raises(NotMadeFor, match=r"expected contiguous fp32 \[n, O, I\] and \[n\], got torch.float32"):
        scale.adam_scale_(one, one, one, one.double(), one, *vectors, **betas)
    vector, gaps = vectors[0], torch.zeros(1, 4, 4)[:, ::2]
    with pytest.raises(NotMadeFor, match=r"finish_direction_: expected contiguous fp32 \[n, O, I\]"):
        scale.finish_direction_(gaps, gaps, vector, None, *[vector] * 4, 1.0)
    with pytest.raises(ValueError, match=r"finish_direction_: .* do not fit, got .* torch.float32 \(2,\)"):
        scale.finish_direction_(one, one, vector, torch.zeros(2), *[vector] * 4, 1.0)
    with pytest.raises(NotMadeFor, match="betas, eps or shift as numbers, got tensors"):
        scale.finish_direction_(one, one, vector, None, *[vector] * 4, torch.tensor(1.0))
    with pytest.raises(NotMadeFor, match=r"expected a contiguous buffer and bool, got torch.float64"):
        scale.adam_scale_(one, one.double(), one, one, one, *vectors, **betas)
    with pytest.raises(NotMadeFor, match="betas, eps or shift as numbers, got tensors"):
        scale.adam_scale_(one, one, one, one, one, *vectors, betas=(torch.tensor(0.9), 0.99), eps=0.1)
