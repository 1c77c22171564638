"""Programs as others write them, each a kind of its own: A and G of every layer in every captured
step are those of plain autograd, or the layers are told that do not fit."""

import copy
from collections.abc import Iterator
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ds_kfac.comm.reduce import Reducer
from ds_kfac.model.rows import PASSES, ROWS
from ds_kfac.step import proving
from tests.close import close
from tests.deepspeed.modes import Mode
from tests.deepspeed.runs import build
from tests.truth import Truth

pytestmark = pytest.mark.distributed
EVERY_STEP = {
    "factor": {"update_interval": 1, "rows": "all"},
    "eigenbasis": {"refresh_interval": 1},
    "burn_in": {"steps": 0},
}
STILL = {"type": "SGD", "params": {"lr": 1e-30}}
N, D, C, STEPS = 6, 7, 5, 3


def data(step: int, *shape: int, k: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * step + k))


def labels(step: int, *shape: int, k: int = 0) -> Tensor:
    return torch.randint(C, shape, generator=torch.Generator().manual_seed(100 * step + 50 + k))


class Program(nn.Module):
    """A model, and a step of it.

    Attributes:
        widths: of linear layers, or of several one after the other, by name.
        stage: of ZeRO.
        unfit: layers whose gradient is not that of their rows, which are told.
    """

    widths: dict[str, tuple[int, ...]] = {"net": (D, 9, C)}
    accumulation = 1
    stage = 0
    unfit = frozenset[str]()

    def __init__(self) -> None:
        super().__init__()
        for name, widths in self.widths.items():
            layers = [nn.Linear(*pair) for pair in pairwise(widths)]
            parts = [part for layer in layers for part in (layer, nn.Tanh())]
            setattr(self, name, nn.Sequential(*parts[:-1]) if len(layers) > 1 else layers[0])

    def run(self, engine, step: int) -> None:
        engine.backward(F.cross_entropy(engine(data(step, N, D)), labels(step, N)))
        engine.step()


class Plain:
    """An engine without DeepSpeed and K-FAC: the model and autograd alone."""

    def __init__(self, model: Program) -> None:
        self.model = self.module = model

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        (loss / self.model.accumulation).backward(retain_graph=retain_graph)

    def step(self) -> None:
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

    def forward(self, x):
        return self.net(x)

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


class Rejected(Program):
    """Chosen and rejected texts, each in a forward through checkpoints in a checkpoint; their masks
    come in one buffer, the second over the first. Two backward passes go through the graph."""

    widths = {"one": (D, 9, D), "other": (D, 8, D), "net": (D, C)}
    accumulation = 2

    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.zeros(2, 5, dtype=torch.bool)

    def forward(self, x, attention_mask):
        def run(x):
            for part in (self.one, self.other):
                x = checkpoint(part, x, use_reentrant=True)
            return x

        x = checkpoint(run, x.requires_grad_(), use_reentrant=True)
        return self.net(x) * attention_mask[..., None].float()

    def run(self, engine, step):
        sums = []
        for k, lengths in enumerate(([5, 3], [1, 4])):
            self.buffer.copy_(torch.arange(5) < torch.tensor(lengths)[:, None])
            sums.append(engine(data(step, 2, 5, D, k=k), attention_mask=self.buffer).sum((1, 2)))
        engine.backward(-F.logsigmoid(sums[0] - sums[1]).mean(), retain_graph=True)
        engine.step()
        engine.backward(sums[0].square().mean())
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

    def forward(self, x):
        return self.net(x)

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


RIGHT = [Reversible, Meta, Weighed, Offloaded, BothWays, OneRow]
RIGHT += [FrozenPlain, Rejected, Whole, Tiled, Turned]
UNFIT = [SecondOrder, Sharp]


def steps_of(kind: type[Program]) -> Iterator[tuple[set[str], dict, dict]]:
    """Yield for each step the layers that do not fit, the engine's factors, and the true ones."""
    torch.manual_seed(0)
    model, seen, plain_reduce = kind(), {}, Reducer.reduce
    plain = Plain(copy.deepcopy(model))

    def reduce(self, sums):
        seen.clear()
        for key, own in sums.items():
            rows, passes = own.counts[ROWS], own.counts[PASSES]
            if rows:
                seen[key] = own.sum_P / rows if key.endswith("/A") else own.sum_P * passes
        return plain_reduce(self, sums)

    with patch.object(Reducer, "reduce", reduce):
        mode = Mode("", kind.stage, kfac=EVERY_STEP)
        engine = build(mode, kind.accumulation, model=model, optimizer=STILL)
        kfac = engine.kfac.preconditioner
        for step in range(STEPS):
            torch.manual_seed(step)
            with Truth(plain.model) as truth:
                plain.model.run(plain, step)
            plain.model.zero_grad()
            torch.manual_seed(step)
            engine.module.run(engine, step)
            found = {}
            for layer in kfac.layers:
                of_A, of_G = kfac.sharing.inputs.key(layer), layer.keys[1]
                pairs = ((layer.A, of_A), (layer.G, of_G)) if of_G in seen else ()
                sides = [side.blocks(seen[key])[0][0] for side, key in pairs if key in seen]
                if sides:
                    found[layer.name] = sides
            yield set(kfac.proving.unfit), found, truth.factors()
        engine.destroy()


@pytest.mark.ranks(1)
def test_every_layer_has_the_factors_of_plain_autograd():
    for kind in RIGHT:
        for step, (unfit, factors, expected) in enumerate(steps_of(kind)):
            what = f"{kind.__name__} in step {step}"
            assert not unfit and factors.keys() == expected.keys(), (what, unfit)
            for name, (A, G, *_) in expected.items():
                close(factors[name], [A, G], sums=1000, what=f"A and G of {name}: {what}")


@pytest.mark.ranks(1)
def test_layers_whose_gradient_is_not_of_their_rows_are_told():
    proving.RAISES = False
    for kind in UNFIT:
        for unfit, *_ in steps_of(kind):
            assert unfit == kind.unfit, kind
