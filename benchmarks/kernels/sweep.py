"""Which configuration of the Triton SYRK is fastest at which side: the table ``CHOSEN``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.cases import Settings, syrk
from benchmarks.kernels.report import CsvFile
from benchmarks.kernels.timing import Clock

SIDES = (64, 128, 256, 512, 768, 1024, 1600, 2048, 3072, 4096, 6400, 8192, 11008)
SAME = 0.02
"""Configurations whose medians are this close are the same: the one of the side below is kept."""
Accumulate = Callable[[Tensor, Tensor, Any], None]


def sweep(
    clock: Clock,
    settings: Settings,
    configs: Sequence[Any],
    accumulate: Accumulate,
    seconds: float,
    file: CsvFile,
) -> list[dict[str, Any]]:
    """Rows side x configuration: milliseconds, or none where a result is wrong or a launch fails.
    Those of a side are in the file once it is done."""
    rows = []
    for dim in (side for side in SIDES if side <= settings.max_dim):
        case, functions = syrk(settings, dim), {}
        for config in configs:
            op = lambda total, x, config=config: accumulate(total, x, config)  # noqa: E731
            row: dict[str, Any] = {
                "op": "syrk_accumulate_",
                "size": case.size,
                "kind": "op",
                "dim": dim,
            }
            row |= {
                "implementation": str(config),
                "config": config,
                "bytes": case.nbytes,
                "flops": case.flops,
            }
            rows.append(row)
            try:
                row["error"], row["allowed"] = case.error(op)
            except Exception as problem:  # too much shared memory for this device, say
                row["problem"] = f"{type(problem).__name__}: {problem}".splitlines()[0]
                continue
            if row["error"] <= row["allowed"]:
                functions[config] = lambda op=op, case=case: case.run(op)
        times = clock.compare(functions, seconds) if functions else {}
        for row in rows:
            if row["dim"] == dim and row["config"] in times:
                found = times[row["config"]]
                row.update(
                    median_ms=1e3 * found.median, low_ms=1e3 * found.low, high_ms=1e3 * found.high
                )
                row.update(calls=found.calls, gflop_per_s=case.flops / found.median / 1e9)
        file.add([row for row in rows if row["dim"] == dim])
        print(f"side {dim}: {len(times)} of {len(configs)} configurations are right", flush=True)
    return rows


def fastest(rows: Sequence[dict[str, Any]]) -> list[tuple[int, Any]]:
    """(largest side, configuration); neighbouring sides with the same one are put together."""
    found: list[tuple[int, Any]] = []
    for dim in sorted({row["dim"] for row in rows}):
        timed = {
            row["config"]: row["median_ms"]
            for row in rows
            if row["dim"] == dim and "median_ms" in row
        }
        if not timed:
            continue
        best = min(timed, key=lambda config: timed[config])
        before = found[-1][1] if found else best
        if timed.get(before, float("inf")) <= (1 + SAME) * timed[best]:
            best = before
        if found and found[-1][1] == best:
            found.pop()
        found.append((dim, best))
    return found


def pasted(name: str, machine: str, chosen: Sequence[tuple[int, Any]]) -> str:
    """Source of an entry of ``CHOSEN``."""
    lines = [f'    "{name}": Chosen(', f'        "{machine}",', "        ("]
    for index, (dim, config) in enumerate(chosen):
        lines.append(f"            ({'LARGEST' if index == len(chosen) - 1 else dim}, {config}),")
    return "\n".join([*lines, "        ),", "    ),"])


def sweep_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: milliseconds per side and configuration."""
    configs = list(dict.fromkeys(row["config"] for row in rows))
    lines = [
        "| configuration | "
        + " | ".join(str(dim) for dim in dict.fromkeys(row["dim"] for row in rows))
        + " |"
    ]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for config in configs:
        cells = [
            f"{row['median_ms']:.4f}" if "median_ms" in row else row.get("problem", "**wrong**")
            for row in rows
            if row["config"] == config
        ]
        text = str(config).removeprefix("SyrkConfig")
        lines.append(f"| {text} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sweep_syrk(clock: Clock, settings: Settings, seconds: float, machine: str, out: Path) -> int:
    """On a GPU, for the rows' dtype. Writes a page and a csv file; prints the table and what to
    paste."""
    from benchmarks.kernels.syrk_candidates import CANDIDATES
    from ds_kfac.ops.triton import syrk as module
    from ds_kfac.ops.triton.syrk import architecture, family

    name = family(settings.dtype, architecture())
    tried = [variant for config in CANDIDATES[name] for variant in (config, config.plain())]
    stem = out / f"sweep_syrk_{name}_{str(settings.dtype).removeprefix('torch.')}"
    file = CsvFile(stem.with_suffix(".csv"))
    rows = sweep(clock, settings, list(dict.fromkeys(tried)), module.accumulate, seconds, file)
    text = f"{sweep_table(rows)}\n\nFor `CHOSEN` in `ds_kfac/ops/triton/syrk.py`:\n\n"
    text += f"```python\n{pasted(name, machine, fastest(rows))}\n```\n"
    print(text)
    stem.with_suffix(".md").write_text(
        f"# Configurations of the Triton SYRK, {settings.rows} rows, ms\n\n{text}"
    )
    torch.cuda.synchronize()
    return 1 if any("error" in row and "median_ms" not in row for row in rows) else 0
