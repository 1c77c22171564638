"""Saves and loads in which something goes wrong or has changed: DeepSpeed's part always works, ours
is never silent."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from ds_kfac.checkpoint import files
from ds_kfac.checkpoint import save as saving
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, train, weights
from tests.deepspeed.said import error_of, heard
from tests.models import FEATURES, cross_entropy
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
KFAC = {
    "factor": {"update_interval": 1, "fisher": "empirical"},
    "eigenbasis": {"refresh_interval": 3},
    "burn_in": {"steps": 0},
}
FRESH = {**KFAC, "checkpoint": {"on_missing": "fresh"}}


class Adapters(nn.Module):
    """Names that are no file names: keys of a ModuleDict, one with a leading slash, one with 300
    letters, two that differ in case alone."""

    KEYS = ("en/de", "/tmp/escape", "up/", "x" * 300, "head", "Head")

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({key: nn.Linear(FEATURES, FEATURES) for key in self.KEYS})
        self.out = nn.Linear(FEATURES, 5)

    def forward(self, x, y):
        for adapter in self.adapters.values():
            x = x + torch.tanh(adapter(x))
        return cross_entropy(self.out(x), y)


def names(folder: Path) -> dict:
    """The engine is resumed with all of its layers."""
    torch.manual_seed(0)
    first = build(BY_NAME["z2"], 1, kfac=KFAC, model=Adapters())
    train(first, 1, steps=2)
    first.save_checkpoint(str(folder / "names"), tag="tag")
    losses = train(first, 1, steps=2, first=2)
    torch.manual_seed(1)
    second = build(BY_NAME["z2"], 1, kfac=KFAC, model=Adapters())
    second.load_checkpoint(str(folder / "names"), tag="tag")
    outside = [
        path for path in folder.rglob("*.layer.pt") if path.parents[1] != folder / "names/tag/kfac"
    ]
    return {"losses": losses, "resumed": train(second, 1, steps=2, first=2), "outside": outside}


def torn(folder: Path) -> dict:
    """A tag at stage 3 written twice, of which one rank's second writing did not come to be; each
    rank's files."""
    rank, tag, engine = (
        torch.distributed.get_rank(),
        folder / "torn/tag",
        build(BY_NAME["z3"], 1, kfac=KFAC),
    )
    train(engine, 1, steps=1)
    engine.save_checkpoint(str(folder / "torn"), tag="tag")
    torch.distributed.barrier()
    if rank == 0:
        shutil.copytree(tag, folder / "torn/old")
    train(engine, 1, steps=2, first=1)
    engine.save_checkpoint(str(folder / "torn"), tag="tag")
    torch.distributed.barrier()
    if rank == 0:  # both K-FAC states are still there, as a killed save leaves them
        for old in (folder / "torn/old").glob("zero_pp_rank_1_*"):
            shutil.copy(old, tag / old.name)
        for old in (folder / "torn/old/kfac").iterdir():
            if old.is_dir():
                shutil.copytree(old, tag / "kfac" / old.name)
    torch.distributed.barrier()
    found = {}
    for name, kfac in (("error", KFAC), ("fresh", FRESH)):
        fresh = build(BY_NAME["z3"], 1, seed=5, kfac=kfac)
        found[name] = error_of(lambda: fresh.load_checkpoint(str(folder / "torn"), tag="tag"))  # noqa: B023
    return found


def interrupted(folder: Path) -> str:
    """Killed after DeepSpeed had begun to write: the K-FAC state is there, whole, but nobody has
    said that it is the tag's."""
    engine, original = build(BY_NAME["z2"], 1, kfac=KFAC), saving.finish
    train(engine, 1, steps=2)
    saving.finish = lambda *_: None
    engine.save_checkpoint(str(folder / "interrupted"), tag="tag")
    saving.finish = original
    with heard() as messages:
        engine.load_checkpoint(str(folder / "interrupted"), tag="tag")
    return "\n".join(messages)


def copied(folder: Path) -> dict:
    """A tag that a tool copied, without files named latest and with a new time for every file; and
    a save over it that was killed before it had replaced one rank's optimizer states."""
    engine, whole, copy = (
        build(BY_NAME["z2"], 1, kfac=KFAC),
        folder / "copied/whole",
        folder / "copied/copy",
    )
    train(engine, 1, steps=2)
    engine.save_checkpoint(str(whole), tag="tag")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        ignored = shutil.ignore_patterns("latest")
        shutil.copytree(whole, copy, ignore=ignored, copy_function=shutil.copyfile)
        for age, path in enumerate(sorted(copy.rglob("*.*"))):
            os.utime(path, (1_000_000 - age, 1_000_000 - age))
    torch.distributed.barrier()
    fresh = build(BY_NAME["z2"], 1, seed=5, kfac=KFAC)
    with heard() as messages:
        fresh.load_checkpoint(str(copy), tag="tag")
    found = {
        "messages": "\n".join(messages),
        "losses": [train(it, 1, steps=2, first=2) for it in (engine, fresh)],
    }
    original, saving.finish = saving.finish, lambda *_: None
    fresh.save_checkpoint(str(copy), tag="tag")
    saving.finish = original
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (older,) = (whole / "tag").glob("*zero_pp_rank_1_*optim_states.pt")
        shutil.copyfile(older, copy / "tag" / older.name)
    torch.distributed.barrier()
    found["torn"] = error_of(lambda: engine.load_checkpoint(str(copy), tag="tag"))
    return found


def cut_off(folder: Path) -> dict:
    """A save that ends in the moment in which ``latest`` is written: it names the last whole
    save."""
    engine, place, original = (
        build(BY_NAME["z2"], 1, kfac=KFAC),
        folder / "cut_off",
        files.os.replace,
    )
    train(engine, 1, steps=2)
    engine.save_checkpoint(str(place), tag="first")

    def ended(source, target):
        if Path(target) == place / "latest":
            raise OSError(5, "the end")
        original(source, target)

    files.os.replace = ended
    error = error_of(lambda: engine.save_checkpoint(str(place), tag="second"))
    files.os.replace = original
    engine.save_checkpoint(str(place), "third", None, False)
    latest = (place / "latest").read_text()
    return {"error": error, "latest": latest, "loaded": engine.load_checkpoint(str(place))[0]}


def unwritable(folder: Path) -> dict:
    """K-FAC's state cannot be written, on one rank, by a full disk; and next time it can."""
    rank, engine, found = torch.distributed.get_rank(), build(BY_NAME["z2"], 1, kfac=KFAC), {}
    train(engine, 1, steps=2)
    original = files.write_payload

    def full(*arguments):
        original(*arguments)
        raise OSError(28, "No space left on device")

    files.write_payload = full if rank == 1 else original
    place = str(folder / "unwritable")
    found["save"] = error_of(lambda: engine.save_checkpoint(place, tag="tag"))
    files.write_payload = original
    torch.distributed.barrier()
    found["left"] = [path.name for path in Path(place, "tag/kfac").rglob("*")]
    expected = list(weights(engine).values())
    for name, kfac in (("error", KFAC), ("fresh", FRESH)):
        second = build(BY_NAME["z2"], 1, seed=5, kfac=kfac)
        with heard() as messages:
            found[name] = error_of(lambda: second.load_checkpoint(place, tag="tag"))  # noqa: B023
        found[f"{name} said"] = "\n".join(messages)
        found[f"{name} weights"] = all(
            torch.equal(a, b) for a, b in zip(weights(second).values(), expected, strict=True)
        )
    found["latest"] = Path(place, "latest").read_text()
    engine.save_checkpoint(place, tag="again")
    found["again"] = error_of(lambda: second.load_checkpoint(place, tag="again"))
    return found


def not_shared(folder: Path) -> dict:
    """Each rank has a disk of its own."""
    rank, engine = torch.distributed.get_rank(), build(BY_NAME["z2"], 1, kfac=KFAC)
    train(engine, 1, steps=1)
    files.check_token.__defaults__ = (0.2,)
    error = error_of(lambda: engine.save_checkpoint(str(folder / f"disk{rank}"), tag="tag"))
    files.check_token.__defaults__ = (files.PATIENCE,)
    torch.distributed.barrier()
    here = folder / f"disk{rank}/tag"
    return {
        "error": error,
        "deepspeed": len(list(here.glob("*zero_pp_rank*"))),
        "kfac": [path.name for path in here.rglob("kfac/*")],
    }


def other_fisher(folder: Path) -> dict:
    """From any Fisher to any other, and from token to sequence rows: what is of another kind begins
    anew."""
    kinds = {
        "empirical": {"fisher": "empirical"},
        "none": {"fisher": "activations_only"},
        "reduce": {"fisher": "empirical", "weight_sharing": "reduce"},
        "sampled": {"fisher": "monte_carlo", "prediction": "head"},
    }
    found, updates = {}, {}
    for saved, loaded in (
        ("empirical", "none"),
        ("none", "empirical"),
        ("empirical", "sampled"),
        ("empirical", "reduce"),
    ):
        for mode in ("z2", "adam-z2"):
            first, second = (
                build(
                    BY_NAME[mode],
                    1,
                    kfac={
                        "factor": {"update_interval": 2, **kinds[kind]},
                        "eigenbasis": {"refresh_interval": 4},
                        "burn_in": {"steps": 0},
                    },
                )
                for kind in (saved, loaded)
            )
            train(first, 1, steps=4)
            place = str(folder / f"{mode}-{saved}-{loaded}")
            first.save_checkpoint(place, tag="tag")
            with heard() as messages:
                second.load_checkpoint(place, tag="tag")
            kfac = second.kfac.preconditioner
            updates = {key: float(state.updates) for key, state in kfac.curvature.factors.items()}
            before = {
                name: [bool(getattr(s, side).vectors) for side in "AG"]
                for name, s in kfac.state.items()
            }
            moments = None
            # in the coordinates of the gradient, in which no basis has a part
            if mode == "adam-z2":
                expected, actual = unrotated(first), unrotated(second)
                moments = max(
                    float((actual[n] - m).abs().max() / m.abs().max()) for n, m in expected.items()
                )
            losses = train(second, 1, steps=3, first=4)  # step 4 captures
            after = {key: float(state.updates) for key, state in kfac.curvature.factors.items()}
            ready = set(kfac.curvature.factors) <= kfac.curvature.ready
            found[mode, saved, loaded] = {
                "said": "\n".join(messages),
                "updates": updates,
                "vectors": before,
                "moments": moments,
                "after": after,
                "ready": ready,
                "finite": all(loss == loss for loss in losses),
            }
            first.destroy()
            second.destroy()
    return found


def unrotated(engine) -> dict:
    """Layer -> Adam's first moment, of all ranks."""
    states = engine.kfac.preconditioner.state
    own = {name: state.basis.restore(state.moments.first_OI) for name, state in states.items()}
    everyone = [own] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    return {name: moment for part in everyone for name, moment in part.items()}


def worker(folder: str) -> dict:
    cases = (names, torn, interrupted, copied, cut_off, unwritable, not_shared, other_fisher)
    return {case.__name__: case(Path(folder)) for case in cases}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    return run_ranks(
        "tests.deepspeed.test_checkpoint_faults:worker", world=2, payload=str(folder), timeout=600
    )


def test_any_layer_name_can_be_saved(results):
    for result in results:
        assert (
            result["names"]["resumed"] == result["names"]["losses"]
            and not result["names"]["outside"]
        )


def test_ranks_that_loaded_different_saves_stop_at_once_and_say_whose(results):
    for result in results:
        for name in ("error", "fresh"):  # the weights are torn too: nothing to go on with
            error = result["torn"][name]
            assert (
                "is torn" in error and "of step 3: rank 0" in error and "of step 1: rank 1" in error
            )


def test_a_save_that_did_not_reach_its_end_is_warned_of(results):
    assert "was interrupted before its end" in results[0]["interrupted"]


def test_a_copy_without_latest_and_with_new_times_is_the_same_save(results):
    for result in results:
        found = result["copied"]
        assert found["losses"][0] == found["losses"][1]
        assert "interrupted" not in found["messages"]


def test_a_save_over_another_tag_that_did_not_replace_all_files_names_them(results):
    for result in results:
        error = result["copied"]["torn"]
        assert (
            "is torn" in error
            and "zero_pp_rank_1_mp_rank_00_optim_states.pt" in error
            and "states.json" in error
        )
        assert "zero_pp_rank_0" not in error


def test_a_save_that_ends_while_latest_is_written_leaves_the_last_one_named(results):
    """DeepSpeed opens the file, then writes it: a kill between the two left an empty one."""
    for result in results:
        found = result["cut_off"]
        assert found["latest"] == "first" and "/first/" in found["loaded"]
        assert (
            "could not write" in found["error"]
            and "rank 0: OSError: [Errno 5] the end" in found["error"]
        )


def test_a_save_of_ours_that_fails_leaves_deepspeeds_whole(results):
    for rank, result in enumerate(results):
        found = result["unwritable"]
        assert "rank 1: OSError: [Errno 28] No space left on device" in found["save"], (
            "on every rank"
        )
        assert (
            "DeepSpeed's own checkpoint" in found["save"]
            and '"on_missing": "fresh"' in found["save"]
        )
        assert found["left"] == [], "a failed save leaves nothing"
        assert found["latest"] == "tag"
        assert (
            "was saved without its K-FAC state" in found["error"]
            and "No space left" in found["error"]
        )
        assert found["fresh"] == "" and found["error weights"] and found["fresh weights"]
        assert ("K-FAC starts afresh" in found["fresh said"]) == (rank == 0)
        assert "WARNING: ds_kfac" not in found["fresh said"]
        assert found["again"] == ""


def test_a_folder_that_not_all_ranks_see_is_refused_at_the_first_save(results):
    for result in results:
        found = result["not_shared"]
        assert (
            "rank 1: ValueError" in found["error"]
            and "save to a shared file system" in found["error"]
        )
        assert found["deepspeed"] and not found["kfac"]


def test_a_factor_of_another_kind_begins_anew(results):
    """Before, a saved G stayed for ever, as the identity's eigenbasis or in the average."""
    for rank, result in enumerate(results):
        for (mode, saved, loaded), found in result["other_fisher"].items():
            restarted = "AG" if loaded == "reduce" else "G"
            for key, updates in found["updates"].items():
                assert updates == (0 if key[-1] in restarted else 2), (mode, saved, loaded, key)
            assert loaded != "none" or not any(key.endswith("/G") for key in found["updates"])
            for vectors in found["vectors"].values():
                assert vectors == [True, "none" not in (saved, loaded)], (
                    "in use until the new batch is there"
                )
            if rank == 0 and loaded != "none":
                assert "head/G" in found["said"] and "start empty (saved: " in found["said"]
            assert all(
                found["after"][key] == updates + 2 for key, updates in found["updates"].items()
            )
            assert found["ready"] and found["finite"]
            assert found["moments"] is None or found["moments"] < 1e-5, "Adam goes on where it was"
