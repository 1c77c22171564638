"""Numbers for logs. DeepSpeed's monitor gets all counters. The logs of a training framework get a
few of them, under the same names.

Functions that return a step's numbers read scalars from the device and wait for it. So call them
only in steps that are logged.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ds_kfac.comm.message import Channel
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner

PREFIX = "kfac/"
"""Prefix of every name in logs."""
FAILURES = (
    "not_finite_layers",
    "unpreconditioned_layers",
    "refresh_failures",
    "left_out_gradients",
    "empty_updates",
    "missed_updates",
)
"""Counters that appear in a framework's logs as soon as they are not zero."""
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
"""Kinds of messages between ranks, except those that contain decompositions."""


def counters(job: Job) -> dict[str, float]:
    """Return a dict from counter name to total since K-FAC was attached. A total counts what this
    rank did, unless noted otherwise.

    Counters of a domain of experts have names that begin with "<domain>/". If there are several
    domains, counters of the messages between them have names that begin with "job/".

    In addition to the numbers of :class:`~ds_kfac.metrics.Metrics` there are:

    - "calls_<kind>": number of collectives of this kind that the rank has entered.
    - "sent_bytes_<kind>", "received_bytes_<kind>": payload to and from other ranks, in bytes,
      including the payload of skipped steps. Kinds: factors, gradients, eigenvectors, eigenvalues,
      inverses, results, numbers, proof.
    - "captures": number of times that statistics for a factor were collected, summed over the
      factors of all ranks. "captures_skipped": number of times that the adaptive rule skipped the
      collection.
    - "statistics_fraction": number of factor elements for which statistics were collected, divided
      by what this number would be if every step collected statistics for every factor.

    All these counters exist as soon as K-FAC is attached, and are zero before the first step.
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
    """Return this rank's numbers for one log line of a training framework. These are the numbers of
    :func:`health`, "nu" and "kl" if kl-clip is on, and the counters in :data:`FAILURES` that are
    not zero."""
    values = counters(job)
    clipped = {name: value for name, value in values.items() if name in ("nu", "kl")}
    failures = {
        name: value
        for name, value in values.items()
        if value and name.rpartition("/")[2] in FAILURES
    }
    return {**health(job), **clipped, **failures}


def constants(job: Job) -> dict[str, float]:
    """Return numbers that do not change during a run. "lr_<kind>" is the learning rate of a kind of
    parameters, divided by the optimizer's learning rate. It is missing if the two are equal."""
    kfac = job.preconditioners[0]
    rates = kfac.rule.facts.rates(kfac.plan, getattr(kfac.engine_view.inner, "adam_ratio", 1.0))
    return {f"lr_{kind}": float(times) for kind, times in rates.items() if times != 1}


def health(job: Job) -> dict[str, float]:
    """Return two numbers about the health of the run. Each is missing until it can be measured.

    - "step_to_weight": root mean square of KFACAdamW's last step over the layers of all ranks,
      divided by the root mean square of the layers' weights on this rank.
    - "eigenvalue_spread": the largest eigenvalue of A divided by its mean eigenvalue. The number is
      the median over the layers of this rank whose A is dense or blocked. A value of 1 means that
      inputs are equally large in every direction, so A contains no information about curvature.
    """
    values = {}
    kfac = job.preconditioners[0]
    parts = (held(p, domain.rank) for domain in job.preconditioners for p in domain.layout.params)
    # at ZeRO-3 a rank may hold no part of a tiny layer
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
    """Return the counters of a channel's messages. The counters of a kind in ``kinds`` that was
    never sent are 0."""
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
    """Return the part of a parameter that a rank holds. At ZeRO-3 this is the rank's flat chunk
    without the uninitialised padding, otherwise the whole parameter."""
    chunk = getattr(parameter, "ds_tensor", None)
    if chunk is None:
        return parameter.detach()
    return chunk.detach().flatten()[: max(0, parameter.ds_numel - rank * chunk.numel())]
