"""What an engine takes it gives back: process groups, threads, file descriptors, hooks."""

import contextlib
import io
import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

import ds_kfac
from ds_kfac.engine.attachment import BROKEN, attached
from tests.choices import chosen
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, held, train, weights
from tests.deepspeed.said import heard
from tests.models import make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
KFAC = {"factor": {"update_interval": 1}, "eigenbasis": {"refresh_interval": 2}}
CYCLES = 6


def cycles_worker(names: list[str]) -> dict:
    results = {}
    for name in names:
        found = []
        for _ in range(CYCLES // len(names)):
            model = make_net()
            engine = build(BY_NAME[name], 1, model=model, kfac=KFAC)
            train(engine, 1, steps=3)
            engine.destroy()
            found.append(held(model))
        results[name] = found
    return results


def test_many_engines_leave_what_one_leaves():
    for result in run_ranks(
        "tests.deepspeed.test_lifecycle:cycles_worker", world=2, payload=["z2", "adam-z3"]
    ):
        for name, found in result.items():
            assert all(row == found[0] for row in found), (name, found)


def ways_worker(folder: str) -> dict:
    mode, results = BY_NAME["z2"], {}
    plain = build(mode, 1, kfac={"enabled": False})
    model = plain.module
    plain.destroy()
    before = held(model)

    def count(name: str, leave, mode=mode) -> None:
        engine = build(mode, 1, model=make_net(), kfac=KFAC)
        model, during = engine.module, held(engine.module)
        leave(engine)
        del engine
        if name == "garbage":  # with its model, whose hooks refer to it
            model = plain.module
        results[name] = before, during, held(model)

    def twice(engine):
        engine.destroy(), engine.destroy()

    def both(engine):
        engine.kfac.detach(), engine.destroy()

    def alone(engine):
        """Rank 1 does nothing until rank 0 is through, as if it were gone."""
        signal = Path(folder, "signal")
        if dist.get_rank() == 0:
            engine.destroy()
            signal.touch()
        deadline = time.monotonic() + 60
        while not signal.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert signal.exists()
        engine.destroy()

    count("twice", twice)
    count("detached before", both)
    count("one rank alone", alone)
    # ZeRO's own hooks keep an engine that nobody destroys
    count("garbage", lambda engine: None, BY_NAME["z0"])

    once = build(mode, 1, kfac=KFAC)
    train(once, 1)
    again = build(mode, 1, kfac=KFAC)
    with contextlib.redirect_stdout(io.StringIO()), chosen(KFAC):
        again.kfac.detach()
        ds_kfac.attach(again)
    train(again, 1)
    expected = weights(once)
    results["attached again"] = all(
        torch.equal(w, expected[name]) for name, w in weights(again).items()
    )

    # of two Trainers, of which the first one's engine goes when the second has one
    model = make_net()
    older, newer = (build(mode, 1, model=model, kfac=KFAC) for _ in range(2))
    older.destroy()
    results["newer"] = attached(model) is newer.kfac
    newer.destroy()
    results["newer"] &= attached(model) is None

    world = dist.group.WORLD
    # as init_distributed(timeout=...) does
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1234), world)
    timed = build(mode, 1, kfac=KFAC)
    ours = timed.kfac.preconditioner.channel.group
    results["timeout"] = ours._get_backend(torch.device("cpu")).options._timeout
    dist.barrier()
    dist.destroy_process_group()
    # the job has ended its groups, ours among them; DeepSpeed's destroy fails then
    timed.kfac.detach()
    results["after the job's end"] = held(timed.module)["hooks"] == before["hooks"]
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=int(os.environ["RANK"]), world_size=2
    )
    return results


@pytest.fixture(scope="module")
def ways(tmp_path_factory) -> list[dict]:
    folder = str(tmp_path_factory.mktemp("ways"))
    return run_ranks("tests.deepspeed.test_lifecycle:ways_worker", world=2, payload=folder)


@pytest.mark.parametrize("way", ["twice", "detached before", "one rank alone", "garbage"])
def test_destroy_gives_everything_back(ways, way):
    for before, during, after in (result[way] for result in ways):
        assert during["groups"] == before["groups"] + 1 and during["hooks"] > before["hooks"]
        assert after == before


def test_attaching_again_trains_as_attaching_once(ways):
    assert all(result["attached again"] for result in ways)


def test_a_models_callbacks_find_its_newer_engine_when_an_older_one_goes(ways):
    assert all(result["newer"] for result in ways)


def test_our_group_has_the_timeout_of_the_job(ways):
    assert all(result["timeout"] == timedelta(seconds=1234) for result in ways)


def test_an_engine_can_be_detached_after_the_jobs_groups(ways):
    assert all(result["after the job's end"] for result in ways)


def idle_worker(_) -> list:
    """Engines that will not train, as a Trainer makes them of reference models and for
    evaluation."""
    found = []
    for stage in (0, 3):
        model = make_net()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "kfac": KFAC,
        }
        engine, *_ = ds_kfac.initialize(model=model, config=config)
        found.append(hasattr(engine, "kfac"))
        try:
            ds_kfac.attach(engine)
            found.append("attached")
        except ValueError as error:
            found.append(str(error))
        engine.destroy()
    return found


def test_an_engine_without_an_optimizer_is_left_alone_unless_it_is_named():
    (found,) = run_ranks("tests.deepspeed.test_lifecycle:idle_worker", world=1)
    assert found[0] is found[2] is False
    assert all('add an "optimizer" block' in text for text in (found[1], found[3])), found


class Wrapper(torch.optim.Optimizer):
    """Has another's groups and calls no initialiser of torch's, as timm's Lookahead."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.defaults, self.state = (
            base,
            base.param_groups,
            base.defaults,
            base.state,
        )

    def step(self, closure=None) -> None:
        self.base.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def load_state_dict(self, state_dict) -> None:
        self.base.load_state_dict(state_dict)


def wrapped_worker(_) -> tuple[list[float], str]:
    model = make_net()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "kfac": KFAC,
    }
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.model = model  # as LOMO has it
    engine, *_ = ds_kfac.initialize(model=model, optimizer=optimizer, config=config)
    train(engine, 1, steps=1)
    moved = [float((weight - before[name]).abs().max()) for name, weight in weights(engine).items()]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        optimizer.load_state_dict(optimizer.base.state_dict())
        model.load_state_dict(model.state_dict())
    engine.destroy()
    return moved, said.getvalue()


def test_an_optimizer_that_calls_no_initialiser_of_torchs_is_stepped_and_warns_when_it_loads():
    ((moved, said),) = run_ranks("tests.deepspeed.test_lifecycle:wrapped_worker", world=1)
    assert max(moved) > 0 and said.count("loads nothing of K-FAC's") == 1


def undestroyed_worker(names: list[str]) -> dict:
    """Engines that nobody destroys, as those of several Trainers in one process; ZeRO's are never
    collected."""
    results = {}
    for name in names:
        mode = BY_NAME[name]
        alone = build(mode, 1, model=make_net(), kfac=KFAC)
        train(alone, 1, steps=4)
        expected = weights(alone)
        alone.destroy()
        before, engines, groups = held()["groups"], [], []
        for _ in range(4):
            engines.append(build(mode, 1, model=make_net(), kfac=KFAC))
            groups.append(held()["groups"] - before)
        for step in range(4):  # one after another at each step, in one group
            for engine in engines:
                train(engine, 1, steps=1, first=step)
        same = [
            all(torch.equal(w, expected[n]) for n, w in weights(engine).items())
            for engine in engines
        ]
        engines.pop().destroy()
        groups.append(held()["groups"] - before)
        train(engines[-1], 1, steps=1, first=4)
        # here nobody has the group any more, on the other rank three
        for engine in () if dist.get_rank() else engines:
            engine.destroy()
        # by an engine whose batch was too large, as with the Trainer's auto_find_batch_size
        left = make_net()
        sum(parameter.sum() for parameter in left.parameters()).backward()
        later = build(mode, 1, model=left, kfac=KFAC)
        train(later, 1, steps=4)
        same.append(all(torch.equal(w, expected[n]) for n, w in weights(later).items()))
        for engine in (*engines, later) if dist.get_rank() else (later,):
            engine.destroy()
        results[name] = groups, same, held()["groups"] - before
    return results


def test_engines_that_nobody_destroys_share_one_group_and_train_as_if_alone():
    names = ["z0", "adam-z2", "z3"]
    for result in run_ranks(
        "tests.deepspeed.test_lifecycle:undestroyed_worker", world=2, payload=names
    ):
        for name, (groups, same, left) in result.items():
            assert groups == [1] * 5 and same == [True] * 5 and left == 0, (
                name,
                groups,
                same,
                left,
            )


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
        failing_scheduler = Mock(step=Mock(side_effect=ValueError))
        with patch.object(engine, "lr_scheduler", failing_scheduler), suppress(ValueError):
            train(engine, 1, steps=1, first=step)
        # which DeepSpeed leaves out
        engine.micro_steps = engine.gradient_accumulation_steps() * (step + 1)
        return
    if place == "no backward":
        if engine.zero_optimization():
            # on all ranks, not in one's collective
            with pytest.raises(RuntimeError, match="has no gradients"):
                engine.step()
        return
    if place in WITHIN:
        engine.save_checkpoint(folder, tag="before")
    with failing(engine, place), suppress(KeyboardInterrupt):
        train(engine, 1, steps=1, first=step)
    engine.optimizer.zero_grad()
    if place in WITHIN:
        engine.load_checkpoint(folder, tag="before")


def interrupted_worker(payload: tuple[str, list[str]]) -> dict:
    """Weights after steps, and after steps of which each is interrupted at a place of its own, and
    taken again."""
    folder, names = payload
    found = {}
    for turn, name in enumerate(names):
        for places in ([""] * len(PLACES), PLACES[turn:] + PLACES[:turn]):
            engine = build(
                BY_NAME[name],
                1,
                kfac={**BY_NAME[name].kfac_block, "eigenbasis": {"refresh_interval": 1}},
            )
            kfac, said = engine.kfac.preconditioner, []
            for step, place in enumerate(places):
                with heard() as messages:
                    if place:
                        interrupt(engine, step, place, f"{folder}/{name}")
                said.append((place, sum(BROKEN in text for text in messages)))
                if place != "scheduler":  # that step is done
                    train(engine, 1, steps=1, first=step)
            found[name, places[0]] = weights(engine), dict(kfac.proving.unfit), kfac.steps, said
            engine.destroy()
    return found


def test_a_step_that_is_interrupted_leaves_nothing_behind_or_is_undone_by_a_checkpoint(tmp_path):
    """It is said, once, where state and weights are those of no step."""
    payload = str(tmp_path), ["z0", "adam-z0", "adam-z2", "adam-z3"]
    for found in run_ranks(
        "tests.deepspeed.test_lifecycle:interrupted_worker", world=2, payload=payload
    ):
        for (name, place), (actual, unfit, steps, said) in found.items():
            assert not unfit and steps == len(PLACES), (name, place)
            broken = [where for where, _ in said if where in WITHIN][:1]
            assert [where for where, count in said if count] == broken, (name, said)
            for key, weight in found[name, ""][0].items():
                assert torch.equal(actual[key], weight), (name, place, key)
