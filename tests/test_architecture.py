"""The rules of the layout that a machine can check: imports go down, no circles."""

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent.parent / "ds_kfac"
FLOORS = (
    "ops",
    "curvature",
    "schedule",
    "model",
    "update",
    "assignment",
    "comm",
    "zero",
    "lr_schedulers",
    "config",
    "plan",
    "directions",
    "step",
    "diagnostics",
    "checkpoint",
    "factors",
    "engine",
    "estimate",
    "integrations",
)
"""Folders, lowest first: a file imports files of its own folder and of those before it."""
ANYWHERE = {"log", "metrics"}
WITHOUT_RANKS = FLOORS[: FLOORS.index("comm")]
FOREIGN = r"(deepspeed|torch\.distributed)\b"
FILES = {path.relative_to(PACKAGE): path for path in PACKAGE.rglob("*.py")}
INSIDE = {name: path for name, path in FILES.items() if len(name.parts) > 1}


def imports(path: Path) -> set[str]:
    """Full names of what a file imports; ``from package import module`` counts as the module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def our_files(path: Path) -> set[Path]:
    """The files of the package that a file imports."""
    found = {
        Path(*target.split(".")[1:]) for target in imports(path) if target.startswith("ds_kfac.")
    }
    return {
        file
        for name in found
        for file in (name.with_suffix(".py"), name / "__init__.py")
        if file in FILES
    }


def circle(arrows: Mapping[Any, Iterable[Any]]) -> list[str]:
    """What is left when everything that imports nothing of what is left has been taken away:
    nothing, or circles."""
    left = {name: set(targets) - {name} for name, targets in arrows.items()}
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    return sorted(map(str, left))


def test_every_folder_has_a_floor_and_imports_go_down():
    assert {name.parts[0] for name in INSIDE} == set(FLOORS)
    for name, path in INSIDE.items():
        floor = FLOORS.index(name.parts[0])
        for target in imports(path):
            folder = target.removeprefix("ds_kfac.").split(".")[0]
            if target.startswith("ds_kfac.") and folder not in ANYWHERE:
                assert FLOORS.index(folder) <= floor, f"{name} imports {target}, above it"


def test_no_circle_of_files_or_folders():
    arrows = {name: our_files(path) for name, path in FILES.items()}
    assert circle(arrows) == []
    folders: dict[str, set[str]] = {}
    for name in INSIDE:
        folders.setdefault(name.parts[0], set()).update(target.parts[0] for target in arrows[name])
    assert circle(folders) == []
    assert circle({"a": ["b"], "b": ["a"], "c": ["a"], "d": []}) == ["a", "b", "c"]


def test_the_mathematics_knows_neither_deepspeed_nor_ranks():
    """Nor does a file that it imports, or one that this imports."""
    left = [name for name in INSIDE if name.parts[0] in WITHOUT_RANKS]
    reached = set(left)
    while left:
        file = left.pop()
        foreign = [t for t in imports(FILES[file]) if re.match(FOREIGN, t)]
        assert not foreign, f"the mathematics reaches {file}, which imports {foreign}"
        new = our_files(FILES[file]) - reached
        reached |= new
        left += new


def test_reference_stands_alone():
    names = {target.split(".")[0] for target in imports(PACKAGE / "reference.py")}
    assert names == {"torch", "typing"}
