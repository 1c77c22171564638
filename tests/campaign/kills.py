"""Jobs whose ranks are killed (SIGKILL) at random moments of a step, a refresh or a save, and
started again.

A job trains on, life after life: resume from the last checkpoint, train, save every other step,
until a rank is killed. Every loss of every life is compared with that of the same step of a run
that nobody disturbed, to the bit.

A rank notes what it is doing in a file of one byte, which outlives it. So the campaign can say how
many kills hit K-FAC's part of a step, and how many hit a save.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.campaign import harness
from tests.campaign.death import kill_after
from tests.campaign.harness import HANG, LOST, LOUD, SILENT, SURVIVED, Case

PHASES = ("step", "refresh", "save")
PLACES = {b"E": "elsewhere", b"K": "in K-FAC's step", b"S": "in a save"}
"""What a rank may be doing, by the byte that it notes."""
ENOUGH = 10
"""Of so many kills at least one has to hit K-FAC's step, or a save if only saves are aimed at."""
STEPS, EVERY, WORLD = 60, 2, 2
PATIENCE = 60.0
"""Seconds without any progress after which a life hangs."""
KFAC = {
    "factor": {"update_interval": 1},
    "eigenbasis": {"refresh_interval": 3},
    "burn_in": {"steps": 0},
}
DEADLINE = float("inf")
"""Monotonic seconds after which nobody is killed any more."""
MODES = {
    "z2, KFACAdamW": ("adam-z2", KFAC),
    "z0, EKFAC into AdamW": ("z0", {**KFAC, "preconditioner": {"eigenvalues": "corrected"}}),
    "z3, bf16, KFACAdamW": ("adam-z3-bf16", KFAC),
}


@dataclass(frozen=True)
class Job:
    """``kills`` kills of one job; ``overwrite``: every save has the same tag."""

    mode: str
    kfac: dict[str, Any]
    kills: int
    overwrite: bool
    seed: int


@dataclass(frozen=True)
class Life:
    """What a rank is given: the job, and when it dies: so many steps, refreshes or saves into this
    life."""

    job: Job
    victim: int = -1
    phase: str = ""
    wait: int = 0
    delay: float = 0.0


def cases(*, kills: int = 20, overwriting: int = 20) -> list[Case]:
    alone = {"target": "tests.campaign.kills:run_job", "alone": True, "accepts": (SURVIVED,)}
    found = [
        Case("kills", f"{kills} kills: {name}", payload=Job(*mode, kills, False, seed), **alone)
        for seed, (name, mode) in enumerate(MODES.items())
    ]
    torn = {**alone, "accepts": (SURVIVED, LOUD)}
    job = Job("adam-z3", KFAC, overwriting, True, len(MODES))
    return [
        *found,
        Case(
            "kills", f"{overwriting} kills: z3, KFACAdamW, one tag overwritten", payload=job, **torn
        ),
    ]


def run_job(job: Job) -> tuple[Counter, str]:
    """In the campaign's process: how every kill ended, and notes of those that did not end well.

    What a kill has left is judged by the life after it.
    """
    folder, dice = (
        Path(tempfile.mkdtemp(prefix="campaign-kills", dir=harness.ROOM)),
        random.Random(job.seed),
    )
    saves, before, backup = (folder / name for name in ("saves", "before", "backup"))
    outcomes: Counter = Counter()
    places: Counter = Counter()
    notes: list[str] = []
    phases = ("save",) if job.overwrite else PHASES  # only a save can tear a tag
    try:
        undisturbed = _live(Life(job), folder / "reference", folder / "reference-saves")
        if undisturbed["errors"] or not undisturbed["ended"]:
            return Counter({harness.CRASH: 1}), f"undisturbed: {undisturbed['errors'] or 'hang'}"
        expected, seconds = undisturbed["losses"], undisturbed["seconds"]
        if never := sorted(set(phases) - seconds.keys()):
            return Counter(
                {harness.CRASH: 1}
            ), f"undisturbed: there was no {' and no '.join(never)}"
        # the last life, if it was, and the last step that it had saved
        killed: tuple[Life, int] | None = None
        for number in range(3 * job.kills):
            if sum(outcomes.values()) == job.kills:
                break
            if time.monotonic() > DEADLINE:
                notes.append(f"out of time after {sum(outcomes.values())} of {job.kills} kills")
                break
            phase, last = (
                phases[number % len(phases)],
                sum(outcomes.values()) + bool(killed) == job.kills,
            )
            wait = {
                "step": 2 + dice.randrange(3),
                "refresh": 1 + dice.randrange(2),
                "save": 1 + dice.randrange(2),
            }
            life = Life(
                job, dice.randrange(WORLD), phase, wait[phase], dice.random() * seconds[phase]
            )
            _copy(saves, before)
            outcome_of_life = _live(
                Life(job) if last else life, folder / f"life{number}", saves, look_only=last
            )
            if outcome_of_life["killed"]:
                places[outcome_of_life["place"]] += 1
            outcome, note = _judge(outcome_of_life, expected, killed[1] if killed else 0)
            if killed or outcome != SURVIVED:
                # only a torn tag may be refused
                if outcome in (LOUD, LOST) and not (killed and job.overwrite):
                    outcome = LOST if killed else harness.CRASH
                outcomes[outcome] += 1
            if outcome != SURVIVED:
                what = f"{killed[0].phase} of rank {killed[0].victim} killed" if killed else "start"
                notes.append(f"{what}: {outcome}: {note}")
            _copy(before if outcome_of_life["begun"] else backup, backup)
            if outcome != SURVIVED:
                _copy(backup, saves)
                killed = None
                continue
            killed = (
                (life, max(outcome_of_life["saved"], outcome_of_life["begun"][0]))
                if outcome_of_life["killed"]
                else None
            )
            if outcome_of_life["ended"]:  # through before its time came: from the start again
                shutil.rmtree(saves, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    counts = ", ".join(f"{count} {place}" for place, count in sorted(places.items()))
    notes = [f"killed: {counts}", *notes[-3:]]
    if problem := _too_few(job, sum(outcomes.values()), places):
        outcomes[harness.CRASH] += 1
        notes.insert(0, problem)
    return outcomes, "; ".join(notes)


def _too_few(job: Job, judged: int, places: Counter) -> str:
    """What the job did not try though it had the time for it."""
    if time.monotonic() > DEADLINE:
        return ""
    if judged < job.kills:
        return f"only {judged} of {job.kills} kills took place"
    aim = PLACES[b"S"] if job.overwrite else PLACES[b"K"]
    return f"no kill {aim}" if judged >= ENOUGH and not places[aim] else ""


def _copy(source: Path, target: Path) -> None:
    if source != target:
        shutil.rmtree(target, ignore_errors=True)
        if source.exists():
            shutil.copytree(source, target)


def _judge(outcome_of_life: dict, expected: dict, saved: int) -> tuple[str, str]:
    """A life, by what it began with, its losses and how the other ranks took a kill."""
    if outcome_of_life["hung"]:
        return HANG, "a rank waits for ever"
    if outcome_of_life["errors"] and not outcome_of_life["killed"]:
        return LOUD, outcome_of_life["errors"][0]
    if len(set(outcome_of_life["begun"])) > 1:
        return SILENT, f"ranks start at steps {outcome_of_life['begun']}"
    if outcome_of_life["begun"] and outcome_of_life["begun"][0] < saved:
        return LOST, f"starts at step {outcome_of_life['begun'][0]}, step {saved} was saved"
    wrong = _differing(outcome_of_life, expected)
    return (SURVIVED, "") if wrong is None else (SILENT, wrong)


def _differing(outcome_of_life: dict, expected: dict) -> str | None:
    for step, losses in outcome_of_life["losses"].items():
        if set(losses) - set(expected.get(step, losses)):
            return f"loss of step {step} is {losses}, undisturbed {expected[step]}"
    return None


def _live(life: Life, folder: Path, saves: Path, *, look_only: bool = False) -> dict[str, Any]:
    """One start of the job's ranks until they end or die. ``look_only``: three steps, no save."""
    folder.mkdir(parents=True)
    saves.mkdir(parents=True, exist_ok=True)
    ranks = harness.start(work, WORLD, folder, (life, saves, look_only))
    killed, hung, last, size = False, False, time.monotonic(), -1
    while any(p.is_alive() for p in ranks):
        now, written = time.monotonic(), sum(path.stat().st_size for path in folder.glob("log*"))
        if written != size:
            size, last = written, now
        if not killed and any(p.exitcode == -signal.SIGKILL for p in ranks):
            killed, last = True, now
        if (
            any(p.exitcode for p in ranks) and now - last > harness.GRACE * 5
        ) or now - last > PATIENCE:
            hung = True
            break
        time.sleep(0.01)
    killed = killed or any(p.exitcode == -signal.SIGKILL for p in ranks)
    ended = all(p.exitcode == 0 for p in ranks)
    harness.end(ranks)
    lines = [json.loads(text) for r in range(WORLD) for text in _lines(folder / f"said{r}")]
    losses: dict[int, list[str]] = {}
    for one in lines:
        if "loss" in one:
            losses.setdefault(one["step"], []).append(one["loss"])
    return {
        "killed": killed,
        "hung": hung,
        "ended": ended,
        "losses": losses,
        "place": _place(folder / f"where{life.victim}"),
        "begun": [one["begun"] for one in lines if "begun" in one],
        "saved": max([one["saved"] for one in lines if "saved" in one], default=0),
        "errors": [one["error"] for one in lines if "error" in one],
        "seconds": {
            phase: median(one["took"] for one in lines if one.get("phase") == phase)
            for phase in {one["phase"] for one in lines if "phase" in one}
        },
    }


def _place(path: Path) -> str:
    """What the rank that wrote this file did last; elsewhere if it died before it wrote
    anything."""
    noted = path.read_bytes() if path.exists() else b""
    return PLACES[noted or b"E"]


def _lines(path: Path) -> list[str]:
    text = path.read_text() if path.exists() else ""
    return [line for line in text.split("\n")[:-1] if line]  # the last may be half written


def work(folder: Path, rank: int, campaign: int, given: tuple[Life, Path, bool]) -> None:
    """A life of one rank."""
    life, saves, look_only = given
    said = (folder / f"said{rank}").open("a", buffering=1)

    def say(**facts: Any) -> None:
        print(json.dumps(facts), file=said)
        print(json.dumps(facts), flush=True)  # progress

    try:
        _train(life, saves, look_only, rank, folder / f"where{rank}", say)
    except Exception as error:
        say(error=f"rank {rank}: {type(error).__name__}: {error}"[:600])
        raise


def _train(life: Life, saves: Path, look_only: bool, rank: int, where: Path, say: Any) -> None:
    from tests.deepspeed.modes import BY_NAME
    from tests.deepspeed.runs import build, micro_batches, patched

    mode, counts = BY_NAME[life.job.mode], Counter()
    with patched(mode):
        engine = build(mode, 1, kfac=life.job.kfac)
        if (saves / "latest").exists():
            engine.load_checkpoint(str(saves))
    say(begun=engine.global_steps)
    file = os.open(where, os.O_WRONLY | os.O_CREAT)

    @contextlib.contextmanager
    def noting(place: bytes) -> Iterator[None]:
        os.pwrite(file, place, 0)
        yield
        os.pwrite(file, b"E", 0)

    kfac_step = engine.kfac.step

    def noted_step() -> None:
        counts["K-FAC"] += 1
        with noting(b"K"):
            kfac_step()

    engine.kfac.step = noted_step

    def begin(phase: str) -> float:
        counts[phase] += 1
        if rank == life.victim and phase == life.phase and counts[phase] == life.wait + 1:
            kill_after(life.delay)
        return time.perf_counter()

    last = min(STEPS, engine.global_steps + 3) if look_only else STEPS
    for step in range(engine.global_steps, last):
        refreshes = any(kfac.due.refresh for kfac in engine.kfac.job.preconditioners)
        phase = "refresh" if refreshes else "step"
        start = 0.0 if refreshes else begin(phase)
        for x, y in micro_batches(step, 1):
            loss = engine(x.to(engine.get_data_types()[0]), y)
            engine.backward(loss)
            start = begin(phase) if refreshes else start
            engine.step()
        say(phase=phase, took=time.perf_counter() - start)
        if counts["K-FAC"] != counts["step"] + counts["refresh"]:
            raise harness.NothingTried(f"K-FAC's step was seen {counts['K-FAC']} times: {counts}")
        say(step=step, loss=f"{rank}:{float(loss.detach()).hex()}")
        if (step + 1) % EVERY == 0 and not look_only:
            start = begin("save")
            with noting(b"S"):
                engine.save_checkpoint(str(saves), tag="only" if life.job.overwrite else None)
            say(phase="save", took=time.perf_counter() - start)
            say(saved=step + 1)
