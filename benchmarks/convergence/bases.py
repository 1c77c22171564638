"""Models that are trained already, made by a committed seed and kept below the temporary folder."""

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

FOLDER = "ds_kfac_bases"


def made_once(name: str, settings: dict, make: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """The weights of ``make()``, from a file with a key of its settings if they were made
    before."""
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir(), FOLDER, f"{name}_{key}.pt")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(make().state_dict(), partial)
        partial.rename(path)
    return torch.load(path)
