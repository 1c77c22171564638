"""Other tools' files: what they hold, by their formulas; with the tools themselves in
tests/integrations."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ds_kfac.__main__ import main
from ds_kfac.factors.command import condition, effective_rank, table
from ds_kfac.factors.convert import convert
from ds_kfac.factors.files import Factors, FactorsError
from ds_kfac.factors.fitting import fit
from tests.close import close, exact
from tests.factors.test_fit import CLASSES, WIDTH, Images, Sequences, sequences
from tests.ranks import ROOT

ROWS = 4 * 18


@pytest.fixture(scope="module")
def factors(tmp_path_factory):
    data = sequences(4)
    return fit(Sequences(), data, out=tmp_path_factory.mktemp("factors") / "made", progress=False)


def rows() -> torch.Tensor:
    """Of the second layer."""
    own, data = Sequences(), sequences(4)
    x = torch.cat([batch["x"] for batch in data]).flatten(0, 1)
    return torch.tanh(own.twice(torch.tanh(own.twice(x)))).detach()


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
    folder = tmp_path / "factors_run"
    x = rows()
    close(load_file(folder / "activation_covariance.safetensors")["head"], x.mT @ x, sums=ROWS)
    exact(
        load_file(folder / "num_activation_covariance_processed.safetensors")["head"],
        torch.tensor([ROWS]),
    )
    exact(load_file(folder / "num_lambda_processed.safetensors")["head"], torch.tensor([12]))
    close(load_file(folder / "lambda_matrix.safetensors")["head"], 12 * factors.corrected("head"))
    exact(
        load_file(folder / "gradient_eigenvectors.safetensors")["head"],
        factors.eigenbasis("head", "G").vectors[0][0],
    )
    arguments = json.loads((folder / "factor_arguments.json").read_text())
    assert arguments == {"strategy": "ekfac", "use_empirical_fisher": True}


def test_what_has_no_place_there_is_named(tmp_path):
    data = [{"x": torch.ones(2, 2, 5, 7) * n, "labels": torch.tensor([0, n])} for n in range(1, 4)]
    found = fit(Images(), data, out=tmp_path / "images", progress=False)
    left = convert(found, "regmean", tmp_path / "grams")
    assert list(left) == ["conv"] and "Conv2d" in left["conv"]
    with pytest.raises(FactorsError, match="must be one of kronfluence, regmean, gptq, eva"):
        convert(found, "mergekit", tmp_path / "x")
    with pytest.raises(FactorsError, match="rank 0, rho 2"):
        convert(found, "eva", tmp_path / "x", rank=0)
    with pytest.raises(FactorsError, match=r"out: .*is a folder; gptq needs"):
        convert(found, "gptq", tmp_path)
    A = fit(
        Sequences(),
        sequences(1),
        out=tmp_path / "A",
        config={"factor": {"fisher": "activations_only"}},
        progress=False,
    )
    with pytest.raises(FactorsError, match="no layer has what kronfluence needs"):
        convert(A, "kronfluence", tmp_path / "x")


def test_the_table_says_what_spectra_are_like(factors):
    assert effective_rank(torch.tensor([1.0, 1.0, 1.0, 0.0])) == 3
    assert condition(torch.tensor([8.0, 2.0, 1e-12])) == 4
    lines = table(factors)
    assert any("twice" in line and "7 x 8" in line for line in lines)
    assert len(lines) == 3


class Net(nn.Module):
    """What the command is given."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Sequences()

    def forward(self, x, labels):
        return self.own(x, labels)


def data(rank: int, ranks: int) -> list[dict]:
    return sequences(4)[rank::ranks]


def test_the_commands_compute_and_convert(tmp_path, capfd):
    here = "tests.factors.test_convert"
    arguments = [
        "factors",
        "--model",
        f"{here}:Net",
        "--data",
        f"{here}:data",
        "--out",
        str(tmp_path / "made"),
    ]
    assert main(arguments) == 0
    said = capfd.readouterr()
    assert "2 layers, empirical Fisher, 12 sequences" in said.out
    assert "own.twice" in said.out
    assert "batches/s" in said.err  # the bar
    found = Factors.load(tmp_path / "made")
    assert found.factor("own.head", "G").shape == (CLASSES, CLASSES)
    assert (
        main(["convert", str(tmp_path / "made"), "--to", "gptq", "--out", str(tmp_path / "gptq")])
        == 0
    )
    assert "wrote 2 of 2 layers for gptq" in capfd.readouterr().out


def no_model() -> None:
    pass


@pytest.mark.parametrize(
    "given, told",
    [
        (
            ["--model", "tests.factors.test_convert:no_model"],
            "returned NoneType; must return an nn.Module",
        ),
    ],
)
def test_the_command_names_what_is_wrong_with_its_arguments(given, told, tmp_path, capfd):
    here = "tests.factors.test_convert"
    arguments = [
        "factors",
        "--model",
        f"{here}:Net",
        "--data",
        f"{here}:data",
        "--out",
        str(tmp_path / "made"),
        *given,
    ]
    assert main(arguments) == 1
    said = capfd.readouterr().err
    assert told in said and "Traceback" not in said and not (tmp_path / "made").exists()


def test_a_model_is_cut_without_a_launcher_too(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    here, environment = "tests.factors.test_convert", {**os.environ, "DS_ACCELERATOR": "cpu"}
    command = [
        sys.executable,
        "-m",
        "ds_kfac",
        "factors",
        "--model",
        f"{here}:Net",
        "--data",
        f"{here}:data",
    ]
    command += ["--out", str(tmp_path / "made"), "--config", str(tmp_path / "ds.json")]
    environment = {
        name: value for name, value in environment.items() if name not in ("RANK", "LOCAL_RANK")
    }
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    whole = fit(Net(), data(0, 1), out=tmp_path / "whole", progress=False)
    exact(Factors.load(tmp_path / "made").factor("own.head", "G"), whole.factor("own.head", "G"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--model", "nowhere:Net"], "no module nowhere"),
        (["--model", "tests.factors.test_convert:Nut"], "has no attribute 'Nut'"),
        (["--config", "nowhere.json"], "nowhere.json"),
    ],
)
def test_the_command_says_what_is_wrong(more, said, tmp_path, capfd):
    here = "tests.factors.test_convert"
    arguments = [
        "factors",
        "--model",
        f"{here}:Net",
        "--data",
        f"{here}:data",
        "--out",
        str(tmp_path),
        *more,
    ]
    assert main(arguments) == 1
    assert said in capfd.readouterr().err
    assert main(["convert", str(tmp_path), "--to", "eva", "--out", str(tmp_path / "x")]) == 1
    assert "holds no factors, or they are not finished" in capfd.readouterr().err
