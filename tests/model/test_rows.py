"""Rows: weight sharing, padding and sub-sampling; and what is read from a model's arguments."""

import pytest
import torch
from torch import nn

from ds_kfac.model.batch import ArgumentReader, BatchInfo, Fit, fit
from ds_kfac.model.convolutions import phase
from ds_kfac.model.loss import Forward
from ds_kfac.model.rows import Taken, gradient_rows, input_rows
from ds_kfac.model.slices import counted
from tests.close import close

EXPAND, REDUCE = "expand", "reduce"


def terms(info: BatchInfo, weight_sharing: str = EXPAND) -> float:
    loss = Forward(info)
    loss.terms = None if info.labelled is None else counted(info.labelled, weight_sharing)
    loss.returned(None, weight_sharing=weight_sharing)
    return float(loss.terms)


MASK = torch.tensor([[True, True, False], [True, False, False]])


def second_moment(x: torch.Tensor) -> torch.Tensor:
    return x.T @ x


def test_expand_takes_every_position_and_reduce_every_example():
    x, g = torch.randn(4, 3, 5), torch.randn(4, 3, 2)
    rows = input_rows(x, None, EXPAND)
    assert torch.equal(rows[0], x.view(12, 5)) and rows[2] == 12
    reduced = input_rows(x, None, REDUCE)
    close(reduced[0], x.mean(dim=1), sums=3)
    assert reduced[2] == 4
    assert torch.equal(gradient_rows(g, None, EXPAND)[0], g.view(12, 2)) and gradient_rows(g, None, EXPAND)[1] == 12
    close(gradient_rows(g, None, REDUCE)[0], g.sum(dim=1), sums=3)
    assert gradient_rows(g, None, REDUCE)[1] == 4


@pytest.mark.parametrize("mask", [None, torch.arange(24).view(4, 6) % 5 != 2], ids=["all", "masked"])
@pytest.mark.parametrize("turned", [False, True])
def test_rows_by_a_stride_are_in_the_mean_over_its_places_all_of_them(mask, turned):
    """Their moments and their numbers; loss terms are those of all."""
    x, g, stride = torch.randn(4, 6, 5, dtype=torch.float64), torch.randn(4, 6, 2), 5
    whole_a, whole_g = input_rows(x, mask, EXPAND), gradient_rows(g, mask, EXPAND)
    if turned:
        x, g, mask = (None if part is None else part.transpose(0, 1) for part in (x, g, mask))
    A, G, count = torch.zeros(5, 5, dtype=torch.float64), torch.zeros(2, 2), 0.0
    for offset in range(stride):
        options = {"examples": int(turned), "taken": Taken(stride, offset)}
        rows, ones, number = input_rows(x, mask, EXPAND, **options)
        assert len(rows) == len(ones) == len(range(offset, 24, stride)) and number == stride * ones.sum()
        sample, terms = gradient_rows(g, mask, EXPAND, **options)
        assert len(sample) == len(rows) and terms == whole_g[1]
        A, G, count = A + stride * second_moment(rows), G + stride * second_moment(sample), count + number
    close(A / stride, second_moment(whole_a[0]), sums=24)
    close(G / stride, second_moment(whole_g[0]), sums=24)
    assert count / stride == whole_a[2]


@pytest.mark.parametrize("shape", [(6, 5), (6, 1, 5)])
def test_without_shared_positions_reduce_is_expand(shape):
    x = torch.randn(shape)
    for rule in (EXPAND, REDUCE):
        rows = input_rows(x, None, rule)
        assert torch.equal(rows[0], x.view(6, 5)) and rows[2] == 6
        assert torch.equal(gradient_rows(x, None, rule)[0], x.view(6, 5))


def exact_fishers(pooled: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A linear model y = W a of squared loss: K-FAC's Fisher by both rules, and the exact one.

    Pooled: one prediction per example, the mean over its positions. The Fisher of ½|y - t|² is E[J^T J]; the gradients
    of all its output directions together have it exactly, so there is nothing to sample.
    """
    N, T, inputs, outputs = 6, 3, 4, 2
    a = torch.randn(N, T, inputs, dtype=torch.float64)
    terms = N if pooled else N * T
    fishers = {}
    for name, rule in (("expand", EXPAND), ("reduce", REDUCE)):
        rows = input_rows(a, None, rule)
        A, G = second_moment(rows[0].double()) / rows[2], torch.zeros(outputs, outputs, dtype=torch.float64)
        for direction in torch.eye(outputs, dtype=torch.float64):
            g = direction.expand(N, T, outputs) / terms / (T if pooled else 1)  # of a mean over the loss terms
            G += terms * second_moment(gradient_rows(g, None, rule)[0].double())
        fishers[name] = torch.kron(G, A)
    per_term = a.mean(dim=1) if pooled else a.view(N * T, inputs)
    jacobians = torch.stack([torch.kron(torch.eye(outputs, dtype=torch.float64), row[None]) for row in per_term])
    return fishers, torch.einsum("noi,noj->ij", jacobians, jacobians) / terms


def test_each_rule_is_exact_in_its_own_setting():
    for pooled, right, other in ((False, "expand", "reduce"), (True, "reduce", "expand")):
        fishers, expected = exact_fishers(pooled)
        close(fishers[right], expected, sums=7 * 3, dtype=torch.float32)
        assert (fishers[other] - expected).norm() > 0.1 * expected.norm()


def test_padding_counts_neither_as_rows_nor_in_means():
    x, g = torch.randn(2, 3, 5), torch.randn(2, 3, 2)
    rows = input_rows(x, MASK, EXPAND)
    assert float(rows[2]) == 3 and rows[1].flatten().tolist() == [1, 1, 0, 1, 0, 0]
    close(second_moment(rows[0]), second_moment(x[MASK]), sums=3)
    close(input_rows(x, MASK, REDUCE)[0], torch.stack([x[0, :2].mean(0), x[1, 0]]), sums=3)
    sample, terms = gradient_rows(g, MASK, EXPAND)
    close(second_moment(sample), second_moment(g[MASK]), sums=3)
    assert float(terms) == 3
    flattened = input_rows(x.view(6, 5), MASK, EXPAND)  # some models flatten before a layer
    assert torch.equal(flattened[0], rows[0])
    assert fit(MASK, (2,)) == Fit(), "a pooled layer has rows of its own"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bits_stay_so_and_are_summed_in_fp32(dtype):
    g = torch.randn(2, 3, 5).to(dtype)
    assert gradient_rows(g, MASK, EXPAND)[0].dtype == dtype
    assert torch.equal(gradient_rows(g, MASK, EXPAND)[0], torch.where(MASK[..., None], g, 0).view(6, 5))
    assert torch.equal(gradient_rows(g, MASK, REDUCE)[0], torch.stack([g[0, :2].float().sum(0), g[1, 0].float()]))
    assert gradient_rows(g.double(), None, EXPAND)[0].dtype == torch.float32


@pytest.mark.parametrize("interval", [1, 2, 5, 10, 16, 50, 7919])
def test_a_place_visits_all_alike_at_any_interval(interval):
    for stride in (2, 3, 4, 7, 10, 16, 100):
        visits = torch.zeros(stride)
        for capture in range(1000):
            visits[phase(capture * interval, stride)] += 1
        spread = float(((visits - 1000 / stride) ** 2).sum()) * stride / 1000
        # chi squared of a fair die passes this once in a million times (Laurent & Massart 2000)
        assert spread < stride - 1 + 2 * (14 * (stride - 1)) ** 0.5 + 28, (interval, stride, visits)


def test_rows_with_the_sequence_first_are_those_of_the_same_examples():
    x = torch.randn(2, 3, 5)
    for rule in (EXPAND, REDUCE):
        for mask in (None, MASK):
            transposed = None if mask is None else mask.T
            rows, other = (input_rows(x, mask, rule), input_rows(x.transpose(0, 1), transposed, rule, examples=1))
            close(second_moment(other[0]), second_moment(rows[0]), sums=6)
            assert float(other[2]) == float(rows[2])
            g, terms = gradient_rows(x, mask, rule)
            other_g, other_terms = gradient_rows(x.transpose(0, 1), transposed, rule, examples=1)
            close(second_moment(other_g), second_moment(g), sums=6)
            assert float(other_terms) == float(terms)


@pytest.mark.parametrize("rule", [EXPAND, REDUCE])
@pytest.mark.parametrize("shape", [(0, 3, 5), (0, 5)])
def test_an_empty_batch_has_no_rows(rule, shape):
    mask = torch.ones(shape[:-1], dtype=torch.bool) if len(shape) == 3 else None
    for given in (None, mask):
        rows = input_rows(torch.zeros(shape), given, rule)
        assert rows[0].shape == (0, 5) and float(rows[2]) == 0
        g, terms = gradient_rows(torch.zeros(shape), given, rule)
        assert g.shape == (0, 5) and float(terms) == 0


class CausalLM(nn.Module):
    def forward(self, input_ids, attention_mask=None, labels=None, **extra):
        return input_ids


class Tagger(nn.Module):
    def forward(self, x, labels=None, **extra):
        return x


IDS = torch.zeros(2, 3, dtype=torch.int64)
LABELS = torch.tensor([[-100, 5, 6], [7, -100, 8]])


@pytest.mark.parametrize("kind", ["LlavaForConditionalGeneration", "PeftModel", "T5ForConditionalGeneration"])
def test_labels_are_one_place_on_in_models_of_images_and_text_and_below_PEFT(kind):
    model = type(kind, (CausalLM,), {})()
    if kind == "PeftModel":
        model.get_base_model = CausalLM
    if kind.startswith("T5"):
        model.encoder, model.decoder = nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.Linear(1, 1))
    info, plain = (ArgumentReader(one)((IDS,), {"labels": LABELS}) for one in (model, CausalLM()))
    assert info.labelled is not None and plain.labelled is not None
    expected = LABELS != -100 if kind.startswith("T5") else plain.labelled
    assert torch.equal(info.labelled, expected) and not torch.equal(plain.labelled, LABELS != -100)


def test_hugging_face_arguments_are_recognised_by_name_and_place():
    read = ArgumentReader(CausalLM())
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    for info in (read((IDS, mask, LABELS), {}), read((IDS,), {"labels": LABELS, "attention_mask": mask})):
        # a causal model trains position t on label t + 1
        assert info.labelled.tolist() == [[True, True, False], [False, True, False]]
        assert info.rows.tolist() == [[True, True, False], [False, True, False]]
        assert terms(info) == 3 and terms(info, "reduce") == 2
        assert info.attended.tolist() == mask.bool().tolist()
    for also in ({}, {"labels": LABELS}):  # Transformers has shifted them before it cut the sequence
        placed = read((IDS, mask), {"shift_labels": LABELS, **also})
        assert placed.rows.tolist() == [[False, True, True], [True, False, False]] and terms(placed) == 4
    switched = read((IDS, mask), {"labels": LABELS, "shift_labels": True})  # of other models it is a switch
    assert switched.rows.tolist() == info.rows.tolist() and terms(switched) == 3
    attended = ArgumentReader(CausalLM(), count="attended")((IDS, mask, LABELS), {})
    assert attended.rows.tolist() == mask.bool().tolist() and terms(attended) == 3
    everything = ArgumentReader(CausalLM(), count="all")((IDS, mask, LABELS), {})
    assert everything.rows is None and terms(everything) == 3
    assert ArgumentReader(CausalLM())((IDS,), {}) == BatchInfo()


def test_a_mask_of_choices_is_of_the_rows_that_models_make_of_them():
    """transformers' ForMultipleChoice get [N, K, T] and flatten it to [N K, T]; labels are of examples."""
    read, ids = ArgumentReader(Tagger()), torch.zeros(2, 4, 3, dtype=torch.long)
    mask = (torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(0)) > 0.5).long()
    for tokens in ({"input_ids": ids}, {"inputs_embeds": torch.zeros(2, 4, 3, 5)}):
        for labels in (torch.tensor([1, 0]), torch.tensor([[1, 0, 0, 1]] * 2)):
            info = read((), {"attention_mask": mask, "labels": labels, **tokens})
            assert info.rows.tolist() == mask.flatten(0, 1).bool().tolist() and info.padding
    of_pairs = read((), {"attention_mask": torch.ones(2, 3, 3), "input_ids": IDS, "labels": torch.tensor([1, 0])})
    assert of_pairs.rows is None
    assert ArgumentReader(Tagger(), count="all")((), {"attention_mask": mask, "input_ids": ids}).rows is None


def test_a_model_of_another_class_does_not_shift():
    read = ArgumentReader(Tagger())
    labels = torch.tensor([[1, -100, 2], [-100, -100, 3]])
    info = read((IDS,), {"labels": labels, "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])})
    assert info.labelled.tolist() == [[True, False, True], [False, False, True]]
    assert info.rows.tolist() == [[True, False, False], [False, False, True]]
    assert info.attended.tolist() == [[True] * 3] * 2 and not info.padding, "what has a label is no padding"
    sequence = read((IDS, torch.tensor([3, -100])), {})
    assert sequence.rows is None and terms(sequence) == 1
    regression = read((IDS, torch.randn(2)), {})
    assert regression == BatchInfo()


def test_labels_are_of_rows_where_their_shape_is_that_of_the_mask_or_of_the_input():
    read, labels, mask = (
        ArgumentReader(Tagger()),
        torch.tensor([[0, 1], [-100, 0]]),
        torch.tensor([[1, 1, 0], [1, 1, 1]]),
    )
    other = read((IDS, labels), {"attention_mask": mask})
    assert other.rows.tolist() == mask.bool().tolist() and other.padding and other.classes
    assert other.attended is None and int(other.labelled.sum()) == 3
    column = read((IDS, labels[:, 1:]), {"attention_mask": mask})
    assert column.rows.tolist() == mask.bool().tolist() and terms(column) == 2 and not column.classes
    for x, rows in ((IDS, False), (IDS[:, :2], True), (torch.zeros(2, 2, 5), True), (torch.zeros(2, 3, 5), False),
                    (torch.zeros(2, 3, 8, 8), True)):  # fmt: skip
        info = read((x, labels), {})
        assert (info.rows is not None) == rows, "of images it is not known"
        assert info.classes == (not rows or x.ndim == 4)
    assert read((IDS[:, :1], labels[:, :1]), {}).rows is None
