"""Steps by the quadratic model: every ZeRO stage as the oracle, no trace of a skipped step, resumed to the bit."""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.close import near
from tests.deepspeed.modes import BY_NAME, MICRO_ROWS
from tests.deepspeed.runs import build, patched, train, weights
from tests.models import cross_entropy, make_batch, make_net
from tests.oracle_quadratic import QuadraticOracle
from tests.ranks import run_ranks
from tests.spread import difference, expected, within

pytestmark = pytest.mark.distributed
TYPES = ["Linear", "LayerNorm"]
LR, STEPS, ACCUMULATION = 0.7, 6, 2
KFAC = {
    "factor": {"update_interval": 1, "decay": 0.9, "fisher": "empirical", "rows": "all", "prediction": "head"},
    "eigenbasis": {"refresh_interval": 2},
    "damping": {"value": 30.0},
    "preconditioner": {"step": "quadratic"},
    "layers": {"types": TYPES},
}
OPTIMIZER = {"type": "SGD", "params": {"lr": LR}}
EVERY = patch("ds_kfac.engine.quadratic.ADAPTED_EVERY", 2)
MODES = ["z0", "z1", "z2", "z2-offload", "z3", "z3-persistence_0", "z3-zero_init", "z3-sub_groups"]


def made(name: str, **options):
    return build(BY_NAME[name], ACCUMULATION, kfac=KFAC, optimizer=copy.deepcopy(OPTIMIZER), gradient_clipping=0.0,
                 **options)  # fmt: skip


def reference(initial, variation) -> tuple[dict, float]:
    model = make_net().to(variation.dtype(torch.float32))
    model.load_state_dict(initial)
    oracle = QuadraticOracle(
        model, cross_entropy, value=30.0, interval=2, update_interval=1, decay=0.9, refresh_interval=2, types=TYPES
    )
    for step in range(STEPS):
        x, y = variation.rows(*make_batch(step, dist.get_world_size() * ACCUMULATION * MICRO_ROWS))
        oracle.step(x.to(variation.dtype(torch.float32)), y, LR)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, oracle.kfac.scale


@EVERY
def worker(names: list[str]) -> dict:
    results = {}
    for name in names:
        engine = made(name)
        initial = weights(engine)
        with patched(BY_NAME[name]):
            losses = train(engine, ACCUMULATION, STEPS)
        scales = []

        def plain(variation, initial=initial, scales=scales):
            found, scale = reference(initial, variation)
            scales.append(scale)
            return found

        found = expected(plain, initial) if dist.get_rank() == 0 else None
        final = weights(engine)
        results[name] = {
            "difference": difference(final, found.weights, initial) if found else 0.0,
            "bound": found.bound if found else 1.0,
            "scales": (float(engine.kfac.preconditioner.damping_scale), scales[0] if scales else None),
            "losses": losses,
        }
        engine.destroy()
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_every_stage_matches_the_oracle(world):
    for result in run_ranks("tests.deepspeed.test_quadratic:worker", world=world, payload=MODES):
        for name, run in result.items():
            assert not within(name, run["difference"], run["bound"]), (name, run)
            ours, oracles = run["scales"]
            if oracles is not None:
                near(ours, oracles, 1e-3 * oracles, "a power of one rate: the next one is 5 % away", what=name)
                assert run["losses"][-1] < run["losses"][0]


def test_the_finite_difference_is_the_derivative():
    network = make_net()
    oracle = QuadraticOracle(network, cross_entropy, value=1.0, interval=1, types=TYPES)
    x, _ = make_batch(0, 16)
    names = [name for name, _ in network.named_parameters()]
    direction = [torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(oracle.params)]
    values, tangents = (dict(zip(names, tensors, strict=True)) for tensors in (oracle.params, direction))
    _, exact = torch.func.jvp(
        lambda p: torch.func.functional_call(network, p, (x,)),
        ({n: p.detach() for n, p in values.items()},),
        (tangents,),
    )
    with torch.no_grad():
        found = oracle.derivative(x, direction)
    assert float((found - exact).norm() / exact.norm()) < 0.01  # of a shift by a thousandth of the weights' norm


@EVERY
def skip_worker(name: str) -> dict:
    """A step whose gradients are not finite, which stage 3 skips."""
    engine = made(name)
    with patched(BY_NAME[name]):
        train(engine, ACCUMULATION, 3)
        kfac = engine.kfac.preconditioner

        def state() -> list[torch.Tensor]:
            updates = [s.moments.update_OI for s in kfac.state.values()]
            return [t.clone() for t in (*weights(engine).values(), *updates, kfac.damping_scale)]

        before, steps = state(), kfac.steps
        x, y = make_batch(3, ACCUMULATION * MICRO_ROWS * dist.get_world_size())
        for _ in range(ACCUMULATION):
            engine.backward(engine(x[:MICRO_ROWS], y[:MICRO_ROWS]) * float("inf"))
            engine.step()
        skipped = kfac.steps == steps
        same = all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
        kept = len(engine.kfac.quadratic._forwards)
        losses = train(engine, ACCUMULATION, 2, first=4)
    engine.destroy()
    return {"skipped": skipped, "same": same, "kept": kept, "losses": losses}


def test_a_skipped_step_leaves_no_trace():
    for result in run_ranks("tests.deepspeed.test_quadratic:skip_worker", world=2, payload="z3"):
        assert result["skipped"] and result["same"] and result["kept"] == 0
        assert all(loss < 10 for loss in result["losses"])


@EVERY
def resume_worker(payload) -> dict:
    folder, names = payload
    results = {}
    for name in names:
        engine = made(name)
        with patched(BY_NAME[name]):
            train(engine, ACCUMULATION, 3)
            engine.save_checkpoint(f"{folder}/{name}", tag="three")
            straight = train(engine, ACCUMULATION, 4, first=3), weights(engine)
            engine.destroy()
            engine = made(name)
            engine.load_checkpoint(f"{folder}/{name}", tag="three")
            resumed = train(engine, ACCUMULATION, 4, first=3), weights(engine)
        engine.destroy()
        same = all(torch.equal(straight[1][n], resumed[1][n]) for n in straight[1])
        results[name] = straight[0] == resumed[0] and same
    return results


def test_a_checkpoint_keeps_damping_and_the_last_update(tmp_path):
    names = ["z0", "z2", "z3"]
    for result in run_ranks("tests.deepspeed.test_quadratic:resume_worker", world=2, payload=(str(tmp_path), names)):
        assert all(result.values()), result


class Loose(torch.nn.Module):
    """A trained parameter of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(13, 5)
        self.loose = torch.nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.head(x) * self.loose, y)


REFUSED = {
    "momentum": (BY_NAME["z0"], {"optimizer": {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.9}}}, "plain SGD"),
    "AdamW": (BY_NAME["z0"], {"optimizer": {"type": "AdamW", "params": {"lr": 1.0, "torch_adam": True}}}, "plain SGD"),
    "clipping": (BY_NAME["z2"], {"gradient_clipping": 1.0}, "gradient_clipping"),
    "bf16": (BY_NAME["z2-bf16"], {}, "16 bits"),
    "loose": (BY_NAME["z0"], {"model": Loose()}, "1 trained parameters are of no K-FAC layer"),
    "prediction": (
        BY_NAME["z0"], {"kfac": {**KFAC, "factor": {**KFAC["factor"], "prediction": "tail"}}}, "no module 'tail'"
    ),
}  # fmt: skip


def refused_worker(names: list[str]) -> dict:
    found = {}
    for name in names:
        mode, options, _ = REFUSED[name]
        try:
            build(mode, 1, **{"kfac": KFAC, "optimizer": copy.deepcopy(OPTIMIZER), "gradient_clipping": 0.0, **options})
        except ValueError as error:
            found[name] = str(error)
    return found


def test_what_it_cannot_do_is_refused_by_name():
    (found,) = run_ranks("tests.deepspeed.test_quadratic:refused_worker", world=1, payload=list(REFUSED))
    for name, (*_, text) in REFUSED.items():
        assert text in found.get(name, ""), (name, found.get(name))
