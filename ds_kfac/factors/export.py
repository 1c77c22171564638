"""The running factors of a training run, to and from the files of :mod:`ds_kfac.factors.files`."""

from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_kfac.comm.message import failing_together, merged
from ds_kfac.curvature.eigen import Eigenbasis
from ds_kfac.factors.files import INDEX, Factors, FactorsError, described, write_index, write_shard
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner


def export(
    job: Job, folder: Path, *, sides: str = "AG", dtype: torch.dtype = torch.float32, bases: bool = True
) -> Path:
    """Write a run's factors: running averages over batches, whose number is in "counts". The eigenbases are those in
    use, from the last refresh, and so older than the factors. Collective.

    Args:
        folder: for the files; an earlier export in it is replaced.
        sides: "A", "G" or both.
        dtype: dtype of factors in the files.
        bases: whether to write eigenbases.

    Raises:
        FactorsError: on every rank; writing failed, or no factor has been computed yet.
    """
    group, tensors, counts, layers = job.channel.group, dict[str, Tensor](), dict[str, float](), {}
    shard = f"factors-{job.channel.rank:05d}.safetensors"
    with failing_together(f"ds_kfac: export to {folder}", group, FactorsError):
        get_accelerator().synchronize()  # offloaded factors may be on their way to the host
        (folder / INDEX).unlink(missing_ok=True)
        for kfac in job.preconditioners:
            keys = {key: kfac.names[key[:-2]] + key[-2:] for key in kfac.curvature.specs}  # local -> global
            for layer in kfac.layers:
                specs = kfac.curvature.of_layer.get(layer.name, {})
                layers[kfac.names[layer.name]] = described(layer, {x: keys[spec.key] for x, spec in specs.items()})
            for key, factor in kfac.curvature.factors.items():
                if key[-1] in sides and key[:-2] in kfac.saved and float(factor.updates) > 0:
                    tensors[keys[key]] = factor.packed_P.to(dtype)
                    counts[keys[key]] = float(factor.updates)
            if bases:
                tensors |= _bases(kfac, keys, sides)
    tables: dict[str, dict[str, Any]] = {
        "counts": counts,
        "layers": layers,
        "weight_map": dict.fromkeys(tensors, shard),
    }
    whole = {name: merged(table, group) for name, table in tables.items()}
    with failing_together(f"ds_kfac: export to {folder}", group, FactorsError):
        if not whole["counts"]:
            raise FactorsError("no factor has been computed yet; train a step first")
        written = write_shard(folder / shard, tensors)
    shards = merged({shard: written}, group)
    with failing_together(f"ds_kfac: export to {folder}", group, FactorsError):
        if job.channel.rank == 0:
            fisher = job.preconditioners[0].config.factor.fisher
            write_index(folder, {"steps": job.steps, "fisher": fisher, "settings": {}, "shards": shards, **whole})
    return folder


def _bases(kfac: KFACPreconditioner, keys: dict[str, str], sides: str) -> dict[str, Tensor]:
    """Eigenbases of the layers whose first gradient worker this rank is, by name in the files."""
    tensors = dict[str, Tensor]()
    for layer in kfac.owned:
        first = kfac.plan.assignment.workers[layer.name][0] == kfac.rank and layer.name in kfac.saved
        for side, spec in kfac.curvature.of_layer.get(layer.name, {}).items() if first else ():
            basis = getattr(kfac.state[layer.name], side)
            if side in sides and spec.layers[0] == layer.name and isinstance(basis, Eigenbasis):
                tensors |= {f"{keys[spec.key]}/vectors.{k}": x for k, x in enumerate(basis.vectors)}
                tensors[f"{keys[spec.key]}/values"] = basis.values
    return tensors


SEEN = 100.0
"""Number of batches that loaded factors count for: a new batch is weighted by the decay, not like the first one."""


def begin_from(job: Job, factors: Factors) -> None:
    """Continue with these factors, decomposed now, in place of the run's. Steps and rates stay; moments of K-FAC's
    layers begin at zero. Collective, between steps.

    Raises:
        FactorsError: on every rank, with nothing changed: a layer is missing or of another size, or G is of another
            fisher.
    """
    states, fisher = [], factors.header["fisher"]
    headline = f"ds_kfac: factors of {factors.folder}"
    with failing_together(headline, job.channel.group, FactorsError):
        for kfac in job.preconditioners:
            held = {}
            for key, spec in kfac.curvature.specs.items():
                layer, side = kfac.names[spec.layers[0]], key[-1]
                if (found := factors.side(layer, side)) != spec.side:
                    raise FactorsError(f"{layer}: {side} is {found}, of this model and config {spec.side}")
                if side == "G" and fisher != kfac.config.factor.fisher:
                    raise FactorsError(f"G is of fisher {fisher!r}, this run's is {kfac.config.factor.fisher!r}")
                if kfac.curvature.eigen_workers[key] == kfac.rank:
                    seen = torch.full((), SEEN, device=kfac.device, dtype=torch.float32)
                    held[key] = kfac.curvature.factor(spec.side, factors.packed(layer, side), seen)
            schedule = kfac.curvature.state_dict()["schedule"]
            states.append({**kfac.state_dict(), "layers": {}, "factors": {"factors": held, "schedule": schedule}})
    for kfac, state in zip(job.preconditioners, states, strict=True):
        kfac.load_state_dict(state, decompose=True)
