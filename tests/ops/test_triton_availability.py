"""Why Triton kernels cannot run is said; where they can, nothing is."""

import importlib.util

import pytest
import torch

from ds_kfac.ops.triton import unavailable
from tests.ops.triton_tools import interpreted


def test_a_missing_triton_is_the_reason(monkeypatch):
    monkeypatch.setattr("ds_kfac.ops.triton.find_spec", lambda name: None)
    assert unavailable(torch.device("cuda")) == "triton is not installed"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_cpu_will_do_for_the_interpreter_only():
    assert unavailable(torch.device("cpu")) == "Triton kernels run on CUDA devices, not on cpu"
    with interpreted("") as (backend,):
        assert backend.unavailable(torch.device("cpu")) is None
    from ds_kfac.ops import triton as backend

    assert backend.unavailable is unavailable  # the copies are gone
