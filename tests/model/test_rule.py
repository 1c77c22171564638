"""The rule by which rows make A and G (docs/explanation/capture.md): what it means, by hand, and
that the hooks and the oracle have the factors of tests/truth.py."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_kfac.model.masks import masks_in
from ds_kfac.model.registry import MATRICES
from ds_kfac.model.scan import LayerChoice
from tests import rule_cases
from tests.close import close
from tests.model.recorder import Recorder, compared, equal_bits, unannounced
from tests.models import make_net
from tests.ops.specification import symmetric_pack
from tests.oracle_images import ImageKFAC
from tests.rule_cases import (
    CASES,
    IGNORED,
    TOKENS,
    WIDTH,
    Case,
    Decoder,
    DoubledHead,
    Encoder,
    Mlp,
    Tagger,
    Tasks,
    decoder_texts,
    one_pass,
    texts,
    truth_of,
    vectors,
)
from tests.spread import in_float64

SUMS = 1000
"""Terms that are added one after another on the way to an element, at most."""


# steps that are for the hooks alone


def gradients_of_no_weight(forward, backward, rank: int) -> None:
    x, y = vectors(rank)
    x.requires_grad_()
    torch.autograd.grad(100 * forward(x, y), x)
    torch.autograd.backward(100 * forward(x, y), inputs=[x])
    backward(forward(x, y))


def frozen_in_the_step(forward, backward, rank: int) -> None:
    forward.head.requires_grad_(False)
    backward(forward(*vectors(rank)))


def frozen_but_its_bias() -> nn.Module:
    model = DoubledHead()
    model.head.weight.requires_grad_(False)
    return model


def frozen_tagger() -> nn.Module:
    model = Tagger()
    model.head.requires_grad_(False)
    return model


class Routed(nn.Module):
    """Each row goes to one of three experts, some of which get none."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(WIDTH, 3, bias=False), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight, chosen = self.router(x.to(self.head.weight.dtype)).softmax(-1).max(-1)
        z = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            own = (chosen == number).nonzero().flatten()
            z = z.index_add(0, own, expert(x[own]) * weight[own, None])
        return F.cross_entropy(self.head(z), y)


def labelled_pads(rank: int) -> dict[str, Tensor]:
    """One of the pads has a label, and so a gradient."""
    batch = texts(rank, pads="right")
    batch["labels"][3, 4] = 2
    return batch


def two_masks(rank: int) -> dict[str, Tensor]:
    batch = texts(rank, pads="right")
    batch["decoder_attention_mask"] = batch["attention_mask"].flip(0)
    return batch


def three_forwards(forward, backward, rank: int) -> None:
    """Each with a mask of its own; the pass of one without pads comes last."""
    batches = [texts(rank, pads="right"), texts(rank + 1, pads="right"), texts(rank)]
    batches[2]["attention_mask"] = torch.ones(4, TOKENS)
    for loss in [forward(**batch) for batch in batches]:
        backward(loss)


def recomputed(reentrant: bool, nested: bool) -> Case:
    make = lambda: Decoder(reentrant=reentrant, nested=nested)  # noqa: E731
    return Case(make, three_forwards, passes=3)


PROGRAMS = CASES | {
    "gradients of no weight": Case(Mlp, gradients_of_no_weight),
    "head that is frozen in the step": Case(DoubledHead, frozen_in_the_step),
    "head that is frozen but its bias": Case(frozen_but_its_bias, one_pass(vectors)),
    "experts": Case(Routed, one_pass(vectors)),
    "experts of one row": Case(Routed, one_pass(lambda rank: vectors(rank, 1))),
    "padded frozen head": Case(frozen_tagger, one_pass(labelled_pads)),
    "pads that have labels": Case(Tagger, one_pass(labelled_pads)),
    "two masks": Case(Tagger, one_pass(two_masks)),
    "masks of three forwards": Case(Decoder, three_forwards, passes=3),
    "masks of three recomputed forwards": recomputed(False, False),
    "masks of three forwards, recomputed reentrantly": recomputed(True, False),
    "masks of three forwards, nested": recomputed(False, True),
    "masks of three forwards, nested reentrantly": recomputed(True, True),
}


def run(case: Case, plain: bool = False):
    """The hooks' factors of a case, which are those of the truth."""

    def program(model, backward) -> None:
        case.step(model, lambda loss, **how: backward(loss / case.passes, **how), 0)

    choice = LayerChoice(types=MATRICES, exclude=tuple(case.layers.get("exclude", ())))
    options = {"sharing": case.sharing, "mask": case.mask, "plain": plain}
    return compared(make_net(case.make), program, choice=choice, **options)


@pytest.mark.parametrize("plain", [False, True], ids=["announced", "plain"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_hooks_have_the_factors_of_the_rule(name, plain):
    run(PROGRAMS[name], plain)


Q = "trunk.blocks.0.q_proj"
COUNTS = {
    # rows of the named layer, sum of R_p
    "llama": (Q, 20, 20),
    "llama, padded on the right": (Q, 14, 14),
    "llama, prompts without labels": (Q, 14, 14),
    # a pad predicts the first token, and attends to itself alone: its query has no gradient
    "llama, padded on the left": (Q, 14, 17),
    "llama, padded micro-batches": (Q, 14, 14),
    "llama, a mask from the user": (Q, 14, 14),
    "llama, pads without a mask": (Q, 20, 20),
    "llama, checkpointed reentrantly": (Q, 14, 14),
    "bert, classes": ("trunk.blocks.1.down_proj", 14, 4),
    "tagger, examples": ("inner", 4, 4),
    "cnn": ("stem", 27, 3),
    "cnn, dense prediction": ("stem", 27, 3 * 6 * 8),
    "time first": ("inner", 14, 14),
    "flattened tokens": ("inner", 14, 14),
    "flattened tokens in the head": ("head", 20, 20),
    "pairs of rows": ("inner", 28, 28),
    "two tasks": ("first", 8, 8),
    "retained graph": ("first", 12, 12),
    "evaluated between": ("first", 6, 6),
    "detours": ("first", 6, 6),
    "tiled loss": ("head", 6, 6),
    "micro-batch without a gradient": ("first", 6, 6),
    "frozen head": ("first", 6, 12),
    "head that is frozen in the step": ("first", 6, 12),
    "head that is not stepped": ("first", 6, 12),
    "padded frozen head": ("inner", 15, 15),
    "pads that have labels": ("inner", 15, 15),
    "two masks": ("inner", 18, 18),
    "gradients of no weight": ("first", 6, 6),
    "masks of three recomputed forwards": (Q, 48, 48),
}


@pytest.mark.parametrize("name", COUNTS)
def test_rows_and_loss_terms_are_counted(name):
    layer, rows, terms = COUNTS[name]
    _, truth = truth_of(PROGRAMS[name])
    assert (truth.factors()[layer][2], truth.sums()["terms"]) == (rows, terms)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].sharing == "expand"])
def test_rows_make_the_gradient_of_their_weight(name):
    model, truth = truth_of(CASES[name])
    for layer, (_, rows, _, gradient) in truth.sums()["layers"].items():
        module_name, _, group = layer.partition(":")
        module = model.get_submodule(module_name)
        expected = module.weight.grad
        if isinstance(module, rule_cases.Conv1D):
            expected = expected.T
        elif isinstance(module, nn.ConvTranspose2d):
            expected = expected.flatten(1).T
        elif isinstance(module, nn.Conv2d):
            expected = expected.unflatten(0, (module.groups, -1))[int(group or 0)].flatten(1)
        assert rows > 0
        close(gradient[:, : expected.shape[1]], expected, sums=SUMS, what=layer)


NOT_BY_ORACLE = (
    "tiled|padded micro|checkpointed|chosen|evaluated|gpt2|tokens in|pairs|time first|a gradient"
)
"""It has one mask [N, T] a step, knows no Conv1D, sees a forward and its backward pass in turn, and
counts the rows of a pass whose gradient is zero."""


@pytest.mark.parametrize("name", [n for n in CASES if not re.search(NOT_BY_ORACLE, n)])
def test_the_oracle_has_the_factors_of_the_rule(name):
    case = CASES[name]
    model = make_net(case.make).double()
    excluded = case.layers.get("exclude", ())
    types = ("Linear", "Conv2d", "ConvTranspose2d")
    kfac = ImageKFAC(model, types=types, sharing=case.sharing, exclude=excluded)

    def forward(*args, **kwargs) -> Tensor:
        masks = [x for name, x in kwargs.items() if name.endswith("attention_mask")]
        kfac.mask = case.mask(args, kwargs) if case.mask else next(iter(masks), None)
        return model(*args, **kwargs)

    def backward(loss: Tensor, **options) -> None:
        (loss * 8 / case.passes).backward(**options)

    kfac.scale = 8.0
    with in_float64():
        case.step(forward, backward, 0)
        kfac.fold()
    truth = truth_of(case)[1]
    found = {name: tuple(factors) for name, factors in kfac.factors.items() if factors}
    for layer, (A, G, _) in truth.factors().items():
        if layer not in excluded:
            name = layer if layer in found else f"{layer}:0"
            close(found[name], (A, G), sums=SUMS, what=layer)
    terms = {layer.terms for layer in kfac.layers.values() if layer.factors}
    assert terms == {truth.sums()["terms"]}


# by hand


class OneLayer(nn.Module):
    """A linear layer, whose output is weighed by ``weights`` [N, T] and summed up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, weights: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return (self.layer(x).sin() * weights.unsqueeze(-1)).sum()


NONE, FIRST, OTHERS = torch.zeros(2, 3), torch.eye(2, 3), torch.ones(2, 3) - torch.eye(2, 3)


@pytest.mark.parametrize(
    ("weights", "mask", "zeros", "rows", "examples"),
    [
        (FIRST, None, NONE, 6, 2),
        (FIRST, FIRST, NONE, 2, 2),
        (FIRST, OTHERS, NONE, 6, 2),  # a gradient counts although the mask leaves it out
        (FIRST, FIRST.roll(1, 1), NONE, 4, 2),
        (FIRST, None, OTHERS, 2, 2),  # neither input nor gradient
        (FIRST, None, FIRST, 6, 2),
        (FIRST, OTHERS, OTHERS, 2, 2),
        (FIRST * torch.tensor([[1], [0]]), FIRST * torch.tensor([[1], [0]]), NONE, 1, 1),
    ],
)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "frozen bias"])
def test_rows_by_hand(weights, mask, zeros, rows, examples, sharing, bias):
    """A = mean a a^T over the rows. G = R sum g g^T, where R counts empty places, too."""
    model, x = make_net(OneLayer), torch.randn(2, 3, 3)
    model.layer.bias.requires_grad_(bias)
    x[zeros.bool()] = 0
    gradients = model.layer(x).cos().detach() * weights.unsqueeze(-1)
    attended = weights.bool() | (torch.ones(2, 3) if mask is None else mask).bool()
    counts = attended & (weights.bool() | ~zeros.bool())
    found = compared(
        model, lambda model, backward: backward(model(x, weights, mask)), sharing=sharing
    )
    a = torch.cat([x, torch.ones(2, 3, 1)], -1) if bias else x
    if sharing == "expand":
        a, g, terms = a[counts], gradients[counts], attended.sum()
    else:
        kept, terms = counts.any(1), attended.any(1).sum()
        a = torch.stack([of[own].mean(0) for of, own in zip(a[kept], counts[kept], strict=True)])
        g = gradients.sum(1)
    assert found["layer"][2:] == (len(a), terms)
    assert len(a) == (rows if sharing == "expand" else examples)
    close(found["layer"].A, symmetric_pack(a.T @ a / len(a)), sums=SUMS)
    close(found["layer"].G, symmetric_pack(terms * g.T @ g), sums=SUMS)


def loss_terms(model: Tasks, x: Tensor, y: Tensor) -> Tensor:
    """Second moment of the gradients of each example's loss at the output of ``first``."""
    hidden = model.first(x).detach().requires_grad_()
    loss = F.cross_entropy(model.head(torch.tanh(hidden)), y, reduction="sum")
    (g,) = torch.autograd.grad(loss, hidden)
    return g.T @ g / len(x)


@pytest.mark.parametrize("parts", [[8], [4, 4], [2, 2, 2, 2]], ids=len)
def test_G_is_the_second_moment_of_the_gradients_of_a_means_terms(parts):
    """However a batch is split into micro-batches of equal rows."""
    x, y = vectors(0, 8)

    def program(model, backward) -> None:
        for xs, ys in zip(x.split(parts), y.split(parts), strict=True):
            backward(model(xs, ys) / len(parts))

    model = make_net(Tasks)
    expected = symmetric_pack(loss_terms(model, x, y))
    close(compared(model, program)["first"].G, expected, sums=SUMS)


def test_two_tasks_of_different_sizes_have_the_mean_of_their_factors():
    """G of a step whose loss is the mean of two tasks' losses is the mean of what each task has
    alone."""
    tasks = {"head": vectors(0, 8), "other": vectors(1, 3)}

    def factors(*names):
        def program(model, backward) -> None:
            for name in names:
                backward(model(*tasks[name], task=name) / len(names))

        return compared(make_net(Tasks), program)

    alone, both = [factors(name) for name in tasks], factors(*tasks)
    close(both["first"].G, sum(each["first"].G for each in alone) / 2, sums=SUMS)
    close(both["other"].G, alone[1]["other"].G / 2, sums=SUMS)
    assert both["first"].rows == 11


def texts_of(lengths: list[int], to: int) -> dict[str, Tensor]:
    """Texts of these lengths, padded on the right ``to`` a length."""
    ids, mask = torch.full((len(lengths), to), 3), torch.zeros(len(lengths), to)
    for text, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(length)
        ids[text, :length] = torch.randint(11, (length,), generator=generator)
        mask[text, :length] = 1
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(mask == 0, IGNORED),
        "attention_mask": mask,
    }


@pytest.mark.parametrize("make", [Decoder, lambda: Encoder("words")], ids=["llama", "bert"])
@pytest.mark.parametrize("lengths", [[3, 3, 3], [3, 5, 4]], ids=str)
def test_texts_one_by_one_have_the_factors_of_a_padded_batch(make, lengths):
    """A for any lengths. G if the passes are alike, else a pass counts by its own R."""
    model = make_net(make)
    terms = [length - isinstance(model, Decoder) for length in lengths]

    def one_by_one(model, backward) -> None:
        for length, number in zip(lengths, terms, strict=True):
            backward(model(**texts_of([length], length)) * number / sum(terms))

    alone = compared(make_net(make), one_by_one)
    padded = lambda model, backward: backward(model(**texts_of(lengths, TOKENS)))  # noqa: E731
    together = compared(model, padded)
    for name, (A, G, *counts) in alone.items():
        assert counts == [sum(lengths)] * 2 == list(together[name][2:])
        close(A, together[name].A, sums=SUMS, what=f"A of {name}")
        if len(set(lengths)) == 1:
            close(G, together[name].G, sums=SUMS, what=f"G of {name}")


@pytest.mark.parametrize("name", ["mlp", "tiled loss"])
@pytest.mark.parametrize("scaled", [True, False])
def test_the_loss_scale_does_not_change_the_factors_but_the_size_of_the_loss_does(name, scaled):
    """G has the square of it. A pass inside of the forward, as in the tiled head, has none."""
    recorder = Recorder(make_net(CASES[name].make), scale=256.0 if scaled else 1.0)
    recorder.backward(256 * recorder.model(*vectors(0)))
    plain = run(CASES[name])
    for layer, found in recorder.factors().items():
        inside = name == "tiled loss" and layer == "head"
        size = 1 if scaled or inside else 256**2
        close((found.A, found.G), (plain[layer].A, size * plain[layer].G), sums=SUMS)


# masks

ATTENDED = texts(0, pads="right")["attention_mask"].bool()


@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        *((ATTENDED.to(dtype), 14) for dtype in (torch.int32, torch.bfloat16, torch.uint8)),
        (ATTENDED.float(), 14),
        (torch.where(ATTENDED, 0.0, -1e9), 20),
        (torch.where(ATTENDED, 0.0, float("-inf")), 20),
        (ATTENDED.long() * 2, 20),  # numbers of packed documents
        (ATTENDED[:, None, None, :], 20),
        (ATTENDED[:2], 20),
        ("causal", 20),
    ],
)
def test_a_mask_is_of_two_values_and_dimensions_and_anything_else_leaves_nothing_out(mask, rows):
    batch = {**texts(0, pads="right"), "attention_mask": mask}
    recorder = Recorder(Tagger())
    recorder.backward(recorder.model(**batch))
    assert recorder.rows() == {"inner": rows, "head": rows}


@pytest.mark.parametrize("how", ["mapping", "several returned"])
def test_masks_are_read_in_mappings_and_from_a_function(how):
    mask = None
    if how == "several returned":
        mask = lambda arguments, keywords: [ATTENDED, ATTENDED.flip(0)]  # noqa: E731
    recorder = Recorder(Tagger(), mask=mask)
    forward, batch = recorder.model.forward, two_masks(0)
    recorder.model.forward = lambda inputs: forward(**inputs)
    recorder.backward(recorder.model(batch))
    assert recorder.rows() == {"inner": 18, "head": 18}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_a_mask_is_that_of_the_forward_though_its_memory_is_used_again(dtype):
    """As a loader's buffer, which has the next batch before the backward pass."""
    batch = decoder_texts(0)
    mask = batch["decoder_attention_mask"] = batch["decoder_attention_mask"].to(dtype)
    recorder = Recorder(Tagger())
    loss = recorder.model(**batch)
    mask.fill_(1)
    recorder.backward(loss)
    assert recorder.rows()["inner"] == 14


def test_a_function_that_returns_no_mask_is_told_what_it_must_return():
    for returned, got in ((ATTENDED[..., None], r"\[4, 5, 1\]"), (["mask"], "str")):
        with pytest.raises(ValueError, match=rf"engine.kfac.mask: got {got}; must return masks"):
            list(masks_in(returned))
    assert list(masks_in(None)) == []


# checkpointing


class Checkpointed(Mlp):
    reentrant: bool | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in (lambda x: torch.relu_(self.first(x)), lambda x: self.head(x)):
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x.requires_grad_(), use_reentrant=self.reentrant)
        return F.cross_entropy(x, y)


STEPS = ["micro-batches", "retained graph", "several forwards", "chosen and rejected"]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", [*STEPS, "evaluated between"])
def test_checkpointing_changes_no_bit(name, reentrant, plain):
    found = []
    for kind in (None, reentrant):
        model = make_net(Checkpointed)
        model.reentrant = kind
        recorder = Recorder(model)
        CASES[name].step(model, unannounced if plain else recorder.backward, 0)
        assert not recorder.capture.failed
        found.append(recorder.factors())
    equal_bits(found[1], found[0])


@pytest.mark.parametrize("reentrant", [None, False])
def test_a_sampled_loss_has_the_same_factors_with_checkpointing(reentrant):
    """Autograd is asked for the gradients at the calls of the first run; the recomputation has none
    of its own."""
    model = make_net(Checkpointed)
    recorder = Recorder(model, sampled=True)
    model.reentrant = reentrant
    loss = model(*vectors(0))
    recorder.sample(loss)
    recorder.backward(loss)
    assert not recorder.capture.failed and not recorder.capture.pending
    expected = run(replace(CASES["mlp"], make=Checkpointed))
    for name, factors in recorder.factors().items():
        close(factors, expected[name], sums=SUMS)


# norms


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rms = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-5)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.outputs = self.norm(x), self.rms(x)
        for output in self.outputs:
            output.retain_grad()
        return F.cross_entropy(self.head(torch.tanh(sum(self.outputs))), y)


def test_a_norm_has_a_gradient_of_weight_and_bias_for_each_position():
    recorder = Recorder(Normed(), LayerChoice(types=("Linear", "LayerNorm", "RMSNorm")))
    expected = {"norm": 0.0, "rms": 0.0}
    for rank in range(2):
        recorder.backward(recorder.model(*vectors(rank)) / 2)
        for name, output in zip(expected, recorder.model.outputs, strict=True):
            # weights are 1 and biases 0: an output is the normalized input
            g, of_weight = output.grad, output.grad * output.detach()
            products = [of_weight**2] if name == "rms" else [of_weight**2, of_weight * g, g**2]
            expected[name] += 12 * torch.stack(products, -1).sum(0).flatten()
    found = recorder.factors()
    assert found["norm"][2:] == found["rms"][2:] == (12, 12)
    close({name: found[name].A for name in expected}, expected, sums=SUMS)
