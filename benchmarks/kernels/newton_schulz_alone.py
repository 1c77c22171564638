"""Newton-Schulz's products in a loop, in several processes that share a GPU, by torch alone: no
ds_kfac, no DeepSpeed.

    python -m benchmarks.kernels.newton_schulz_alone --dtype float16 [--processes 8] [--seconds 150]
    [--out FILE.csv]
    python -m benchmarks.kernels.newton_schulz_alone --dtype float16 --sanitizer memcheck   # one process, few rounds

Why: with 6 to 8 training processes on one H100, 2 of 36 ended with "unspecified launch failure"; a
    core dump says: an
illegal instruction in cuBLAS's nvjet_sm90_hsh_128x128_64x6_4x2_h_bx_NNT. Each process repeats
rounds of the same products on the same numbers: a result with other bits than the first one's
counts as wrong. A row for each process: rounds, wrong results, what ended it. No GPU has run it.
"""

import argparse
import csv
import multiprocessing
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SHAPES = (
    (256, 256),
    (256, 680),
    (256, 768),
    (768, 768),
    (768, 2048),
    (768, 3072),
    (4, 256, 256),
    (4, 256, 680),
    (12, 768, 768),
)
SMALL = ((16, 16), (16, 48), (2, 16, 16))
COLUMNS = (
    "device",
    "torch",
    "dtype",
    "processes",
    "process",
    "rounds",
    "wrong",
    "seconds",
    "ended",
)
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def polynomial(r: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    plus = torch.addmm if r.ndim == 2 else torch.baddbmm
    p = plus(r, r, r, beta=b, alpha=c)
    p.diagonal(dim1=-2, dim2=-1).add_(a)
    return p


def orthogonalized(x: Tensor) -> Tensor:
    """x [.., m, n], m <= n, of norm one; the form by n / m, with products as in
    ds_kfac/update/newton_schulz.py."""
    m, n = x.shape[-2:]
    if n < 1.75 * m:
        for _ in range(5):
            x = polynomial(x @ x.mT) @ x
        return x
    for count in (2, 3):
        r = x @ x.mT
        q = p = polynomial(r)
        for _ in range(count - 1):
            r = (r @ p) @ p
            p = polynomial(r)
            q = q @ p
        x = q @ x
    return x


def inputs(shapes, dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [(x / torch.linalg.matrix_norm(x, keepdim=True)).to(device, dtype) for x in drawn]


def loop(shapes, dtype: str, device: str, seconds: float, most: int, found) -> None:
    """A process: rounds until the time is up; what ended it goes to ``found``, (rounds, wrong,
    seconds, why)."""
    rounds = wrong = 0
    began = time.monotonic()
    try:
        given = inputs(shapes, getattr(torch, dtype), device)
        first = [orthogonalized(x) for x in given]
        while time.monotonic() - began < seconds and rounds < most:
            results = [orthogonalized(x) for x in given]
            rounds += 1
            # waits for the device, and so raises what it has met
            if rounds % 16 == 0 or rounds == most:
                wrong += sum(not torch.equal(a, b) for a, b in zip(results, first, strict=True))
        why = "time"
    except Exception as problem:  # after a launch failure this process's context is lost
        why = f"{type(problem).__name__}: {problem}".splitlines()[0]
    found.put((rounds, wrong, time.monotonic() - began, why))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--rounds", type=int, default=10**9, help="at most, of a process")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes, two processes, a second")
    parser.add_argument(
        "--sanitizer", choices=TOOLS, help="under compute-sanitizer: one process, ten rounds"
    )
    parser.add_argument("--out", type=Path, default=Path("newton_schulz_alone.csv"))
    options = parser.parse_args(arguments)
    if options.small:
        options.processes, options.seconds = 2, min(options.seconds, 1.0)
    if options.sanitizer:
        return sanitized(options)
    shapes = SMALL if options.small else SHAPES
    context = multiprocessing.get_context("spawn")
    queues = [context.SimpleQueue() for _ in range(options.processes)]
    given = (shapes, options.dtype, options.device, options.seconds, options.rounds)
    processes = [context.Process(target=loop, args=(*given, queue)) for queue in queues]
    for process in processes:
        process.start()
    for process in processes:
        process.join(options.seconds + 120)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    rows, new = [], not options.out.exists()
    for number, (process, queue) in enumerate(zip(processes, queues, strict=True)):
        nothing = (0, 0, options.seconds, f"exit code {process.exitcode}")
        rounds, wrong, seconds, why = nothing if queue.empty() else queue.get()
        if process.is_alive():
            process.kill()
        facts = {
            "device": device,
            "torch": torch.__version__,
            "dtype": options.dtype,
            "processes": options.processes,
        }
        counts = {
            "process": number,
            "rounds": rounds,
            "wrong": wrong,
            "seconds": f"{seconds:.1f}",
            "ended": why,
        }
        rows.append(facts | counts)
    with options.out.open("a", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            table.writeheader()
        table.writerows(rows)
    bad = [row for row in rows if row["ended"] != "time" or row["wrong"]]
    for row in rows:
        print(*(f"{key} {row[key]}" for key in COLUMNS[2:]), flush=True)
    print(
        f"{options.dtype}: {len(bad)} of {len(rows)} processes failed, "
        f"{sum(row['rounds'] for row in rows)} rounds"
    )
    return 1 if bad else 0


def sanitized(options: argparse.Namespace) -> int:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not installed")
        return 5  # as pytest without tests
    module = "benchmarks.kernels.newton_schulz_alone"
    command = [
        tool,
        "--tool",
        options.sanitizer,
        "--error-exitcode",
        "9",
        "--target-processes",
        "all",
        sys.executable,
    ]
    command += [
        "-m",
        module,
        "--dtype",
        options.dtype,
        "--processes",
        "1",
        "--rounds",
        "10",
        "--device",
        options.device,
    ]
    command += ["--out", str(options.out), *(["--small"] if options.small else [])]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
