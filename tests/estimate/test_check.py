"""``check``: what attach would say, without a run; ``schema``; and models of transformers by their config.json."""

import json

import pytest

from ds_kfac.__main__ import main
from ds_kfac.estimate.models import build
from tests.ranks import ROOT

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 2, "num_hidden_layers": 32, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 64,
}  # fmt: skip
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
        "KFACAdamW, 64 ranks",
        "(98%) in 225 K-FAC layers",
        "layers.[0-31].mlp.up x 32",
        "K-FAC state at most",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    "config, problem",
    [
        ({"optimizer": {"type": "AdamW"}}, 'has no "kfac" block'),
        ({"kfac": {"enabled": False}}, "kfac.enabled is false"),
        ({"kfac": {"dampin": {}}}, "did you mean kfac.damping"),
        ({"kfac": {"layers": {"include": ["nothing_like_it"]}}}, "matches no module"),
        ({"kfac": {}, "zero_optimization": {"zenflow": {}, "stage": 2}}, None),
        ({"kfac": {}, "compile": {"deepcompile": True}}, "DeepCompile"),
    ],
)
def test_a_config_that_does_not_fit_says_why(capsys, tmp_path, config, problem):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    status = main(["check", "--config", str(path), "--model", "benchmarks.models:gpt2"])
    assert status == (1 if problem else 0)
    assert (problem or "") in capsys.readouterr().err


def test_keys_without_effect_are_named(capsys, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"optimizer": {"type": "KFACAdamW"}, "kfac": {"damping": {"value": 2.0}}}))
    assert main(["check", "--config", str(path), "--model", "benchmarks.models:gpt2"]) == 0
    assert "without effect with KFACAdamW: kfac.damping.value" in capsys.readouterr().out


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
    for fits in ({}, {"factor": {"update_interval": ramp}}, {"damping": {"value": 0.1}}, {"factor": {"rows": None}}):
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
    for path in sorted((ROOT / "configs").glob("*.json")):
        validator.validate(json.loads(path.read_text()))


def test_a_model_that_does_not_run_on_the_meta_device_is_estimated_without_a_forward(capsys, llama, monkeypatch):
    from transformers import LlamaForCausalLM

    def fails(self, *given, **named):
        raise RuntimeError("no kernel for meta tensors")

    monkeypatch.setattr(LlamaForCausalLM, "forward", fails)
    assert main(["estimate", "--model", llama, "--world", "2", "--batch-rows", "64"]) == 0
    assert "no forward was traced" in capsys.readouterr().out
