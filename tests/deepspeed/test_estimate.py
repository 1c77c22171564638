"""The estimator against engines: bytes and calls by kind, step by step, and memory; all of it
exactly. And what engines count is what torch is asked for."""

from collections import Counter
from contextlib import contextmanager
from unittest.mock import Mock, patch

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
from tests.choices import AT_ONCE, chosen
from tests.deepspeed.features import merged
from tests.deepspeed.modes import FP32_ACCUM, OFFLOAD, Mode
from tests.deepspeed.runs import build

pytestmark = pytest.mark.ranks
GPT_2 = GPTConfig(width=32, blocks=2, heads=2, context=16)
ROWS = 2 * GPT_2.context
STEPS = {"plain": 3, "update": 2, "refresh": 4}
"""Steps of these kinds with the intervals below, after the first one, in which shared inputs are
found."""
EXPERTS = Mixture(2, 16, 4, 12, 256, 16, head=4, grouped=2, experts=3, top=2)


class MoE(nn.Module):
    """With stacked experts, [E, I, O] with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MixtureOfExperts(EXPERTS, bias=True)
        for name, parameter in self.named_parameters():
            empty = "proj" in name or "sinks" in name or name.endswith("gate.weight")
            if empty and not parameter.is_meta:  # and so that every expert gets tokens
                nn.init.normal_(parameter)

    def forward(self, tokens, targets):
        return F.cross_entropy(self.model(tokens).flatten(0, 1).float(), targets.flatten())


MODELS = {"gpt": lambda: GPT(GPT_2), "experts": MoE}
KFAC = {
    "factor": {"update_interval": 2, "fisher": "empirical"},
    "eigenbasis": {"refresh_interval": 4},
    "burn_in": {"steps": 0},
    "plan": AT_ONCE,
}
WIRE = {"communication": {"dtype": "bf16"}}
INVERSE = {"preconditioner": {"method": "inverse"}, "damping": {"kind": "relative"}}
TIKHONOV = {**INVERSE, "damping": {"kind": "tikhonov"}}
NO_G = {"factor": {"fisher": "activations_only"}}
BLOCKS = {"factor": {"dense_max": 20}}
EVERY_TYPE = {"layers": {"types": ["Linear", "LayerNorm"]}}


def case(stage: int, dtype: str = "fp32", *blocks: dict, model="gpt", **options) -> Mode:
    return Mode(model, stage, dtype, kfac=merged(KFAC, *blocks), **options)


def workers(part: float) -> dict:
    return {"assignment": {"gradient_worker_fraction": part}}


CASES = {
    # of ranks x workers or stages x what travels, every pair of two
    2: {
        "1 worker, bf16 wire": case(0, "fp32", workers(0.5), WIRE),
        "2 workers": case(0, "fp32", workers(1.0)),
        "stage 2": case(2),
        "stage 3, bf16": case(3, "bf16"),
        "experts, KFACAdamW": case(3, "bf16", NO_G, adam=True, model="experts"),
        "corrected": case(0, "fp32", {"preconditioner": {"eigenvalues": "corrected"}}),
        "adaptive": case(2, "fp32", {"adaptive": 1e-9}),
        "BF16_Optimizer": case(1, "bf16", extra=FP32_ACCUM),
        "offload": case(2, zero=OFFLOAD),
        "inverse, every layer type": case(3, "fp32", INVERSE, EVERY_TYPE),
    },
    4: {
        "1 worker": case(0, "fp32", workers(0.25)),
        "2 workers, bf16 wire": case(0, "fp32", workers(0.5), WIRE),
        "4 workers, inverse": case(0, "fp32", workers(1.0), INVERSE),
        "stage 1": case(1, zero={"round_robin_gradients": True}),
        "stage 3, bf16 wire": case(3, "fp32", WIRE),
        "KFACAdamW, clipped": case(2, adam=True),
        "inverse, tikhonov, bf16 wire": case(0, "fp32", TIKHONOV, WIRE),
        "inverse, no G, blocks": case(0, "fp32", INVERSE, BLOCKS, NO_G),
    },
}


NAMES = ("all_to_all_single", "all_reduce", "broadcast", "all_gather", "all_gather_object", "send")


@contextmanager
def asked_of_torch(group):
    """Counts what torch.distributed is asked for in a process group; "bytes" are those that
    all-to-alls send to other ranks."""
    counts: Counter = Counter()
    mocks = {name: Mock(wraps=getattr(dist, name)) for name in NAMES}
    with patch.multiple(dist, **mocks):
        yield counts
    for name, mock in mocks.items():
        calls = [call.kwargs for call in mock.call_args_list if call.kwargs.get("group") is group]
        for call in calls:
            counts[name] += 1
            if name == "all_to_all_single":
                splits, sent = call["input_split_sizes"], call["input"]
                away = sum(splits) - splits[dist.get_rank()]
                counts["bytes"] += away * sent.element_size()


def run(engine) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(256, (2, GPT_2.context), generator=generator)
    engine.backward(engine(tokens, tokens.roll(-1, 1)))
    engine.step()


def expected(mode: Mode, world: int) -> Estimate:
    ds_config = mode.config(1)
    with torch.device("meta"):
        model, example = MODELS[mode.name](), torch.zeros(2, GPT_2.context, dtype=torch.long)
    traced = Trace.of(model, (example,) if mode.name == "gpt" else (example, example))
    with chosen(ds_config["kfac"]) as block:
        subject = Subject(model, {**ds_config, "kfac": block}, trace=traced)
        assert subject.shared, "layers that share an input"
        assert all(parameter.is_meta for parameter in model.parameters())
        return Estimate(subject, BUILTIN["cpu"], world, ROWS)


def traffic(channel) -> dict[str, list[int]]:
    """Kind -> bytes sent, bytes received, calls, until now."""
    counters = channel.sent, channel.received, channel.calls
    return {kind: [counter[kind] for counter in counters] for kind in KINDS}


def since(before: dict, after: dict) -> dict[str, list[int]]:
    return {k: [b - a for a, b in zip(before[k], after[k], strict=True)] for k in after}


def planned(step, rank: int) -> dict[str, list[float]]:
    calls = zip(KINDS, step.calls, strict=True)
    return {k: [step.sent(k)[rank], step.sent(k, axis=0)[rank], n] for k, n in calls}


ROWS_OF_CASES = [(name, world) for world, cases in CASES.items() for name in cases]


@pytest.mark.parametrize(("name", "world"), ROWS_OF_CASES)
def test_bytes_calls_memory_and_shards_are_those_of_an_engine(name, world):
    mode, rank = CASES[world][name], dist.get_rank()
    torch.manual_seed(0)
    # as estimated, whatever cores the ranks share here
    with patch.object(assembly, "_costs", lambda device: BUILTIN["cpu"]):
        engine, found = build(mode, model=MODELS[mode.name]()), expected(mode, world)
    kfac = engine.kfac.preconditioner
    channel = kfac.channel
    plain, buffers = channel.all_to_all, {}

    def all_to_all(sent, outgoing, incoming, carries):
        received, handle = plain(sent, outgoing, incoming, carries)
        buffers.setdefault(next(iter(carries)), []).append(sent.nbytes + received.nbytes)
        return received, handle

    channel.all_to_all = all_to_all
    kinds = {step: kind for kind, step in STEPS.items()}
    for step in range(max(STEPS.values()) + 1):
        before, calls, sent = traffic(channel), Counter(channel.calls), Counter(channel.sent)
        buffers.clear()
        with asked_of_torch(channel.group) as asked:
            run(engine)
        calls, sent = Counter(channel.calls) - calls, Counter(channel.sent) - sent
        proof = 2 * (step in (0, 4))  # captured steps 1 and 3: rows, and what came of them
        assert asked["all_reduce"] == calls.pop("proof", 0) == proof, step
        assert asked["all_gather_object"] <= (step == 0), "once: layers that share their input"
        assert asked["all_to_all_single"] == sum(calls.values()) <= 4, "sums, bases, there, back"
        assert asked.keys() <= {"all_reduce", "all_gather_object", "all_to_all_single", "bytes"}
        sent.pop("proof", 0)
        aligned = asked["bytes"] - sum(sent.values())
        assert 0 <= aligned <= 16 * 5 * world * 2, (step, "alignment alone")
        if step in kinds:
            estimate = getattr(found, kinds[step])
            assert since(before, traffic(channel)) == planned(estimate, rank), kinds[step]
    memory = {kind: int(nbytes[rank]) for kind, nbytes in found.memory.items()}
    factors = kfac.curvature.factors.values()
    of_factors = sum(own.packed_P.nbytes + own.updates.nbytes for own in factors)
    assert memory["factors"] == of_factors
    assert memory["history"] == sum(map(bytes_in, factors)) - of_factors
    state = sum(memory[kind] for kind in ("factors", "history", "eigenbases", "moments"))
    assert state == sum(nbytes_of(kfac))
    assert not nbytes_of(kfac)[1] or memory["moments"] == nbytes_of(kfac)[1]
    slots = kfac.curvature.reducer.plan.of(frozenset(kfac.curvature.specs), 0)[0]
    own = [slot for slot in slots if rank in {slot.owner, *slot.contributors}]
    assert memory["sums"] == sum(4 * slot.numel for slot in own)
    held, rest = buffers.pop("factors"), [n for sizes in buffers.values() for n in sizes]
    together = [sum(held[start : start + IN_FLIGHT]) for start in range(len(held))]
    assert memory["messages"] == max(together + rest)

    def places(shards) -> list[tuple]:
        fields = ["param", "start", "numel", "rank"] + ["group", "offset"] * (mode.stage < 3)
        return [tuple(getattr(s, name) for name in fields) for s in sorted(shards.shards.shards)]

    assert places(kfac.layout) == places(found)
