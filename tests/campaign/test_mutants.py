"""That the run of the mutants tells a killed one from one that nobody noticed."""

import os
import subprocess
import sys

import pytest

from tests.campaign import mutants
from tests.campaign.mutant_table import MUTANTS
from tests.ranks import run_ranks

TESTS = "tests/ops/test_ops_layers.py::test_ema_update_is_the_bias_corrected_average[functional]"


def test_every_mutant_changes_one_place():
    for mutant in MUTANTS:
        text = (mutants.ROOT / "ds_kfac" / mutant.file).read_text()
        assert text.count(mutant.old) == 1, (mutant.name, mutant.file, mutant.old)


def test_the_tests_of_every_mutant_exist():
    named = sorted({test for mutant in MUTANTS for test in mutant.tests.split()})
    run_ranks("tests.campaign.test_mutants:collect", world=1, payload=named)


def collect(named: list[str]) -> None:
    """In a rank, because that is forked from a process which has imported what tests import."""
    os.chdir(mutants.ROOT)
    assert pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *named]) == 0


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
