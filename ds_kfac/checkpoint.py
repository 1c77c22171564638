"""K-FAC state beside DeepSpeed's checkpoint: ``<tag>/kfac/<layer>.pt``, each layer once, written by its owner.

The files do not depend on world size or ZeRO stage: whoever owns a layer after loading reads its file. They are
written before DeepSpeed writes, so that its ``latest`` never names a tag without them.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger
from torch import Tensor

from ds_kfac.agreement import failing_together
from ds_kfac.eigenbasis import Eigenbasis
from ds_kfac.factor import KroneckerFactor
from ds_kfac.layer_state import LayerState
from ds_kfac.layers.base import LayerSpec
from ds_kfac.optimizer import KFACOptimizer

FOLDER = "kfac"
HEADER = "header.json"
CLIENT_KEY = "ds_kfac"
"""Key in DeepSpeed's client_state that says a checkpoint has K-FAC state; survives ds_to_universal."""
VERSION = 1


def save(kfac: KFACOptimizer, tag_directory: Path) -> dict[str, Any]:
    """Write this rank's layers, and on rank 0 the header. Returns the header, the same on every rank.

    Every file is replaced atomically. Collective: fails on every rank if it fails on one.
    """
    folder = tag_directory / FOLDER
    header = {
        "version": VERSION,
        "steps": kfac.steps,
        "layers": [layer.name for layer in kfac.layers],
        "peak_lr": {str(group): float(lr) for group, lr in kfac.peak_lr.items()},
    }
    with failing_together(f"ds_kfac: could not save to {folder}", kfac.group):
        folder.mkdir(parents=True, exist_ok=True)
        for layer in kfac.owned:
            state = kfac.state[layer.name]
            payload = {
                "version": VERSION,
                "steps": kfac.steps,
                "A": state.A.packed_P,
                "G": state.G.packed_P,
                "updates": [state.A.updates, state.G.updates],
                "bases": _bases(state) if kfac.config.checkpoint.eigenbasis else None,
            }
            _replace(folder / _file_name(layer.name), lambda path, payload=payload: torch.save(payload, path))
        if kfac.rank == 0:
            _replace(folder / HEADER, lambda path: Path(path).write_text(json.dumps(header, indent=1)))
    return header


def load(kfac: KFACOptimizer, tag_directory: Path) -> None:
    """Restore state written by :func:`save`, at any world size and ZeRO stage. Collective.

    Layers the checkpoint does not have start empty, with a warning.

    Raises:
        ValueError: on every rank, if files are missing, from another save, or do not fit the model. Nothing is
            changed then.
    """
    folder = tag_directory / FOLDER
    states: dict[str, LayerState] = {}
    with failing_together(
        f"ds_kfac: K-FAC state in {folder} cannot be loaded; to start K-FAC afresh from this checkpoint, delete "
        "that folder",
        kfac.group,
        ValueError,
    ) as problems:
        header = json.loads((folder / HEADER).read_text())
        if header["version"] != VERSION:
            raise ValueError(f"{folder / HEADER} has version {header['version']}, this ds_kfac reads {VERSION}")
        for layer in kfac.owned:
            if layer.name in header["layers"]:
                try:
                    states[layer.name] = _load_layer(kfac, folder / _file_name(layer.name), layer, header["steps"])
                except (OSError, ValueError) as error:
                    problems.append(str(error))
    unknown = [layer.name for layer in kfac.layers if layer.name not in header["layers"]]
    if unknown and kfac.rank == 0:
        logger.warning(f"ds_kfac: {folder} has no state for {', '.join(unknown)}; these layers start empty")
    kfac.state = {layer.name: states.get(layer.name, LayerState.empty(layer, kfac.device)) for layer in kfac.owned}
    kfac.steps = header["steps"]
    kfac.peak_lr = {int(group): lr for group, lr in header["peak_lr"].items()}
    kfac.resume()


def find(tag_directory: Path) -> Path | None:
    """The tag's directory with K-FAC state: itself, or the one it was converted from by ds_to_universal."""
    source = tag_directory.with_name(tag_directory.name.removesuffix("_universal"))
    return next((path for path in (tag_directory, source) if (path / FOLDER / HEADER).is_file()), None)


def _bases(state: LayerState) -> list[Tensor] | None:
    if state.basis_A is None or state.basis_G is None:
        return None
    return [state.basis_A.vectors, state.basis_A.values, state.basis_G.vectors, state.basis_G.values]


def _load_layer(kfac: KFACOptimizer, path: Path, layer: LayerSpec, steps: int) -> LayerState:
    payload = torch.load(path, map_location=kfac.device, weights_only=True)
    if payload["steps"] != steps:
        raise ValueError(f"{path} is of step {payload['steps']}, the header of step {steps}: a save was interrupted")
    empty = LayerState.empty(layer, kfac.device)
    for side, factor in (("A", empty.A), ("G", empty.G)):
        if payload[side].shape != factor.packed_P.shape:
            raise ValueError(
                f"{path}: factor {side} has {payload[side].numel()} elements, layer {layer.name} of this model "
                f"needs {factor.packed_P.numel()}"
            )
    updates_A, updates_G = payload["updates"]
    state = LayerState(
        KroneckerFactor(layer.dim_A, payload["A"], updates_A), KroneckerFactor(layer.dim_G, payload["G"], updates_G)
    )
    return _with_bases(kfac, state, payload["bases"])


def _with_bases(kfac: KFACOptimizer, state: LayerState, bases: list[Tensor] | None) -> LayerState:
    if bases is not None:
        return LayerState(state.A, state.G, Eigenbasis(*bases[:2]), Eigenbasis(*bases[2:]))
    if float(state.A.updates) and float(state.G.updates):  # saved without bases
        return state.refreshed(method=kfac.config.eigenbasis.method)[0]
    return state


def _file_name(layer: str) -> str:
    return f"{layer or 'model'}.pt"


def _replace(path: Path, write: Any) -> None:
    """Write beside, then rename: a killed run leaves the old file or the new one, never half of one."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    os.replace(temporary, path)
