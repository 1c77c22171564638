"""Why Triton kernels cannot run is said; where they can, nothing is."""

import importlib.util

import pytest
import torch

from ds_kfac.ops.triton import unavailable
from tests.ops.triton_tools import interpreted


def test_a_missing_triton_is_the_reason(monkeypatch):
    monkeypatch.setattr("ds_kfac.ops.triton.find_spec", lambda name: None)
    assert unavailable() == "triton is not installed"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_without_a_gpu_only_the_interpreter_runs():
    assert (unavailable() is None) == torch.cuda.is_available()
    with interpreted("") as (backend,):
        assert backend.unavailable() is None
    from ds_kfac.ops import triton as backend

    assert backend.unavailable is unavailable  # the copies are gone
