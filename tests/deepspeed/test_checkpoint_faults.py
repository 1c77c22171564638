"""Saves and loads in which something goes wrong or has changed: DeepSpeed's part always works, ours
is never silent."""

import os
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from ds_kfac.checkpoint import files
from ds_kfac.checkpoint import save as saving
from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.checkpoint.load import load as load_state
from tests.close import exact, near
from tests.deepspeed.damages import DAMAGES, LATEST, without_latest
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.parallel import shared_folder
from tests.deepspeed.runs import build, train, weights
from tests.deepspeed.said import error_of, heard
from tests.deepspeed.test_checkpoint import KFAC as EVERY_STEP
from tests.deepspeed.test_checkpoint import check_same, own_state, state_of
from tests.ranks import of_ranks, on_rank_0

pytestmark = pytest.mark.distributed
KFAC = {**EVERY_STEP, "factor": {"update_interval": 1, "fisher": "empirical"}}
FRESH = {**KFAC, "checkpoint": {"on_missing": "fresh"}}


def engine_of(name: str = "z2", steps: int = 0, **options):
    engine = build(BY_NAME[name], 1, **{"kfac": KFAC, **options})
    train(engine, 1, steps=steps)
    return engine


def loading(engine, folder: Path | str, tag: str = "tag") -> tuple[str, str]:
    """What is raised and what is said."""
    with heard() as messages:
        error = error_of(lambda: engine.load_checkpoint(str(folder), tag=tag))
    return error, "\n".join(messages)


@pytest.mark.ranks(2)
def test_no_damage_is_silent(tmp_path):
    """Refused on every rank with nothing changed, or harmless."""
    tag, whole = tmp_path / "tag", tmp_path / "whole"
    engine = engine_of(steps=3)
    job = engine.kfac.job
    train(engine, 1, steps=1, first=3)
    header = saving.save(job, tag)
    saving.finish(job, tag, header)
    saved = own_state(engine)
    train(engine, 1, steps=1, first=4)
    trained = own_state(engine)

    def place(damage) -> None:
        shutil.rmtree(tag, ignore_errors=True)
        shutil.copytree(whole, tag)
        damage(tag / "kfac" / header.save_id)

    on_rank_0(tag.rename, whole)
    cases = [(damage, text, header.save_id) for damage, text in DAMAGES.values()]
    cases += [(damage, text, None) for damage, text in LATEST.values()]
    for damage, text, save_id in cases:
        on_rank_0(place, damage)
        with pytest.raises(CheckpointError) as caught:
            load_state(job, tag, save_id)
        assert text in str(caught.value), (text, caught.value)
        check_same(own_state(engine), trained, text)
        assert job.steps == 5
    on_rank_0(place, without_latest)
    load_state(job, tag, header.save_id)
    check_same(own_state(engine), saved, "without latest")
    assert job.steps == 4
    assert not (tmp_path / "executed").exists(), "a pickle ran a command"


@pytest.mark.ranks(2)
def test_ranks_that_loaded_different_saves_stop_at_once_and_say_whose(tmp_path):
    """A tag at stage 3 was written twice, one rank's second writing did not come to be; both K-FAC
    states are still there, as a killed save leaves them."""
    engine, tag, old = engine_of("z3", steps=1), tmp_path / "tag", tmp_path / "old"
    engine.save_checkpoint(str(tmp_path), tag="tag")
    on_rank_0(shutil.copytree, tag, old)
    train(engine, 1, steps=2, first=1)
    engine.save_checkpoint(str(tmp_path), tag="tag")

    def tear() -> None:
        for path in old.glob("zero_pp_rank_1_*"):
            shutil.copy(path, tag / path.name)
        for path in (old / "kfac").iterdir():
            if path.is_dir():
                shutil.copytree(path, tag / "kfac" / path.name)

    on_rank_0(tear)
    for kfac in (KFAC, FRESH):  # the weights are torn too: nothing to go on with
        error, _ = loading(engine_of("z3", seed=5, kfac=kfac), tmp_path)
        assert "is torn" in error and "of step 3: rank 0" in error and "of step 1: rank 1" in error


@pytest.mark.ranks(2)
def test_a_copy_is_the_same_save_until_one_over_it_does_not_replace_all_files(tmp_path):
    """A tool copied the tag, without files named latest and with a new time for every file; then a
    save was killed before it had replaced one rank's optimizer states, which are named."""
    engine, whole, copy = engine_of(steps=2), tmp_path / "whole", tmp_path / "copy"
    engine.save_checkpoint(str(whole), tag="tag")

    def make_copy() -> None:
        ignored = shutil.ignore_patterns("latest")
        shutil.copytree(whole, copy, ignore=ignored, copy_function=shutil.copyfile)
        for age, path in enumerate(sorted(copy.rglob("*.*"))):
            os.utime(path, (1_000_000 - age, 1_000_000 - age))

    on_rank_0(make_copy)
    fresh = engine_of(seed=5)
    error, said = loading(fresh, copy)
    assert error == "" and "interrupted" not in said
    assert train(engine, 1, steps=2, first=2) == train(fresh, 1, steps=2, first=2)
    with patch.object(saving, "finish"):
        fresh.save_checkpoint(str(copy), tag="tag")
    error, said = loading(fresh, copy)
    assert error == "" and ("was interrupted before its end" in said or dist.get_rank() > 0)
    (older,) = (whole / "tag").glob("*zero_pp_rank_1_*optim_states.pt")
    on_rank_0(shutil.copyfile, older, copy / "tag" / older.name)
    error, _ = loading(engine, copy)
    assert "is torn" in error and "zero_pp_rank_0" not in error
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt" in error and "states.json" in error


@pytest.mark.ranks(2)
def test_a_save_that_ends_while_latest_is_written_leaves_the_last_one_named(tmp_path):
    """DeepSpeed opens the file, then writes it: a kill between the two left an empty one."""
    engine, replaced = engine_of(steps=2), files.os.replace
    engine.save_checkpoint(str(tmp_path), tag="first")

    def ended(source, target):
        if Path(target) == tmp_path / "latest":
            raise OSError(5, "the end")
        replaced(source, target)

    with patch.object(files.os, "replace", ended):
        error = error_of(lambda: engine.save_checkpoint(str(tmp_path), tag="second"))
    assert "could not write" in error and "rank 0: OSError: [Errno 5] the end" in error
    engine.save_checkpoint(str(tmp_path), "third", None, False)
    assert (tmp_path / "latest").read_text() == "first"
    assert "/first/" in engine.load_checkpoint(str(tmp_path))[0]


@pytest.mark.ranks(2)
def test_a_save_of_ours_that_fails_leaves_deepspeeds_whole(tmp_path):
    """One rank's disk is full; and next time it is not. What is missing is said on every rank."""
    engine, written = engine_of(steps=2), files.write_payload

    def full(*given):
        written(*given)
        raise OSError(28, "No space left on device")

    with patch.object(files, "write_payload", full if dist.get_rank() == 1 else written):
        error = error_of(lambda: engine.save_checkpoint(str(tmp_path), tag="tag"))
    assert "rank 1: OSError: [Errno 28] No space left on device" in error
    assert "DeepSpeed's own checkpoint" in error and '"on_missing": "fresh"' in error
    dist.barrier()
    assert not [*(tmp_path / "tag/kfac").rglob("*")], "a failed save leaves nothing"
    assert (tmp_path / "latest").read_text() == "tag"
    for kfac, load, words in (
        (KFAC, {}, ""),
        (FRESH, {}, "K-FAC starts afresh, without"),
        (
            KFAC,
            {"load_optimizer_states": False},
            "load_optimizer_states=False: K-FAC starts afresh",
        ),
    ):
        second = engine_of(seed=5, steps=1, kfac=kfac)
        with heard() as said:
            error = error_of(partial(second.load_checkpoint, str(tmp_path), tag="tag", **load))
        exact(weights(second), weights(engine))
        if words:
            assert error == "" and any(words in text for text in said) == (dist.get_rank() == 0)
            assert state_of(second.kfac.preconditioner) == (0, 0, 0)
        else:
            assert "was saved without its K-FAC state" in error and "No space left" in error
            assert '"on_missing": "fresh"' in error, "a way that keeps the rest"
    engine.save_checkpoint(str(tmp_path), tag="again")
    assert loading(second, tmp_path, "again")[0] == ""


@pytest.mark.ranks(2)
def test_a_folder_that_not_all_ranks_see_is_refused_at_the_first_save(tmp_path):
    """Each rank has a disk of its own."""
    engine, disk = engine_of(steps=1), tmp_path / f"disk{dist.get_rank()}"
    with patch.object(files.check_token, "__defaults__", (0.2,)):
        error = error_of(lambda: engine.save_checkpoint(str(disk), tag="tag"))
    assert "rank 1: ValueError" in error and "save to a shared file system" in error
    dist.barrier()
    assert [*(disk / "tag").glob("*zero_pp_rank*")] and not [*disk.rglob("kfac/*")]


def first_moments(engine) -> dict:
    """Layer -> Adam's first moment in the coordinates of the gradient, of all ranks."""
    states = engine.kfac.preconditioner.state
    own = {name: state.basis.restore(state.moments.first_OI) for name, state in states.items()}
    return {name: moment for part in of_ranks(own) for name, moment in part.items()}


def updates_of(engine) -> dict[str, float]:
    factors = engine.kfac.preconditioner.curvature.factors
    return {key: float(factor.updates) for key, factor in factors.items()}


NONE, EMPIRICAL = {"fisher": "activations_only"}, {"fisher": "empirical"}
REDUCE = {"fisher": "empirical", "weight_sharing": "reduce"}
SAMPLED = {"fisher": "monte_carlo", "prediction": "head"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(EMPIRICAL, NONE), (NONE, EMPIRICAL), (EMPIRICAL, SAMPLED), (EMPIRICAL, REDUCE)],
)
def test_a_factor_of_another_kind_begins_anew(saved, loaded):
    """Before, a saved G stayed for ever, as the identity's eigenbasis or in the average."""
    folder, intervals = shared_folder(), {**KFAC, "eigenbasis": {"refresh_interval": 4}}
    first, second = (
        engine_of("adam-z2", kfac={**intervals, "factor": {"update_interval": 2, **kind}})
        for kind in (saved, loaded)
    )
    train(first, 1, steps=4)
    first.save_checkpoint(folder, tag="tag")
    _, said = loading(second, folder)
    kfac, before = second.kfac.preconditioner, updates_of(second)
    restarted = "AG" if loaded == REDUCE else "G"
    assert before == {key: 0 if key[-1] in restarted else 2 for key in before}
    assert loaded != NONE or not any(key.endswith("/G") for key in before)
    for state in kfac.state.values():  # in use until the new batch is there
        assert state.A.vectors and bool(state.G.vectors) == (NONE not in (saved, loaded))
    if dist.get_rank() == 0 and loaded != NONE:
        assert "head/G" in said and "start empty (saved: " in said, said
    moments, expected = first_moments(second), first_moments(first)
    bound = 1e-5 * max(float(moment.abs().max()) for moment in expected.values())
    near(moments, expected, bound, "rotated there and back")
    assert all(loss == loss for loss in train(second, 1, steps=3, first=4))  # step 4 captures
    after = updates_of(second)
    assert after == {key: updates + 2 for key, updates in before.items()}
    assert kfac.curvature.ready >= set(after)
