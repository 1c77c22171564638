"""The files of a checkpoint: one of each factor, with its side's running average; one of each layer."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_kfac.adaptive import History
from ds_kfac.checkpoint_checks import check_factor, check_layer, described, tensors_of
from ds_kfac.checkpoint_disk import read_payload, write_payload
from ds_kfac.checkpoint_names import factor_file, layer_file
from ds_kfac.eigenbasis import Eigenbasis, LayerBasis, Refreshed
from ds_kfac.factor import KroneckerFactor
from ds_kfac.factor_spec import FactorSpec
from ds_kfac.factor_state import FactorState
from ds_kfac.inverse import DampedInverse, Kept, from_packed, packed
from ds_kfac.layer_state import LayerState
from ds_kfac.layers.base import LayerSpec
from ds_kfac.moments import AdamMoments, CorrectedEigenvalues
from ds_kfac.optimizer import KFACOptimizer
from ds_kfac.side import Side

Entries = dict[str, dict[str, Any]]
"""File name -> what the header says of it."""


def factor_payload(state: FactorState, pending: Refreshed | None) -> dict[str, Any]:
    """A factor's file: plain tensors."""
    history = state.history
    norms = history.norms if history is not None else None
    return {
        "packed": state.factor.packed_P,
        "updates": state.factor.updates,
        "history": [history.last, history.before, norms if norms is None else norms.clone()]
        if history is not None
        else None,
        "basis": _saved(state.basis),
        "qr_steps": state.qr_steps,
        "pending": _saved(pending.basis) if pending is not None else None,
        "pending_how": pending.how if pending is not None else None,
    }


def layer_payload(state: LayerState, *, eigenbasis: bool) -> dict[str, Any]:
    """A layer's file: plain tensors. Moments belong to their eigenbasis, so it is saved with them in any case."""
    kept = eigenbasis or state.adam is not None or state.corrected is not None
    return {
        "terms": state.terms,
        "A": _saved(state.A) if kept else None,
        "G": _saved(state.G) if kept else None,
        "adam": _moments(state.adam),
        "corrected": _moments(state.corrected),
    }


def save_factor(folder: Path, key: str, side: Side, payload: dict[str, Any], method: str) -> Entries:
    """Check and write a factor's payload; ``key`` in global names. Returns its entry."""
    file = factor_file(key)
    try:
        check_factor(payload, side, method, key)
    except ValueError as error:
        raise ValueError(f"{key}: {error}; it is not saved") from error
    return {file: {"holds": key, **write_payload(folder / file, payload), "tensors": tensors_of(payload)}}


def save_layer(folder: Path, name: str, layer: LayerSpec, payload: dict[str, Any], method: str) -> Entries:
    """Check and write a layer's payload; ``name`` is global. Returns its entry."""
    file = layer_file(name)
    try:
        check_layer(payload, layer.A, layer.G, method)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; it is not saved") from error
    return {file: {"holds": name, **write_payload(folder / file, payload), "tensors": tensors_of(payload)}}


def load_factor(
    kfac: KFACOptimizer, folder: Path, header: Mapping[str, Any], key: str, spec: FactorSpec
) -> tuple[FactorState, Refreshed | None]:
    """A factor that the save has, and what a refresh on its way came to.

    Args:
        key: what it is called there.

    Raises:
        ValueError: it is not what was saved, or not a factor of this model and config.
    """
    path, saved = folder / factor_file(key), Side(*header["factors"][key])
    if saved != spec.side:
        raise ValueError(
            f"{path}: {saved.numel} elements ({described(saved)}), factor {spec.key} of this model and config "
            f"({described(spec.side)}) needs {spec.side.numel}"
        )
    payload = _read(path, header, key)
    try:
        check_factor(payload, spec.side, header["method"], key)
        if (payload["pending_how"] is not None) != (key in header["pending"]):
            raise ValueError("does not agree with the header on whether a refresh is on its way")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    empty, method, home = kfac.curvature.empty_of(spec.side), kfac.plan.method, kfac.curvature.home
    factor = KroneckerFactor(spec.side, payload["packed"].to(home), payload["updates"].to(kfac.device))
    history = empty.history
    if history is not None and payload["history"] is not None:
        last, before, norms = payload["history"]
        norms = norms if norms is None else norms.to(kfac.device)
        last, before = (None if value is None else value.to(home) for value in (last, before))
        history = History(spec.side, last, before, norms)
    warm = _loaded(payload["basis"], spec.side, method, kfac.device) if kfac.plan.warm_start is not None else None
    assert not isinstance(warm, DampedInverse)
    state = FactorState(factor, history, warm, payload["qr_steps"])
    if payload["pending_how"] is None:
        return state, None
    return state, Refreshed(_loaded(payload["pending"], spec.side, method, kfac.device), payload["pending_how"])


def load_layer(kfac: KFACOptimizer, folder: Path, header: Mapping[str, Any], name: str, layer: LayerSpec) -> LayerState:
    """A layer that the save has. A side that is the identity now, or was it then, keeps no eigenvectors.

    Args:
        name: what it is called there.

    Raises:
        ValueError: it is not what was saved, or not a layer of this model and config.
    """
    path = folder / layer_file(name)
    sides = {which: Side(*header["layers"][name][which]) for which in "AG"}
    for which, now in (("A", layer.A), ("G", layer.G)):
        then = sides[which]
        if then.dim != now.dim or (then.block != now.block and then.block and now.block):
            raise ValueError(
                f"{path}: side {which} of {layer.name} was {described(then)}, of this model and config it is "
                f"{described(now)}"
            )
    payload = _read(path, header, name)
    try:
        check_layer(payload, sides["A"], sides["G"], header["method"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    method, device = kfac.plan.method, kfac.device
    state = LayerState.empty(layer, device, moments=kfac.direction.moments, method=method)
    A, G = (_loaded(payload[which], sides[which], method, device) for which in "AG")
    kind = kfac.direction.moments
    if kind == "adam" and payload["adam"] is not None:
        state = replace(state, adam=AdamMoments(**_on(device, payload["adam"])))
    elif kind == "corrected" and payload["corrected"] is not None:
        state = replace(state, corrected=CorrectedEigenvalues(**_on(device, payload["corrected"])))
    state = _unrotated(state, A if not layer.A.block else None, G if not layer.G.block else None)
    return replace(
        state,
        terms=payload["terms"].to(device),
        A=state.A if not layer.A.block else A,
        G=state.G if not layer.G.block else G,
    )


def _unrotated(state: LayerState, A: Kept | None, G: Kept | None) -> LayerState:
    """With moments out of the eigenbases of sides that have become the identity; None: of sides that have not."""
    bases = [basis for basis in (A, G) if isinstance(basis, Eigenbasis) and basis.vectors]
    if not bases:
        return state
    still = Eigenbasis((), bases[0].values)
    undo = LayerBasis(*(basis if isinstance(basis, Eigenbasis) else still for basis in (G, A)))
    adam, corrected = state.adam, state.corrected
    if adam is not None:
        first, second = undo.restore(adam.first_OI), undo.squared().restore(adam.second_OI)
        adam = replace(adam, first_OI=first.contiguous(), second_OI=second.contiguous())
    if corrected is not None:
        corrected = replace(corrected, second_OI=undo.squared().restore(corrected.second_OI).contiguous())
    return replace(state, adam=adam, corrected=corrected)


def _read(path: Path, header: Mapping[str, Any], holds: str) -> Any:
    entry = header["files"].get(path.name)
    if entry is None or entry["holds"] != holds:
        raise ValueError(f"{path}: the header does not say that it holds {holds}")
    return read_payload(path, nbytes=entry["bytes"], crc32=entry["crc32"])


def _moments(moments: AdamMoments | CorrectedEigenvalues | None) -> dict[str, Tensor] | None:
    """Copies: a layer's may be views of several layers', all of which would be saved."""
    return None if moments is None else {name: tensor.clone() for name, tensor in vars(moments).items()}


def _on(device: torch.device, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _saved(kept: Kept | None) -> dict[str, Any] | None:
    if kept is None:
        return None
    if isinstance(kept, DampedInverse):
        return {"inverse": packed(kept)}
    return {"vectors": list(kept.vectors), "values": kept.values}


def _loaded(saved: Mapping[str, Any] | None, side: Side, method: str, device: torch.device) -> Kept | None:
    """Of the side as it was saved; None also for what another method kept."""
    if saved is None or ("inverse" in saved) != (method == "inverse"):
        return None
    if method == "inverse":
        return from_packed(side, saved["inverse"].to(device)) if side.block else DampedInverse()
    return Eigenbasis(tuple(vectors.to(device) for vectors in saved["vectors"]), saved["values"].to(device))
