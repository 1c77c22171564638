"""Layers that a step does not use, on all ranks or on some, and parameters that are frozen."""

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_kfac
from tests.close import near
from tests.deepspeed.features import merged
from tests.deepspeed.modes import BY_NAME, KFAC, MICRO_ROWS, Mode
from tests.deepspeed.parallel import shared_folder
from tests.deepspeed.runs import build, expected, patched, train, used, weights
from tests.models import FEATURES, Net, make_batch, make_net
from tests.ranks import call_on_ranks, of_ranks
from tests.spread import difference, within

MODES = {
    "adam-z0": 1,
    "adam-z2": 2,
    "adam-z2-groups": 1,
    "adam-z2-offload": 2,
    "adam-z3": 2,
    "adam-z3-offload": 1,
    "adam-z0-bf16": 1,
    "adam-z0-bf16-fused": 2,
    "adam-z1-bf16-accum32": 1,
    "adam-z2-fp16": 1,
    "adam-z3-bf16": 2,
}
"""Name -> gradient accumulation."""
SGD = {"type": "SGD", "params": {"lr": 0.02}}  # momentum would go on
EXTRA = {"extra.weight", "extra.bias"}


class Alternating(Net):
    """A layer that every ``interval``-th step uses; ``per_step`` is how often a step calls the
    model."""

    per_step, interval = 1, 2

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.calls = nn.Linear(FEATURES, FEATURES), 0

    def forward(self, x, y=None):
        used = self.calls // self.per_step % self.interval == 0
        self.calls += 1
        return super().forward(x + self.extra(x) if used else x, y)


def steps_of(engine, accumulation: int = 1) -> Iterator[tuple[int, set[str]]]:
    """Yield each of four steps and the parameters that it moves."""
    before = weights(engine)
    for step in range(4):
        train(engine, accumulation, steps=1, first=step)
        after = weights(engine)
        yield step, {name for name in after if not torch.equal(after[name], before[name])}
        before = after


@pytest.mark.ranks(2)
def test_a_layer_that_a_step_does_not_use_is_left_as_it_is_in_every_mode():
    """No step, no decay, moments and their count kept; and everything else trains like the
    reference."""
    for name, accumulation in MODES.items():
        mode, model = BY_NAME[name], make_net(Alternating)
        model.per_step = accumulation
        engine = build(mode, accumulation, model=model)
        initial = weights(engine)
        with patched(mode):
            for step, moved in steps_of(engine, accumulation):
                assert moved & EXTRA == (set() if step % 2 else EXTRA) and moved - EXTRA, name
                assert engine.kfac.counters()["unused_layers"] == step % 2, name
        moments = {n: s.moments for n, s in engine.kfac.preconditioner.state.items()}
        assert "extra" not in moments or float(moments["extra"].updates) == 2.0, name
        trained = weights(engine)
        if dist.get_rank() == 0:
            found = expected(mode, accumulation, 2, initial, model=Alternating)
            apart = difference(trained, found.weights, initial)
            assert not within(name, apart, found.bound), name
        engine.destroy()


@pytest.mark.ranks(2)
def test_an_offloaded_gradient_that_was_not_renewed_is_not_preconditioned_again():
    for name in ("z0-noclip", "z1-offload", "z2", "z2-offload", "z3-offload"):
        model = make_net(Alternating)
        model.interval = 10**9  # only the first step uses it
        engine = build(BY_NAME[name], 1, model=model, optimizer=SGD, gradient_clipping=0.0)
        for step, moved in steps_of(engine):
            assert ("extra.weight" in moved) == (step == 0), (name, step)


class PartlyFrozen(Net):
    """A frozen weight, a frozen bias, a tied pair, a layer called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.partly = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.tied_a, self.tied_b = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.tied_b.weight = self.tied_a.weight
        self.frozen.weight.requires_grad_(False)
        self.partly.bias.requires_grad_(False)

    def forward(self, x, y=None):
        x = self.partly(input=torch.tanh(self.frozen(x)))
        return super().forward(self.tied_b(torch.tanh(self.tied_a(x))), y)


WIDTHS = {"first": FEATURES + 1, "middle": 17, "head": 20, "partly": FEATURES}


@pytest.mark.ranks(2)
def test_a_frozen_parameter_is_not_moved_whenever_it_was_frozen():
    """Some from the start; later all of another layer, and only the weight of a third."""
    names = ("adam-z0", "adam-z1", "adam-z2-offload", "adam-z3", "adam-z3-offload", "adam-z2-bf16")
    later = {"first.weight", "first.bias", "head.weight"}
    for name in (*names, "z0", "z2", "z3"):
        mode, model = BY_NAME[name], make_net(PartlyFrozen)
        engine = build(mode, 1, model=model, **({} if mode.adam else {"optimizer": SGD}))
        assert {layer.name: layer.A.dim for layer in engine.kfac.preconditioner.layers} == WIDTHS
        every = set(dict(model.named_parameters()))
        with patched(mode):
            for step, moved in steps_of(engine):
                frozen = {"frozen.weight", "partly.bias"} | (later if step > 1 else set())
                assert moved == every - frozen, (name, step, moved)
                if step == 1:
                    model.first.requires_grad_(False)
                    model.head.weight.requires_grad_(False)


# what is unfrozen later


THAWED = [  # stage, what is frozen at first, 16 bits
    (0, "norm", False),
    (0, "first", False),
    (0, "norm", True),
    (1, "norm", False),
    (2, "norm", True),
    (3, "first", False),
]


@pytest.mark.ranks(2)
def test_what_is_unfrozen_later_is_trained_where_adamw_trains_it():
    """At stage 0 in fp32: all other engines of DeepSpeed's drop for good what is frozen at
    first."""
    for (stage, first, half), kind in itertools.product(THAWED, ("AdamW", "KFACAdamW")):
        model = make_net()
        frozen = {name: p for name, p in model.named_parameters() if name.startswith(first)}
        for p in frozen.values():
            p.requires_grad_(False)
        groups = list(model.parameters())
        if first == "first":  # a whole group of its own
            others = [p for name, p in model.named_parameters() if name not in frozen]
            groups = [{"params": [*frozen.values()], "lr": 0.02}, {"params": others}]
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
        config |= {"bf16": {"enabled": half}}
        config["optimizer"] = {"type": kind, "params": {"lr": 0.01, "torch_adam": True}}
        engine, *_ = ds_kfac.initialize(model=model, config=config, model_parameters=groups)
        for step in range(3):
            if step == 1:
                engine.module.requires_grad_(True)
            before = used(engine)
            train(engine, 1, steps=1, first=step)
            moved = {n for n, p in used(engine).items() if not torch.equal(p, before[n])}
            wanted = frozen.keys() if step > 0 and stage == 0 and not half else set()
            assert moved & frozen.keys() == wanted, (stage, first, half, kind, step)
        engine.destroy()


LONG, DECAY, EXTRA_SIDES = 10, 0.9, ("extra/A", "extra/G")


class Partly(Net):
    """``extra`` sees the inputs themselves, where ``used`` says so; else none of them, as an expert
    without tokens: ZeRO needs a gradient of every layer on every rank."""

    used = True

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(FEATURES, FEATURES)

    def forward(self, x, y=None):
        out = self.extra(x if self.used else x[:0])
        return super().forward(x + (out if self.used else out.sum()), y)


def make_engine(stage: int, interval: int = 1, **blocks):
    """And the rank after the one that decomposes A of ``extra``."""
    intervals = {
        "factor": {"rows": 3, "update_interval": interval},
        "eigenbasis": {"refresh_interval": 2 * interval},
    }
    mode = Mode("partly", stage, kfac=merged(KFAC, intervals, blocks))
    engine = build(mode, model=Partly())
    owner = engine.kfac.preconditioner.plan.assignment.eigen_workers["extra/A"]
    return engine, (owner + 1) % dist.get_world_size()


def counts_of(engine) -> list[int | None]:
    """How many ranks contribute to each factor of ``extra``; None: all."""
    counts = engine.kfac.preconditioner.plan.contributors.counts
    return [counts.get(key) for key in EXTRA_SIDES]


def expected_A(world: int, other: int, steps: list[int]) -> torch.Tensor:
    """Of the rows of one rank, averaged as docs/explanation/formulas.md says."""
    A = torch.zeros(FEATURES + 1, FEATURES + 1)
    share = slice(other * MICRO_ROWS, (other + 1) * MICRO_ROWS)
    for n, step in enumerate(steps, 1):
        x = make_batch(step, world * MICRO_ROWS)[0][share].flatten(0, 1)
        x, keep = torch.cat([x, torch.ones(len(x), 1)], dim=1), min(1 - 1 / n, DECAY)
        A = keep * A + (1 - keep) * x.T @ x / len(x)
    return A


ALL_WORKERS = {"assignment": {"gradient_worker_fraction": 1.0}}


@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "blocks"), [(2, {}), (0, {}), (0, ALL_WORKERS)])
@pytest.mark.parametrize("world", [2, 4])
def test_a_layer_that_another_rank_uses_is_captured_there(stage, blocks, world):
    engine, other = make_engine(stage, **blocks)
    engine.module.used = dist.get_rank() == other
    factors, updates, counts = engine.kfac.preconditioner.curvature.factors, [0.0], []
    for step in range(LONG):
        train(engine, 1, steps=1, first=step)
        updates.append(float(factors["extra/A"].updates) if "extra/A" in factors else 0.0)
        counts.append(counts_of(engine))
    assert of_ranks(counts) == [counts] * world, "ranks plan alike"
    assert counts[0] == [1, 1] and counts[-1] == [None, None], counts
    steps = [step for step in range(LONG) if updates[step + 1] > updates[step]]
    if "extra/A" in factors:
        assert steps[0] == 0 and steps[-5:] == list(range(LONG - 5, LONG)), steps
        assert len(steps) < LONG, "the eigen worker alone was to contribute: nothing was tested"
        A = factors["extra/A"].side.blocks(factors["extra/A"].packed_P)[0][0]
        near(A, expected_A(world, other, steps), 1e-5, "fp32 sums")
    taken = max(of_ranks(len(steps)))
    summary = engine.kfac.preconditioner.metrics.values()
    assert summary["missed_updates"] == summary["empty_updates"] == 2 * (LONG - taken)


@pytest.mark.ranks(2)
def test_a_layer_that_nobody_uses_in_a_step_costs_no_rank_more():
    engine, _ = make_engine(3)
    for step in range(LONG):
        engine.module.used = step % 2 == 0
        train(engine, 1, steps=1, first=step)
        assert counts_of(engine) == [1, 1]
    assert engine.kfac.preconditioner.metrics.values()["missed_updates"] == LONG


@pytest.mark.ranks(2)
def test_a_save_knows_who_contributes_though_the_next_update_has_not_come():
    folder, options = shared_folder(), {"interval": 2, "burn_in": {"steps": 0}}
    (engine, other), (resumed, _) = (make_engine(2, **options) for _ in range(2))
    engine.module.used = dist.get_rank() == other
    train(engine, 1, steps=3)
    assert counts_of(engine)[0] == 1
    engine.save_checkpoint(folder, tag="t")
    resumed.load_checkpoint(folder, tag="t")
    assert counts_of(resumed)[0] is None
    known = [x.kfac.preconditioner.observations for x in (engine, resumed)]
    assert known[0] == known[1]


ROWS = 3 * MICRO_ROWS
STRIDED = {
    "factor": {"rows": ROWS // 3, "update_interval": 1},
    "eigenbasis": {"refresh_interval": 2},
}


def save(folder) -> None:
    engine = build(BY_NAME["z2"], kfac=STRIDED)
    train(engine, 1, steps=2)
    engine.save_checkpoint(folder, tag="tag")


def load(world, folder) -> None:
    engine = build(BY_NAME["z2"], kfac=STRIDED, seed=99)
    without = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
    engine.load_checkpoint(folder, tag="tag", **without)
    engine.kfac.load_state(folder, "tag")
    kfac = engine.kfac.preconditioner
    assert (kfac.observations.rows is None) == (world == 1)
    train(engine, 1, steps=1, first=2)
    assert set(kfac.observations.rows.values()) == {ROWS}
    assert set(kfac.plan.contributors.strides.values()) == {3}


def test_rows_of_a_rank_are_counted_again_by_another_number_of_ranks(tmp_path):
    """A checkpoint's are those of a rank of its own run."""
    call_on_ranks(2, save, str(tmp_path))
    for world in (1, 2):
        call_on_ranks(world, load, world, str(tmp_path))
