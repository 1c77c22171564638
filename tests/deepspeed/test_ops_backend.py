"""``ops.backend`` in an engine: the same training by every backend, listed in the report, refused
on all ranks."""

import contextlib
import io
import tempfile

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
        return ds_kfac.initialize(model=model, model_parameters=model.parameters(), config=config)[
            0
        ]


def backend_worker(_) -> dict:
    """A backend "cuda" that is for the CPU: plain torch's ops, some of them; then with a faulty op
    on rank 1, then one that rank 1 lacks."""
    import os

    from ds_kfac import log
    from ds_kfac.ops import dispatch, functional
    from ds_kfac.ops.dispatch import Backend

    def offer(load) -> None:
        dispatch.BACKENDS["cuda"] = Backend("cpu", load)

    def broken() -> dict:
        raise RuntimeError("no compiler on this node")

    def one_wrong(*arguments, **options):
        functional.adam_step_(*arguments, **options)
        arguments[0].mul_(2)

    os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp()  # each rank checks for itself
    results = {}
    offer(lambda: {op: getattr(functional, op) for op in ("syrk_accumulate_", "ema_update_")})
    for name in ("torch", "cuda"):
        engine = start(name)
        results[f"{name} report"] = engine.kfac.report
        train(engine, 1, steps=4)
        results[name] = weights(engine)
    wrong = os.environ["RANK"] == "1"
    offer(
        lambda: {
            "ema_update_": functional.ema_update_,
            "adam_step_": one_wrong if wrong else functional.adam_step_,
        }
    )
    said: list[str] = []
    kept, log.logger.log = log.logger.log, lambda level, text: said.append(text)
    for name in (None, "cuda"):
        os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp()
        results[f"replaced by {name}"] = start(name).kfac.report
    log.logger.log = kept
    results["warnings"] = [text for text in said if "plain torch runs instead" in text]
    if wrong:
        offer(broken)
    results["chosen report"] = start(None).kfac.report
    try:
        start("cuda")
    except ValueError as problem:
        results["refused"] = str(problem)
    return results


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run_ranks("tests.deepspeed.test_ops_backend:backend_worker", world=2)


def test_training_is_the_same_by_either_backend(found):
    for result in found:
        for name, weight in result["torch"].items():
            assert torch.equal(result["cuda"][name], weight)


def test_the_report_names_the_backends(found):
    report = found[0]["torch report"]
    assert "  ops: torch (syrk_accumulate_, " in report and "cuda" not in report
    assert "  ops: cuda (syrk_accumulate_, ema_update_); torch (" in found[0]["cuda report"]


def test_a_backend_that_one_rank_lacks_is_refused_on_all(found):
    for result in found:
        assert "rank 1: ValueError: kfac.ops.backend" in result["refused"]
        assert "no compiler on this node" in result["refused"]


def test_a_backend_that_one_rank_lacks_is_chosen_on_none(found):
    for result in found:
        assert "  ops: torch (syrk_accumulate_, " in result["chosen report"]
    assert "not cuda: rank 1: no compiler on this node" in found[0]["chosen report"]


def test_an_op_that_is_wrong_on_one_rank_is_torch_s_on_all_with_one_warning(found):
    for result in found:
        for name in (None, "cuda"):
            report = result[f"replaced by {name}"]
            assert "  ops: torch (" in report and "; cuda (ema_update_); not adam_step_: " in report
    rank_0, rank_1 = (result["warnings"] for result in found)
    assert len(rank_0) == 2 and not rank_1, "one warning an attach"
    for text in rank_0:
        assert (
            "on all ranks: rank 1: adam_step_ by cuda is wrong: off by 1.0e+00 of the largest value"
            in text
        )
