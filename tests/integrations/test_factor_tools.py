"""Factors where other tools read them: kronfluence computes influence from ours as from its own,
PEFT starts LoRA."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from ds_kfac.factors.convert import convert
from ds_kfac.factors.files import Factors
from ds_kfac.factors.fitting import fit
from tests.close import close, exact, near
from tests.programs import python
from tests.ranks import ROOT

LENGTH, DOCUMENTS, BATCH = 12, 16, 4


def llama() -> nn.Module:
    """Far from the initial symmetries."""
    from examples.integrations import tiny

    torch.manual_seed(0)
    model = tiny.model()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def documents() -> list[dict]:
    tokens = torch.randint(258, (DOCUMENTS, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def loss_of(model: nn.Module, batch: dict, reduction: str) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    labels = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits.flatten(0, 1), labels, reduction=reduction)


def batches(size: int) -> list[dict]:
    data = documents()
    return [
        {key: torch.stack([row[key] for row in data[at : at + size]]) for key in data[0]}
        for at in range(0, DOCUMENTS, size)
    ]


def test_kronfluence_has_the_same_factors_and_scores_from_ours(tmp_path):
    pytest.importorskip("kronfluence")
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Language(Task):
        def compute_train_loss(self, batch, model, sample=False):
            return loss_of(model, batch, "sum")

        def compute_measurement(self, batch, model):
            return loss_of(model, batch, "sum")

        def get_influence_tracked_modules(self):
            modules = llama().named_modules()
            linear = [name for name, module in modules if isinstance(module, nn.Linear)]
            return [name for name in linear if name != "lm_head"]

    data, task, loss = documents(), Language(), partial(loss_of, reduction="sum")
    own = {"reduction": "sum", "config": {"layers": {"exclude": ["lm_head"]}}}
    ours = fit(llama(), batches(BATCH), loss, out=tmp_path / "ours", progress=False, **own)
    assert convert(ours, "kronfluence", tmp_path / "job" / "theirs", name="ours") == {}

    model, out = prepare_model(llama(), task), str(tmp_path / "job")
    analyzer = Analyzer("theirs", model, task, cpu=True, output_dir=out)
    arguments = FactorArguments(strategy="ekfac", use_empirical_fisher=True)
    analyzer.fit_all_factors("own", data, per_device_batch_size=BATCH, factor_args=arguments)
    job = tmp_path / "job" / "theirs"
    own, written = job / "factors_own", job / "factors_ours"
    for kind in ("activation_covariance", "gradient_covariance"):
        expected, found = (load_file(place / f"{kind}.safetensors") for place in (own, written))
        assert set(expected) == set(found)
        for name in expected:
            # of all rows, and of the products of two blocks in front of them; gradients pass a
            # softmax and two norms
            close(found[name], expected[name], sums=DOCUMENTS * LENGTH + 500, condition=8)
    scores = {}
    for name in ("own", "ours"):
        analyzer.compute_pairwise_scores(
            name,
            factors_name=name,
            query_dataset=data[:3],
            train_dataset=data,
            per_device_query_batch_size=3,
            per_device_train_batch_size=BATCH,
            score_args=ScoreArguments(damping_factor=None),
        )
        scores[name] = analyzer.load_pairwise_scores(name)["all_modules"]
    bound = 1e-3 * scores["own"].abs().max()
    why = "eigenvectors of close eigenvalues turn into each other by rounding"
    near(scores["ours"], scores["own"], bound, why)


def test_peft_starts_lora_from_ours(tmp_path):
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model, initialize_lora_eva_weights

    config = {"factor": {"fisher": "activations_only"}}
    data = batches(DOCUMENTS)
    found = fit(llama(), data, out=tmp_path / "made", config=config, progress=False)
    convert(found, "eva", tmp_path / "eva", rank=4, rho=2)
    state = load_file(tmp_path / "eva")
    layers = set(Factors.load(tmp_path / "made")) - {"lm_head"}
    targets = sorted({name.split(".")[-1] for name in layers})
    model = get_peft_model(
        llama(), LoraConfig(r=4, target_modules=targets, init_lora_weights="eva")
    )
    initialize_lora_eva_weights(model, eva_state_dict=dict(state))
    ranks = set()
    for name, module in model.named_modules():
        if name in state and hasattr(module, "lora_A"):
            close(module.lora_A["default"].weight.detach(), state[name])
            ranks.add(len(state[name]))
    assert len(ranks) > 1  # some layers have more of them than others


def test_the_command_reads_models_and_texts_at_any_stage(tmp_path):
    pytest.importorskip("datasets")
    from datasets import Dataset

    from examples.integrations import tiny

    folder = tmp_path / "model"
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    letters = ["a b c d e f g h i j"[k % 7 : k % 7 + 12] for k in range(80)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in letters))
    Dataset.from_dict({"text": letters}).save_to_disk(tmp_path / "dataset")
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    found = {}
    for name, data, more in [
        ("whole", "texts.jsonl", []),
        ("dataset", "dataset", []),
        ("stage 3", "texts.jsonl", ["--config", str(tmp_path / "ds.json")]),
    ]:
        launcher = ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--module"]
        places = ["--data", str(tmp_path / data), "--out", str(tmp_path / name)]
        options = ["--length", "16", "--batch", "4", *places, *more]
        command = [*(launcher if more else ["-m"]), "ds_kfac", "factors", "--model"]
        cpu = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        ran = python(*command, f"hf:{folder}", *options, folder=tmp_path, path=str(ROOT), **cpu)
        assert "model.layers.1.mlp.down_proj" in ran.stdout
        found[name] = Factors.load(tmp_path / name)
    whole = found["whole"]
    for name in whole:
        for side in "AG":
            exact(found["dataset"].factor(name, side), whole.factor(name, side))
            # batches of other sizes, in another order
            cut = found["stage 3"].factor(name, side)
            close(cut, whole.factor(name, side), sums=800, condition=8)
