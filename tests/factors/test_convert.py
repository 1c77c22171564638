"""Other tools' files: what they hold, by their formulas; with the tools themselves in
tests/integrations."""

import json

import pytest
import torch
from safetensors.torch import load_file

from ds_kfac.__main__ import main
from ds_kfac.factors.command import condition, effective_rank, table
from ds_kfac.factors.convert import convert
from ds_kfac.factors.files import Factors, FactorsError
from tests.close import close, exact
from tests.factors.test_fit import WIDTH, Images, Sequences, fit, images, sequences
from tests.programs import python
from tests.ranks import ROOT

ROWS = 4 * 18


@pytest.fixture(scope="module")
def factors(tmp_path_factory):
    return fit(Sequences(), sequences(4), out=tmp_path_factory.mktemp("factors") / "made")


def rows() -> torch.Tensor:
    """Of the second layer."""
    x = torch.cat([batch["x"] for batch in sequences(4)])
    return Sequences().body(x.flatten(0, 1)).detach()


def test_grams_are_sums_and_means_of_the_inputs(factors, tmp_path):
    x = rows()
    assert convert(factors, "regmean", tmp_path / "regmean") == {}
    convert(factors, "gptq", tmp_path / "gptq")
    close(load_file(tmp_path / "regmean")["head.weight"], x.mT @ x, sums=ROWS)
    close(load_file(tmp_path / "gptq")["head.weight"], 2 * x.mT @ x / ROWS, sums=ROWS)
    # without the 1 of the bias
    assert load_file(tmp_path / "gptq")["twice.weight"].shape == (WIDTH, WIDTH)


def test_eva_takes_what_explains_most_where_it_explains_most(factors, tmp_path):
    convert(factors, "eva", tmp_path / "eva", rank=2, rho=2)
    found = load_file(tmp_path / "eva")
    assert set(found) == {"base_model.model.twice", "base_model.model.head"}
    assert sum(map(len, found.values())) == 4
    x = rows()
    for directions in found.values():
        close(directions @ directions.mT, torch.eye(len(directions)), sums=WIDTH)
    directions = found["base_model.model.head"]
    share = (directions @ x.mT).square().sum() / x.square().sum()
    values = torch.linalg.svdvals(x).square()
    close(share, values[: len(directions)].sum() / values.sum(), sums=ROWS)


def test_kronfluence_has_sums_counts_and_its_strategy(factors, tmp_path):
    convert(factors, "kronfluence", tmp_path, name="run")
    folder, x = tmp_path / "factors_run", rows()

    def head(name: str) -> torch.Tensor:
        return load_file(folder / f"{name}.safetensors")["head"]

    close(head("activation_covariance"), x.mT @ x, sums=ROWS)
    exact(head("num_activation_covariance_processed"), torch.tensor([ROWS]))
    exact(head("num_lambda_processed"), torch.tensor([12]))
    close(head("lambda_matrix"), 12 * factors.corrected("head"))
    exact(head("gradient_eigenvectors"), factors.eigenbasis("head", "G").vectors[0][0])
    arguments = json.loads((folder / "factor_arguments.json").read_text())
    assert arguments == {"strategy": "ekfac", "use_empirical_fisher": True}


def test_what_has_no_place_there_is_named(tmp_path):
    found = fit(Images(), images(3), out=tmp_path / "images")
    left = convert(found, "regmean", tmp_path / "grams")
    assert list(left) == ["conv"] and "Conv2d" in left["conv"]
    with pytest.raises(FactorsError, match="must be one of kronfluence, regmean, gptq, eva"):
        convert(found, "mergekit", tmp_path / "x")
    with pytest.raises(FactorsError, match="rank 0, rho 2"):
        convert(found, "eva", tmp_path / "x", rank=0)
    with pytest.raises(FactorsError, match=r"out: .*is a folder; gptq needs"):
        convert(found, "gptq", tmp_path)
    config = {"factor": {"fisher": "activations_only"}}
    A = fit(Sequences(), sequences(1), out=tmp_path / "A", config=config)
    with pytest.raises(FactorsError, match="no layer has what kronfluence needs"):
        convert(A, "kronfluence", tmp_path / "x")


def test_the_table_says_what_spectra_are_like(factors):
    assert effective_rank(torch.tensor([1.0, 1.0, 1.0, 0.0])) == 3
    assert condition(torch.tensor([8.0, 2.0, 1e-12])) == 4
    lines = table(factors)
    assert any("twice" in line and "7 x 8" in line for line in lines)
    assert len(lines) == 3


def data(rank: int, ranks: int) -> list[dict]:
    return sequences(4)[rank::ranks]


def no_model() -> None:
    pass


HERE = "tests.factors.test_convert"
COMMAND = ["factors", "--model", f"{HERE}:Sequences", "--data", f"{HERE}:data", "--out"]


def test_the_commands_compute_and_convert(tmp_path, capfd):
    """Without a launcher, though the config cuts the model."""
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    command = ["-m", "ds_kfac", *COMMAND, str(tmp_path / "made"), "--config", str(config)]
    said = python(*command, folder=ROOT, DS_ACCELERATOR="cpu")
    assert "2 layers, empirical Fisher, 12 sequences" in said.stdout
    assert "twice" in said.stdout
    assert "batches/s" in said.stderr  # the bar
    whole = fit(Sequences(), data(0, 1), out=tmp_path / "whole")
    exact(Factors.load(tmp_path / "made").factor("head", "G"), whole.factor("head", "G"))
    convert_it = ["convert", str(tmp_path / "made"), "--to", "gptq", "--out"]
    assert main([*convert_it, str(tmp_path / "gptq")]) == 0
    assert "wrote 2 of 2 layers for gptq" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--model", "nowhere:Sequences"], "no module nowhere"),
        (["--model", f"{HERE}:no_model"], "returned NoneType; must return an nn.Module"),
        (["--config", "list.json"], "not a JSON object; pass the path of a DeepSpeed config file"),
    ],
)
def test_the_command_says_what_is_wrong(more, said, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[1, 2]")
    assert main([*COMMAND, "made", *more]) == 1
    told = capfd.readouterr().err
    assert said in told and "Traceback" not in told and not (tmp_path / "made").exists()
    assert main(["convert", ".", "--to", "eva", "--out", "x"]) == 1
    assert "holds no factors, or is not finished" in capfd.readouterr().err
