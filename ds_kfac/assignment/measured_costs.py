"""Rates of a device from a file that ``python -m benchmarks.kernels.costs`` has written, in place of builtin ones.

The file is JSON: an object of fields of :class:`~ds_kfac.assignment.cost_model.CostModel`, tables as lists of
[size, value]; "machine" is for people. What it lacks stays builtin, and the estimator says that it is assumed.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_kfac.assignment.cost_model import CostModel, Table

TABLES = ("eigh_seconds", "cholesky_seconds", "product_flops")
RATES = ("gemm_flops", "syrk_flops", "copy_bytes", "call_seconds", "qr_of_eigh")
NUMBERS = (*RATES, "link_bytes", "link_seconds", "node_bytes")


def measured(costs: CostModel, path: str) -> CostModel:
    """``costs`` with what the file has.

    Raises:
        ValueError: no such file, or it holds something else.
    """
    try:
        found = json.loads(Path(path).read_text())
        if not isinstance(found, dict):
            raise ValueError("not an object")
        found.pop("machine", None)
        unknown = found.keys() - {*TABLES, *NUMBERS}
        if unknown:
            raise ValueError(f"{min(unknown)} is none of {', '.join((*TABLES, *NUMBERS))}")
        fields: dict[str, Any] = {name: _positive(found[name]) for name in NUMBERS if name in found}
        fields |= {name: _table(name, found[name]) for name in TABLES if name in found}
    except (OSError, ValueError, TypeError) as problem:
        raise ValueError(
            f"kfac.assignment.costs: {path}: {problem}; python -m benchmarks.kernels.costs writes one"
        ) from None
    return replace(costs, **fields, measured=frozenset(fields))


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is no positive number")
    return float(value)


def _table(name: str, rows: Any) -> Table:
    table = tuple((int(_positive(size)), _positive(value)) for size, value in rows)
    if not table or [size for size, _ in table] != sorted({size for size, _ in table}):
        raise ValueError(f"{name}: sizes must ascend")
    return table
