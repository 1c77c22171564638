"""What users of DeepSpeed meet with images. That a CNN trains like the oracle is a row of
tests/deepspeed/features.py."""

import pytest
import torch
from torch import nn

from tests.deepspeed.features import ROWS, ConvNet, images
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, weights
from tests.deepspeed.said import error_of
from tests.models import make_net

pytestmark = pytest.mark.ranks(2)


def test_parameters_that_cannot_be_cut_are_refused():
    channels_last = make_net(ConvNet).to(memory_format=torch.channels_last)
    assert "stem.weight is stored in another order than its shape (channels_last, a" in error_of(
        lambda: build(BY_NAME["z0"], model=channels_last)
    )
    with_a_scalar = make_net(ConvNet)
    with_a_scalar.scale = nn.Parameter(torch.tensor(1.0))
    error = error_of(lambda: build(BY_NAME["z0"], model=with_a_scalar))
    assert "scale has no dimension" in error and "p.data.view(1)" in error


def test_norms_that_begin_at_zero_are_warned_of_with_relative_damping():
    for kind in ("relative", "tikhonov"):
        model = make_net(ConvNet)
        nn.init.zeros_(model.norm.weight)
        kfac = {**KFAC, "damping": {"kind": kind, "value": 0.1}}
        report = build(BY_NAME["z2"], model=model, kfac=kfac).kfac.report
        warning = "WARNING: 1 norms begin with a weight of zero (norm, ..)"
        assert (warning in report) == (kind == "relative")


def test_buffers_in_16_bits_train_in_channels_last():
    remedy = '"data_types": {"buffer_dtype": ...}'
    plain = build(BY_NAME["z2-bf16"], model=make_net(ConvNet)).kfac.report
    assert remedy in plain and "BatchNorm's running statistics stay each rank's own" in plain
    assert "in 6 K-FAC layers (5 Conv2d, 1 ConvTranspose2d)" in plain
    buffers = {"data_types": {"buffer_dtype": "bf16"}}
    engine = build(BY_NAME["z2-bf16"], model=make_net(ConvNet), **buffers)
    assert remedy not in engine.kfac.report
    x, y = images(0, ROWS)
    x = x.to(torch.bfloat16).to(memory_format=torch.channels_last)
    for _ in range(3):
        engine.backward(engine(x, y))
        engine.step()
    assert all(bool(w.isfinite().all()) for w in weights(engine).values())
    assert not float(engine.kfac.metrics.summary.sum())
