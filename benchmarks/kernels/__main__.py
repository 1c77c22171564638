"""Every op on the shapes of known models, by every backend that runs here, against the library in
the same run; and the solvers of refreshes by size.

    python -m benchmarks.kernels --goals --models squares gpt2     # what is wanted of a GPU, pass or fail
    python -m benchmarks.kernels --sweep syrk                      # configurations of the Triton SYRK on this GPU
    python -m benchmarks.kernels [--device cuda] [--models gpt2 resnet50] [--ops syrk_accumulate_]
    [--out FOLDER]

Needs torch only, not DeepSpeed. An implementation is first checked against float64; a wrong one has
no speed, and the command fails.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import orthogonalization
from benchmarks.kernels.cases import Case, Op, Settings, adam_step, averages, packing, syrk
from benchmarks.kernels.goals import goals, goals_table
from benchmarks.kernels.report import CsvFile, document, draw, table
from benchmarks.kernels.shapes import MODELS, Model
from benchmarks.kernels.solvers import IMPLEMENTATIONS, SOLVERS, solvers
from benchmarks.kernels.sweep import sweep_syrk
from benchmarks.kernels.timing import Clock, Roofline
from ds_kfac.ops.dispatch import BACKENDS, OPS

NEWTON_SCHULZ = "newton schulz"
ROOT = Path(__file__).resolve().parents[2]


def implementations(device: str) -> tuple[dict[str, Mapping[str, Op]], dict[str, str]]:
    """Backend -> its ops; backend -> why it cannot run here."""
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
    """What makes the cases of one model: tensors are made when a case is reached and go with it."""
    sides, factors = model.sides(settings.max_dim), model.factors(settings.blocks, settings.max_dim)
    gradients = dict.fromkeys(model.gradients)
    makers: dict[str, list[Callable[[], Any]]] = {
        "syrk_accumulate_": [
            *(lambda dim=dim: [syrk(settings, dim)] for dim in sides),
            *(lambda dim=dim: [syrk(settings, dim, masked=True)] for dim in sides[-1:]),
        ],
        "symmetric_pack_into_": [lambda: list(packing(settings, model.name, factors))]
        * bool(factors),
        "ema_update_": [lambda: [averages(settings, model.name, factors)]] * bool(factors),
        "adam_step_": [lambda shape=shape: [adam_step(settings, *shape)] for shape in gradients],
    }
    for op, parts in makers.items():
        if op in wanted or (op == "symmetric_pack_into_" and "symmetric_unpack_from" in wanted):
            for make in parts:
                yield lambda make=make: [case for case in make() if case.op in wanted]


def measured(
    case: Case,
    backends: Mapping[str, Mapping[str, Op]],
    clock: Clock,
    roofline: Roofline,
    seconds: float,
):
    """Rows of a case: implementations that are right, and baselines, in turn; those that are wrong
    without a speed."""
    rows: dict[str, dict[str, Any]] = {}
    functions: dict[str, Callable[[], Any]] = {}
    for name, ops in backends.items():
        if case.op in ops:
            rows[name] = {"kind": "op", "implementation": name}
            try:
                error, allowed = case.error(ops[case.op])
            except Exception as problem:  # no memory, say: the others have a row all the same
                rows[name]["problem"] = said(problem)
                continue
            rows[name] |= {"error": error, "allowed": allowed}
            if error <= allowed:
                functions[name] = lambda op=ops[case.op]: case.run(op)
    for name, baseline in case.baselines.items():
        rows[name] = {"kind": "baseline", "implementation": name}
        try:
            baseline()
        except Exception as problem:
            rows[name]["problem"] = said(problem)
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


def said(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".splitlines()[0][:200]


def about(device: str, settings: Settings, missing: Mapping[str, str]) -> dict[str, str]:
    """Machine, versions and commit."""
    if device == "cuda":
        machine = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    else:
        cpuinfo = Path("/proc/cpuinfo")
        found = (
            re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
        )
        name = found.group(1) if found else platform.processor() or platform.machine()
        machine = f"{name}, {torch.get_num_threads()} threads of {os.cpu_count()}"
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    facts = {"machine": machine, "torch": torch.__version__, "Python": platform.python_version()}
    facts |= {
        "commit": commit or "unknown",
        "rows": f"{settings.rows} in {settings.dtype}".replace("torch.", ""),
    }
    facts["factors in one call"] = (
        f"of {settings.blocks} blocks at most, sides up to {settings.max_dim}"
    )
    return facts | {f"not {name}": why for name, why in missing.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    known = [name for name in MODELS if name != "squares"]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=known)
    timeable = (*OPS, *SOLVERS, NEWTON_SCHULZ)
    parser.add_argument("--ops", nargs="+", choices=timeable, default=timeable)
    parser.add_argument("--rows", type=int, help="of a batch; 8192 on a GPU, 1024 on a CPU")
    parser.add_argument("--blocks", type=int, help="of a model in one call; 4 on a GPU, 1 on a CPU")
    parser.add_argument("--max-dim", type=int, help="largest factor; 11008 on a GPU, 4096 on a CPU")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="of rows; fp32 on a CPU, else bf16",
    )
    parser.add_argument(
        "--goals", action="store_true", help="a table of what is wanted of a GPU, pass or fail"
    )
    parser.add_argument(
        "--sweep", choices=("syrk",), help="time every shipped configuration of an op, on a GPU"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="per implementation and case")
    parser.add_argument("--name", help="of the results' files; the device")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "kernels")
    options = parser.parse_args(arguments)
    gpu = options.device == "cuda"
    settings = Settings(
        options.device,
        options.rows or (8192 if gpu else 1024),
        options.blocks or (4 if gpu else 1),
        options.max_dim or (11008 if gpu else 4096),
        getattr(torch, options.dtype or ("bfloat16" if gpu else "float32")),
    )
    if options.goals and gpu and settings.dtype == torch.float32:
        parser.error(
            "--goals: they are of 16-bit rows, which tensor cores multiply; time fp32 rows without"
        )
    torch.manual_seed(0)
    clock = Clock(options.device)
    if options.sweep:
        if not gpu:
            parser.error("--sweep needs a GPU: its configurations are Triton's")
        machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        options.out.mkdir(parents=True, exist_ok=True)
        return sweep_syrk(clock, settings, options.seconds, machine, options.out)
    backends, missing = implementations(options.device)
    roofline = clock.roofline(settings.dtype, options.seconds)
    rows: list[dict[str, Any]] = []
    seen = set()
    name = options.name or options.device
    file = CsvFile(options.out / f"{name}.csv")

    def timed(
        make: Callable[[], list[Case]], implementations: Mapping[str, Mapping[str, Op]]
    ) -> None:
        try:
            made = make()
        except Exception as problem:
            print(f"a case could not be made: {said(problem)}", flush=True)
            found = [
                {
                    "op": "not made",
                    "size": "",
                    "kind": "op",
                    "implementation": "",
                    "problem": said(problem),
                }
            ]
            rows.extend(found)
            file.add(found)
            return
        for case in made:
            if (case.op, case.size) not in seen:  # models share shapes
                seen.add((case.op, case.size))
                found = measured(case, implementations, clock, roofline, options.seconds)
                print(table(found).split("\n", 2)[-1], flush=True)
                rows.extend(found)
                file.add(found)

    for model in options.models:
        for make in cases(MODELS[model], settings, set(options.ops)):
            timed(make, backends)
    for make_one in solvers(settings, set(options.ops)):
        timed(lambda make=make_one: [make()], IMPLEMENTATIONS)
    if NEWTON_SCHULZ in options.ops:
        table_of = {
            form: {NEWTON_SCHULZ: run}
            for form, run in orthogonalization.variants(options.device).items()
        }
        for make_one in orthogonalization.cases(settings):
            timed(lambda make=make_one: [make()], table_of)
    page = document(rows, roofline, about(options.device, settings, missing), name)
    if options.goals:
        wanted = goals_table(goals(rows))
        page += f"\n## Goals\n\nBy the fastest implementation of each.\n\n{wanted}\n"
        print(wanted)
    (options.out / f"{name}.md").write_text(page)
    draw(rows, roofline, options.out / f"{name}.png")
    wrong = [row for row in rows if row["kind"] == "op" and "median_ms" not in row]
    print(f"{options.out / name}.md: {len(rows)} rows, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
