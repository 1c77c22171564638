"""What the tests of model parallelism share: the whole model trained in one process, and engines
that are compared with it."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import spread
from tests.choices import STAGGERED
from tests.close import exact
from tests.deepspeed.modes import STEPS, Mode
from tests.deepspeed.runs import Losses, trained
from tests.models import cross_entropy, make_net
from tests.oracle import ReferenceKFAC
from tests.ranks import of_ranks, on_rank_0
from tests.spread import difference, within

SCALED = {
    "burn_in": {"steps": 0},
    "eigenbasis": {"refresh_interval": 2},
    "plan": STAGGERED,
    "communication": {"dtype": "fp32"},
}
"""Refreshes at several steps, everything in fp32 on the wire, inputs shared."""

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

INVERSE = {
    "preconditioner": {"method": "inverse", "kl_clip": 1e-4},
    "damping": {"kind": "relative", "value": 0.3},
}
COMM_OPT = {"assignment": {"gradient_worker_fraction": 1.0}, "offload": {"device": "cpu"}}
EVERY_TYPE = {"layers": {"types": ["Linear", "LayerNorm"]}}

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


def least_likely(prediction: Tensor, *ignored) -> Tensor:
    """A Monte-Carlo Fisher's loss whose labels are the same in every process."""
    return cross_entropy(prediction, prediction.argmin(-1))


@dataclass
class Whole:
    """Training in one process.

    Attributes:
        initial, weights: before and after.
        bound: of the weights, relative to the training; see tests/spread.py.
        nu: kl-clip's last factor.
    """

    initial: dict[str, Tensor]
    weights: dict[str, Tensor]
    bound: float
    nu: float
    nu_bound: float


def train_whole(
    engine,
    mode: Mode,
    model: Callable[[], nn.Module],
    losses: Losses,
    *,
    whole_name: Callable[[str], str] = str,
    **options,
) -> Whole:
    """Train the model in one process, as ``engine`` was trained. Collective.

    Args:
        whole_name: of a layer of the engine, its name in the whole model.
        options: of ``runs.trained``.
    """
    if "plan" in mode.kfac:
        refreshes = planned_refreshes(engine.kfac.job, whole_name)
        options["kind"] = partial(StaggeredKFAC, refreshes=refreshes)

    def action() -> Whole:
        initial = {name: p.detach().clone() for name, p in make_net(model).named_parameters()}
        nus: list[float] = []

        def train(variation: spread.Variation) -> dict[str, Tensor]:
            run = {"model": model, "losses": losses, "variation": variation, **options}
            found, kfac = trained(mode, 1, 1, initial, **run)
            nus.append(kfac.nu)
            return found

        found = spread.expected(train, initial)
        nu_bound = spread.FACTOR * max(abs(nu - nus[0]) for nu in nus) + spread.FLOOR
        return Whole(initial, found.weights, found.bound, nus[0], nu_bound)

    return on_rank_0(action)


def assert_alike(engine, mode: Mode, actual: dict[str, Tensor], whole: Whole) -> None:
    """This rank's weights, in names of the whole model, and kl-clip's factor. It acts where its
    bound is small enough, or it would not be tested."""
    off = difference(actual, whole.weights, whole.initial)
    assert not within(mode.name, off, whole.bound), (mode.name, off, whole.bound)
    if not mode.adam:
        nu = float(engine.kfac.metrics.nu)
        assert not within("nu", abs(nu - whole.nu), whole.nu_bound), (nu, whole.nu)
        if mode.kfac_block["preconditioner"].get("kl_clip", 0) < 1e-4:
            assert nu < 0.9, "kl-clip did not act, so it was not tested"


def shared_folder() -> str:
    """One for all ranks. Collective."""
    return on_rank_0(tempfile.mkdtemp)


def assert_experts_are_saved(make: Callable, train: Callable, name: str) -> None:
    """The state of ``make(ep_size)`` comes back, also at another ep_size, and the steps of every
    domain; ``name``: what stands before the number of an expert."""
    folder, first, second, other = shared_folder(), make(2), make(2), make(1)
    train(first, 3)
    first.save_checkpoint(folder, tag="t")
    second.load_checkpoint(folder, tag="t")
    other.kfac.load_state(folder, "t")
    state = whole_state(first.kfac.job)
    for engine in (second, other):
        exact(whole_state(engine.kfac.job), state)
    assert [kfac.steps for kfac in second.kfac.job.preconditioners] == [3, 3]
    experts = {key.split(name)[1][0] for key in state if name in key and key.endswith("/A")}
    assert experts == set("0123"), "in global numbers"


def assert_ranks_agree(engine, weights: Callable, train: Callable) -> None:
    """After some steps with everything on, what several ranks have is the same on all of them;
    ``weights`` in names of the whole model."""
    before = weights(engine)
    train(engine, 8)
    after = weights(engine)
    assert not [name for name, value in after.items() if torch.equal(before[name], value)]
    assert float(engine.kfac.metrics.summary.sum()) == 0, "layers in trouble"
    assert engine.kfac.counters()["job/calls_numbers"] == 8
    for other in of_ranks(after):
        for name in other.keys() & after.keys():
            assert torch.equal(other[name], after[name]), name


def data_parallel_part(*tensors: Tensor) -> tuple[Tensor, ...]:
    """This rank's part of a whole batch."""
    return tuple(t.chunk(dist.get_world_size())[dist.get_rank()] for t in tensors)
