"""The project's sizes, beside those of the last commit of tests/sizes.json.

    python -m tests.sizes            # print the table; what needs engines takes half a minute
    python -m tests.sizes --write    # and keep the numbers

No number here makes a test fail. A reader of a change sees what it has cost.
"""

import ast
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ds_kfac
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, micro_batches, train
from tests.ranks import run_ranks
from tests.step import test_operations

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "tests/sizes.json"
WIDTH = 100


def lines_of(folder: str, *suffixes: str) -> int:
    """Count the lines of all files below a folder that end in one of the suffixes."""
    files = (path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    return sum(len(path.read_text().splitlines()) for path in files)


def words_of(page: Path) -> int:
    """Count the words of a page of Markdown, without code blocks, links' targets and bars."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    text = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    text = re.sub(r"\]\([^)]*\)", "]", text).replace("|", " ")
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def pages_of_navigation() -> list[Path]:
    """Return the pages in the navigation of the site."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = []
    for name in re.findall(r": (\S+\.md)", navigation):
        if name == "index.md":
            pages.append(ROOT / "README.md")
        elif name.startswith("files/"):
            pages.append(ROOT / name.removeprefix("files/"))
        else:
            pages.append(ROOT / "docs" / name)
    return pages


def function_lengths() -> list[int]:
    """Return the number of lines of every function of the package, docstrings left out."""
    lengths = []
    for path in (ROOT / "ds_kfac").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                first = node.body[0]
                has_docstring = ast.get_docstring(node) is not None
                docstring = first.end_lineno - first.lineno + 1 if has_docstring else 0
                lengths.append(node.end_lineno - node.lineno + 1 - docstring)
    return sorted(lengths)


def wide_lines() -> int:
    """Count the lines of Python that are wider than 100 columns."""
    wide = 0
    for folder in ("ds_kfac", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            wide += sum(len(line) > WIDTH for line in path.read_text().splitlines())
    return wide


HOME = f"{Path(ds_kfac.__file__).parent}/"
REFRESH, CAPTURE = 8, 4
KFAC = {
    "factor": {"update_interval": CAPTURE, "decay": 0.9},
    "eigenbasis": {"refresh_interval": REFRESH},
    "burn_in": {"steps": 0},
    "report": "none",
}
Function = tuple[str, str]
"""A file, and a function in it."""


@contextmanager
def walked() -> Iterator[set[Function]]:
    """Collect the functions of ds_kfac that are called; comprehensions belong to theirs."""
    functions: set[Function] = set()

    def note(frame: Any, event: str, value: Any) -> None:
        code = frame.f_code
        is_ours = event == "call" and code.co_filename.startswith(HOME)
        if is_ours and not code.co_name.endswith(("comp>", "genexpr>")):
            functions.add((code.co_filename.removeprefix(HOME), code.co_qualname))

    sys.setprofile(note)
    try:
        yield functions
    finally:
        sys.setprofile(None)


def worker(folder: str) -> dict[str, tuple[int, int]]:
    """Map each walk to its numbers of functions and files. A walk is what one engine of two runs
    through, with ZeRO-2 and KFACAdamW.

    Args:
        folder: an empty folder for a checkpoint.
    """
    walks: dict[str, set[Function]] = {}
    engine = build(BY_NAME["adam-z2"], 1, kfac=KFAC)
    engine.kfac.detach()
    with walked() as walks["attach"]:
        ds_kfac.attach(engine, KFAC)
    # captured steps 1 and 3 prove, and begin a run
    train(engine, 1, steps=2 * REFRESH)
    # step number, counted from a refresh
    names = {0: "refreshing step", 1: "plain step", CAPTURE: "capturing step"}
    for index in range(CAPTURE + 1):
        x, y = next(iter(micro_batches(2 * REFRESH + index, 1)))
        with walked() as functions:
            engine.backward(engine(x, y))
            engine.step()
        if index in names:
            walks[names[index]] = functions
    with walked() as walks["save"]:
        engine.save_checkpoint(folder, tag="tag")
    with walked() as walks["load"]:
        engine.load_checkpoint(folder, tag="tag")
    return {name: (len(own), len({file for file, _ in own})) for name, own in walks.items()}


def measured() -> Iterator[tuple[str, float]]:
    """Yield the name and the value of each size."""
    package = ROOT / "ds_kfac"
    yield "lines: ds_kfac", lines_of("ds_kfac", ".py")
    for folder in sorted(
        path.name for path in package.iterdir() if (path / "__init__.py").exists()
    ):
        yield f"lines: ds_kfac/{folder}", lines_of(f"ds_kfac/{folder}", ".py")
    yield "lines: csrc", lines_of("csrc", ".cpp", ".cu", ".h", ".cuh")
    yield "lines: tests", lines_of("tests", ".py")
    yield "lines: benchmarks", lines_of("benchmarks", ".py", ".sh")
    yield "lines wider than 100 columns", wide_lines()
    lengths = function_lengths()
    yield "lines of a function: median", statistics.median(lengths)
    yield "lines of a function: 90 % have at most", lengths[len(lengths) * 9 // 10]
    yield "words: README.md", words_of(ROOT / "README.md")
    yield "words: navigation", sum(map(words_of, pages_of_navigation()))
    yield "words: docs", sum(map(words_of, (ROOT / "docs").rglob("*.md")))
    yield "lines: CHANGELOG.md", len((ROOT / "CHANGELOG.md").read_text().splitlines())
    with tempfile.TemporaryDirectory() as folder:
        (walks, _) = run_ranks("tests.sizes:worker", world=2, payload=folder)
        for walk, (functions, files) in walks.items():
            yield f"functions: {walk}", functions
            yield f"files: {walk}", files
    kinds = {"plain step": test_operations.PLAIN, "factor update": test_operations.UPDATE}
    for name, interval in kinds.items():
        (found,) = run_ranks("tests.step.test_operations:worker", world=1, payload=interval)
        operations, nbytes = found
        yield f"operations: {name}", operations
        yield f"bytes an element: {name}", round(nbytes, 1)


def main() -> None:
    before = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    sizes = {}
    print(f"{'':44}{'now':>9}{'before':>9}")
    for name, value in measured():
        sizes[name] = value
        print(f"{name:44}{value:9g}{before.get(name, ''):>9}")
    if "--write" in sys.argv:
        KEPT.write_text(json.dumps(sizes, indent=1) + "\n")


if __name__ == "__main__":
    main()
