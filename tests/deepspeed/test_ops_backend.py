"""``ops.backend`` in an engine: the same training by every backend, listed in the report, refused
on all ranks. The backend "cuda" here is for the CPU: plain torch's ops, some of them."""

import contextlib
import tempfile
from unittest.mock import patch

import pytest
import torch.distributed as dist

from ds_kfac import log
from ds_kfac.ops import dispatch, functional
from ds_kfac.ops.dispatch import Backend
from tests.close import exact
from tests.deepspeed.features import merged
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, train, weights
from tests.deepspeed.said import error_of

pytestmark = pytest.mark.ranks(2)


@contextlib.contextmanager
def offered(load):
    """Each rank checks for itself."""
    with (
        patch.dict(dispatch.BACKENDS, {"cuda": Backend("cpu", load)}),
        patch.dict("os.environ", TORCH_EXTENSIONS_DIR=tempfile.mkdtemp()),
    ):
        yield


def start(backend: str | None):
    mode = BY_NAME["z2"]
    return build(mode, kfac=merged(mode.kfac_block, {"ops": {"backend": backend}}))


def some_ops() -> dict:
    return {op: getattr(functional, op) for op in ("syrk_accumulate_", "ema_update_")}


def test_training_is_the_same_by_either_backend_and_the_report_names_it():
    with offered(some_ops):
        engines = {name: start(name) for name in ("torch", "cuda")}
    for engine in engines.values():
        train(engine, 1, steps=4)
    exact(weights(engines["cuda"]), weights(engines["torch"]))
    report = engines["torch"].kfac.report
    assert "  ops: torch (syrk_accumulate_, " in report and "cuda" not in report
    chosen = "  ops: cuda (syrk_accumulate_, ema_update_); torch ("
    assert chosen in engines["cuda"].kfac.report


def test_a_backend_that_one_rank_lacks_is_chosen_on_none_and_refused_on_all():
    def broken() -> dict:
        if dist.get_rank() == 1:
            raise RuntimeError("no compiler on this node")
        return some_ops()

    with offered(broken):
        report = start(None).kfac.report
        error = error_of(lambda: start("cuda"))
    assert "  ops: torch (syrk_accumulate_, " in report
    assert dist.get_rank() or "not cuda: rank 1: no compiler on this node" in report
    assert "rank 1: ValueError: kfac.ops.backend" in error and "no compiler on this node" in error


@pytest.mark.parametrize("backend", [None, "cuda"])
def test_an_op_that_is_wrong_on_one_rank_is_torch_s_on_all_with_one_warning(backend):
    def wrong(*arguments, **options):
        functional.adam_step_(*arguments, **options)
        if dist.get_rank() == 1:
            arguments[0].mul_(2)

    said: list[str] = []
    with (
        offered(lambda: {"ema_update_": functional.ema_update_, "adam_step_": wrong}),
        patch.object(log.logger, "log", lambda level, text: said.append(text)),
    ):
        report = start(backend).kfac.report
    assert "  ops: torch (" in report and "; cuda (ema_update_); not adam_step_: " in report
    warnings = [text for text in said if "plain torch runs instead" in text]
    assert len(warnings) == (dist.get_rank() == 0)
    off = "rank 1: adam_step_ by cuda is wrong: off by 1.0e+00 of the largest value"
    assert all(f"on all ranks: {off}" in text for text in warnings)
