"""Every line of the table of mutants can be run: its text stands once in its file, and its tests
exist.

`make test` runs this, so that a change which renames what a mutant quotes does not lose the mutant.
"""

import ast
import os
from pathlib import Path

import pytest

from tests.campaign import mutant_table, mutants
from tests.campaign.mutant_table import MUTANTS
from tests.ranks import run_ranks


def test_every_mutant_changes_one_place():
    for mutant in MUTANTS:
        text = (mutants.ROOT / "ds_kfac" / mutant.file).read_text()
        assert text.count(mutant.old) == 1, (mutant.name, mutant.file, mutant.old)


def test_no_mutants_are_lost_under_a_key_that_is_there_twice():
    written = ast.parse(Path(mutant_table.__file__).read_text())
    (rows,) = (node for node in ast.walk(written) if isinstance(node, ast.Dict))
    assert len(rows.keys) == len(mutant_table._ROWS)


def test_the_tests_of_every_mutant_exist():
    named = sorted({test for mutant in MUTANTS for test in mutant.tests.split()})
    run_ranks("tests.campaign.test_mutants:collect", world=1, payload=named)


def collect(named: list[str]) -> None:
    """In a rank, because that is forked from a process which has imported what tests import."""
    os.chdir(mutants.ROOT)
    assert pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *named]) == 0
