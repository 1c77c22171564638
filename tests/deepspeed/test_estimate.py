"""The estimator against engines: bytes and calls by kind, step by step, and memory; all of it
exactly."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks.held import bytes_in, nbytes_of
from benchmarks.models import Mixture, MixtureOfExperts
from ds_kfac.assignment.costs import BUILTIN
from ds_kfac.comm.reduce import IN_FLIGHT
from ds_kfac.engine import assembly
from ds_kfac.estimate.estimates import KINDS, Estimate
from ds_kfac.estimate.subject import Subject
from ds_kfac.estimate.trace import Trace
from examples.gpt import GPT, GPTConfig
from tests.choices import AT_ONCE, STAGGERED, chosen
from tests.close import close
from tests.covering import pairs, some
from tests.deepspeed.modes import FP32_ACCUM, OFFLOAD, Mode
from tests.deepspeed.runs import build
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
GPT_2 = GPTConfig(width=32, blocks=2, heads=2, context=16)
ROWS = 2 * GPT_2.context
SHARED = tuple(
    (f"blocks.{block}.mlp.gate", f"blocks.{block}.mlp.up") for block in range(GPT_2.blocks)
)
STEPS = {"plain": 3, "update": 2, "refresh": 4}
"""Steps of these kinds with the intervals below, after the first one, in which shared inputs are
found."""
EXPERTS = Mixture(2, 16, 4, 12, 256, 16, head=4, grouped=2, experts=3, top=2)


class MoE(nn.Module):
    """With stacked experts, [E, I, O] with biases or [E, O, I] without."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.model = MixtureOfExperts(EXPERTS, bias=bias)
        for name, parameter in self.named_parameters():
            if not parameter.is_meta and (
                "proj" in name or "sinks" in name or name.endswith("gate.weight")
            ):
                # what torch leaves empty; and so that every expert gets tokens
                nn.init.normal_(parameter)

    def forward(self, tokens, targets):
        return F.cross_entropy(self.model(tokens).flatten(0, 1).float(), targets.flatten())


MODELS = {
    "gpt": lambda: GPT(GPT_2),
    "experts": lambda: MoE(False),
    "lying experts": lambda: MoE(True),
}
TOGETHER = {"gpt": SHARED} | dict.fromkeys(
    ("experts", "lying experts"),
    tuple(
        tuple(f"model.layers.{block}.attention.{name}" for name in ("query", "key", "value"))
        for block in range(EXPERTS.blocks)
    ),
)
"""Layers that share their input; those of a stack share A anyway."""
KFAC = {
    "factor": {"update_interval": 2, "fisher": "empirical"},
    "eigenbasis": {"refresh_interval": 4},
    "burn_in": {"steps": 0},
    "plan": AT_ONCE,
}
BF16 = {"communication": {"dtype": "bf16"}}
ESTIMATED_NODE = partial(patch.object, assembly, "_costs", lambda device: BUILTIN["cpu"])
"""As estimated, whatever cores the ranks share here."""
INVERSE = {"preconditioner": {"method": "inverse"}, "damping": {"kind": "relative"}}


def case(
    stage: int,
    dtype: str = "fp32",
    *,
    adam=False,
    zero=None,
    extra=None,
    groups="one",
    model="gpt",
    **blocks,
) -> Mode:
    own = {
        key: {**KFAC.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in blocks.items()
    }
    return Mode(
        model,
        stage,
        dtype,
        adam=adam,
        kfac={**KFAC, **own},
        zero=zero or {},
        extra=extra or {},
        groups=groups,
    )


def cases(world: int) -> dict[str, Mode]:
    """Of ranks x workers or stages x what travels, every pair of two."""
    found = {}
    forms = {"": {}, ", bf16 wire": BF16, ", inverse": INVERSE}
    for workers in (1, 2, 4)[: world.bit_length()]:
        for name, blocks in forms.items():
            fraction = {"assignment": {"gradient_worker_fraction": workers / world}}
            found[f"{workers} workers{name}"] = case(0, **fraction, **blocks)
    for stage in (1, 2, 3):
        for name in ("", ", bf16 wire"):
            found[f"stage {stage}{name}"] = case(stage, **forms[name])
    chosen = {
        2: (
            "1 workers, bf16 wire",
            "2 workers",
            "2 workers, inverse",
            "stage 1, bf16 wire",
            "stage 2",
            "stage 3",
        ),
        4: (
            "1 workers",
            "1 workers, inverse",
            "2 workers, bf16 wire",
            "4 workers",
            "4 workers, bf16 wire",
            "4 workers, inverse",
            "stage 1",
            "stage 2, bf16 wire",
            "stage 3, bf16 wire",
        ),
        8: ("2 workers, bf16 wire", "stage 2", "stage 3, bf16 wire"),
    }
    found = {name: found[name] for name in chosen[world]}
    if world == 8:
        return found
    if world == 2:
        found |= {f"stage {stage}, bf16": case(stage, "bf16") for stage in (0, 1, 2, 3)}
        alone = {"factor": {"fisher": "activations_only"}}
        return found | {
            "experts, KFACAdamW, stage 2": case(2, adam=True, model="experts", **alone),
            "lying experts, KFACAdamW, stage 3, bf16": case(
                3, "bf16", adam=True, model="lying experts", **alone
            ),
            "experts, stage 2, bf16": case(2, "bf16", model="experts"),
            "lying experts, stage 0": case(0, model="lying experts"),
            "corrected": case(0, preconditioner={"eigenvalues": "corrected"}),
            "adaptive": case(2, adaptive=1e-9),
            "BF16_Optimizer": case(1, "bf16", extra=FP32_ACCUM),
            "offload": case(2, zero=OFFLOAD),
            "inverse, every layer type": case(
                3, **INVERSE, layers={"types": ["Linear", "LayerNorm"]}
            ),
            "blocks": case(0, factor={"dense_max": 20}),
        }
    return found | {
        "KFACAdamW, clipped": case(2, adam=True),
        "KFACAdamW, stage 0": case(0, adam=True, assignment={"gradient_worker_fraction": 0.5}),
        "round robin": case(1, zero={"round_robin_gradients": True}),
        "inverse, tikhonov, bf16 wire": case(
            0, **{**INVERSE, **BF16, "damping": {"kind": "tikhonov"}}
        ),
        "inverse, stage 2": case(2, **INVERSE),
        "inverse, no G, blocks": case(
            0, **INVERSE, factor={"dense_max": 20, "fisher": "activations_only"}
        ),
        "every layer type": case(3, layers={"types": ["Linear", "LayerNorm"]}),
    }


class Buffers:
    """Bytes of what all-to-alls send and receive, by the first kind that they carry."""

    def __init__(self, channel) -> None:
        self.seen: dict[str, list[tuple[int, int]]] = {}
        self.plain, channel.all_to_all = channel.all_to_all, self.all_to_all

    def all_to_all(self, sent, outgoing, incoming, carries):
        received, handle = self.plain(sent, outgoing, incoming, carries)
        self.seen.setdefault(next(iter(carries)), []).append((sent.nbytes, received.nbytes))
        return received, handle


def run(engine) -> None:
    dtype = torch.randint(
        256, (2, GPT_2.context), generator=torch.Generator().manual_seed(dist.get_rank())
    )
    engine.backward(engine(dtype, dtype.roll(-1, 1)))
    engine.step()


def measured(mode: Mode) -> dict:
    engine = build(mode, 1, model=MODELS[mode.name]())
    kfac = engine.kfac.preconditioner
    channel, buffers, found = kfac.channel, Buffers(kfac.channel), {}
    for step in range(max(STEPS.values()) + 1):
        before = [counter.copy() for counter in (channel.sent, channel.received, channel.calls)]
        buffers.seen.clear()
        run(engine)
        for kind in (kind for kind, when in STEPS.items() if when == step):
            after = (channel.sent, channel.received, channel.calls)
            found[kind] = [
                {k: now[k] - then[k] for k in KINDS}
                for now, then in zip(after, before, strict=True)
            ]
        if step == STEPS["refresh"]:
            found["buffers"] = dict(buffers.seen)
    factors, reducer = kfac.curvature.factors.values(), kfac.curvature.reducer
    found["memory"] = {
        "factors": sum(own.packed_P.nbytes + own.updates.nbytes for own in factors),
        "history": sum(bytes_in(own) - own.packed_P.nbytes - own.updates.nbytes for own in factors),
        "state": sum(nbytes_of(kfac)),
        "adam": nbytes_of(kfac)[1],
        "sums": sum(
            4 * slot.numel
            for slot in reducer.plan.of(frozenset(kfac.curvature.specs), 0)[0]
            if kfac.rank in {slot.owner, *slot.contributors}
        ),
    }
    found["shards"] = [
        (s.param, s.start, s.numel, s.rank) for s in sorted(kfac.layout.shards.shards)
    ]
    found["places"] = [(s.group, s.offset) for s in sorted(kfac.layout.shards.shards)]
    engine.destroy()
    return found


def worker(names) -> dict:
    torch.manual_seed(0)
    every = cases(dist.get_world_size())
    with ESTIMATED_NODE():
        return {name: measured(every[name]) for name in names}


def expected(mode: Mode, world: int) -> Estimate:
    ds_config = mode.config(1, world)
    with torch.device("meta"):
        model, example = MODELS[mode.name](), torch.zeros(2, GPT_2.context, dtype=torch.long)
    traced = Trace.of(model, (example,) if mode.name == "gpt" else (example, example))
    with chosen(ds_config["kfac"]) as block:
        subject = Subject(model, {**ds_config, "kfac": block}, trace=traced)
        assert subject.shared == TOGETHER[mode.name]
        assert all(parameter.is_meta for parameter in model.parameters())
        return Estimate(subject, BUILTIN["cpu"], world, ROWS)


def test_every_pair_of_settings_is_estimated():
    def settings(world, name):
        place, _, form = name.partition(", ")
        return {"world": str(world), "place": place, "form": form}

    possible = [
        settings(world, f"{place}{form}")
        for world in (2, 4)
        for place in (
            *(f"{workers} workers" for workers in (1, 2, 4) if workers <= world),
            "stage 1",
            "stage 2",
            "stage 3",
        )
        for form in ("", ", bf16 wire", *([", inverse"] if "workers" in place else []))
    ]
    chosen = [settings(world, name) for world in (2, 4) for name in cases(world)]
    assert set().union(*map(pairs, possible)) <= set().union(*map(pairs, chosen))


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_calls_memory_and_shards_are_those_of_an_engine(world):
    names = list(cases(world))
    results = run_ranks("tests.deepspeed.test_estimate:worker", world=world, payload=names)
    for name, mode in cases(world).items():
        found = expected(mode, world)
        for rank in range(world):
            result = results[rank][name]
            for kind in STEPS:
                step, (sent, received, calls) = getattr(found, kind), result[kind]
                assert sent == {k: step.sent(k)[rank] for k in KINDS}, (name, kind, rank)
                assert received == {k: step.sent(k, axis=0)[rank] for k in KINDS}, (
                    name,
                    kind,
                    rank,
                )
                assert list(calls.values()) == list(step.calls) and sum(step.calls) <= 4, (
                    name,
                    kind,
                )
            memory = {kind: int(found.memory[kind][rank]) for kind in found.memory}
            assert_memory(name, memory, result)
            order = sorted(found.shards.shards)
            assert result["shards"] == [(s.param, s.start, s.numel, s.rank) for s in order], name
            if mode.stage < 3:
                assert result["places"] == [(s.group, s.offset) for s in order], name


def assert_memory(name: str, memory: dict, result: dict) -> None:
    measured = result["memory"]
    state = sum(memory[kind] for kind in ("factors", "history", "eigenbases", "moments"))
    assert memory["factors"] == measured["factors"] and memory["history"] == measured["history"], (
        name
    )
    assert state == measured["state"], name
    assert memory["sums"] == measured["sums"], name
    if measured["adam"]:
        assert memory["moments"] == measured["adam"], name
    buffers = dict(result["buffers"])
    held = [sent + received for sent, received in buffers.pop("factors")]
    together = [sum(held[start : start + IN_FLIGHT]) for start in range(len(held))]
    rest = [sent + received for calls in buffers.values() for sent, received in calls]
    assert memory["messages"] == max(together + rest), name


PERIOD, SETTLED = 4, 8
"""Refreshes spread over so many steps, from the first one on; steps until they go round."""


def spread_cases(world: int) -> dict[str, Mode]:
    basis = {"refresh_interval": PERIOD}
    spread = partial(case, plan=STAGGERED)
    return {
        "stage 0": spread(0, eigenbasis=basis, assignment={"gradient_worker_fraction": 1 / world}),
        "stage 0, all workers": spread(
            0, eigenbasis=basis, assignment={"gradient_worker_fraction": 1.0}
        ),
        "stage 1": spread(1, eigenbasis=basis),
        "stage 2": spread(2, eigenbasis=basis, **BF16),
        "stage 3": spread(3, eigenbasis=basis),
        "stage 0, inverse": spread(
            0, eigenbasis=basis, assignment={"gradient_worker_fraction": 1.0}, **INVERSE
        ),
    }


def spread_worker(names) -> dict:
    torch.manual_seed(0)
    every, found = spread_cases(dist.get_world_size()), {}
    for name in names:
        with ESTIMATED_NODE():
            engine = build(every[name], 1, model=GPT(GPT_2))
        channel = engine.kfac.preconditioner.channel
        for _ in range(SETTLED):
            run(engine)
        before = {
            kind: (channel.sent[kind], channel.received[kind], channel.calls[kind])
            for kind in KINDS
        }
        for _ in range(PERIOD):
            run(engine)
        after = {
            kind: (channel.sent[kind], channel.received[kind], channel.calls[kind])
            for kind in KINDS
        }
        found[name] = {
            kind: [b - a for a, b in zip(before[kind], after[kind], strict=True)] for kind in KINDS
        }
        engine.destroy()
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_the_mean_of_spread_steps_is_that_of_a_run(world):
    names = some(spread_cases(world), world)
    results = run_ranks("tests.deepspeed.test_estimate:spread_worker", world=world, payload=names)
    for name in names:
        mode = spread_cases(world)[name]
        mean = expected(mode, world).mean
        for rank in range(world):
            for kind, calls in zip(KINDS, mean.calls, strict=True):
                planned = [mean.sent(kind)[rank], mean.sent(kind, axis=0)[rank], calls]
                actual = results[rank][name][kind]
                close(
                    [PERIOD * value for value in planned],
                    list(actual),
                    sums=PERIOD,
                    scale=max(1, *actual),
                    what=f"{name} {kind} {rank}",
                )
