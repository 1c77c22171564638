"""The running factors of a training run, to and from the files of :mod:`ds_kfac.factors.files`."""

from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_kfac.comm.message import failing_together, merged
from ds_kfac.curvature.eigen import Eigenbasis
from ds_kfac.factors import files
from ds_kfac.factors.files import Factors, FactorsError
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner

SEEN = 100.0
"""Number of batches that loaded factors count for, so that a new batch is weighted by the decay."""


def export(
    job: Job,
    folder: Path,
    *,
    sides: str = "AG",
    dtype: torch.dtype = torch.float32,
    bases: bool = True,
) -> Path:
    """Write a run's factors: running averages over batches, whose number is in "counts".

    The eigenbases are those in use, from the last refresh, and so older than the factors.
    Collective.

    Args:
        folder: for the files; an earlier export in it is replaced.
        sides: "A", "G" or both.
        dtype: dtype of factors in the files.
        bases: whether to write eigenbases.

    Raises:
        FactorsError: on every rank; writing failed, or no factor has been computed yet.
    """
    group, rank = job.channel.group, job.channel.rank
    headline = f"ds_kfac: export to {folder}"
    file = f"factors-{rank:05d}.safetensors"
    tensors, counts, layers = dict[str, Tensor](), dict[str, float](), {}
    with failing_together(headline, group, FactorsError):
        get_accelerator().synchronize()  # offloaded factors may be on their way to the host
        (folder / files.INDEX).unlink(missing_ok=True)
        for kfac in job.preconditioners:
            names = {key: kfac.names[key[:-2]] + key[-2:] for key in kfac.curvature.specs}
            for layer in kfac.layers:
                specs = kfac.curvature.of_layer.get(layer.name, {})
                keys = {side: names[spec.key] for side, spec in specs.items()}
                layers[kfac.names[layer.name]] = files.described(layer, keys)
            for key, factor in kfac.curvature.factors.items():
                if key[-1] in sides and key[:-2] in kfac.saved and float(factor.updates) > 0:
                    tensors[names[key]] = factor.packed_P.to(dtype)
                    counts[names[key]] = float(factor.updates)
            if bases:
                tensors |= _bases(kfac, names, sides)
        files.write_tensors(folder / file, tensors)
    header = {
        "steps": job.steps,
        "fisher": job.preconditioners[0].config.factor.fisher,
        "counts": merged(counts, group),
        "layers": merged(layers, group),
        "weight_map": merged(dict.fromkeys(tensors, file), group),
    }
    with failing_together(headline, group, FactorsError):
        if not header["counts"]:
            raise FactorsError("no factor has been computed yet; train a step first")
        if rank == 0:
            files.write_index(folder, header)
    return folder


def _bases(kfac: KFACPreconditioner, names: dict[str, str], sides: str) -> dict[str, Tensor]:
    """Eigenbases of the layers whose first gradient worker this rank is, by name in the files."""
    tensors = dict[str, Tensor]()
    for layer in kfac.owned:
        is_first = kfac.plan.assignment.workers[layer.name][0] == kfac.rank
        if not is_first or layer.name not in kfac.saved:
            continue
        for side, spec in kfac.curvature.of_layer.get(layer.name, {}).items():
            basis, key = getattr(kfac.state[layer.name], side), names[spec.key]
            if side in sides and spec.layers[0] == layer.name and isinstance(basis, Eigenbasis):
                tensors |= {f"{key}/vectors.{k}": x for k, x in enumerate(basis.vectors)}
                tensors[f"{key}/values"] = basis.values
    return tensors


def begin_from(job: Job, factors: Factors) -> None:
    """Continue with these factors, decomposed now, in place of the run's. Steps and rates stay;
    moments of K-FAC's layers begin at zero. Collective, between steps.

    Raises:
        FactorsError: on every rank, with nothing changed: a layer is missing or of another size, or
            G is of another fisher.
    """
    states, fisher = [], factors.header["fisher"]
    headline = f"ds_kfac: factors of {factors.folder}"
    with failing_together(headline, job.channel.group, FactorsError):
        for kfac in job.preconditioners:
            held, own = {}, kfac.config.factor.fisher
            for key, spec in kfac.curvature.specs.items():
                layer, side = kfac.names[spec.layers[0]], key[-1]
                found = factors.side(layer, side)
                if found != spec.side:
                    text = f"{side} is {found}, of this model and config {spec.side}"
                    raise FactorsError(f"{layer}: {text}")
                if side == "G" and fisher != own:
                    raise FactorsError(f"G is of fisher {fisher!r}, this run's is {own!r}")
                if kfac.curvature.eigen_workers[key] == kfac.rank:
                    seen = torch.full((), SEEN, device=kfac.device, dtype=torch.float32)
                    packed = factors.packed(layer, side)
                    held[key] = kfac.curvature.factor(spec.side, packed, seen)
            schedule = kfac.curvature.state_dict()["schedule"]
            new = {"layers": {}, "factors": {"factors": held, "schedule": schedule}}
            states.append({**kfac.state_dict(), **new})
    for kfac, state in zip(job.preconditioners, states, strict=True):
        kfac.load_state_dict(state, decompose=True)
