"""Jobs whose ranks are killed at random moments of a step, a refresh or a save, and started again.

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
from tests.campaign.harness import HANG, LOST, LOUD, SILENT, SURVIVED, Case
from tests.ranks import start_ranks

KILLED = -signal.SIGALRM
"""The exit code of a rank that the kernel's own timer has killed, whatever the rank was doing: to
the microsecond, and nothing of it runs any more then."""
PHASES = ("step", "refresh", "save")
PLACES = {b"E": "elsewhere", b"K": "in K-FAC's step", b"S": "in a save"}
"""What a rank may be doing, by the byte that it notes."""
ENOUGH = 10
"""Of so many kills at least one has to hit K-FAC's step, or a save if only saves are aimed at."""
STEPS, EVERY, WORLD = 60, 2, 2
PATIENCE = 60.0
"""Seconds without any progress after which a life hangs."""
KFAC = {"factor": {"update_interval": 1}, "eigenbasis": {"refresh_interval": 3}}
KFAC |= {"burn_in": {"steps": 0}}
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


def cases(kills: int = 20) -> list[Case]:
    jobs = {f"{kills} kills: {name}": (*mode, kills, False) for name, mode in MODES.items()}
    jobs[f"{kills} kills: z3, KFACAdamW, one tag overwritten"] = ("adam-z3", KFAC, kills, True)
    return [
        Case(
            "kills",
            name,
            "tests.campaign.kills:run_job",
            Job(*job, seed),
            accepts=(SURVIVED, LOUD) if job[-1] else (SURVIVED,),  # only a torn tag may be refused
            alone=True,
        )
        for seed, (name, job) in enumerate(jobs.items())
    ]


WAITS = {"step": (2, 3), "refresh": (1, 2), "save": (1, 2)}
"""Phase -> the first of a life that may be hit, counted from 0, and of how many."""


def run_job(job: Job) -> tuple[Counter, str]:
    """In the campaign's process: how every kill ended, and notes of those that did not end well.

    What a kill has left is judged by the life after it.
    """
    dice = random.Random(job.seed)
    outcomes, places, notes = Counter(), Counter(), list[str]()
    with tempfile.TemporaryDirectory(prefix="campaign-kills", dir=harness.ROOM) as name:
        folder = Path(name)
        saves, before, backup = (folder / name for name in ("saves", "before", "backup"))
        undisturbed = _live(Life(job), folder / "reference", folder / "reference-saves")
        phases = ("save",) if job.overwrite else PHASES  # only a save can tear a tag
        never = set(phases) - undisturbed["seconds"].keys()
        if undisturbed["errors"] or not undisturbed["ended"] or never:
            note = f"undisturbed: {undisturbed['errors'] or 'hang'}; there was no {never}"
            return Counter({harness.CRASH: 1}), note
        # the last life, if it was killed, and the last step that it had saved
        killed: tuple[Life, int] | None = None
        for number in range(3 * job.kills):
            judged = outcomes.total()
            if judged == job.kills:
                break
            if time.monotonic() > DEADLINE:
                notes.append(f"out of time after {judged} of {job.kills} kills")
                break
            phase = phases[number % len(phases)]
            first, count = WAITS[phase]
            delay = dice.random() * undisturbed["seconds"][phase]
            life = Life(job, dice.randrange(WORLD), phase, first + dice.randrange(count), delay)
            last = judged + bool(killed) == job.kills
            _copy(saves, before)
            lived = _live(Life(job) if last else life, folder / f"life{number}", saves, last)
            if lived["killed"]:
                places[lived["place"]] += 1
            saved = killed[1] if killed else 0
            outcome, note = _judge(lived, undisturbed["losses"], saved)
            if killed or outcome != SURVIVED:
                if outcome in (LOUD, LOST) and not (killed and job.overwrite):
                    outcome = LOST if killed else harness.CRASH
                outcomes[outcome] += 1
            _copy(before if lived["begun"] else backup, backup)
            if outcome != SURVIVED:
                what = f"{killed[0].phase} of rank {killed[0].victim} killed" if killed else "start"
                notes.append(f"{what}: {outcome}: {note}")
                _copy(backup, saves)
                killed = None
                continue
            saved = max(lived["saved"], lived["begun"][0])
            killed = (life, saved) if lived["killed"] else None
            if lived["ended"]:  # through before its time came: from the start again
                shutil.rmtree(saves, ignore_errors=True)
    counts = ", ".join(f"{count} {place}" for place, count in sorted(places.items()))
    notes = [f"killed: {counts}", *notes[-3:]]
    if problem := _too_few(job, outcomes.total(), places):
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


def _judge(lived: dict, expected: dict, saved: int) -> tuple[str, str]:
    """A life, by what it began with, its losses and how the other ranks took a kill."""
    begun = lived["begun"]
    if lived["hung"]:
        return HANG, "a rank waits for ever"
    if lived["errors"] and not lived["killed"]:
        return LOUD, lived["errors"][0]
    if len(set(begun)) > 1:
        return SILENT, f"ranks start at steps {begun}"
    if begun and begun[0] < saved:
        return LOST, f"starts at step {begun[0]}, step {saved} was saved"
    for step, losses in lived["losses"].items():
        if set(losses) - set(expected.get(step, losses)):
            return SILENT, f"loss of step {step} is {losses}, undisturbed {expected[step]}"
    return SURVIVED, ""


def _live(life: Life, folder: Path, saves: Path, look_only: bool = False) -> dict[str, Any]:
    """One start of the job's ranks until they end or die. ``look_only``: three steps, no save."""
    folder.mkdir(parents=True)
    saves.mkdir(parents=True, exist_ok=True)
    payload = life, saves, look_only, folder
    ranks = start_ranks("tests.campaign.kills:work", world=WORLD, payload=payload, folder=folder)
    hung, last, size = False, time.monotonic(), -1
    while any(p.is_alive() for p in ranks):
        now, written = time.monotonic(), sum(path.stat().st_size for path in folder.glob("log*"))
        if written != size:
            size, last = written, now
        patience = harness.GRACE * 5 if any(p.exitcode for p in ranks) else PATIENCE
        if now - last > patience:
            hung = True
            break
        time.sleep(0.01)
    codes = [p.exitcode for p in ranks]
    for process in ranks:
        process.kill()
        process.join()
    lines = [json.loads(text) for r in range(WORLD) for text in _lines(folder / f"said{r}")]
    losses: dict[int, list[str]] = {}
    seconds: dict[str, list[float]] = {}
    for one in lines:
        if "loss" in one:
            losses.setdefault(one["step"], []).append(one["loss"])
        if "phase" in one:
            seconds.setdefault(one["phase"], []).append(one["took"])
    return {
        "killed": KILLED in codes,
        "hung": hung,
        "ended": codes == [0] * WORLD,
        "losses": losses,
        "place": _place(folder / f"where{life.victim}"),
        "begun": [one["begun"] for one in lines if "begun" in one],
        "saved": max([one["saved"] for one in lines if "saved" in one], default=0),
        "errors": [one["error"] for one in lines if "error" in one],
        "seconds": {phase: median(took) for phase, took in seconds.items()},
    }


def _place(path: Path) -> str:
    """What the rank that wrote this file did last; elsewhere if it died before it wrote
    anything."""
    noted = path.read_bytes() if path.exists() else b""
    return PLACES[noted or b"E"]


def _lines(path: Path) -> list[str]:
    text = path.read_text() if path.exists() else ""
    return [line for line in text.split("\n")[:-1] if line]  # the last may be half written


def work(payload: tuple[Life, Path, bool, Path]) -> None:
    """A life of one rank."""
    life, saves, look_only, folder = payload
    rank = int(os.environ["RANK"])
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
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

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
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, life.delay))
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
