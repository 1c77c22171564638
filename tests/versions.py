"""Every tested DeepSpeed in engines with K-FAC, compared with tests/oracle.py, and the table of docs/supported.md.

    make versions                       # all; a minute or two each
    make versions-short                 # the oldest and the newest, a few modes
    python -m tests.versions --only 0.18.9

Each version is installed beside the environment's own, into .venv/deepspeed/<version>.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "supported.md"
BEGIN, END = "<!-- versions: make versions -->", "<!-- end of versions -->"
ACCUMULATION = 4
GROUPS: dict[str, tuple[str, ...]] = {
    "ZeRO 0": ("z0", "adam-z0", "z0-bf16"),
    "ZeRO 1": ("z1", "adam-z1", "z1-bf16"),
    "ZeRO 2": ("z2", "z2-round_robin", "adam-z2", "z2-bf16"),
    "ZeRO 3": ("z3", "adam-z3", "z3-bf16"),
    "offload": ("z2-offload", "z3-offload", "adam-z3-offload"),
    "fp32 accumulation": ("z1-bf16-accum32", "z2-bf16-accum32", "z3-bf16-accum32"),
    "fp16": ("z0-fp16", "z2-fp16", "z3-fp16"),
}
"""Column of the table -> names of tests/deepspeed/modes.py: K-FAC into AdamW (fp32) or SGD (16 bits), and KFACAdamW."""
CHECKPOINTS = ("z0", "z2", "adam-z2", "adam-z3")
SHORT, SHORT_SAVES = ("z0", "z2", "adam-z2", "z3-bf16"), ("adam-z2",)
COLUMNS = (*GROUPS, "own save", "newest's save", "save in newest")
"""Of the table. The last three: which saves go on where they are loaded; it loads its own, that of the newest tested
version, and is loaded by that."""


def tested() -> tuple[str, ...]:
    """Versions, oldest first, as the package names them; read from its source, which needs a DeepSpeed to import."""
    source = (ROOT / "ds_kfac" / "zero" / "deepspeed_versions.py").read_text()
    return tuple(re.findall(r'"([\d.]+)"', re.search(r"^TESTED = \((.*?)\)", source, re.M | re.S)[1]))


def folder(name: str) -> str:
    """Where a version lies, installed if it was not; "" if it is the environment's own."""
    try:
        if version("deepspeed") == name:
            return ""
    except PackageNotFoundError:
        pass
    place = Path(sys.prefix) / "deepspeed" / name
    if not (place / "deepspeed").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--target", str(place), f"deepspeed=={name}"], check=True,
                       env=os.environ | {"DS_BUILD_OPS": "0"})  # fmt: skip
    return str(place)


def in_version(name: str, *arguments: str) -> Any:
    """What ``python -m tests.versions`` says with another DeepSpeed."""
    path = os.pathsep.join(filter(None, [folder(name), str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.versions", *arguments]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    if done.returncode or not lines:
        raise SystemExit(f"versions: deepspeed {name} did not get to the end: {done.stdout[-2000:]}")
    return json.loads(lines[-1].removeprefix("result "))


def ran(name: str, newest: str) -> dict[str, dict[str, str]]:
    """Column -> mode -> "" where it did as it should, else what happened."""
    found = {}
    pairs = {"own save": (name, name), "newest's save": (newest, name), "save in newest": (name, newest)}
    for column, modes in GROUPS.items():
        found[column] = in_version(name, "--task", "equal", "", *modes)
        print(name, column, json.dumps(found[column]), file=sys.stderr, flush=True)
    for column, (saver, loader) in pairs.items():
        if column == "own save" or name != newest:
            found[column] = checkpoints(saver, loader, CHECKPOINTS)
            print(name, column, json.dumps(found[column]), file=sys.stderr, flush=True)
    return found


def here(task: str, place: str, modes: list[str]) -> dict[str, Any]:
    """Of the DeepSpeed that this process imports: mode -> what the task returns, or its error."""
    found = _run(task, place, modes)
    return found or {mode: _run(task, place, [mode])[mode] for mode in modes}


def _run(task: str, place: str, modes: list[str]) -> dict[str, Any]:
    """{} if several modes did not get to the end together."""
    from tests.ranks import run_ranks

    try:
        return run_ranks(f"tests.versions:{task}", world=2, payload=(modes, place))[0]
    except AssertionError as problem:
        if len(modes) > 1:
            return {}
        print(problem, file=sys.stderr)
        lines = [line for line in str(problem).splitlines() if re.match(r"\S*(Error|Exception)\b", line)]
        return {modes[0]: lines[-1] if lines else "a rank died"}


def equal(payload: tuple[list[str], str]) -> dict[str, str]:
    """Trained weights against the reference, within what rounding may do; on rank 0."""
    from tests.deepspeed.runs import compare

    found = compare([(mode, ACCUMULATION) for mode in payload[0]])
    return {
        mode: "" if result["difference"] <= result["bound"] else f"weights differ by {result['difference']:.1e}"
        for (mode, _), result in found.items()
    }


def saved(payload: tuple[list[str], str]) -> dict[str, list[float]]:
    """Modes -> losses of 4 steps after 5 and a save into a folder."""
    from tests.deepspeed.modes import BY_NAME
    from tests.deepspeed.runs import build, patched, train

    results = {}
    for name in payload[0]:
        with patched(BY_NAME[name]):
            engine = build(BY_NAME[name], 1)
            train(engine, 1, steps=5)
            engine.save_checkpoint(f"{payload[1]}/{name}")
            results[name] = train(engine, 1, steps=4, first=5)
        engine.destroy()
    return results


def loaded(payload: tuple[list[str], str]) -> dict[str, list[float]]:
    """The same of an engine that has loaded that save."""
    from tests.deepspeed.modes import BY_NAME
    from tests.deepspeed.runs import build, patched, train

    results = {}
    for name in payload[0]:
        with patched(BY_NAME[name]):
            engine = build(BY_NAME[name], 1, seed=99)
            engine.load_checkpoint(f"{payload[1]}/{name}")
            results[name] = train(engine, 1, steps=4, first=5)
        engine.destroy()
    return results


def checkpoints(saver: str, loader: str, modes: tuple[str, ...]) -> dict[str, str]:
    """Mode -> "" where a run that loads another version's save goes on as that, else what happened."""
    with tempfile.TemporaryDirectory() as place:
        expected, found = (
            in_version(name, "--task", task, place, *modes) for name, task in ((saver, "saved"), (loader, "loaded"))
        )
    problems = {}
    for mode in modes:
        told = [str(each[mode]) for each in (expected, found) if not isinstance(each[mode], list)]
        # losses of some tenths, of fp32 sums in other orders
        same = not told and all(abs(a - b) < 1e-5 for a, b in zip(expected[mode], found[mode], strict=True))
        problems[mode] = "" if same else told[0] if told else f"losses {found[mode]}, of the saver {expected[mode]}"
    return problems


# the table


def cell(found: dict[str, str]) -> str:
    """Of a column: how many modes ran, and the names of the others."""
    if not found:
        return "-"
    wrong = [mode for mode, problem in found.items() if problem]
    return f"{len(found) - len(wrong)} of {len(found)}" + (f": not {', '.join(wrong)}" if wrong else "")


def table(results: dict[str, dict[str, dict[str, str]]]) -> str:
    """Markdown; results by version."""
    rows = [("deepspeed", *COLUMNS), ("---",) * (1 + len(COLUMNS))]
    rows += [(name, *(cell(found.get(column, {})) for column in COLUMNS)) for name, found in results.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write(text: str, document: Path = DOCUMENT) -> None:
    """Between the two marks of the document."""
    before, rest = document.read_text().split(BEGIN)
    document.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="versions; the table is printed, not written")
    parser.add_argument("--short", action="store_true", help="the oldest and the newest, a few modes")
    parser.add_argument("--task", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        task, place, *modes = arguments.task
        print("result", json.dumps(here(task, place, modes)), flush=True)
        return
    oldest, newest = tested()[0], tested()[-1]
    if arguments.short:
        results = {name: {"short": in_version(name, "--task", "equal", "", *SHORT)} for name in (oldest, newest)}
        for saver, loader in ((oldest, newest), (newest, oldest)):
            results[saver][f"save in {loader}"] = checkpoints(saver, loader, SHORT_SAVES)
    else:
        results = {name: ran(name, newest) for name in arguments.only or tested()}
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
    print(table(results))
    if not arguments.only:
        write(table(results))


if __name__ == "__main__":
    main()
