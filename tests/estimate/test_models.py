"""Built-in models have the published sizes, and a forward tells which layers see one input."""

import pytest
import torch
from torch import nn

from ds_kfac.estimate.mode import kfac_config, mode_of
from ds_kfac.estimate.models import MODELS, build
from ds_kfac.estimate.subject import subject_of, with_convolutions
from ds_kfac.estimate.trace import trace
from ds_kfac.estimate.transformers import GPT2, Llama, Shape
from ds_kfac.scan import scan

PARAMETERS = {  # BERT: 335,141,888 without its heads for pre-training
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "bert-large": 336_226_108,
    "llama-7b": 6_738_415_616,
    "resnet50": 25_557_032,
}
SHARED = {"gpt2": 0, "gpt2-xl": 0, "bert-large": 24, "llama-7b": 64, "resnet50": 0}
ADAMW = {"optimizer": {"type": "AdamW"}, "kfac": {}}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_published_number_of_parameters_and_allocates_none(name):
    model, example = build(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers(), *example))


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_share_their_input_are_found_on_the_meta_device(name):
    model, example = build(name)
    config = kfac_config(ADAMW)
    subject = subject_of(model, config, mode_of(ADAMW, config), trace=trace(model, example))
    assert len(subject.shared) == SHARED[name]
    assert subject.parameters == PARAMETERS[name]
    if name == "llama-7b":
        attention, mlp = "layers.31.attention", "layers.31.mlp"
        expected = (f"{attention}.query", f"{attention}.key", f"{attention}.value"), (f"{mlp}.gate", f"{mlp}.up")
        assert subject.shared[-2:] == expected


def test_rows_of_a_token_and_of_an_image():
    rows = trace(*build("bert-large")).rows
    assert rows["blocks.0.mlp.up"] == 1 and rows["pooler"] == 1 / 512
    rows = trace(*build("resnet50")).rows
    assert rows["stem.conv"] == rows["stem.norm"] == 112 * 112
    assert rows["blocks.15.expand.conv"] == 7 * 7 and rows["head"] == 1


def test_multiplications_of_a_forward():
    config = kfac_config(ADAMW)
    model, example = build("resnet50")
    forward = subject_of(model, config, mode_of(ADAMW, config), trace=trace(model, example)).forward
    assert forward == pytest.approx(4.09e9, rel=0.01), "4.09 G multiplications of convolutions and head (torchvision)"
    model, example = build("gpt2-xl")
    forward = subject_of(model, config, mode_of(ADAMW, config), trace=trace(model, example)).forward
    assert forward == PARAMETERS["gpt2-xl"] - 1024 * 1600, "all but positions, which are looked up"


def test_convolutions_are_named_as_not_preconditioned_and_may_be_assumed():
    model, example = build("resnet50")
    config = kfac_config(ADAMW)
    mode = mode_of(ADAMW, config)
    subject = subject_of(model, config, mode, trace=trace(model, example))
    left = {kind: sum(1 for skipped in subject.skipped if skipped.kind == kind) for kind in ("Conv2d", "BatchNorm2d")}
    assert [layer.name for layer in subject.layers] == ["head"] and left == {"Conv2d": 53, "BatchNorm2d": 53}
    found = with_convolutions(scan(model), model, config.choice)
    assert len(found.layers) == 54 and {skipped.kind for skipped in found.skipped} == {"BatchNorm2d"}
    sides = {layer.name: (layer.A.dim, layer.G.dim) for layer in found.layers}
    assert sides["stem.conv"] == (147, 64) and sides["blocks.15.middle.conv"] == (9 * 512, 512)


@pytest.mark.parametrize("kind", [GPT2, Llama])
def test_the_definitions_run_and_train_at_a_small_size(kind):
    torch.manual_seed(0)
    model = kind(Shape(blocks=2, width=24, heads=3, inner=40, vocabulary=61, context=11))
    model(torch.arange(22).view(2, 11)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))


def small_with_example():
    return small(), torch.zeros(4, 7)


def no_module():
    return 3


def impossible():
    return nn.Linear(7, 5), (torch.zeros(4, 6),)


def test_a_model_of_a_factory():
    model, example = build("tests.estimate.test_models:small")
    assert example is None and next(model.parameters()).is_meta
    model, example = build("tests.estimate.test_models:small_with_example")
    found = trace(model, example)
    assert found.units == 4 and found.rows == {"0": 1, "2": 1} and found.inputs == {"0": (0,), "2": (1,)}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gpt5", "give one of gpt2, gpt2-xl"),
        ("no.such.package:make", "is its folder in PYTHONPATH"),
        ("tests.estimate.test_models:missing", "has no function missing"),
        ("tests.estimate.test_models:no_module", "returned a int, not a torch.nn.Module"),
    ],
)
def test_a_model_that_is_not_there_says_what_to_do(name, problem):
    with pytest.raises(ValueError, match=problem):
        build(name)


def test_a_forward_that_fails_says_what_to_do():
    with pytest.raises(ValueError, match=r"does not run on its example inputs .* no layers are assumed"):
        trace(*build("tests.estimate.test_models:impossible"))
