"""The run of the mutants tells a killed one from one that nobody noticed."""

import subprocess
import sys

from tests.campaign import mutants

TESTS = "tests/ops/test_calls.py::test_torch[functional-ema_update_]"


def test_a_wrong_line_is_killed_and_a_right_one_survives(tmp_path):
    """In a process of its own: a fork must not have imported what it is to import changed."""
    script = f"""
import tests.libraries
from pathlib import Path
from tests.campaign.mutants import Mutant, copy, outcome
tree = Path({str(tmp_path / "tree")!r})
copy(tree)
old = "(sum_P / count.clamp(min=1))"
for new in ("(sum_P / 1)", "((sum_P / count.clamp(min=1)))"):
    print(outcome(tree, Mutant("", "ops/functional.py", old, new, {TESTS!r}))[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=mutants.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split()[-2:] == ["killed", "SURVIVED"], done.stdout + done.stderr[-2000:]
