"""That the run of the mutants tells a killed one from one that nobody noticed."""

import subprocess
import sys

from tests.campaign import mutants
from tests.campaign.mutant_table import MUTANTS

TESTS = "tests/ops/test_ops_layers.py::test_ema_update_is_the_bias_corrected_average[functional]"


def test_every_mutant_changes_one_place():
    for mutant in MUTANTS:
        text = (mutants.ROOT / "ds_kfac" / mutant.file).read_text()
        assert text.count(mutant.old) == 1, (mutant.name, mutant.file, mutant.old)


def test_the_tests_of_every_mutant_exist():
    named = sorted({test for mutant in MUTANTS for test in mutant.tests.split()})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *named]
    done = subprocess.run(command, cwd=mutants.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


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
    done = subprocess.run([sys.executable, "-c", script], cwd=mutants.ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split()[-2:] == ["killed", "SURVIVED"], done.stdout + done.stderr[-2000:]
