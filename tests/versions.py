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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
    "resumed": ("z0", "z2", "adam-z2", "adam-z3"),
}
"""Column of the table -> names of tests/deepspeed/modes.py: K-FAC into AdamW (fp32) or SGD (16 bits), and KFACAdamW."""
SHORT = {"ZeRO 0": ("z0",), "ZeRO 2": ("z2", "adam-z2"), "ZeRO 3": ("z3-bf16",), "resumed": ("adam-z2",)}


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


def ran(name: str, groups: dict[str, tuple[str, ...]]) -> dict[str, dict[str, str]]:
    """Column -> mode -> "" where it trained as the reference, else what happened; in processes of its own."""
    path = os.pathsep.join(filter(None, [folder(name), str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.versions", "--here", json.dumps(groups)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    if done.returncode or not lines:
        raise SystemExit(f"versions: deepspeed {name} did not get to the end: {done.stdout[-2000:]}")
    return json.loads(lines[-1].removeprefix("result "))


def here(groups: dict[str, tuple[str, ...]]) -> dict[str, dict[str, str]]:
    """What :func:`ran` says, of the DeepSpeed that this process imports."""
    results = {}
    for column, modes in groups.items():
        target = "resumed" if column == "resumed" else "equal"
        found = _run(target, list(modes))
        if len(modes) > 1:
            found = {mode: found[mode] or _run(target, [mode])[mode] for mode in modes} if found else {}
        results[column] = found or {mode: _run(target, [mode])[mode] for mode in modes}
        print(column, results[column], file=sys.stderr, flush=True)
    return results


def _run(target: str, modes: list[str]) -> dict[str, str]:
    """{} if several modes did not get to the end together."""
    from tests.ranks import run_ranks

    try:
        return run_ranks(f"tests.versions:{target}", world=2, payload=modes)[0]
    except AssertionError as problem:
        if len(modes) > 1:
            return {}
        print(problem, file=sys.stderr)
        lines = [line for line in str(problem).splitlines() if re.match(r"\S*(Error|Exception)\b", line)]
        return {modes[0]: lines[-1] if lines else "a rank died"}


def equal(modes: list[str]) -> dict[str, str]:
    """Trained weights against the reference, within what rounding may do; on rank 0."""
    from tests.deepspeed.runs import compare

    found = compare([(mode, ACCUMULATION) for mode in modes])
    return {
        mode: "" if result["difference"] <= result["bound"] else f"weights differ by {result['difference']:.1e}"
        for (mode, _), result in found.items()
    }


def resumed(modes: list[str]) -> dict[str, str]:
    """5 steps, a save, 4 steps: in one engine, and the last 4 in another one that has loaded the save."""
    import tempfile

    import torch.distributed as dist

    from tests.deepspeed.modes import BY_NAME
    from tests.deepspeed.runs import build, patched, train

    results = {}
    for name in modes:
        mode, place = BY_NAME[name], [tempfile.mkdtemp()]
        dist.broadcast_object_list(place)
        with patched(mode):
            first = build(mode, 1)
            train(first, 1, steps=5)
            first.save_checkpoint(place[0])
            expected = train(first, 1, steps=4, first=5)
            second = build(mode, 1, seed=99)
            second.load_checkpoint(place[0])
            losses = train(second, 1, steps=4, first=5)
        results[name] = "" if losses == expected else f"losses {losses}, without a stop {expected}"
        first.destroy()
        second.destroy()
    return results


# the table


def cell(found: dict[str, str]) -> str:
    """Of a column: how many modes ran, and the names of the others."""
    wrong = [mode for mode, problem in found.items() if problem]
    return f"{len(found) - len(wrong)} of {len(found)}" + (f": not {', '.join(wrong)}" if wrong else "")


def table(results: dict[str, dict[str, dict[str, str]]]) -> str:
    """Markdown; results by version."""
    rows = [f"| deepspeed | {' | '.join(GROUPS)} |", "|---" * (1 + len(GROUPS)) + "|"]
    rows += [f"| {name} | {' | '.join(cell(found[column]) for column in GROUPS)} |" for name, found in results.items()]
    return "\n".join(rows)


def write(text: str, document: Path = DOCUMENT) -> None:
    """Between the two marks of the document."""
    before, rest = document.read_text().split(BEGIN)
    document.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="versions; the table is printed, not written")
    parser.add_argument("--short", action="store_true", help="the oldest and the newest, a few modes")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print("result", json.dumps(here(json.loads(arguments.here))), flush=True)
        return
    names = tested()
    names, groups = ((names[0], names[-1]), SHORT) if arguments.short else (arguments.only or names, GROUPS)
    results = {name: ran(name, groups) for name in names}
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
