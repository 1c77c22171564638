"""Time every op on the shapes of known models beside the library's way and the roofline.

    python -m benchmarks.kernels [--device cuda] [--models gpt2 resnet50] [--ops syrk_accumulate_]
    python -m benchmarks.kernels --seconds-in-all 450 --out FOLDER  # until nothing is left

Needs torch only, not DeepSpeed. An implementation is first checked against float64; one that is
wrong has no speed, and the command fails. Rows are in the csv file as soon as they are measured,
and a case that is there is not measured again.
"""

import argparse
import csv
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import newton_schulz
from benchmarks.kernels.cases import Case, Op, Settings, adam_step, averages, packing, syrk
from benchmarks.kernels.newton_schulz import NEWTON_SCHULZ
from benchmarks.kernels.report import CsvFile, Row, document, draw, table
from benchmarks.kernels.shapes import MODELS, Model
from benchmarks.kernels.solvers import IMPLEMENTATIONS, SOLVERS, solvers
from benchmarks.kernels.timing import Clock, Roofline
from ds_kfac.ops.dispatch import BACKENDS, OPS

ROOT = Path(__file__).resolve().parents[2]
TIMEABLE = (*OPS, *SOLVERS, NEWTON_SCHULZ)
Backends = Mapping[str, Mapping[str, Op]]


def load_backends(device: str) -> tuple[dict[str, Mapping[str, Op]], dict[str, str]]:
    """Return backend -> its ops, and backend -> why it cannot run here."""
    found: dict[str, Mapping[str, Op]] = {}
    missing = {}
    for name, backend in BACKENDS.items():
        if backend.device not in (None, device):
            continue
        try:
            found[name] = backend.load()
        except RuntimeError as problem:
            missing[name] = str(problem)
    return found, missing


def cases(model: Model, settings: Settings, wanted: set[str]) -> Iterator[Callable[[], list[Case]]]:
    """Yield functions that make the cases of a model: tensors are made when a case is reached."""
    sides = model.sides(settings.max_dim)
    factors = model.factors(settings.blocks, settings.max_dim)
    gradients = {shape for shape in model.gradients if max(shape) <= settings.max_dim}
    unpacks = {"symmetric_unpack_from"} & wanted
    if "syrk_accumulate_" in wanted:
        for dim in sides:
            yield lambda dim=dim: [syrk(settings, dim)]
        for dim in sides[-1:]:
            yield lambda dim=dim: [syrk(settings, dim, masked=True)]
    if factors and ("symmetric_pack_into_" in wanted or unpacks):
        yield lambda: [case for case in packing(settings, model.name, factors) if case.op in wanted]
    if factors and "ema_update_" in wanted:
        yield lambda: [averages(settings, model.name, factors)]
    if "adam_step_" in wanted:
        for shape in sorted(gradients):
            yield lambda shape=shape: [adam_step(settings, *shape)]


def measured(
    case: Case, backends: Backends, clock: Clock, roofline: Roofline, seconds: float
) -> list[dict[str, Any]]:
    """Return a row for each implementation and baseline. Those that are wrong have no speed."""
    rows: dict[str, dict[str, Any]] = {}
    functions: dict[str, Callable[[], Any]] = {}
    for name, ops in backends.items():
        if case.op not in ops:
            continue
        rows[name] = {"kind": "op", "implementation": name}
        try:
            error, allowed = case.error(ops[case.op])
        except Exception as problem:  # no memory, say: the others have a row all the same
            rows[name]["problem"] = first_line(problem)
            continue
        rows[name] |= {"error": error, "allowed": allowed}
        if error <= allowed:
            functions[name] = lambda op=ops[case.op]: case.run(op)
    for name, baseline in case.baselines.items():
        rows[name] = {"kind": "baseline", "implementation": name}
        try:
            baseline()
        except Exception as problem:
            rows[name]["problem"] = first_line(problem)
            continue
        functions[name] = baseline
    times = clock.compare(functions, seconds) if functions else {}
    for name, row in rows.items():
        row.update(op=case.op, size=case.size, bytes=case.nbytes, flops=case.flops)
        if name in times:
            found = times[name]
            row.update(
                median_ms=1e3 * found.median,
                low_ms=1e3 * found.low,
                high_ms=1e3 * found.high,
                calls=found.calls,
                gb_per_s=case.nbytes / found.median / 1e9,
                gflop_per_s=case.flops / found.median / 1e9,
                of_roofline=roofline.bound(case.nbytes, case.flops) / found.median,
            )
    return list(rows.values())


def first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".splitlines()[0][:200]


def about(device: str, settings: Settings, missing: Mapping[str, str]) -> dict[str, str]:
    """Return machine, versions and commit."""
    if device == "cuda":
        machine = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    else:
        cpuinfo = Path("/proc/cpuinfo")
        text = cpuinfo.read_text() if cpuinfo.exists() else ""
        found = re.search(r"model name\s*:\s*(.+)", text)
        name = found.group(1) if found else platform.processor() or platform.machine()
        machine = f"{name}, {torch.get_num_threads()} threads of {os.cpu_count()}"
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {
        "machine": machine,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "commit": commit or "unknown",
        "rows": f"{settings.rows} in {settings.dtype}".replace("torch.", ""),
        "factors in one call": f"of {settings.blocks} blocks, sides up to {settings.max_dim}",
        **{f"not {name}": why for name, why in missing.items()},
    }


class Measuring:
    """The rows of a command, some of which an earlier call may have measured."""

    def __init__(self, options: argparse.Namespace, settings: Settings) -> None:
        self.options, self.clock = options, Clock(settings.device)
        self.ends = time.monotonic() + options.seconds_in_all
        self.path = options.out / f"{options.name or options.device}.csv"
        self.rows: list[dict[str, Any]] = []
        if self.path.exists() and not options.again:
            with self.path.open(newline="") as file:
                self.rows = [read_row(row) for row in csv.DictReader(file)]
            self.rows = [row for row in self.rows if row["op"] in TIMEABLE]
        self.known = {(row["op"], row["size"]) for row in self.rows}
        self.left_out = 0
        self.file = CsvFile(self.path)
        self.file.add(self.rows)
        self.roofline = self.clock.roofline(settings.dtype, options.seconds)

    def time(self, make: Callable[[], list[Case]], backends: Backends) -> None:
        """Measure the cases that are missing, if there is time."""
        if time.monotonic() > self.ends:
            self.left_out += 1
            return
        try:
            made = make()
        except Exception as problem:
            print(f"a case could not be made: {first_line(problem)}", flush=True)
            row = {"op": "not made", "size": "", "kind": "op", "implementation": ""}
            self.add([row | {"problem": first_line(problem)}])
            return
        for case in made:
            if (case.op, case.size) not in self.known:  # models share shapes
                self.known.add((case.op, case.size))
                seconds = self.options.seconds
                found = measured(case, backends, self.clock, self.roofline, seconds)
                print(table(found).split("\n", 2)[-1], flush=True)
                self.add(found)

    def add(self, rows: list[dict[str, Any]]) -> None:
        self.rows.extend(rows)
        self.file.add(rows)


def read_row(row: Mapping[str, str]) -> dict[str, Any]:
    """Return a row as it was measured: numbers are numbers, empty cells are not there."""
    texts = ("op", "size", "implementation", "kind", "problem")
    return {key: cell if key in texts else float(cell) for key, cell in row.items() if cell}


def wrong_rows(rows: list[dict[str, Any]]) -> list[Row]:
    return [row for row in rows if row["kind"] == "op" and "median_ms" not in row]


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    on_gpu = options.device == "cuda"
    settings = Settings(
        options.device,
        rows=options.rows or (8192 if on_gpu else 1024),
        blocks=options.blocks or (4 if on_gpu else 1),
        max_dim=options.max_dim or (11008 if on_gpu else 4096),
        dtype=getattr(torch, options.dtype or ("bfloat16" if on_gpu else "float32")),
    )
    torch.manual_seed(0)
    options.out.mkdir(parents=True, exist_ok=True)
    backends, missing = load_backends(options.device)
    measuring = Measuring(options, settings)
    wanted = set(options.ops)
    for model in options.models:
        for make in cases(MODELS[model], settings, wanted):
            measuring.time(make, backends)
    if NEWTON_SCHULZ in wanted:
        for make_one in newton_schulz.cases(settings):
            products = newton_schulz.implementations(options.device)
            measuring.time(lambda make=make_one: [make()], products)
    for make_one in solvers(settings, wanted):
        measuring.time(lambda make=make_one: [make()], IMPLEMENTATIONS)
    rows, roofline = measuring.rows, measuring.roofline
    page = document(rows, roofline, about(options.device, settings, missing), measuring.path.stem)
    measuring.path.with_suffix(".md").write_text(page)
    draw(rows, roofline, measuring.path.with_suffix(".png"))
    wrong = wrong_rows(rows)
    print(f"{measuring.path.with_suffix('.md')}: {len(rows)} rows, {len(wrong)} wrong")
    print(f"left out, the same command goes on: {measuring.left_out or 'no'} cases")
    return 1 if wrong else 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = [name for name in MODELS if name != "squares"]
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=models)
    parser.add_argument("--ops", nargs="+", choices=TIMEABLE, default=TIMEABLE)
    parser.add_argument("--rows", type=int, help="of a batch; 8192 on a GPU, 1024 on a CPU")
    parser.add_argument("--blocks", type=int, help="of a model in a call; 4 on a GPU, 1 on a CPU")
    parser.add_argument("--max-dim", type=int, help="of factors; 11008 on a GPU, 4096 on a CPU")
    parser.add_argument("--dtype", choices=dtypes, help="of rows; fp32 on a CPU, else bf16")
    parser.add_argument("--seconds", type=float, default=0.5, help="per implementation and case")
    parser.add_argument("--seconds-in-all", type=float, default=float("inf"), help="of the call")
    parser.add_argument("--again", action="store_true", help="measure what is there, too")
    parser.add_argument("--name", help="of the results' files; the device")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "kernels")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
