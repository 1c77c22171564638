"""Decide whether an implementation of an op may be used on this GPU and for these arguments.

An implementation raises ``NotMadeFor`` before it writes anything if it does not support a dtype, a
stride or a size. Plain torch supports all arguments and runs instead. Both the implementation and
plain torch raise a ValueError for wrong arguments, such as shapes that do not fit.

Before a compiled op is used for the first time, its results are compared with those of plain torch,
in every dtype of the op and on two unusual shapes. A kernel computes the first shape in a single
program, and the second in many tiles. Rows and matrices contain small integers, so products and
sums are exact in every dtype. The outcome is stored in a file in the build folder, for this
combination of sources, versions, driver and GPU. Delete this file to check again.
``DS_KFAC_CHECK_OPS=0`` turns the check off.
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

from ds_kfac.ops import build, functional
from ds_kfac.ops.functional import packed_numel

CAPABILITY = (8, 0)
"""The lowest compute capability for which kernels are compiled and checked."""


def gpu_problem() -> str | None:
    """Return why our kernels cannot run on torch's current GPU, or None if they can."""
    if torch.version.hip is not None:
        return "our kernels need an NVIDIA GPU, but torch is built for AMD GPUs"
    if torch.version.cuda is None:
        return "torch is built without CUDA"
    if not torch.cuda.is_available():
        return "there is no NVIDIA GPU that torch can use (nvidia-smi, CUDA_VISIBLE_DEVICES)"
    capability = torch.cuda.get_device_capability()
    if capability >= CAPABILITY:
        return None
    needed, has = (".".join(map(str, each)) for each in (CAPABILITY, capability))
    return f"needs compute capability {needed}, {torch.cuda.get_device_name()} has {has}"


def gpu_architecture() -> str:
    """Return the architecture of torch's current GPU as nvcc names it, such as ``90a``."""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}{'a' if major == 9 else ''}"


class NotMadeFor(ValueError):
    """An implementation does not support its arguments. It has not written anything."""


def guarded(backend: str, op: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``implementation`` with a fallback to plain torch for arguments that it does not
    support.

    If the implementation fails for another reason, for example because a kernel does not compile on
    this machine, the returned function raises RuntimeError. The message says how to do without the
    backend.
    """

    @wraps(implementation)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return implementation(*args, **kwargs)
        except NotMadeFor:
            # Plain torch runs below, outside of this handler. Inside it, an error of torch would
            # name this exception as its cause.
            pass
        except (ValueError, torch.OutOfMemoryError):
            raise
        except Exception as problem:
            raise RuntimeError(
                f'{op} by the backend "{backend}" failed: {type(problem).__name__}: {problem}\n'
                "This is a fault of the backend or of its installation. Use kfac.ops.backend "
                '"torch" to do without this backend.'
            ) from problem
        return getattr(functional, op)(*args, **kwargs)

    return run


def describe(*tensors: Tensor) -> str:
    """Return the dtypes, shapes and strides of tensors, for an error message."""
    return ", ".join(f"{x.dtype} {tuple(x.shape)} strides {x.stride()}" for x in tensors)


def check_device(op: str, tensors: Sequence[Any], device_type: str | None) -> None:
    """Raise NotMadeFor unless all tensors in ``tensors`` are on one device of the given type (None:
    any type). Entries that are not tensors are ignored."""
    devices = {x.device for x in tensors if isinstance(x, Tensor)}
    if len(devices) > 1 or any(device.type != (device_type or device.type) for device in devices):
        raise NotMadeFor(
            f"{op}: expected tensors on one {device_type or ''} device, got "
            f"{sorted(map(str, devices))}"
        )


SIDES = ((65, 63), (33, 648))
"""(rows, columns) of the matrices with which ops are checked. The rows of the second shape are
aligned, and long enough for the tiles that large sides use."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALLOWED = 1e-5
"""Largest allowed difference from plain torch, relative to the largest value. fp32 divisions and
short sums differ by less."""
CHECK_SECONDS = 600
"""Seconds that a process waits for another process's check. A check spends most of its time on
compilation."""
ENDED = "was being checked when a process ended"
Call = tuple[tuple, dict[str, Any]]


def _whole(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(
        -3, 4, shape, generator=torch.Generator().manual_seed(seed), device="cpu"
    ).float()


def probes(op: str, dtype: torch.dtype) -> list[Call]:
    """Return the calls with which an op is checked: pairs (arguments, options), with tensors on the
    CPU."""
    sides = [side for _, side in SIDES]
    numels = [packed_numel(side) for side in sides]
    squares = [x + x.T for x in (_whole(side, side) for side in sides)]
    starts = [3, 7 + numels[0]]
    end = 9 + sum(numels)
    averages, sums = ([_whole(numel, seed=seed) for numel in numels] for seed in range(2))
    fp32: Any = {"dtype": torch.float32, "device": "cpu"}
    counts = [torch.tensor(3.0, **fp32)] * 2
    updates = [torch.tensor(float(k), **fp32) for k in range(2)]
    calls: dict[str, list[Call]] = {
        "symmetric_pack_into_": [
            ((torch.zeros(end, dtype=dtype, device="cpu"), starts, squares), {})
        ],
        "symmetric_unpack_from": [((_whole(end).to(dtype), starts, sides), {})],
        "ema_update_": [((averages, sums, counts, updates, [0.75, 0.5]), {})],
    }
    for rows, side in SIDES:
        x, first, second = (_whole(rows, side, seed=seed) for seed in range(3))
        gradient = x.expand(2, -1, -1).clone()
        moments = (torch.stack([first, x]), torch.stack([second, first]).abs())
        updates_n = torch.tensor([7.0, 3.0], **fp32)
        flags = torch.tensor([True, False], device="cpu")
        out = torch.zeros(2, rows, side, **fp32)
        apart = torch.zeros(2, rows * side + 8, **fp32)[:, 8:].unflatten(1, (rows, side))
        norm, size, target, full = torch.tensor(
            [[4.0, 2, 16, 4], [4, 2, 16, 4]], **fp32
        ).T.contiguous()
        of_shape: dict[str, Call] = {
            "adam_step_": (
                (out, gradient, *moments, updates_n, flags),
                {"betas": (0.75, 0.875), "eps": 0.125},
            ),
            "finish_direction_": (
                (apart, gradient, norm, size if rows > side else None, target, full, flags),
                {},
            ),
        }
        for name, call in of_shape.items():
            calls.setdefault(name, []).append(call)
        for kept in (None, torch.arange(rows, device="cpu") % 3 > 0):
            total = torch.ones(packed_numel(side + 1), **fp32)
            call = (total, x.to(dtype)), {"kept": kept, "bias": True, "scale": 2.0}
            calls.setdefault("syrk_accumulate_", []).append(call)
    return calls[op]


PROBED: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys(("syrk_accumulate_", "symmetric_pack_into_", "symmetric_unpack_from"), DTYPES),
    **dict.fromkeys(("ema_update_", "adam_step_", "finish_direction_"), DTYPES[:1]),
}
"""Ops that a backend compiles, as a dict from op to the dtypes in which it is checked."""


def moved(value: Any, device: torch.device) -> Any:
    """Return a nested structure with copies of its tensors on ``device``."""
    return tree_map_only(Tensor, lambda x: x.to(device, copy=True), value)


@torch.no_grad()
def fault(op: str, implementation: Callable[..., Any], device: torch.device) -> str:
    """Return what is wrong with an implementation on a device, or "" if nothing is wrong. Waits for
    the device."""
    for dtype in PROBED[op]:
        with torch.device("cpu"):
            made = probes(op, dtype)
        for arguments, options in made:
            ours, theirs = (
                moved((arguments, options), place) for place in (device, torch.device("cpu"))
            )
            expected = getattr(functional, op)(*theirs[0], **theirs[1])
            try:
                actual = moved((implementation(*ours[0], **ours[1]), ours[0]), torch.device("cpu"))
            except torch.OutOfMemoryError:
                raise
            except Exception as problem:
                return f"fails: {problem}".splitlines()[0]
            # results, and arguments changed in place
            leaves = map(tree_leaves, (actual, (expected, theirs[0])))
            got, wanted = ([x for x in each if isinstance(x, Tensor)] for each in leaves)
            if len(got) != len(wanted):
                return "is wrong: returns a wrong number of tensors"
            worst = max(map(difference, got, wanted))
            if worst > ALLOWED:
                return (
                    f"is wrong: off by {worst:.1e} of the largest value, in "
                    f"{str(dtype).removeprefix('torch.')}"
                )
    return ""


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value. It is infinite if the
    shapes differ or a value is not finite."""
    if actual.shape != expected.shape:
        return float("inf")
    largest = expected.double().abs().max().clamp(min=1e-30)
    return float(
        ((actual.double() - expected.double()).abs().max() / largest).nan_to_num(nan=float("inf"))
    )


def faults(
    compiled: Mapping[str, tuple[str, Callable[..., Any]]], device: torch.device
) -> dict[str, str]:
    """Check compiled ops on a device. Return a dict from op to the reason why it must not be used
    there. Ops that may be used are not in the dict.

    The processes of a machine check one after the other. An op is entered in the file of outcomes
    before it is checked. If the check kills its process, the next process does not run the op
    again.

    Args:
        compiled: dict from op to (backend, implementation).
        device: the device.
    """
    if os.environ.get("DS_KFAC_CHECK_OPS") == "0":
        return {}
    path = build.folder() / f"checked-{identity(device)}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with build.locked(path.with_suffix(".lock"), CHECK_SECONDS):
            results = _checked(compiled, device, path)
    except OSError:  # the folder cannot be written
        results = _checked(compiled, device, None)
    named = {op: f"{op} by {backend}" for op, (backend, _) in compiled.items()}
    return {
        op: f"{name} {results[name]} (noted in {path})"
        for op, name in named.items()
        if results[name]
    }


def _checked(
    compiled: Mapping[str, tuple[str, Callable]], device: torch.device, path: Path | None
) -> dict[str, str]:
    """Return a dict from ``OP by BACKEND`` to what is wrong with the op, or "". Ops that are not
    yet in the file ``path`` are checked and added to the file."""
    results: dict[str, str] = {}
    with suppress(OSError, ValueError):
        results = json.loads(path.read_text()) if path else {}

    def note(now: Mapping[str, str]) -> None:
        if path:
            # the file is renamed into place, so that no process reads a half-written file
            complete = path.with_suffix(f".{os.getpid()}")
            complete.write_text(json.dumps(now, indent=0))
            os.replace(complete, path)

    for op, (backend, implementation) in compiled.items():
        name = f"{op} by {backend}"
        if name in results:
            continue
        note(results | {name: ENDED})
        try:
            results[name] = fault(op, implementation, device)
        finally:
            # An interrupt or lack of memory is not the op's fault, so ENDED must not stay in the
            # file.
            note(results)
        if results[name]:
            check_alive(device)
    return results


def check_alive(device: torch.device) -> None:
    """Raise if a kernel has broken the GPU's context, because then nothing can run in this process
    any more. The next process will not use the op that was being checked. Waits for the device."""
    torch.zeros((), dtype=torch.float32, device=device).item()


def identity(device: torch.device) -> str:
    """Return a hash of everything that a check's result depends on: the sources of the ops,
    versions, driver and GPU."""
    digest = hashlib.sha256()
    sources = list[Path]()
    with suppress(build.BuildError):  # an installation without sources has no CUDA ops
        sources += build.source_folder().iterdir()
    for file in sorted([*(build.PACKAGE / "ops").rglob("*.py"), *sources]):
        digest.update(file.name.encode() + file.read_bytes())
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} {platform.machine()}"
    facts = [torch.__version__, name]
    with suppress(metadata.PackageNotFoundError):
        facts.append(metadata.version("triton"))
    with suppress(OSError):
        facts.append(Path("/proc/driver/nvidia/version").read_text())
    digest.update("\0".join(facts).encode())
    return digest.hexdigest()[:16]
