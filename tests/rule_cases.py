"""Models and training steps on which the rule of A and G is tested: the truth by hand, and the
capture by the truth.

The models are small, in plain torch, and return their loss.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.models import make_net
from tests.truth import Truth

VOCABULARY, WIDTH, TOKENS, CLASSES = 11, 8, 5, 3
IGNORED = -100


class Conv1D(nn.Module):
    """As in transformers: y = x W + b, W [in, out]."""

    def __init__(self, nx: int, nf: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.3)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return y.view(*x.shape[:-1], self.nf)


class LlamaRMSNorm(nn.Module):
    """As in transformers: torch does not need a 16-bit input after the call."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        z = x.float()
        z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * z.to(x.dtype)


class Block(nn.Module):
    """Attention and an MLP. ``linear`` makes the linear maps."""

    def __init__(self, linear: Callable[[int, int], nn.Module], causal: bool) -> None:
        super().__init__()
        self.causal, self.norm = causal, nn.RMSNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj = (linear(WIDTH, WIDTH) for _ in range(3))
        self.up_proj, self.down_proj = linear(WIDTH, 12), linear(12, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """On [N, T, C]. A token may always attend to itself."""
        q, k, v = (proj(self.norm(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        allowed = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool)
        allowed = allowed.tril() if self.causal else allowed
        if mask is not None:
            allowed = (allowed & mask.bool()[:, None]) | torch.eye(len(allowed), dtype=torch.bool)
        scores = (q @ k.mT / WIDTH**0.5).masked_fill(~allowed, -torch.inf)
        x = x + scores.softmax(-1) @ v
        return x + self.down_proj(F.silu(self.up_proj(x), inplace=True))


def without_bias(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False)


class Decoder(nn.Module):
    """A language model as Llama, with :class:`Conv1D` as GPT-2, or as BERT.

    Args:
        linear: makes a linear map of some inputs and outputs.
        task: "next" token, or "classes", by the first token.
        reentrant: which kind of activation checkpointing the blocks use; None: none.
        nested: whether both blocks together are checkpointed, too.
    """

    def __init__(
        self,
        linear: Callable[[int, int], nn.Module] = without_bias,
        *,
        task: str = "next",
        reentrant: bool | None = None,
        nested: bool = False,
    ) -> None:
        super().__init__()
        self.task, self.reentrant, self.nested = task, reentrant, nested
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(linear, task == "next") for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, CLASSES if task == "classes" else VOCABULARY, bias=False)

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        x = self.embed(input_ids)
        if self.nested:
            x = checkpoint(self.run_blocks, x, attention_mask, use_reentrant=self.reentrant)
        else:
            x = self.run_blocks(x, attention_mask)
        if self.task == "classes":
            return F.cross_entropy(self.lm_head(x[:, 0]), labels)
        logits, labels = self.lm_head(x)[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x, mask)
            else:
                x = checkpoint(block, x, mask, use_reentrant=self.reentrant)
        return x


class Cnn(nn.Module):
    """Strides, dilation, groups and a transposed convolution; ``dense``: its last layer is a
    convolution."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.dense = dense
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(6, 8, (3, 2), padding=(2, 1), dilation=(2, 1), groups=2)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2, bias=False)
        self.head = nn.Conv2d(6, CLASSES, 1) if dense else nn.Linear(6, CLASSES)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x = torch.relu_(self.stem(pixels.to(self.stem.weight.dtype)))
        x = torch.tanh(self.up(torch.tanh(self.grouped(x))))
        if not self.dense:
            return F.cross_entropy(self.head(x.mean((2, 3))), labels)
        z = self.head(x)
        return F.cross_entropy(z, labels[:, None, None].expand(z[:, 0].shape))


class Mlp(nn.Module):
    """On [N, C], with an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, 7), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = F.silu(self.first(x.to(self.head.weight.dtype)), inplace=True)
        return F.cross_entropy(self.head(hidden), y)


class Tasks(Mlp):
    """Two heads for tasks of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(7, 2)

    def forward(self, x: Tensor, y: Tensor, task: str = "head") -> Tensor:
        hidden = torch.tanh(self.first(x.to(self.head.weight.dtype)))
        head = self.head if task == "head" else self.other
        return F.cross_entropy(head(hidden), y % head.out_features)


class Detours(Mlp):
    """Calls that bring no rows: without gradients, detached, and with a gradient of zero in every
    entry."""

    def __init__(self) -> None:
        super().__init__()
        self.dummy = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.to(self.head.weight.dtype)
        with torch.no_grad():
            self.first(x + 1)
        self.first(x + 2).detach()
        zero = 0 * self.dummy(x).sum() + 0 * self.first(x + 3).sum()
        return super().forward(x, y) + zero


class TiledLoss(torch.autograd.Function):
    """The sum of tiles' losses. Its forward runs their backward passes, as DeepSpeed's tiled loss
    does."""

    @staticmethod
    def forward(ctx, x: Tensor, head: nn.Module, y: Tensor) -> Tensor:
        x, total = x.detach().requires_grad_(), 0.0
        with torch.enable_grad():
            for tile in (slice(0, 4), slice(4, None)):
                loss = F.cross_entropy(head(x[tile]), y[tile], reduction="sum") / len(x)
                torch.autograd.backward(loss)
                total = total + loss.detach()
        ctx.save_for_backward(x.grad)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * gradient, None, None


class Tiled(Mlp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.to(self.head.weight.dtype)))
        return TiledLoss.apply(hidden, self.head, y)


class DoubledHead(Mlp):
    """Its head has two rows for each row of the other layer."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.to(self.head.weight.dtype)))
        return F.cross_entropy(self.head(torch.cat([hidden, hidden.sin()])), torch.cat([y, y]))


class Tagger(nn.Module):
    """A class for each token, by the token alone.

    Args:
        rows: what the layers see: "tokens" [N, T], "time first" [T, N], "flat" [N T], "pairs"
            [N, T, 2]; "flat head": [N, T], but [N T] in the head.
    """

    def __init__(self, rows: str = "tokens") -> None:
        super().__init__()
        self.rows, self.embed = rows, nn.Embedding(VOCABULARY, WIDTH)
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        x = self.embed(input_ids)
        if self.rows == "time first":
            x, labels = x.transpose(0, 1), labels.T
        elif self.rows == "flat":
            x = x.flatten(0, 1)
        elif self.rows == "pairs":
            x = torch.stack([x, x.sin()], 2)
        x = torch.tanh(self.inner(x))
        z = self.head(x.flatten(0, 1) if self.rows == "flat head" else x)
        z = z.mean(2) if self.rows == "pairs" else z
        return F.cross_entropy(z.reshape(-1, VOCABULARY), labels.flatten())


# data, another for each rank


def vectors(rank: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(40 + rank)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float32)
    return x, torch.randint(CLASSES, (rows,), generator=generator)


def images(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(50 + rank)
    x = torch.randn(3, 3, 6, 6, generator=generator, dtype=torch.float32)
    return x, torch.randint(CLASSES, (3,), generator=generator)


def texts(rank: int, *, pads: str = "right", masked: bool = True) -> dict[str, Tensor]:
    """Arguments of a language model, with 0 to 3 pads in a text. ``masked``: they show their
    mask."""
    generator = torch.Generator().manual_seed(60 + rank)
    input_ids = torch.randint(VOCABULARY, (4, TOKENS), generator=generator)
    mask = torch.arange(TOKENS) < TOKENS - torch.arange(4)[:, None]
    mask = mask if pads == "right" else mask.flip(1)
    batch = {"input_ids": input_ids, "labels": input_ids.masked_fill(~mask, IGNORED)}
    return {**batch, "attention_mask": mask.long()} if masked else batch


def prompts(rank: int) -> dict[str, Tensor]:
    """Texts whose first two tokens have no label."""
    batch = texts(rank)
    batch["labels"][:, :2] = IGNORED
    batch["labels"][0, :4] = IGNORED
    return batch


# steps


Forward = Callable[..., Tensor]
Backward = Callable[..., None]
Step = Callable[[Forward, Backward, int], None]
"""(the model's forward, what takes the place of ``loss.backward()``, rank)."""


def in_parts(batch: Callable[[int], Any], *parts: slice) -> Step:
    """A forward and a backward pass for each part of a batch."""

    def step(forward: Forward, backward: Backward, rank: int) -> None:
        arguments = batch(rank)
        for part in parts:
            if isinstance(arguments, dict):
                backward(forward(**{name: x[part] for name, x in arguments.items()}))
            else:
                backward(forward(*(x[part] for x in arguments)))

    return step


def one_pass(batch: Callable[[int], Any]) -> Step:
    return in_parts(batch, slice(None))


def two_tasks(forward: Forward, backward: Backward, rank: int) -> None:
    backward(forward(*vectors(rank, 6), task="head"))
    backward(forward(*vectors(rank + 7, 2 + rank), task="other"))


def retained(forward: Forward, backward: Backward, rank: int) -> None:
    loss = forward(*vectors(rank))
    backward(loss, retain_graph=True)
    backward(loss)


def several_forwards(forward: Forward, backward: Backward, rank: int) -> None:
    x, y = vectors(rank)
    backward((forward(x[:2], y[:2]) + forward(x[2:], y[2:])) / 2)


def chosen_and_rejected(forward: Forward, backward: Backward, rank: int) -> None:
    """Two forwards, then a backward pass through each, the last forward's first."""
    x, y = vectors(rank)
    losses = [forward(x[:2], y[:2]), forward(x[2:], y[2:])]
    backward(losses[1])
    backward(losses[0])


def evaluated_between(forward: Forward, backward: Backward, rank: int) -> None:
    """A forward without a backward pass, whose graph stays alive, and some without gradients."""
    x, y = vectors(rank)
    skipped = forward(torch.full_like(x, torch.nan), y)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            forward(x + 2, y)
    backward(forward(x, y))
    assert skipped.requires_grad


def without_gradient(forward: Forward, backward: Backward, rank: int) -> None:
    """The gradient of a second micro-batch is zero in every entry."""
    backward(forward(*vectors(rank)))
    backward(0 * forward(*vectors(rank + 1)))


def frozen(make: Callable[[], nn.Module], name: str = "head") -> nn.Module:
    """A model with a frozen module or parameter."""
    model = make()
    attrgetter(name)(model).requires_grad_(False)
    return model


def zero_head() -> nn.Module:
    model = Mlp()
    nn.init.zeros_(model.head.weight)
    return model


def mask_of_labels(args: tuple, kwargs: dict) -> Tensor:
    return kwargs["labels"] != IGNORED


@dataclass(frozen=True)
class Case:
    """A model and a training step on it.

    Attributes:
        passes: number of backward passes of the step on a rank.
        sharing: ``kfac.factor.weight_sharing``.
        mask: ``engine.kfac.mask``.
        layers: ``kfac.layers``, what K-FAC steps.
    """

    make: Callable[[], nn.Module]
    step: Step
    passes: int = 1
    sharing: str = "expand"
    mask: Callable[[tuple, dict], Tensor] | None = None
    layers: dict[str, Any] = field(default_factory=dict)


PADDED_PARTS = in_parts(texts, slice(0, 1), slice(1, 4))
CASES = {
    "mlp": Case(Mlp, one_pass(vectors)),
    "llama, padded on the left": Case(Decoder, one_pass(partial(texts, pads="left"))),
    "llama, prompts without labels": Case(Decoder, one_pass(prompts)),
    "llama, checkpointed": Case(partial(Decoder, reentrant=False), one_pass(prompts)),
    "llama, padded micro-batches": Case(Decoder, PADDED_PARTS, passes=2),
    "llama, padded micro-batches, checkpointed reentrantly": Case(
        partial(Decoder, reentrant=True), PADDED_PARTS, passes=2
    ),
    "llama, a mask from the user": Case(
        Decoder, one_pass(partial(texts, masked=False)), mask=mask_of_labels
    ),
    "llama, pads without a mask": Case(Decoder, one_pass(partial(texts, masked=False))),
    "gpt2": Case(partial(Decoder, Conv1D), one_pass(prompts)),
    "bert, classes": Case(
        partial(Decoder, nn.Linear, task="classes"),
        one_pass(lambda rank: {**texts(rank), "labels": vectors(rank, 4)[1]}),
    ),
    "tagger, examples": Case(Tagger, one_pass(texts), sharing="reduce"),
    "cnn": Case(partial(Cnn, dense=False), one_pass(images)),
    "cnn, dense prediction": Case(partial(Cnn, dense=True), one_pass(images)),
    "cnn, examples": Case(partial(Cnn, dense=True), one_pass(images), sharing="reduce"),
    "time first": Case(partial(Tagger, "time first"), one_pass(texts)),
    "flattened tokens": Case(partial(Tagger, "flat"), one_pass(texts)),
    "flattened tokens in the head": Case(partial(Tagger, "flat head"), one_pass(texts)),
    "pairs of rows": Case(partial(Tagger, "pairs"), one_pass(texts)),
    "micro-batches": Case(Mlp, in_parts(vectors, slice(0, 3), slice(3, 6)), passes=2),
    "two tasks": Case(Tasks, two_tasks, passes=2),
    "retained graph": Case(Mlp, retained, passes=2),
    "several forwards": Case(Mlp, several_forwards),
    "chosen and rejected": Case(Mlp, chosen_and_rejected, passes=2),
    "evaluated between": Case(Mlp, evaluated_between),
    "tiled loss": Case(Tiled, one_pass(vectors)),
    "detours": Case(Detours, one_pass(vectors)),
    "frozen head": Case(partial(frozen, DoubledHead), one_pass(vectors)),
    "head of zeros": Case(zero_head, one_pass(vectors)),
    "micro-batch without a gradient": Case(Mlp, without_gradient, passes=2),
    "head that is not stepped": Case(DoubledHead, one_pass(vectors), layers={"exclude": ["head"]}),
}


def truth_of(case: Case, rank: int = 0) -> tuple[nn.Module, Truth]:
    """The model after a rank's step, in float64, and what happened in it. As DeepSpeed does, the
    loss of each pass is divided by the number of passes."""

    def backward(loss: Tensor, **options) -> None:
        (loss / case.passes).backward(**options)

    model = make_net(case.make).double()
    truth = Truth(model, mask=case.mask, sharing=case.sharing)
    with truth:
        case.step(model, backward, rank)
    return model, truth
