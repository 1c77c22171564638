"""When factors are captured and refreshed one by one (staggered, adaptive), every engine mode
still trains like tests/oracle.py with the same factors due; and how much less is done."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.choices import STAGGERED
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, expected, train, weights
from tests.oracle import ReferenceKFAC, _eigh
from tests.ranks import run_ranks
from tests.spread import difference, within

pytestmark = pytest.mark.distributed
STEPS = 14


class Timed(ReferenceKFAC):
    """Factors are due as a script says: per step {key: weight of the past} to capture, and keys to
    refresh."""

    captures: dict[str, float] = {}
    refreshes: frozenset[str] = frozenset()

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.counts: dict[str, int] = {}

    def update(self) -> None:
        for name, layer in self.layers.items():
            layer.damping, batch = self.damping, layer.batch()
            layer.factors = layer.factors or [torch.zeros_like(part) for part in batch]
            layer.bases = layer.bases or [
                (torch.ones(len(part)), torch.eye(len(part))) for part in batch
            ]
            for index, key in enumerate((f"{name}/A", f"{name}/G")):
                if key in self.captures:
                    self.counts[key] = self.counts.get(key, 0) + 1
                    r = min(1 - 1 / self.counts[key], self.captures[key])
                    layer.factors[index] = r * layer.factors[index] + (1 - r) * batch[index]
                if key in self.refreshes:
                    layer.bases[index] = _eigh(layer.factors[index], layer.blocks[index])
            layer.use.pairs.clear()
        self.passes.clear()
        self.steps += 1


CASES = {  # such random batches differ by more than 0.1
    "staggered": {"eigenbasis": {"refresh_interval": 4}, "plan": STAGGERED},
    "at once": {"eigenbasis": {"refresh_interval": 4}},
    "adaptive": {"eigenbasis": {"refresh_interval": 2}, "adaptive": 0.9},
    "everything": {
        "eigenbasis": {"refresh_interval": 4},
        "plan": STAGGERED,
        "adaptive": 0.9,
        "offload": {"device": "cpu"},
    },
    "inverses, everything": {
        "eigenbasis": {"refresh_interval": 4},
        "plan": STAGGERED,
        "adaptive": 0.9,
        "offload": {"device": "cpu"},
        "preconditioner": {"method": "inverse", "kl_clip": 0.0005},
        "damping": {"kind": "relative", "value": 0.3},
    },
}
MODES = ("z0", "z2", "z3")
SOME = {"at once": ["z2"], "everything": ["z0", "z3"], "inverses, everything": ["z2", "z3"]}
"""Cases of which no more is asked than that they train like the reference."""


def block(name: str) -> dict:
    case = CASES[name]
    return {
        **KFAC,
        **case,
        "factor": {"rows": "all", "update_interval": 2, "decay": 0.8},
        "eigenbasis": {**KFAC["eigenbasis"], **case["eigenbasis"]},
        "burn_in": {"steps": 0},
    }


def as_scripted(script: list, kfac: Timed, step: int) -> None:
    kfac.captures, kfac.refreshes = script[step]


def worker(_) -> dict:
    results = {}
    for name in CASES:
        for mode in SOME.get(name, MODES):
            kfac_block = block(name)
            engine = build(BY_NAME[mode], 1, kfac=kfac_block)
            initial = weights(engine)
            kfac, script = engine.kfac.preconditioner, []
            for step in range(STEPS):
                due, decay = kfac.due, kfac.config.factor.decay.at(step)
                clocks = kfac.curvature.timetable.clocks
                captures = {key: decay ** clocks[key].interval for key in sorted(due.capture)}
                script.append((captures, due.refresh))
                train(engine, 1, 1, first=step)
            found = None
            if dist.get_rank() == 0:
                read = partial(as_scripted, script)
                options = {
                    "steps": STEPS,
                    "kfac_config": kfac_block,
                    "before_step": read,
                    "kind": Timed,
                }
                found = expected(BY_NAME[mode], 1, 2, initial, **options)
            after = weights(engine)
            results[name, mode] = {
                "difference": difference(after, found.weights, initial) if found else 0.0,
                "bound": found.bound if found else 1.0,
                "script": [
                    (sorted(captures.items()), sorted(refreshes)) for captures, refreshes in script
                ],
                "factors": len(kfac.curvature.specs),
                "counters": engine.kfac.counters(),
            }
            engine.destroy()
    return results


@pytest.fixture(scope="module")
def results():
    return run_ranks("tests.deepspeed.test_refresh:worker", world=2)


def test_every_mode_trains_like_the_reference_with_the_same_factors_due(results):
    cases = results[0].items()
    wrong = [
        line
        for case, result in cases
        for line in within(str(case), result["difference"], result["bound"])
    ]
    assert not wrong, "\n".join(wrong)
    assert [r["script"] for r in results[0].values()] == [r["script"] for r in results[1].values()]


def test_staggering_spreads_the_same_work(results):
    at_once = results[0]["at once", "z2"]["script"]
    for mode in MODES:
        script, factors = (
            results[0]["staggered", mode]["script"],
            results[0]["staggered", mode]["factors"],
        )
        refreshed = [len(refreshes) for _, refreshes in script]
        assert refreshed[0] == factors, "the first batch is for all"
        for start in range(4, STEPS - 4):
            assert sum(refreshed[start : start + 4]) == factors, "each once in an interval"
        assert max(refreshed[1:]) < factors, "not all at once"
        assert max(len(refreshes) for _, refreshes in at_once[1:]) == factors


def test_the_adaptive_rule_captures_less(results):
    for mode in MODES:
        adaptive, plain = (results[0][name, mode] for name in ("adaptive", "staggered"))
        captured = sum(len(captures) for captures, _ in adaptive["script"])
        assert captured == adaptive["counters"]["captures"]
        assert adaptive["counters"]["captures_skipped"] > 0 == plain["counters"]["captures_skipped"]
        assert captured < adaptive["factors"] * (STEPS // 2)
        sent, sent_plain = (of["counters"]["sent_bytes_factors"] for of in (adaptive, plain))
        assert sent < sent_plain
        assert any(weight < 0.8 for captures, _ in adaptive["script"] for _, weight in captures), (
            "decays for the gap"
        )
