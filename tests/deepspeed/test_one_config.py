"""The "kfac" block is the same on all ranks, or an error on all of them."""

import pytest
import torch.distributed as dist

from tests.deepspeed.modes import KFAC, Mode
from tests.deepspeed.runs import build
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
DIFFERENT = {  # what the second rank has otherwise, and what every rank is told
    "damping.value": {"damping": {**KFAC["damping"], "value": 0.04}},
    "eigenbasis.refresh_interval": {"eigenbasis": {"refresh_interval": 3}},
    "layers.exclude": {"layers": {"exclude": ["head"]}},
    "adaptive": {"adaptive": 0.2},
    "enabled": {"enabled": False},
}


def worker(_) -> dict:
    found = {}
    for name, own in {**DIFFERENT, "report": {"report": "none"}}.items():
        try:
            build(Mode(name, 2, kfac=own if dist.get_rank() == 1 else {}), 1).destroy()
            found[name] = ""
        except ValueError as error:
            found[name] = str(error)
    return found


def test_a_block_that_is_another_one_on_some_rank_is_an_error_on_every_rank():
    for found in run_ranks("tests.deepspeed.test_one_config:worker", world=3, timeout=60):
        assert found.pop("report") == "", "a rank may print what it likes"
        for name, message in found.items():
            assert (
                f"kfac.{name} is not the same on all ranks" in message and "on rank 1" in message
            ), (name, message)
