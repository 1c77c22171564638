"""How ``csrc/cuda`` is compiled by nvcc."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ds_kfac.ops.build import BuildError, find_sources

ARCHITECTURES = ("80", "90a", "100", "120")
"""A100, H100 and H200, B200, RTX 50; others compile for themselves, just in time."""

NVCC = "/usr/local/cuda/bin/nvcc"
"""Where it usually is."""
STRICT = (
    *("-Werror", "all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror"),
    "-Xptxas=-v,-warn-spills,-warn-lmem-usage,-Werror",
)
"""A warning is an error, so are registers spilled to memory; ptxas says how many registers a kernel takes."""


def find_nvcc() -> str | None:
    """The compiler of ``CUDA_HOME``, else of the path, else of /usr/local/cuda; None where there is none."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [f"{home}/bin/nvcc" for home in homes if home] + ["nvcc", NVCC]
    return next((found for found in map(shutil.which, candidates) if found), None)


def nvcc() -> str:
    """See :func:`find_nvcc`.

    Raises:
        BuildError: there is none.
    """
    found = find_nvcc()
    if found is None:
        raise BuildError("no nvcc (CUDA_HOME, PATH, /usr/local/cuda)")
    return found


def sources() -> list[Path]:
    """Every file of the library; headers are included by them."""
    return sorted(find_sources("cuda").glob("*.cu"))


def nvcc_flags(architectures: Sequence[str]) -> list[str]:
    """For a shared library, which loads without a driver, with machine code for each architecture, e.g. ``90a``."""
    targets = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in architectures]
    return ["-std=c++17", "-O3", "--threads=0", "-shared", "-Xcompiler=-fPIC,-fvisibility=hidden", *targets]
