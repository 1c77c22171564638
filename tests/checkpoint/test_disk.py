"""What a tag's folder shows of saves that were interrupted."""

import shutil
from pathlib import Path

import pytest
import torch

from ds_kfac.checkpoint.files import unfinished, write_states

OLD, NEW = "aaaabbbbcccc", "ddddeeeeffff"


def write(tag: Path, name: str, value: float) -> None:
    torch.save({"value": torch.full((5,), value), "text": "x" * 40}, tag / name)


@pytest.fixture
def tag(tmp_path) -> Path:
    """Of a save that has reached its end."""
    tag = tmp_path / "tag"
    (tag / "kfac" / OLD).mkdir(parents=True)
    for name in (
        "mp_rank_00_model_states.pt",
        "layer_00-model_states.pt",
        "rank_0_optim_states.pt",
    ):
        write(tag, name, 1.0)
    write_states(tag / "kfac" / OLD)
    return tag


def test_a_whole_save_has_nothing_against_it(tag):
    assert unfinished(tag, OLD) is None


def test_a_later_save_that_wrote_nothing_of_deepspeeds_is_no_harm(tag):
    (tag / "kfac" / NEW).mkdir()
    assert unfinished(tag, OLD) is None


def test_a_later_save_that_replaced_a_file(tag):
    (tag / "kfac" / NEW).mkdir()
    write(tag, "rank_0_optim_states.pt", 2.0)
    sentence, differ = unfinished(tag, OLD)
    assert NEW in sentence and differ == ["rank_0_optim_states.pt"]


def test_a_save_over_another_one_that_did_not_replace_all(tag):
    (tag / "kfac" / NEW).mkdir()
    # the layer's file may be of a layer that is not trained
    write(tag, "mp_rank_00_model_states.pt", 2.0)
    sentence, older = unfinished(tag, NEW)
    assert "before its end" in sentence and older == ["rank_0_optim_states.pt"]
    write(tag, "rank_0_optim_states.pt", 2.0)
    assert unfinished(tag, NEW)[1] == []


def test_a_copy_with_other_times_and_without_latest_is_the_same_save(tag, tmp_path):
    (tag / "kfac" / NEW).mkdir()
    copy = Path(shutil.copytree(tag, tmp_path / "copy", copy_function=shutil.copyfile))
    assert unfinished(copy, OLD) is None


def test_damaged_states_are_those_of_a_save_without_an_end(tag):
    (tag / "kfac" / OLD / "states.json").write_text("{")
    assert unfinished(tag, OLD) == (f"save {OLD} of {tag} was interrupted before its end", [])


def test_files_of_another_checkpoint_engine_are_told_apart_by_their_size(tag):
    (tag / "own_states.pt").write_bytes(b"not of torch")
    write_states(tag / "kfac" / OLD)
    (tag / "kfac" / NEW).mkdir()
    assert unfinished(tag, OLD) is None
    (tag / "own_states.pt").write_bytes(b"not of torch, and longer")
    assert unfinished(tag, OLD)[1] == ["own_states.pt"]
