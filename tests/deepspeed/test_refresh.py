"""When factors are captured and refreshed one by one (staggered, adaptive), an engine still trains
like tests/oracle.py with the same factors due. Whose turn it is, is tested in tests/schedule."""

import pytest
import torch
import torch.distributed as dist

from tests.choices import STAGGERED
from tests.deepspeed.features import DAMPINGS, merged
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, expected, train, weights
from tests.oracle import ReferenceKFAC, _eigh
from tests.ranks import of_ranks
from tests.spread import difference, within

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


RULE = {
    "factor": {"rows": "all", "update_interval": 2, "decay": 0.8},
    "eigenbasis": {"refresh_interval": 4},
    "burn_in": {"steps": 0},
}
SPREAD, ADAPTIVE = {"plan": STAGGERED}, {"adaptive": 0.9}  # such batches differ by more than 0.1
OFFLOADED = {**SPREAD, **ADAPTIVE, "offload": {"device": "cpu"}}
INVERSES = merged(
    OFFLOADED, {"preconditioner": {"method": "inverse", "kl_clip": 5e-4}}, DAMPINGS["relative"]
)
CASES = [
    *(("staggered", mode, SPREAD) for mode in ("z0", "z2", "z3")),
    *(("adaptive", mode, ADAPTIVE) for mode in ("z0", "z2", "z3")),
    *(("everything", mode, OFFLOADED) for mode in ("z0", "z3")),
    *(("everything, inverses", mode, INVERSES) for mode in ("z2", "z3")),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "mode", "blocks"), CASES)
def test_an_engine_trains_like_the_reference_with_the_same_factors_due(name, mode, blocks):
    mode, block = BY_NAME[mode], merged(KFAC, RULE, blocks)
    engine = build(mode, kfac=block)
    initial, kfac, script = weights(engine), engine.kfac.preconditioner, []
    for step in range(STEPS):
        decay, clocks = kfac.config.factor.decay.at(step), kfac.curvature.timetable.clocks
        captures = {key: decay ** clocks[key].interval for key in sorted(kfac.due.capture)}
        script.append((captures, sorted(kfac.due.refresh)))
        train(engine, 1, 1, first=step)
    assert of_ranks(script) == [script, script]
    at_once = [len(refreshes) for _, refreshes in script[1:]]
    assert max(at_once) < len(kfac.curvature.specs) or name == "adaptive", "staggered"
    thinned = any(weight < 0.8 for captures, _ in script for weight in captures.values())
    assert thinned == (name != "staggered"), "decays for the gap"
    skipped = engine.kfac.counters()["captures_skipped"]
    assert (skipped > 0) == (name != "staggered")
    final = weights(engine)
    if dist.get_rank() == 0:

        def as_scripted(oracle: Timed, step: int) -> None:
            oracle.captures, oracle.refreshes = script[step]

        options = {"steps": STEPS, "kfac_config": block, "before_step": as_scripted, "kind": Timed}
        found = expected(mode, 1, 2, initial, **options)
        assert not within(name, difference(final, found.weights, initial), found.bound)
