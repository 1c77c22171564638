"""TRL multiplies by the head's weight in an autograd.Function of its own: no hook sees rows there,
and that is said."""

import re

import pytest

from tests.ranks import run_ranks

pytest.importorskip("trl", reason="needs ds_kfac[integrations]")
pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("trainer, optimizer", [("SFT", "KFACAdamW"), ("DPO", "AdamW")])
def test_a_head_without_rows_leaves_the_share_and_is_counted(trainer, optimizer, tmp_path):
    payload = (str(tmp_path), trainer, optimizer)
    found = run_ranks("tests.integrations.trl_runs:head_worker", world=1, payload=payload)[0]
    assert found["unpreconditioned_layers"] == 1
    lines = [line for line in found["report"].splitlines() if "lm_head: no rows were seen" in line]
    assert len(lines) == 1, found["report"]
    left, promised = map(int, re.findall(r"(\d+)%", lines[0]))
    assert promised == 100 and left == round(100 * (1 - 258 * 32 / 28_736))  # one matrix of 15
