"""Checks before DeepSpeed builds an engine, with reasons where DeepSpeed's own errors give none;
and a job of one rank for a process that no launcher has started."""

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from torch import nn

from ds_kfac.config.deepspeed_config import block
from ds_kfac.directions.base import UpdateRule
from ds_kfac.directions.table import DIRECTIONS
from ds_kfac.log import say, warn
from ds_kfac.model.layers import tensors_of

COMPILED = "deepspeed_shm_comm"
"""The op that DeepSpeed builds when it makes the process group on a CPU."""
NOT_PASSED_ON = (
    "a KFACAdamW was made for {count} of the parameters that this engine trains, and is not what "
    "deepspeed.initialize "
    "was given. Pass it on as optimizer=. transformers' Trainer drops optimizers=(..) under "
    "DeepSpeed: give it "
    'optimizer_cls_and_kwargs=(ds_kfac.KFACAdamW, {{"lr": 1e-3}}), or name KFACAdamW in the '
    "DeepSpeed config. An "
    "object that is not meant to train has to be deleted before the engine is built"
)
OF_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Environment variables that launchers set for every rank."""
OF_OTHERS = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
    "AZUREML_EXPERIMENT_ID",
    "SM_TRAINING_ENV",
)
"""Variables of MPI, AzureML and SageMaker, which DeepSpeed reads if :data:`OF_RANK` are missing."""


def alone() -> bool:
    """Whether no launcher has started this process, as in a notebook, and it has no process group
    yet."""
    if (
        any(name in os.environ for name in (*OF_RANK, *OF_OTHERS))
        or deepspeed.comm.is_initialized()
    ):
        return False
    tasks = (os.environ.get(name, "1") for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"))
    # srun python train.py
    several = "SLURM_PROCID" in os.environ and any(number != "1" for number in tasks)
    return not several and not (
        torch.distributed.is_available() and torch.distributed.is_initialized()
    )


def start_alone() -> None:
    """If this process is :func:`alone`, make it the only rank of a job, and say that: sets a
    launcher's variables, with a free port. One rank sends nothing, so DeepSpeed need not compile
    :data:`COMPILED` for it."""
    if not alone():
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        os.environ.setdefault(name, value)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    deepspeed.ops.__compatible_ops__[COMPILED] = False
    kind, count = get_accelerator().device_name(), get_accelerator().device_count()
    where, script = (
        "the CPU" if kind == "cpu" else f"one {kind} device of {count}",
        Path(sys.argv[0]).name,
    )
    more = (
        f"; `deepspeed {script if script.endswith('.py') else 'train.py'}` starts several"
        if count > 1
        else ""
    )
    say(f"ds_kfac: no launcher has started this process: it is a job of one rank, on {where}{more}")


def builds_folder() -> Path:
    """Folder in which this torch builds extensions, one for each op. Without TORCH_EXTENSIONS_DIR
    it is another one for each Python, and for each CUDA that torch is built for, as
    ~/.cache/torch_extensions/py311_cpu."""
    # setuptools, which this imports, is a third of what importing us would cost
    from torch.utils.cpp_extension import _get_build_directory, get_default_build_root

    try:
        return Path(_get_build_directory("", verbose=False))  # which also makes it
    except OSError:
        return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def is_compiled(op: str) -> bool:
    """Whether an op of DeepSpeed's is there for the torch that runs now. torch compiles it again if
    the last build was for another torch: one in another place, or an older one in the same
    place."""
    from torch.utils.cpp_extension import TORCH_LIB_PATH

    if installed_ops.get(op):  # with DeepSpeed itself
        return True
    library = builds_folder() / op / f"{op}.so"
    try:
        commands = library.with_name("build.ninja").read_text()
        is_newer = (
            library.stat().st_mtime >= Path(torch.__file__).with_name("version.py").stat().st_mtime
        )
    except OSError:
        return False
    return is_newer and TORCH_LIB_PATH in commands


def needs_compiled() -> bool:
    """Whether DeepSpeed uses :data:`COMPILED` here."""
    return get_accelerator().device_name() == "cpu" and bool(
        deepspeed.ops.__compatible_ops__.get(COMPILED)
    )


def op_of_optimizer(ds_config: Mapping[str, Any]) -> str | None:
    """The op that DeepSpeed compiles on a CPU for the optimizer that a config names; None if it
    needs none."""
    optimizer = block(ds_config, "optimizer")
    name = str(optimizer.get("type")).lower()
    offload = block(block(ds_config, "zero_optimization"), "offload_optimizer")
    offloads = offload.get("device") in ("cpu", "nvme")
    if get_accelerator().device_name() != "cpu" or block(optimizer, "params").get("torch_adam"):
        return None
    if name in ("adam", "adamw"):
        return "cpu_adam" if offloads else "fused_adam"
    return (
        {"kfacadamw": "cpu_adam", "lion": "cpu_lion", "adagrad": "cpu_adagrad"}.get(name)
        if offloads
        else None
    )


WITHOUT = {
    COMPILED: f'deepspeed.ops.__compatible_ops__["{COMPILED}"] = False before the process group '
    f"is made",
    "fused_adam": '"torch_adam": true in the optimizer\'s params',
}
"""Op -> how a program does without it."""
_announced: set[str] = set()
"""Ops of which :func:`warn_of_compilation` has warned."""


def warn_of_compilation(ds_config: Mapping[str, Any] | None = None) -> None:
    """Warn, once of each op, of what DeepSpeed compiles at its first start on a CPU: it is silent
    for minutes then, and a run that is killed meanwhile leaves a lock that blocks all later ones.

    Launchers, which import ds_kfac where ``DS_KFAC`` is set, start no DeepSpeed themselves. A
    program that makes itself a rank after it has called ``enable`` is warned at ``initialize``.

    Args:
        ds_config: what ``initialize`` was given; None before it.
    """
    ops = []
    if not alone() and needs_compiled() and not deepspeed.comm.is_initialized():
        ops.append(COMPILED)
    if ds_config is not None and (op := op_of_optimizer(ds_config)) is not None:
        ops.append(op)
    ops = [op for op in ops if op not in _announced and not is_compiled(op)]
    if not ops:
        return
    _announced.update(ops)
    remedies = "".join(f". To do without {op}: {WITHOUT[op]}" for op in ops if op in WITHOUT)
    warn(
        f"DeepSpeed now compiles {' and '.join(ops)} below {builds_folder()}, once; for one to "
        f"five minutes nothing is "
        f"printed{remedies}. If it takes longer, a run that was killed may have left a lock: "
        "`python -m ds_kfac doctor` names it"
    )


def check_tensors(model: Any, arguments: dict[str, Any]) -> None:
    """Raise ValueError for weights that DeepSpeed cannot broadcast: its own error names neither
    them nor a reason; and for parameters that ``deepspeed.initialize`` is to train, by its
    ``arguments``, and that the model has not got."""
    named = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
    known, groups = (
        {*map(id, named.values())},
        getattr(arguments.get("optimizer"), "param_groups", ()),
    )
    given = arguments.get("model_parameters"), [group["params"] for group in groups]
    if (
        named
        and (other := next((x for x in tensors_of(given) if id(x) not in known), None)) is not None
    ):
        raise ValueError(
            f"ds_kfac: the optimizer was given a parameter of shape {list(other.shape)} that the "
            f"model has not got, of "
            "a copy of it, or of a loss with a learned weight. Make it a parameter of the model "
            "that is given to "
            "initialize, or step it by an optimizer of its own"
        )
    for name, parameter in named.items():
        if not parameter.ndim:
            raise ValueError(
                f"ds_kfac: {name} has no dimension, as CLIP's logit_scale, which "
                f"deepspeed.initialize cannot broadcast "
                "with any optimizer; make it one of shape [1] before: p.data = p.data.view(1)"
            )
        if parameter.numel() and parameter.stride(-1) != 1:
            raise ValueError(
                f"ds_kfac: {name} is stored in another order than its shape (channels_last, a "
                f"transposed matrix, as "
                "qr and svd return), which deepspeed.initialize cannot broadcast; make it p.data "
                "= p.data.contiguous() "
                "before. Convert images to channels_last instead, or at ZeRO stage 0 the model "
                "after initialize"
            )


def check_objects(arguments: dict[str, Any], source: Mapping[str, Any], rule: UpdateRule) -> None:
    """Find out whether a KFACAdamW object was made for this engine's parameters, but something else
    will train them.

    Args:
        arguments: arguments of ``deepspeed.initialize``; iterators among them become lists, so that
            both can read them.
        source: DeepSpeed config.
        rule: the engine's update rule.

    Raises:
        ValueError: there is such an object. If the config names KFACAdamW, too, this is only a
            warning.
    """
    optimizer, given = arguments.get("optimizer"), arguments.get("model_parameters")
    of_config = optimizer is None and "optimizer" in source
    if rule.given(optimizer) or not (of_config or hasattr(optimizer, "param_groups")):
        return  # the object is used; or nothing is trained; or a function makes the optimizer
    if isinstance(given, Iterator):
        given = arguments["model_parameters"] = list(given)
    for group in given if isinstance(given, list | tuple) else ():
        if isinstance(group, dict) and isinstance(group.get("params"), Iterator):
            group["params"] = list(group["params"])
    if of_config:
        given = list(arguments["model"].parameters()) if given is None else given
    else:
        given = optimizer.param_groups  # type: ignore[union-attr]
    trained = [parameter for parameter in tensors_of(given) if parameter.requires_grad]
    if count := max(other.unstepped(trained) for other in DIRECTIONS):
        text = NOT_PASSED_ON.format(count=count)
        if rule.optimizer_type is None:
            raise ValueError(f"ds_kfac: {text}")
        warn(
            f"{text}. Here the DeepSpeed config names it, too: this engine trains with the rates "
            f"of the config"
        )


def trains_nothing(model: Any) -> bool:
    """Whether a whole model is frozen. False for a pipeline: its other stages may train."""
    plain = isinstance(model, nn.Module) and not isinstance(model, deepspeed.pipe.PipelineModule)
    return plain and not any(parameter.requires_grad for parameter in model.parameters())


@contextmanager
def saying_how_to_launch() -> Iterator[None]:
    """Wraps the call that makes the process group: if no launcher has set a rank's variables,
    DeepSpeed asks MPI.

    Raises:
        RuntimeError: DeepSpeed asked, and mpi4py is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as problem:
        if problem.name != "mpi4py":
            raise
        raise RuntimeError(
            "ds_kfac: no launcher has started this process (RANK is not in its environment, but "
            "other variables of a "
            "launcher or of MPI are), and without one DeepSpeed "
            f"asks mpi4py, which is not installed; start it with `deepspeed "
            f"{Path(sys.argv[0]).name or 'train.py'}`, "
            "or with torchrun"
        ) from problem
