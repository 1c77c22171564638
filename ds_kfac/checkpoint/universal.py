"""Universal checkpoints: AdamW's state in them by parameter, and what DeepSpeed does not load of
them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
from torch import Tensor

from ds_kfac.log import logger

FIRST, SECOND, STEP = "exp_avg", "exp_avg_sq", "step"
Values = Callable[[str], Mapping[str, Any] | None]
"""Parameter name -> AdamW's state of it, as far as it is saved."""


def optimizer_state(folder: Path) -> Mapping[str, Any] | None:
    """Return what a universal checkpoint has of the optimizer beside its parameters; None if there
    is no such file."""
    return _read(folder / "zero" / "optimizer_state.pt")


def adam_values(folder: Path) -> Values:
    """Return what a universal checkpoint has of each parameter. Files are read when they are asked
    for."""
    # stage 3 has the step here, and in no file of the parameter's
    inner = (optimizer_state(folder) or {}).get(OPTIMIZER_STATE_DICT) or {}
    step = next((state.get(STEP) for state in inner.get("state", {}).values()), None)

    def values(name: str) -> Mapping[str, Any] | None:
        read = {key: _read(folder / "zero" / name / f"{key}.pt") for key in (FIRST, SECOND, STEP)}
        found = {
            key: value["param"] if isinstance(value, Mapping) else value
            for key, value in read.items()
        }
        if found[STEP] is None:
            found[STEP] = step
        complete = all(value is not None for value in found.values())
        return found if complete else None

    return values


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False) if path.is_file() else None


@torch.no_grad()
def load_untrained(engine: Any, folder: Path) -> None:
    """Load frozen weights and buffers. Collective."""
    frozen = {
        name: parameter
        for name, parameter in engine.module.named_parameters()
        if not parameter.requires_grad
    }
    in_checkpoints = engine.module.state_dict().keys()
    buffers = {
        name: buffer for name, buffer in engine.module.named_buffers() if name in in_checkpoints
    }
    if not frozen and not buffers:
        return
    saved = {} if engine.mpu is not None else _saved_values(folder)
    left = []
    for name, tensor in (frozen | buffers).items():
        if name not in saved or saved[name].shape != getattr(tensor, "ds_shape", tensor.shape):
            left.append(name)
            continue
        with deepspeed.zero.GatheredParameters([tensor] if name in frozen else [], modifier_rank=0):
            tensor.copy_(saved[name])
    if left:
        logger.warning(
            "ds_kfac: WARNING: frozen weights and buffers that a universal checkpoint does not "
            "load stay as this model "
            f"has them: {', '.join(sorted(left)[:5])}{' ..' if len(left) > 5 else ''}"
        )


def _saved_values(folder: Path) -> dict[str, Tensor]:
    """Name -> value of frozen weights and buffers. At stage 3 each rank has saved a part of each
    weight."""
    ranks = {
        int(path.name.split("_")[3]): path
        for path in folder.glob("zero_pp_rank_*_mp_rank_00_model_states.pt")
    }
    paths = [ranks[rank] for rank in sorted(ranks)] or [folder / "mp_rank_00_model_states.pt"]
    parts = [
        torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        for path in paths
        if path.is_file()
    ]
    if not parts:
        return {}
    values = dict(parts[0]["module"])
    for name, shape in (parts[0].get("frozen_param_shapes") or {}).items() if ranks else ():
        flat = torch.cat([part["frozen_param_fragments"][name].flatten() for part in parts])
        values[name] = flat[: shape.numel()].view(shape)
    return values
