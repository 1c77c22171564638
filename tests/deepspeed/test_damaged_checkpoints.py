"""Damaged K-FAC state: refused on every rank with nothing changed, or provably harmless. Nothing of
it is silent."""

import shutil
from pathlib import Path

import pytest
import torch

from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.checkpoint.load import load as load_state
from ds_kfac.checkpoint.save import finish, save
from tests.deepspeed.damages import DAMAGES, HARMLESS, LATEST
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, train
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
KFAC = {
    "factor": {"update_interval": 1, "fisher": "empirical"},
    "eigenbasis": {"refresh_interval": 3},
    "burn_in": {"steps": 0},
}


def tensors(engine) -> dict:
    """Copies of this rank's state, which steps change in place."""
    kfac = engine.kfac.preconditioner
    found = {key: state.packed_P for key, state in kfac.curvature.factors.items()}
    for name, state in kfac.state.items():
        for side in "AG":
            found |= {
                f"{name}.{side}": getattr(state, side).values,
                f"{name}.{side}.Q": getattr(state, side).vectors[0],
            }
    return {key: value.clone() for key, value in found.items()}


def worker(folder: str) -> dict:
    rank, tag = torch.distributed.get_rank(), Path(folder, "tag")
    engine = build(BY_NAME["z2"], 1, kfac=KFAC)
    train(engine, 1, steps=3)
    other = save(engine.kfac.job, Path(folder, "unused")).save_id
    train(engine, 1, steps=1, first=3)
    header = save(engine.kfac.job, tag)
    finish(engine.kfac.job, tag, header)
    # steps change them in place
    saved = {key: value.clone() for key, value in tensors(engine).items()}
    train(engine, 1, steps=1, first=4)
    job, state = engine.kfac.job, tag / "kfac" / header.save_id
    if rank == 0:
        Path(folder, "unused/kfac", other).rename(Path(folder, "other"))
        tag.rename(Path(folder, "whole"))
    results = {}

    def load(kind: str, name: str, damage, save_id) -> None:
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(tag, ignore_errors=True)
            shutil.copytree(Path(folder, "whole"), tag)
            damage(state)
        torch.distributed.barrier()
        steps, before = job.steps, tensors(engine)
        error = ""
        try:
            load_state(job, tag, save_id)
        except CheckpointError as problem:
            error = str(problem)
        now = tensors(engine)
        same = job.steps == steps and all(
            torch.equal(now[key], value) for key, value in before.items()
        )
        as_saved = job.steps == 4 and all(
            torch.equal(now[key], value) for key, value in saved.items()
        )
        results[kind, name] = error, same, as_saved

    for name, (damage, _) in DAMAGES.items():
        load("damage", name, damage, header.save_id)
    for name, (damage, _) in LATEST.items():
        load("latest", name, damage, None)
    for name, damage in HARMLESS.items():
        load("harmless", name, damage, header.save_id)
    return results


def test_no_damage_is_silent(tmp_path):
    assert len(DAMAGES) >= 38
    results = run_ranks(
        "tests.deepspeed.test_damaged_checkpoints:worker", world=2, payload=str(tmp_path)
    )
    assert results[0].keys() == results[1].keys()
    for result in results:
        for (kind, name), (error, same, as_saved) in result.items():
            if kind == "harmless":
                assert error == "" and as_saved, (name, error)
            else:
                expected = (DAMAGES if kind == "damage" else LATEST)[name][1]
                assert expected in error, (kind, name, error)
                assert same, f"{name}: something was changed"
    assert not list(tmp_path.rglob("executed")), "a pickle ran a command"
