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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
    needed, has = (".".join(map(str, capability)) for capability in (CAPABILITY, found))
    return f"needs compute capability {needed}, {torch.cuda.get_device_name(device)} has {has}"


def gpu_architecture() -> str:
    """Of torch's current GPU, as nvcc names it, e.g. ``90a``."""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}{'a' if major == 9 else ''}"


class NotMadeFor(ValueError):
    """This implementation has no code for such arguments; nothing was written."""


def guarded(backend: str, op: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """``implementation``, with plain torch for what it is not made for. Raises RuntimeError: it failed, such as a
    kernel that does not compile on this machine, and how to do without it."""

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


def of(*tensors: Tensor) -> str:
    """Tensors for an error's text."""
    return ", ".join(f"{x.dtype} {tuple(x.shape)} strides {x.stride()}" for x in tensors)


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


def probes(op: str, dtype: torch.dtype) -> list[Call]:
    """Calls of an op on a CPU."""
    sides = [side for _, side in SIDES]
    numels = [packed_numel(side) for side in sides]
    squares, starts, end = [(x := _whole(side, side)) + x.T for side in sides], [3, 7 + numels[0]], 9 + sum(numels)
    averages, sums = ([_whole(numel, seed=seed) for numel in numels] for seed in range(2))
    counts, updates = [torch.tensor(3.0)] * 2, [torch.tensor(float(k)) for k in range(2)]
    calls: dict[str, list[Call]] = {
        "symmetric_pack_into_": [((torch.zeros(end, dtype=dtype), starts, squares), {})],
        "symmetric_unpack_from": [((_whole(end).to(dtype), starts, sides), {})],
        "ema_update_": [((averages, sums, counts, updates, [0.75, 0.5]), {})],
    }
    for rows, side in SIDES:
        x, first, second = (_whole(rows, side, seed=seed) for seed in range(3))
        ones = {"ones_column": torch.ones(rows, 1), "scale": 2.0}
        several = x.expand(2, -1, -1).clone(), torch.stack([first, x]), torch.stack([second, first]).abs()
        counted, flags = torch.tensor([7.0, 3.0]), torch.tensor([True, False])
        betas = {"betas": (0.75, 0.875)}
        out, waiting = (torch.zeros(2, rows, side) for _ in range(2))
        # norms, sizes, targets, full sizes, bounds and replacements; the second is not stepped along
        norm, size, *vectors = torch.tensor([[4.0, 2, 16, 4, 9, 3], [4, 2, 16, 4, 0, 3]]).T.contiguous()
        each: dict[str, Call] = {
            "syrk_accumulate_": ((torch.ones(packed_numel(side + 1)), x.to(dtype)), ones),
            "adam_scale_": ((out, waiting, *several, counted, flags, torch.tensor(0.5)), {**betas, "eps": 0.125}),
            "adam_fold_": ((several[1], several[2], counted, several[0], flags), betas),
            "finish_direction_": ((several[0], norm, size if rows > side else None, *vectors, 0.5), {}),
        }
        for name, call in each.items():
            calls.setdefault(name, []).append(call)
    return calls[op]


PROBED: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys(("syrk_accumulate_", "symmetric_pack_into_", "symmetric_unpack_from"), DTYPES),
    **dict.fromkeys(("ema_update_", "adam_scale_", "adam_fold_", "finish_direction_"), DTYPES[:1]),
}
"""Every op that a backend compiles, and its dtypes."""


def moved(value: Any, device: torch.device) -> Any:
    """Tensors of a structure on a device, copied."""
    return tree_map_only(Tensor, lambda x: x.to(device, copy=True), value)


@torch.no_grad()
def fault(op: str, implementation: Callable[..., Any], device: torch.device) -> str:
    """What is wrong with an op on a device; empty if nothing is. Waits for the device."""
    for dtype in PROBED[op]:
        with torch.device("cpu"):
            made = probes(op, dtype)
        for arguments, options in made:
            ours, theirs = (moved((arguments, options), place) for place in (device, torch.device("cpu")))
            wanted = getattr(reference, op)(*theirs[0], **theirs[1])
            try:
                found = moved((implementation(*ours[0], **ours[1]), ours[0]), torch.device("cpu"))
            except torch.OutOfMemoryError:
                raise
            except Exception as problem:
                return f"fails: {problem}".splitlines()[0]
            leaves = map(tree_leaves, (found, (wanted, theirs[0])))
            mine, right = ([x for x in each if isinstance(x, Tensor)] for each in leaves)
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
    """Op -> why its implementation must not be used on a device, of op -> (backend, implementation). Processes of one
    machine check one after the other. An op is noted before it is checked: one that ends its process is known by the
    next."""
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
    known: dict[str, str] = {}
    with suppress(OSError, ValueError):
        known = json.loads(path.read_text()) if path else {}

    def note(now: Mapping[str, str]) -> None:
        if path:
            whole = path.with_suffix(f".{os.getpid()}")
            whole.write_text(json.dumps(now, indent=0))
            os.replace(whole, path)

    for op, (backend, implementation) in compiled.items():
        name = f"{op} by {backend}"
        if name in known:
            continue
        note(known | {name: ENDED})
        try:
            known[name] = fault(op, implementation, device)
        finally:  # also where memory was full or somebody interrupted: not the op's fault
            note(known)
        if known[name]:
            check_alive(device)
    return known


def check_alive(device: torch.device) -> None:
    """Raises if a kernel has broken the GPU's context, in which nothing runs any more; it is noted by then, so that the
    next process does without it. Waits for the device."""
    torch.zeros((), device=device).item()


def identity(device: torch.device) -> str:
    """Of what a result depends on: sources of ops, versions, driver and GPU."""
    found = hashlib.sha256()
    for file in sorted([*(build.PACKAGE / "ops").rglob("*.py"), *build.source_folder().iterdir()]):
        found.update(file.name.encode() + file.read_bytes())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {platform.machine()}"
    facts = [torch.__version__, name]
    with suppress(metadata.PackageNotFoundError):
        facts.append(metadata.version("triton"))
    with suppress(OSError):
        facts.append(Path("/proc/driver/nvidia/version").read_text())
    found.update("\0".join(facts).encode())
    return found.hexdigest()[:16]
