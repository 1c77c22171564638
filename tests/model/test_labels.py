"""What labels are of, by the class that gets them."""

import pytest
import torch
from torch import nn

from ds_kfac.model.batch import ArgumentReader
from tests.model.written import written

N, T, C = 2, 5, 3
LABELS = torch.tensor([[-100, 1, 2, 0, 1], [-100, -100, 1, 2, -100]])
SHIFTED = torch.tensor([[True, True, True, True, False], [False, True, True, False, False]])
SAME = LABELS != -100


class Model(nn.Module):
    loss_type = "ForCausalLM"

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, C)

    def forward(self, inputs_embeds, labels=None, attention_mask=None):
        return self.head(inputs_embeds)


HEAD = (
    "def forward(self, inputs_embeds, labels=None, attention_mask=None):\n    logits = self.head(inputs_embeds)\n    "
)
BODIES = {
    "by a function of its own": ("return F.cross_entropy(logits.flatten(0, 1), labels.flatten())", SAME),
    "by a loss made there": ("return nn.CrossEntropyLoss()(logits.view(-1, 3), labels.view(-1))", SAME),
    "by transformers' function": ("return self.loss_function(logits, labels, 3)", SHIFTED),
    "by slices": ("return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())", SHIFTED),
    "by slices with names": (
        "shift_labels = labels[..., 1:]\n    return F.cross_entropy(logits[..., :-1, :].mT, shift_labels)", SHIFTED
    ),
    "elsewhere": ("return self.inner(logits, labels)", SHIFTED),
}  # fmt: skip


def read(model: nn.Module, **more):
    return ArgumentReader(model)((), {"inputs_embeds": torch.zeros(N, T, 4), "labels": LABELS, **more})


def called(kind: type, name: str) -> type:
    kind.__name__ = name
    return kind


@pytest.mark.parametrize(("body", "expected"), BODIES.values(), ids=BODIES)
def test_the_code_of_a_causal_model_says_whether_labels_are_of_the_next_position(body, expected):
    model = called(written(HEAD + body, Model), "ThisForCausalLM")()
    assert torch.equal(read(model).rows, expected)


def test_known_classes_whose_loss_is_elsewhere_do_not_shift():
    model = called(written(HEAD + BODIES["elsewhere"][0], Model), "XLMWithLMHeadModel")()
    assert torch.equal(read(model).rows, SAME)


class Around(nn.Module):
    """A user's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.language = model

    def forward(self, inputs_embeds, labels=None, attention_mask=None):
        return self.language(inputs_embeds=inputs_embeds, labels=labels)


@pytest.mark.parametrize("around", [torch.compile, Around, lambda model: Around(Around(model))])
def test_a_causal_model_inside_of_another_says_it(around):
    model = called(written(HEAD + BODIES["by slices"][0], Model), "ThisForCausalLM")()
    assert torch.equal(read(around(model)).rows, SHIFTED)
    assert torch.equal(read(Around(nn.Linear(4, 4))).rows, SAME)


class Stepping(Around):
    """As Lightning's, whose training_step gets a batch and its number."""

    def forward(self, inputs_embeds):
        return self.language(inputs_embeds)


def test_a_batch_that_is_a_mapping_is_read():
    model = called(written(HEAD + BODIES["by slices"][0], Model), "ThisForCausalLM")()
    mask = torch.ones(N, T, dtype=torch.bool)
    info = ArgumentReader(Stepping(model))(({"labels": LABELS, "attention_mask": mask, 3: None}, 7), {})
    assert torch.equal(info.rows, SHIFTED) and torch.equal(info.attended, mask)
    fits = ArgumentReader(Around(model))(({"labels": LABELS, "attention_mask": mask}, 7), {})
    assert torch.equal(fits.rows, SHIFTED), "names of other arguments are not the batch's"
    two = ArgumentReader(Around(model))(({"attention_mask": mask}, {"attention_mask": ~mask}), {})
    assert two.rows is None, "of two texts neither mask is the batch's"


@pytest.mark.parametrize("name", ["RNNTagger", "OCTClassifier"])
def test_a_name_that_only_begins_so_is_none(name):
    assert read(called(type("M", (Model,), {}), name)()).labelled.ndim == 2


@pytest.mark.parametrize(("reduction", "items"), [("mean", None), ("sum", 1.0)])
def test_a_loss_of_whole_examples_has_a_term_each(reduction, items):
    model = called(type("M", (Model,), {}), "ThisForCTC")()
    model.config = type("Config", (), {"ctc_loss_reduction": reduction})()
    mask = torch.ones(N, T, dtype=torch.bool)
    info = read(model, attention_mask=mask)
    assert info.labelled.tolist() == [True] * N and info.items == items
    assert torch.equal(info.rows, mask) and info.padding, "labels are of no positions"


def test_segmentation_has_a_label_of_its_own_without_a_loss():
    model = Model()
    model.config = type("Config", (), {"semantic_loss_ignore_index": 1})()
    maps = LABELS[:, None].expand(N, 4, T)
    assert torch.equal(read(model, labels=maps).labelled, (maps != -100) & (maps != 1))
    assert read(model, labels=torch.tensor([1, 2])).labelled.all(), "a class of a classifier with such a config"
