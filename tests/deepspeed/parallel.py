"""What the tests of model parallelism share: the whole model trained in one process, and engines
that are compared with it."""

import tempfile
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.choices import STAGGERED
from tests.close import exact
from tests.deepspeed import runs
from tests.deepspeed.modes import STEPS, Mode
from tests.deepspeed.runs import expected, weights
from tests.models import make_net
from tests.oracle import ReferenceKFAC
from tests.ranks import of_ranks, on_rank_0
from tests.spread import Expected, difference, within

EVERYTHING = {
    "burn_in": {"steps": 0},
    "factor": {"rows": "all", "update_interval": 1, "decay": 0.9},
    "eigenbasis": {"refresh_interval": 3},
    "plan": STAGGERED,
    "adaptive": 0.3,
    "communication": {"dtype": "bf16"},
    "damping": {"value": 0.03},
}
"""What no oracle follows: ranks must still agree, and none wait for another."""

EVERY_TYPE = {"layers": {"types": ["Linear", "LayerNorm"]}}
FP32_WIRE = {"communication": {"dtype": "fp32"}}
SCALED = {
    "burn_in": {"steps": 0},
    "eigenbasis": {"refresh_interval": 2},
    "plan": STAGGERED,
    **FP32_WIRE,
}
"""Refreshes at several steps, everything in fp32 on the wire, inputs shared."""
INVERSE = {
    "preconditioner": {"method": "inverse", "kl_clip": 1e-4},
    "damping": {"kind": "relative", "value": 0.3},
}
COMM_OPT = {"assignment": {"gradient_worker_fraction": 1.0}, "offload": {"device": "cpu"}}


def clip(value: float) -> dict:
    """Small enough that kl-clip acts on this model."""
    return {"preconditioner": {"kl_clip": value}}


SOME = {**EVERY_TYPE, **clip(5e-5)}


def adam(name: str, stage: int, **options) -> Mode:
    return Mode(f"{name}-adam-z{stage}", stage, adam=True, **options)


Refreshes = list[set[tuple[str, str]]]
"""Per step, (layer, "A" or "G")."""


class StaggeredKFAC(ReferenceKFAC):
    """Refreshes what a plan says, and at the first step everything."""

    def __init__(self, *arguments, refreshes: Refreshes, **options) -> None:
        super().__init__(*arguments, **{**options, "refresh_interval": 1})
        assert len(set(map(frozenset, refreshes))) > 1 and all(refreshes), (
            f"nothing is staggered: {refreshes}"
        )
        self.refreshes = refreshes

    def refresh(self, *, iterate: bool = False) -> None:
        before = {name: list(layer.bases) for name, layer in self.layers.items()}
        super().refresh(iterate=iterate)
        for name, bases in before.items():
            for side, basis in enumerate(bases):
                if (name, "AG"[side]) not in self.refreshes[self.steps]:
                    self.layers[name].bases[side] = basis


def planned_refreshes(job, whole_name: Callable[[str], str]) -> Refreshes:
    """Of all ranks and domains, after training. Collective."""
    mine: Refreshes = [set() for _ in range(STEPS)]
    for kfac in job.preconditioners:
        for step in range(STEPS):
            for key in kfac.curvature.timetable.due(step).refresh:
                layers = kfac.curvature.specs[key].layers
                mine[step] |= {(whole_name(name), key[-1]) for name in layers}
    return [set().union(*of_step) for of_step in zip(*of_ranks(mine), strict=True)]


def whole_state(job) -> dict[str, Tensor]:
    """Factors and eigenvalues of the whole job by their global names, each from a rank that has it.
    Collective."""
    mine: dict[str, Tensor] = {}
    for kfac in job.preconditioners:
        names = {layer.name: kfac.engine_view.domain.global_name(layer) for layer in kfac.layers}
        for key, state in kfac.curvature.factors.items():
            mine[f"{names[key[:-2]]}{key[-2:]}"] = state.packed_P.clone()
        for name, state in kfac.state.items():
            for side, basis in (("A", state.A), ("G", state.G)):
                if basis is not None:
                    mine[f"{names[name]} eigenvalues of {side}"] = basis.values.clone()
    return {key: value for of_rank in of_ranks(mine) for key, value in of_rank.items()}


class Parallelism:
    """One way to spread a model over ranks, with the same model in one process. ``whole``, the
    class of the model in one process, is an attribute; ``make(mode)`` returns an engine,
    ``train(engine, steps, first)`` trains it, and ``losses(mode)`` are the reference's."""

    def options(self, mode: Mode) -> dict[str, Any]:
        """Of the reference; see ``runs.reference``."""
        return {}

    def whole_layer(self, name: str) -> str:
        """The name in the whole model of an engine's layer."""
        return name

    def weights(self, engine) -> dict[str, Tensor]:
        """What this rank has. Whatever has the same name on several ranks is the same there."""
        return weights(engine)

    def part(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of the whole model's weights, named as :meth:`weights`."""
        return values

    def check(self, engine, mode: Mode) -> None:
        """Assert what an engine has to show after training."""


whole_batch = cache(runs.whole_batch)
"""One function for each size, so that ``runs.expected`` knows runs that are the same."""


def assert_trained_alike(parallelism: Parallelism, mode: Mode) -> None:
    """This rank's weights are those of the whole model, trained in one process. Collective."""
    engine = parallelism.make(mode)
    parallelism.train(engine)
    parallelism.check(engine, mode)
    options = {"model": parallelism.whole, **parallelism.options(mode)}
    if "plan" in mode.kfac:
        refreshes = planned_refreshes(engine.kfac.job, parallelism.whole_layer)
        options["kind"] = partial(StaggeredKFAC, refreshes=refreshes)
    losses = parallelism.losses(mode)

    def in_one_process() -> tuple[dict[str, Tensor], Expected]:
        model = make_net(parallelism.whole)
        initial = {name: p.detach().clone() for name, p in model.named_parameters()}
        return initial, expected(mode, 1, 1, initial, losses=losses, **options)

    initial, whole = on_rank_0(in_one_process)
    actual = parallelism.weights(engine)
    off = difference(actual, parallelism.part(whole.weights), parallelism.part(initial))
    assert not within(mode.name, off, whole.bound), (mode.name, off, whole.bound)
    assert_ranks_agree(actual)
    if not mode.adam and mode.kfac_block["preconditioner"].get("kl_clip", 0) < 1e-4:
        assert float(engine.kfac.metrics.nu) < 0.9, "kl-clip did not act, so it was not tested"


def assert_ranks_agree(weights: dict[str, Tensor]) -> None:
    """What several ranks have is the same on all of them. Collective."""
    for other in of_ranks(weights):
        common = other.keys() & weights.keys()
        exact({name: other[name] for name in common}, {name: weights[name] for name in common})


def shared_folder() -> str:
    """One for all ranks. Collective."""
    return on_rank_0(tempfile.mkdtemp)


def data_parallel_part(*tensors: Tensor) -> tuple[Tensor, ...]:
    """This rank's part of a whole batch."""
    return tuple(t.chunk(dist.get_world_size())[dist.get_rank()] for t in tensors)
