"""Write the running factors of a training run to the files of :mod:`ds_kfac.factors.files`, and
continue from such files."""

from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_kfac.comm.message import failing_together, merged
from ds_kfac.curvature.eigen import Eigenbasis
from ds_kfac.curvature.factor import KroneckerFactor
from ds_kfac.factors import files
from ds_kfac.factors.files import Factors, FactorsError
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner

SEEN = 100.0
"""Loaded factors count as averages over this many batches. The number is so large that the weight
of a new batch is 1 minus the decay."""


def export(
    job: Job,
    folder: Path,
    *,
    sides: str = "AG",
    dtype: torch.dtype = torch.float32,
    bases: bool = True,
) -> Path:
    """Write a run's factors, which are running averages over batches. Collective.

    In the index, "counts" has the number of batches in each average. The exported eigenbases are
    the ones in use, which were computed in the last refresh. So they are older than the factors.

    Args:
        folder: where to write; an earlier export in it is replaced.
        sides: "A", "G" or both.
        dtype: dtype of factors in the files.
        bases: whether to write eigenbases.

    Raises:
        FactorsError: on every rank, if writing failed or no factor has been computed yet.
    """
    group = job.channel.group
    rank = job.channel.rank
    headline = f"ds_kfac: export to {folder}"
    file = f"factors-{rank:05d}.safetensors"
    tensors: dict[str, Tensor] = {}
    counts: dict[str, float] = {}
    layers = {}
    with failing_together(headline, group, FactorsError):
        get_accelerator().synchronize()  # copies of offloaded factors to the host may be running
        (folder / files.INDEX).unlink(missing_ok=True)
        for kfac in job.preconditioners:
            names = {key: kfac.names[key[:-2]] + key[-2:] for key in kfac.curvature.specs}
            for layer in kfac.layers:
                specs = kfac.curvature.of_layer.get(layer.name, {})
                keys = {side: names[spec.key] for side, spec in specs.items()}
                layers[kfac.names[layer.name]] = files.described(layer, keys)
            for key, factor in kfac.curvature.factors.items():
                layer_name = key[:-2]
                side = key[-1]
                is_exported = side in sides and layer_name in kfac.saved
                if is_exported and float(factor.updates) > 0:
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
    """Return the eigenbases that this rank has to write, in a dict by their names in the files.

    A factor's eigenbasis is written by the first gradient worker of its first layer.

    Args:
        names: factor key -> its key in the files.
        sides: "A", "G" or both.
    """
    tensors: dict[str, Tensor] = {}
    for layer in kfac.worker_layers:
        is_first_worker = kfac.plan.assignment.workers[layer.name][0] == kfac.rank
        if not is_first_worker or layer.name not in kfac.saved:
            continue
        for side, spec in kfac.curvature.of_layer.get(layer.name, {}).items():
            basis = getattr(kfac.state[layer.name], side)
            is_first_layer = spec.layers[0] == layer.name
            if side in sides and is_first_layer and isinstance(basis, Eigenbasis):
                key = names[spec.key]
                for k, vectors in enumerate(basis.vectors):
                    tensors[f"{key}/vectors.{k}"] = vectors
                tensors[f"{key}/values"] = basis.values
    return tensors


def begin_from(job: Job, factors: Factors) -> None:
    """Replace a run's factors by loaded ones, and decompose them now. Collective. Call it between
    steps.

    The number of steps and the learning rates do not change. The moments of preconditioned layers
    start at zero again.

    Raises:
        FactorsError: on every rank, if a layer is missing or has another size, or if G was computed
            with another value of ``fisher``. Nothing changes in this case.
    """
    headline = f"ds_kfac: factors of {factors.folder}"
    states = []
    with failing_together(headline, job.channel.group, FactorsError):
        for kfac in job.preconditioners:
            schedule = kfac.curvature.state_dict()["schedule"]
            new = {
                "layers": {},
                "factors": {"factors": _owned_factors(kfac, factors), "schedule": schedule},
            }
            states.append({**kfac.state_dict(), **new})
    for kfac, state in zip(job.preconditioners, states, strict=True):
        kfac.load_state_dict(state, decompose=True)


def _owned_factors(kfac: KFACPreconditioner, factors: Factors) -> dict[str, KroneckerFactor]:
    """Read from the files the factors of ``kfac`` that this rank owns. Return a dict by factor key.
    Raises FactorsError if any factor in the files does not fit, even if another rank owns it."""
    fisher = kfac.config.factor.fisher
    saved_fisher = factors.header["fisher"]
    owned = {}
    for key, spec in kfac.curvature.specs.items():
        layer = kfac.names[spec.layers[0]]
        side = key[-1]
        saved_side = factors.side(layer, side)
        if saved_side != spec.side:
            text = f"{side} was saved as {saved_side}, but this model and config need {spec.side}"
            raise FactorsError(f"{layer}: {text}")
        if side == "G" and saved_fisher != fisher:
            raise FactorsError(
                f"G was computed with fisher {saved_fisher!r}, but this run uses {fisher!r}"
            )
        if kfac.curvature.owners[key] == kfac.rank:
            updates = torch.full((), SEEN, device=kfac.device, dtype=torch.float32)
            packed = factors.packed(layer, side)
            owned[key] = kfac.curvature.factor(spec.side, packed, updates)
    return owned
