"""Numbers for logs: all counters for DeepSpeed's monitor, a few of them, by the same names, for a
training framework.

Both read scalars from the device, which waits for it: call them at logged steps only.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ds_kfac.comm.message import Channel
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner

PREFIX = "kfac/"
"""Every name in logs begins with it."""
FAILURES = (
    "not_finite_layers",
    "unpreconditioned_layers",
    "refresh_failures",
    "left_out_gradients",
    "empty_updates",
    "missed_updates",
)
"""Counters that a framework's logs show once they are not zero."""
COUNTS = (
    "steps",
    "skipped_steps",
    "factor_updates",
    "captured_elements",
    "refreshes",
    "refresh_retries",
    *(f"refreshes_{how}" for how in ("eigh", "iteration", "cholesky", "diagonal", "failed")),
)
"""Names in ``Metrics.counts``."""
KINDS = ("factors", "gradients", "results", "numbers", "proof")
"""Kinds of traffic, beside those of the method's decompositions."""


def counters(job: Job) -> dict[str, float]:
    """Name -> total since attach, on this rank unless said otherwise.

    Names of experts' domains begin with "<domain>/", those of traffic between all domains with
    "job/".

    In addition to those of :class:`~ds_kfac.metrics.Metrics`:

    - "calls_<kind>": collectives entered; "sent_bytes_<kind>", "received_bytes_<kind>": payload to
      and from other ranks, skipped steps included. Kinds: factors, gradients, eigenvectors,
      eigenvalues, inverses, results, numbers, proof.
    - "captures", "captures_skipped": factors captured, and left out by the adaptive rule, on all
      ranks.
    - "statistics_fraction": factor elements captured, as a fraction of capturing every factor in
      every step.

    All of these are there from attach on, as zeros before the first step.
    """
    values = _of_domain(job.preconditioners[0])
    for kfac in job.preconditioners[1:]:
        values |= {
            f"{kfac.engine_view.domain.name}/{name}": value
            for name, value in _of_domain(kfac).items()
        }
    if job.everywhere:
        values |= {f"job/{name}": value for name, value in _of_channel(job.channel, KINDS).items()}
    return values


def selected(job: Job) -> dict[str, float]:
    """This rank's numbers for a line of a training framework's logs: :func:`health`, kl-clip's
    while it is on, and those of :data:`FAILURES` that are not zero."""
    values = counters(job)
    clipped = {name: value for name, value in values.items() if name in ("nu", "kl")}
    failures = {
        name: value
        for name, value in values.items()
        if value and name.rpartition("/")[2] in FAILURES
    }
    return {**health(job), **clipped, **failures}


def constants(job: Job) -> dict[str, float]:
    """Numbers that hold for a whole run: "lr_<kind>", a kind of parameters' rate over the
    optimizer's, if not 1."""
    kfac = job.preconditioners[0]
    rates = kfac.rule.facts.rates(kfac.plan, getattr(kfac.engine_view.inner, "adam_ratio", 1.0))
    return {f"lr_{kind}": float(times) for kind, times in rates.items() if times != 1}


def health(job: Job) -> dict[str, float]:
    """Two health numbers, each missing until there is something to measure:

    - "step_to_weight": root mean square of KFACAdamW's last step, of the layers of all ranks, over
      that of its layers' weights on this rank.
    - "eigenvalue_spread": largest eigenvalue of an A over the mean of its eigenvalues, the median
      over this rank's dense layers. 1: all input directions are alike, so curvature changes
      nothing.
    """
    values = {}
    kfac = job.preconditioners[0]
    parts = (held(p, domain.rank) for domain in job.preconditioners for p in domain.layout.params)
    # at ZeRO-3 a rank may have nothing of tiny layers
    weights = [part for part in parts if part.numel()]
    if kfac.direction.last is not None and weights:
        squared, lr = kfac.direction.last
        squared_weights = sum(norm.double().square() for norm in torch._foreach_norm(weights))
        mean_weight = squared_weights / sum(part.numel() for part in weights)
        mean_step = squared.double() / job.numel
        values["step_to_weight"] = float(lr) * float((mean_step / mean_weight).sqrt())
    bases = [
        state.basis.A for state in kfac.state.values() if state.basis and state.basis.A.vectors
    ]
    if bases:
        spreads = torch.stack([basis.values.max() / basis.values.mean() for basis in bases])
        values["eigenvalue_spread"] = float(spreads.median())
    return values


def _of_domain(kfac: KFACPreconditioner) -> dict[str, float]:
    timetable = kfac.curvature.timetable
    counts = kfac.metrics.counts
    kinds = (*KINDS, *(part.kind for part in kfac.plan.method.parts))
    values = dict.fromkeys(COUNTS, 0.0) | kfac.metrics.values() | _of_channel(kfac.channel, kinds)
    values |= {"captures": float(timetable.captured), "captures_skipped": float(timetable.skipped)}
    every_step = sum(spec.side.numel for spec in kfac.curvature.specs.values()) * counts["steps"]
    values["statistics_fraction"] = counts["captured_elements"] / every_step if every_step else 0.0
    return values


def _of_channel(channel: Channel, kinds: Iterable[str]) -> dict[str, float]:
    """Return the traffic of a channel, with zeros for those of ``kinds`` that had none."""
    values: dict[str, float] = {}
    for name, counter in (
        ("calls", channel.calls),
        ("sent_bytes", channel.sent),
        ("received_bytes", channel.received),
    ):
        values |= {
            f"{name}_{kind}": float(counter[kind]) for kind in dict.fromkeys([*kinds, *counter])
        }
    return values


def held(parameter: Any, rank: int) -> Tensor:
    """Return the part of a parameter that a rank holds: all of it, or at ZeRO-3 its flat chunk
    without the uninitialised padding."""
    chunk = getattr(parameter, "ds_tensor", None)
    if chunk is None:
        return parameter.detach()
    return chunk.detach().flatten()[: max(0, parameter.ds_numel - rank * chunk.numel())]
