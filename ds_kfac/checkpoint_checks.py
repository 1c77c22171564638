"""Whether a payload of plain tensors can be a factor's or a layer's: asked before it is written and after it is read,
so that nothing is found out in a later step, on one rank."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ds_kfac.side import Side

FACTOR_KEYS = {"packed", "updates", "history", "basis", "qr_steps", "pending", "pending_how"}
LAYER_KEYS = {"terms", "A", "G", "adam", "corrected"}
HOWS = ("kept", "values", "qr", "eigh", "cholesky", "diagonal", "failed")


def described(side: Side) -> str:
    return f"{side.kind}, {side.dim} wide"


def check_factor(payload: Any, side: Side, method: str, what: str) -> None:
    """Raise ValueError, which says where, unless it is a factor's of ``side``.

    Args:
        method: of the run that wrote it, "eigen" or "inverse".
        what: the factor, for the message.
    """
    _check_keys(payload, FACTOR_KEYS)
    _check_tensor(payload["packed"], (side.numel,), f"the average of factor {what} ({described(side)})")
    diagonal = side._diagonal(payload["packed"])
    # a second moment; rounding on the wire, with error feedback, may take a little from a zero
    if len(diagonal) and bool(diagonal.min() < -0.01 * diagonal.abs().max()):
        raise ValueError(f"the average of factor {what} has a negative diagonal")
    _check_count(payload["updates"], "updates")
    _check_kept(payload["basis"], side, "eigen", "basis")
    _check_kept(payload["pending"], side, method, "pending")
    if payload["pending_how"] not in (None, *HOWS):
        raise ValueError(f"pending_how is {payload['pending_how']!r}")
    if not isinstance(payload["qr_steps"], int) or payload["qr_steps"] < 0:
        raise ValueError(f"qr_steps is {payload['qr_steps']!r}")
    history = payload["history"]
    if history is None:
        return
    if not isinstance(history, list) or len(history) != 3:
        raise ValueError("history is not [last, before, norms]")
    for value in history[:2]:
        if value is not None:
            _check_tensor(value, (side.numel,), "a value of history")
    if history[2] is not None:
        _check_tensor(history[2], (2,), "the norms of history", finite=False)  # NaN: no value to compare with


def check_layer(payload: Any, A: Side, G: Side, method: str) -> None:
    """Raise ValueError unless it is the state of a layer with these sides."""
    _check_keys(payload, LAYER_KEYS)
    _check_count(payload["terms"], "terms")
    _check_kept(payload["A"], A, method, "A")
    _check_kept(payload["G"], G, method, "G")
    for kind, names in (("adam", {"first_OI", "second_OI", "updates"}), ("corrected", {"second_OI", "updates"})):
        moments = payload[kind]
        if moments is None:
            continue
        _check_keys(moments, names, f" of {kind}")
        for name in names - {"updates"}:
            _check_tensor(moments[name], (G.dim, A.dim), f"{name} of {kind}")
        if bool((moments["second_OI"] < 0).any()):
            raise ValueError(f"second_OI of {kind} is negative")
        _check_count(moments["updates"], f"updates of {kind}")


def tensors_of(payload: Any, path: str = "") -> dict[str, str]:
    """Path in the payload -> dtype and shape of every tensor in it, for people."""
    if isinstance(payload, Tensor):
        return {path: f"{str(payload.dtype).removeprefix('torch.')} {list(payload.shape)}"}
    items: Any = ()
    if isinstance(payload, Mapping):
        items = payload.items()
    elif isinstance(payload, (list, tuple)):
        items = enumerate(payload)
    found: dict[str, str] = {}
    for key, value in items:
        found |= tensors_of(value, f"{path}.{key}" if path else str(key))
    return found


def _check_keys(payload: Any, keys: set[str], of: str = "") -> None:
    if not isinstance(payload, dict):
        raise ValueError(f"is {type(payload).__name__}, not a table of {sorted(keys)}{of}")
    if payload.keys() != keys:
        raise ValueError(f"has {sorted(map(str, payload))}, needs {sorted(keys)}{of}")


def _check_tensor(value: Any, shape: tuple[int, ...], what: str, *, finite: bool = True) -> None:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        raise ValueError(f"{what} is {type(value).__name__}, not a dense tensor")
    if value.dtype is not torch.float32 or tuple(value.shape) != shape:
        raise ValueError(f"{what} is {value.dtype} {list(value.shape)}, needs torch.float32 {list(shape)}")
    if finite and not bool(torch.isfinite(value).all()):
        raise ValueError(f"{what} is not finite")


def _check_count(value: Any, what: str) -> None:
    _check_tensor(value, (), what)
    if bool(value < 0):
        raise ValueError(f"{what} is negative")


def _check_kept(kept: Any, side: Side, method: str, what: str) -> None:
    """An eigenbasis or inverse, or None."""
    if kept is None:
        return
    if method == "inverse":
        _check_keys(kept, {"inverse"}, f" of {what}")
        _check_tensor(kept["inverse"], (side.numel,), f"the inverse {what} ({described(side)})")
        return
    _check_keys(kept, {"vectors", "values"}, f" of {what}")
    _check_tensor(kept["values"], (side.dim,), f"the values of {what}")
    shapes = [(count, width, width) for count, width in side.groups] if side.block > 1 else []
    if not isinstance(kept["vectors"], list) or len(kept["vectors"]) != len(shapes):
        raise ValueError(f"{what} has not the {len(shapes)} blocks of vectors of a side that is {described(side)}")
    for value, shape in zip(kept["vectors"], shapes, strict=True):
        _check_tensor(value, shape, f"the vectors of {what}")
