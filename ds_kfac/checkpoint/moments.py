"""AdamW's moments of what K-FAC layers become, for KFACAdamW to begin with. The first eigenbasis turns them.

The other way they begin at zero: after 25 steps moments turned back were no better in any run (docs/migrate/adamw.md).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
from torch import Tensor

from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.comm.message import failing_together
from ds_kfac.model.registry import LAYERS
from ds_kfac.step.job import Job
from ds_kfac.update.state import AdamMoments

FIRST, SECOND, STEP = "exp_avg", "exp_avg_sq", "step"
OfParameter = Callable[[str], Mapping[str, Any] | None]
"""Parameter's name -> what AdamW keeps of it; None: nothing, so it begins at zero."""


def of_universal(tag_directory: Path) -> OfParameter:
    """Of a universal checkpoint; a parameter's files are read when it is asked for."""
    folder = tag_directory / "zero"
    # stage 3 has the step here, and in no file of the parameter's
    saved = _read(folder / "optimizer_state.pt").get(OPTIMIZER_STATE_DICT) or {}
    step = next((state.get(STEP) for state in saved.get("state", {}).values()), None)

    def of(name: str) -> Mapping[str, Any] | None:
        files = {key: folder / name / f"{key}.pt" for key in (FIRST, SECOND, STEP)}
        read = {STEP: step} | {key: _read(path) for key, path in files.items() if path.is_file()}
        if len(read) < len(files) or read[STEP] is None:
            return None
        return {key: value["param"] if isinstance(value, Mapping) else value for key, value in read.items()}

    return of


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)


def take_adamws(job: Job, saved: OfParameter) -> None:
    """Let K-FAC layers begin with AdamW's moments, after a reset. Collective.

    Raises:
        CheckpointError: on every rank; a file cannot be read, or is of another parameter.
    """
    kfac = job.preconditioners[0]  # experts of other domains begin at zero
    with failing_together("ds_kfac: moments of AdamW cannot be read", job.channel.group, CheckpointError):
        for layer in kfac.owned if kfac.moments is AdamMoments else ():
            values: list[Any] = [saved(name) for name in layer.parameters]
            index, count = layer.part
            if layer.cut != (1, 1) or None in values:
                continue

            def matrix(key: str) -> Tensor:
                flats = [x[key].float().flatten().chunk(count)[index] for x in values]  # noqa: B023
                weight, bias = (*flats, None)[:2]
                kind, shape = LAYERS[layer.kind], layer.shape  # noqa: B023
                return kind.matrix(weight, bias, shape).to(kfac.device, copy=True).contiguous()

            steps = torch.full(layer.shape[:-2], float(values[0][STEP]), dtype=torch.float32, device=kfac.device)
            moments = AdamMoments(matrix(FIRST), matrix(SECOND), steps)
            kfac.state[layer.name] = replace(kfac.state[layer.name], moments=moments)
            kfac.begins.discard(layer.name)
    kfac.direction.forget()
