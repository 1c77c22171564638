"""Layers that a step does not use, on all ranks or on some, and parameters that are frozen."""

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.close import near
from tests.deepspeed.features import merged
from tests.deepspeed.modes import BY_NAME, KFAC, MICRO_ROWS, OPTIMIZERS, Mode
from tests.deepspeed.parallel import shared_folder
from tests.deepspeed.runs import build, expected, patched, train, used, weights
from tests.models import FEATURES, Net, make_batch, make_net
from tests.ranks import of_ranks
from tests.spread import difference, within

MODES = ["adam-z0", "adam-z2", "adam-z2-groups", "adam-z2-offload", "adam-z3-offload", "adam-z3"]
MODES += ["adam-z1-bf16-accum32", "adam-z0-bf16-fused", "adam-z2-fp16"]
SGD = {"type": "SGD", "params": {"lr": 0.02}}  # momentum would go on
EXTRA = {"extra.weight", "extra.bias"}


class Alternating(Net):
    """A layer that every second step uses; ``per_step`` is how often a step calls the model."""

    per_step = 1

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.calls = nn.Linear(FEATURES, FEATURES), 0

    def forward(self, x, y=None):
        used = self.calls // self.per_step % 2 == 0
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
    for number, name in enumerate(MODES):
        mode, model, accumulation = BY_NAME[name], make_net(Alternating), 1 + number % 2
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
    later = {"first.weight", "first.bias", "head.weight"}
    for name in ("adam-z0", "adam-z2-offload", "adam-z3", "adam-z2-bf16", "z0", "z2", "z3"):
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


@pytest.mark.ranks(2)
def test_what_is_unfrozen_later_is_trained_where_adamw_trains_it():
    """At stage 0 in fp32: all other engines of DeepSpeed's drop for good what is frozen at
    first."""
    places = [(name, "norm") for name in ("adam-z0", "adam-z0-bf16", "adam-z2")]
    places += [(name, "first") for name in ("adam-z0", "adam-z3")]
    for (name, first), kfac in itertools.product(places, (True, False)):
        mode, model = BY_NAME[name], make_net()
        frozen = {name: p for name, p in model.named_parameters() if name.startswith(first)}
        for p in frozen.values():
            p.requires_grad_(False)
        given = {}
        if first == "first":  # a whole group of its own
            others = [p for name, p in model.named_parameters() if name not in frozen]
            groups = [{"params": [*frozen.values()], "lr": 0.03}, {"params": others}]
            given = {"model_parameters": groups}
        config = {} if kfac else {"optimizer": OPTIMIZERS["fp32"], "kfac": {"enabled": False}}
        engine = build(mode, 1, model=model, given=given, **config)
        for step in range(3):
            if step == 1:
                engine.module.requires_grad_(True)
            before = used(engine)
            train(engine, 1, steps=1, first=step)
            moved = {n for n, p in used(engine).items() if not torch.equal(p, before[n])}
            wanted = frozen.keys() if step > 0 and name == "adam-z0" else set()
            assert moved & frozen.keys() == wanted, (name, first, kfac, step)
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
    owner = engine.kfac.preconditioner.plan.assignment.owners["extra/A"]
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
        assert len(steps) < LONG, "the owner alone was to contribute: nothing was tested"
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
