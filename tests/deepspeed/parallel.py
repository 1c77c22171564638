"""What the tests of model parallelism share: the whole model trained in one process, and engines
that are compared with it, saved and refused."""

import contextlib
import copy
import io
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_kfac
from tests import spread
from tests.choices import STAGGERED, chosen
from tests.deepspeed.modes import KFAC, STEPS, Mode
from tests.deepspeed.runs import ReferenceStep, parameter_groups, reference_options, sized
from tests.models import cross_entropy, make_batch
from tests.oracle import ReferenceKFAC
from tests.spread import Variation, difference, within


@dataclass
class Whole:
    """What one process found: weights at the end, factors by layer, kl-clip's last factor; and what
    may differ.

    Attributes:
        bound: of the weights, relative to the training; see tests/spread.py.
        nu_bound: of kl-clip's factor.
    """

    weights: dict[str, Tensor]
    factors: dict[str, list[Tensor]]
    nu: float
    bound: float = 0.0
    nu_bound: float = 0.0


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

Refreshes = list[set[tuple[str, str]]]
"""Per step, (layer, "A" or "G")."""


class StaggeredKFAC(ReferenceKFAC):
    """Refreshes what a plan says, and at the first step everything."""

    def __init__(self, *arguments, refreshes: Refreshes, **options) -> None:
        super().__init__(*arguments, **{**options, "refresh_interval": 1})
        self.refreshes = refreshes

    def refresh(self, *, iterate: bool = False) -> None:
        before = {name: list(layer.bases) for name, layer in self.layers.items()}
        super().refresh(iterate=iterate)
        for name, bases in before.items():
            for side, basis in enumerate(bases):
                if (name, "AG"[side]) not in self.refreshes[self.steps]:
                    self.layers[name].bases[side] = basis


def planned_refreshes(job, whole_name: Callable[[str], str] = str, steps: int = STEPS) -> Refreshes:
    """Of all ranks and domains, after training; ``whole_name`` of a layer here is its name in the
    whole model."""
    mine: Refreshes = [set() for _ in range(steps)]
    for kfac in job.preconditioners:
        for step in range(steps):
            for key in kfac.curvature.timetable.due(step).refresh:
                mine[step] |= {
                    (whole_name(name), key[-1]) for name in kfac.curvature.specs[key].layers
                }
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return [set().union(*(of_rank[step] for of_rank in everyone)) for step in range(steps)]


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
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {key: value for of_rank in everyone for key, value in of_rank.items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return (
        bool(first)
        and first.keys() == second.keys()
        and all(torch.equal(v, second[k]) for k, v in first.items())
    )


def least_likely(prediction: Tensor, *ignored) -> Tensor:
    """A Monte-Carlo Fisher's loss whose labels are the same in every process."""
    return cross_entropy(prediction, prediction.argmin(-1))


def kfac_block(mode: Mode) -> dict:
    return {**KFAC, **mode.kfac}


def build(mode: Mode, model: nn.Module, accumulation: int = 1, world: int = 1, **arguments):
    """An engine with K-FAC attached, silently."""
    if "model_parameters" not in arguments:
        arguments["model_parameters"] = parameter_groups(model, mode.groups)
    config = mode.config(accumulation, world)
    with contextlib.redirect_stdout(io.StringIO()), chosen(config["kfac"]) as block, sized(mode):
        return ds_kfac.initialize(model=model, config={**config, "kfac": block}, **arguments)[0]


Loss = Callable[[nn.Module, int, Variation], Tensor]
"""Of the whole batch of a step, in a variation's order."""


def whole_batch(rows: int, tokens: int = 3) -> Loss:
    def loss(model: nn.Module, step: int, variation: Variation) -> Tensor:
        x, y = variation.rows(*make_batch(step, rows, tokens))
        return cross_entropy(model(x.to(next(model.parameters()).dtype)), y)

    return loss


def train_whole(mode: Mode, model: nn.Module, loss: Loss, **options) -> Whole:
    """:func:`train_once`, and what its variations may differ by: on rank 0, for all, which share
    its cores."""
    found = [trained_whole(mode, model, loss, **options) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def trained_whole(mode: Mode, model: nn.Module, loss: Loss, **options) -> Whole:
    runs: list[Whole] = []

    def train(variation: Variation) -> dict[str, Tensor]:
        runs.append(train_once(mode, model, loss, variation, **options))
        return runs[-1].weights

    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = spread.expected(train, initial)
    nu_spread = max(abs(run.nu - runs[0].nu) for run in runs)
    return replace(runs[0], bound=found.bound, nu_bound=spread.FACTOR * nu_spread + spread.FLOOR)


def train_once(
    mode: Mode,
    model: nn.Module,
    loss: Loss,
    variation: Variation,
    *,
    gradient_scale: float = 1.0,
    part: float = 1.0,
    steps: int = STEPS,
    refreshes: Refreshes | None = None,
    kind: type[ReferenceKFAC] = ReferenceKFAC,
    **options,
) -> Whole:
    """Train a copy of ``model`` with tests/oracle.py; in bf16 on a rounded copy, as
    ``runs.reference`` does.

    Args:
        gradient_scale: by how much the engine's gradients are larger than this loss's.
        part: which part of this loss a rank's backward pass differentiates. G is made of that.
        refreshes: what is refreshed when, if not everything at once.
        kind: of reference, if nothing is staggered.
        options: of ReferenceKFAC, over those of the mode.
    """
    model = copy.deepcopy(model).to(torch.get_default_dtype())
    dtype = variation.dtype(torch.bfloat16 if mode.dtype == "bf16" else torch.float32)
    work = model if dtype == torch.get_default_dtype() else copy.deepcopy(model).to(dtype)
    for p in work.parameters():
        p.grad_dtype = torch.get_default_dtype()
    options = {**reference_options(kfac_block(mode)), **options}
    if refreshes is None:
        kfac = kind(work, **options)
    else:
        assert len(set(map(frozenset, refreshes))) > 1 and all(refreshes), (
            f"nothing is staggered: {refreshes}"
        )
        kfac = StaggeredKFAC(work, refreshes=refreshes, **options)
    frozen = [(p, p.detach().clone()) for p in model.parameters() if not p.requires_grad]
    step = ReferenceStep(mode, model, work, kfac)
    for index in range(steps):
        value = loss(work, index, variation)
        if kfac.fisher == "monte_carlo":
            kfac.sampled(least_likely(work.prediction))
        (value * part).backward()
        for p in work.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad * (gradient_scale / part)
        step(1.0)
        with torch.no_grad():
            for p, value in frozen:  # ReferenceStep decays everything
                p.copy_(value)
    return Whole(
        {name: p.detach().clone() for name, p in model.named_parameters()}, kfac.factors, kfac.nu
    )


def compared(
    engine, mode: Mode, actual: dict[str, Tensor], expected: Whole, initial: dict, **more
) -> dict:
    """What this rank says of its weights and of one process's. The engine ends."""
    kfac = engine.kfac
    result = {
        "difference": difference(actual, expected.weights, initial),
        "bound": expected.bound,
        "nu_bound": expected.nu_bound,
        "nu": [1.0, 1.0] if mode.adam else [float(kfac.metrics.nu), expected.nu],
        "norm": float(engine.get_global_grad_norm() or 0.0),
        "domains": [
            (own.engine_view.domain.name, len(own.layers)) for own in kfac.job.preconditioners
        ],
        "shared": kfac.preconditioner.observations.groups,
        "report": kfac.report,
        **more,
    }
    kfac.detach()
    engine.destroy()
    return result


def check(where: str, result: dict) -> None:
    """Of :func:`compared`."""
    assert not within(where, result["difference"], result["bound"]), (where, result["difference"])
    actual, expected = result["nu"]
    assert not within("nu", abs(actual - expected), result["nu_bound"]), f"{where}: {result['nu']}"


def clipped(results: list[dict]) -> bool:
    """Whether kl-clip acted at all, or it would not be tested."""
    return any(result["nu"][0] < 0.9 for result in results)


def refusals(make: Callable, cases: dict[str, tuple]) -> dict[str, str]:
    """Name -> why no engine was made of its arguments."""
    messages = dict.fromkeys(cases, "")
    for name, arguments in cases.items():
        try:
            make(*arguments)
        except ValueError as error:
            messages[name] = str(error)
    return messages


def shared_folder() -> str:
    """One for all ranks. Collective."""
    directory = [tempfile.mkdtemp()]
    dist.broadcast_object_list(directory)
    return directory[0]


def saved_experts(make: Callable, train: Callable) -> dict:
    """Whether the state of ``make(ep_size)`` came back, also at another ep_size, and the steps of
    every domain."""
    folder, first, second, other = shared_folder(), make(2), make(2), make(1)
    train(first, 3)
    first.save_checkpoint(folder, tag="t")
    second.load_checkpoint(folder, tag="t")
    other.kfac.load_state(folder, "t")
    state = whole_state(first.kfac.job)
    return {
        "keys": sorted(key for key in state if key.endswith("/A")),
        "loaded": [same(state, whole_state(engine.kfac.job)) for engine in (second, other)],
        "steps": [kfac.steps for kfac in second.kfac.job.preconditioners],
    }


def everything_on(engine, weights: Callable, train: Callable) -> dict[str, Tensor]:
    """Weights after some steps, in names of the whole model."""
    before = weights(engine)
    train(engine, 8)
    after = weights(engine)
    assert not [name for name, value in after.items() if torch.equal(before[name], value)]
    assert float(engine.kfac.metrics.summary.sum()) == 0, (
        "not finite, not preconditioned or not decomposed"
    )
    assert engine.kfac.counters()["job/calls_numbers"] == 8
    return after


def same_everywhere(results: list[dict[str, Tensor]]) -> bool:
    """What several ranks have is the same on all of them."""
    pairs = [(one, other) for one in results for other in results]
    return all(
        torch.equal(one[name], other[name])
        for one, other in pairs
        for name in one.keys() & other.keys()
    )
