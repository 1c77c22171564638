"""Counts instead of seconds: collectives per step, bytes moved, state per rank, work on a step that
is not due."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.held import nbytes_of
from examples.gpt import GPT, GPTConfig
from tests.choices import AT_ONCE, HALF
from tests.deepspeed.modes import Mode
from tests.deepspeed.runs import build
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
GPT_12 = GPTConfig(width=64, blocks=12, heads=2, context=16)
GPT_3 = GPTConfig(width=32, blocks=3, heads=2, context=16)
KFAC = {
    "factor": {"update_interval": 2},
    "eigenbasis": {"refresh_interval": 4},
    "burn_in": {"steps": 0},
}


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


class Traffic:
    """Counts what torch.distributed is asked for in K-FAC's process group, step by step."""

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

    def __init__(self, kfac) -> None:
        self.kfac, self.calls, self.sent = kfac, Counter(), 0
        for name in self.NAMES:
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name, plain):
        def call(*args, **kwargs):
            if kwargs.get("group") is self.kfac.channel.group:
                self.calls[name] += 1
                if name == "all_to_all_single":
                    splits = kwargs["input_split_sizes"]
                    self.sent += (sum(splits) - splits[dist.get_rank()]) * kwargs[
                        "input"
                    ].element_size()
            return plain(*args, **kwargs)

        return call

    def taken(self) -> tuple[dict, int, dict, dict]:
        """Since the last time: torch's calls, bytes sent to other ranks; ours by kind: calls,
        payload sent."""
        channel = self.kfac.channel
        found = dict(self.calls), self.sent, dict(channel.calls), dict(channel.sent)
        self.calls, self.sent = Counter(), 0
        channel.calls.clear()
        channel.sent.clear()
        return found


def engine_of(stage: int, config: GPTConfig, *, adam: bool = False, **kfac):
    torch.manual_seed(0)
    mode = Mode(
        "gpt", stage, adam=adam, kfac={**KFAC, **kfac, "plan": {**AT_ONCE, **kfac.get("plan", {})}}
    )
    return build(mode, 1, model=GPT(config))


def run_step(engine, step: int) -> None:
    x = torch.randint(
        256,
        (2, GPT_12.context),
        generator=torch.Generator().manual_seed(step + 31 * dist.get_rank()),
    )
    engine.backward(engine(x, x.roll(-1, 1)))
    engine.step()


def traffic_worker(_) -> dict:
    results, world = {}, dist.get_world_size()
    for case in CASES[world]:
        stage, dtype, workers, adam = case
        fraction = {"assignment": {"gradient_worker_fraction": workers / world}}
        wire = {"communication": {"dtype": dtype}, "plan": HALF if dtype == "bf16" else {}}
        engine = engine_of(
            stage, GPT_12 if case in SHARED_EVENLY else GPT_3, adam=adam, **fraction, **wire
        )
        kfac, steps = engine.kfac.preconditioner, []
        traffic = Traffic(kfac)
        traffic.taken()  # the self-test's
        for step in range(5):
            run_step(engine, step)
            steps.append(traffic.taken())
        gather = kfac.exchange.plan.gather
        results[case] = {
            "steps": steps,
            "moved": gather.total_numel,
            "elsewhere": elements_elsewhere(engine) if stage in (1, 2) else gather.total_numel,
            "gradient": sum(layer.numel for layer in kfac.layers),
            "state": nbytes_of(kfac)[0],
            "owned": len(kfac.owned),
        }
        engine.destroy()
    return results


CASES = {
    2: [(stage, dtype, 1, False) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16")]
    + [(0, "fp32", 2, False), *((stage, "fp32", 1, True) for stage in (0, 2, 3))],
    4: [(0, "fp32", 1, False), (3, "fp32", 1, False), (0, "bf16", 2, False), (0, "fp32", 4, False)],
}
"""Stage, dtype of the wire, gradient workers, and whether KFACAdamW steps, with clipping."""
SHARED_EVENLY = {
    case for cases in CASES.values() for case in cases if case[1:] == ("fp32", 1, False)
}


ROWS = {(0, 1): "MEM-OPT", (0, 2): "HYBRID", (0, 4): "COMM-OPT", (3, 1): "ZeRO-3"}
"""Stage and workers -> how a row of the table in docs/notes/scaling.md begins, in which 4 ranks
are."""
PAGE = Path(__file__).parents[2] / "docs/notes/scaling.md"
EXCHANGES = {
    name: [int(number) for number in counts]
    for name, *counts in re.findall(
        r"^\| ([\w-]+).* \| (\d) / (\d) / (\d) \|", PAGE.read_text(), re.MULTILINE
    )
}
"""All-to-alls of a step in which nothing is due, of one that updates factors, and of one that
refreshes them."""


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_bytes_and_state(world):
    """What kinds have how many bytes is the plan's in test_estimate.py; here that torch is asked
    for no more."""
    results = run_ranks("tests.deepspeed.test_communication:traffic_worker", world=world)
    for case in results[0]:
        stage = case[0]
        for result in (of_rank[case] for of_rank in results):
            for step, (calls, wire, counted, sent) in enumerate(result["steps"]):
                proof = 2 * (step in (0, 4))  # captured steps 1 and 3: rows, and what came of them
                assert calls.pop("all_gather_object", 0) == (step == 0), (
                    "once in a run: layers that share their input"
                )
                assert calls.pop("all_reduce", 0) == counted.pop("proof", 0) == proof, (case, step)
                assert sum(counted.values()) <= 4, "batch sums; eigenbases; gradients; results"
                assert calls == (
                    {"all_to_all_single": n} if (n := sum(counted.values())) else {}
                ), (case, step, calls)
                sent.pop("proof", 0)
                assert 0 <= wire - sum(sent.values()) <= 16 * 5 * world * 2, (
                    case,
                    step,
                    "alignment alone",
                )
            assert result["moved"] == result["elsewhere"], case
        if case in SHARED_EVENLY:
            total = sum(of_rank[case]["state"] for of_rank in results)
            for rank in range(world):
                share = results[rank][case]["state"] / total
                assert share <= 1.15 / world, (
                    f"{case}: rank {rank} of {world} holds {share:.3f} of the state"
                )
            if stage in (1, 2):
                part = results[0][case]["moved"] / results[0][case]["gradient"]
                assert part < 0.05, f"{case}: {part:.1%} of the gradient moves on {world} ranks"
        assert all(of_rank[case]["owned"] > 0 for of_rank in results), "no rank idle"
        if world == 4:
            steps = [
                results[0][case]["steps"][step][0].get("all_to_all_single", 0) for step in (1, 2, 4)
            ]
            assert steps == EXCHANGES[ROWS[stage, case[2]]], f"{case}: {PAGE}"


def idle_worker(_) -> dict:
    """Operations of a step that is not due, against the preconditioning alone."""
    from torch.profiler import ProfilerActivity, profile

    engine = engine_of(2, GPT_3)
    kfac = engine.kfac.preconditioner
    run_step(engine, 0)
    assert not kfac.capture.active
    counts, plain = {}, engine.kfac.job.step
    for name in ("idle", "due"):
        x = torch.randint(256, (2, GPT_3.context))
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            engine.backward(engine(x, x))
        counts[f"{name} backward"] = Counter(
            {e.key: e.count for e in trace.key_averages() if e.key == "aten::mm"}
        )
        events = {}

        def profiled(events=events) -> None:
            with profile(activities=[ProfilerActivity.CPU]) as trace:
                plain()
            events |= {event.key: event.count for event in trace.key_averages()}

        engine.kfac.job.step = profiled
        engine.step()
        counts[name] = {
            key: events.get(key, 0)
            for key in ("aten::mm", "aten::_linalg_eigh", "aten::linalg_eigh")
        }
        counts[f"{name} host syncs"] = events.get("aten::_local_scalar_dense", 0) + events.get(
            "aten::item", 0
        )
        counts[f"{name} stages"] = sorted(key for key in events if key.startswith("ds_kfac::"))
    return counts | {"owned": len(kfac.owned)}


def test_a_step_that_is_not_due_costs_the_preconditioning_alone():
    result = run_ranks("tests.deepspeed.test_communication:idle_worker", world=1)[0]
    assert result["idle"]["aten::mm"] == 4 * result["owned"], "four products a layer"
    assert result["idle stages"] == ["ds_kfac::precondition", "ds_kfac::relayout"]
    assert result["idle host syncs"] == 0 and result["due host syncs"] == 0
    assert "ds_kfac::reduce" in result["due stages"]
    assert result["due backward"]["aten::mm"] > result["idle backward"]["aten::mm"]
