"""Programs whose layers see one input and get gradients of different rows, or a gradient that is
not of rows alone."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.close import close
from tests.deepspeed.modes import Mode
from tests.deepspeed.runs import build
from tests.models import cross_entropy
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
EVERY_STEP = {
    "factor": {"update_interval": 1},
    "eigenbasis": {"refresh_interval": 1},
    "burn_in": {"steps": 0},
}
STILL = {"type": "SGD", "params": {"lr": 1e-30}}
WIDTH, ROWS = 12, 8


class Heads(nn.Module):
    """Two tasks on one trunk: both heads are computed, and one of them has a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(6, WIDTH)
        self.one, self.other = nn.Linear(WIDTH, 5, bias=False), nn.Linear(WIDTH, 5, bias=False)

    def forward(self, x):
        z = torch.tanh(self.trunk(x))
        return self.one(z), self.other(z)


def batch(step: int, micro: int, rank: int):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(ROWS, 6, generator=generator) + 2 * micro + rank, torch.arange(ROWS) % 5


TASK = {
    "micro-batch": lambda step, micro, rank: (micro % 2,),
    "rank": lambda step, micro, rank: (rank,),
    "step": lambda step, micro, rank: (0, 1) if not step else (step % 2,),
    "weight": lambda step, micro, rank: (micro % 2,),
    "weight by step": lambda step, micro, rank: (0, 1) if not step else (step % 2,),
}


def worker(cases) -> dict:
    found, rank = {}, dist.get_rank()
    for who in cases:
        engine = build(Mode("z0", 0, kfac=EVERY_STEP), 2, model=Heads(), optimizer=STILL)
        kfac = engine.kfac.preconditioner
        expected: dict[str, list] = {"one": [], "other": [], "either": []}
        for step in range(3):
            for micro in range(2):
                x, y = batch(step, micro, rank)
                tasks = TASK[who](step, micro, rank)
                losses = [cross_entropy(head, y) for head in engine(x)]
                if "weight" in who:
                    engine.backward(
                        sum(float(at in tasks) * loss for at, loss in enumerate(losses))
                    )
                else:
                    engine.backward(sum(losses[at] for at in tasks))
                engine.step()
            for name, heads in (("one", {0}), ("other", {1}), ("either", {0, 1})):
                with torch.no_grad():
                    rows = [
                        torch.tanh(engine.module.trunk(batch(step, micro, r)[0]))
                        for micro in range(2)
                        for r in range(2)
                        if not heads.isdisjoint(TASK[who](step, micro, r))
                    ]
                expected[name] += rows
        A = {}
        for name, layer in ((layer.name, layer) for layer in kfac.layers):
            state = kfac.curvature.factors.get(kfac.sharing.inputs.key(layer))
            if name in expected and state is not None:
                A[name] = layer.A.blocks(state.packed_P)[0][0]
        means = {
            name: torch.cat(rows).T @ torch.cat(rows) / len(torch.cat(rows))
            for name, rows in expected.items()
        }
        updates = {
            key: float(factor.updates)
            for key, factor in kfac.curvature.factors.items()
            if key.endswith("/A")
        }
        found[who] = A, means, kfac.observations.groups, updates
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run_ranks("tests.deepspeed.test_heads:worker", world=2, payload=[*TASK])


@pytest.mark.parametrize("who", ["micro-batch", "rank", "weight"])
def test_each_head_has_the_rows_that_its_gradient_is_of(found, who):
    A = found[0][who][0] | found[1][who][0]
    for name in ("one", "other"):
        close(A[name], found[0][who][1][name], sums=3 * 4 * ROWS)


@pytest.mark.parametrize("who", ["step", "weight by step"])
def test_a_common_A_has_the_rows_of_whichever_layer_has_a_gradient(found, who):
    """After a step in which both had one, each gets one in turn."""
    for rank in found:
        assert rank[who][2] == (("one", "other"),)
    updates = found[0][who][3] | found[1][who][3]
    assert updates == {"trunk/A": 3, "one/A": 3}
    A = found[0][who][0] | found[1][who][0]
    close(A["one"], found[0][who][1]["either"], sums=3 * 4 * ROWS)


class Towers(nn.Module):
    """As many patches as tokens; only texts are padded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.patches = nn.Linear(6, WIDTH, bias=False), nn.Linear(6, WIDTH, bias=False)

    def forward(self, x, attention_mask, pixels):
        mask = attention_mask[..., None]
        text, image = (self.words(x) * mask).sum(1) / mask.sum(1), self.patches(pixels).mean(1)
        return cross_entropy(text @ image.T, torch.arange(len(x)))


def towers_worker(_) -> dict:
    engine = build(Mode("z0", 0, kfac=EVERY_STEP), 1, model=Towers(), optimizer=STILL)
    kfac = engine.kfac.preconditioner
    torch.manual_seed(1)
    x, pixels = torch.randn(2, 4, 5, 6)
    mask = (torch.arange(5) < torch.tensor([5, 2, 3, 4])[:, None]).long()
    for _step in range(3):
        engine.backward(engine(x, mask, pixels))
        engine.step()  # a layer that does not fit is an error
    A = {}
    for name in ("words", "patches"):
        factor = kfac.curvature.factors[f"{name}/A"]
        A[name] = factor.side.blocks(factor.packed_P)[0][0], float(factor.updates)
    words, patches = x[mask.bool()], pixels.flatten(0, 1)
    expected = {"words": words.T @ words / len(words), "patches": patches.T @ patches / 20}
    return {"A": A, "expected": expected}


def test_a_mask_of_texts_leaves_out_no_patches():
    """They have a gradient, so that the mask, which fits them, leaves none of them out."""
    found = run_ranks("tests.deepspeed.test_heads:towers_worker", world=1)[0]
    assert [found["A"][name][1] for name in ("words", "patches")] == [3, 3]
    for name, expected in found["expected"].items():
        close(found["A"][name][0], expected, sums=20)


def penalty_worker(_) -> dict:
    from ds_kfac.step import proving

    proving.RAISES = False
    engine = build(Mode("z0", 0, kfac=EVERY_STEP), 1, model=Heads(), optimizer=STILL)
    kfac, unfit = engine.kfac.preconditioner, []
    for step in range(3):
        x, y = batch(step, 0, 0)
        loss = sum(cross_entropy(head, y) for head in engine(x))
        if step:  # its weight grows from zero
            loss = loss + step * engine.module.one.weight.square().sum()
        engine.backward(loss)
        engine.step()
        unfit.append(set(kfac.proving.unfit))
    return unfit


def test_a_layer_whose_gradient_is_later_not_of_its_rows_is_found_at_the_next_proof():
    """Captured steps 1 and 3 prove. The other head has its A in common with it."""
    assert run_ranks("tests.deepspeed.test_heads:penalty_worker", world=1)[0] == [
        set(),
        set(),
        {"one", "other"},
    ]
