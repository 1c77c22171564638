"""All counters of a run, for DeepSpeed's monitor and ``engine.kfac.counters()``."""

from ds_kfac.comm.message import Channel
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner


def counters(job: Job) -> dict[str, float]:
    """Name -> value so far, of this rank unless said otherwise. Reads device scalars: call it now and then only.

    Names of experts' domains begin with "<domain>/", those of sums over all domains with "job/".

    In addition to those of :class:`~ds_kfac.metrics.Metrics`:

    - "calls_<kind>": collectives entered; "sent_bytes_<kind>", "received_bytes_<kind>": payload to and from other
      ranks, from attach on, steps that were skipped included. Kinds: factors, gradients, eigenvectors, eigenvalues,
      inverses, results, numbers.
    - "captures", "captures_skipped": of factors, over all ranks; skipped are those that the adaptive rule left out.
    - "statistics_fraction": factor elements captured, over those of capturing every factor in every step.
    """
    found = _of_domain(job.preconditioners[0])
    for kfac in job.preconditioners[1:]:
        found |= {f"{kfac.target.domain.name}/{name}": value for name, value in _of_domain(kfac).items()}
    if job.everywhere:
        found |= {f"job/{name}": value for name, value in _of_channel(job.channel).items()}
    return found


def _of_domain(kfac: KFACPreconditioner) -> dict[str, float]:
    timetable, counts = kfac.curvature.schedule.timetable, kfac.metrics.counts
    found = kfac.metrics.values() | _of_channel(kfac.channel)
    found |= {"captures": float(timetable.captured), "captures_skipped": float(timetable.skipped)}
    every_step = kfac.curvature.elements(frozenset(kfac.curvature.specs)) * counts["steps"]
    if every_step:
        found["statistics_fraction"] = counts["captured_elements"] / every_step
    return found


def _of_channel(channel: Channel) -> dict[str, float]:
    found = {f"calls_{kind}": float(calls) for kind, calls in channel.calls.items()}
    found |= {f"sent_bytes_{kind}": float(nbytes) for kind, nbytes in channel.sent.items()}
    return found | {f"received_bytes_{kind}": float(nbytes) for kind, nbytes in channel.received.items()}


def events(job: Job, samples: int) -> list[tuple[str, float, int]]:
    """The counters for DeepSpeed's monitor."""
    return [(f"Train/KFAC/{name}", value, samples) for name, value in counters(job).items()]


def selected(job: Job) -> dict[str, float]:
    """What a training framework's logs show: few numbers, of this rank."""
    found, kfac = counters(job), job.preconditioners[0]
    names = ("refreshes", "factor_updates", "refresh_failures", "not_finite_layers", "unpreconditioned_layers")
    shown = {f"kfac/{name}": found.get(name, 0.0) for name in names}
    shown["kfac/sent_bytes"] = sum(value for name, value in found.items() if name.startswith("sent_bytes_"))
    return shown | ({} if kfac.metrics.nu is None else {"kfac/nu": float(kfac.metrics.nu)})
