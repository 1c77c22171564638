"""What the campaign says of a case, without running one."""

from collections import Counter

import pytest
import torch

from tests.campaign import harness, kills, numerics, programs, table, usage
from tests.campaign.harness import (
    CRASH,
    HANG,
    LOUD,
    OUTCOMES,
    SILENT,
    SURVIVED,
    Case,
    NothingTried,
    Result,
    judge,
)

CASE = Case("usage", "something: z2, AdamW", "nowhere:nothing")


def verdict(*found: tuple[str, str, float], logs=("", "")) -> str:
    return judge(CASE, list(found), list(logs))[0]


def test_the_worst_rank_decides():
    assert verdict((SURVIVED, "", 0.0), (SURVIVED, "", 0.0)) == SURVIVED
    assert verdict((SURVIVED, "", 0.0), (SILENT, "", 0.0)) == SILENT
    assert verdict((LOUD, "", 0.0), (SILENT, "", 0.0)) == SILENT
    assert (
        OUTCOMES.index(SURVIVED)
        < OUTCOMES.index(LOUD)
        < OUTCOMES.index(SILENT)
        < OUTCOMES.index(HANG)
    )


def test_the_first_error_is_the_cause():
    """The others then lose their connection."""
    first, second = (
        ("error", "ValueError: ds_kfac: no", 1.0),
        ("error", "RuntimeError: Connection closed", 2.0),
    )
    assert verdict(second, first) == LOUD
    assert verdict(("error", "IndexError: list", 1.0), second) == CRASH
    assert verdict(first, ("missing", "", 5.0)) == LOUD, "a launcher kills the others"


def test_waiting_is_a_hang():
    assert verdict(("missing", "", 0.0), ("missing", "", 0.0)) == HANG
    assert verdict((SURVIVED, "", 0.0), ("missing", "", 0.0)) == HANG
    assert (
        verdict(("error", "RuntimeError: Timed out waiting 30000ms", 1.0), ("missing", "", 0.0))
        == HANG
    )


def test_ranks_that_die_at_start_are_a_crash():
    assert (
        verdict(("missing", "", 0.0), ("missing", "", 0.0), logs=("ImportError: no", "")) == CRASH
    )


def test_a_disturbance_that_did_not_take_place_is_a_crash():
    """Whatever its text names."""
    assert verdict(("error", f"{NothingTried.__name__}: no ds_kfac here", 1.0)) == CRASH


def test_a_fault_that_changed_no_loss_was_not_tried(monkeypatch):
    same = numerics.Run({}, True, [], ["1.0", "1.1"], skipped=0)
    monkeypatch.setattr(numerics, "_train", lambda *_, **__: same)
    numerics._undisturbed.cache_clear()
    setting, _ = numerics.COVERED[0]
    with pytest.raises(NothingTried, match="are those of a run without the fault"):
        numerics.run((setting, "loss NaN"))
    with pytest.raises(NothingTried, match="no step overflowed"):
        numerics.run((setting, numerics.STORM))
    numerics._undisturbed.cache_clear()


def test_a_run_that_fails_without_a_fault_tried_nothing(monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("ds_kfac's self-test failed")

    monkeypatch.setattr(numerics, "_train", refused)
    numerics._undisturbed.cache_clear()
    setting, _ = numerics.COVERED[0]
    with pytest.raises(NothingTried, match="without the fault fails: ds_kfac's self-test failed"):
        numerics.run((setting, "loss NaN"))


def test_state_that_is_not_finite_is_told_where_deepspeed_alone_has_no_finite_weights(monkeypatch):
    bad = {"weight": torch.tensor([float("nan")])}

    def train(setting, fault, *, plain):
        return numerics.Run(bad, plain or fault is None, [], [str(fault)], skipped=0)

    monkeypatch.setattr(numerics, "_train", train)
    numerics._undisturbed.cache_clear()
    setting, _ = numerics.COVERED[0]
    assert numerics.run((setting, "loss NaN")) == (SILENT, "state not finite")
    numerics._undisturbed.cache_clear()


def test_a_program_that_deepspeed_alone_does_not_survive_tries_nothing(monkeypatch):
    monkeypatch.setattr(usage, "_attempt", lambda *_, **__: ("IndexError: list", False))
    with pytest.raises(NothingTried, match=r"DeepSpeed alone .* IndexError"):
        usage.run((next(iter(programs.PROGRAMS)), 2))


def test_what_a_killed_rank_did_last_is_known(tmp_path):
    file = tmp_path / "where0"
    assert kills._place(file) == "elsewhere"
    for noted, place in ((b"", "elsewhere"), (b"K", "in K-FAC's step"), (b"S", "in a save")):
        file.write_bytes(noted)
        assert kills._place(file) == place


def test_kills_that_missed_are_told(monkeypatch):
    job, saves = (kills.Job("z2", {}, 10, overwrite, 0) for overwrite in (False, True))
    hits = Counter({"in K-FAC's step": 1, "elsewhere": 9})
    assert kills._too_few(job, 10, hits) == ""
    assert kills._too_few(job, 9, hits) == "only 9 of 10 kills took place"
    assert kills._too_few(job, 10, Counter(elsewhere=10)) == "no kill in K-FAC's step"
    assert kills._too_few(saves, 10, hits) == "no kill in a save"
    monkeypatch.setattr(kills, "DEADLINE", 0.0)
    assert kills._too_few(job, 9, hits) == ""


def test_the_page_shows_every_bad_case_and_only_counts_what_survived():
    good = [
        Result(Case("usage", f"something: z{stage}", ""), Counter({SURVIVED: 1}))
        for stage in (0, 2)
    ]
    bad = Result(Case("usage", "something: z3", ""), Counter({SILENT: 1}), "other | weights")
    unrun = Result(Case("numerics", "more: z3", ""), Counter(), "not run: out of time")
    page = table.report([*good, bad, unrun], command="x", seconds=60.0)
    assert "| usage | 3 | 2 | 0 | 0 | 1 | 0 | 0 | 0 |" in page
    assert "| numerics | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 1 |" in page
    assert "| all | 3 | 2 | 0 | 0 | 1 | 0 | 0 | 1 |" in page
    assert "| usage | something: z3 | **silent** | other / weights |" in page
    assert "| numerics | more: z3 | **not run** | not run: out of time |" in page
    assert "something: z0" not in page
    assert not bad.good and not unrun.good and good[0].good


def test_the_page_has_one_row_for_what_ended_alike():
    refused = [
        Result(Case("damage", f"kind {n}", ""), Counter({LOUD: 1}), f"file {n} is missing")
        for n in range(9)
    ]
    page = table.report(refused, command="x", seconds=60.0)
    assert page.count("is missing") == 1 and all(f"kind {n}" in page for n in range(9))


def test_a_run_in_parts_keeps_the_last_result_of_each_case(tmp_path):
    parts = tmp_path / "parts"
    case = Case("usage", "alone", "tests.campaign.test_campaign:twice", alone=True)
    for _ in range(2):
        harness.run([case], deadline=float("inf"), say=lambda text: None, keep=parts)
    (found,) = harness.results_in(parts, [case, CASE])
    assert (
        found.case == case and found.outcomes == Counter({SURVIVED: 2}) and found.note == "a note"
    )


def twice(_) -> tuple[Counter, str]:
    return Counter({SURVIVED: 2}), "a note"
