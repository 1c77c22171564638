"""The benchmark of the CPU ops runs, and prints no time of a wrong result."""

import csv
import sys

import pytest
import torch

from benchmarks import kernels_cpu, refresh_cpu
from ds_kfac.ops import backends


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(kernels_cpu, "FACTOR_SIDES", (5,))
    monkeypatch.setattr(kernels_cpu, "LAYER_SIDES", {"tiny": (3, 7)})
    monkeypatch.setattr(kernels_cpu, "ADAM_SHAPES", ((3, 5),))
    monkeypatch.setattr(kernels_cpu, "ROWS", 9)
    monkeypatch.setattr(sys, "argv", ["kernels_cpu"])
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    backends.use(None, "cpu")


def test_every_case_has_a_row_per_contestant(monkeypatch, tmp_path, capsys):
    out = tmp_path / "new" / "table.csv"
    monkeypatch.setattr(sys, "argv", ["kernels_cpu", "--seconds", "0.01", "--clock", "cpu", "--out", str(out)])
    kernels_cpu.main()
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["contestant"] for row in rows} == {"ours", "indexed", "kept dense", "product alone", "passes"}
    assert all(int(row["times"]) >= 5 and float(row["milliseconds"]) >= 0 for row in rows)


def test_refreshes_are_timed_once_they_agree(monkeypatch, tmp_path):
    out = tmp_path / "refresh.csv"
    monkeypatch.setattr(refresh_cpu, "SIDES", (7,))
    monkeypatch.setattr(sys, "argv", ["refresh_cpu", "--seconds", "0.01", "--out", str(out)])
    refresh_cpu.main()
    with out.open() as file:
        assert [row["contestant"] for row in csv.DictReader(file)] == ["ours", "eigh"]
    monkeypatch.setattr(refresh_cpu, "DAMPING", {"damping": 0.1, "damping_kind": "tikhonov"})
    with pytest.raises(SystemExit, match="refresh 7: results differ"):
        refresh_cpu.main()


def test_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(kernels_cpu, "packed_factor", lambda *_: None)
    with pytest.raises(SystemExit, match="factor path 5: results differ"):
        kernels_cpu.main()
