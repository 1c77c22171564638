"""The files of a checkpoint: one of each factor, with its side's running average; one of each layer."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger
from torch import Tensor

from ds_kfac.adaptive import History
from ds_kfac.eigenbasis import Eigenbasis, Refreshed
from ds_kfac.factor import KroneckerFactor
from ds_kfac.factor_spec import FactorSpec
from ds_kfac.factor_state import FactorState
from ds_kfac.inverse import DampedInverse, Kept, from_packed, packed
from ds_kfac.layer_state import LayerState
from ds_kfac.layers.base import LayerSpec
from ds_kfac.moments import AdamMoments, CorrectedEigenvalues
from ds_kfac.optimizer import KFACOptimizer
from ds_kfac.side import Side


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


def _moments(moments: AdamMoments | CorrectedEigenvalues | None) -> dict[str, Tensor] | None:
    """Copies: a layer's may be views of several layers', all of which would be saved."""
    return None if moments is None else {name: tensor.clone() for name, tensor in vars(moments).items()}


def _saved(kept: Kept | None) -> dict[str, Any] | None:
    if kept is None:
        return None
    if isinstance(kept, DampedInverse):
        return {"inverse": packed(kept)}
    return {"vectors": list(kept.vectors), "values": kept.values}


def _loaded(saved: Mapping[str, Any] | None, side: Side, method: str) -> Kept | None:
    """None also for what another method kept."""
    if saved is None or ("inverse" in saved) != (method == "inverse"):
        return None
    if method == "inverse":
        return from_packed(side, saved["inverse"])
    return Eigenbasis(tuple(saved["vectors"]), saved["values"])


def load_factor(kfac: KFACOptimizer, path: Path, spec: FactorSpec) -> tuple[FactorState, Refreshed | None]:
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
        history = History(spec.side, *payload["history"]).to(kfac.curvature.home)
    method = kfac.plan.method
    warm = _loaded(payload["basis"], spec.side, method) if kfac.plan.warm_start is not None else None
    assert not isinstance(warm, DampedInverse)
    pending = _loaded(payload["pending"], spec.side, method)
    state = FactorState(factor, history, warm, payload.get("qr_steps", 0))
    default = "cholesky" if method == "inverse" else "eigh"
    how: Any = payload.get("pending_how") or default  # files of before this was kept have only such
    return state, Refreshed(pending, how) if pending is not None else None


def load_layer(kfac: KFACOptimizer, path: Path, layer: LayerSpec) -> LayerState:
    payload = torch.load(path, map_location=kfac.device, weights_only=True)
    method = kfac.plan.method
    state = LayerState.empty(layer, kfac.device, moments=kfac.direction.moments, method=method)
    A, G = (_loaded(payload[which], side, method) for which, side in (("A", layer.A), ("G", layer.G)))
    state = replace(state, terms=payload["terms"], A=A or state.A, G=G or state.G)
    kind = kfac.direction.moments
    if kind is not None and payload[kind] is None:
        logger.warning(f"ds_kfac: {path} has no {kind} moments of {layer.name}; they start empty")
    elif kind == "adam":
        state = replace(state, adam=AdamMoments(**payload[kind]))
    elif kind == "corrected":
        state = replace(state, corrected=CorrectedEigenvalues(**payload[kind]))
    return state


def layer_file(layer: str) -> str:
    return f"{layer or 'model'}.pt"


def factor_file(key: str) -> str:
    layer, side = key[:-2], key[-1]
    return f"{layer or 'model'}.{side}.factor.pt"
