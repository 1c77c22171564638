"""The cost model is a power law through its table; files and configs that are wrong are told apart from right ones."""

import json
import math
import time
from dataclasses import replace

import pytest

from ds_kfac import measured_costs
from ds_kfac.costs import BUILTIN, CostModel, from_dict
from ds_kfac.measured_costs import VERSION, cache_folder, cached, measure
from ds_kfac.side import Side
from tests.models import linear_layer

UNIT = CostModel(((10, 1.0), (20, 4.0)), ((10, 0.5), (20, 1.0)), 2.0, 3.0, 5.0, 0.0, 7.0, 11.0)


@pytest.mark.parametrize(
    ("n", "expected"), [(1, 1.0), (10, 1.0), (14, 1.96), (20, 4.0), (40, 32.0)], ids=["floor", "at", "in", "end", "n^3"]
)
def test_eigh_goes_through_its_table_and_on_as_n_cubed(n, expected):
    assert UNIT.eigh(n) == pytest.approx(expected)
    assert UNIT.eigh(n, 3) == pytest.approx(3 * expected)


@pytest.mark.parametrize("kind", BUILTIN)
def test_builtin_eigh_never_falls_with_n_and_is_nearly_cubic_in_the_end(kind):
    seconds = [BUILTIN[kind].eigh(n) for n in range(1, 20000, 37)]
    assert seconds == sorted(seconds)
    assert BUILTIN[kind].eigh(20000) == pytest.approx(8 * BUILTIN[kind].eigh(10000))


def test_dense_preconditioning_is_four_products():
    costs = replace(UNIT, copy_bytes=math.inf)
    assert costs.precondition(linear_layer("l", 5, 3)) == pytest.approx(4 * 5 * 3 * (5 + 3) / 2.0)


def test_inverses_take_half_the_products_and_their_own_table():
    costs, layer = replace(UNIT, copy_bytes=math.inf), linear_layer("l", 5, 3)
    assert costs.precondition(layer, "inverse") == pytest.approx(2 * 5 * 3 * (5 + 3) / 2.0)
    assert UNIT.decompose(Side(45, 20), "inverse") == pytest.approx(2 * 1.0 + 0.5)
    assert UNIT.decompose(Side.dense(40), "inverse") == pytest.approx(8 * 1.0)
    assert UNIT.decompose(Side.identity(45), "inverse") == 0
    for kind in BUILTIN.values():
        assert kind.decompose(Side.dense(4096), "inverse") < kind.decompose(Side.dense(4096)) / 3


def test_structure_makes_a_side_cheaper():
    costs = replace(UNIT, copy_bytes=math.inf)
    layer = linear_layer("l", 5, 3)
    only_G = 4 * 5 * 3 * 3 / 2.0
    assert costs.precondition(replace(layer, A=Side.diagonal(5))) == pytest.approx(only_G)
    assert costs.precondition(replace(layer, A=Side.identity(5))) == pytest.approx(only_G)
    assert costs.precondition(replace(layer, A=Side(5, 2))) == pytest.approx(only_G + 4 * 3 * (4 + 4 + 1) / 2.0)
    assert UNIT.decompose(Side(45, 20)) == pytest.approx(2 * 4.0 + 1.0)
    assert UNIT.decompose(Side.diagonal(45)) == pytest.approx(2 * 4 * 45 / 5.0)
    assert UNIT.decompose(Side.identity(45)) == 0
    step = UNIT.qr_of_eigh * UNIT.decompose(Side(45, 20)) + 4 * (2 * 20**3 + 5**3) / UNIT.gemm_flops
    assert UNIT.decompose(Side(45, 20), exact=False) == pytest.approx(step)
    mean = (UNIT.decompose(Side(45, 20)) + 2 * step) / 3
    assert UNIT.refresh(Side(45, 20), exact_every=3) == pytest.approx(mean)
    assert UNIT.refresh(Side.diagonal(45), exact_every=3) == pytest.approx(UNIT.decompose(Side.diagonal(45)))


def test_capture_fold_and_transfer_count_their_elements():
    assert UNIT.capture(Side.dense(5), rows=7) == pytest.approx(7 * 5 * 6 / 3.0)
    assert UNIT.fold(Side.dense(5)) == pytest.approx(3 * 4 * 15 / 5.0)
    assert UNIT.transfer(14, messages=2) == pytest.approx(2 + 22)


def test_a_dict_replaces_what_it_names():
    costs = from_dict({"link_bytes": 1e9, "eigh_seconds": [[8, 0.5], [16, 1]]}, UNIT)
    assert costs == replace(UNIT, link_bytes=1e9, eigh_seconds=((8, 0.5), (16, 1)))
    assert from_dict(json.loads(json.dumps(BUILTIN["cuda"].to_dict())), UNIT) == BUILTIN["cuda"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"link_byte": 1.0}, r"costs\.link_byte: unknown key; did you mean link_bytes\?"),
        ({"zzz": 1.0}, "valid keys: eigh_seconds, cholesky_seconds, gemm_flops"),
        ({"gemm_flops": 0}, r"costs\.gemm_flops: got 0; must be a positive number"),
        ({"gemm_flops": True}, "must be a positive number"),
        ({"copy_bytes": math.nan}, "must be a positive number"),
        ({"eigh_seconds": [[8, 1.0], [4, 2.0]]}, "n ascending"),
        ({"eigh_seconds": [[8, -1.0]]}, "all positive"),
        ({"eigh_seconds": []}, "must be"),
        ({"eigh_seconds": 3}, "must be"),
        ({"cholesky_seconds": [[8, -1.0]]}, r"costs\.cholesky_seconds.*all positive"),
    ],
)
def test_a_wrong_dict_is_refused_with_the_key(values, message):
    with pytest.raises(ValueError, match=message):
        from_dict(values, UNIT)


def test_measuring_takes_under_two_seconds_and_keeps_the_builtin_links():
    start = time.process_time()
    costs = measure("cpu")
    assert time.process_time() - start < 2
    assert (costs.link_bytes, costs.link_seconds) == (BUILTIN["cpu"].link_bytes, BUILTIN["cpu"].link_seconds)
    assert from_dict(costs.to_dict(), UNIT) == costs
    assert costs.eigh(1024) > costs.eigh(64) and costs.cholesky(1024) > costs.cholesky(64)


@pytest.fixture
def measured(monkeypatch):
    """Counts measurements in place of taking them."""
    calls = []

    def fake(device):
        calls.append(device)
        return UNIT

    monkeypatch.setattr(measured_costs, "measure", fake)
    return calls


def test_a_device_is_measured_once(tmp_path, measured):
    folder = tmp_path / "not" / "there"
    assert [cached("cpu", folder), cached("cpu", folder)] == [UNIT, UNIT]
    assert len(measured) == 1
    assert [path.suffix for path in folder.iterdir()] == [".json"]  # nothing half written is left


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "3", "[]", "{}", json.dumps({"version": VERSION + 1, "costs": UNIT.to_dict()}),
        json.dumps({"version": VERSION, "costs": 3}), json.dumps({"version": VERSION, "costs": {"gemm_flops": 1.0}}),
        json.dumps({"version": VERSION, "costs": UNIT.to_dict() | {"gemm_flops": "fast"}}),
        json.dumps({"version": VERSION, "costs": UNIT.to_dict() | {"other": 1}}),
    ],
)  # fmt: skip
def test_a_broken_or_foreign_file_is_measured_again(tmp_path, measured, text):
    cached("cpu", tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    assert cached("cpu", tmp_path) == UNIT
    assert len(measured) == 2
    assert json.loads(path.read_text())["version"] == VERSION


def test_a_folder_that_cannot_be_made_only_costs_the_cache(tmp_path, measured):
    (tmp_path / "file").write_text("")
    assert cached("cpu", tmp_path / "file") == UNIT


def test_the_cache_is_in_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "ds_kfac"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "ds_kfac"
