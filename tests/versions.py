"""Every tested DeepSpeed in engines with K-FAC, compared with tests/oracle.py, and the table of
docs/notes/versions.md.

    make versions                       # all; 3 minutes each on two idle cores, 7 on busy ones
    make versions ARGS="--only 0.18.9"  # this row of the table
    make versions-short                 # the oldest and the newest, a few modes

Each version is installed beside the environment's own, into .venv/deepspeed/<version>.
transformers' Trainer is that of .venv/integrations.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "notes" / "versions.md"
BEGIN, END = "<!-- versions: make versions -->", "<!-- end of versions -->"
ACCUMULATION = 4
GROUPS: dict[str, tuple[str, ...]] = {
    "ZeRO 0": ("z0", "adam-z0", "z0-bf16", "adam-z0-bf16"),
    "ZeRO 1": ("z1", "adam-z1", "z1-bf16", "adam-z1-bf16"),
    "ZeRO 2": ("z2", "z2-round_robin", "adam-z2", "z2-bf16", "adam-z2-bf16"),
    "ZeRO 3": ("z3", "adam-z3", "z3-bf16", "adam-z3-bf16"),
    "fp16": tuple(f"{kind}z{stage}-fp16" for stage in range(4) for kind in ("", "adam-")),
    "autocast": tuple(
        f"{kind}z{stage}-autocast_bfloat16" for stage in range(4) for kind in ("", "adam-")
    ),
    "fp32 accumulation": ("z1-bf16-accum32", "z2-bf16-accum32", "z3-bf16-accum32"),
    "offload": (
        "z2-offload",
        "adam-z2-offload",
        "z2-bf16-offload",
        "z3-offload",
        "adam-z3-offload",
    ),
}
"""Column of the table -> names of tests/deepspeed/modes.py: K-FAC into AdamW (fp32) or SGD (16
bits), and KFACAdamW."""
CHECKPOINTS = ("z0", "z2", "adam-z2", "z3-bf16", "adam-z3")
COLUMNS = {
    **GROUPS,
    "pipelines": ("pipe-z0", "pipe-z1", "pipe-bf16", "pipe-adam-z0", "pipe-adam-z1"),
    "own save": CHECKPOINTS,
    "newest's save": CHECKPOINTS,
    "save in newest": CHECKPOINTS,
    "universal": ("z2", "adam-z1", "adam-z2", "adam-z3"),
    "HF Trainer": ("0", "1", "2", "3", "2 in bf16", "2 with offload"),
}
"""All of them. Of saves: a version loads its own and that of the newest tested one, and is loaded
by that."""
LACKING = {("0.17.0", "autocast")}
"""What a version has not got."""
SHORT, SHORT_SAVES = ("z0", "z2", "adam-z2", "z3-bf16"), ("adam-z2",)
Job = tuple[str, str, Sequence[str]]
"""A task, the folder that it saves to or loads from, and modes."""


def tested() -> tuple[str, ...]:
    """Versions, oldest first, as the package names them; read from its source, which needs a
    DeepSpeed to import."""
    source = (ROOT / "ds_kfac" / "zero" / "deepspeed_versions.py").read_text()
    return tuple(
        re.findall(r'"([\d.]+)"', re.search(r"^TESTED = \((.*?)\)", source, re.M | re.S)[1])
    )


def folder(name: str) -> str:
    """Where a version lies, installed if it was not; "" if it is the environment's own."""
    try:
        if version("deepspeed") == name:
            return ""
    except PackageNotFoundError:
        pass
    place = Path(sys.prefix) / "deepspeed" / name
    if not (place / "deepspeed").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--no-build-isolation", "--target", str(place), f"deepspeed=={name}"]
        subprocess.run(command, check=True, env=os.environ | {"DS_BUILD_OPS": "0"})
    return str(place)


def in_version(
    name: str, jobs: dict[str, Job], program: str = sys.executable
) -> dict[str, dict[str, Any]]:
    """What jobs found with another DeepSpeed, all in one process."""
    path = os.pathsep.join(filter(None, [folder(name), str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [program, "-m", "tests.versions", "--jobs", json.dumps(jobs)]
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    if done.returncode or not lines:
        raise SystemExit(
            f"versions: deepspeed {name} did not get to the end: {done.stdout[-2000:]}"
        )
    found = json.loads(lines[-1].removeprefix("result "))
    print(name, json.dumps(found), file=sys.stderr, flush=True)
    return found


def ran(names: Sequence[str], place: Path, short: bool) -> dict[str, dict[str, dict[str, str]]]:
    """Version -> column -> mode -> "" where it did as it should, else what happened.

    Args:
        place: an empty folder for saves.
        short: a few modes; nothing of pipelines, universal checkpoints and transformers.
    """
    groups, saves = ({"short": SHORT}, SHORT_SAVES) if short else (GROUPS, CHECKPOINTS)
    newest, results, losses = tested()[-1], {}, {}
    for name in dict.fromkeys((newest, *names)):  # whose save the others load
        own, save = str(place / name), {"saved": ("saved", str(place / name), saves)}
        if name not in names:
            losses[name] = in_version(name, save)["saved"]
            continue
        jobs = {
            column: ("equal", "", modes)
            for column, modes in groups.items()
            if (name, column) not in LACKING
        }
        jobs |= {**save, "own save": ("loaded", own, saves)}
        jobs["newest's save"] = ("loaded", str(place / newest), saves)
        if not short:
            jobs["pipelines"] = ("piped", "", COLUMNS["pipelines"])
            jobs["universal"] = ("converted", f"{own}/universal", COLUMNS["universal"])
        results[name] = found = in_version(name, jobs)
        losses[name] = found.pop("saved")
        for column, saver in (("own save", name), ("newest's save", newest)):
            found[column] = gone_on(losses[saver], found[column])
        if not short:
            job = {"HF Trainer": ("trained", f"{own}/trainer", COLUMNS["HF Trainer"])}
            found |= in_version(name, job, f"{sys.prefix}/integrations/bin/python")
    back = in_version(newest, {name: ("loaded", str(place / name), saves) for name in names})
    for name, found in results.items():
        found["save in newest"] = gone_on(losses[name], back[name])
    return results


def gone_on(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, str]:
    """Mode -> "" where a run that loaded a save goes on as the saver did."""
    problems = {}
    for mode, losses in found.items():
        told = [each for each in (expected[mode], losses) if not isinstance(each, list)]
        # losses of some tenths, of fp32 sums in other orders; in bf16 of roundings that may fall on
        # the other side
        close = 2e-3 if "bf16" in mode else 1e-5
        if told:
            problems[mode] = told[0]
        elif all(abs(a - b) < close for a, b in zip(expected[mode], losses, strict=True)):
            problems[mode] = ""
        else:
            problems[mode] = f"losses {losses}, of the saver {expected[mode]}"
    return problems


def here(task: str, place: str, modes: Sequence[str]) -> dict[str, Any]:
    """Of the DeepSpeed that this process imports: mode -> what the task returns, or its error.
    Modes that did not get to the end together run one by one."""
    from tests.ranks import run_ranks

    Path(place or ".").mkdir(parents=True, exist_ok=True)
    target, timeout = f"tests.versions:{task}", 120 + 60 * len(modes)
    try:
        if task == "converted":
            return converted(place, modes)
        ranks = run_ranks(target, world=2, payload=(modes, place), timeout=timeout)
        return {mode: next((found[mode] for found in ranks if found[mode]), "") for mode in modes}
    except AssertionError as problem:
        if len(modes) > 1:
            return {mode: here(task, place, [mode])[mode] for mode in modes}
        print(problem, file=sys.stderr)
        lines = re.findall(r"^\S*(?:Error|Exception)\b.*", str(problem), re.M)
        return {modes[0]: lines[-1] if lines else "a rank died"}


def equal(payload: tuple[list[str], str]) -> dict[str, str]:
    """Trained weights against the reference, within what rounding may do; on rank 0."""
    from tests.deepspeed.runs import compare

    found = compare([(mode, ACCUMULATION) for mode in payload[0]])
    return {
        mode: ""
        if result["difference"] <= result["bound"]
        else f"weights differ by {result['difference']:.1e}"
        for (mode, _), result in found.items()
    }


def piped(payload: tuple[list[str], str]) -> dict[str, str]:
    """As :func:`equal`, of this rank's stage of a pipeline."""
    from tests.deepspeed.parallel import assert_trained_alike
    from tests.deepspeed.test_pipeline import PIPELINES

    cases, found = {mode.name: (stages, mode) for stages, mode in reversed(PIPELINES)}, {}
    for name in payload[0]:
        try:
            assert_trained_alike(*cases[name])
            found[name] = ""
        except AssertionError as error:
            found[name] = f"weights differ: {error}"
    return found


def saved(payload: tuple[list[str], str]) -> dict[str, list[float]]:
    """Modes -> losses of 4 steps after 5 and a save into a folder."""
    return {name: losses_after(name, f"{payload[1]}/{name}", loads=False) for name in payload[0]}


def loaded(payload: tuple[list[str], str]) -> dict[str, list[float]]:
    """The same of an engine that has loaded that save."""
    return {name: losses_after(name, f"{payload[1]}/{name}", loads=True) for name in payload[0]}


def losses_after(name: str, save: str, *, loads: bool) -> list[float]:
    from tests.deepspeed.modes import BY_NAME
    from tests.deepspeed.runs import build, patched, train

    with patched(BY_NAME[name]):
        if loads:
            engine = build(BY_NAME[name], 1, seed=99)
            engine.load_checkpoint(save)
        else:
            engine = build(BY_NAME[name], 1)
            train(engine, 1, steps=5)
            engine.save_checkpoint(save)
        losses = train(engine, 1, steps=4, first=5)
    engine.destroy()
    return losses


def converted(place: str, modes: Sequence[str]) -> dict[str, str]:
    """Saved on two ranks, made universal, loaded on one."""
    from tests.deepspeed.test_checkpoint import UNIVERSAL, save_and_load

    save_and_load(Path(place), [case for case in UNIVERSAL if case.saved in modes])
    return dict.fromkeys(modes, "")


def trained(payload: tuple[list[str], str]) -> dict[str, str]:
    """transformers' Trainer: it trains, resumes, evaluates and logs."""
    from tests.integrations.runs import worker

    found = worker(("transformers Trainer", payload[1], payload[0]))
    failed = {
        mode: [cell for cell, well in cells.items() if not well]
        for mode, (_, _, cells) in found.items()
    }
    return {mode: f"not: {', '.join(cells)}" if cells else "" for mode, cells in failed.items()}


# the table


def cell(found: dict[str, str]) -> str:
    """Of a column: how many modes ran, and the names of the others."""
    if not found:
        return "-"
    wrong = [mode for mode, problem in found.items() if problem]
    names = f": not {', '.join(wrong)}" if wrong else ""
    return f"{len(found) - len(wrong)} of {len(found)}{names}"


def rows() -> dict[str, str]:
    """Version -> its line in the document."""
    lines = DOCUMENT.read_text().split(BEGIN)[1].split(END)[0].split("\n")
    return {line.split()[1]: line for line in lines if line.startswith("| ") and line[2].isdigit()}


def table(results: dict[str, dict[str, dict[str, str]]], others: dict[str, str]) -> str:
    """Markdown; results by version, and lines of others."""
    new = {
        name: [name, *(cell(found.get(column, {})) for column in COLUMNS)]
        for name, found in results.items()
    }
    head = [["deepspeed", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    lines = others | {name: f"| {' | '.join(row)} |" for name, row in new.items()}
    return "\n".join(
        [f"| {' | '.join(row)} |" for row in head]
        + [lines[name] for name in tested() if name in lines]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="versions; the other rows of the table stay")
    parser.add_argument(
        "--short", action="store_true", help="the oldest and the newest, a few modes"
    )
    parser.add_argument("--jobs", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.jobs:
        found = {name: here(*job) for name, job in arguments.jobs.items()}
        print("result", json.dumps(found), flush=True)
        return
    names = arguments.only or tested()
    if arguments.short:
        names = (tested()[0], tested()[-1])
    with tempfile.TemporaryDirectory() as place:
        results = ran(names, Path(place), arguments.short)
    problems = [
        f"deepspeed {name}, {column}, {mode}: {problem}"
        for name, found in results.items()
        for column, modes in found.items()
        for mode, problem in modes.items()
        if problem
    ]
    print("\n".join(problems) or "all equal")
    if arguments.short:
        sys.exit(bool(problems))
    before, rest = DOCUMENT.read_text().split(BEGIN)
    text = table(results, rows() if arguments.only else {})
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
