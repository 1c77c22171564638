"""What is left of a step, a backward or a forward that raises, and of a rank that is lost."""

import os
import signal
from contextlib import suppress
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

from ds_kfac.engine.attachment import BROKEN
from tests.close import exact, near
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, micro_batches, train, weights
from tests.deepspeed.said import error_of, heard
from tests.deepspeed.test_checkpoint import KFAC
from tests.models import FEATURES, Net, cross_entropy, make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
EVERY = {**KFAC, "eigenbasis": {"refresh_interval": 1}}


class Functional(Net):
    """Its head is called as a function, for which torch is watched."""

    def forward(self, x, y):
        z = torch.tanh(self.middle(self.norm(self.silu(self.first(x)))))
        return cross_entropy(F.linear(z, self.head.weight, self.head.bias), y)


def no_memory(*_) -> None:
    raise torch.OutOfMemoryError("no memory")


def no_memory_backward(module, given, output) -> None:
    output.register_hook(no_memory)


@pytest.mark.ranks(1)
def test_a_forward_or_backward_that_raises_leaves_nothing_behind():
    """Before each step's own passes; torch is as it was, too."""
    batch, plain = (torch.randn(3, 4, FEATURES), torch.zeros(3, 4, dtype=torch.int64)), F.linear
    for name in ("z0", "adam-z0"):
        expected = {}
        for fault in (None, no_memory, no_memory_backward):
            kfac = {**BY_NAME[name].kfac_block, **EVERY}
            engine = build(BY_NAME[name], 1, kfac=kfac, model=make_net(Functional))
            for step in range(4):
                if step > 0 and fault:
                    hook = engine.module.norm.register_forward_hook(fault)
                    with pytest.raises(torch.OutOfMemoryError):
                        engine.backward(engine(*batch))
                    hook.remove()
                assert F.linear is plain and not _get_current_function_mode_stack()
                engine.optimizer.zero_grad()
                train(engine, 1, steps=1, first=step)
            assert not engine.kfac.preconditioner.proving.unfit, (name, fault)
            expected = expected or weights(engine)
            exact(weights(engine), expected, what=f"{name} {fault}")


WITHIN = ("decompose", "precondition", "write", "inner")
"""When some of the state has changed. The last one is the optimizer's own part, after K-FAC's."""
PLACES = ("step", *WITHIN)
"""The first one is before K-FAC's part of a step."""


def interrupt(engine, step: int, place: str, folder: str) -> None:
    """A step that is interrupted at a place, and what a user does before it is taken again."""
    kfac = engine.kfac.preconditioner
    engine.save_checkpoint(folder, tag="before")
    holder, name = {
        "step": (engine.optimizer, "step"),
        "decompose": (kfac.curvature, "decompose"),
        "precondition": (kfac.direction, "step"),
        "write": (kfac.exchange, "write"),
        "inner": (engine.basic_optimizer, "_init_group"),
    }[place]
    with patch.object(holder, name, side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
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
            train(engine, 1, steps=1, first=step)
            if engine.zero_optimization():  # on all ranks, not in one's collective
                with pytest.raises(RuntimeError, match="has no gradients"):
                    engine.step()
        (broken,) = said
        assert broken == next(p for p in PLACES[turn:] + PLACES[:turn] if p in WITHIN), name
        assert not engine.kfac.preconditioner.proving.unfit
        assert engine.kfac.preconditioner.steps == len(PLACES)
        exact(weights(engine), weights(unbroken), what=name)


def parameters_of(optimizer) -> list[list[int]]:
    """Of each parameter group."""
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


@pytest.mark.ranks(2)
def test_a_step_that_raised_is_said_once_and_training_goes_on():
    """In the middle of K-FAC's part, twice: groups are whole, and no gradient is kept."""
    names = "z0-groups z2-groups z3-sub_groups z1-bf16-accum32 adam-z2 adam-z3 adam-z2-offload"
    for name in names.split():
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


@pytest.mark.ranks(1)
def test_a_micro_batch_whose_backward_raises_behind_a_whole_one_leaves_nothing_behind():
    for name in ("adam-z2", "adam-z2-bf16-accum32", "adam-z2-offload", "adam-z3"):
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
    if what == "dies later":  # than in a step that raises on all ranks, which go on
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
        ("dies later", "rank 1 did not come"),
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


@pytest.mark.ranks(1)
def test_programs_that_profile_or_give_parameters_that_no_layer_has():
    profiler = {"enabled": True, "profile_step": 2, "output_file": "/dev/null"}
    mode = BY_NAME["adam-z0"]
    engine = build(mode, 1, model=make_net(Functional), flops_profiler=profiler)
    train(engine, 1, steps=4)
    assert engine.kfac.preconditioner.steps == 4
    # as of a head that is replaced after the optimizer was made
    model, stale = Net(), nn.Parameter(torch.ones(1))
    for given, config in (
        ({"model_parameters": [*model.parameters(), stale]}, {}),
        (
            {"optimizer": torch.optim.AdamW([stale]), "model_parameters": None},
            {"optimizer": None},
        ),
    ):
        said = error_of(partial(build, mode, 1, model=model, given=given, **config))
        assert "parameter of shape [1] that the model does not have" in said, said


@pytest.mark.ranks(1)
def test_a_plan_that_changes_before_the_first_step_prepares_its_hooks_again():
    engine = build(BY_NAME["z2"], 1)
    kfac = engine.kfac.preconditioner
    many = dict.fromkeys((layer.name for layer in kfac.layers), 10**6)
    kfac.observe(replace(kfac.observations, rows=many))
    assert len(kfac.curvature.reducer._slots) == len(kfac.due.capture) > 0


@pytest.mark.ranks(1)
def test_no_layer_fails_the_proof_after_a_load_between_two_micro_batches(tmp_path):
    """DeepSpeed keeps the gradient of the micro-batch before the load; its rows are dropped."""
    for name in ("z0", "z2", "adam-z3"):
        engine = build(BY_NAME[name], 2)
        train(engine, 2, steps=2)
        engine.save_checkpoint(f"{tmp_path}/{name}", tag="tag")
        (x, y), *_ = micro_batches(2, 2)
        engine.backward(engine(x, y))
        engine.step()
        engine.load_checkpoint(f"{tmp_path}/{name}", tag="tag")
        train(engine, 2, steps=2, first=3)
        assert engine.kfac.preconditioner.steps == 4
        assert not engine.kfac.preconditioner.proving.unfit
