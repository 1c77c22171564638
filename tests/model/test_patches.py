"""Rows of convolutions against the modules' own forward and backward, to the bit: small integers are exact in fp32."""

from itertools import product
from math import prod

import pytest
import torch
from torch import nn

from ds_kfac.curvature.factor import Side
from ds_kfac.model import convolutions as module_under_test
from ds_kfac.model.convolutions import Grid, Patches
from ds_kfac.model.registry import LAYERS

SIZES = {1: (17,), 2: (9, 7), 3: (5, 6, 4)}
CONVOLUTIONS = {
    "stride": (nn.Conv2d, {"kernel_size": 3, "stride": 2, "padding": 1}),
    "asymmetric": (nn.Conv2d, {"kernel_size": (3, 1), "stride": (1, 2), "padding": (2, 0)}),
    "dilation": (nn.Conv2d, {"kernel_size": 3, "dilation": (1, 2), "padding": 1}),
    "same": (nn.Conv2d, {"kernel_size": 3, "padding": "same", "dilation": 2}),
    "same_even": (nn.Conv2d, {"kernel_size": (4, 2), "padding": "same"}),
    "valid": (nn.Conv2d, {"kernel_size": (2, 3), "padding": "valid"}),
    "reflect": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"}),
    "replicate": (nn.Conv2d, {"kernel_size": 3, "padding": (2, 1), "stride": 2, "padding_mode": "replicate"}),
    "circular": (nn.Conv2d, {"kernel_size": (3, 5), "padding": (1, 2), "padding_mode": "circular"}),
    "1x1": (nn.Conv2d, {"kernel_size": 1}),
    "1x1_stride": (nn.Conv2d, {"kernel_size": 1, "stride": 2, "bias": False}),
    "groups": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "groups": 2}),
    "depthwise": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "stride": 2, "groups": 4, "bias": False}),
    "depthwise_bias": (nn.Conv2d, {"kernel_size": 1, "groups": 4}),
    "1d": (nn.Conv1d, {"kernel_size": 3, "padding": 2, "dilation": 2, "groups": 2}),
    "3d": (nn.Conv3d, {"kernel_size": (1, 3, 2), "padding": (0, 1, 1), "stride": (1, 2, 1)}),
    "up": (nn.ConvTranspose2d, {"kernel_size": 2, "stride": 2}),
    "up_padding": (nn.ConvTranspose2d, {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": (1, 0)}),
    "up_groups": (nn.ConvTranspose2d, {"kernel_size": (3, 2), "dilation": 2, "groups": 2}),
    "up_1d": (nn.ConvTranspose1d, {"kernel_size": 4, "stride": 3, "padding": 2}),
    "up_3d": (nn.ConvTranspose3d, {"kernel_size": 2, "stride": (1, 2, 1)}),
}  # fmt: skip
FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}


def build(case, dtype=torch.float32):
    kind, options = CONVOLUTIONS[case]
    torch.manual_seed(0)
    module = kind(4, 8, **options).to(dtype)
    size = SIZES[len(module.kernel_size)]
    x = torch.randint(-3, 4, (3, 4, *size)).to(dtype)
    return LAYERS[kind.__name__], module, x


def rows_of(patches: Patches) -> torch.Tensor:
    return torch.cat(list(patches.rows(Grid(1, (0,) * len(patches.positions)))))


def seen(module, x):
    """The patches of a convolution, from its own forward with filters of a single 1: [R, groups, D]."""
    width = module.weight[0].numel()
    picks = type(module)(
        4, width * module.groups, module.kernel_size, module.stride, module.padding, module.dilation, module.groups,
        False, module.padding_mode, dtype=x.dtype,
    )  # fmt: skip
    with torch.no_grad():
        picks.weight.copy_(torch.eye(width).repeat(module.groups, 1).view(picks.weight.shape))
        return picks(x).movedim(1, -1).reshape(-1, module.groups, width)


def dense(packed, dim):
    lower = torch.zeros(dim, dim)
    lower[tuple(torch.tril_indices(dim, dim))] = packed
    return lower + lower.tril(-1).T


@pytest.mark.parametrize("chunk", [1 << 22, 300])
@pytest.mark.parametrize("case", [case for case in CONVOLUTIONS if not case.startswith("up")])
def test_A_is_the_second_moment_of_what_the_module_sees(case, chunk, monkeypatch):
    monkeypatch.setattr(module_under_test, "CHUNK", chunk)
    kind, module, x = build(case)
    assert kind.refusal(module) is None
    bias = module.bias is not None
    dim, _ = kind.sides(module, bias)
    side = Side.dense(dim).repeated(module.groups)
    rows = seen(module, x.double())
    expected = torch.cat([rows, rows.new_ones(*rows.shape[:2], bias)], -1) if bias else rows
    expected = torch.einsum("rga,rgb->gab", expected, expected)
    for image in (x, x.contiguous(memory_format=FORMATS[x.ndim - 2])):
        found = torch.zeros(side.numel)
        patches = kind.input_patches(module, image)
        patches.add_to_(found, side, Grid(1, (0,) * len(patches.positions)), bias=bias)
        assert patches.count == len(rows)
        for block, packed in zip(expected, found.view(module.groups, -1), strict=True):
            assert torch.equal(dense(packed, dim).double(), block)


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_rows_of_both_sides_are_those_of_the_weight_gradient(case):
    """dW is the sum over positions of g a^T, so rows, their order and the matrix belong together."""
    kind, module, x = build(case, torch.float64)
    y = module(x)
    gradient = torch.randint(-3, 4, y.shape).to(y)
    y.backward(gradient)
    a, g = (
        rows_of(patches).unflatten(1, (module.groups, -1))
        for patches in (kind.input_patches(module, x), kind.gradient_patches(module, gradient))
    )
    bias = module.bias is not None and kind.without_bias is None
    dim_A, dim_G = kind.sides(module, bias)
    a = torch.cat([a, a.new_ones(*a.shape[:2], bias)], -1) if bias else a
    shape = (module.groups, dim_G, dim_A) if module.groups > 1 else (dim_G, dim_A)
    expected = torch.einsum("rgo,rga->goa", g, a).view(shape)
    flat = module.weight.grad.flatten(), module.bias.grad if bias else None
    assert torch.equal(kind.matrix(*flat, shape), expected)
    back = kind.split(expected, bias)
    assert torch.equal(back[0], flat[0]) and (not bias or torch.equal(back[1], flat[1]))


@pytest.mark.parametrize("case", ["stride", "1x1", "groups", "1d", "3d", "up_padding"])
def test_sums_of_patches_are_those_of_their_rows(case):
    kind, module, x = build(case)
    for patches in (kind.input_patches(module, x), kind.gradient_patches(module, module(x).detach().round())):
        assert torch.equal(patches.sums(), rows_of(patches).unflatten(0, (3, -1)).sum(1))


@pytest.mark.parametrize("case", ["stride", "groups", "1d", "3d", "up"])
@pytest.mark.parametrize("step", [2, 3])
def test_grids_are_right_on_average(case, step):
    kind, module, x = build(case)
    patches = kind.input_patches(module, x)
    dims = len(patches.positions)
    side = Side.dense(rows_of(patches).shape[1])
    whole, sampled = torch.zeros(2, side.numel)
    patches.add_to_(whole, side, Grid(1, (0,) * dims), gain=torch.tensor(2.0))
    for offset in product(range(step), repeat=dims):
        patches.add_to_(sampled, side, Grid(step, offset), gain=torch.tensor(2.0))
    assert torch.equal(sampled / step**dims, whole)


def test_a_grid_leaves_enough_rows_and_moves():
    def grid_of(positions: tuple[int, ...], turn: int | None, width: int) -> Grid:
        return Patches(torch.empty(8, 1, *positions)).grid(turn, width)

    for positions in ((56, 56), (7, 7), (224,), (8, 28, 28)):
        for width in (9, 64, 577, 4608):
            grid = grid_of(positions, 0, width)
            scale = grid.step ** len(positions)
            rows = 8 * prod(positions) / scale
            assert grid.step == 1 or rows >= 4 * width
            assert scale <= 16
            bigger = (grid.step + 1) ** len(positions)
            assert bigger > 16 or 8 * prod(positions) < 4 * width * bigger
    offsets = {grid_of((56, 56), turn, 64).offset for turn in range(0, 2000, 10)}
    assert offsets == set(product(range(4), repeat=2))
    assert grid_of((56, 56), None, 9).step == 1


def test_images_without_rows_add_nothing():
    kind, module, x = build("stride")
    side, empty = Side.dense(37), torch.zeros(Side.dense(37).numel)
    patches = kind.input_patches(module, x[:0])
    patches.add_to_(empty, side, patches.grid(0, 37), bias=True)
    assert patches.count == 0 and not empty.any()


@pytest.mark.parametrize("size", ["any", "as many rows as channels"])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_what_has_no_batch_dimension_is_a_batch_of_one(case, size):
    kind, module, x = build(case)
    x = x[:1] if size == "any" else torch.randint(-3, 4, (1, 4, *[4] * (x.ndim - 2))).float()
    y = module(x)
    gradient = torch.randint(-3, 4, y.shape).to(y)
    for patches in (kind.input_patches, kind.gradient_patches):
        tensor = x if patches == kind.input_patches else gradient
        batched, single = patches(module, tensor), patches(module, tensor[0])
        assert (len(single.image), single.count) == (1, batched.count)
        assert torch.equal(rows_of(single), rows_of(batched))
    assert kind.rows(x[0], y[0]) == kind.rows(x, y) == (x if case.startswith("up") else y)[0, 0].numel()
