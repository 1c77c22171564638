"""Read universal checkpoints: AdamW's state by parameter name, and the weights and buffers that
DeepSpeed does not load from them."""

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
"""Function from a parameter's name to the parameter's values in a checkpoint: fp32 weight, AdamW's
moments and step. It returns None if the checkpoint has no values of the parameter."""


def optimizer_state(folder: Path) -> Mapping[str, Any] | None:
    """Return a universal checkpoint's optimizer-wide state, which does not include the state of
    single parameters. Return None if there is no such file."""
    return _read(folder / "zero" / "optimizer_state.pt")


def adam_values(folder: Path) -> Values:
    """Return a function that reads a parameter's AdamW moments and step from a universal
    checkpoint."""
    # stage 3 saves the step here, and not in the parameter's folder
    inner = (optimizer_state(folder) or {}).get(OPTIMIZER_STATE_DICT) or {}
    common_step = next((state.get(STEP) for state in inner.get("state", {}).values()), None)

    def values(name: str) -> Mapping[str, Any] | None:
        state = {}
        for key in (FIRST, SECOND, STEP):
            content = _read(folder / "zero" / name / f"{key}.pt")
            state[key] = content["param"] if isinstance(content, Mapping) else content
        if state[STEP] is None:
            state[STEP] = common_step
        is_complete = all(value is not None for value in state.values())
        return state if is_complete else None

    return values


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False) if path.is_file() else None


@torch.no_grad()
def load_untrained(engine: Any, folder: Path) -> None:
    """Load frozen weights and buffers from a universal checkpoint. Collective."""
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
    not_loaded = []
    for name, tensor in (frozen | buffers).items():
        shape = getattr(tensor, "ds_shape", tensor.shape)
        if name not in saved or saved[name].shape != shape:
            not_loaded.append(name)
            continue
        with deepspeed.zero.GatheredParameters([tensor] if name in frozen else [], modifier_rank=0):
            tensor.copy_(saved[name])
    if not_loaded:
        more = " .." if len(not_loaded) > 5 else ""
        logger.warning(
            "ds_kfac: WARNING: these frozen weights and buffers were not loaded from the "
            "universal checkpoint and keep the values that they had before: "
            f"{', '.join(sorted(not_loaded)[:5])}{more}"
        )


def _saved_values(folder: Path) -> dict[str, Tensor]:
    """Return a dict from the name of each saved buffer or frozen weight to its value. At stage 3
    each rank has saved a part of each weight."""
    paths_by_rank = {
        int(path.name.split("_")[3]): path
        for path in folder.glob("zero_pp_rank_*_mp_rank_00_model_states.pt")
    }
    paths = [paths_by_rank[rank] for rank in sorted(paths_by_rank)]
    is_stage_3 = bool(paths)
    if not is_stage_3:
        paths = [folder / "mp_rank_00_model_states.pt"]
    parts = [
        torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        for path in paths
        if path.is_file()
    ]
    if not parts:
        return {}
    values = dict(parts[0]["module"])
    frozen_shapes = parts[0].get("frozen_param_shapes") or {}
    if is_stage_3:
        for name, shape in frozen_shapes.items():
            flat = torch.cat([part["frozen_param_fragments"][name].flatten() for part in parts])
            values[name] = flat[: shape.numel()].view(shape)
    return values
