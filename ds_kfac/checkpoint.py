"""K-FAC state beside DeepSpeed's checkpoint: ``<tag>/kfac/<save id>/<layer>.pt``, each layer once, by its owner.

The files do not depend on world size or ZeRO stage: whoever owns a layer after loading reads its file. They are
written before DeepSpeed writes, and DeepSpeed's own files name the save id: a save that is killed half way, also one
that overwrites a tag, leaves every model state with the K-FAC state that belongs to it.
"""

import json
import os
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger

from ds_kfac.agreement import failing_together
from ds_kfac.eigenbasis import Eigenbasis, LayerBasis
from ds_kfac.factor import KroneckerFactor
from ds_kfac.layer_state import LayerState, decomposable
from ds_kfac.layers.base import LayerSpec
from ds_kfac.moments import AdamMoments, CorrectedEigenvalues
from ds_kfac.optimizer import KFACOptimizer

FOLDER = "kfac"
HEADER, LATEST = "header.json", "latest"
CLIENT_KEY = "ds_kfac"
"""Key in DeepSpeed's client_state that names the save; survives ds_to_universal, which does not copy the folder."""
VERSION = 2


def save(kfac: KFACOptimizer, tag_directory: Path) -> dict[str, Any]:
    """Write this rank's layers, and on rank 0 the header. Returns what belongs into DeepSpeed's client_state.

    Collective: fails on every rank if it fails on one.
    """
    save_id = _same_everywhere(kfac, uuid.uuid4().hex[:12])
    folder = tag_directory / FOLDER / save_id
    header = {
        "version": VERSION,
        "save_id": save_id,
        "steps": kfac.steps,
        "layers": [layer.name for layer in kfac.layers],
        "peak_lr": {str(group): float(lr) for group, lr in kfac.peak_lr.items()},
    }
    with failing_together(f"ds_kfac: could not save to {folder}", kfac.group):
        folder.mkdir(parents=True, exist_ok=True)
        for layer in kfac.owned:
            state = kfac.state[layer.name]
            payload = _payload(state, eigenbasis=kfac.config.checkpoint.eigenbasis)
            torch.save(payload, folder / _file_name(layer.name))
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
    with failing_together(
        f"ds_kfac: the K-FAC state of {tag_directory} cannot be loaded. To start K-FAC afresh from this checkpoint, "
        "load it with load_module_only=True",
        kfac.group,
        ValueError,
    ) as problems:
        folder = _find(tag_directory, save_id)
        header = json.loads((folder / HEADER).read_text())
        if header["version"] != VERSION:
            raise ValueError(f"{folder / HEADER} has version {header['version']}, this ds_kfac reads {VERSION}")
        for layer in kfac.owned:
            if layer.name in header["layers"]:
                try:
                    states[layer.name] = _load_layer(kfac, folder / _file_name(layer.name), layer)
                except (OSError, ValueError) as error:
                    problems.append(str(error))
    unknown = [layer.name for layer in kfac.layers if layer.name not in header["layers"]]
    if unknown and kfac.rank == 0:
        logger.warning(f"ds_kfac: {folder} has no state for {', '.join(unknown)}; these layers start empty")
    kfac.reset()
    kfac.state |= states
    kfac.steps = header["steps"]
    kfac.peak_lr = {int(group): lr for group, lr in header["peak_lr"].items()}
    kfac.resume()


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
    source = torch.distributed.get_global_rank(kfac.group, 0)
    torch.distributed.broadcast_object_list(values, src=source, group=kfac.group)
    return values[0]


def _payload(state: LayerState, *, eigenbasis: bool) -> dict[str, Any]:
    """A layer's file: plain tensors. Moments belong to their eigenbasis, so it is saved with them in any case."""
    moments = state.adam or state.corrected
    return {
        "A": state.A.packed_P,
        "G": state.G.packed_P,
        "updates": [state.A.updates, state.G.updates],
        "terms": state.terms,
        "bases": _bases(state.basis) if state.basis and (eigenbasis or moments is not None) else None,
        "adam": vars(state.adam) if state.adam else None,
        "corrected": vars(state.corrected) if state.corrected else None,
    }


def _bases(basis: LayerBasis) -> list[dict[str, Any]]:
    return [{"vectors": list(side.vectors), "values": side.values} for side in (basis.A, basis.G)]


def _load_layer(kfac: KFACOptimizer, path: Path, layer: LayerSpec) -> LayerState:
    payload = torch.load(path, map_location=kfac.device, weights_only=True)
    empty = LayerState.empty(layer, kfac.device, moments=kfac.direction.moments)
    for side, factor in (("A", empty.A), ("G", empty.G)):
        if payload[side].shape != factor.packed_P.shape:
            raise ValueError(
                f"{path}: factor {side} has {payload[side].numel()} elements, layer {layer.name} of this model and "
                f"config ({factor.side.kind}, {factor.side.dim} wide) needs {factor.packed_P.numel()}"
            )
    updates_A, updates_G = payload["updates"]
    state = replace(
        empty,
        A=KroneckerFactor(layer.A, payload["A"], updates_A),
        G=KroneckerFactor(layer.G, payload["G"], updates_G),
        terms=payload["terms"],
    )
    state = _with_basis(kfac, state, payload["bases"])
    kind = kfac.direction.moments
    if kind is not None and payload[kind] is None:
        logger.warning(f"ds_kfac: {path} has no {kind} moments of {layer.name}; they start empty")
    elif kind == "adam":
        state = replace(state, adam=AdamMoments(**payload[kind]))
    elif kind == "corrected":
        state = replace(state, corrected=CorrectedEigenvalues(**payload[kind]))
    return state


def _with_basis(kfac: KFACOptimizer, state: LayerState, bases: list[dict[str, Any]] | None) -> LayerState:
    if bases is not None:
        A, G = (Eigenbasis(tuple(side["vectors"]), side["values"]) for side in bases)
        return replace(state, basis=LayerBasis(G, A))
    if decomposable({"": state}):  # saved without bases
        return state.refreshed(method=kfac.config.eigenbasis.method)[0]
    return state


def _file_name(layer: str) -> str:
    return f"{layer or 'model'}.pt"
