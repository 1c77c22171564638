"""``check``: what attach would say, without a run; ``schema``; and models of transformers by their
config.json."""

import json
import os

import pytest
from torch import nn

from ds_kfac.__main__ import main
from ds_kfac.estimate.models import build
from examples.gpt import GPT, GPTConfig
from tests import programs
from tests.ranks import ROOT

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "head_dim": 16,
}
HERE, OURS = "tests.estimate.test_check", {"optimizer": {"type": "KFACAdamW"}}
RUN = ["check", "--config", str(ROOT / "configs/gpt_zero2_kfac.json"), "--model"]


@pytest.fixture
def checked(capsys, tmp_path):
    """Call ``check`` with a config; returns its status, what it prints, and its error."""

    def check(config: dict, model: str = "benchmarks.models:gpt2", *more: str):
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(config))
        status = main(["check", "--config", str(path), "--model", model, *more])
        return status, *capsys.readouterr()

    return check


@pytest.fixture
def llama(tmp_path) -> str:
    for name in ("transformers", "peft"):
        pytest.importorskip(name, reason="needs ds_kfac[integrations]")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return f"hf:{tmp_path}"


def test_a_config_that_fits_is_reported(capsys):
    assert main([*RUN, "benchmarks.models:llama_7b", "--world", "64"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 40 and "WARNING" not in text
    for part in (
        "ds_kfac updates 100% of the trained matrix parameters (6,607,077,376 of 6,607,077,376) in "
        "225 K-FAC layers",
        "KFACAdamW, world size 64",
        "layers.[0-31].mlp.up x 32",
        "K-FAC state at most",
    ):
        assert part in text, part


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.LazyLinear(7))


@pytest.mark.parametrize(
    "config, problem",
    [
        ({"optimizer": "KFACAdamW"}, "optimizer: got 'KFACAdamW'; must be an object such as"),
        ({"kfac": {}, "optimizer": {"type": "EigenSign"}}, "'EigenSign', which is in neither Deep"),
        ({"kfac": {}, "optimizer": {"type": "Adafactor"}}, ""),  # torch's
        ({"kfac": {"enabled": False}}, "kfac.enabled is false"),
        (OURS | {"kfac": {"enabled": False}}, 'to train without K-FAC, use "AdamW"'),
        ({"kfac": {"layers": {"include": ["nothing_like_it"]}}}, "matches no module"),
        (OURS, "1.weight has no shape yet (a lazy module)"),
    ],
)
def test_a_config_that_does_not_fit_says_why(checked, config, problem):
    model = f"{HERE}:lazy" if "lazy" in problem else "benchmarks.models:gpt2"
    status, _, error = checked({"optimizer": {"type": "AdamW"}, **config}, model)
    assert status == bool(problem) and problem in error


def test_an_optimizer_of_the_script_may_be_named(checked):
    for optimizer, eigenvalues in (("AdamW", "corrected"), ("SGD", "kronecker")):
        status, text, _ = checked({"kfac": {}}, "benchmarks.models:gpt2", "--optimizer", optimizer)
        assert status == 0 and f"preconditioner.eigenvalues {eigenvalues}" in text
    status, _, error = checked(OURS, "benchmarks.models:gpt2", "--optimizer", "SGD")
    assert status == 1 and "the config has an optimizer" in error


@pytest.mark.parametrize(
    ("command", "begins"),
    [("schema", "{"), ("config", "# Config"), ("doctor", "ds_kfac doctor"), ("check", "configs/")],
)
def test_standard_output_has_the_data_alone(command, begins, tmp_path):
    arguments = ["-m", "ds_kfac", command]
    if command == "check":
        arguments += ["--model", f"{HERE}:talking", "--world", "2"]
        arguments += ["--config", "configs/gpt_zero2_kfac.json"]
    # a folder without locks, of which the doctor would complain
    empty = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    run = programs.python(
        *arguments, folder=ROOT, without=(*programs.OURS, "DS_ACCELERATOR"), **empty
    )
    assert run.stdout.startswith(begins) and "[WARNING]" not in run.stdout
    if command in ("schema", "config"):
        assert not run.stderr, "they import nothing that prints"
    else:
        assert "accelerator" in run.stderr, "nothing was printed beside the data"
    if command == "check":  # a child's and C's output, too
        assert "from a shell" not in run.stdout and "from a shell" in run.stderr


def talking() -> nn.Module:
    print("from Python", flush=True)
    os.system("echo from a shell")
    return nn.Linear(3, 5)


def test_a_config_json_of_transformers_is_a_model(capsys, llama):
    model, (tokens,) = build(llama)
    assert tokens.shape == (1, 64) and all(p.is_meta for p in model.parameters())
    assert main([*RUN, llama]) == 0
    assert "model.layers.[0-31].mlp.up_proj x 32" in capsys.readouterr().out
    assert main(["estimate", "--model", llama, "--world", "2"]) == 0
    assert "share an input" in capsys.readouterr().out
    assert main(["estimate", "--model", llama, "--world", "2", "--lora", "4"]) == 0
    text = capsys.readouterr().out
    assert "448 K-FAC layers" in text and "weight is frozen" in text
    assert main(["estimate", "--model", "hf:/no/such/folder", "--world", "2"]) == 1
    assert "nothing is downloaded" in capsys.readouterr().err


def test_a_mixture_of_experts_of_transformers_is_stepped_whole(capsys, tmp_path):
    pytest.importorskip("transformers", reason="needs ds_kfac[integrations]")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | EXPERTS))
    assert main([*RUN, f"hf:{tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert "ds_kfac updates 100% of the trained matrix parameters" in text and "WARNING" not in text


def ours(params: dict) -> dict:
    return {"optimizer": {"type": "KFACAdamW", "params": params}}


def test_the_schema_knows_every_key_and_schedules(capsys):
    jsonschema = pytest.importorskip("jsonschema")
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    ramp = {"schedule": "linear", "start": 5, "end": 20, "steps": 100}
    configs = {
        "fits": [
            {},
            {"kfac": {"factor": {"update_interval": ramp, "rows": None}}, "train_batch_size": 8},
            *map(ours, ({}, {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": "auto"})),
            {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": True}}},
        ],
        "wrong": [
            {"kfac": {"factor": {"update_interval": {**ramp, "schedule": "quadratic"}}}},
            {"kfac": {"factor": {"update_interval": 0}}},
            {"kfac": {"dampin": {}}},
            {"kfac": {"damping": {"value": {"schedule": "piecewise", "values": []}}}},
            *map(ours, ({"learning_rate": 1}, {"lr": "2e-3"}, {"betas": [0.9]}, {"eps": -1})),
        ],
    }
    configs["fits"] += [json.loads(path.read_text()) for path in (ROOT / "configs").glob("*.json")]
    for kind, of_kind in configs.items():
        for config in of_kind:
            assert validator.is_valid(config) == (kind == "fits"), config


def test_a_model_that_does_not_run_on_the_meta_device_is_estimated_without_a_forward(
    capsys, llama, monkeypatch
):
    from transformers import LlamaForCausalLM

    def fails(self, *given, **named):
        raise RuntimeError("no kernel for meta tensors")

    monkeypatch.setattr(LlamaForCausalLM, "forward", fails)
    assert main(["estimate", "--model", llama, "--world", "2", "--batch-rows", "64"]) == 0
    assert "no forward pass was traced" in capsys.readouterr().out


def example() -> nn.Module:
    return GPT(GPTConfig())


def test_the_readme_shows_what_is_printed(capsys, monkeypatch):
    """Whether attach prints the same is asked in tests/deepspeed/test_report.py."""
    monkeypatch.setenv("COLUMNS", "76")
    assert main([*RUN, f"{HERE}:example", "--world", "2"]) == 0
    report = capsys.readouterr().out.split("ds_kfac updates ")[1].split("  ZeRO stage")[0]
    lines = (ROOT / "README.md").read_text().splitlines()
    shown = "\n".join(line.removeprefix("    ") for line in lines)
    assert f"ds_kfac updates {report}" in shown
