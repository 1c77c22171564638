"""Plans of an engine are made from the rates of a file, the same on every rank, or not at all."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.deepspeed.modes import KFAC, Mode
from tests.deepspeed.runs import build
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


def worker(folder: str) -> dict:
    found = {}
    for name in ("same", "own", "missing"):
        file = Path(folder) / f"{name}{dist.get_rank() if name == 'own' else ''}.json"
        mode = Mode(name, 2, kfac={**KFAC, "assignment": {"costs": str(file)}})
        try:
            engine = build(mode, 1)
            costs = engine.kfac.preconditioner.plan.assignment.work.costs
            found[name] = costs.gemm_flops, sorted(costs.measured)
            engine.destroy()
        except ValueError as error:
            found[name] = str(error)
    return found


def test_a_file_of_rates_is_read_and_agreed_on(tmp_path):
    for name, flops in (("same", 3e9), ("own0", 3e9), ("own1", 4e9)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"gemm_flops": flops}))
    for found in run_ranks("tests.deepspeed.test_costs:worker", world=2, payload=str(tmp_path)):
        assert found["same"] == (3e9, ["gemm_flops"])
        assert "is not the same on all ranks" in found["own"]
        assert "kfac.assignment.costs" in found["missing"] and "No such file" in found["missing"]
