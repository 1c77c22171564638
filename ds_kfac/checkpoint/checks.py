"""Whether a payload of plain tensors can be a factor's or a layer's: asked before it is written and after it is read,
so that nothing is found out in a later step, on one rank."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ds_kfac.curvature.forms import FACTOR_FORMS
from ds_kfac.curvature.side import Side
from ds_kfac.directions.table import moments_named

FACTOR_KEYS = {"packed", "updates", "history", "pending", "pending_how"}
LAYER_KEYS = {"terms", "A", "G"}
"""And one for each kind of moments, None except the kind that the run kept."""
HOWS = ("eigh", "cholesky", "newton", "diagonal", "failed")


def described(side: Side) -> str:
    return f"{side.kind}, {side.dim} wide"


def check_factor(payload: Any, side: Side, method: str, what: str) -> None:
    """Raise ValueError, which says where, unless it is a factor's of ``side``.

    Args:
        method: of the run that wrote it, a key of ``FACTOR_FORMS``.
        what: the factor, for the message.
    """
    _check_keys(payload, FACTOR_KEYS)
    _check_tensor(payload["packed"], (side.numel,), f"the average of factor {what} ({described(side)})")
    diagonal = side.diagonal_of(payload["packed"])
    # a second moment; version 0.1's error feedback could take a little from a zero
    if len(diagonal) and bool(diagonal.min() < -0.01 * diagonal.abs().max()):
        raise ValueError(f"the average of factor {what} has a negative diagonal")
    _check_count(payload["updates"], "updates")
    _check_kept(payload["pending"], side, method, "pending")
    if payload["pending_how"] not in (None, *HOWS):
        raise ValueError(f"pending_how is {payload['pending_how']!r}")
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


def check_layer(payload: Any, A: Side, G: Side, method: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless it is the state of a layer with these sides and a matrix of this shape."""
    kinds = moments_named()
    _check_keys(payload, LAYER_KEYS | kinds.keys())
    _check_count(payload["terms"], "terms")
    _check_kept(payload["A"], A, method, "A")
    _check_kept(payload["G"], G, method, "G")
    for name, kind in kinds.items():
        moments = payload[name]
        if moments is None:
            continue
        _check_keys(moments, {field.name for field in fields(kind)}, f" of {name}")
        for part, value in moments.items():
            if part == "updates":
                _check_count(value, f"updates of {name}", shape[:-2])
                continue
            _check_tensor(value, shape, f"{part} of {name}")
            if part == "second_OI" and bool((value < 0).any()):
                raise ValueError(f"second_OI of {name} is negative")


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


def _check_count(value: Any, what: str, shape: tuple[int, ...] = ()) -> None:
    _check_tensor(value, shape, what)
    if bool((value < 0).any()):
        raise ValueError(f"{what} is negative")


def _check_kept(kept: Any, side: Side, method: str, what: str) -> None:
    """What a form keeps of a factor, or None."""
    if kept is None:
        return
    shapes = FACTOR_FORMS[method].shapes(side)
    _check_keys(kept, set(shapes), f" of {what}")
    for name, shape in shapes.items():
        if not isinstance(shape, list):
            _check_tensor(kept[name], shape, f"the {name} of {what}")
            continue
        if not isinstance(kept[name], list) or len(kept[name]) != len(shape):
            raise ValueError(f"{what} must have the {len(shape)} blocks of {name} of a side that is {described(side)}")
        for value, of_block in zip(kept[name], shape, strict=True):
            _check_tensor(value, of_block, f"the {name} of {what}")
