"""``python -m ds_kfac``: what it prints, and what it says to wrong input."""

import json
import subprocess
import sys

import pytest

from ds_kfac.__main__ import main
from tests.ranks import ROOT

SMALL = ["estimate", "--model", "benchmarks.models:gpt2", "--world", "4"]


def config(tmp_path, **blocks) -> str:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, **blocks})
    )
    return str(path)


def python(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ds_kfac", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_command_estimates_llama_7b_on_64_ranks():
    found = python(
        "estimate",
        "--model",
        "benchmarks.models:llama_7b",
        "--world",
        "64",
        "--config",
        "configs/gpt_zero2_kfac.json",
    )
    assert found.returncode == 0, found.stderr
    for text in (
        "6,738,415,616 parameters",
        "ZeRO-2 owners *",
        "several workers: refused",
        "eigenvectors",
        "64 groups share",
    ):
        assert text in found.stdout


def test_the_command_says_what_is_wrong_and_fails(tmp_path):
    found = python(*SMALL, "--config", config(tmp_path, kfac={"factor": {"update_intervall": 3}}))
    assert found.returncode == 1 and found.stdout == ""
    assert (
        "did you mean kfac.factor.update_interval?" in " ".join(found.stderr.split())
        and "Traceback" not in found.stderr
    )


def estimated(capsys, *arguments: str) -> str:
    assert main([*SMALL, *arguments]) == 0
    return capsys.readouterr().out


def test_every_strategy_has_a_row_or_a_reason(capsys, tmp_path):
    text = estimated(capsys, "--config", config(tmp_path))
    for name in (
        "MEM-OPT",
        "HYBRID-OPT 2/4",
        "COMM-OPT",
        "ZeRO owners: refused: every rank has every gradient",
    ):
        assert f"\n  {name}" in text
    text = estimated(capsys, "--config", config(tmp_path, zero_optimization={"stage": 3}))
    for name in ("ZeRO-3 owners *", "several workers: refused: no rank has every gradient"):
        assert f"\n  {name}" in text
    text = estimated(
        capsys, "--config", config(tmp_path, kfac={"assignment": {"memory_budget_gb": 1.2}})
    )
    assert "COMM-OPT: refused: kfac.assignment.memory_budget_gb" in text and "\n  MEM-OPT " in text


def test_what_is_not_preconditioned_is_a_row(capsys):
    assert (
        main(["estimate", "--model", "tests.estimate.test_models:convolutional", "--world", "4"])
        == 0
    )
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "1 BatchNorm2d 16 BatchNorm is not in kfac.layers.types" in text
        and "1 Conv2d, 1 Linear" in text
    )


def test_a_config_that_would_be_refused_keeps_the_table_and_says_so(capsys, tmp_path):
    wrong = {"assignment": {"gradient_worker_fraction": 0.5}}
    text = estimated(
        capsys, "--config", config(tmp_path, kfac=wrong, zero_optimization={"stage": 1})
    )
    assert "this config: refused: kfac.assignment.gradient_worker_fraction is 0.5" in text
    assert "ZeRO-1 owners " in text


def test_constants_may_be_given_and_are_printed(capsys, tmp_path):
    given = ["--device-flops", "5e13", "--model-flops", "2e14", "--link-gbps", "100"]
    given += ["--node-size", "2", "--node-gbps", "800", "--batch-rows", "4096"]
    text = estimated(capsys, "--config", config(tmp_path), *given)
    assert "products 50 T, second moments 50 T" in text and "products in 16 bits, 200 T" in text
    assert "100 Gbit/s a rank" in text and "2 ranks a node, 800 Gbit/s within" in text


def test_measured_rates_may_be_given(capsys, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text('{"gemm_flops": 3e9}')
    text = estimated(capsys, "--config", config(tmp_path), "--costs", str(file))
    assert "measured: FLOP/s of products 3 G" in text and "assumed: eigh" in text


def test_the_batch_is_that_of_the_config(capsys, tmp_path):
    assert "batch of a rank: 6 x 1,024 tokens" in estimated(
        capsys, "--config", config(tmp_path, gradient_accumulation_steps=3)
    )
    assert "1 x 1,024 tokens or images, assumed" in estimated(capsys)


@pytest.mark.parametrize(
    ("blocks", "problem"),
    [
        ({"kfac": {"enabled": False}}, "kfac.enabled is false"),
        ({"zero_optimization": {"stage": 5}}, "must be 0, 1, 2 or 3"),
        ({"optimizer": {"type": "Muon"}}, "choose Muon or K-FAC"),
        ({"tensor_parallel": {"autotp_size": 2}}, "data parallelism only"),
        ({"k-fac": {}}, 'did you mean "kfac"?'),
        ({"kfac": {"layers": {"include": ["nowhere"]}}}, "nowhere"),
        (
            {"kfac": {"factor": {"fisher": "monte_carlo"}}, "zero_optimization": {"stage": 3}},
            "use stage 0, 1 or 2",
        ),
    ],
)
def test_a_wrong_config_says_what_to_do(capsys, tmp_path, blocks, problem):
    assert main([*SMALL, "--config", config(tmp_path, **blocks)]) == 1
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "problem"),
    [
        (["estimate", "--model", "gpt5", "--world", "4"], 1, "give module:factory"),
        ([*SMALL, "--config", "none.json"], 1, "no such file or folder"),
        ([*SMALL, "--costs", "none.json"], 1, "--costs none.json: no such file or folder"),
        ([*SMALL, "--node-gbps", "3"], 1, "give --node-size too"),
        (
            ["estimate", "--model", "benchmarks.models:gpt2", "--world", "0"],
            2,
            "an integer of at least 1",
        ),
        ([*SMALL, "--link-gbps", "fast"], 2, "must be a positive number"),
        ([], 2, "command"),
    ],
)
def test_wrong_arguments_say_what_to_do(capsys, arguments, status, problem):
    try:
        found = main(arguments)
    except SystemExit as exit:
        found = exit.code
    assert found == status and problem in capsys.readouterr().err


def answer(text: str) -> str:
    """The line with the number."""
    return " ".join(text[text.index("K-FAC takes") :].split())[:420]


def test_what_a_framework_fills_in_is_assumed_in_the_line_with_the_number(capsys, tmp_path):
    auto = {"bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"}
    text = answer(estimated(capsys, "--config", config(tmp_path, **auto)))
    assert (
        "a step of 1,024 tokens or images a rank (assumed: the config has no batch size, give "
        "--batch-rows" in text
    )
    assert 'in float32 (assumed: "bf16" is "auto", --dtype says which)' in text
    given = ["--dtype", "bf16", "--batch-rows", "512"]
    text = answer(estimated(capsys, "--config", config(tmp_path, **auto), *given))
    assert "a step of 512 tokens or images a rank in bfloat16, its worst" in text
    text = answer(estimated(capsys, "--config", config(tmp_path, bf16={"enabled": True})))
    assert "a step of 2,048 tokens or images a rank in bfloat16, its worst" in text
    assert (
        main([*SMALL, "--config", config(tmp_path, bf16={"enabled": True}), "--dtype", "fp16"]) == 1
    )
    assert "--dtype fp16: the config has bf16; leave either out" in capsys.readouterr().err
