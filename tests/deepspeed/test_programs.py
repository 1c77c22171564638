"""Legal programs that do not call a model the same way in every step, or end steps themselves."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.close import close, exact
from tests.covering import covering
from tests.deepspeed.modes import BY_NAME, Mode
from tests.deepspeed.runs import build, difference, micro_batches, reference, train, weights
from tests.models import Net, Stoppable, cross_entropy, make_net

pytestmark = pytest.mark.distributed
STILL = {"type": "SGD", "params": {"lr": 1e-30}}


def block(interval: int) -> dict:
    return {
        "factor": {"update_interval": interval},
        "eigenbasis": {"refresh_interval": interval},
        "burn_in": {"steps": 0},
    }


def merged(own: dict) -> dict:
    """Of all ranks."""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {key: value for part in everyone for key, value in part.items()}


STEPS, EVENT = 6, 4
"""In step EVENT something else happens."""


def run_step(engine, step: int, program: str) -> None:
    x, y = next(iter(micro_batches(step, 1)))
    other, _ = next(iter(micro_batches(step + 100, 1)))
    if program == "skipped":
        assert torch.isnan(engine(other * float("nan"), y))
    elif program == "second forward":
        engine(other, y)
    elif program == "no step":
        with engine.no_sync():
            engine.backward(engine(other, y))
    elif program == "stopped":
        engine.module.stops = True
        with pytest.raises(FloatingPointError):
            engine.backward(engine(x, y))
        engine.module.stops = False
        engine.zero_grad()
    elif program == "accumulation":
        engine.backward(engine(x, y))
        engine.set_train_batch_size(2 * engine.train_batch_size())
        engine.step()  # no longer the boundary
    loss = engine(x, y)
    if program == "second forward":
        engine(other, y)
    engine.backward(loss)
    engine.step()
    if program == "accumulation":
        assert engine.global_steps == step + 1
        engine.set_train_batch_size(engine.train_batch_size() // 2)


PROGRAMS = [
    ("z0", "skipped", (0,)),
    ("z2", "skipped", (0, 1)),
    ("z0", "second forward", (1,)),
    ("z2", "second forward", (0, 1)),
    ("z0", "stopped", (0,)),
    ("z0", "stopped", (0, 1)),
    ("z0", "no step", (1,)),
    ("z0", "no step", (0, 1)),
    ("z2", "accumulation", (0, 1)),
    ("z0", "accumulation", (0, 1)),
]
"""Mode, what happens, and on which ranks."""


@pytest.mark.ranks(2)
def test_programs_that_change_their_calls_run():
    for name, program, who in PROGRAMS:
        engine = build(BY_NAME[name], 1, model=make_net(Stoppable))
        initial = weights(engine)
        for step in range(STEPS):
            happens = step == EVENT and dist.get_rank() in who
            run_step(engine, step, program if happens else "")
        assert engine.kfac.preconditioner.steps == STEPS
        final = weights(engine)
        of_first = [final]
        dist.broadcast_object_list(of_first)
        exact(final, of_first[0], what=f"{name} {program} {who}")
        assert all(weight.isfinite().all() for weight in final.values())
        if program in ("skipped", "second forward"):  # a forward without backward adds nothing
            expected = reference(BY_NAME[name], 1, 2, initial, steps=STEPS)
            apart = difference(final, expected, initial)
            assert apart <= 1e-5, "rounding in six steps"
        engine.destroy()


# layers that share an input, and at some step do not


class Attention(Net):
    """Projections of one input; at some step one of them gets an input of its own, is used no more,
    or twice, the second time with another input."""

    parted = False
    calls = 1

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(17, 17, bias=False) for _ in range(3))
        self.gate, self.up = nn.Linear(17, 17), nn.Linear(17, 17)

    def forward(self, x, y=None):
        z = self.norm(self.silu(self.first(x)))
        own = sum(self.q(part) for part in (z, 2.0 * z)[: self.calls])
        z = z + own + self.k(2.0 * z if self.parted else z).softmax(-1) * self.v(z)
        z = z + torch.tanh(self.gate(z)) * self.up(z)
        return cross_entropy(self.head(torch.tanh(self.middle(z))), y)


@pytest.mark.ranks(2)
def test_layers_of_a_group_may_have_different_inputs_in_a_step_on_some_ranks():
    for name, interval, who in (
        ("z0", 2, (1,)),
        ("z2", 2, (0, 1)),
        ("z2", 1, (0,)),
        ("z3", 3, (1,)),
    ):
        mode = Mode(name, BY_NAME[name].stage, kfac=block(interval))
        engine, history = build(mode, 1, model=make_net(Attention)), []
        kfac = engine.kfac.preconditioner
        for step in range(4 * interval):
            engine.module.parted = 2 * interval <= step < 3 * interval and dist.get_rank() in who
            before = kfac.channel.calls.copy()
            train(engine, 1, steps=1, first=step)
            calls = [None, None]
            dist.all_gather_object(calls, sum((kfac.channel.calls - before).values()))
            assert calls[0] == calls[1], "the same collectives on all ranks"
            assert set(kfac.observations.groups) == {("gate", "up"), ("q", "k", "v")}, (name, step)
            own = {key: factor.packed_P.clone() for key, factor in kfac.curvature.factors.items()}
            history.append(merged(own))
        before, parted, after = (history[index * interval - 1] for index in (2, 3, 4))
        for key in ("q/A", "k/G", "gate/A"):
            assert not torch.equal(before[key], parted[key]), key
            assert not torch.equal(parted[key], after[key]), key


# programs that end steps themselves, and divide each micro-batch's loss by their number

MANY = 4
WAYS = (
    "boundary",
    "boundary, not scaled by DeepSpeed",
    "boundary, half by DeepSpeed",
    "unmanaged",
    "no_sync",
)
OTHER = {"not divided": 1.0, "divided by another number": 3.0}
SUM = "divided by their number, as a sum"


def loss_of(logits: Tensor, y: Tensor, *, summed: bool) -> Tensor:
    if summed:
        return F.cross_entropy(logits.mT, y, reduction="sum") / y.numel()
    return cross_entropy(logits, y)


def factors_of(mode: str, way: str, logits: bool) -> dict:
    """Key -> mean of a step's rows."""
    more = {"managed_gradient_accumulation": False} if way == "unmanaged" else {}
    accumulation = {"DeepSpeed": MANY, "boundary, half by DeepSpeed": 2}.get(way, 1)
    # whose A is of gradients
    kfac = {**BY_NAME[mode].kfac_block, "layers": {"types": ["Linear", "LayerNorm"]}}
    options = {"optimizer": STILL, "gradient_clipping": 0.0, "kfac": kfac, **more}
    engine = build(BY_NAME[mode], accumulation, **options)
    for micro, (x, y) in enumerate(micro_batches(0, MANY)):
        last = micro == MANY - 1
        if way.startswith("boundary") or way in OTHER or way == SUM:
            engine.set_gradient_accumulation_boundary(last)
        with engine.no_sync() if way == "no_sync" and not last else nullcontext():
            loss = loss_of(engine(x), y, summed=way == SUM) if logits else engine(x, y)
            loss = loss / OTHER.get(way, MANY / accumulation)
            engine.backward(loss, scale_wrt_gas="not scaled" not in way)
        if last or way == "DeepSpeed":
            engine.step()
    kfac = engine.kfac.preconditioner
    assert not kfac.proving.unfit
    found = merged({key: factor.packed_P for key, factor in kfac.curvature.factors.items()})
    engine.destroy()
    return found


@pytest.mark.ranks(2)
def test_G_is_that_of_deepspeeds_own_accumulation_whoever_divides():
    """Also where the model returns logits. By another number than that of the micro-batches the
    gradients are larger, and G by the square of it."""
    ways = [
        (mode, way, logits)
        for mode in ("z0", "z2", "z3")
        for way in WAYS
        for logits in (True, False)
        if way != "no_sync" or mode == "z0"  # DeepSpeed has it at stages 0 and 1
    ]
    cases = covering(ways, lambda case: dict(zip(("mode", "way", "logits"), case, strict=True)))
    cases += [("z0", way, True) for way in (SUM, *OTHER)]
    of_mean = factors_of("z0", "DeepSpeed", True)
    for case in cases:
        found = factors_of(*case)
        for key, expected in of_mean.items():
            if key.endswith("/G") or key == "norm/A":
                expected = expected * (MANY / OTHER.get(case[1], MANY)) ** 2
            # a chain of products, and a sum over the rows
            close(found[key], expected, sums=100, condition=10, what=f"{case} {key}")
