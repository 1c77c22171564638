"""``python -m ds_kfac estimate``: what it prints, and what it says to wrong input."""

import json

import pytest

from ds_kfac.__main__ import main

SMALL = ["estimate", "--model", "benchmarks.models:gpt2", "--world", "4"]


@pytest.fixture
def config(tmp_path):
    """Write a config; returns the arguments that name it."""

    def write(**blocks) -> list[str]:
        path = tmp_path / "config.json"
        whole = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, **blocks}
        path.write_text(json.dumps(whole))
        return ["--config", str(path)]

    return write


def estimated(capsys, *arguments: str) -> str:
    assert main([*SMALL, *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


BUDGET = {"assignment": {"memory_budget_gb": 1.2}}
HALF = {"assignment": {"gradient_worker_fraction": 0.5}}


@pytest.mark.parametrize(
    ("blocks", "told"),
    [
        (
            {},
            ["MEM-OPT", "HYBRID-OPT 2/4", "ZeRO owners: refused", "every rank has every gradient"],
        ),
        (
            {"zero_optimization": {"stage": 3}},
            ["ZeRO-3 owners *", "several workers: refused", "no rank has every gradient"],
        ),
        ({"kfac": BUDGET}, ["COMM-OPT: refused: kfac.assignment.memory_budget_gb", " MEM-OPT "]),
        (
            {"kfac": HALF, "zero_optimization": {"stage": 1}},
            ["config is refused: kfac.assignment.gradient_worker_fraction is 0.5", "ZeRO-1 own"],
        ),
        ({"gradient_accumulation_steps": 3}, ["batch of a rank: 6 x 1,024 tokens"]),
    ],
)
def test_every_strategy_has_a_row_or_a_reason(capsys, config, blocks, told):
    text = estimated(capsys, *config(**blocks))
    for part in told:
        assert part in text, part


def test_constants_and_measured_rates_may_be_given_and_are_printed(capsys, config, tmp_path):
    given = ["--device-flops", "5e13", "--model-flops", "2e14", "--link-gbps", "100"]
    given += ["--node-size", "2", "--node-gbps", "800", "--batch-rows", "4096"]
    text = estimated(capsys, *config(), *given)
    assert "products 50 T, of second moments 50 T" in text and "in 16 bits, 200 T" in text
    assert "100 Gbit/s per rank" in text and "2 ranks per node, 800 Gbit/s" in text
    file = tmp_path / "costs.json"
    file.write_text('{"gemm_flops": 3e9}')
    text = estimated(capsys, *config(), "--costs", str(file))
    assert "measured: FLOP/s of matrix products 3 G" in text and "assumed: eigh" in text


def test_what_a_framework_fills_in_is_assumed_in_the_line_with_the_number(capsys, config):
    auto = {"bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"}
    text = estimated(capsys, *config(**auto)).split("K-FAC keeps ")[1][:420]
    assert (
        "a step of 1,024 tokens or images per rank (assumed: the config has no batch size" in text
    )
    assert 'in float32 (assumed, because "bf16" is "auto": give --dtype)' in text
    text = estimated(capsys, *config(**auto), "--dtype", "bf16", "--batch-rows", "512")
    assert "a step of 512 tokens or images per rank in bfloat16, and its worst" in text
    assert main([*SMALL, *config(bf16={"enabled": True}), "--dtype", "fp16"]) == 1
    assert "--dtype fp16: the config enables bf16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"zero_optimization": {"stage": 5}}, "must be 0, 1, 2 or 3"),
        ({"tensor_parallel": {"autotp_size": 2}}, "data parallelism only"),
        (
            {"kfac": {"factor": {"fisher": "monte_carlo"}}, "zero_optimization": {"stage": 3}},
            "use stage 0, 1 or 2",
        ),
        (["--model", "gpt5"], "give module:factory"),
        (["--model", "no.such.package:make"], "is its folder in PYTHONPATH"),
        (["--model", "tests.estimate.test_models:missing"], "has no function missing"),
        (["--model", "tests.estimate.test_models:no_module"], "returned a int, not a torch.nn.Mod"),
        (["--config", "none.json"], "no such file or folder"),
        (["--costs", "none.json"], "--costs none.json: no such file or folder"),
        (["--node-gbps", "3"], "--node-gbps needs --node-size"),
        (["--world", "0"], "an integer of at least 1"),
        (["--link-gbps", "fast"], "must be a positive number"),
    ],
)
def test_what_is_wrong_says_what_to_do(capsys, config, given, problem):
    """What else is refused is in test_check.py and tests/zero/test_refusals.py."""
    arguments = config(**given) if isinstance(given, dict) else given
    try:
        status = main([*SMALL, *arguments])
    except SystemExit as exit:
        status = exit.code
    assert status and problem in capsys.readouterr().err
