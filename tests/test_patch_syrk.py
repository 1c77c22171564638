"""The second moment of convolution patches by the ops that run here, against patches cut out one by one."""

import itertools

import pytest
import torch

from ds_kfac.ops import functional
from ds_kfac.ops.reference import packed_numel, symmetric_pack

CASES = {
    "3x3 padded": ((2, 4, 5, 7), {"kernel": (3, 3), "padding": (1, 1)}),
    "strided": ((1, 3, 9, 8), {"kernel": (3, 2), "stride": (2, 3), "padding": (1, 0)}),
    "dilated": ((2, 1, 9, 9), {"kernel": (2, 3), "dilation": (3, 2), "padding": (0, 2)}),
    "1x1": ((3, 33, 2, 3), {"kernel": (1, 1)}),
}


def patches(x, kernel, stride=(1, 1), padding=(0, 0), dilation=(1, 1)) -> torch.Tensor:
    x = torch.nn.functional.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    span = [1 + (k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    corners = itertools.product(*(range(0, n - s + 1, t) for n, s, t in zip(x.shape[2:], span, stride, strict=True)))
    cut = [x[:, :, i : i + span[0] : dilation[0], j : j + span[1] : dilation[1]].flatten(1) for i, j in corners]
    return torch.cat(cut)


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("at_once", [None, 1])
def test_it_is_that_of_the_patches(ops, case, ones, at_once, monkeypatch):
    shape, options = CASES[case]
    if at_once:
        monkeypatch.setattr(functional, "PATCH_NUMEL", at_once)  # an image at a time
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows = patches(x.double(), **options)
    wide = torch.cat([rows, torch.ones(len(rows), 1)], 1) if ones else rows
    start = torch.arange(packed_numel(wide.shape[1])).float()
    total = ops.patch_syrk_accumulate_(start.clone(), x, ones=ones, **options)
    torch.testing.assert_close(total.double(), start.double() + symmetric_pack(wide.T @ wide), rtol=1e-6, atol=1e-4)
