"""Machine instructions and registers of every GPU kernel, by compiling for a device that is not
there.

python -m tests.ops.counts [90]
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.kernels.syrk_candidates import CANDIDATES
from ds_kfac.ops.build import find_nvcc, nvcc_flags, sources
from ds_kfac.ops.functional import packed_numel
from ds_kfac.ops.triton import scale, syrk
from ds_kfac.ops.triton.syrk import config_for
from tests.ops.triton_tools import compiling, cuobjdump

Row = tuple[str, int, int]
"""Kernel, instructions, registers."""


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Elementwise kernels, which are the same for every shape; every SYRK that a sweep of a device
    of 90 tries."""
    x, vector, flags = (
        torch.empty(12, 768, 3072),
        torch.empty(12),
        torch.empty(12, dtype=torch.bool),
    )
    yield (
        "adam_step_",
        lambda: scale.adam_step_(x, x, x, x, vector, flags, betas=(0.9, 0.99), eps=1e-8),
    )
    yield (
        "finish_direction_",
        lambda: scale.finish_direction_(x, x, vector, None, vector, vector, flags),
    )
    yield (
        "finish_direction_ with sizes",
        lambda: scale.finish_direction_(x, x, *[vector] * 4, flags),
    )
    for dtype, family in ((torch.bfloat16, "sm_90"), (torch.float32, "fp32")):
        rows, total = torch.empty(2048, 4096, dtype=dtype), torch.empty(packed_numel(4096))
        for config in dict.fromkeys((*CANDIDATES[family], config_for(rows, 90).plain())):
            yield (
                f"syrk {str(config).removeprefix('SyrkConfig')}",
                lambda x=rows, t=total, c=config: syrk.accumulate(t, x, c),
            )


def disassembled(path: Path) -> dict[str, Row]:
    """Function -> its row."""
    run = lambda option: subprocess.check_output([str(cuobjdump()), option, path], text=True)  # noqa: E731
    found: dict[str, Row] = {}
    registers = dict(re.findall(r"Function (\S+):\s*\n\s*REG:(\d+)", run("-res-usage")))
    for part in run("-sass").split("Function : ")[1:]:
        name, code = part.split("\n", 1)
        found[name] = (
            name,
            len(re.findall(r"^\s*/\*[0-9a-f]{4,5}\*/", code, re.MULTILINE)),
            int(registers[name]),
        )
    return found


def main(arch: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, launch in launches():
            with compiling(arch) as done:
                launch()
            for compiled in done:
                (folder / "kernel.cubin").write_bytes(compiled.cubin)
                (row,) = disassembled(folder / "kernel.cubin").values()
                print(f"{label:75} {row[1]:6} instructions {row[2]:4} registers", flush=True)
        nvcc = find_nvcc()
        if nvcc is None:
            return
        library = folder / "library.so"
        subprocess.run(
            [nvcc, *nvcc_flags([f"{arch}{'a' if arch == 90 else ''}"]), "-o", library, *sources()],
            check=True,
        )
        for row in sorted(disassembled(library).values()):
            print(f"{row[0]:75} {row[1]:6} instructions {row[2]:4} registers", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 90)
