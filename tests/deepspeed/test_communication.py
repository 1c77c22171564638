"""Counts instead of seconds: collectives per step, bytes moved, state per rank. How many bytes of
which kind is the plan's, in test_estimate.py; operations of a step are in tests/step."""

import re
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from benchmarks.held import nbytes_of
from examples.gpt import GPT, GPTConfig
from tests.choices import AT_ONCE, HALF
from tests.deepspeed.features import merged
from tests.deepspeed.modes import Mode
from tests.deepspeed.ranked import of_ranks
from tests.deepspeed.runs import build

GPT_12 = GPTConfig(width=64, blocks=12, heads=2, context=16)
GPT_3 = GPTConfig(width=32, blocks=3, heads=2, context=16)
KFAC = {
    "factor": {"update_interval": 2},
    "eigenbasis": {"refresh_interval": 4},
    "burn_in": {"steps": 0},
    "plan": AT_ONCE,
}
NAMES = (
    "all_to_all_single",
    "all_reduce",
    "broadcast",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_gather",
    "all_gather_object",
    "barrier",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
)


@contextmanager
def asked_of_torch(group):
    """Counts what torch.distributed is asked for in a process group; "bytes" are those that
    all-to-alls send to other ranks."""
    counts: Counter = Counter()

    def counted(name, plain):
        def call(*args, **kwargs):
            if kwargs.get("group") is group:
                counts[name] += 1
                if name == "all_to_all_single":
                    splits, sent = kwargs["input_split_sizes"], kwargs["input"]
                    away = sum(splits) - splits[dist.get_rank()]
                    counts["bytes"] += away * sent.element_size()
            return plain(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in NAMES:
            made = counted(name, getattr(dist, name))
            stack.enter_context(patch.object(dist, name, made))
        yield counts


def engine_of(stage: int, config: GPTConfig, *blocks: dict, adam: bool = False):
    torch.manual_seed(0)
    return build(Mode("gpt", stage, adam=adam, kfac=merged(KFAC, *blocks)), model=GPT(config))


def run_step(engine, step: int) -> None:
    generator = torch.Generator().manual_seed(step + 31 * dist.get_rank())
    x = torch.randint(256, (2, GPT_12.context), generator=generator)
    engine.backward(engine(x, x.roll(-1, 1)))
    engine.step()


CASES = [
    *((stage, dtype, 1, False, 2) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16")),
    (0, "fp32", 2, False, 2),
    *((stage, "fp32", 1, True, 2) for stage in (0, 2, 3)),
    (0, "fp32", 1, False, 4),
    (3, "fp32", 1, False, 4),
    (0, "bf16", 2, False, 4),
    (0, "fp32", 4, False, 4),
]
"""Stage, dtype of the wire, gradient workers, and whether KFACAdamW steps, with clipping; ranks."""
ROWS = {(0, 1): "MEM-OPT", (0, 2): "HYBRID", (0, 4): "COMM-OPT", (3, 1): "ZeRO-3"}
"""Stage and workers -> how a row of the table in docs/notes/scaling.md begins, in which 4 ranks
are."""
PAGE = Path(__file__).parents[2] / "docs/notes/scaling.md"


def exchanges(row: str) -> list[int]:
    """All-to-alls of a step in which nothing is due, of one that updates factors, and of one that
    refreshes them, as the page says."""
    counts = re.search(rf"^\| {row}.* \| (\d) / (\d) / (\d) \|", PAGE.read_text(), re.MULTILINE)
    return [int(count) for count in counts.groups()]


def elements_elsewhere(engine) -> int:
    """ZeRO-1/2, from DeepSpeed's own numbers alone: gradient elements of layers that do not lie on
    their owner."""
    optimizer, kfac = engine.optimizer, engine.kfac.preconditioner
    names = {id(p): n for n, p in engine.module.named_parameters()}
    workers = kfac.plan.assignment.workers
    owners = {name: workers[layer.name][0] for layer in kfac.layers for name in layer.parameters}
    elsewhere = 0
    for params, size in zip(optimizer.bit16_groups, optimizer.partition_size, strict=True):
        ranks = torch.arange(sum(p.numel() for p in params)) // size
        for p, where in zip(params, ranks.split([p.numel() for p in params]), strict=True):
            if names[id(p)] in owners:
                elsewhere += int((where != owners[names[id(p)]]).sum())
    return elsewhere


@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "dtype", "workers", "adam", "world"), CASES)
def test_collectives_bytes_and_state(stage, dtype, workers, adam, world):
    even = dtype == "fp32" and workers == 1 and not adam
    fraction = {"assignment": {"gradient_worker_fraction": workers / world}}
    wire = {"communication": {"dtype": dtype}, "plan": HALF if dtype == "bf16" else {}}
    engine = engine_of(stage, GPT_12 if even else GPT_3, fraction, wire, adam=adam)
    kfac, all_to_alls = engine.kfac.preconditioner, []
    channel = kfac.channel
    for step in range(5):
        channel.calls.clear(), channel.sent.clear()
        with asked_of_torch(channel.group) as asked:
            run_step(engine, step)
        counted = dict(channel.calls)
        proof = 2 * (step in (0, 4))  # captured steps 1 and 3: rows, and what came of them
        assert asked["all_reduce"] == counted.pop("proof", 0) == proof, step
        assert asked["all_gather_object"] == (step == 0), "once: layers that share their input"
        all_to_alls.append(sum(counted.values()))
        assert asked["all_to_all_single"] == all_to_alls[-1] <= 4, (
            "batch sums; eigenbases; gradients; results"
        )
        assert asked.keys() <= {"all_reduce", "all_gather_object", "all_to_all_single", "bytes"}
        payload = sum(nbytes for kind, nbytes in channel.sent.items() if kind != "proof")
        assert 0 <= asked["bytes"] - payload <= 16 * 5 * world * 2, (step, "alignment alone")
    assert kfac.owned, "no rank idle"
    if stage in (1, 2):
        moved = kfac.exchange.plan.gather.total_numel
        assert moved == elements_elsewhere(engine)
        gradient = sum(layer.numel for layer in kfac.layers)
        assert not even or moved < 0.05 * gradient, "of the gradient"
    if even:
        state = nbytes_of(kfac)[0]
        assert state <= 1.15 / world * sum(of_ranks(state)), "of the state"
    if world == 4:
        assert [all_to_alls[step] for step in (1, 2, 4)] == exchanges(ROWS[stage, workers]), PAGE
