"""More programs as others write them: A and G of every layer in every captured step are those of
plain autograd."""

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.close import close
from tests.deepspeed import test_fresh_programs
from tests.deepspeed.modes import Mode
from tests.deepspeed.runs import build
from tests.deepspeed.test_fresh_programs import (
    EVERY_STEP,
    C,
    D,
    N,
    Plain,
    Program,
    data,
    labels,
    mlp,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


class Boxes(Program):
    """As many boxes as a picture has; in one step none, and none comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.seen, self.box = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 1, 1),
            nn.Linear(8, 4),
        )

    def forward(self, x, pictures, places):
        h = torch.relu_(self.stem(x))
        return self.seen(h).flatten(1), self.box(h.flatten(2).mT[pictures, places])

    def run(self, engine, step):
        boxes = torch.arange((5, 0, 2)[step])
        seen, found = engine(data(step, 2, 3, 4, 4), boxes % 2, 3 * boxes)
        engine.backward(F.softplus(seen).mean() + (found - 1).abs().sum() / max(1, len(boxes)))
        engine.step()


class Frozen(Program):
    """Padded texts below a frozen head with a bias; one padded place has a label."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = mlp(D, 9, 8), nn.Linear(8, C).requires_grad_(False)

    def forward(self, x, attention_mask):
        return self.head(self.net(x))

    def run(self, engine, step):
        mask = torch.arange(5) < torch.tensor([5, 3, 4, 2])[:, None]
        y = labels(step, 4, 5).masked_fill(~mask, -100)
        y[1, 4] = 1
        engine.backward(
            F.cross_entropy(engine(data(step, 4, 5, D), mask).flatten(0, 1), y.flatten())
        )
        engine.step()


class FrozenPlain(Frozen):
    """A class for each text, by ``loss.backward()``; before it, how the output depends on an
    input."""

    def forward(self, x):
        return self.head(self.net(x)[:, -1])

    def run(self, engine, step):
        x = data(step, 2, 5, D, k=1).requires_grad_()
        torch.autograd.grad(engine.module(x).sum(), x)
        loss = F.cross_entropy(engine(data(step, 4, 5, D)), labels(step, 4))
        loss.backward()
        engine.step()


class Rejected(Program):
    """Chosen and rejected texts, each in a forward; their masks come in one buffer, the second over
    the first."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.buffer = mlp(D, 9, C), torch.zeros(2, 5, dtype=torch.bool)

    def forward(self, x, attention_mask):
        return self.net(x) * attention_mask[..., None].float()

    def sums(self, engine, step):
        sums = []
        for k, lengths in enumerate(([5, 3], [1, 4])):
            self.buffer.copy_(torch.arange(5) < torch.tensor(lengths)[:, None])
            sums.append(engine(data(step, 2, 5, D, k=k), attention_mask=self.buffer).sum((1, 2)))
        return sums

    def run(self, engine, step):
        sums = self.sums(engine, step)
        engine.backward(-F.logsigmoid(sums[0] - sums[1]).mean())
        engine.step()


class Nested(Rejected):
    """The same with checkpoints in a checkpoint, and two backward passes through the graph."""

    accumulation = 2

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.net = nn.ModuleList([mlp(D, 9, D), mlp(D, 8, D)]), nn.Linear(D, C)

    def forward(self, x, attention_mask):
        def run(x):
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=True)
            return x

        return super().forward(
            checkpoint(run, x.requires_grad_(), use_reentrant=True), attention_mask
        )

    def run(self, engine, step):
        sums = self.sums(engine, step)
        engine.backward(-F.logsigmoid(sums[0] - sums[1]).mean(), retain_graph=True)
        engine.step()
        engine.backward(sums[0].square().mean())
        engine.step()


class Compiled(Program):
    """A compiled block in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.block, self.head = nn.Linear(D, 8), mlp(8, 9, 8), nn.Linear(8, C)

    def forward(self, x):
        block = torch.compile(self.block, backend="aot_eager")
        return self.head(checkpoint(block, self.inner(x), use_reentrant=False))

    def run(self, engine, step):
        with torch.compiler.set_stance("force_eager" if isinstance(engine, Plain) else "default"):
            super().run(engine, step)


class Whole(Program):
    """The whole model is a checkpoint, so that its last layer makes the output; another forward has
    no backward."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(D, 9, C)

    def forward(self, x):
        return checkpoint(self.net, x.requires_grad_(), use_reentrant=self.reentrant)

    def run(self, engine, step):
        z = engine(data(step, N, D))
        engine(data(step, 2, D, k=1))
        engine.backward(F.cross_entropy(z, labels(step, N)))
        engine.step()


class Tiled(Program):
    """The head and the loss are computed in tiles, each a checkpoint, after the model's forward."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = mlp(D, 9, 8), nn.Linear(8, C)

    def forward(self, x):
        return self.net(x)

    def run(self, engine, step):
        def loss(h, y):
            return F.cross_entropy(engine.module.head(h), y, reduction="sum")

        h, y = engine(data(step, 8, D)), labels(step, 8)
        tiles = [
            checkpoint(loss, h[k : k + 3], y[k : k + 3], use_reentrant=self.reentrant)
            for k in range(0, 8, 3)
        ]
        engine.backward(sum(tiles) / 8)
        engine.step()


class TiledReentrant(Tiled):
    reentrant = True


class Turned(Program):
    """A frozen layer that returns its output with the rows last."""

    class Last(nn.Linear):
        def forward(self, x):
            return super().forward(x).mT

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last, self.head = (
            mlp(D, 9, 8),
            self.Last(8, 9).requires_grad_(False),
            nn.Linear(8, C),
        )

    def forward(self, x):
        x = self.net(x)
        return self.head(x + F.pad(self.last(x).mT, (0, -1)))


class Raw(Program):
    """Two matrices that a method of the model multiplies by, in a checkpoint or not."""

    reentrant: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(D, 8), nn.Linear(8, C)
        self.up, self.down = (
            nn.Parameter(torch.randn(8, 9) / 3),
            nn.Parameter(torch.randn(9, 8) / 3),
        )

    def inner(self, x):
        return torch.relu(torch.relu(x @ self.up) @ self.down)

    def forward(self, x):
        x = self.embed(x)
        again = self.reentrant is not None
        return self.head(
            checkpoint(self.inner, x, use_reentrant=self.reentrant) if again else self.inner(x)
        )


class RawAgain(Raw):
    reentrant = False


class RawReentrant(Raw):
    reentrant = True


class Attends(Program):
    """A text attends to itself, and later to another one: then q and k, which share their A, have
    two inputs."""

    parted = frozenset({"q", "k"})

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q, self.k, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, other=None):
        x = self.embed(x)
        other = x if other is None else self.embed(other)
        return self.out((self.q(x) @ self.k(other).mT).softmax(-1) @ other)

    def run(self, engine, step):
        other = data(step, 3, 5, 8, k=1) if step else None
        engine.backward(engine(data(step, 3, 4, 8), other).square().mean())
        engine.step()


RIGHT = [
    (Boxes, 0),
    (Frozen, 0),
    (FrozenPlain, 2),
    (Rejected, 0),
    (Nested, 0),
    (Compiled, 0),
    (Attends, 0),
]
RIGHT += [(Whole, 2), (Tiled, 0), (TiledReentrant, 0), (Turned, 0)]
RAW = [(Raw, 0), (RawAgain, 0), (RawReentrant, 0)]
Run = tuple[type[Program], int]


def worker(runs: list[Run]) -> list[list]:
    """The steps of each program, at its ZeRO stage."""
    found = []
    for kind, stage in runs:
        zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
        mode = Mode("", stage, zero=zero, kfac=EVERY_STEP)
        with patch.object(
            test_fresh_programs,
            "build",
            lambda _, *args, mode=mode, **named: build(mode, *args, **named),
        ):
            found.append(test_fresh_programs.worker([kind])[kind.__name__])
    return found


@pytest.fixture(scope="module")
def found() -> list[list]:
    return run_ranks("tests.deepspeed.test_other_programs:worker", world=1, payload=RIGHT + RAW)[0]


@pytest.mark.parametrize("run", RIGHT, ids=lambda run: f"{run[0].__name__}, ZeRO {run[1]}")
def test_every_layer_has_the_factors_of_plain_autograd(found, run):
    for step, (unfit, factors, expected) in enumerate(found[RIGHT.index(run)]):
        assert not unfit
        assert factors.keys() == expected.keys(), step
        for name, pair in expected.items():
            for side, right, own in zip("AG", pair[:2], factors[name], strict=True):
                if side == "G" or not step or name not in getattr(run[0], "parted", ()):
                    close(own, right, sums=1000, what=f"{side} of {name} in step {step}")


@pytest.mark.parametrize("at", [-2, -1])
def test_a_recomputed_function_of_raw_weights_has_the_same_factors(found, at):
    for (unfit, factors, _), (_, expected, _) in zip(found[at], found[-3], strict=True):
        assert not unfit
        assert factors.keys() == expected.keys() == {"embed", "up", "down", "head"}
        for name, pair in expected.items():
            for right, own in zip(pair, factors[name], strict=True):
                close(own, right, sums=1000, what=name)
