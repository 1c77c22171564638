"""What is left of a step, a backward or a forward that raises, of a rank that is lost, and of
layers whose rows are not known."""

import os
import signal
from contextlib import nullcontext, suppress
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

import ds_kfac
from ds_kfac.engine.attachment import BROKEN
from ds_kfac.step import proving
from tests.close import close, exact, near
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.parallel import shared_folder
from tests.deepspeed.runs import build, micro_batches, train, weights
from tests.deepspeed.said import error_of, heard
from tests.deepspeed.test_no_rows import FusedHead, Hidden
from tests.models import FEATURES, Net, cross_entropy, make_net
from tests.ranks import run_ranks
from tests.tape import taped

pytestmark = pytest.mark.distributed
EVERY = {
    "factor": {"update_interval": 1},
    "eigenbasis": {"refresh_interval": 1},
    "burn_in": {"steps": 0},
}


class Fragile(Net):
    """Its backward, or its forward, raises on demand."""

    error: BaseException | None = None
    backward = False

    def forward(self, x, y=None):
        z = self.norm(self.silu(self.first(x)))
        if self.error is not None and not self.backward:
            raise self.error
        if self.error is not None:
            z.register_hook(self.raises)
        # for which torch is watched
        z = F.linear(torch.tanh(self.middle(z)), self.head.weight, self.head.bias)
        return z if y is None else cross_entropy(z, y)

    def raises(self, gradient):
        raise self.error


@pytest.mark.ranks(1)
def test_a_forward_or_backward_that_raises_leaves_nothing_behind():
    """A Ctrl-C before each step's own passes; torch is as it was, too."""
    batch, plain = (torch.randn(3, 4, FEATURES), torch.zeros(3, 4, dtype=torch.int64)), F.linear
    for name in ("z0", "adam-z0"):
        expected = {}
        for backward in (None, False, True):
            kfac = {**BY_NAME[name].kfac_block, **EVERY}
            engine = build(BY_NAME[name], 1, kfac=kfac, model=make_net(Fragile))
            model = engine.module
            for step in range(4):
                if step > 0 and backward is not None:
                    model.error, model.backward = KeyboardInterrupt(), backward
                    with suppress(KeyboardInterrupt):
                        engine.backward(engine(*batch))
                assert F.linear is plain and not _get_current_function_mode_stack()
                model.error = None
                engine.optimizer.zero_grad()
                train(engine, 1, steps=1, first=step)
            assert not engine.kfac.preconditioner.proving.unfit, (name, backward)
            expected = expected or weights(engine)
            exact(weights(engine), expected, what=f"{name} {backward}")


HARMLESS = ("step", "scheduler", "no backward")
"""Before K-FAC's part of a step, and after the step."""
WITHIN = ("decompose", "precondition", "write", "inner")
"""When some of the state has changed. The last one is the optimizer's own part, after K-FAC's."""
PLACES = (*HARMLESS, *WITHIN)


def failing(engine, place: str):
    """Patch by which a step raises an error at one of :data:`PLACES`."""
    kfac = engine.kfac.preconditioner
    holder, name = {
        "step": (engine.optimizer, "step"),
        "decompose": (kfac.curvature, "decompose"),
        "precondition": (kfac.direction, "step"),
        "write": (kfac.exchange, "write"),
        "inner": (engine.basic_optimizer, "_init_group"),
    }[place]
    return patch.object(holder, name, side_effect=KeyboardInterrupt)


def interrupt(engine, step: int, place: str, folder: str) -> None:
    """A step that is interrupted at a place, and what a user does before it is taken again."""
    if place == "scheduler":
        scheduler = Mock(step=Mock(side_effect=ValueError))
        with patch.object(engine, "lr_scheduler", scheduler), suppress(ValueError):
            train(engine, 1, steps=1, first=step)
        # which DeepSpeed leaves out
        engine.micro_steps = engine.gradient_accumulation_steps() * (step + 1)
    elif place == "no backward" and engine.zero_optimization():
        # on all ranks, not in one's collective
        with pytest.raises(RuntimeError, match="has no gradients"):
            engine.step()
    elif place != "no backward":
        if place in WITHIN:
            engine.save_checkpoint(folder, tag="before")
        with failing(engine, place), suppress(KeyboardInterrupt):
            train(engine, 1, steps=1, first=step)
        engine.optimizer.zero_grad()
        if place in WITHIN:
            engine.load_checkpoint(folder, tag="before")


@pytest.mark.ranks(2)
def test_a_step_that_is_interrupted_leaves_nothing_behind_or_is_undone_by_a_checkpoint(tmp_path):
    """It is said, once, where state and weights are those of no step."""
    for turn, name in enumerate(("z0", "adam-z0", "adam-z2", "adam-z3")):
        kfac = {**BY_NAME[name].kfac_block, "eigenbasis": {"refresh_interval": 1}}
        unbroken, engine = (build(BY_NAME[name], 1, kfac=kfac) for _ in range(2))
        train(unbroken, 1, steps=len(PLACES))
        said = []
        for step, place in enumerate(PLACES[turn:] + PLACES[:turn]):
            with heard() as messages:
                interrupt(engine, step, place, f"{tmp_path}/{name}")
            said += [place for text in messages if BROKEN in text]
            if place != "scheduler":  # that step is done
                train(engine, 1, steps=1, first=step)
        (broken,) = said
        assert broken == next(p for p in PLACES[turn:] + PLACES[:turn] if p in WITHIN), name
        assert not engine.kfac.preconditioner.proving.unfit
        assert engine.kfac.preconditioner.steps == len(PLACES)
        exact(weights(engine), weights(unbroken), what=name)


def parameters_of(optimizer) -> list[list[int]]:
    """Of each parameter group."""
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


RAISED = ["z0-groups", "z2-groups", "z3-sub_groups", "z1-bf16-accum32", "adam-z1", "adam-z2"]
RAISED += ["adam-z3", "adam-z2-offload", "adam-z2-bf16-accum32"]


@pytest.mark.ranks(2)
def test_a_step_that_raised_is_said_once_and_training_goes_on():
    """In the middle of K-FAC's part, twice: groups are whole, and no gradient is kept."""
    for name in RAISED:
        mode = replace(BY_NAME[name], kfac={**EVERY, "report": "none"})
        unbroken, engine = build(mode, 1), build(mode, 1)
        kfac, groups = engine.kfac.preconditioner, parameters_of(engine.basic_optimizer)
        train(unbroken, 1, steps=3)
        train(engine, 1, steps=2)
        before, step = weights(engine), kfac.direction.step

        def stops(*arguments, step=step):
            step(*arguments)
            raise torch.OutOfMemoryError("no memory")

        with heard() as said:
            for _ in range(2):
                with patch.object(kfac.direction, "step", stops):
                    with pytest.raises(torch.OutOfMemoryError):
                        train(engine, 1, steps=1, first=2)
                assert parameters_of(engine.basic_optimizer) == groups, name
                assert not kfac.exchange.gradients and not kfac.exchange._outbox, name
                exact(weights(engine), before, what=name)
                engine.optimizer.zero_grad()
            train(engine, 1, steps=1, first=2)
        assert [BROKEN in text for text in said] == [True], (name, said)
        assert kfac.steps == 3
        norm, expected = (float(one.get_global_grad_norm() or 0) for one in (engine, unbroken))
        why = "16 bits; with what a step has left of gradients it is 0.05"
        near(norm, expected, 0.01, why, what=name)


def no_memory(*_) -> None:
    raise torch.OutOfMemoryError("no memory")


@pytest.mark.ranks(1)
def test_a_micro_batch_whose_backward_raises_behind_a_whole_one_leaves_nothing_behind():
    for name in ("adam-z1", "adam-z2", "adam-z2-bf16-accum32", "adam-z2-offload", "adam-z3"):
        engine = build(BY_NAME[name], 2, kfac={**BY_NAME[name].kfac_block, **EVERY})
        x = torch.randn(3, 4, FEATURES, dtype=next(engine.module.parameters()).dtype)
        batch = x, torch.zeros(3, 4, dtype=torch.int64)
        for _ in range(4):
            engine.backward(engine(*batch))
            engine.step()
            loss = engine(*batch)
            # before DeepSpeed gets any gradient: of more it would raise itself
            loss.register_hook(no_memory)
            with suppress(torch.OutOfMemoryError):
                engine.backward(loss)
            engine.optimizer.zero_grad()
            engine.backward(engine(*batch))
            engine.step()
        kfac = engine.kfac.preconditioner
        assert not kfac.proving.unfit and kfac.steps == 4, name
        assert {float(factor.updates) for factor in kfac.curvature.factors.values()} == {4.0}, name


# a rank that is lost


def lost_worker(what: str) -> None:
    engine = build(BY_NAME["z3"], 1)
    train(engine, 1, steps=1)
    curvature = engine.kfac.preconditioner.curvature
    raises = patch.object(curvature, "decompose", side_effect=ArithmeticError("no such factor"))
    if what == "raised before":  # on all ranks, which go on
        with raises, suppress(ArithmeticError):
            train(engine, 1, steps=3, first=1)
        train(engine, 1, steps=1, first=engine.kfac.job.steps)
    if dist.get_rank() == 1:
        if what == "raises":
            raises.start()
        else:
            curvature.decompose = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    train(engine, 1, steps=3, first=1)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raises", "rank 1 raised in K-FAC's step (refresh): ArithmeticError: no such factor"),
        ("dies", "rank 1 did not come"),
        ("raised before", "rank 1 did not come"),
    ],
)
def test_the_other_ranks_name_the_one_that_is_lost(what, words):
    with pytest.raises(AssertionError) as caught:
        run_ranks("tests.deepspeed.test_interruptions:lost_worker", world=3, payload=what, after=20)
    first, _, third = str(caught.value).split("--- rank ")[1:]
    for log in (first, third):
        lines = log.splitlines()
        (line,) = [x for x in lines if x.startswith("ds_kfac.comm.lost.LostRank: ")]
        assert "gradients could not be exchanged" in line and words in line, line


# layers whose rows are not known


class Lost(FusedHead):
    """Its head is called for six steps, and then by a kernel."""

    steps = 0

    def forward(self, x, y=None):
        self.fused = self.steps >= 6
        self.steps += y is not None
        return super().forward(x, y)


@pytest.mark.ranks(1)
def test_a_layer_whose_rows_are_lost_keeps_its_moments():
    proving.RAISES = False
    kfac = {**BY_NAME["adam-z2"].kfac_block, **EVERY}
    engine = build(BY_NAME["adam-z2"], 1, model=Lost(), kfac=kfac)
    train(engine, 1, steps=10)
    kfac = engine.kfac.preconditioner
    assert [*kfac.proving.unfit] == ["head"]
    assert {float(state.moments.updates) for state in kfac.state.values()} == {float(kfac.steps)}


class Alike(nn.Module):
    """Three layers of one shape, of which the rows of one are not seen."""

    def __init__(self, hidden: str) -> None:
        super().__init__()
        self.hidden = hidden
        for name in "abc":
            setattr(self, name, nn.Linear(8, 8, bias=False))

    def forward(self, x):
        for name in "abc":
            layer = getattr(self, name)
            x = torch.tanh(Hidden.apply(x, layer.weight) if name == self.hidden else layer(x))
        return x.square().mean()


def engine_of(model, *given, **config):
    settings = {"train_micro_batch_size_per_gpu": 4, **config}
    parameters = [*model.parameters(), *given]
    return ds_kfac.initialize(model=model, model_parameters=parameters, config=settings)[0]


SGD = {"type": "SGD", "params": {"lr": 0.1}}
ADAM = {"type": "KFACAdamW", "params": {"lr": 1e-3, "torch_adam": True}}


@pytest.mark.parametrize("hidden", ["a", "b"])
@pytest.mark.ranks(1)
def test_a_recorded_step_scales_each_layer_by_its_own_where_one_has_no_rows(hidden):
    proving.RAISES, found = False, []
    kfac = {**EVERY, "eigenbasis": {"refresh_interval": 4}, "preconditioner": {"kl_clip": 1e-5}}
    zero = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    for recorded in (False, True):
        with taped(1) if recorded else nullcontext():
            torch.manual_seed(0)
            engine = engine_of(Alike(hidden), optimizer=SGD, kfac=kfac, **zero)
            for step in range(8):
                generator = torch.Generator().manual_seed(step)
                engine.backward(engine(torch.randn(16, 8, generator=generator)))
                engine.step()
            assert float(engine.kfac.metrics.nu) < 0.5, "kl-clip has something to scale"
            found.append(weights(engine))
    plain, recorded = found
    close(recorded, plain, sums=8 * 3 * 16 * 8)  # steps, products, rows, sides


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.attention(x, x, x)[0]).square().mean()


@pytest.mark.ranks(1)
def test_programs_that_profile_or_give_parameters_that_no_layer_has():
    profiler = {"enabled": True, "profile_step": 2, "output_file": "/dev/null"}
    engine = engine_of(Attends(), optimizer=ADAM, kfac=EVERY, flops_profiler=profiler)
    for _ in range(4):
        engine.backward(engine(torch.randn(4, 5, 8)))
        engine.step()
    assert engine.kfac.preconditioner.steps == 4

    given = nn.Parameter(
        torch.ones(1)
    )  # as of a head that is replaced after the optimizer was made
    stale = {"optimizer": torch.optim.AdamW([given])}
    stale["config"] = {"train_micro_batch_size_per_gpu": 4, "kfac": {}}
    for said in (
        error_of(lambda: engine_of(Alike("a"), given, optimizer=ADAM, kfac={})),
        error_of(lambda: ds_kfac.initialize(model=Alike("a"), **stale)),
    ):
        assert "parameter of shape [1] that the model does not have" in said, said


@pytest.mark.ranks(1)
def test_a_plan_that_changes_before_the_first_step_prepares_its_hooks_again():
    engine = build(BY_NAME["z2"], 1)
    kfac = engine.kfac.preconditioner
    many = dict.fromkeys((layer.name for layer in kfac.layers), 10**6)
    kfac.observe(replace(kfac.observations, rows=many))
    assert len(kfac.curvature.reducer._slots) == len(kfac.due.capture) > 0


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1])
@pytest.mark.parametrize("name", ["z0", "z2", "adam-z3", "z2-bf16"])
def test_no_layer_fails_the_proof_after_a_load_between_two_micro_batches(name, world):
    """DeepSpeed keeps the gradient of the micro-batch before the load; its rows are dropped."""
    folder = shared_folder()
    engine = build(BY_NAME[name], 2)
    train(engine, 2, steps=2)
    engine.save_checkpoint(folder, tag="tag")
    (x, y), _ = micro_batches(2, 2)
    engine.backward(engine(x.to(engine.get_data_types()[0]), y))
    engine.step()
    engine.load_checkpoint(folder, tag="tag")
    for x, y in list(micro_batches(3, 2)) * 2:
        engine.backward(engine(x.to(engine.get_data_types()[0]), y))
        engine.step()
    assert engine.kfac.preconditioner.steps == 4
    assert not engine.kfac.preconditioner.proving.unfit
