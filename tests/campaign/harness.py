"""Runs cases on several ranks and says how each one ended, whatever happens to the ranks.

A :class:`Session` forks its ranks once, from a server that has imported everything, and hands them
one case after another. A rank that fails ends its session, and the next case gets a new one: cases
cannot spoil each other. Groups meet in a file, so no port is taken. Ranks that do not answer in
time are killed; they also end when the campaign does.
"""

import importlib
import json
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.ranks import SERVER

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
        return bool(self.outcomes) and all(
            outcome in self.case.accepts for outcome in self.outcomes
        )


def run(cases: list[Case], *, deadline: float, say=print, keep: Path | None = None) -> list[Result]:
    """All cases in order; those that would begin after ``deadline`` (monotonic seconds) have no
    outcome.

    Args:
        keep: a file that every result is added to, for :func:`results_in`.
    """
    results: list[Result] = []
    session: Session | None = None
    try:
        for case in cases:
            start = time.monotonic()
            if start > deadline:
                results.append(Result(case, Counter(), "not run: out of time"))
                continue
            if case.alone:
                outcomes, note = resolve(case.target)(case.payload)
            else:
                if session is None or session.world != case.world or session.broken:
                    if session is not None:
                        session.close()
                    session = Session(case.world)
                outcome, note = session.run(case)
                outcomes = Counter({outcome: 1})
            results.append(Result(case, outcomes, note, time.monotonic() - start))
            say(line(results[-1]))
            if keep is not None:
                with keep.open("a") as file:
                    one = results[-1]
                    print(
                        json.dumps([case.family, case.name, one.outcomes, one.note, one.seconds]),
                        file=file,
                    )
    finally:
        if session is not None:
            session.close()
    return results


def results_in(file: Path | None, cases: list[Case]) -> list[Result]:
    """Of these cases, those that :func:`run` has kept there; of a case that was run again the last
    one."""
    kept = (
        [json.loads(text) for text in file.read_text().splitlines()]
        if file and file.exists()
        else []
    )
    found = {(family, name): (Counter(outcomes), *rest) for family, name, outcomes, *rest in kept}
    return [
        Result(case, *found[case.family, case.name])
        for case in cases
        if (case.family, case.name) in found
    ]


def line(result: Result) -> str:
    counts = {one: result.outcomes[one] for one in OUTCOMES if result.outcomes[one]}
    summary = (
        ", ".join(f"{n} {one}" if sum(counts.values()) > 1 else one for one, n in counts.items())
        or "not run"
    )
    mark = " " if result.good else "!"
    return (
        f"{mark} {result.case.family:9} {result.case.name:60} {summary:10} "
        f"{result.seconds:5.1f} s  {result.note[:150]}"
    )


def patient(case: Case, factor: float) -> Case:
    return replace(case, seconds=case.seconds * factor)


def resolve(target: str):
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)


@dataclass
class Session:
    """Ranks that wait for cases."""

    world: int
    broken: bool = False
    _next: int = 0
    _folder: Path = field(
        default_factory=lambda: Path(tempfile.mkdtemp(prefix="campaign", dir=ROOM))
    )

    def __post_init__(self) -> None:
        self._ranks = start(serve, self.world, self._folder)

    def run(self, case: Case) -> Outcome:
        number, self._next = self._next, self._next + 1
        put(self._folder / f"case{number}", case)
        answers = [self._folder / f"done{number}.{rank}" for rank in range(self.world)]
        deadline = time.monotonic() + case.seconds
        while time.monotonic() < deadline:
            failed = [a.exists() and get(a)[0] == "error" for a in answers]
            ended = [
                not p.is_alive() and not a.exists()
                for p, a in zip(self._ranks, answers, strict=True)
            ]
            if any(failed) or any(ended):
                self.broken = True
                deadline = min(deadline, time.monotonic() + GRACE)
            if all(a.exists() for a in answers) or (
                self.broken and all(not p.is_alive() for p in self._ranks)
            ):
                break
            time.sleep(0.01)
        found = [get(a) if a.exists() else ("missing", "", time.time()) for a in answers]
        self.broken = self.broken or any(one[0] in ("error", "missing") for one in found)
        return judge(case, found, [tail(self._folder / f"log{r}") for r in range(self.world)])

    def close(self) -> None:
        (self._folder / "end").touch()
        end(self._ranks, patience=0.0 if self.broken else 5.0)
        shutil.rmtree(self._folder, ignore_errors=True)


def judge(case: Case, found: list[tuple[str, str, float]], logs: list[str]) -> Outcome:
    """From what the ranks said: (outcome or "error" or "missing", note, when)."""
    errors = sorted((one for one in found if one[0] == "error"), key=lambda one: one[2])
    if errors:
        note, many = errors[0][1], f" ({len(errors)} of {len(found)} ranks)"
        if note.startswith(NothingTried.__name__):
            return CRASH, note + many
        if re.search("(?i)timed out|timeout", note):
            return HANG, note + many
        return (LOUD if re.search(case.names, note) else CRASH), note + many
    if any(one[0] == "missing" for one in found):
        if all(one[0] == "missing" for one in found) and any("Error" in log for log in logs):
            return CRASH, "died: " + " ".join(logs)[-200:]
        return HANG, f"no answer after {case.seconds:.0f} s"
    worst = max(found, key=lambda one: OUTCOMES.index(one[0]))
    return worst[0], worst[1]


# processes


def start(target, world: int, folder: Path, payload: Any = None) -> list:
    """Fork ranks of one group; it meets in ``folder``, which must be new."""
    ranks = [
        SERVER.Process(target=_rank, args=(target, r, world, folder, os.getpid(), payload))
        for r in range(world)
    ]
    for process in ranks:
        process.start()
    return ranks


def end(ranks: list, *, patience: float = 0.0) -> None:
    """Wait a little, then kill what is left, with everything it started."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and any(p.is_alive() for p in ranks):
        time.sleep(0.01)
    for process in ranks:
        if process.is_alive():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has not yet a group of its own
                process.kill()
        process.join()


def _rank(target, rank: int, world: int, folder: Path, campaign: int, payload: Any) -> None:
    os.setpgid(0, 0)
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        init(folder / "store", rank, world)
        target(folder, rank, campaign, payload)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # interpreter shutdown would wait for gloo's threads


def init(store: Path, rank: int, world: int, seconds: float = 30) -> None:
    import deepspeed
    import torch

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )


def serve(folder: Path, rank: int, campaign: int, _: Any) -> None:
    """What a session's rank does: one case after another, until one fails."""
    import torch.distributed as dist

    number = 0
    while True:
        while not (folder / f"case{number}").exists():
            if (folder / "end").exists() or not alive(campaign):
                return
            time.sleep(0.005)
        case, answer = get(folder / f"case{number}"), folder / f"done{number}.{rank}"
        try:
            outcome, note = resolve(case.target)(case.payload)
            dist.barrier()
        except BaseException as error:
            traceback.print_exc()
            put(answer, ("error", f"{type(error).__name__}: {error}", time.time()))
            return
        put(answer, (outcome, note, time.time()))
        number += 1


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def put(path: Path, value: Any) -> None:
    """Whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(pickle.dumps(value))
    partial.rename(path)


def get(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


def tail(path: Path) -> str:
    return path.read_text(errors="replace")[-1000:] if path.exists() else ""
