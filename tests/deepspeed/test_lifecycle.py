"""What an engine takes it gives back: process groups, threads, file descriptors, hooks; and engines
that train beside each other, or not at all."""

import contextlib
import io
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ds_kfac
from ds_kfac.engine.attachment import attached
from tests.choices import chosen
from tests.close import exact
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, held, train, weights
from tests.deepspeed.said import error_of
from tests.models import make_net

pytestmark = pytest.mark.distributed
KFAC = {"factor": {"update_interval": 1}, "eigenbasis": {"refresh_interval": 2}}


def engine_of(name: str = "z2", **options):
    return build(BY_NAME[name], 1, **{"kfac": KFAC, **options})


def trained(name: str, steps: int = 4, **options) -> dict:
    """Weights after steps of an engine that is alone."""
    engine = engine_of(name, **options)
    train(engine, 1, steps=steps)
    found = weights(engine)
    engine.destroy()
    return found


def leave_twice(engine, signal) -> None:
    engine.destroy()
    engine.destroy()


def leave_detached(engine, signal) -> None:
    engine.kfac.detach()
    engine.destroy()


def leave_alone(engine, signal) -> None:
    """Rank 1 does nothing until rank 0 is through, as if it were gone."""
    if dist.get_rank() == 0:
        engine.destroy()
        signal.touch()
    deadline = time.monotonic() + 60
    while not signal.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert signal.exists()
    engine.destroy()


@pytest.mark.ranks(2)
def test_destroy_gives_everything_back(tmp_path):
    plain = engine_of(kfac={"enabled": False})
    before = held(plain.module)
    # ZeRO's own hooks keep an engine that nobody destroys
    ways = [("z2", leave) for leave in (leave_twice, leave_detached, leave_alone)]
    for name, leave in (*ways, ("z0", None), ("adam-z3", leave_twice), ("adam-z3", leave_twice)):
        engine = engine_of(name, model=make_net())
        train(engine, 1, steps=3)
        model, during = engine.module, held(engine.module)
        assert during["groups"] == before["groups"] + 1 and during["hooks"] > before["hooks"]
        if leave:
            leave(engine, tmp_path / "signal")
        else:  # garbage, with its model, whose hooks refer to it
            model = plain.module
        del engine
        assert held(model) == before, (name, leave)


@pytest.mark.ranks(2)
def test_an_engine_can_be_detached_after_the_jobs_groups_and_has_their_timeout(tmp_path):
    hooks = held(engine_of(kfac={"enabled": False}).module)["hooks"]
    # as init_distributed(timeout=...) does
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1234), dist.group.WORLD)
    engine = engine_of()
    group = engine.kfac.preconditioner.channel.group
    options = group._get_backend(torch.device("cpu")).options
    assert options._timeout == timedelta(seconds=1234)
    dist.barrier()
    dist.destroy_process_group()
    engine.kfac.detach()  # DeepSpeed's destroy fails then
    assert held(engine.module)["hooks"] == hooks
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=int(os.environ["RANK"]), world_size=2)


@pytest.mark.ranks(2)
def test_attaching_again_trains_as_attaching_once():
    expected, engine = trained("z2"), engine_of()
    engine.kfac.detach()
    with chosen(KFAC):
        ds_kfac.attach(engine)
    train(engine, 1)
    exact(weights(engine), expected)


@pytest.mark.ranks(1)
def test_a_models_callbacks_find_its_newer_engine_when_an_older_one_goes():
    """Of two Trainers, of which the first one's engine goes when the second has one."""
    model = make_net()
    older, newer = (engine_of(model=model) for _ in range(2))
    older.destroy()
    assert attached(model) is newer.kfac
    newer.destroy()
    assert attached(model) is None


@pytest.mark.ranks(2)
def test_engines_that_nobody_destroys_share_one_group_and_train_as_if_alone():
    """As those of several Trainers in one process; ZeRO's are never collected."""
    for name in ("z0", "adam-z2", "z3"):
        expected, before, engines = trained(name), held()["groups"], []
        for _ in range(4):
            engines.append(engine_of(name))
            assert held()["groups"] == before + 1
        for step in range(4):  # one after another at each step, in one group
            for engine in engines:
                train(engine, 1, steps=1, first=step)
        for engine in engines:
            exact(weights(engine), expected, what=name)
        engines.pop().destroy()
        assert held()["groups"] == before + 1
        train(engines[-1], 1, steps=1, first=4)
        # here nobody has the group any more, on the other rank three
        for engine in () if dist.get_rank() else engines:
            engine.destroy()
        # by an engine whose batch was too large, as with the Trainer's auto_find_batch_size
        left = make_net()
        sum(parameter.sum() for parameter in left.parameters()).backward()
        later = engine_of(name, model=left)
        train(later, 1, steps=4)
        exact(weights(later), expected, what=name)
        for engine in (*engines, later) if dist.get_rank() else (later,):
            engine.destroy()
        assert held()["groups"] == before, name


@pytest.mark.ranks(1)
def test_an_engine_without_an_optimizer_is_left_alone_unless_it_is_named():
    """Engines that will not train, as a Trainer makes them of reference models and for
    evaluation."""
    for stage in (0, 3):
        config = {"train_micro_batch_size_per_gpu": 2, "kfac": KFAC}
        config["zero_optimization"] = {"stage": stage}
        engine, *_ = ds_kfac.initialize(model=make_net(), config=config)
        assert not hasattr(engine, "kfac")
        said = error_of(lambda: ds_kfac.attach(engine))  # noqa: B023
        assert 'add an "optimizer" block' in said, said


class Wrapper(torch.optim.Optimizer):
    """Has another's groups and calls no initialiser of torch's, as timm's Lookahead."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups = base, base.param_groups
        self.defaults, self.state = base.defaults, base.state

    def step(self, closure=None) -> None:
        self.base.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def load_state_dict(self, state_dict) -> None:
        self.base.load_state_dict(state_dict)


@pytest.mark.ranks(1)
def test_an_optimizer_that_calls_no_initialiser_of_torchs_is_stepped_and_warns_when_it_loads():
    model = make_net()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "kfac": KFAC}
    config["zero_allow_untested_optimizer"] = True
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.model = model  # as LOMO has it
    engine, *_ = ds_kfac.initialize(model=model, optimizer=optimizer, config=config)
    train(engine, 1, steps=1)
    assert any(not torch.equal(w, before[name]) for name, w in weights(engine).items())
    with contextlib.redirect_stderr(io.StringIO()) as said:
        optimizer.load_state_dict(optimizer.base.state_dict())
        model.load_state_dict(model.state_dict())
    assert said.getvalue().count("loads nothing of K-FAC's") == 1
