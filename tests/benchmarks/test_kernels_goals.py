"""The goals of the kernels' benchmark and the sweep over SYRK configurations, without a GPU."""

import csv
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels.cases import Settings, product, product_tf32
from benchmarks.kernels.goals import GOALS, goals, goals_table
from benchmarks.kernels.report import CsvFile
from benchmarks.kernels.sweep import SIDES, fastest, pasted, sweep, sweep_table
from benchmarks.kernels.timing import Clock
from ds_kfac.ops import functional

ROOT = Path(__file__).parents[2]


def rows(op: str, size: str, **ms: float) -> list[dict]:
    return [
        {
            "op": op,
            "size": size,
            "implementation": name,
            "median_ms": value,
            "of_roofline": 0.8 / value,
            "kind": "baseline" if name.startswith("mm") else "op",
        }
        for name, value in ms.items()
    ]


def test_goals_are_judged_by_the_fastest_that_is_right():
    table = rows("syrk_accumulate_", "N 8192, D 4096", torch=2.0, triton=1.0, mm=1.71)
    table += [{**table[-1], "implementation": "mm, average, pack", "median_ms": 1.9}]
    table += [{**table[0], "implementation": "broken"}]
    del table[-1]["median_ms"]
    table += rows("symmetric_pack_into_", "GPT-2", cuda=0.9) + rows(
        "ema_update_", "GPT-2", cuda=1.0
    )
    found = {(row["op"], row["over"]): row for row in goals(table)}
    assert len(found) == 4
    assert (
        found["syrk_accumulate_", "mm"]["met"] and found["syrk_accumulate_", "mm"]["by"] == "triton"
    )
    assert not found["syrk_accumulate_", "mm, average, pack"]["met"]
    assert (
        found["symmetric_pack_into_", "roofline"]["met"]
        and not found["ema_update_", "roofline"]["met"]
    )
    page = goals_table(list(found.values()))
    assert "| N 8192, D 4096 | mm | 1.70x | 1.71x | triton | pass |" in page
    assert "| GPT-2 | roofline | 85% | 80% | cuda | **fail** |" in page


def test_a_goal_whose_implementations_are_all_wrong_is_not_met():
    (row,) = rows("ema_update_", "GPT-2", cuda=1.0)
    del row["median_ms"], row["of_roofline"]
    assert [(found["by"], found["met"]) for found in goals([row])] == [("nothing", False)]


def test_a_goal_without_what_it_is_measured_against_is_not_met():
    found = goals(rows("syrk_accumulate_", "N 8192, D 4096", triton=1.0, mm=2.0))
    assert [(row["over"], row["met"]) for row in found] == [
        ("mm", True),
        ("mm, average, pack", False),
    ]
    assert "| mm, average, pack | 2.00x | not timed | triton | **fail** |" in goals_table(found)


def test_every_side_of_a_syrk_has_two_goals():
    for dim in (1, 768, 2047, 2048, 4095, 4096, 11008):
        row = rows("syrk_accumulate_", f"N 8192, D {dim}", triton=1.0)[0]
        assert sorted(goal.over for goal in GOALS if goal.applies(row)) == [
            "mm",
            "mm, average, pack",
        ]


def test_the_page_of_a_run_has_the_goals(tmp_path, capsys):
    options = [
        "--device",
        "cpu",
        "--models",
        "gpt2",
        "--rows",
        "16",
        "--blocks",
        "1",
        "--max-dim",
        "768",
    ]
    options += ["--ops", "syrk_accumulate_", "--seconds", "0", "--goals", "--out", str(tmp_path)]
    assert kernels.main(options) == 0
    assert (
        "## Goals" in (tmp_path / "cpu.md").read_text()
        and "N 16, D 768 | mm |" in capsys.readouterr().out
    )


def test_fp32_rows_are_timed_next_to_tf32_and_have_no_goals(monkeypatch, capsys):
    x = torch.randn(33, 5)
    assert (
        torch.equal(product_tf32(x), product(x))
        and torch.get_float32_matmul_precision() == "highest"
    )
    with pytest.raises(SystemExit):
        kernels.main(["--device", "cuda", "--goals", "--dtype", "float32"])
    assert "--goals: they are of 16-bit rows" in capsys.readouterr().err


def test_a_sweep_needs_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: --sweep works here")
    with pytest.raises(SystemExit):
        kernels.main(["--device", "cpu", "--sweep", "syrk"])
    assert "--sweep needs a GPU" in capsys.readouterr().err


def test_a_sweep_times_what_is_right_and_names_what_is_not(tmp_path):
    def accumulate(total, x, config):
        if config == "too large":
            raise RuntimeError("out of resource: shared memory\nmore")
        functional.syrk_accumulate_(total, x)
        if config == "wrong":
            total[0] += 1000

    settings = Settings("cpu", rows=8, blocks=1, max_dim=128, dtype=torch.float32)
    found = sweep(
        Clock("cpu"),
        settings,
        ["a", "wrong", "too large"],
        accumulate,
        0.0,
        CsvFile(tmp_path / "rows.csv"),
    )
    assert (tmp_path / "rows.csv").read_text().count(
        "RuntimeError: out of resource: shared memory\n"
    ) == 2
    assert [(row["dim"], row["config"], "median_ms" in row) for row in found] == [
        (dim, config, config == "a") for dim in (64, 128) for config in ("a", "wrong", "too large")
    ]
    page = sweep_table(found)
    assert (
        "| wrong | **wrong** | **wrong** |" in page
        and "RuntimeError: out of resource: shared memory |" in page
    )
    assert fastest(found) == [(128, "a")]


def test_configurations_of_sm_90_are_near_the_fastest_of_the_sweep():
    """Within 10 %: those that are left are three."""
    pytest.importorskip("triton", reason="triton is not installed: its configurations are not read")
    from ds_kfac.ops.triton.syrk import CHOSEN

    ms: dict[int, dict[str, float]] = {}
    with (ROOT / "benchmarks/results/gpu/sweep_syrk_sm_90_bfloat16.csv").open() as file:
        for row in csv.DictReader(file):
            ms.setdefault(int(row["size"].rpartition(" ")[2]), {})[row["implementation"]] = float(
                row["median_ms"]
            )
    assert set(ms) == set(SIDES)
    for dim, of_each in ms.items():
        assert of_each[str(CHOSEN["sm_90"].at(dim))] <= 1.1 * min(of_each.values()), dim


def test_the_table_to_paste_joins_sides_and_keeps_what_is_as_fast():
    ms = {64: (1.0, 2.0), 128: (1.01, 1.0), 256: (3.0, 2.0), 512: (3.0, 2.0)}
    found = [
        {"dim": dim, "config": name, "median_ms": both["ab".index(name)]}
        for dim, both in ms.items()
        for name in "ab"
    ]
    assert fastest(found) == [(128, "a"), (512, "b")]
    pytest.importorskip("triton", reason="triton is not installed: its configurations are not read")
    from ds_kfac.ops.triton import syrk as module

    (_, first), (_, second), *_ = module.CHOSEN["sm_90"].by_side
    text = pasted("sm_90", "a GPU", [(128, first), (512, second)])
    assert eval("{" + text + "}", vars(module)) == {
        "sm_90": module.Chosen("a GPU", ((128, first), (module.LARGEST, second)))
    }
