"""Runs cases on several ranks and says how each one ended, whatever happens to the ranks.

Every case has ranks of its own (tests/ranks.py), so that cases cannot spoil each other. Ranks that
do not answer in time are killed.
"""

import importlib
import json
import os
import re
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks

OUTCOMES = ("survived", "loud", "crash", "silent", "hang", "lost")
"""From best to worst. loud: an error or a warning that names the cause; crash: an error that does
not."""
SURVIVED, LOUD, CRASH, SILENT, HANG, LOST = OUTCOMES
GRACE = 3.0
"""Seconds that the other ranks have after one has failed; a launcher gives less."""
Outcome = tuple[str, str]


class NothingTried(Exception):
    """The disturbance of a case did not take place, so what happened afterwards says nothing."""


ROOM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where folders are made: in memory, since a process that is killed loses nothing that it has
written anywhere."""
SHARED: Path | None = None
"""On a rank: a folder that all cases of a campaign share."""


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        target: "module:function"; called with ``payload`` on every rank, returns an
            :data:`Outcome`.
        accepts: outcomes that are no defect.
        names: what an error's text has to match to be loud.
        alone: called once, in the campaign's own process, and returns a :class:`Counter` of
            outcomes and a note.
    """

    family: str
    name: str
    target: str
    payload: Any = None
    world: int = 2
    seconds: float = 60
    accepts: tuple[str, ...] = (SURVIVED, LOUD)
    names: str = "ds_kfac|kfac"
    alone: bool = False


@dataclass
class Result:
    """How a case ended."""

    case: Case
    outcomes: Counter
    note: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return bool(self.outcomes) and set(self.outcomes) <= set(self.case.accepts)


def run(cases: list[Case], *, deadline: float, keep: Path | None = None) -> list[Result]:
    """All cases in order; those that would begin after ``deadline`` (monotonic seconds) have no
    outcome.

    Args:
        keep: a file that every result is added to, for :func:`results_in`.
    """
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="campaign", dir=ROOM) as shared:
        for case in cases:
            start = time.monotonic()
            if start > deadline:
                results.append(Result(case, Counter(), "not run: out of time"))
                continue
            if case.alone:
                outcomes, note = resolve(case.target)(case.payload)
            else:
                outcome, note = run_on_ranks(case, Path(shared))
                outcomes = Counter({outcome: 1})
            results.append(one := Result(case, outcomes, note, time.monotonic() - start))
            print(line(one), flush=True)
            if keep is not None:
                kept = [case.family, case.name, one.outcomes, one.note, one.seconds]
                with keep.open("a") as file:
                    print(json.dumps(kept), file=file)
    return results


def results_in(file: Path | None, cases: list[Case]) -> list[Result]:
    """Of these cases, those that :func:`run` has kept there; of a case that was run again the last
    one."""
    lines = file.read_text().splitlines() if file and file.exists() else []
    found = {}
    for family, name, outcomes, note, seconds in map(json.loads, lines):
        found[family, name] = Counter(outcomes), note, seconds
    known = [case for case in cases if (case.family, case.name) in found]
    return [Result(case, *found[case.family, case.name]) for case in known]


def counted(outcomes: Counter) -> str:
    """For example "19 survived, 1 loud"; without a number if there is one only."""
    many = outcomes.total() > 1
    parts = [f"{outcomes[one]} {one}" if many else one for one in OUTCOMES if outcomes[one]]
    return ", ".join(parts) or "not run"


def line(result: Result) -> str:
    case, mark = result.case, " " if result.good else "!"
    ended = f"{counted(result.outcomes):10} {result.seconds:5.1f} s  {result.note[:150]}"
    return f"{mark} {case.family:9} {case.name:60} {ended}"


def resolve(target: str):
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)


def run_on_ranks(case: Case, shared: Path) -> Outcome:
    answers, log = [], ""
    with tempfile.TemporaryDirectory(prefix="campaign-errors", dir=ROOM) as name:
        options = {"payload": (case, Path(name), shared), "timeout": case.seconds, "after": GRACE}
        try:
            answers = run_ranks("tests.campaign.harness:attempt", world=case.world, **options)
        except AssertionError as ended:
            log = str(ended)
        errors = sorted(json.loads(path.read_text()) for path in Path(name).iterdir())
    return judge(case, answers, [text for _, text in errors], log)


def attempt(payload: tuple[Case, Path, Path]) -> Outcome:
    """What a rank does. An error is noted with its time: the first one is the cause, and the other
    ranks then lose their connection."""
    global SHARED
    from ds_kfac.step import proving

    proving.RAISES = False  # as for users
    case, errors, SHARED = payload
    try:
        return resolve(case.target)(case.payload)
    except BaseException as error:
        note = [time.time(), f"{type(error).__name__}: {error}"]
        (errors / os.environ["RANK"]).write_text(json.dumps(note))
        raise


def judge(case: Case, answers: list[Outcome], errors: list[str], log: str) -> Outcome:
    """From what all ranks answered, or else their errors, the first one first, and their log."""
    if errors:
        note, many = errors[0], f" ({len(errors)} of {case.world} ranks)"
        if note.startswith(NothingTried.__name__):
            return CRASH, note + many
        if re.search("(?i)timed out|timeout", note):
            return HANG, note + many
        return (LOUD if re.search(case.names, note) else CRASH), note + many
    if not answers:
        if "Error" in log:
            return CRASH, "died: " + log[-200:]
        return HANG, f"no answer after {case.seconds:.0f} s"
    return max(answers, key=lambda answer: OUTCOMES.index(answer[0]))
