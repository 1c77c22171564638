"""What the campaign says of a case, without running one."""

import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from tests.campaign import harness, kills, numerics, programs, table, usage
from tests.campaign.harness import CRASH, HANG, LOUD, SILENT, SURVIVED, Case, NothingTried, Result

CASE = Case("usage", "something: z2, AdamW", "nowhere:nothing")
FINE, WRONG, TOLD = (SURVIVED, ""), (SILENT, ""), (LOUD, "")
NAMED, UNNAMED, LATER = "ValueError: ds_kfac: no", "IndexError: list", "RuntimeError: closed"
TIMED_OUT = "RuntimeError: Timed out waiting 30000ms"
NOT_TRIED = f"{NothingTried.__name__}: no ds_kfac here"


@pytest.mark.parametrize(
    ("answers", "errors", "log", "verdict"),
    [
        pytest.param([FINE, FINE], [], "", SURVIVED, id="all are fine"),
        pytest.param([FINE, WRONG], [], "", SILENT, id="the worst rank decides"),
        pytest.param([TOLD, WRONG], [], "", SILENT, id="silent is worse than loud"),
        pytest.param([], [NAMED, LATER], "", LOUD, id="the first error is the cause"),
        pytest.param([], [UNNAMED, NAMED], "", CRASH, id="an error that does not name it"),
        pytest.param([], [], "", HANG, id="nobody answers"),
        pytest.param([], [TIMED_OUT], "", HANG, id="a collective's timeout"),
        pytest.param([], [NOT_TRIED], "", CRASH, id="a disturbance that did not take place"),
        pytest.param([], [], "ImportError: no", CRASH, id="ranks that die at start"),
    ],
)
def test_what_ranks_say_has_a_verdict(answers, errors, log, verdict):
    assert harness.judge(CASE, answers, errors, log)[0] == verdict


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ends", "verdict"), [("well", SURVIVED), ("with an error", LOUD), ("never", HANG)]
)
def test_a_case_ends_as_its_ranks_do(ends, verdict, tmp_path):
    target = "tests.campaign.test_campaign:end"
    case = Case("usage", ends, target, ends, seconds=5 if ends == "never" else 60)
    assert harness.run_on_ranks(case, tmp_path)[0] == verdict


def end(how: str) -> harness.Outcome:
    """On a rank; the other one waits in a collective."""
    if how == "with an error" and dist.get_rank() == 1:
        raise ValueError("ds_kfac: no")
    if how != "never" or dist.get_rank() == 0:
        dist.barrier()
    else:
        time.sleep(60)
    return SURVIVED, ""


@pytest.fixture
def of_numerics(monkeypatch):
    """What a case of numerics is found to be, with runs that are made by hand."""

    def outcome(train, fault: str = "loss NaN"):
        monkeypatch.setattr(numerics, "_train", train)
        return numerics.run((numerics.COVERED[0][0], fault))

    return outcome


def test_a_fault_that_changed_nothing_was_not_tried(of_numerics):
    same = lambda *_, **__: numerics.Run({}, True, [], ["1.0", "1.1"], skipped=0)  # noqa: E731
    with pytest.raises(NothingTried, match="are those of a run without the fault"):
        of_numerics(same)
    with pytest.raises(NothingTried, match="no step overflowed"):
        of_numerics(same, numerics.STORM)


def test_a_run_that_fails_without_a_fault_tried_nothing(of_numerics, monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("ds_kfac's self-test failed")

    with pytest.raises(NothingTried, match="without the fault fails: ds_kfac's self-test failed"):
        of_numerics(refused)
    monkeypatch.setattr(usage, "_attempt", lambda *_, **__: ("IndexError: list", False))
    with pytest.raises(NothingTried, match=r"DeepSpeed alone .* IndexError"):
        usage.run((next(iter(programs.PROGRAMS)), 2))


def test_state_that_is_not_finite_is_told_where_deepspeed_alone_has_no_finite_weights(of_numerics):
    def train(setting, fault, *, plain):
        bad = {"weight": torch.tensor([float("nan")])}
        return numerics.Run(bad, plain or fault is None, [], [str(fault)], skipped=0)

    assert of_numerics(train) == (SILENT, "state not finite")


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
    assert page.count("is missing") == 1 and "kind 0; kind 1; 7 more" in page


def test_a_run_in_parts_keeps_the_last_result_of_each_case(tmp_path):
    parts = tmp_path / "parts"
    case = Case("usage", "alone", "tests.campaign.test_campaign:twice", alone=True)
    for _ in range(2):
        harness.run([case], deadline=float("inf"), keep=parts)
    (found,) = harness.results_in(parts, [case, CASE])
    assert found.case == case and (found.outcomes, found.note) == twice(None)


def twice(_) -> tuple[Counter, str]:
    return Counter({SURVIVED: 2}), "a note"
