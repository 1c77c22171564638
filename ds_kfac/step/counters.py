"""What logs show: all counters for DeepSpeed's monitor, a few numbers for a training framework's logs.

Both read device scalars: at logged steps only.
"""

from typing import Any

import torch
from torch import Tensor

from ds_kfac.comm.message import Channel
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner


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
        found |= {f"{kfac.target.domain.name}/{name}": value for name, value in _of_domain(kfac).items()}
    if job.everywhere:
        found |= {f"job/{name}": value for name, value in _of_channel(job.channel).items()}
    return found


def events(job: Job, samples: int) -> list[tuple[str, float, int]]:
    """The counters for DeepSpeed's monitor."""
    return [(f"Train/KFAC/{name}", value, samples) for name, value in counters(job).items()]


def selected(job: Job) -> dict[str, float]:
    """For a training framework's logs, of this rank: some of the counters, the rates of the first parameter group, the
    bytes sent, and those of :func:`health`."""
    kfac = job.preconditioners[0]
    found = _of_domain(kfac)
    names = ("refreshes", "factor_updates", "refresh_failures", "not_finite_layers", "unpreconditioned_layers")
    shown = {f"kfac/{name}": found.get(name, 0.0) for name in names}
    lr, ratio = kfac.layout.optimizer.param_groups[0]["lr"], getattr(kfac.target.inner, "adam_ratio", 1.0)
    shown |= {f"kfac/lr_{kind}": times * float(lr) for kind, times in kfac.rule.rates(kfac.plan, ratio).items()}
    shown |= {f"kfac/{name}": value for name, value in health(kfac).items()}
    shown["kfac/sent_bytes"] = sum(value for name, value in found.items() if name.startswith("sent_bytes_"))
    return shown | {f"kfac/{name}": found[name] for name in ("nu", "kl") if name in found}


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
