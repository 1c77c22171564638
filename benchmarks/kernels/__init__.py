"""Makes the ops importable where there is no DeepSpeed, which the package's root needs."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

if "ds_kfac" not in sys.modules and importlib.util.find_spec("deepspeed") is None:
    sys.modules["ds_kfac"] = ModuleType("ds_kfac")
    sys.modules["ds_kfac"].__path__ = [str(Path(__file__).resolve().parents[2] / "ds_kfac")]
