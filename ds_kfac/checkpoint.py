"""K-FAC state beside DeepSpeed's checkpoint: ``<tag>/kfac/<save id>/``, each factor and each layer once.

``<layer>.A.factor.pt`` is written by the factor's decomposer, ``<layer>.pt`` (eigenbases, moments) by the layer's first
gradient worker, under names that are the same in all domains of a job. They do not depend on world size, ZeRO stage or
gradient worker fraction, nor on pipeline stages or the ranks of experts: whoever has the part after loading reads the
file. They are written before DeepSpeed writes, and DeepSpeed's own files name the save id: a save that is killed half
way, also one that overwrites a tag, leaves every model state with the K-FAC state that belongs to it.
"""

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from ds_kfac.agreement import failing_together
from ds_kfac.checkpoint_files import factor_file, factor_payload, layer_file, layer_payload, load_factor, load_layer
from ds_kfac.eigenbasis import Refreshed
from ds_kfac.factor_spec import key_of
from ds_kfac.factor_state import FactorState
from ds_kfac.job import Job
from ds_kfac.layer_state import LayerState
from ds_kfac.optimizer import KFACOptimizer

FOLDER = "kfac"
HEADER, LATEST = "header.json", "latest"
CLIENT_KEY = "ds_kfac"
"""Key in DeepSpeed's client_state that names the save; survives ds_to_universal, which does not copy the folder."""
VERSION = 3

Factors = dict[str, tuple[FactorState, Refreshed | None]]


def save(job: Job, tag_directory: Path) -> dict[str, Any]:
    """Write this rank's layers, and on rank 0 the header. Returns what belongs into DeepSpeed's client_state.

    Collective: fails on every rank if it fails on one.
    """
    get_accelerator().synchronize()  # offloaded factors may still be on their way to the host
    parts: list[tuple[str, list[dict[str, Any]]]] = [("", [])] * job.channel.world
    mine = uuid.uuid4().hex[:12], [_part(kfac) for kfac in job.optimizers]
    torch.distributed.all_gather_object(parts, mine, group=job.channel.group)
    kfac = job.optimizers[0]
    header = {
        "version": VERSION,
        "save_id": parts[0][0],
        "steps": job.steps,
        **_merged([part for _, own in parts for part in own]),
        "eigenbases": kfac.config.checkpoint.eigenbasis or kfac.direction.moments is not None,
        "method": kfac.plan.method,
    }
    folder = tag_directory / FOLDER / header["save_id"]
    with failing_together(f"ds_kfac: could not save to {folder}", job.channel.group):
        folder.mkdir(parents=True, exist_ok=True)
        for kfac in job.optimizers:
            _write(kfac, folder)
        if job.channel.rank == 0:
            (folder / HEADER).write_text(json.dumps(header, indent=1))
    return header


def _part(kfac: KFACOptimizer) -> dict[str, Any]:
    """What one rank knows of one of its domains, in global names."""
    curvature, names = kfac.curvature, _global_names(kfac)
    keys = {key: key_of(names[key[:-2]], key[-1]) for key in kfac.curvature.specs}
    timetable = curvature.agenda.state()
    return {
        "domain": kfac.target.domain.name,
        "layers": list(names.values()),
        "peak_lr": {str(group): float(lr) for group, lr in kfac.peak_lr.items()},
        "shared": [[names[name] for name in group] for group in kfac.groups] if kfac.groups is not None else None,
        "counts": [timetable["captured"], timetable["skipped"]],
        "clocks": {keys[key]: clock for key, clock in timetable["factors"].items()},
        "ready": [keys[key] for key in curvature.ready],
        "pending": {keys[key]: step for key, step in curvature.pending.items()},
    }


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The header's part that all ranks and domains together know."""
    groups = [group for part in parts for group in part["shared"] or ()]
    peaks = [pair for part in parts for pair in part["peak_lr"].items()]
    return {
        "layers": list(dict.fromkeys(name for part in parts for name in part["layers"])),
        "peak_lr": {group: max(lr for other, lr in peaks if other == group) for group, _ in peaks},
        "shared": None
        if all(part["shared"] is None for part in parts)
        else [list(group) for group in dict.fromkeys(map(tuple, groups))],
        "timetable": {
            "domains": {part["domain"]: part["counts"] for part in parts},
            "factors": {key: clock for part in parts for key, clock in part["clocks"].items()},
        },
        "ready": sorted({key for part in parts for key in part["ready"]}),
        "pending": dict(sorted({item for part in parts for item in part["pending"].items()})),
    }


def _write(kfac: KFACOptimizer, folder: Path) -> None:
    """The files of a domain that are this rank's to write."""
    curvature, names, domain = kfac.curvature, _global_names(kfac), kfac.target.domain
    saved = {layer.name for layer in kfac.layers if domain.saves(layer)}
    for key, factor in curvature.factors.items():
        if key[:-2] in saved:
            pending = curvature.refresher.result(key) if key in curvature.pending else None
            torch.save(factor_payload(factor, pending), folder / factor_file(key_of(names[key[:-2]], key[-1])))
    for layer in kfac.owned:
        if layer.name in saved and kfac.plan.assignment.workers[layer.name][0] == kfac.rank:
            payload = layer_payload(kfac.state[layer.name], eigenbasis=kfac.config.checkpoint.eigenbasis)
            torch.save(payload, folder / layer_file(names[layer.name]))


def finish(job: Job, tag_directory: Path, header: dict[str, Any]) -> None:
    """After DeepSpeed's save: point to the new state and remove what an overwritten tag had. No collective."""
    if job.channel.rank == 0:
        folder = tag_directory / FOLDER
        (folder / (LATEST + ".tmp")).write_text(header["save_id"])
        os.replace(folder / (LATEST + ".tmp"), folder / LATEST)
        for old in folder.iterdir():
            if old.is_dir() and old.name != header["save_id"]:
                shutil.rmtree(old, ignore_errors=True)  # only disk space is at stake


def load(job: Job, tag_directory: Path, save_id: str | None = None) -> None:
    """Restore state written by :func:`save`, whatever world size, ZeRO stage, pipeline stages or expert-parallel ranks
    wrote it. Collective.

    Layers the checkpoint does not have start empty, with a warning.

    Args:
        save_id: of the save to load; None takes the tag's last finished one.

    Raises:
        ValueError: on every rank, if files are missing or do not fit the model. Nothing is changed then.
    """
    found: list[tuple[Factors, dict[str, LayerState]]] = []
    with failing_together(
        f"ds_kfac: the K-FAC state of {tag_directory} cannot be loaded. To start K-FAC afresh from this checkpoint, "
        "load it with load_module_only=True",
        job.channel.group,
        ValueError,
    ) as problems:
        folder = _find(tag_directory, save_id)
        header = json.loads((folder / HEADER).read_text())
        if header["version"] != VERSION:
            raise ValueError(f"{folder / HEADER} has version {header['version']}, this ds_kfac reads {VERSION}")
        for kfac in job.optimizers:
            found.append(_read(kfac, folder, header, problems))
    for kfac, (factors, states) in zip(job.optimizers, found, strict=True):
        unknown = [name for name in _global_names(kfac).values() if name not in header["layers"]]
        if unknown and kfac.rank == 0:
            logger.warning(f"ds_kfac: {folder} has no state for {', '.join(unknown)}; these layers start empty")
        _restore(kfac, header, factors, states)


def _read(
    kfac: KFACOptimizer, folder: Path, header: Mapping[str, Any], problems: list[str]
) -> tuple[Factors, dict[str, LayerState]]:
    """This rank's factors and layers of a domain. What is wrong is added to ``problems``."""
    factors: Factors = {}
    states: dict[str, LayerState] = {}
    names, known = _global_names(kfac), frozenset(header["layers"])
    plan = kfac.unshared.sharing(_groups(kfac, header) or ())
    leader = {name: group[0] for group in header["shared"] or () for name in group}
    for spec in plan.assignment.factors:
        name, side = names[spec.layers[0]], spec.key[-1]
        if plan.assignment.decomposers[spec.key] == kfac.rank and name in known:
            file = folder / factor_file(key_of(leader.get(name, name) if side == "A" else name, side))
            try:
                factors[spec.key] = load_factor(kfac, file, spec)
            except (OSError, ValueError) as error:
                problems.append(str(error))
    for layer in kfac.owned:
        if names[layer.name] in known:
            try:
                states[layer.name] = load_layer(kfac, folder / layer_file(names[layer.name]), layer)
            except (OSError, ValueError) as error:
                problems.append(str(error))
    return factors, states


def _restore(
    kfac: KFACOptimizer, header: Mapping[str, Any], factors: Factors, states: Mapping[str, LayerState]
) -> None:
    """Continue from what was read. Collective in the domain."""
    kfac.reset()
    groups = _groups(kfac, header)
    if groups is not None:
        kfac.share(groups)
    curvature, names, timetable = kfac.curvature, _global_names(kfac), header["timetable"]
    # a save without them, or of another method, is decomposed anew; what was then on its way is too
    continues = header["eigenbases"] and header.get("method", "eigen") == kfac.plan.method
    pendings = header["pending"] if continues else {}
    for key, (factor, pending) in factors.items():
        curvature.factors[key] = factor
        if pending is not None and continues:
            curvature.refresher.give(key, pending)
    keys = {key: key_of(names[key[:-2]], key[-1]) for key in curvature.specs}
    curvature.pending = {key: pendings[saved] for key, saved in keys.items() if saved in pendings}
    clocks = {key: timetable["factors"][saved] for key, saved in keys.items() if saved in timetable["factors"]}
    captured, skipped = timetable["domains"].get(kfac.target.domain.name, (0, 0))
    curvature.agenda.restore({"captured": captured, "skipped": skipped, "factors": clocks})
    kfac.state |= states
    kfac.steps = header["steps"]
    kfac.peak_lr = {int(group): lr for group, lr in header["peak_lr"].items()}
    if header["eigenbases"] and not continues and kfac.rank == 0:
        saved_by = header.get("method", "eigen")
        logger.warning(
            f'ds_kfac: saved with preconditioner.method "{saved_by}", now "{kfac.plan.method}": decomposed anew'
        )
    if continues:
        ready = frozenset(header["ready"])
        curvature.ready = {key for key, saved in keys.items() if saved in ready}
        kfac.resume()
    else:
        kfac.redecompose()


def _global_names(kfac: KFACOptimizer) -> dict[str, str]:
    """Layer name -> name in checkpoints."""
    return {layer.name: kfac.target.domain.global_name(layer) for layer in kfac.layers}


def _groups(kfac: KFACOptimizer, header: Mapping[str, Any]) -> tuple[tuple[str, ...], ...] | None:
    """Groups of the saved run that this one may have too; None if they are still to be found."""
    if header["shared"] is None or not kfac.unshared.shares:
        return None
    candidates, names = kfac.unshared.sharing_candidates, _global_names(kfac)
    here = {names[name]: name for name in candidates}
    groups = (tuple(here[name] for name in group if name in here) for group in header["shared"])
    return tuple(group for group in groups if len(group) > 1 and len({candidates[name] for name in group}) == 1)


def _find(tag_directory: Path, save_id: str | None) -> Path:
    """The folder of a save in the tag, or in the tag it was converted from by ds_to_universal.

    Raises:
        ValueError: neither has it.
    """
    tags = [tag_directory, tag_directory.with_name(tag_directory.name.removesuffix("_universal"))]
    for tag in tags:
        latest = tag / FOLDER / LATEST
        name = save_id or (latest.read_text().strip() if latest.is_file() else None)
        if name and (tag / FOLDER / name / HEADER).is_file():
            return tag / FOLDER / name
    raise ValueError(f"no K-FAC state {save_id or ''} in {tag_directory / FOLDER}; it must be there for every rank")
