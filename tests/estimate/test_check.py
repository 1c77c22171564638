"""``check``: what attach would say, without a run; ``schema``; and models of transformers by their
config.json."""

import json
import os
import subprocess
import sys

import pytest
from torch import nn

from ds_kfac.__main__ import main
from ds_kfac.estimate.models import build
from examples.gpt import GPT, GPTConfig
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
RUN = ["check", "--config", str(ROOT / "configs/gpt_zero2_kfac.json"), "--model"]


@pytest.fixture
def llama(tmp_path) -> str:
    pytest.importorskip("transformers", reason="needs ds_kfac[integrations]")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return f"hf:{tmp_path}"


def test_a_config_that_fits_is_reported(capsys):
    assert main([*RUN, "benchmarks.models:llama_7b", "--world", "64"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 40
    for part in (
        "ds_kfac steps 100% of the trained matrix parameters (6,607,077,376 of 6,607,077,376) in "
        "225 K-FAC layers",
        "KFACAdamW, world size 64",
        "layers.[0-31].mlp.up x 32",
        "K-FAC state at most",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    "config, problem",
    [
        ({}, "no optimizer"),
        ({"optimizer": "KFACAdamW"}, "optimizer: got 'KFACAdamW'; must be an object such as"),
        ({"optimizer": {"type": "AdamW"}}, 'has no "kfac" block'),
        (
            {"kfac": {}, "optimizer": {"type": "EigenSign"}},
            "'EigenSign', which is in neither DeepSpeed",
        ),
        ({"kfac": {}, "optimizer": {"type": "Adafactor"}}, None),  # torch's
        ({"kfac": {"enabled": False}}, "kfac.enabled is false"),
        ({"kfac": {"dampin": {}}}, "did you mean kfac.damping"),
        ({"kfac": {"layers": {"include": ["nothing_like_it"]}}}, "matches no module"),
        ({"kfac": {}, "zero_optimization": {"zenflow": {}, "stage": 2}}, None),
        ({"kfac": {}, "compile": {"deepcompile": True}}, "DeepCompile"),
    ],
)
def test_a_config_that_does_not_fit_says_why(capsys, tmp_path, config, problem):
    path = tmp_path / "ds_config.json"
    path.write_text(
        json.dumps({"kfac": {}} if not config else {"optimizer": {"type": "AdamW"}, **config})
    )
    status = main(["check", "--config", str(path), "--model", "benchmarks.models:gpt2"])
    assert status == (1 if problem else 0)
    assert (problem or "") in capsys.readouterr().err


def test_keys_without_effect_are_named(capsys, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(
        json.dumps({"optimizer": {"type": "KFACAdamW"}, "kfac": {"damping": {"value": 2.0}}})
    )
    assert main(["check", "--config", str(path), "--model", "benchmarks.models:gpt2"]) == 0
    assert "without effect with KFACAdamW: kfac.damping.value" in capsys.readouterr().out


def test_an_optimizer_of_the_script_may_be_named(capsys, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"kfac": {}}))
    run = ["check", "--config", str(path), "--model", "benchmarks.models:gpt2", "--optimizer"]
    assert main([*run, "AdamW"]) == 0
    assert "preconditioner.eigenvalues corrected" in capsys.readouterr().out
    assert main([*run, "SGD"]) == 0
    assert "preconditioner.eigenvalues kronecker" in capsys.readouterr().out
    assert main([*RUN, "benchmarks.models:gpt2", "--optimizer", "SGD"]) == 1
    assert "the config has one" in capsys.readouterr().err


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.LazyLinear(7))


def test_a_lazy_module_says_what_to_do(capsys):
    assert main([*RUN, "tests.estimate.test_check:lazy"]) == 1
    assert "1.weight has no shape yet (a lazy module)" in capsys.readouterr().err


class Stacked(nn.Module):
    """Experts in one parameter of three dimensions, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 5)
        self.experts = nn.ParameterDict(
            {"gate": nn.Parameter(nn.Linear(7, 9 * 11).weight.view(9, 11, 7))}
        )
        self.embed = nn.Embedding(13, 7)


def test_a_low_share_is_a_warning_that_names_the_largest_exceptions(capsys):
    assert main([*RUN, "tests.estimate.test_check:Stacked"]) == 0
    text = capsys.readouterr().out
    assert "ds_kfac steps 5% of the trained matrix parameters (35 of 728) in 1 K-FAC layers" in text
    assert "left out: ParameterDict 693 (no K-FAC layer type for it)" in text
    assert main([*RUN, "benchmarks.models:llama_7b"]) == 0
    assert "WARNING" not in capsys.readouterr().out


class Words(nn.Module):
    """A language model whose last layer has the name ``head``."""

    def __init__(self, head: str, words: int = 50) -> None:
        super().__init__()
        self.places, self.words = nn.Embedding(64, 12), nn.Embedding(words, 12)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.add_module(head, nn.Linear(12, 50))

    def forward(self, x):
        return self.get_submodule([*self._modules][-1])(self.down(self.up(self.words(x))))


def words() -> nn.Module:
    return Words("to_logits")


def other() -> nn.Module:
    return Words("to_logits", words=60)


def test_a_head_is_found_by_its_shape_whatever_its_name(capsys, tmp_path):
    path, by_shape = tmp_path / "ds_config.json", "it has the shape of an embedding"
    for adam, model, told in (
        ({}, "words", True),
        ({"whiten": 0.25}, "words", True),
        ({}, "other", False),
        ({"except_layers": ["up"]}, "words", False),
    ):
        path.write_text(json.dumps({"optimizer": {"type": "KFACAdamW"}, "kfac": {"adam": adam}}))
        assert (
            main(["check", "--config", str(path), "--model", f"tests.estimate.test_check:{model}"])
            == 0
        )
        (line,) = [
            line
            for line in capsys.readouterr().out.splitlines()
            if line.lstrip().startswith("to_logits ")
        ]
        assert (by_shape in line) == told, (adam, model, line)


def test_a_rate_far_from_every_recipe_is_named(capsys, tmp_path):
    path = tmp_path / "ds_config.json"
    other = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3}}}
    for lr, more, told in (
        (0.05, {}, True),
        (2e-3, {}, False),
        ("auto", {}, False),
        (0.05, other, False),
    ):
        params = {"lr": lr, "weight_decay": 0.01}
        path.write_text(json.dumps({"optimizer": {"type": "KFACAdamW", "params": params}, **more}))
        assert (
            main(["check", "--config", str(path), "--model", "tests.estimate.test_check:words"])
            == 0
        )
        assert ("far from every recipe for a language model" in capsys.readouterr().out) == told, (
            lr,
            more,
        )


def test_a_mixture_of_experts_of_transformers_is_stepped_whole(capsys, tmp_path):
    pytest.importorskip("transformers", reason="needs ds_kfac[integrations]")
    experts = {
        "num_experts": 32,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "head_dim": 16,
    }
    model = {
        **LLAMA,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps({**model, **experts}))
    assert main([*RUN, f"hf:{tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert "ds_kfac steps 100% of the trained matrix parameters" in text and "WARNING" not in text


@pytest.mark.parametrize("command", ["schema", "config", "doctor", "check", "estimate"])
def test_standard_output_has_the_data_alone(command, tmp_path):
    model = [
        "--model",
        "tests.estimate.test_check:talking",
        "--config",
        "configs/gpt_zero2_kfac.json",
        "--world",
        "2",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    # without locks, of which the doctor would complain
    environment["TORCH_EXTENSIONS_DIR"] = str(tmp_path)
    arguments = [
        sys.executable,
        "-m",
        "ds_kfac",
        command,
        *(model if command in ("check", "estimate") else []),
    ]
    run = subprocess.run(
        arguments,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    if command in ("schema", "config"):
        assert not run.stderr  # they import nothing that prints
    else:
        assert "accelerator" in run.stderr, "nothing was printed beside the data"
    begins = {
        "schema": "{",
        "config": "# Config",
        "doctor": "ds_kfac doctor",
        "check": "configs/",
        "estimate": "ds_kfac estimate",
    }
    assert run.stdout.startswith(begins[command]) and "[WARNING]" not in run.stdout
    if command == "schema":
        assert "kfac" in json.loads(run.stdout)["properties"]
    if command in ("check", "estimate"):
        assert "from a shell" not in run.stdout and "from a shell" in run.stderr, (
            "a child's and C's output, too"
        )


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
    assert "groups share an input" in capsys.readouterr().out
    assert main(["estimate", "--model", "hf:/no/such/folder", "--world", "2"]) == 1
    assert "nothing is downloaded" in capsys.readouterr().err


def test_lora_is_estimated(capsys, llama):
    pytest.importorskip("peft", reason="needs ds_kfac[integrations]")
    assert main(["estimate", "--model", llama, "--world", "2", "--lora", "4"]) == 0
    text = capsys.readouterr().out
    assert "448 K-FAC layers" in text and "weight is frozen" in text


def test_the_schema_knows_every_key_and_schedules(capsys):
    jsonschema = pytest.importorskip("jsonschema")
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    ramp = {"schedule": "linear", "start": 5, "end": 20, "steps": 100}
    for fits in (
        {},
        {"factor": {"update_interval": ramp}},
        {"damping": {"value": 0.1}},
        {"factor": {"rows": None}},
    ):
        validator.validate({"kfac": fits, "train_batch_size": 8})
    for wrong in (
        {"factor": {"update_interval": {**ramp, "schedule": "quadratic"}}},
        {"factor": {"update_interval": 0}},
        {"dampin": {}},
        {"preconditioner": {"method": "cholesky"}},
        {"damping": {"value": {"schedule": "piecewise", "values": []}}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate({"kfac": wrong})
    for params in (
        {},
        {"lr": 2e-3, "betas": [0.9, 0.95]},
        {"adam_lr": None, "weight_decay": "auto", "torch_adam": True},
    ):
        validator.validate({"optimizer": {"type": "KFACAdamW", "params": params}})
    validator.validate({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": True}}})
    for params in (
        {"learning_rate": 1},
        {"lr": "2e-3"},
        {"betas": [0.9]},
        {"betas": [0.9, 1.0]},
        {"eps": -1},
    ):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate({"optimizer": {"type": "KFACAdamW", "params": params}})
    for path in sorted((ROOT / "configs").glob("*.json")):
        validator.validate(json.loads(path.read_text()))


def test_a_model_that_does_not_run_on_the_meta_device_is_estimated_without_a_forward(
    capsys, llama, monkeypatch
):
    from transformers import LlamaForCausalLM

    def fails(self, *given, **named):
        raise RuntimeError("no kernel for meta tensors")

    monkeypatch.setattr(LlamaForCausalLM, "forward", fails)
    assert main(["estimate", "--model", llama, "--world", "2", "--batch-rows", "64"]) == 0
    assert "no forward was traced" in capsys.readouterr().out


def example() -> nn.Module:
    return GPT(GPTConfig())


def test_the_readme_shows_what_is_printed(capsys, monkeypatch):
    """Whether attach prints the same is asked in tests/deepspeed/test_check.py."""
    monkeypatch.setenv("COLUMNS", "76")
    assert main([*RUN, "tests.estimate.test_check:example", "--world", "2"]) == 0
    report = capsys.readouterr().out.split("ds_kfac steps ")[1].split("  ZeRO stage")[0]
    shown = "\n".join(
        line.removeprefix("    ") for line in (ROOT / "README.md").read_text().splitlines()
    )
    assert f"ds_kfac steps {report}" in shown
