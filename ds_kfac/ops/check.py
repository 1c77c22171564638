"""Whether an implementation may be used: on this GPU, for these arguments, and with right results.

It refuses what it is not made for (a dtype, strides, a size) by raising ``NotMadeFor`` before it writes anything; plain
torch, which is made for all of it, then runs instead. Arguments that no implementation could take, such as shapes that
do not fit, are a ValueError from either.

At first use a compiled op is compared with the specification: on small odd shapes, one that a program holds and one of
many tiles, in every dtype that the op takes. Rows and matrices are small integers, whose products and sums are exact in
any of them. The result is noted in the build folder, by sources, versions, driver and GPU; delete it to check again.
``DS_KFAC_CHECK_OPS=0`` switches the check off.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_kfac.ops import build, functional, reference
from ds_kfac.ops.functional import packed_numel

CAPABILITY = (8, 0)
"""The least compute capability that kernels are compiled and checked for."""


def gpu_problem(device: torch.device | None = None) -> str | None:
    """Why no kernel of ours can run on a GPU (None: torch's current one); None if they can."""
    if torch.version.hip is not None:
        return "our kernels are for NVIDIA GPUs, torch is built for AMD's"
    if torch.version.cuda is None:
        return "torch is built without CUDA"
    if not torch.cuda.is_available():
        return "there is no NVIDIA GPU that torch can use (nvidia-smi, CUDA_VISIBLE_DEVICES)"
    found = torch.cuda.get_device_capability(device)
    if found >= CAPABILITY:
        return None
    return f"needs compute capability {_number(CAPABILITY)}, {torch.cuda.get_device_name(device)} has {_number(found)}"


def gpu_architecture() -> str:
    """Of torch's current GPU, as nvcc names it, e.g. ``90a``."""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}{'a' if major == 9 else ''}"


def _number(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


class NotMadeFor(ValueError):
    """This implementation has no code for such arguments; nothing was written."""


def guarded(backend: str, op: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """``implementation``, with plain torch for what it is not made for.

    Raises:
        RuntimeError: it failed, such as a kernel that does not compile on this machine, and how to do without it.
    """

    @wraps(implementation)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return implementation(*args, **kwargs)
        except NotMadeFor:
            pass  # outside of the handler: what torch raises is not said to come from this
        except (ValueError, torch.OutOfMemoryError):
            raise
        except Exception as problem:
            raise RuntimeError(
                f'{op} by the backend "{backend}" failed: {type(problem).__name__}: {problem}\n'
                'This is a fault of the backend or of its installation; kfac.ops.backend "torch" does without it.'
            ) from problem
        return getattr(functional, op)(*args, **kwargs)

    return run


def of(*tensors: Tensor | None) -> str:
    """Tensors for an error's text."""
    return ", ".join("None" if x is None else f"{x.dtype} {tuple(x.shape)} strides {x.stride()}" for x in tensors)


def check_device(op: str, tensors: Sequence[Any], device_type: str | None) -> None:
    """Raises NotMadeFor unless all that are tensors are on one device, of a type; torch judges the others."""
    devices = {x.device for x in tensors if isinstance(x, Tensor)}
    if len(devices) > 1 or any(device.type != (device_type or device.type) for device in devices):
        raise NotMadeFor(f"{op}: expected tensors on one {device_type or ''} device, got {sorted(map(str, devices))}")


SIDES = ((65, 63), (33, 648))
"""Rows and columns; the second is wide enough for the tiles of large sides, and aligned."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALLOWED = 1e-5
"""Difference to the specification, relative to the largest value: rounding of fp32 divisions and short sums."""
CHECK_SECONDS = 600
"""That a process waits for another one's check, most of which is compilation."""
ENDED = "a process ended while it was checked"

Call = tuple[tuple, dict[str, Any]]


def _whole(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def _rows(dtype: torch.dtype) -> Iterator[Call]:
    for rows, side in SIDES:
        yield (
            (torch.ones(packed_numel(side + 1)), _whole(rows, side).to(dtype)),
            {"ones_column": torch.ones(rows, 1), "scale": 2.0},
        )


def _packing(dtype: torch.dtype) -> Iterator[Call]:
    matrices = [(x := _whole(side, side)) + x.T for _, side in SIDES]
    starts, end = [3, 7 + packed_numel(SIDES[0][1])], 9 + sum(packed_numel(side) for _, side in SIDES)
    yield (torch.zeros(end, dtype=dtype), starts, matrices), {}


def _unpacking(dtype: torch.dtype) -> Iterator[Call]:
    for (packed, starts, matrices), _ in _packing(dtype):
        yield (_whole(len(packed)).to(dtype), starts, [len(x) for x in matrices]), {}


def _averages(dtype: torch.dtype) -> Iterator[Call]:
    numels = [packed_numel(side) for _, side in SIDES]
    averages, sums = ([_whole(numel, seed=seed) for numel in numels] for seed in range(2))
    yield (averages, sums, [torch.tensor(3.0)] * 2, [torch.tensor(float(k)) for k in range(2)], [0.75, 0.5]), {}


def _divided(dtype: torch.dtype) -> Iterator[Call]:
    for rows, side in SIDES:
        yield (_whole(rows, side), _whole(rows).abs(), _whole(side).abs(), torch.tensor(1.0)), {}


def _corrected(dtype: torch.dtype) -> Iterator[Call]:
    for rows, side in SIDES:
        yield (_whole(rows, side), _whole(rows, side, seed=1).abs(), torch.tensor(0.75), 2.0, 1.0), {}


def _adam(dtype: torch.dtype) -> Iterator[Call]:
    for rows, side in SIDES:
        state = (_whole(rows, side, seed=1), _whole(rows, side, seed=2).abs(), torch.tensor(7.0), torch.tensor(True))
        options = {"betas": (0.75, 0.875), "eps": 0.125}
        yield (_whole(rows, side), *state), options


PROBES: dict[str, tuple[Callable[[torch.dtype], Iterator[Call]], tuple[torch.dtype, ...]]] = {
    "syrk_accumulate_": (_rows, DTYPES),
    "symmetric_pack_into_": (_packing, DTYPES),
    "symmetric_unpack_from": (_unpacking, DTYPES),
    "ema_update_": (_averages, DTYPES[:1]),
    "eigen_scale_dot": (_divided, DTYPES[:1]),
    "corrected_scale_dot": (_corrected, DTYPES[:1]),
    "adam_scale": (_adam, DTYPES[:1]),
}
"""Of every op that a backend compiles: its calls in a dtype, and the dtypes."""


def moved(value: Any, device: torch.device) -> Any:
    """Tensors of a structure on a device, copied."""
    return tree_map_only(Tensor, lambda x: x.to(device, copy=True), value)


@torch.no_grad()
def fault(op: str, implementation: Callable[..., Any], device: torch.device) -> str:
    """What is wrong with an op on a device; empty if nothing is. Waits for the device."""
    calls, dtypes = PROBES[op]
    for dtype in dtypes:
        with torch.device("cpu"):
            made = list(calls(dtype))
        for arguments, options in made:
            ours, theirs = (moved((arguments, options), place) for place in (device, torch.device("cpu")))
            wanted = getattr(reference, op)(*theirs[0], **theirs[1])
            try:
                found = moved((implementation(*ours[0], **ours[1]), ours[0]), torch.device("cpu"))
            except torch.OutOfMemoryError:
                raise
            except Exception as problem:
                return f"fails: {problem}".splitlines()[0]
            mine, right = (
                [x for x in tree_leaves(part) if isinstance(x, Tensor)] for part in (found, (wanted, theirs[0]))
            )
            if len(mine) != len(right):
                return "is wrong: returns another number of tensors"
            worst = max(map(difference, mine, right))
            if worst > ALLOWED:
                return f"is wrong: off by {worst:.1e} of the largest value, in {str(dtype).removeprefix('torch.')}"
    return ""


def difference(found: Tensor, wanted: Tensor) -> float:
    """Largest, relative to the largest value; infinite where a shape differs or a value is not finite."""
    if found.shape != wanted.shape:
        return float("inf")
    largest = wanted.double().abs().max().clamp(min=1e-30)
    return float(((found.double() - wanted.double()).abs().max() / largest).nan_to_num(nan=float("inf")))


def faults(compiled: Mapping[str, tuple[str, Callable[..., Any]]], device: torch.device) -> dict[str, str]:
    """Op -> why its implementation must not be used on a device. Processes of one machine check one after the other.

    An op that is being checked is noted before, so that one which ends its process is known by the next.

    Args:
        compiled: op -> (backend, implementation).
    """
    if os.environ.get("DS_KFAC_CHECK_OPS") == "0":
        return {}
    path = build.folder() / f"checked-{identity(device)}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with build.locked(path.with_suffix(".lock"), CHECK_SECONDS):
            known = _checked(compiled, device, path)
    except OSError:  # nowhere to keep it
        known = _checked(compiled, device, None)
    named = {op: f"{op} by {backend}" for op, (backend, _) in compiled.items()}
    return {op: f"{name} {known[name]} (noted in {path})" for op, name in named.items() if known[name]}


def _checked(compiled: Mapping[str, tuple[str, Callable]], device: torch.device, path: Path | None) -> dict[str, str]:
    known = _read(path)
    for op, (backend, implementation) in compiled.items():
        name = f"{op} by {backend}"
        if name in known:
            continue
        _write(path, known | {name: ENDED})
        try:
            known[name] = fault(op, implementation, device)
        finally:  # also where memory was full or somebody interrupted: not the op's fault
            _write(path, known)
        if known[name]:
            check_alive(device)
    return known


def check_alive(device: torch.device) -> None:
    """Raises if a kernel has broken the GPU's context, in which nothing runs any more; it is noted by then, so that the
    next process does without it. Waits for the device."""
    torch.zeros((), device=device).item()


def _read(path: Path | None) -> dict[str, str]:
    try:
        return json.loads(path.read_text()) if path else {}
    except (OSError, ValueError):
        return {}


def _write(path: Path | None, known: Mapping[str, str]) -> None:
    if path:
        whole = path.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(known, indent=0))
        os.replace(whole, path)


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def identity(device: torch.device) -> str:
    """Of what a result depends on: sources of ops, versions, driver and GPU."""
    found = hashlib.sha256()
    for file in sorted([*(build.PACKAGE / "ops").rglob("*.py"), *build.source_folder().iterdir()]):
        found.update(file.name.encode() + file.read_bytes())
    driver = Path("/proc/driver/nvidia/version")
    for fact in (
        torch.__version__,
        _triton(),
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {platform.machine()}",
        driver.read_text() if driver.exists() else "",
    ):
        found.update(fact.encode() + b"\0")
    return found.hexdigest()[:16]
