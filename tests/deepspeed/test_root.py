"""Method "root": resuming is exact, states continue in the other method and back, what does not go is refused. That
every mode trains like tests/oracle.py is in test_modes.py."""

import pytest
import torch

from tests.choices import STAGGERED
from tests.close import close
from tests.deepspeed.modes import KFAC, Mode
from tests.deepspeed.runs import build, train, weights
from tests.models import make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
RESUMED = {
    "stage 0": (0, {"assignment": {"gradient_worker_fraction": 1.0}}),
    "stage 2": (2, {}),
    "stage 3, late, staggered": (3, {"eigenbasis": {"refresh_interval": 3, "lag": 2}, "plan": STAGGERED}),
    "blocks": (1, {"factor": {"update_interval": 1, "decay": 0.9, "rows": "all", "dense_max": 6}}),
}


def mode(stage: int, method: str = "root", **kfac) -> Mode:
    """With as many rows as it takes for a unique eigenbasis, accumulation being 4."""
    blocks = {"preconditioner": {**KFAC["preconditioner"], "method": method}, **kfac}
    return Mode("root", stage, adam=True, orthogonal=True, root=True, kfac=blocks)


def resume_worker(folder: str) -> dict:
    """Eight steps against four, a save, a load into another seed's engine and four more."""
    results = {}
    for name, (stage, given) in RESUMED.items():
        path = f"{folder}/{name.replace(' ', '_')}"
        first = build(mode(stage, **given), 1)
        train(first, 1, steps=4)
        first.save_checkpoint(path)
        train(first, 1, steps=4, first=4)
        second = build(mode(stage, **given), 1, model=make_net(seed=99))
        second.load_checkpoint(path)
        train(second, 1, steps=4, first=4)
        after, expected = weights(second), weights(first)
        results[name] = max(float((after[n] - expected[n]).abs().max()) for n in expected)
        first.destroy()
        second.destroy()
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_resuming_equals_not_stopping(world, tmp_path):
    for result in run_ranks("tests.deepspeed.test_root:resume_worker", world=world, payload=str(tmp_path)):
        assert result == dict.fromkeys(RESUMED, 0.0)


WIDE = 2048
"""A step's size is less where its entries' mean is small, which of an orthogonal factor's is from about 1,100 on."""


def wide_worker(_) -> list[list[float]]:
    """What two steps change, without curvature, with roots as in eigenbases."""
    results = []
    for more in ({}, {"root": True}):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(WIDE, 8, bias=False), torch.nn.Tanh(), torch.nn.Linear(8, WIDE, bias=False)
        )
        given = Mode("wide", 0, adam=True, orthogonal=True, clip=0.0, size=1.0, rotate=False, **more)
        engine = build(given, 1, model=model)
        before = weights(engine)
        for step in range(2):
            x = torch.randn(16, WIDE, generator=torch.Generator().manual_seed(step))
            engine.backward((engine(x) - 1).square().mean())
            engine.step()
        results.append([float((now - before[name]).norm()) for name, now in weights(engine).items()])
        engine.destroy()
    return results


def test_wide_layers_step_as_far_with_the_root_of_an_identity():
    eigen, root = run_ranks("tests.deepspeed.test_root:wide_worker", world=1, payload=None)[0]
    close(root, eigen, sums=4 * WIDE, dtype=torch.float32)


def unrotated(engine) -> dict[str, torch.Tensor]:
    """First moments in the layers' own coordinates."""
    states = engine.kfac.preconditioner.state
    return {
        name: state.moments.first_OI if state.basis is None else state.basis.restore(state.moments.first_OI)
        for name, state in states.items()
    }


def other_worker(folder: str) -> dict:
    """A run of one method is continued by the other."""
    found = {}
    for method, other in (("eigen", "root"), ("root", "eigen")):
        engine = build(mode(2, method), 4)
        train(engine, 4, steps=3)
        engine.save_checkpoint(f"{folder}/{method}")
        before = unrotated(engine)
        engine.destroy()
        engine = build(mode(2, other), 4)
        engine.load_checkpoint(f"{folder}/{method}")
        after = unrotated(engine)
        off = [float((after[name] - m).norm() / m.norm()) for name, m in before.items()]
        kinds = {type(state.A).__name__ for state in engine.kfac.preconditioner.state.values()}
        losses = train(engine, 4, steps=4, first=3)
        found[other] = max(off, default=0.0), kinds, all(loss < 10 for loss in losses)
        engine.destroy()
    return found


def test_momentum_survives_a_change_of_method(tmp_path):
    (result,) = run_ranks("tests.deepspeed.test_root:other_worker", world=1, payload=str(tmp_path))
    for method, kind in (("root", "DampedInverse"), ("eigen", "Eigenbasis")):
        off, kinds, trains = result[method]
        close(off, 0.0, sums=4 * 20, scale=1.0, dtype=torch.float32)  # turned into a basis and back
        assert kinds == {kind} and trains


def refused_worker(_) -> dict:
    found = {}
    cases = {
        "another optimizer": Mode("root", 2, kfac={"preconditioner": {"method": "root"}}),
        "a Fisher": mode(2, factor={**KFAC["factor"], "fisher": "empirical"}),
        "no root": mode(2, adam={"whiten": 0.3}),
        "nothing": mode(2, adam={"whiten": 0.0}),
    }
    for name, case in cases.items():
        try:
            build(case, 1).destroy()
        except ValueError as error:
            found[name] = str(error)
    engine = build(mode(2), 1)
    found["report"] = engine.kfac.report
    train(engine, 1, steps=1)
    found["counters"] = engine.kfac.counters()
    return found


def test_what_does_not_go_is_refused_and_the_report_says_what_is_done():
    (found,) = run_ranks("tests.deepspeed.test_root:refused_worker", world=1)
    assert 'kfac.preconditioner.method "root" is for the optimizer KFACAdamW' in found["another optimizer"]
    assert 'kfac.factor.fisher "empirical" has no use' in found["a Fisher"]
    for name, power in (("no root", "0.3"), ("nothing", "0.0")):
        assert f"kfac.adam.whiten ({power}) must be 1/n" in found[name]
    assert "own coordinates, whitened by inverse roots (KFACAdamW)" in found["report"]
    assert "inverse roots every" in found["report"]
    assert found["counters"]["refreshes_eigh"] == 3, "on a CPU"
