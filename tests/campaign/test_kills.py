"""Jobs whose ranks are killed at random moments of a step, a refresh or a save, and started again.

A job trains on, life after life: resume from the last checkpoint, train, save every other step,
until a rank is killed. Every loss of every life is that of the same step of a run that nobody
disturbed, to the bit. What a kill has left is seen by the life after it.

A rank notes what it is doing in a file of one byte, which outlives it: some kills must have hit
K-FAC's part of a step, or a save.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from ds_kfac.step import proving
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, micro_batches, patched
from tests.ranks import start_ranks

pytestmark = pytest.mark.distributed
KILLED = -signal.SIGALRM
"""The exit code of a rank that the kernel's own timer has killed, whatever the rank was doing: to
the microsecond, and nothing of it runs any more then."""
KILLS = int(os.environ.get("KILLS", "20"))
"""Of each job."""
PLACES = {b"E": "elsewhere", b"K": "in K-FAC's step", b"S": "in a save"}
"""What a rank may be doing, by the byte that it notes."""
STEPS, EVERY, WORLD = 60, 2, 2
PATIENCE, GRACE = 120.0, 15.0
"""Seconds without any progress after which a life hangs; and once a rank is dead."""
KFAC = {
    "factor": {"update_interval": 1},
    "eigenbasis": {"refresh_interval": 3},
    "burn_in": {"steps": 0},
}
CORRECTED = {**KFAC, "preconditioner": {"eigenvalues": "corrected"}}
WAITS = {"step": (2, 3), "refresh": (1, 2), "save": (1, 2)}
"""Phase -> the first of a life that may be hit, counted from 0, and of how many."""


@dataclass(frozen=True)
class Life:
    """What the ranks are given: the job, and which of them dies: so many steps, refreshes or saves
    into this life. ``tag``: of every save, or DeepSpeed's."""

    mode: str
    kfac: dict
    tag: str | None
    victim: int = -1
    phase: str = ""
    wait: int = 0
    delay: float = 0.0


@pytest.mark.parametrize(
    ("mode", "kfac", "tag"),
    [
        ("adam-z2", KFAC, None),
        ("z0", CORRECTED, None),
        ("adam-z3-bf16", KFAC, None),
        ("adam-z3", KFAC, "only"),
    ],
)
def test_a_job_whose_ranks_are_killed_has_the_losses_of_an_unbroken_one(mode, kfac, tag, tmp_path):
    """Only a save over a whole one, of the same tag, can leave one that is refused."""
    dice, places, saves = random.Random(mode), Counter(), tmp_path / "saves"
    unbroken = live(Life(mode, kfac, tag), tmp_path / "unbroken", tmp_path / "saves of unbroken")
    assert unbroken["ended"] and not unbroken["errors"], unbroken
    phases = ("save",) if tag else tuple(WAITS)
    saved = 0
    for number in range(3 * KILLS):
        phase = phases[number % len(phases)]
        first, count = WAITS[phase]
        delay = dice.random() * unbroken["seconds"][phase]
        wait = first + dice.randrange(count)
        enough = places.total() == KILLS  # the last life looks at what the last kill has left
        victim = -1 if enough else dice.randrange(WORLD)
        life = Life(mode, kfac, tag, victim, phase, wait, delay)
        lived = live(life, tmp_path / f"life{number}", saves)
        if tag and lived["errors"] and not lived["begun"]:
            print("refused:", lived["errors"][0])
            lived["ended"] = True
        else:
            check(lived, unbroken["losses"], saved)
            saved = max(lived["saved"], *lived["begun"])
        if enough:
            break
        if lived["killed"]:
            places[lived["place"]] += 1
        if lived["ended"]:  # through before its time came: from the start again
            shutil.rmtree(saves, ignore_errors=True)
            saved = 0
    print(places)
    assert places.total() == KILLS and places[PLACES[b"S" if tag else b"K"]], places


def check(lived: dict, expected: dict[int, list[str]], saved: int) -> None:
    """A life, by what it began with, its losses and how the other ranks took a kill."""
    assert not lived["hung"], "a rank waits for ever"
    assert lived["killed"] or not lived["errors"], lived["errors"]
    assert len(set(lived["begun"])) == 1 and lived["begun"][0] >= saved, (lived["begun"], saved)
    for step, losses in lived["losses"].items():
        assert set(losses) <= set(expected[step]), (step, losses, expected[step])


def live(life: Life, folder: Path, saves: Path) -> dict:
    """One start of the job's ranks until they end or die."""
    folder.mkdir()
    payload = life, saves, folder
    target = "tests.campaign.test_kills:work"
    ranks = start_ranks(target, world=WORLD, payload=payload, folder=folder)
    hung, progress, size = False, time.monotonic(), -1
    while any(process.is_alive() for process in ranks) and not hung:
        now, written = time.monotonic(), sum(path.stat().st_size for path in folder.glob("said*"))
        if written != size:
            size, progress = written, now
        patience = GRACE if any(process.exitcode for process in ranks) else PATIENCE
        hung = now - progress > patience
        time.sleep(0.01)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    said: dict[str, list] = {key: [] for key in ("begun", "loss", "took", "saved", "error")}
    for path in folder.glob("said*"):
        for line in path.read_text().split("\n")[:-1]:  # the last may be half written
            key, fact = json.loads(line)
            said[key].append(fact)
    losses: dict[int, list[str]] = {}
    for step, loss in said["loss"]:
        losses.setdefault(step, []).append(loss)
    took = {phase: [t for of, t in said["took"] if of == phase] for phase in WAITS}
    where = folder / f"where{life.victim}"
    noted = where.read_bytes() if where.exists() else b""
    return {
        "killed": KILLED in codes,
        "hung": hung,
        "ended": codes == [0] * WORLD,
        "losses": losses,
        "place": PLACES[noted or b"E"],
        "begun": said["begun"],
        "saved": max(said["saved"], default=0),
        "errors": said["error"],
        "seconds": {phase: median(times) for phase, times in took.items() if times},
    }


def work(payload: tuple[Life, Path, Path]) -> None:
    """A life of one rank."""
    life, saves, folder = payload
    proving.RAISES = False  # as for users
    rank = int(os.environ["RANK"])
    file = (folder / f"said{rank}").open("a", buffering=1)

    def say(key: str, fact) -> None:
        print(json.dumps([key, fact]), file=file)

    try:
        train(life, saves, rank, folder / f"where{rank}", say)
    except Exception as error:
        say("error", f"rank {rank}: {type(error).__name__}: {error}"[:600])
        raise


def train(life: Life, saves: Path, rank: int, where: Path, say) -> None:
    mode, counts = BY_NAME[life.mode], Counter()
    with patched(mode):
        engine = build(mode, 1, kfac=life.kfac)
        if (saves / "latest").exists():
            engine.load_checkpoint(str(saves))
    say("begun", engine.global_steps)
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

    for step in range(engine.global_steps, STEPS):
        refreshes = any(kfac.due.refresh for kfac in engine.kfac.job.preconditioners)
        phase = "refresh" if refreshes else "step"
        start = 0.0 if refreshes else begin(phase)
        for x, y in micro_batches(step, 1):
            loss = engine(x.to(engine.get_data_types()[0]), y)
            engine.backward(loss)
            start = begin(phase) if refreshes else start
            engine.step()
        say("took", [phase, time.perf_counter() - start])
        assert counts["K-FAC"] == counts["step"] + counts["refresh"], counts
        say("loss", [step, f"{rank}:{float(loss.detach()).hex()}"])
        if (step + 1) % EVERY == 0:
            start = begin("save")
            with noting(b"S"):
                engine.save_checkpoint(str(saves), tag=life.tag)
            say("took", ["save", time.perf_counter() - start])
            say("saved", step + 1)
