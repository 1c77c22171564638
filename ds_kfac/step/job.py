"""K-FAC of one rank: a preconditioner for each of its domains, which step as one; and its counters."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_kfac.comm.message import Channel, gathered
from ds_kfac.curvature.factor import frobenius
from ds_kfac.model.logits import attentions, rms
from ds_kfac.step.draft import Draft
from ds_kfac.step.fares import fares
from ds_kfac.step.preconditioner import KFACPreconditioner


class Job:
    """The preconditioners of this rank's domains.

    Collectives of several domains follow each other in the order of ``preconditioners``, the same on every rank.

    Args:
        preconditioners: that of the dense layers first.
        everywhere: whether there are other domains, here or on other ranks.

    Attributes:
        channel: connects all ranks that train the model.
    """

    def __init__(self, preconditioners: Sequence[KFACPreconditioner], *, everywhere: bool) -> None:
        self.preconditioners, self.everywhere = tuple(preconditioners), everywhere
        self.channel = Channel(torch.distributed.group.WORLD) if everywhere else self.preconditioners[0].channel

    @property
    def steps(self) -> int:
        """Applied steps, of all domains alike."""
        return self.preconditioners[0].steps

    def capture_together(self) -> None:
        """From now on calls are seen on all ranks in every step in which a domain of any of them may capture: ranks of
        experts then tell each other of their micro-batches, and plans, and what the adaptive rule makes of them, are
        each domain's own. Collective."""
        mine = {offset for kfac in self.preconditioners for offset in (0, *kfac.plan.offsets.values())}
        dense, offsets = self.preconditioners[0], set().union(*gathered(mine))
        schedules = [dense.plan.schedule.displaced(offset) for offset in sorted(offsets)]
        dense.accompanies = lambda step: any(schedule.due(step).capture for schedule in schedules)
        dense.resume()

    @property
    def active(self) -> bool:
        """Whether any domain captures in this step."""
        return any(kfac.capture.active for kfac in self.preconditioners)

    def step(self) -> list[Draft]:
        """Replace all gradients. Collective. What kl-clip needs is summed over all domains: one small all-reduce.

        Returns what each domain's step computed, for :meth:`commit`.
        """
        drafts, sums = [kfac.prepare() for kfac in self.preconditioners], None
        pairs = list(zip(self.preconditioners, drafts, strict=True))
        for kfac, draft in pairs:
            kfac.precondition(draft)
        if self.everywhere:
            parts = [torch.stack(draft.local.numbers) / kfac.plan.workers for kfac, draft in pairs]
            with self.preconditioners[0].metrics.stage("relayout"):
                sums = self.channel.sum(torch.stack(parts).sum(dim=0))
        for kfac, draft in pairs:
            kfac.finish(draft, sums)
        return drafts

    def commit(self, drafts: Sequence[Draft], *, applied: bool) -> None:
        """After the user's optimizer. Collective."""
        for kfac, draft in zip(self.preconditioners, drafts, strict=True):
            kfac.commit(draft, applied=applied)

    def reset(self) -> None:
        """Start afresh: no factors, no eigenbases, step 0."""
        for kfac in self.preconditioners:
            kfac.load_state_dict({})

    def close(self) -> None:
        """Give back hooks, threads and process groups. Local, and harmless when repeated."""
        for kfac in self.preconditioners:
            kfac.close()
        if self.everywhere:
            self.channel.close()


def counters(job: Job) -> dict[str, float]:
    """Name -> value so far, of this rank unless said otherwise. Reads device scalars: call it now and then only.

    Names of experts' domains begin with "<domain>/", those of sums over all domains with "job/".

    In addition to those of :class:`~ds_kfac.metrics.Metrics`:

    - "calls_<kind>": collectives entered; "sent_bytes_<kind>", "received_bytes_<kind>": payload to and from other
      ranks, from attach on, steps that were skipped included. Kinds: factors, gradients, eigenvectors, eigenvalues,
      inverses, results, numbers, proof.
    - "captures", "captures_skipped": of factors, over all ranks; skipped are those that the adaptive rule left out.
    - "effective_rank": of A, in the mean of this rank's factors: how many directions its inputs have.
    - "attention_logits": root mean square of q . k / sqrt(width) of the head with the largest, of the attentions whose
      A and whole weights are here (:mod:`ds_kfac.model.logits`).
    - "statistics_fraction": factor elements captured, over those of capturing every factor in every step.
    """
    found = _of_domain(job.preconditioners[0]) | _of_factors(job.preconditioners[0])
    for kfac in job.preconditioners[1:]:
        own = _of_domain(kfac) | _of_factors(kfac)
        found |= {f"{kfac.target.domain.name}/{name}": value for name, value in own.items()}
    if job.everywhere:
        found |= {f"job/{name}": value for name, value in _of_channel(job.channel).items()}
    return found


def _of_domain(kfac: KFACPreconditioner) -> dict[str, float]:
    timetable, counts = kfac.curvature.timetable, kfac.metrics.counts
    found = kfac.metrics.values() | _of_channel(kfac.channel)
    found |= {"captures": float(timetable.captured), "captures_skipped": float(timetable.skipped)}
    every_step = sum(kfac.curvature.numel.values()) * counts["steps"]
    if every_step:
        found["statistics_fraction"] = counts["captured_elements"] / every_step
    return found


def _of_factors(kfac: KFACPreconditioner) -> dict[str, float]:
    """What passes over the factors, and products with the weights: not for a framework's log of every step."""
    found = {"effective_rank": _effective_rank(kfac), "attention_logits": _attention_logits(kfac)}
    return {name: value for name, value in found.items() if value is not None}


def _effective_rank(kfac: KFACPreconditioner) -> float | None:
    """(tr A)^2 / |A|_F^2, in the mean of this rank's factors that are matrices; None where there is none."""
    own = [x for key, x in kfac.curvature.factors.items() if key.endswith("/A") and x.side.block > 1]
    if not own:
        return None
    traces = torch.stack([factor.side.diagonal_of(factor.packed_P).sum() for factor in own])
    norms = frobenius([factor.packed_P for factor in own], [factor.side for factor in own])
    ranks = (traces / norms).square()[norms > 0]
    return float(ranks.mean()) if len(ranks) else None


@torch.no_grad()
def _attention_logits(kfac: KFACPreconditioner) -> float | None:
    """The largest over attentions whose A is here; None where there is none."""
    parameters, found = dict(kfac.target.model.named_parameters()), list[Tensor]()
    for heads in attentions(kfac.target.model, {layer.name: layer for layer in kfac.layers}):
        spec = kfac.curvature.of_layer.get(heads.queries.name, {}).get("A")
        factor = kfac.curvature.factors.get(spec.key) if spec else None
        if factor is not None and factor.side.block == factor.side.dim:
            A = factor.side.blocks(factor.packed_P.to(kfac.device))[0][0]
            value = rms(heads, parameters, A)
            found += [] if value is None else [value]
    return float(torch.stack(found).max()) if found else None


def _of_channel(channel: Channel) -> dict[str, float]:
    found = {f"calls_{kind}": float(calls) for kind, calls in channel.calls.items()}
    found |= {f"sent_bytes_{kind}": float(nbytes) for kind, nbytes in channel.sent.items()}
    return found | {f"received_bytes_{kind}": float(nbytes) for kind, nbytes in channel.received.items()}


def events(job: Job, samples: int) -> list[tuple[str, float, int]]:
    """The counters for DeepSpeed's monitor."""
    return [(f"Train/KFAC/{name}", value, samples) for name, value in counters(job).items()]


def selected(job: Job) -> dict[str, float]:
    """What a training framework's logs show: few numbers, of this rank; rates are of the first parameter group."""
    kfac = job.preconditioners[0]
    found = _of_domain(kfac)
    names = ("refreshes", "factor_updates", "refresh_failures", "not_finite_layers", "unpreconditioned_layers")
    shown = {f"kfac/{name}": found.get(name, 0.0) for name in names}
    lr, ratio = kfac.layout.optimizer.param_groups[0]["lr"], getattr(kfac.target.inner, "adam_ratio", 1.0)
    shown |= {f"kfac/lr_{kind}": times * float(lr) for kind, times in kfac.rule.rates(kfac.plan, ratio).items()}
    shown |= {f"kfac/{name}": value for name, value in fares(kfac).items()}
    shown["kfac/sent_bytes"] = sum(value for name, value in found.items() if name.startswith("sent_bytes_"))
    return shown | {f"kfac/{name}": found[name] for name in ("nu", "kl") if name in found}
