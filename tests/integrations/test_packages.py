"""The five examples with real packages: every cell of the table in docs/howto/frameworks.md is one
of these runs."""

from importlib.util import find_spec

import pytest

from tests.integrations.runs import CELLS, EXAMPLES, MODES
from tests.ranks import ROOT, run_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_resumes_evaluates_and_logs(name, tmp_path):
    for package in EXAMPLES[name][1]:
        if not find_spec(package):
            pytest.skip(f"{package} is not installed: pip install ds_kfac[integrations]")
    payload = (name, str(tmp_path), list(MODES))
    results = run_ranks("tests.integrations.runs:worker", world=2, payload=payload, timeout=900)
    for mode, (straight, resumed, cells) in results[0].items():
        assert all(cells[cell] for cell in CELLS), f"ZeRO {mode}: {cells}\n{straight}\n{resumed}"
        assert straight["unfit"] == resumed["unfit"] == (["lm_head"] if name == "TRL DPO" else [])


def test_the_table_in_the_docs_claims_what_is_tested():
    text = (ROOT / "docs/howto/frameworks.md").read_text()
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.count("|") == 8
    ]
    modes = "; ".join(MODES)
    assert rows[0][3:] == list(CELLS) and len(rows) == 2 + len(EXAMPLES)
    for row in rows[2:]:
        packages = [package.split()[0] for package in row[1].split(", ")]
        assert packages == list(EXAMPLES[row[0]][1]) and row[2:] == [
            modes,
            *["yes"] * len(CELLS),
        ], row
