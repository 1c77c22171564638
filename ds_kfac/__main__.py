"""``python -m ds_kfac``: ``run``, ``check``, ``estimate``, ``plot``, ``report``, ``config`` and ``schema``."""

import argparse
import importlib.metadata
import math
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence

import torch
from deepspeed.accelerator import get_accelerator

from ds_kfac import only_for_data
from ds_kfac.config.manual import manual, schema
from ds_kfac.engine.refusals import REFUSALS
from ds_kfac.engine.report import columns
from ds_kfac.estimate import command
from ds_kfac.integrations import launcher, plot
from ds_kfac.model.registry import TYPES
from ds_kfac.ops import build
from ds_kfac.ops.check import gpu_architecture, gpu_problem
from ds_kfac.ops.dispatch import BACKENDS, chosen
from ds_kfac.zero.registry import SHARD_LAYOUTS

PACKAGES = ("ds_kfac", "torch", "deepspeed", "triton", "ninja", "numpy", "pydantic")


def environment_report() -> str:
    """What is installed and found here, and what ds_kfac can do with it, as a table each."""
    versions = [*((name, _version(name)) for name in PACKAGES), ("python", platform.python_version())]
    tables: dict[str, Sequence[tuple[str, ...]]] = {
        "ds_kfac: installed": [*versions, ("nvcc", _compiler("nvcc"))],
        "accelerator": _accelerator(),
        "op libraries: installed if compiled ahead of time, else compiled at first use if compatible": build.rows(
            None if gpu_problem() else gpu_architecture()
        ),
        "backends of ops": [("backend", "device", "runs here"), *map(_backend, BACKENDS)],
        "supported": _support(),
    }
    lines = [line for title, rows in tables.items() for line in (title, *columns(rows))]
    return "\n".join([*lines, "refused at attach", *(f"  {mode}: {advice}" for mode, (_, advice) in REFUSALS.items())])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = getattr(sys.modules.get(package), "__version__", None)  # imported from its sources
        return f"{version}, not installed but imported" if version else "not installed"


def _compiler(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        return "not found in PATH"
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as problem:
        return f"{path}: does not run ({problem})"
    lines = [line for line in said.splitlines() if line.strip()]
    found = [line for line in lines if "release" in line] or lines[:1]
    return f"{found[0].strip()} ({path})" if found else path


def _accelerator() -> list[tuple[str, str]]:
    accelerator = get_accelerator()
    kind, count, backends = accelerator.device_name(), accelerator.device_count(), torch.distributed
    name = torch.cuda.get_device_name() if kind == "cuda" and count else platform.processor() or platform.machine()
    known = ("gloo", "nccl", "mpi") if backends.is_available() else ()
    has = ", ".join(name for name in known if getattr(backends, f"is_{name}_available")())
    return [
        ("DeepSpeed's", f"{kind} ({name}), {count} of them"),
        ("torch sees", f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "no CUDA device"),
        ("threads", str(torch.get_num_threads())),
        ("communication", f"{accelerator.communication_backend_name()}; torch has {has or 'none'}"),
    ]


def _backend(name: str) -> tuple[str, str, str]:
    device = BACKENDS[name].device
    reason = chosen(device).missing.get(name) if device else None
    return name, device or "any", f"no: {reason}" if reason else "yes"


def _support() -> list[tuple[str, str]]:
    accelerator, kind = get_accelerator(), get_accelerator().device_name()
    tested = "tested" if kind == "cpu" else "runs through torch, but is not tested yet"
    return [
        ("device", f"{kind}: {tested}"),
        ("ops", str(chosen(kind))),
        ("decomposition", "torch.linalg.eigh, or Cholesky with inverses: LAPACK on a CPU, cuSOLVER on a GPU"),
        ("bf16", "yes" if accelerator.is_bf16_supported() else "no"),
        ("fp16", "yes" if accelerator.is_fp16_supported() else "no"),
        ("layers", ", ".join(TYPES)),
        ("engines", ", ".join(["bare torch optimizer (stage 0)", *(wrapper.__name__ for wrapper in SHARD_LAYOUTS)])),
    ]


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; must be an integer of at least 1")
    return int(text)


def _rate(text: str) -> float:
    try:
        if 0 < float(text) < math.inf:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"got {text!r}; must be a positive number such as 25 or 1.5e14")


def _describe(parser: argparse.ArgumentParser, *, check: bool = False) -> None:
    """Arguments of ``estimate``, and of ``check``."""
    parser.add_argument("--model", required=True, help="module:factory, a function that returns a model, or (model, "
                        "example inputs), called on the meta device; or hf:PATH, a config.json of transformers, or its "
                        "folder")  # fmt: skip
    parser.add_argument("--optimizer", metavar="TYPE", help="the one that the script passes, such as AdamW, if the "
                        "config has none")  # fmt: skip
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help='of the parameters, where the config has '
                        '"auto", or nothing')  # fmt: skip
    parser.add_argument("--lora", type=_count, metavar="R", help="train adapters of this rank only, put in by peft")
    default = "" if check else '; default: KFACAdamW, stage 0, an empty "kfac" block'
    parser.add_argument("--config", required=check, help=f"DeepSpeed config (JSON){default}")
    parser.add_argument("--world", type=_count, required=not check, default=1, help="data-parallel ranks")
    if check:
        return
    parser.add_argument("--stage", type=int, choices=range(4), help="ZeRO stage, in place of the config's")
    parser.add_argument("--batch-rows", type=_count, metavar="N", help="tokens (or images) of a rank in a step; "
                        "default: the config's batch times the model's context")  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="whose builtin costs count")
    parser.add_argument("--device-flops", type=_rate, metavar="F", help="FLOP/s of K-FAC's products, fp32 or TF32")
    parser.add_argument("--model-flops", type=_rate, metavar="F", help="FLOP/s that the model's forward and backward "
                        "reach; default: those of the products")  # fmt: skip
    parser.add_argument("--link-gbps", type=_rate, metavar="G", help="Gbit/s of a rank, each way")
    parser.add_argument("--node-size", type=_count, metavar="N", help="ranks of a node; default: one")
    parser.add_argument("--node-gbps", type=_rate, metavar="G", help="Gbit/s of a rank within its node; default: the "
                        "same as between nodes")  # fmt: skip


COMMANDS = {
    "check": command.check, "estimate": command.run, "plot": plot.run,
    "report": lambda _: environment_report(), "config": lambda _: manual(), "schema": lambda _: schema(),
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0; 1 and a line on stderr if something is wrong with config or model; 2 for wrong arguments."""
    parser = argparse.ArgumentParser("python -m ds_kfac", description="K-FAC for DeepSpeed")
    commands = parser.add_subparsers(dest="command", required=True)
    what = "memory, bytes, FLOPs and overhead of every strategy, before a run"
    more = "What K-FAC would cost a rank, from the plan that a run would make; no model is allocated."
    _describe(commands.add_parser("estimate", help=what, description=more))
    check = commands.add_parser("check", help="whether a config fits a model, and the report of attach, without a run")
    _describe(check, check=True)
    plot.add_arguments(commands.add_parser("plot", help="draw a run's logs: csv, tensorboard, or the Trainer's"))
    # its arguments are DeepSpeed's launcher's, see below
    commands.add_parser("run", help=f"start a script with K-FAC enabled: {launcher.USAGE}", add_help=False)
    commands.add_parser("report", help="versions, accelerator, and what is supported here")
    commands.add_parser("config", help='every key of the "kfac" block, as Markdown')
    commands.add_parser("schema", help='JSON schema of a DeepSpeed config with a "kfac" block, for editors')
    given = sys.argv[1:] if argv is None else argv
    launches = given[:1] == ["run"]
    arguments = parser.parse_args(given[: 1 if launches else None])
    try:
        if launches:
            launcher.launch(given[1:])
        else:
            with only_for_data():
                text = COMMANDS[arguments.command](arguments)
            print(text)
    except ValueError as problem:
        print(f"ds_kfac {arguments.command}: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
