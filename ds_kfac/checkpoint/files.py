"""The files of a checkpoint: one of each factor, with its side's running average; one of each layer."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_kfac.assignment.factor_spec import FactorSpec
from ds_kfac.checkpoint.checks import check_factor, check_layer, described, tensors_of
from ds_kfac.checkpoint.disk import read_payload, write_payload
from ds_kfac.checkpoint.names import factor_file, layer_file
from ds_kfac.curvature.eigen import Refreshed
from ds_kfac.curvature.factor import KroneckerFactor
from ds_kfac.curvature.forms import FACTOR_FORMS, FactorForm, Kept
from ds_kfac.curvature.history import History
from ds_kfac.curvature.side import Side
from ds_kfac.directions.table import moments_named
from ds_kfac.model.layers.base import LayerSpec
from ds_kfac.step.factor_state import FactorState
from ds_kfac.step.preconditioner import KFACPreconditioner
from ds_kfac.update.layer_state import LayerState
from ds_kfac.update.moments import Moments

Entries = dict[str, dict[str, Any]]
"""File name -> what the header says of it."""


def factor_payload(state: FactorState, pending: Refreshed | None, form: FactorForm) -> dict[str, Any]:
    """A factor's file: plain tensors."""
    history = state.history
    norms = history.norms if history is not None else None
    return {
        "packed": state.factor.packed_P,
        "updates": state.factor.updates,
        "history": [history.last, history.before, norms if norms is None else norms.clone()]
        if history is not None
        else None,
        "pending": _saved(pending.basis, form) if pending is not None else None,
        "pending_how": pending.how if pending is not None else None,
    }


def layer_payload(state: LayerState, *, eigenbasis: bool) -> dict[str, Any]:
    """A layer's file: plain tensors. Moments belong to their eigenbasis, so it is saved with them in any case."""
    kept, own = eigenbasis or state.moments is not None, state.settled().moments
    return {
        "terms": state.terms,
        "A": _saved(state.A, state.form) if kept else None,
        "G": _saved(state.G, state.form) if kept else None,
        # copies: a layer's may be views of several layers', all of which would be saved
        **{name: None if own is None or own.NAME != name else _cloned(own) for name in moments_named()},
    }


def save_factor(folder: Path, key: str, side: Side, payload: dict[str, Any], method: str) -> Entries:
    """Check and write a factor's payload; ``key`` in global names. Returns its entry."""
    return _save(folder / factor_file(key), key, payload, partial(check_factor, side=side, method=method, what=key))


def save_layer(folder: Path, name: str, layer: LayerSpec, payload: dict[str, Any], method: str) -> Entries:
    """Check and write a layer's payload; ``name`` is global. Returns its entry."""
    check = partial(check_layer, A=layer.A, G=layer.G, method=method, shape=layer.shape)
    return _save(folder / layer_file(name), name, payload, check)


def _save(path: Path, holds: str, payload: dict[str, Any], check: Callable[[Any], None]) -> Entries:
    try:
        check(payload)
    except ValueError as error:
        raise ValueError(f"{holds}: {error}; it is not saved") from error
    return {path.name: {"holds": holds, **write_payload(path, payload), "tensors": tensors_of(payload)}}


def load_factor(
    kfac: KFACPreconditioner, folder: Path, header: Mapping[str, Any], key: str, spec: FactorSpec
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
            raise ValueError("disagrees with the header on whether a refresh was in progress")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    empty, form, home = kfac.curvature.empty_of(spec.side), kfac.plan.form, kfac.curvature.home
    factor = KroneckerFactor(spec.side, payload["packed"].to(home), payload["updates"].to(kfac.device))
    history = empty.history
    if history is not None and payload["history"] is not None:
        last, before, norms = payload["history"]
        norms = norms if norms is None else norms.to(kfac.device)
        last, before = (None if value is None else value.to(home) for value in (last, before))
        history = History(spec.side, last, before, norms)
    state = FactorState(factor, history)
    if payload["pending_how"] is None:
        return state, None
    return state, Refreshed(_loaded(payload["pending"], spec.side, form, kfac.device), payload["pending_how"])


def load_layer(
    kfac: KFACPreconditioner, folder: Path, header: Mapping[str, Any], name: str, layer: LayerSpec
) -> LayerState:
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
        check_layer(payload, sides["A"], sides["G"], header["method"], layer.shape)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    device = kfac.device
    kind, form = kfac.moments, kfac.plan.form
    state = LayerState.empty(layer, device, moments=kind, form=form)
    saved = FACTOR_FORMS[header["method"]]
    kept = {which: _loaded(payload[which], sides[which], saved, device) for which in "AG"}
    A, G = (kept[which] if saved is form else None for which in "AG")
    if kind is not None and payload[kind.NAME] is not None:
        state = replace(state, moments=kind(**_on(device, payload[kind.NAME])))
    # moments leave the eigenbases that are not kept
    state = state.without(
        A=kept["A"] if form is not saved or not layer.A.block else None,
        G=kept["G"] if form is not saved or not layer.G.block else None,
    )
    return replace(
        state,
        terms=payload["terms"].to(device),
        A=state.A if not layer.A.block else A,
        G=state.G if not layer.G.block else G,
    )


def _read(path: Path, header: Mapping[str, Any], holds: str) -> Any:
    entry = header["files"].get(path.name)
    if entry is None or entry["holds"] != holds:
        raise ValueError(f"{path}: the header does not say that it holds {holds}")
    return read_payload(path, nbytes=entry["bytes"], crc32=entry["crc32"])


def _cloned(moments: Moments) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in vars(moments).items()}


def _on(device: torch.device, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _saved(kept: Kept | None, form: FactorForm) -> dict[str, Any] | None:
    return None if kept is None else form.save(kept)


def _loaded(saved: Mapping[str, Any] | None, side: Side, form: FactorForm, device: torch.device) -> Kept | None:
    """Of the side as it was saved; None also for what another form kept."""
    if saved is None or saved.keys() != form.shapes(side).keys():
        return None
    return form.load(side, saved, device)
