"""Jobs whose ranks are killed (SIGKILL) at random moments of a step, a refresh or a save, and started again.

A job trains on, life after life: resume from the last checkpoint, train, save every other step, until a rank is killed.
Every loss of every life is compared with that of the same step of a run that nobody disturbed, to the bit.
"""

import json
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.campaign import harness
from tests.campaign.death import kill_after
from tests.campaign.harness import HANG, LOST, LOUD, SILENT, SURVIVED, Case

PHASES = ("step", "refresh", "save")
STEPS, EVERY, WORLD = 60, 2, 2
PATIENCE = 60.0
"""Seconds without any progress after which a life hangs."""
KFAC = {"factor": {"update_interval": 1}, "eigenbasis": {"refresh_interval": 3}}
MODES = {
    "z2, KFACAdamW, refresh beside": ("adam-z2", {**KFAC, "eigenbasis": {"refresh_interval": 3, "lag": 1}}),
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
    """What a rank is told: the job, and when it dies. ``wait`` counts steps, refreshes or saves of this life."""

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
    return [*found, Case("kills", f"{overwriting} kills: z3, KFACAdamW, one tag overwritten", payload=job, **torn)]


def run_job(job: Job) -> tuple[Counter, str]:
    """In the campaign's process: how every kill ended, and notes of those that did not end well."""
    folder, dice = Path(tempfile.mkdtemp(prefix="campaign-kills")), random.Random(job.seed)
    outcomes: Counter = Counter()
    notes: list[str] = []
    try:
        undisturbed = _live(Life(job), folder / "reference", folder / "reference-saves")
        if undisturbed["errors"] or not undisturbed["ended"]:
            return Counter({harness.CRASH: 1}), f"undisturbed: {undisturbed['errors'] or 'hang'}"
        expected, seconds = undisturbed["losses"], undisturbed["seconds"]
        saves, backup, number = folder / "saves", folder / "backup", 0
        while sum(outcomes.values()) < job.kills:
            phase = PHASES[number % len(PHASES)]
            life = Life(job, dice.randrange(WORLD), phase, dice.randrange(3), dice.random() * seconds[phase])
            if job.overwrite and saves.exists():  # the state that this life begins with, should it tear its only tag
                shutil.rmtree(backup, ignore_errors=True)
                shutil.copytree(saves, backup)
            told = _live(life, folder / f"life{number}", saves)
            number += 1
            if told["killed"]:
                outcome, note = _after_kill(told, expected, saves, Life(job), folder / f"after{number}")
                outcomes[outcome] += 1
                if outcome != SURVIVED:
                    notes.append(f"{phase} of rank {life.victim}: {outcome}: {note}")
                    shutil.rmtree(saves, ignore_errors=True)
                    if backup.exists():
                        shutil.copytree(backup, saves)
            elif told["errors"] or not told["ended"]:
                outcomes[harness.CRASH if told["errors"] else HANG] += 1
                notes.append(f"life {number}: {told['errors'] or 'hang'}")
                shutil.rmtree(saves, ignore_errors=True)
            if told["ended"] or len(notes) > 2 * job.kills:  # through before its time came: once more from the start
                shutil.rmtree(saves, ignore_errors=True)
            shutil.rmtree(folder / f"life{number - 1}", ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcomes, "; ".join(notes[:3])


def _after_kill(told: dict, expected: dict, saves: Path, life: Life, folder: Path) -> tuple[str, str]:
    """Judge a life that was killed, by its own losses and by what starts from what it left."""
    if told["hung"]:
        return HANG, "a rank waits for the killed one for ever"
    if (wrong := _differing(told, expected)) is not None:
        return SILENT, wrong
    next_ = _live(life, folder, saves, look_only=True)
    shutil.rmtree(folder, ignore_errors=True)
    if next_["errors"]:
        text = next_["errors"][0]
        return (LOUD if life.job.overwrite else LOST), text
    if not next_["ended"]:
        return HANG, "the next start"
    if next_["begun"] < told["saved"]:
        return LOST, f"starts at step {next_['begun']}, step {told['saved']} was saved"
    wrong = _differing(next_, expected)
    return (SURVIVED, "") if wrong is None else (SILENT, wrong)


def _differing(told: dict, expected: dict) -> str | None:
    for step, losses in told["losses"].items():
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
        if (any(p.exitcode for p in ranks) and now - last > harness.GRACE * 5) or now - last > PATIENCE:
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
        "killed": killed, "hung": hung, "ended": ended, "losses": losses,
        "begun": next((one["begun"] for one in lines if "begun" in one), 0),
        "saved": max([one["saved"] for one in lines if "saved" in one], default=0),
        "errors": [one["error"] for one in lines if "error" in one],
        "seconds": {phase: max([one["took"] for one in lines if one.get("phase") == phase], default=0.1)
                    for phase in PHASES},
    }  # fmt: skip


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
        _train(life, saves, look_only, rank, say)
    except Exception as error:
        say(error=f"rank {rank}: {type(error).__name__}: {error}"[:600])
        raise


def _train(life: Life, saves: Path, look_only: bool, rank: int, say: Any) -> None:
    from tests.deepspeed.modes import BY_NAME
    from tests.deepspeed.runs import build, micro_batches, patched

    mode, counts = BY_NAME[life.job.mode], Counter()
    with patched(mode):
        engine = build(mode, 1, kfac=life.job.kfac)
        if (saves / "latest").exists():
            engine.load_checkpoint(str(saves))
    say(begun=engine.global_steps)

    def begin(phase: str) -> float:
        counts[phase] += 1
        if rank == life.victim and phase == life.phase and counts[phase] == life.wait + 1:
            kill_after(life.delay)
        return time.perf_counter()

    last = min(STEPS, engine.global_steps + 3) if look_only else STEPS
    for step in range(engine.global_steps, last):
        refreshes = step % life.job.kfac["eigenbasis"]["refresh_interval"] == 0
        phase = "refresh" if refreshes else "step"
        start = 0.0 if refreshes else begin(phase)
        for x, y in micro_batches(step, 1):
            loss = engine(x.to(engine.get_data_types()[0]), y)
            engine.backward(loss)
            start = begin(phase) if refreshes else start
            engine.step()
        say(phase=phase, took=time.perf_counter() - start)
        say(step=step, loss=f"{rank}:{float(loss.detach()).hex()}")
        if (step + 1) % EVERY == 0 and not look_only:
            start = begin("save")
            engine.save_checkpoint(str(saves), tag="only" if life.job.overwrite else None)
            say(phase="save", took=time.perf_counter() - start)
            say(saved=step + 1)
