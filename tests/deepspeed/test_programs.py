"""Programs as others write them, each a kind of its own: A and G of every layer in every captured
step are those of plain autograd, or the layers are told that do not fit."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ds_kfac.step import proving
from tests.close import close
from tests.deepspeed.modes import Mode
from tests.deepspeed.runs import build
from tests.deepspeed.test_rule import factors_of
from tests.ranks import of_ranks
from tests.truth import Truth, factors_of_ranks

EVERY_STEP = {
    "factor": {"update_interval": 1, "rows": "all", "decay": 0.0},
    "eigenbasis": {"refresh_interval": 1},
    "burn_in": {"steps": 0},
}
"""The average of a factor is its last batch."""
STILL = {"type": "SGD", "params": {"lr": 1e-30}}
N, D, C, STEPS = 6, 7, 5, 3


def generator_of(number: int) -> torch.Generator:
    """Each rank has other data."""
    return torch.Generator().manual_seed(number + 10_000 * dist.get_rank())


def data(step: int, *shape: int, k: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator_of(100 * step + k))


def labels(step: int, *shape: int, k: int = 0) -> Tensor:
    return torch.randint(C, shape, generator=generator_of(100 * step + 50 + k))


class Program(nn.Module):
    """A model, and a step of it.

    Attributes:
        widths: of linear layers, or of several one after the other, by name.
        stage: of ZeRO.
        config: more of the DeepSpeed config.
        unfit: layers whose gradient is not that of their rows, which are told.
        first_unfit: the step from which on they are not.
    """

    widths: dict[str, tuple[int, ...]] = {"net": (D, 9, C)}
    accumulation = 1
    stage = 0
    config: dict = {}
    unfit = frozenset[str]()
    first_unfit = 0

    def __init__(self, **attributes) -> None:
        super().__init__()
        vars(self).update(attributes)
        for name, widths in self.widths.items():
            layers = [nn.Linear(*pair) for pair in pairwise(widths)]
            parts = [part for layer in layers for part in (layer, nn.Tanh())]
            setattr(self, name, nn.Sequential(*parts[:-1]) if len(layers) > 1 else layers[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def run(self, engine, step: int) -> None:
        engine.backward(F.cross_entropy(engine(data(step, N, D)), labels(step, N)))
        engine.step()


class Plain:
    """An engine without DeepSpeed and K-FAC: the model and autograd alone."""

    def __init__(self, model: Program) -> None:
        self.model = self.module = model
        self.no_sync = nullcontext

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool = True, **options: bool) -> None:
        (loss / (self.model.accumulation if scale_wrt_gas else 1)).backward(**options)

    def step(self) -> None:
        pass

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        pass

    def zero_grad(self) -> None:
        self.model.zero_grad()


class ReversibleFunction(torch.autograd.Function):
    """The backward runs a forward and a backward of its own for each half."""

    @staticmethod
    def forward(ctx, x, f, g):
        a, b = x.chunk(2, -1)
        a = a + f(b)
        ctx.f, ctx.g, out = f, g, torch.cat([a, b + g(a)], -1)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        (a, b), (da, db) = ctx.saved_tensors[0].chunk(2, -1), gradient.chunk(2, -1)
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            after = ctx.g(a)
        torch.autograd.backward(after, db)
        b, da = (b - after).detach().requires_grad_(), da + a.grad
        with torch.enable_grad():
            after = ctx.f(b)
        torch.autograd.backward(after, da)
        return torch.cat([da, db + b.grad], -1), None, None


class Reversible(Program):
    widths = {"i": (D, 8), "f": (4, 5, 4), "g": (4, 6, 4), "o": (8, C)}

    def forward(self, x):
        return self.o(ReversibleFunction.apply(self.i(x), self.f, self.g))


class Meta(Program):
    """Fast weights by functional_call, of the first order, whose gradient is that of the
    weights."""

    second = False

    def forward(self, x, y, query):
        fast = dict(self.net.named_parameters())
        for _ in range(2):
            loss = F.cross_entropy(functional_call(self.net, fast, (x,)), y)
            gradients = torch.autograd.grad(loss, tuple(fast.values()), create_graph=self.second)
            fast = {name: p - 0.5 * g for (name, p), g in zip(fast.items(), gradients, strict=True)}
        return functional_call(self.net, fast, (query,))

    def run(self, engine, step):
        z = engine(data(step, N, D), labels(step, N), data(step, N, D, k=1))
        engine.backward(F.cross_entropy(z, labels(step, N, k=1)))
        engine.step()


class SecondOrder(Meta):
    second, unfit = True, frozenset({"net.2"})


class Weighed(Program):
    """Two losses are returned, and weighed outside; a gate that begins at zero is opened later."""

    widths = {"trunk": (D, 8), "one": (8, C), "other": (8, 1), "adapter": (8, 4, 8)}

    def forward(self, x, y, t, gate):
        h = self.trunk(x)
        h = h + gate * self.adapter(h)
        aux = F.mse_loss(self.other(h).squeeze(-1), t)
        return {"aux": aux, "ce": F.cross_entropy(self.one(h), y)}

    def run(self, engine, step):
        losses = engine(data(step, N, D), labels(step, N), data(step, N), float(step > 0))
        engine.backward(losses["ce"] + 0.1 * losses["aux"])
        engine.step()


class Offloaded(Program):
    """Both checkpointings in a row, with what is saved moved to the host, and dropout."""

    widths = {"i": (D, 8), "o": (8, C)}

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4))
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x):
        h = checkpoint_sequential(self.blocks, 2, self.i(x), use_reentrant=True)
        with torch.autograd.graph.save_on_cpu():
            return self.o(checkpoint_sequential(self.blocks, 2, h, use_reentrant=False))


class BothWays(Program):
    """One scan of a padded sequence from both sides. Padding that the loss sees counts, though a
    mask leaves it out."""

    widths = {"emb": (D, 8), "i": (8, 8), "h": (8, 8), "o": (16, C)}

    def scan(self, x):
        h, found = torch.zeros(len(x), 8), []
        for u in self.i(x).unbind(1):
            h = torch.tanh(u + self.h(h))
            found.append(h)
        return torch.stack(found, 1)

    def forward(self, x, attention_mask, labels):
        x = self.emb(x)
        z = self.o(torch.cat([self.scan(x), self.scan(x.flip(1)).flip(1)], -1))
        return F.cross_entropy(z.flatten(0, 1), labels.flatten())

    def run(self, engine, step):
        mask = torch.arange(7) < torch.tensor([7, 4, 5, 6])[:, None]
        y = labels(step, 4, 7).masked_fill(~mask, -100)
        engine.backward(engine(data(step, 4, 7, D), mask.long(), y))
        engine.step()


class OneRow(Program):
    """An agent that acts on one state."""

    def run(self, engine, step):
        engine.backward((engine(data(step, D))[step] - 0.3).square())
        engine.step()


class Sharp(OneRow):
    """Sharpness-aware: the gradient is that of the second of two backwards, at other weights."""

    unfit = frozenset({"net.0", "net.2"})

    def run(self, engine, step):
        x, y = data(step, N, D), labels(step, N)
        engine.backward(F.cross_entropy(engine(x), y))
        moves = [p.grad.clone() for p in self.parameters()]
        torch._foreach_add_([p.data for p in self.parameters()], moves)
        engine.zero_grad()
        engine.backward(F.cross_entropy(engine(x), y))
        torch._foreach_sub_([p.data for p in self.parameters()], moves)
        engine.step()


class FrozenPlain(Program):
    """A frozen head on a padded text's last token, by ``loss.backward()``; before it, how the
    output depends on an input."""

    widths = {"net": (D, 9, 8), "head": (8, C)}
    stage = 2

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)

    def forward(self, x):
        return self.head(self.net(x)[:, -1])

    def run(self, engine, step):
        x = data(step, 2, 5, D, k=1).requires_grad_()
        torch.autograd.grad(engine.module(x).sum(), x)
        loss = F.cross_entropy(engine(data(step, 4, 5, D)), labels(step, 4))
        loss.backward()
        engine.step()


class Whole(Program):
    """The whole model is a checkpoint, so that its last layer makes the output; another forward has
    no backward."""

    stage = 2

    def forward(self, x):
        return checkpoint(self.net, x.requires_grad_(), use_reentrant=False)

    def run(self, engine, step):
        z = engine(data(step, N, D))
        engine(data(step, 2, D, k=1))
        engine.backward(F.cross_entropy(z, labels(step, N)))
        engine.step()


class Tiled(Program):
    """The head and the loss are computed in tiles, each a checkpoint, after the model's forward."""

    widths = {"net": (D, 9, 8), "head": (8, C)}

    def run(self, engine, step):
        def loss(h, y):
            return F.cross_entropy(engine.module.head(h), y, reduction="sum")

        h, y = engine(data(step, 8, D)), labels(step, 8)
        tiles = [
            checkpoint(loss, h[k : k + 3], y[k : k + 3], use_reentrant=True) for k in range(0, 8, 3)
        ]
        engine.backward(sum(tiles) / 8)
        engine.step()


class RowsLast(nn.Linear):
    def forward(self, x):
        return super().forward(x).mT


class Turned(Program):
    """A frozen layer that returns its output with the rows last."""

    widths = {"net": (D, 9, 8), "head": (8, C)}

    def __init__(self) -> None:
        super().__init__()
        self.last = RowsLast(8, 9).requires_grad_(False)

    def forward(self, x):
        x = self.net(x)
        return self.head(x + F.pad(self.last(x).mT, (0, -1)))


class Heads(Program):
    """Two tasks on one trunk: both heads are computed, and some of them have a loss.

    Attributes:
        tasks: (step, micro-batch, rank) -> the heads that have one.
        weighed: whether the others have a loss, too, of weight zero.
    """

    widths = {"trunk": (D, 12), "one": (12, C), "other": (12, C)}
    accumulation = 2
    tasks: Callable[[int, int, int], tuple[int, ...]]
    weighed = False

    def forward(self, x):
        z = torch.tanh(self.trunk(x))
        return self.one(z), self.other(z)

    def run(self, engine, step):
        for micro in range(2):
            tasks = self.tasks(step, micro, dist.get_rank())
            x, y = data(step, N, D, k=micro), labels(step, N, k=micro)
            losses = [F.cross_entropy(head, y) for head in engine(x)]
            if self.weighed:
                engine.backward(sum(float(at in tasks) * loss for at, loss in enumerate(losses)))
            else:
                engine.backward(sum(losses[at] for at in tasks))
            engine.step()


class Penalised(Heads):
    """The gradient of a head is not of its rows alone from the second step on; captured steps 1 and
    3 prove. The other head has its A in common with it."""

    accumulation = 1
    unfit, first_unfit = frozenset({"one", "other"}), 2

    def run(self, engine, step):
        y = labels(step, N)
        loss = sum(F.cross_entropy(head, y) for head in engine(data(step, N, D)))
        engine.backward(loss + step * self.one.weight.square().sum())
        engine.step()


class Towers(Program):
    """As many patches as tokens; only texts are padded, and the mask, which fits the patches,
    leaves none of them out."""

    widths = {"words": (D, C), "patches": (D, C)}

    def forward(self, x, attention_mask, pixels):
        mask = attention_mask[..., None]
        text, image = (self.words(x) * mask).sum(1) / mask.sum(1), self.patches(pixels).mean(1)
        return F.cross_entropy(text @ image.T, torch.arange(len(x)))

    def run(self, engine, step):
        mask = (torch.arange(5) < torch.tensor([5, 2, 3, 4])[:, None]).long()
        engine.backward(engine(data(step, 4, 5, D), mask, data(step, 4, 5, D, k=1)))
        engine.step()


MANY = 4


class Divided(Program):
    """It ends its steps itself, and divides the loss of each micro-batch. By another number than
    that of the micro-batches the gradients are larger, and G by the square of it.

    Attributes:
        by: the number.
        boundary: whether the program says where a step ends.
        summed: the loss is a sum over the terms, which is divided by their number.
        scaled: whether DeepSpeed divides by its own number of micro-batches, too.
    """

    by, boundary, summed, scaled = float(MANY), True, False, True

    def run(self, engine, step):
        for micro in range(MANY):
            last = micro == MANY - 1
            if self.boundary:
                engine.set_gradient_accumulation_boundary(last)
            with nullcontext() if last or self.boundary or self.config else engine.no_sync():
                z, y = engine(data(step, N, D, k=micro)), labels(step, N, k=micro)
                loss = F.cross_entropy(z, y, reduction="sum" if self.summed else "mean")
                loss = loss / (self.by * (N if self.summed else 1))
                engine.backward(loss, scale_wrt_gas=self.scaled)
            if last:
                engine.step()


KINDS = [Reversible, Meta, SecondOrder, Weighed, Offloaded, BothWays, OneRow, Sharp, FrozenPlain]
KINDS += [Whole, Tiled, Turned, Towers]
PROGRAMS: dict[str, Callable[[], Program]] = {
    **{kind.__name__: kind for kind in KINDS},
    "a task of each micro-batch": partial(Heads, tasks=lambda step, micro, rank: (micro,)),
    "a task of each rank": partial(Heads, tasks=lambda step, micro, rank: (rank,)),
    "a task of each step": partial(Heads, tasks=lambda step, *_: (step % 2,) if step else (0, 1)),
    "a weight of each micro-batch": partial(
        Heads, tasks=lambda step, micro, rank: (micro,), weighed=True
    ),
    "a weight of each step": partial(
        Heads, tasks=lambda step, *_: (step % 2,) if step else (0, 1), weighed=True
    ),
    "a penalty": Penalised,
    "divided, with a boundary": Divided,
    "divided, with a boundary, stage 3": partial(Divided, stage=3),
    "divided, not by DeepSpeed": partial(Divided, scaled=False, stage=2),
    "divided, by half, and by half by DeepSpeed": partial(Divided, by=2.0, accumulation=2),
    "divided, unmanaged": partial(
        Divided, boundary=False, config={"managed_gradient_accumulation": False}, stage=2
    ),
    "divided, in no_sync": partial(Divided, boundary=False),
    "divided, as a sum": partial(Divided, summed=True),
    "not divided": partial(Divided, by=1.0),
    "divided by another number": partial(Divided, by=3.0),
}


def steps_of(make: Callable[[], Program]) -> Iterator[tuple[set[str], dict, dict]]:
    """Yield for each step the layers that do not fit, the engine's factors of those that had rows
    in it, and the true ones."""
    torch.manual_seed(0)
    model = make()
    plain = Plain(copy.deepcopy(model))
    mode = Mode("", model.stage, clip=0.0, kfac=EVERY_STEP)
    engine = build(mode, model.accumulation, model=model, optimizer=STILL, **model.config)
    kfac = engine.kfac.preconditioner
    for step in range(STEPS):
        torch.manual_seed(step)
        with Truth(plain.model) as truth:
            plain.model.run(plain, step)
        plain.model.zero_grad()
        torch.manual_seed(step)
        engine.module.run(engine, step)
        yield set(kfac.proving.unfit), factors_of(engine), factors_of_ranks(of_ranks(truth.sums()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_layer_has_the_factors_of_plain_autograd_or_is_told(name):
    model = PROGRAMS[name]()
    with patch.object(proving, "RAISES", not model.unfit):
        for step, (unfit, factors, expected) in enumerate(steps_of(PROGRAMS[name])):
            assert unfit == (model.unfit if step >= model.first_unfit else set()), step
            if model.unfit:
                continue
            assert expected.keys() <= factors.keys()
            for layer, (A, G, _) in expected.items():
                what = f"{layer} in step {step}"
                close(factors[layer], (A, G), sums=1000, dtype=torch.float32, what=what)
