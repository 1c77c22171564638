"""``estimate_kfac_mem_needs_all_live`` and ``_cold``; the predictions' arithmetic where it can be
done by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import ds_kfac
from ds_kfac.assignment.costs import BUILTIN
from ds_kfac.estimate.command import Refused
from ds_kfac.estimate.estimates import Estimate, travel
from tests.close import close

CONFIG = {"optimizer": {"type": "SGD"}, "kfac": {"burn_in": {"steps": 0}}}
SHAPES = [(20, 31, True), (31, 7, False)]


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(20, 31), nn.Linear(31, 7, bias=False))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_live_and_cold_agree_and_print_their_table(stage, capsys):
    live = ds_kfac.estimate_kfac_mem_needs_all_live(
        model(), CONFIG, 2, stage=stage, batch_rows=64, example=(torch.zeros(3, 20),)
    )
    assert "K-FAC state" in capsys.readouterr().out
    cold = ds_kfac.estimate_kfac_mem_needs_all_cold(SHAPES, CONFIG, 2, stage=stage, batch_rows=64)
    assert [found.name for found in live] == [found.name for found in cold]
    assert [type(found) for found in live] == (
        [Estimate, Estimate, Refused] if stage == 0 else [Estimate, Refused]
    )
    for a, b in zip(live, cold, strict=True):
        if isinstance(a, Estimate):
            assert a.stages == b.stages and a.worst == b.worst and a.model == b.model
            assert np.array_equal(a.state, b.state) and np.array_equal(a.mean.sent(), b.mean.sent())


def test_bytes_between_nodes_take_the_slower_link():
    costs = BUILTIN["cuda"]
    payload = np.array([[0, 8, 16, 0], [0, 0, 0, 0], [0, 0, 0, 32], [0, 0, 0, 0]]) * 10**9
    seconds = travel(replace(costs, node_size=2, node_bytes=8e9), payload, 1) - costs.link_seconds
    crossing = 16e9 / costs.link_bytes
    close(list(seconds), [1 + crossing, 1, 4 + crossing, 4], condition=4)  # a latency is taken away
    flat = travel(costs, payload, 0)
    close(flat, np.array([24, 8, 32, 32]) * 1e9 / costs.link_bytes)
