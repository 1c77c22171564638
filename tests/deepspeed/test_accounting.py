"""What a run counts: equal to torch.distributed's own count, in DeepSpeed's monitor and in its printed breakdown."""

import contextlib
import io

import pytest
import torch.distributed as dist

from ds_kfac.metrics import STAGES, TIMER
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, train
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
STEPS = 5
MONITORED = ("sent_bytes_factors", "calls_results", "captures", "statistics_fraction", "refreshes", "steps")


def counters_worker(folder: str) -> dict:
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "csv"}}
    engine = build(BY_NAME["z2"], 1, wall_clock_breakdown=True, **monitor)
    kfac, sent, calls = engine.kfac.preconditioner, [0], [0]
    before, plain = engine.kfac.counters(), dist.all_to_all_single

    def counted(output, input, **kwargs):
        if kwargs.get("group") is kfac.channel.group:
            splits = kwargs["input_split_sizes"]
            sent[0] += (sum(splits) - splits[dist.get_rank()]) * input.element_size()
            calls[0] += 1
        return plain(output, input, **kwargs)

    dist.all_to_all_single = counted
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train(engine, 1, steps=STEPS)
    dist.all_to_all_single = plain
    timers = list(engine.engine_timers.global_timers)
    after = engine.kfac.counters()
    engine.kfac.detach()
    return {
        "counted": {name: value - before.get(name, 0.0) for name, value in after.items()},
        "sent": sent[0],
        "calls": calls[0],
        "cached": engine.get_wall_clock_timers(),
        "timers": timers,
        "left": list(engine.engine_timers.global_timers),
        "printed": printed.getvalue(),
        "slots": len(kfac.curvature.specs),
        "parts": 5,
    }


def test_counters_are_those_of_torch_distributed_the_monitor_and_the_breakdown(tmp_path):
    results = run_ranks("tests.deepspeed.test_accounting:counters_worker", world=2, payload=str(tmp_path))
    for result in results:
        counted = result["counted"]
        assert counted["steps"] == STEPS and counted["captures"] > 0 and counted["captures_skipped"] == 0
        assert 0 < counted["statistics_fraction"] <= 1
        assert counted.pop("calls_proof") == 4, "two proofs"
        assert counted.pop("sent_bytes_proof") > 0
        assert sum(v for name, v in counted.items() if name.startswith("calls_")) == result["calls"]
        payload = sum(v for name, v in counted.items() if name.startswith("sent_bytes_"))
        # the pieces of a message are aligned to 16 bytes
        assert payload <= result["sent"] <= payload + 16 * result["parts"] * result["calls"] and payload > 0
        assert {TIMER + stage for stage in STAGES} <= set(result["timers"])
        assert not {TIMER + stage for stage in STAGES} & set(result["left"]), "detach takes them out"
        assert all(result["cached"][TIMER + stage] > 0 for stage in ("relayout", "precondition"))
    # payload is counted on both ends
    names = {n.removeprefix("sent_bytes_") for r in results for n in r["counted"] if n.startswith("sent_bytes_")}
    for name in names:
        sent = sum(result["counted"].get(f"sent_bytes_{name}", 0) for result in results)
        assert sent == sum(result["counted"].get(f"received_bytes_{name}", 0) for result in results), name
    files = {path.stem: path.read_text().splitlines() for path in tmp_path.rglob("kfac_*.csv")}
    for name in MONITORED:
        assert len(files[f"kfac_{name}"]) > 1, name
    assert float(files["kfac_steps"][-1].split(",")[1]) <= STEPS
    assert TIMER + "precondition" in results[0]["printed"]
