"""The rule by which rows make A and G (docs/explanation/capture.md): what it means, by hand, and
that the hooks have the factors of tests/truth.py."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_kfac.model.masks import masks_in
from ds_kfac.model.registry import MATRICES
from ds_kfac.model.scan import LayerChoice
from tests.close import close
from tests.model.recorder import Recorder, compared
from tests.models import make_net
from tests.ops.specification import symmetric_pack
from tests.rule_cases import (
    CASES,
    TOKENS,
    WIDTH,
    Case,
    Cnn,
    Decoder,
    DoubledHead,
    Mlp,
    Tagger,
    frozen,
    images,
    in_parts,
    one_pass,
    texts,
    truth_of,
    vectors,
)

STEPS = (
    "micro-batches",
    "retained graph",
    "several forwards",
    "chosen and rejected",
    "evaluated between",
)
SUMS = 1000
"""Terms that are added one after another on the way to an element, at most."""


# programs that are for the hooks alone


def frozen_in_the_step(forward, backward, rank: int) -> None:
    forward.head.requires_grad_(False)
    backward(forward(*vectors(rank)))


def labelled_pads(rank: int) -> dict[str, Tensor]:
    """One of the pads has a label, and so a gradient."""
    batch = texts(rank)
    batch["labels"][3, 4] = 2
    return batch


def two_masks(rank: int) -> dict[str, Tensor]:
    batch = texts(rank)
    batch["decoder_attention_mask"] = batch["attention_mask"].flip(0)
    return batch


def three_forwards(forward, backward, rank: int) -> None:
    """Each with a mask of its own; the pass of one without pads comes last."""
    batches = [texts(rank), texts(rank + 1), texts(rank)]
    batches[2]["attention_mask"] = torch.ones(4, TOKENS)
    for output in [forward(**batch) for batch in batches]:
        backward(getattr(output, "loss", output))


class Hidden:
    """An output that nobody can look into, and that does not show its backward pass."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class HiddenDecoder(Decoder):
    def forward(self, *args, **kwargs) -> Hidden:
        return Hidden(super().forward(*args, **kwargs))


class Checkpointed(Mlp):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in (lambda x: torch.relu_(self.first(x)), lambda x: self.head(x)):
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x.requires_grad_(), use_reentrant=self.reentrant)
        return F.cross_entropy(x, y)


class Twice(Mlp):
    """One module called twice, or two with the same parameters."""

    def __init__(self, names: int) -> None:
        super().__init__()
        self.inner = self.again = nn.Linear(WIDTH, WIDTH)
        if names > 1:
            self.again = nn.Linear(WIDTH, WIDTH)
            self.again.weight, self.again.bias = self.inner.weight, self.inner.bias

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.again(torch.tanh(self.inner(x))), y)


class Cast(Mlp):
    """An input is changed in place after the layer: the layer's product has a copy in 16 bits."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x * 1.0
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.first(x)
            x.zero_()
            return F.cross_entropy(self.head(hidden.tanh()).float(), y)


WITH_EMPTY = slice(0), slice(None), slice(0)
PROGRAMS = CASES | {
    "head that is frozen in the step": Case(DoubledHead, frozen_in_the_step),
    "head that is frozen but its bias": Case(
        partial(frozen, DoubledHead, "head.weight"), one_pass(vectors)
    ),
    "padded frozen head": Case(partial(frozen, Tagger), one_pass(labelled_pads)),
    "pads that have labels": Case(Tagger, one_pass(labelled_pads)),
    "hidden losses of three forwards, recomputed reentrantly": Case(
        partial(HiddenDecoder, reentrant=True), three_forwards, passes=3
    ),
    "masks of three forwards": Case(Decoder, three_forwards, passes=3),
    "masks of three forwards, recomputed": Case(
        partial(Decoder, reentrant=False), three_forwards, passes=3
    ),
    "masks of three forwards, nested reentrantly": Case(
        partial(Decoder, reentrant=True, nested=True), three_forwards, passes=3
    ),
    "two masks": Case(Tagger, one_pass(two_masks)),
    "a module that is called twice": Case(partial(Twice, 1), one_pass(vectors)),
    "two modules of the same parameters": Case(partial(Twice, 2), one_pass(vectors)),
    "bfloat16": Case(Cast, one_pass(vectors)),
    "empty batches": Case(Mlp, in_parts(vectors, *WITH_EMPTY), passes=3),
    "no images": Case(partial(Cnn, dense=True), in_parts(images, *WITH_EMPTY), passes=3),
    # it has the shape of the images' first two dimensions
    "a mask of texts": replace(CASES["cnn"], mask=lambda *_: torch.zeros(3, 3)),
    **{
        f"{name}, checkpointed {reentrant}": replace(
            CASES[name], make=partial(Checkpointed, reentrant)
        )
        for name in STEPS
        for reentrant in (False, True)
    },
}
PROGRAMS |= {
    f"{name}, examples": replace(PROGRAMS[name], sharing="reduce")
    for name in ("empty batches", "several forwards", "tiled loss", "padded frozen head", "detours")
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


Q = "blocks.0.q_proj"
COUNTS = {
    # rows of the named layer, sum of R_p
    "llama, padded micro-batches": (Q, 14, 14),
    # a pad predicts the first token, and attends to itself alone: its query has no gradient
    "llama, padded on the left": (Q, 14, 17),
    "bert, classes": ("blocks.1.down_proj", 14, 4),
    "tagger, examples": ("inner", 4, 4),
    "flattened tokens in the head": ("head", 20, 20),
    "two tasks": ("first", 8, 8),
    "micro-batch without a gradient": ("first", 6, 6),
    "frozen head": ("first", 6, 12),
    "pads that have labels": ("inner", 15, 15),
    "two masks": ("inner", 18, 18),
}


@pytest.mark.parametrize("name", COUNTS)
def test_rows_and_loss_terms_are_counted(name):
    layer, rows, terms = COUNTS[name]
    _, truth = truth_of(PROGRAMS[name])
    assert (truth.factors()[layer][2], truth.sums()["terms"]) == (rows, terms)


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

ATTENDED = texts(0)["attention_mask"].bool()


@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        (ATTENDED.to(torch.int32), 14),
        (ATTENDED.bfloat16(), 14),
        (torch.where(ATTENDED, 0.0, -1e9), 20),
        (ATTENDED.long() * 2, 20),  # numbers of packed documents
        (ATTENDED[:, None, None, :], 20),
        (ATTENDED[:2], 20),
        ("causal", 20),
    ],
)
def test_a_mask_is_of_two_values_and_dimensions_and_anything_else_leaves_nothing_out(mask, rows):
    batch = {**texts(0), "attention_mask": mask}
    recorder = Recorder(Tagger())
    recorder.backward(recorder.model(**batch))
    assert recorder.rows() == {"inner": rows, "head": rows}


def test_masks_are_read_in_mappings_and_from_a_function():
    for mask in (None, lambda arguments, keywords: [ATTENDED, ATTENDED.flip(0)]):
        recorder = Recorder(Tagger(), mask=mask)
        forward = recorder.model.forward
        recorder.model.forward = lambda inputs, forward=forward: forward(**inputs)
        recorder.backward(recorder.model(two_masks(0)))
        assert recorder.rows() == {"inner": 18, "head": 18}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_a_mask_is_that_of_the_forward_though_its_memory_is_used_again(dtype):
    """As a loader's buffer, which has the next batch before the backward pass."""
    batch = texts(0)
    mask = batch["attention_mask"] = batch["attention_mask"].to(dtype)
    recorder = Recorder(Tagger())
    loss = recorder.model(**batch)
    mask.fill_(1)
    recorder.backward(loss)
    assert recorder.rows()["inner"] == 14


def test_a_function_that_returns_no_mask_is_told_what_it_must_return():
    for returned, got in ((ATTENDED[..., None], r"\[4, 5, 1\]"), (["mask"], "str")):
        with pytest.raises(ValueError, match=rf"engine.kfac.mask: got {got}; must return a mask"):
            list(masks_in(returned))
    assert list(masks_in(None)) == []


# checkpointing


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
