"""K-FAC runs at the inner optimizer's first step, where DeepSpeed has decided to apply it: what
lies there, by which factor it is still multiplied, and what steps that are skipped or raise leave
behind."""

import contextlib
import io
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_kfac
from ds_kfac.zero.deepspeed_versions import is_gathered
from ds_kfac.zero.layout import ShardLayout
from ds_kfac.zero.registry import shard_layout
from ds_kfac.zero.seam import Seam
from ds_kfac.zero.stages import ZeroLayout
from tests.close import exact
from tests.deepspeed.modes import BY_NAME, CLIPPED, FP32_ACCUM, LR, OFFLOAD, Mode
from tests.deepspeed.runs import build, micro_batches, parameter_groups, patched, train, weights
from tests.models import make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
GROWS = {"fp16": {"initial_scale_power": 8, "loss_scale_window": 2}}
"""The loss scale doubles within a step, between norm and division."""
STEPS = 4


def modes_of(stage: int) -> list[Mode]:
    """All dtypes, clipped and not, and from stage 1 on with and without offload, of several
    parameter groups or sub-groups."""
    offloads: list[dict] = [{}, OFFLOAD] if stage else [{}]
    small = {"sub_group_size": 100} if stage == 3 else {}
    modes = [
        Mode(
            f"z{stage}-{dtype}{'-offload' * bool(offload)}{'-clipped' * bool(clip)}",
            stage,
            dtype,
            zero={**small, **offload},
            extra=GROWS if dtype == "fp16" else {},
            groups="decay",
            clip=clip,
        )
        for dtype in ("fp32", "bf16", "fp16")
        for offload in offloads
        for clip in (0.0, CLIPPED)
    ]
    if stage == 0:
        modes += [
            replace(mode, name=f"{mode.name}-fused", fused=True)
            for mode in modes
            if mode.dtype != "fp32"
        ]
    if stage == 1:  # BF16_Optimizer
        modes += [
            replace(mode, name=f"{mode.name}-accum32", extra=FP32_ACCUM)
            for mode in modes
            if mode.dtype == "bf16" and not mode.zero
        ]
    return modes


def plain_engine(mode: Mode, rate: float = LR) -> Any:
    """Without K-FAC, with SGD."""
    config = {**mode.config(1, dist.get_world_size())}
    config |= {"optimizer": {"type": "SGD", "params": {"lr": rate, "momentum": 0.9}}}
    del config["kfac"]
    model = make_net()
    with patched(mode), contextlib.redirect_stdout(io.StringIO()):
        return deepspeed.initialize(
            model=model, model_parameters=parameter_groups(model, mode.groups), config=config
        )[0]


class Doubling:
    """Doubles all gradients where they lie at the first inner step.

    Attributes:
        told: what the seam has called, step by step.
        promised: shard -> gradient times the factor that is still to come, as doubled.
        wrong: shards that the inner optimizer stepped with something else.
        narrow: shards in whose memory a large result would overflow.
        stepped: how many shards it has stepped.
    """

    def __init__(self, engine: Any) -> None:
        self.seam, self.told = Seam(engine), list[str]()
        self.layout: ShardLayout = shard_layout(
            engine, list(engine.module.parameters()), engine.seq_data_parallel_group, seam=self.seam
        )
        self.promised: dict[Any, torch.Tensor] = {}
        self.wrong, self.narrow, self.stepped = list[Any](), list[Any](), 0
        self.seam.open(self)
        self.inner = self.seam.inner
        self.inner.register_step_pre_hook(self._look)

    proves = False

    def begin(self) -> None:
        self.told.append("begin")
        self.layout.begin()

    def step(self) -> None:
        self.told.append("step")
        for shard, gradient in self.layout.gradients().items():
            gradient.mul_(2.0)
            if gradient.dtype is torch.float16:
                self.narrow.append(shard)
            factor = self.seam.factor if self.layout.raw(shard) else None
            self.promised[shard] = (
                gradient.float().clone() if factor is None else gradient.float() * factor.view(1)
            )

    def end(self, *, applied: bool) -> None:
        self.told.append(f"end {applied}")
        self.layout.end()

    def raised(self, *, begun: bool) -> None:
        self.told.append(f"raised {begun}")

    def _look(self, *_: Any) -> None:
        shown = {id(param) for group in self.inner.param_groups for param in group["params"]}
        for shard, promised in self.promised.items():
            master = self.layout.master(shard)
            if id(master) in shown and master.grad is not None:
                found = master.grad.reshape(-1)[shard.offset : shard.offset + shard.numel]
                self.stepped += 1
                if not torch.equal(found, promised.to(found.dtype)):
                    self.wrong.append(shard)


def doubling_worker(stage: int) -> dict:
    found = {}
    for mode in modes_of(stage):
        twice, engine = plain_engine(mode, 2 * LR), plain_engine(mode)
        doubling = Doubling(engine)
        with patched(mode):
            train(twice, 1, steps=STEPS)
            train(engine, 1, steps=STEPS)
        own = len(doubling.layout.shards.on(doubling.layout.rank))
        found[mode.name] = {
            "wrong": doubling.wrong,
            "narrow": doubling.narrow,
            "missing": STEPS * own - doubling.stepped,
            "told": doubling.told,
            "weights": (weights(engine), weights(twice)),
            "norm": float(engine.get_global_grad_norm() or 1.0),
        }
        engine.destroy()
        twice.destroy()
    return found


@cache  # no fixture: where a rank raises a test fails, and not something before it
def doubled(stage: int) -> list[dict]:
    return run_ranks("tests.zero.test_seam:doubling_worker", world=2, payload=stage)


EVERY_STAGE = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@EVERY_STAGE
def test_a_gradient_times_the_factor_is_what_the_inner_optimizer_steps_with(stage):
    """To the bit, of the first group and of all later ones."""
    for rank in doubled(stage):
        for name, mode in rank.items():
            assert not mode["wrong"] and not mode["missing"], name
            assert not mode["narrow"], f"{name}: fp16 does not hold every result"


@EVERY_STAGE
def test_gradients_that_are_doubled_in_place_give_the_weights_of_twice_the_rate(stage):
    for rank in doubled(stage):
        for name, mode in rank.items():
            exact(*mode["weights"], what=name)
            # at stage 0 in fp16 DeepSpeed divides by a loss scale that it never multiplied by
            assert name.startswith("z0-fp16") or mode["norm"] > 2 * CLIPPED, (
                f"{name} has something to clip"
            )


@EVERY_STAGE
def test_a_step_runs_once_whatever_the_number_of_inner_steps(stage):
    for rank in doubled(stage):
        for name, mode in rank.items():
            assert mode["told"] == ["begin", "step", "end True"] * STEPS, name


class OwnAdamW(torch.optim.AdamW):
    """torch runs an optimizer's hooks in ``step`` of each class of which the process has an
    instance."""

    def step(self, closure=None):
        return super().step(closure)


def nested_worker(_) -> list[str]:
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    model = make_net()
    config = {**BY_NAME["z0"].config(1, 1)}
    del config["optimizer"], config["kfac"]
    engine = deepspeed.initialize(
        model=model, optimizer=OwnAdamW(model.parameters(), lr=LR), config=config
    )[0]
    doubling = Doubling(engine)
    train(engine, 1, steps=2)
    return doubling.told


def test_hooks_that_torch_runs_twice_are_one_step():
    assert run_ranks("tests.zero.test_seam:nested_worker", world=1) == [
        ["begin", "step", "end True"] * 2
    ]


def interrupted_worker(_) -> list[str]:
    engine = plain_engine(BY_NAME["z0-noclip"])
    doubling = Doubling(engine)
    with patch.object(doubling.layout, "gradients", side_effect=FloatingPointError("stopped")):
        with contextlib.suppress(FloatingPointError):
            train(engine, 1, steps=1)
    engine.optimizer.zero_grad()
    engine.optimizer.step()
    train(engine, 1, steps=1, first=1)
    return doubling.told


def test_a_step_without_gradients_is_none_after_one_that_raised():
    (told,) = run_ranks("tests.zero.test_seam:interrupted_worker", world=1)
    assert told == ["begin", "step", "raised True", "begin", "step", "end True"]


OUTER = [
    "z0-noclip",
    "z0-fp16",
    "z0-bf16-fused",
    "z1-bf16-accum32",
    "z2",
    "z2-fp16",
    "z3-offload",
    "adam-z2",
    "adam-z3",
]


def outer_worker(_) -> dict:
    found = {}
    for name in OUTER:
        mode, trained = BY_NAME[name], []
        for own in (False, True):
            engine = build(replace(mode, groups="decay"), 1)
            for x, y in (batch for step in range(3) for batch in micro_batches(step, 1)):
                with patched(mode):
                    engine.backward(engine(x.to(engine.get_data_types()[0]), y))
                if own:
                    engine.optimizer.step()
                    engine.optimizer.zero_grad()
                else:
                    engine.step()
            assert engine.kfac.preconditioner.steps == 3
            trained.append(weights(engine))
            engine.destroy()
        found[name] = trained
    return found


def test_the_optimizers_step_in_place_of_the_engines_gives_the_same_weights():
    (found,) = run_ranks("tests.zero.test_seam:outer_worker", world=1)
    for name, trained in found.items():
        exact(*trained, what=name)


def twice_worker(_) -> list:
    engine = build(BY_NAME["z0-noclip"], 1)  # clipping, DeepSpeed itself fails without gradients
    train(engine, 1, steps=2)
    before, kfac = weights(engine), engine.kfac.preconditioner
    factors = {key: factor.packed_P.clone() for key, factor in kfac.curvature.factors.items()}
    engine.step()
    after = {key: factor.packed_P for key, factor in kfac.curvature.factors.items()}
    return [kfac.steps, (before, weights(engine)), (factors, after)]


def test_a_second_step_after_one_backward_changes_nothing_at_stage_0():
    ((steps, of_weights, factors),) = run_ranks("tests.zero.test_seam:twice_worker", world=1)
    assert steps == 2
    exact(*of_weights), exact(*factors)


def bypass_worker(names: list[str]) -> dict:
    """A program puts back the step of the optimizer that it kept from before attach."""
    found = {}
    for name in names:
        engine = build(BY_NAME[name], 1)
        train(engine, 1, steps=1)
        before = weights(engine)
        engine.optimizer.step = type(engine.optimizer).step.__get__(engine.optimizer)
        try:
            train(engine, 1, steps=1, first=1)
            error = "none"
        except RuntimeError as problem:
            error = str(problem)
        found[name] = error, (before, weights(engine))
        engine.destroy()
    return found


def test_a_step_past_the_wrapped_one_is_an_error_and_moves_nothing():
    (found,) = run_ranks(
        "tests.zero.test_seam:bypass_worker", world=1, payload=["adam-z2", "z2", "z0-bf16"]
    )
    for name, (error, unmoved) in found.items():
        assert "engine.kfac.detach()" in error, name
        exact(*unmoved, what=name)


RAISING = ["z0-groups", "z2-groups", "z3-sub_groups", "adam-z2", "z2-fp16", "z1-bf16-accum32"]


def shown(engine: Any) -> list:
    """Which parameters the inner optimizer has, group by group."""
    return [
        [id(param) for param in group["params"]]
        for group in engine.kfac.preconditioner.seam.inner.param_groups
    ]


def raising_worker(_) -> dict:
    found = {}
    for name in RAISING:
        engine = build(BY_NAME[name], 1)
        train(engine, 1, steps=1)
        before, groups, kfac = weights(engine), shown(engine), engine.kfac.preconditioner
        step = kfac.direction.step

        def stops(*arguments, step=step):
            step(*arguments)
            raise FloatingPointError("stopped")

        with patch.object(kfac.direction, "step", stops):
            try:
                train(engine, 1, steps=1, first=1)
                error = "none"
            except FloatingPointError as problem:
                error = str(problem)
        kept = len(kfac.exchange.gradients) + len(kfac.exchange._outbox)
        stopped, whole = weights(engine), shown(engine) == groups
        engine.optimizer.zero_grad()
        train(engine, 1, steps=2, first=2)
        found[name] = (error, whole, kept), (before, stopped), weights(engine), kfac.steps
        engine.destroy()
    return found


def test_an_error_in_a_step_leaves_groups_whole_and_no_gradients_and_the_next_step_works():
    for rank in run_ranks("tests.zero.test_seam:raising_worker", world=2):
        for name, (stopped, unmoved, trained, steps) in rank.items():
            assert stopped == ("stopped", True, 0) and steps == 3, (name, stopped)
            exact(*unmoved, what=name)
            assert all(
                x.isfinite().all() and not x.equal(unmoved[0][n]) for n, x in trained.items()
            ), name


def skipped_worker(name: str) -> list:
    """Factors of inputs, and counts, with a step that DeepSpeed skips and without."""
    found = []
    for skips in (1, 0):
        engine = build(BY_NAME[name], 1)
        kfac = engine.kfac.preconditioner
        with patched(BY_NAME[name]):
            train(engine, 1, steps=1)
            if skips:
                train(engine, 1, steps=1, first=7, times=float("inf"))
            assert engine.skipped_steps == skips and not kfac.capture.sums
            train(engine, 1, steps=1, first=1)
        factors = {
            key: f.packed_P for key, f in kfac.curvature.factors.items() if key.endswith("/A")
        }
        updates = {key: float(f.updates) for key, f in kfac.curvature.factors.items()}
        found.append((factors, updates, kfac.steps, kfac.metrics.counts["skipped_steps"]))
        engine.destroy()
    return found


@pytest.mark.parametrize("name", ["z2-fp16", "z3-fp16", "z0-fp16", "adam-z2-fp16"])
def test_a_skipped_step_drops_what_its_hooks_have_seen(name):
    ((with_skip, without),) = run_ranks(
        "tests.zero.test_seam:skipped_worker", world=1, payload=name
    )
    exact(with_skip[0], without[0])
    assert with_skip[1] == without[1] and set(without[1].values()) == {2.0}
    assert (with_skip[2:], without[2:]) == ((2, 1), (2, 0))


# the self-test at attach


def lost(self: ZeroLayout, shard: Any) -> torch.Tensor:
    """Of a later group a copy: what is written there is lost."""
    view = PLAIN(self, shard)
    return view.clone() if shard.group else view


def moved(self: ZeroLayout, shard: Any) -> torch.Tensor:
    """Of a later group one element from where it is."""
    view = PLAIN(self, shard)
    return view.roll(1) if shard.group else view


PLAIN = ZeroLayout._gradient
FAULTS: dict[str, tuple[Callable, str]] = {
    "written elsewhere": (lost, "would not step with the gradients written to group"),
    "read elsewhere": (moved, "did not arrive at its worker"),
}


def fault_worker(payload: tuple[str, str]) -> str:
    name, fault = payload
    wrong, _ = FAULTS[fault]
    with patch.object(ZeroLayout, "_gradient", wrong):
        try:
            build(replace(BY_NAME[name], groups="decay"), 1)
        except RuntimeError as error:
            return str(error)
    return "attached"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["z2", "z1-offload", "z3-sub_groups"])
def test_the_self_test_finds_a_later_group_whose_gradients_are_elsewhere(name, fault):
    for said in run_ranks("tests.zero.test_seam:fault_worker", world=2, payload=(name, fault)):
        assert "self-test failed" in said and FAULTS[fault][1] in said


TRACES = [
    "z0",
    "z0-fp16",
    "z0-fp16-fused",
    "z1-bf16-accum32",
    "z1-fp16",
    "z2",
    "z2-offload",
    "z2-fp16-offload",
    "z3",
    "z3-fp16",
    "z3-sub_groups",
    "z3-persistence_0",
    "z3-offload",
    "z0-autocast_float16",
    "z2-autocast_float16",
]


def numbers(engine: Any) -> dict[str, Any]:
    """Counters, flags and scales of an engine and its optimizers, and which parameters are
    gathered."""
    optimizer = engine.optimizer
    holders = {"engine": engine, "optimizer": optimizer, "inner": engine.basic_optimizer}
    holders |= {
        name: getattr(optimizer, name, None) for name in ("loss_scaler", "loss_scale_config")
    }
    found = {
        (holder, name): value
        for holder, x in holders.items()
        if x is not None
        for name, value in vars(x).items()
        if isinstance(value, (bool, int, float)) and name != "kfac"
    }
    found |= {
        name: is_gathered(p)
        for name, p in engine.module.named_parameters()
        if hasattr(p, "ds_status")
    }
    return found | {
        "states": len(engine.basic_optimizer.state),
        "scale": getattr(optimizer, "loss_scale", None),
    }


def trace_worker(_) -> dict:
    found = {}
    for name in TRACES:
        mode, trained = replace(BY_NAME[name], groups="decay"), []
        for attaches in (True, False):
            engine = plain_engine(mode)
            if attaches:
                before, own = numbers(engine), weights(engine)
                gradients = [p.grad for p in engine.module.parameters()]
                with contextlib.redirect_stdout(io.StringIO()):
                    attached = ds_kfac.attach(engine, config={**mode.kfac_block, "report": "none"})
                after = numbers(engine)
                found[name] = {
                    "changed": [
                        key
                        for key in before.keys() | after.keys()
                        if before.get(key) != after.get(key)
                    ],
                    "gradients": [p.grad for p in engine.module.parameters()] == gradients,
                    "weights": (own, weights(engine)),
                }
                attached.detach()
            with patched(mode):
                train(engine, 1, steps=3)
            trained.append(weights(engine))
            engine.destroy()
        found[name]["trained"] = trained
    return found


def test_the_self_test_leaves_no_trace():
    """Loss scale, counters and weights are those of before, and an engine that K-FAC has left
    trains as one that it never met."""
    for rank in run_ranks("tests.zero.test_seam:trace_worker", world=2):
        for name, seen in rank.items():
            assert not seen["changed"] and seen["gradients"], (name, seen["changed"])
            exact(*seen["weights"], what=name)
            exact(*seen["trained"], what=name)
