"""``ops.backend`` in an engine: the same training by every backend, told in the report, refused on all ranks."""

import contextlib
import io

import pytest
import torch

from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import train, weights
from tests.models import make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


def start(backend: str | None):
    import ds_kfac

    config = BY_NAME["z2"].config(2, 1)
    config["kfac"] = {**config["kfac"], "ops": {"backend": backend}}
    torch.manual_seed(0)
    model = make_net()
    with contextlib.redirect_stdout(io.StringIO()):
        return ds_kfac.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def backend_worker(_) -> dict:
    import os

    from ds_kfac.ops import backends
    from ds_kfac.ops.backends import Backend

    results = {}
    for name in ("torch", "cpp"):
        if name == "cpp" and "cpp" in backends.use(None, "cpu").missing:
            continue
        engine = start(name)
        results[f"{name} report"] = engine.kfac.report
        train(engine, 1, steps=4)
        results[name] = weights(engine)

    def broken() -> dict:
        raise RuntimeError("no compiler on this node")

    if os.environ["RANK"] == "1":  # of one rank only
        backends.BACKENDS["cpp"] = Backend("cpu", broken)
    results["chosen report"] = start(None).kfac.report
    try:
        start("cpp")
    except ValueError as problem:
        results["refused"] = str(problem)
    return results


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run_ranks("tests.deepspeed.test_ops_backend:backend_worker", world=2)


def test_training_by_cpp_is_that_by_torch(found):
    for result in found:
        if "cpp" not in result:
            pytest.skip("no C++ ops")
        for name, weight in result["torch"].items():
            torch.testing.assert_close(result["cpp"][name], weight, rtol=1e-4, atol=1e-5)


def test_the_report_names_the_backends(found):
    report = found[0]["torch report"]
    assert "  ops: torch (syrk_accumulate_, " in report and "cpp" not in report
    if "cpp report" in found[0]:
        assert "  ops: cpp (syrk_accumulate_, " in found[0]["cpp report"]


def test_a_backend_that_one_rank_lacks_is_refused_on_all(found):
    for result in found:
        assert "rank 1: ValueError: kfac.ops.backend" in result["refused"]
        assert "no compiler on this node" in result["refused"]


def test_a_backend_that_one_rank_lacks_is_chosen_on_none(found):
    for result in found:
        assert "  ops: torch (syrk_accumulate_, " in result["chosen report"]
    if "cpp" in found[0]:
        assert "not cpp: rank 1: no compiler on this node" in found[0]["chosen report"]
