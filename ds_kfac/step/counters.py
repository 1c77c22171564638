"""What logs show, by the same names: all counters for DeepSpeed's monitor, a few numbers for a training framework's
logs.

Both read device scalars: at logged steps only.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ds_kfac.comm.message import Channel
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner

PREFIX = "kfac/"
"""Of every name in logs."""
FAILURES = (
    "not_finite_layers", "unpreconditioned_layers", "refresh_failures", "left_out_gradients", "empty_updates",
    "missed_updates", "parted_inputs",
)  # fmt: skip
"""Counters that a framework's logs show where they are not zero."""


def counters(job: Job) -> dict[str, float]:
    """Name -> value so far, of this rank unless said otherwise.

    Names of experts' domains begin with "<domain>/", those of sums over all domains with "job/".

    In addition to those of :class:`~ds_kfac.metrics.Metrics`:

    - "calls_<kind>": collectives entered; "sent_bytes_<kind>", "received_bytes_<kind>": payload to and from other
      ranks, from attach on, steps that were skipped included. Kinds: factors, gradients, eigenvectors, eigenvalues,
      inverses, results, numbers, proof.
    - "captures", "captures_skipped": of factors, over all ranks; skipped are those that the adaptive rule left out.
    - "statistics_fraction": factor elements captured, over those of capturing every factor in every step.
    """
    found = _of_domain(job.preconditioners[0])
    for kfac in job.preconditioners[1:]:
        found |= {f"{kfac.engine_view.domain.name}/{name}": value for name, value in _of_domain(kfac).items()}
    if job.everywhere:
        found |= {f"job/{name}": value for name, value in _of_channel(job.channel).items()}
    return found


def events(job: Job, samples: int, more: Mapping[str, float]) -> list[tuple[str, float, int]]:
    """For DeepSpeed's monitor: the counters, those of :func:`health`, and more. A name is the Trainer's, and
    :data:`PREFIX` with a name of :func:`counters`."""
    shown = {**counters(job), **health(job.preconditioners[0]), **more}
    return [(PREFIX + name, value, samples) for name, value in shown.items()]


def selected(job: Job) -> dict[str, float]:
    """For a line of a training framework's logs, of this rank: the numbers of :func:`health`, those of kl-clip while
    it is on, and of :data:`FAILURES` those that are not zero."""
    found = counters(job)
    clipped = {name: value for name, value in found.items() if name in ("nu", "kl")}
    failures = {name: value for name, value in found.items() if value and name.rpartition("/")[2] in FAILURES}
    return {**health(job.preconditioners[0]), **clipped, **failures}


def constants(job: Job) -> dict[str, float]:
    """What stays for all of a run: "lr_<kind>", the rate of a kind of parameters over that of the optimizer."""
    kfac = job.preconditioners[0]
    rates = kfac.rule.rates(kfac.plan, getattr(kfac.engine_view.inner, "adam_ratio", 1.0))
    return {f"lr_{kind}": float(times) for kind, times in rates.items() if times != 1}


def health(kfac: KFACPreconditioner) -> dict[str, float]:
    """What is known of:

    - "step_to_weight": size of the last step along KFACAdamW's directions over that of the weights of its layers, root
      mean squares; at ZeRO-3 of the weights that this rank holds.
    - "eigenvalue_spread": largest eigenvalue of an A over their mean, the median of this rank's layers. 1: curvature
      says nothing there.
    """
    found = {}
    if kfac.direction.last is not None:
        squared, lr = kfac.direction.last
        own = [x for p in kfac.layout.params if (x := held(p, kfac.rank)).numel()]
        weight = sum(norm.double().square() for norm in torch._foreach_norm(own)) / sum(x.numel() for x in own)
        step = squared.double() / sum(layer.numel for layer in kfac.layers)
        found["step_to_weight"] = float(lr) * float((step / torch.as_tensor(weight).to(step)).sqrt())
    bases = [state.basis.A for state in kfac.state.values() if state.basis and state.basis.A.vectors]
    if bases:
        spreads = torch.stack([basis.values.max() / basis.values.mean() for basis in bases])
        found["eigenvalue_spread"] = float(spreads.median())
    return found


def _of_domain(kfac: KFACPreconditioner) -> dict[str, float]:
    timetable, counts = kfac.curvature.timetable, kfac.metrics.counts
    found = kfac.metrics.values() | _of_channel(kfac.channel)
    found |= {"captures": float(timetable.captured), "captures_skipped": float(timetable.skipped)}
    every_step = sum(kfac.curvature.numel.values()) * counts["steps"]
    if every_step:
        found["statistics_fraction"] = counts["captured_elements"] / every_step
    return found


def _of_channel(channel: Channel) -> dict[str, float]:
    found = {f"calls_{kind}": float(calls) for kind, calls in channel.calls.items()}
    found |= {f"sent_bytes_{kind}": float(nbytes) for kind, nbytes in channel.sent.items()}
    return found | {f"received_bytes_{kind}": float(nbytes) for kind, nbytes in channel.received.items()}


def held(parameter: Any, rank: int) -> Tensor:
    """What a rank has of a parameter: all, or at ZeRO-3 its chunk without what fills it up, which nobody wrote."""
    chunk = getattr(parameter, "ds_tensor", None)
    if chunk is None:
        return parameter.detach()
    return chunk.detach().flatten()[: max(0, parameter.ds_numel - rank * chunk.numel())]
