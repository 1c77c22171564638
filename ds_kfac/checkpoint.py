"""K-FAC state beside DeepSpeed's checkpoint: ``<tag>/kfac/<save id>/``, each factor and each layer once.

``<layer>.A.factor.pt`` is written by the factor's decomposer, ``<layer>.pt`` (eigenbases, moments) by the layer's first
gradient worker. They do not depend on world size, ZeRO stage or gradient worker fraction: whoever has the part after
loading reads the file. They are written before DeepSpeed writes, and DeepSpeed's own files name the save id: a save
that is killed half way, also one that overwrites a tag, leaves every model state with the K-FAC state that belongs to
it.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from ds_kfac.agreement import failing_together
from ds_kfac.eigenbasis import Eigenbasis, Refreshed
from ds_kfac.factor import KroneckerFactor
from ds_kfac.factor_spec import FactorSpec, key_of
from ds_kfac.factor_state import FactorState
from ds_kfac.layer_state import LayerState
from ds_kfac.layers.base import LayerSpec
from ds_kfac.moments import AdamMoments, CorrectedEigenvalues
from ds_kfac.optimizer import KFACOptimizer

FOLDER = "kfac"
HEADER, LATEST = "header.json", "latest"
CLIENT_KEY = "ds_kfac"
"""Key in DeepSpeed's client_state that names the save; survives ds_to_universal, which does not copy the folder."""
VERSION = 3


def save(kfac: KFACOptimizer, tag_directory: Path) -> dict[str, Any]:
    """Write this rank's layers, and on rank 0 the header. Returns what belongs into DeepSpeed's client_state.

    Collective: fails on every rank if it fails on one.
    """
    save_id = _same_everywhere(kfac, uuid.uuid4().hex[:12])
    folder = tag_directory / FOLDER / save_id
    curvature = kfac.curvature
    get_accelerator().synchronize()  # offloaded factors may still be on their way to the host
    header = {
        "version": VERSION,
        "save_id": save_id,
        "steps": kfac.steps,
        "layers": [layer.name for layer in kfac.layers],
        "peak_lr": {str(group): float(lr) for group, lr in kfac.peak_lr.items()},
        "shared": [list(group) for group in kfac.groups] if kfac.groups is not None else None,
        "timetable": curvature.agenda.state(),
        "ready": sorted(_union(kfac, curvature.ready)),
        "pending": dict(sorted(_union(kfac, curvature.pending.items()))),
        "eigenbases": kfac.config.checkpoint.eigenbasis or kfac.direction.moments is not None,
    }
    with failing_together(f"ds_kfac: could not save to {folder}", kfac.channel.group):
        folder.mkdir(parents=True, exist_ok=True)
        for key, factor in curvature.factors.items():
            pending = curvature.refresher.result(key) if key in curvature.pending else None
            torch.save(_factor_payload(factor, pending), folder / _factor_file(key))
        for layer in kfac.owned:
            if kfac.plan.assignment.workers[layer.name][0] == kfac.rank:
                payload = _layer_payload(kfac.state[layer.name], eigenbasis=kfac.config.checkpoint.eigenbasis)
                torch.save(payload, folder / _layer_file(layer.name))
        if kfac.rank == 0:
            (folder / HEADER).write_text(json.dumps(header, indent=1))
    return header


def finish(kfac: KFACOptimizer, tag_directory: Path, header: dict[str, Any]) -> None:
    """After DeepSpeed's save: point to the new state and remove what an overwritten tag had. No collective."""
    if kfac.rank == 0:
        folder = tag_directory / FOLDER
        (folder / (LATEST + ".tmp")).write_text(header["save_id"])
        os.replace(folder / (LATEST + ".tmp"), folder / LATEST)
        for old in folder.iterdir():
            if old.is_dir() and old.name != header["save_id"]:
                shutil.rmtree(old, ignore_errors=True)  # only disk space is at stake


def load(kfac: KFACOptimizer, tag_directory: Path, save_id: str | None = None) -> None:
    """Restore state written by :func:`save`, at any world size and ZeRO stage. Collective.

    Layers the checkpoint does not have start empty, with a warning.

    Args:
        save_id: of the save to load; None takes the tag's last finished one.

    Raises:
        ValueError: on every rank, if files are missing or do not fit the model. Nothing is changed then.
    """
    states: dict[str, LayerState] = {}
    factors: dict[str, tuple[FactorState, Refreshed | None]] = {}
    with failing_together(
        f"ds_kfac: the K-FAC state of {tag_directory} cannot be loaded. To start K-FAC afresh from this checkpoint, "
        "load it with load_module_only=True",
        kfac.channel.group,
        ValueError,
    ) as problems:
        folder = _find(tag_directory, save_id)
        header = json.loads((folder / HEADER).read_text())
        if header["version"] != VERSION:
            raise ValueError(f"{folder / HEADER} has version {header['version']}, this ds_kfac reads {VERSION}")
        groups = _groups(kfac, header)
        plan = kfac.unshared.sharing(groups or ())
        leader = {name: group[0] for group in header["shared"] or () for name in group}
        for spec in plan.assignment.factors:
            if plan.assignment.decomposers[spec.key] == kfac.rank and spec.layers[0] in header["layers"]:
                name, side = spec.layers[0], spec.key[-1]
                file = folder / _factor_file(key_of(leader.get(name, name) if side == "A" else name, side))
                try:
                    factors[spec.key] = _load_factor(kfac, file, spec)
                except (OSError, ValueError) as error:
                    problems.append(str(error))
        for layer in kfac.owned:
            if layer.name in header["layers"]:
                try:
                    states[layer.name] = _load_layer(kfac, folder / _layer_file(layer.name), layer)
                except (OSError, ValueError) as error:
                    problems.append(str(error))
    unknown = [layer.name for layer in kfac.layers if layer.name not in header["layers"]]
    if unknown and kfac.rank == 0:
        logger.warning(f"ds_kfac: {folder} has no state for {', '.join(unknown)}; these layers start empty")
    kfac.reset()
    if groups is not None:
        kfac.share(groups)
    curvature = kfac.curvature
    for key, (factor, pending) in factors.items():
        curvature.factors[key] = factor
        if pending is not None:
            curvature.refresher.give(key, pending)
    curvature.pending = {key: step for key, step in header["pending"].items() if key in curvature.specs}
    curvature.agenda.restore(header["timetable"])
    kfac.state |= states
    kfac.steps = header["steps"]
    kfac.peak_lr = {int(group): lr for group, lr in header["peak_lr"].items()}
    if header["eigenbases"]:
        curvature.ready = {key for key in header["ready"] if key in curvature.specs}
        kfac.resume()
    else:
        kfac.redecompose()


def _groups(kfac: KFACOptimizer, header: Mapping[str, Any]) -> tuple[tuple[str, ...], ...] | None:
    """Groups of the saved run that this one may have too; None if they are still to be found."""
    if header["shared"] is None or not kfac.unshared.shares:
        return None
    candidates = kfac.unshared.sharing_candidates
    groups = (tuple(name for name in group if name in candidates) for group in header["shared"])
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


def _same_everywhere(kfac: KFACOptimizer, value: str) -> str:
    values = [value]
    source = torch.distributed.get_global_rank(kfac.channel.group, 0)
    torch.distributed.broadcast_object_list(values, src=source, group=kfac.channel.group)
    return values[0]


def _union(kfac: KFACOptimizer, own: Iterable[Any]) -> set[Any]:
    everyone: list[Any] = [None] * kfac.channel.world
    torch.distributed.all_gather_object(everyone, list(own), group=kfac.channel.group)
    return {item for items in everyone for item in items}


def _factor_payload(state: FactorState, pending: Refreshed | None) -> dict[str, Any]:
    """A factor's file: plain tensors."""
    history = state.history
    return {
        "packed": state.factor.packed_P,
        "updates": state.factor.updates,
        "history": [history.last, history.before] if history is not None else None,
        "basis": _side_basis(state.basis),
        "pending": _side_basis(pending.basis) if pending is not None else None,
    }


def _layer_payload(state: LayerState, *, eigenbasis: bool) -> dict[str, Any]:
    """A layer's file: plain tensors. Moments belong to their eigenbasis, so it is saved with them in any case."""
    kept = eigenbasis or state.adam is not None or state.corrected is not None
    return {
        "terms": state.terms,
        "A": _side_basis(state.A) if kept else None,
        "G": _side_basis(state.G) if kept else None,
        "adam": vars(state.adam) if state.adam else None,
        "corrected": vars(state.corrected) if state.corrected else None,
    }


def _side_basis(basis: Eigenbasis | None) -> dict[str, Any] | None:
    return None if basis is None else {"vectors": list(basis.vectors), "values": basis.values}


def _basis(saved: Mapping[str, Any] | None) -> Eigenbasis | None:
    return None if saved is None else Eigenbasis(tuple(saved["vectors"]), saved["values"])


def _load_factor(kfac: KFACOptimizer, path: Path, spec: FactorSpec) -> tuple[FactorState, Refreshed | None]:
    payload = torch.load(path, map_location=kfac.device, weights_only=True)
    empty = kfac.curvature.empty_of(spec.side)
    if payload["packed"].shape != empty.factor.packed_P.shape:
        raise ValueError(
            f"{path}: {payload['packed'].numel()} elements, factor {spec.key} of this model and config "
            f"({spec.side.kind}, {spec.side.dim} wide) needs {empty.factor.packed_P.numel()}"
        )
    factor = KroneckerFactor(spec.side, payload["packed"], payload["updates"]).to(kfac.curvature.home)
    history = empty.history
    if history is not None and payload["history"] is not None:
        history = replace(history, last=payload["history"][0], before=payload["history"][1]).to(kfac.curvature.home)
    warm = _basis(payload["basis"]) if kfac.plan.warm_start is not None else None
    pending = _basis(payload["pending"])
    return FactorState(factor, history, warm), Refreshed(pending, "eigh") if pending is not None else None


def _load_layer(kfac: KFACOptimizer, path: Path, layer: LayerSpec) -> LayerState:
    payload = torch.load(path, map_location=kfac.device, weights_only=True)
    state = LayerState.empty(layer, kfac.device, moments=kfac.direction.moments)
    state = replace(state, terms=payload["terms"], A=_basis(payload["A"]) or state.A, G=_basis(payload["G"]) or state.G)
    kind = kfac.direction.moments
    if kind is not None and payload[kind] is None:
        logger.warning(f"ds_kfac: {path} has no {kind} moments of {layer.name}; they start empty")
    elif kind == "adam":
        state = replace(state, adam=AdamMoments(**payload[kind]))
    elif kind == "corrected":
        state = replace(state, corrected=CorrectedEigenvalues(**payload[kind]))
    return state


def _layer_file(layer: str) -> str:
    return f"{layer or 'model'}.pt"


def _factor_file(key: str) -> str:
    layer, side = key[:-2], key[-1]
    return f"{layer or 'model'}.{side}.factor.pt"
