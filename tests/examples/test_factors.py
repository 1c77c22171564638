"""The three uses of factors, small, and the formulas in them."""

import sys

import pytest
import torch

from tests.close import close
from tests.ranks import ROOT

sys.path.insert(0, str(ROOT / "examples"))
from factors import influence, lora, merge

import ds_kfac


def told(capsys) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_influence_finds_a_planted_duplicate_and_foretells_retraining(tmp_path, capsys):
    sizes = ["--files", "16", "--context", "32", "--epochs", "12", "--halves", "10"]
    assert influence.main(["--out", str(tmp_path), *sizes]) == 0
    line = told(capsys)
    assert "128 documents" in line and "EKFAC: planted duplicate at rank 1" in line
    assert (tmp_path / "influence.png").stat().st_size > 0


def test_influence_is_a_product_with_the_inverse_of_the_damped_matrix(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, bias=False)
    data = [(torch.randn(4, 5, 3), torch.randn(4, 5, 2))]
    loss = lambda model, batch: (model(batch[0]) - batch[1]).square().sum(-1).mean()  # noqa: E731
    found = ds_kfac.fit(model, data, loss, out=tmp_path, progress=False)
    (layer,) = found
    queries, documents = torch.randn(2, 2, 3), torch.randn(4, 2, 3)
    Q_A, Q_G = (found.eigenbasis(layer, side).vectors[0][0] for side in "AG")
    values = found.corrected(layer).flatten()
    Q = torch.kron(Q_G, Q_A)
    H = Q @ (values + influence.DAMPING * values.mean()).diag() @ Q.T
    expected = queries.flatten(1).double() @ torch.linalg.solve(
        H.double(), documents.flatten(1).T.double()
    )
    actual = influence.scores(found, {layer: queries}, {layer: documents})
    condition = float(torch.linalg.cond(H))
    close(actual, expected, sums=2 * (2 + 3) + 6, condition=condition, dtype=torch.float32)


def test_a_datamodeling_score_is_a_correlation_of_ranks_and_steps_are_between_evaluations():
    halves = [torch.tensor([0, 1]), torch.tensor([1, 2]), torch.tensor([0, 2])]
    scores = torch.tensor([[1.0, 2.0, 4.0]])  # of the halves: 3, 6, 5
    for measured, expected in (([5.0, -9.0, 1.0], 1.0), ([-9.0, 5.0, 1.0], -1.0)):
        found = influence.datamodeling(scores, halves, torch.tensor(measured)[:, None])
        close(found, [expected], sums=3)
    close(lora.steps_to(2.5, [4.0, 3.0, 2.0]), 1.5 * lora.EVERY)
    assert lora.steps_to(1.0, [4.0, 3.0, 2.0]) == 2 * lora.EVERY


def test_regmean_takes_from_each_model_what_its_own_inputs_need():
    first, second = torch.randn(2, 4), torch.randn(2, 4)
    grams = [torch.tensor(values).diag() for values in ((1.0, 1, 0, 0), (0.0, 0, 1, 3))]
    expected = torch.cat([first[:, :2], second[:, 2:]], dim=1)
    close(merge.regmean([first, second], grams), expected, sums=8)


def test_regmean_merges_better_than_the_average(tmp_path, capsys):
    sizes = ["--context", "32", "--width", "48", "--base", "120", "--further", "80"]
    assert merge.main(["--out", str(tmp_path), *sizes]) == 0
    assert "RegMean" in told(capsys) and (tmp_path / "merge.png").stat().st_size > 0


def test_lora_starts_from_the_top_eigenvectors_and_is_ahead(tmp_path, capsys, monkeypatch):
    pytest.importorskip("peft", reason="runs in make integrations")
    monkeypatch.setattr(lora, "RATES", (3e-3, 1e-2))
    monkeypatch.setattr(lora, "CHECKED", (3e-3,))
    monkeypatch.setattr(lora, "SEEDS", 1)
    sizes = ["--context", "32", "--width", "32", "--base", "80", "--steps", "16"]
    assert lora.main(["--out", str(tmp_path), *sizes]) == 0
    assert "rate 0.003: default 8.0" in told(capsys) and (tmp_path / "lora.png").stat().st_size > 0
    found = ds_kfac.Factors.load(tmp_path / "lora")
    vectors = lora.load_file(tmp_path / "eva.safetensors")
    base = lora.GPT(lora.GPTConfig(width=32, blocks=2, heads=4, context=32))
    model = lora.adapted(base, "EVA", vectors, rank=2, seed=0)
    layer = "blocks.1.mlp.down"
    rows = model.get_submodule(f"base_model.model.{layer}").lora_A["default"].weight.detach()
    A = found.factor(layer, "A").double()
    explained = (rows.double() @ A @ rows.double().T).trace()
    close(explained, torch.linalg.eigvalsh(A)[-2:].sum(), sums=2 * len(A), dtype=torch.float32)
