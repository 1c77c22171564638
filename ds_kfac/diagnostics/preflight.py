"""Check the arguments of ``deepspeed.initialize`` before DeepSpeed builds an engine.

The errors here state reasons, unlike DeepSpeed's own errors. A process that was started without a
launcher becomes a job of one rank.
"""

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
    "a KFACAdamW was made for {count} of the parameters that this engine trains, but "
    "it was not passed to deepspeed.initialize. Pass it as optimizer=. transformers' Trainer "
    "ignores optimizers=(..) under DeepSpeed: give it optimizer_cls_and_kwargs=(ds_kfac.KFACAdamW, "
    '{{"lr": 1e-3}}) instead, or name KFACAdamW in the DeepSpeed config. If this KFACAdamW is not '
    "meant to train, delete it before the engine is built"
)
NO_RANK = (
    "ds_kfac: no launcher has started this process: RANK is not in its environment, but other "
    "variables of a launcher or of MPI are. DeepSpeed therefore asks mpi4py, which is not "
    "installed. Start the script with `deepspeed {script}`, or with torchrun"
)
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Environment variables that launchers set for every rank."""
OTHER_LAUNCHERS = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
    "AZUREML_EXPERIMENT_ID",
    "SM_TRAINING_ENV",
)
"""Variables of MPI, AzureML and SageMaker, which DeepSpeed reads if :data:`RANK_VARIABLES` are
missing."""


def alone() -> bool:
    """Return whether this process has no process group yet and was not started by a launcher, as
    in a notebook."""
    if any(name in os.environ for name in (*RANK_VARIABLES, *OTHER_LAUNCHERS)):
        return False
    if deepspeed.comm.is_initialized():
        return False
    if "SLURM_PROCID" in os.environ:  # srun python train.py
        counts = [os.environ.get(name, "1") for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")]
        if any(count != "1" for count in counts):
            return False
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


def start_alone() -> None:
    """Make this process the only rank of a job if it is :func:`alone`, and print a message.

    This sets the environment variables that a launcher sets, with a free port. A single rank sends
    nothing, so DeepSpeed need not compile :data:`COMPILED`.
    """
    if not alone():
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(port))
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    deepspeed.ops.__compatible_ops__[COMPILED] = False

    device = get_accelerator().device_name()
    count = get_accelerator().device_count()
    where = "the CPU" if device == "cpu" else f"one {device} device of {count}"
    text = f"ds_kfac: no launcher has started this process: it is a job of one rank, on {where}"
    if count > 1:
        name = Path(sys.argv[0]).name
        script = name if name.endswith(".py") else "train.py"
        text += f"; `deepspeed {script}` starts a rank for each device"
    say(text)


def builds_folder() -> Path:
    """Return the folder in which this torch builds extensions. It has a subfolder for each op.

    If TORCH_EXTENSIONS_DIR is not set, the folder depends on the versions of Python and of torch's
    CUDA, as in ~/.cache/torch_extensions/py311_cpu.
    """
    # Imported here because it imports setuptools, which would add a third to the time that
    # importing ds_kfac takes.
    from torch.utils.cpp_extension import _get_build_directory, get_default_build_root

    try:
        return Path(_get_build_directory("", verbose=False))  # also makes the folder
    except OSError:
        return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def is_compiled(op: str) -> bool:
    """Return whether an op of DeepSpeed is compiled for the torch that runs now.

    torch compiles an op again if its last build was for a torch in another folder, or for an older
    torch in the same folder.
    """
    from torch.utils.cpp_extension import TORCH_LIB_PATH

    if installed_ops.get(op):  # compiled when DeepSpeed was installed
        return True
    library = builds_folder() / op / f"{op}.so"
    try:
        commands = library.with_name("build.ninja").read_text()
        built = library.stat().st_mtime
        torch_installed = Path(torch.__file__).with_name("version.py").stat().st_mtime
    except OSError:
        return False
    return built >= torch_installed and TORCH_LIB_PATH in commands


OFFLOAD_OPS = {
    "adam": "cpu_adam",
    "adamw": "cpu_adam",
    "kfacadamw": "cpu_adam",
    "lion": "cpu_lion",
    "adagrad": "cpu_adagrad",
}
"""Lower-case name of an optimizer -> the op that runs its step if it is offloaded."""


def needs_compiled() -> bool:
    """Return whether DeepSpeed uses :data:`COMPILED` here."""
    is_cpu = get_accelerator().device_name() == "cpu"
    return is_cpu and bool(deepspeed.ops.__compatible_ops__.get(COMPILED))


def op_of_optimizer(ds_config: Mapping[str, Any]) -> str | None:
    """Return the op that DeepSpeed compiles on a CPU for the optimizer that the config names. None
    if it compiles no op for this optimizer."""
    optimizer = block(ds_config, "optimizer")
    if get_accelerator().device_name() != "cpu" or block(optimizer, "params").get("torch_adam"):
        return None
    name = str(optimizer.get("type")).lower()
    offload = block(block(ds_config, "zero_optimization"), "offload_optimizer")
    if offload.get("device") in ("cpu", "nvme"):
        return OFFLOAD_OPS.get(name)
    return "fused_adam" if name in ("adam", "adamw") else None


WITHOUT = {
    COMPILED: f'deepspeed.ops.__compatible_ops__["{COMPILED}"] = False before the process group '
    f"is made",
    "fused_adam": '"torch_adam": true in the optimizer\'s params',
}
"""Op -> what a program can set so that DeepSpeed does not compile the op."""
_announced: set[str] = set()
"""Ops about which :func:`warn_of_compilation` has already warned."""


def warn_of_compilation(ds_config: Mapping[str, Any] | None = None) -> None:
    """Warn, once for each op, that DeepSpeed compiles the op at its first start on a CPU.

    While it compiles, DeepSpeed prints nothing for minutes. A run that is killed during this time
    leaves a lock that blocks all later runs.

    A launcher imports ds_kfac if ``DS_KFAC`` is set, but gets no warning, because it does not start
    DeepSpeed itself. A program that sets the variables of a rank only after ``enable`` gets the
    warning at ``initialize``.

    Args:
        ds_config: the config that was passed to ``initialize``; None before ``initialize``.
    """
    ops = []
    if not alone() and needs_compiled() and not deepspeed.comm.is_initialized():
        ops.append(COMPILED)
    optimizer_op = None if ds_config is None else op_of_optimizer(ds_config)
    if optimizer_op is not None:
        ops.append(optimizer_op)
    ops = [op for op in ops if op not in _announced and not is_compiled(op)]
    if not ops:
        return
    _announced.update(ops)
    remedies = "".join(f". To do without {op}, set {WITHOUT[op]}" for op in ops if op in WITHOUT)
    warn(
        f"DeepSpeed now compiles {' and '.join(ops)} below {builds_folder()}, once; for one to "
        f"five minutes nothing is printed{remedies}. If it takes longer, a run that was killed may "
        "have left a lock, which `python -m ds_kfac doctor` would name"
    )


def check_tensors(model: Any, arguments: dict[str, Any]) -> None:
    """Check that DeepSpeed can broadcast the model's weights, and that every parameter in the
    arguments belongs to the model.

    DeepSpeed's own error tells neither which weight is wrong nor why.

    Args:
        arguments: arguments of ``deepspeed.initialize``.

    Raises:
        ValueError: a weight cannot be broadcast, or a parameter is not the model's.
    """
    if not isinstance(model, nn.Module):
        return
    named = dict(model.named_parameters())
    if named:
        _check_membership(named, arguments)
    for name, parameter in named.items():
        if not parameter.ndim:
            raise ValueError(
                f"ds_kfac: {name} has no dimension, like CLIP's logit_scale, and "
                "deepspeed.initialize cannot broadcast it, whatever the optimizer. Before the "
                "call, give it the shape [1]: p.data = p.data.view(1)"
            )
        if parameter.numel() and parameter.stride(-1) != 1:
            raise ValueError(
                f"ds_kfac: {name} is not stored in the order of its shape, for example because it "
                "is in channels_last, or a transposed matrix as qr and svd return it. "
                "deepspeed.initialize cannot broadcast such a parameter. Before the call, set "
                "p.data = p.data.contiguous(). To train in channels_last, convert only the images, "
                "or at ZeRO stage 0 convert the model after initialize"
            )


def _check_membership(named: Mapping[str, nn.Parameter], arguments: dict[str, Any]) -> None:
    """Raise ValueError if a parameter in the arguments of ``deepspeed.initialize`` does not belong
    to the model."""
    model_ids = set(map(id, named.values()))
    groups = getattr(arguments.get("optimizer"), "param_groups", ())
    given = (arguments.get("model_parameters"), [group["params"] for group in groups])
    for tensor in tensors_of(given):
        if id(tensor) not in model_ids:
            raise ValueError(
                f"ds_kfac: the optimizer was given a parameter of shape {list(tensor.shape)} that "
                "the model does not have; it may belong to a copy of the model, or to a loss with "
                "learned weights. Register the parameter in the model that is given to "
                "initialize, or update it with another optimizer"
            )


def check_objects(arguments: dict[str, Any], source: Mapping[str, Any], rule: UpdateRule) -> None:
    """Check that no KFACAdamW object was made for parameters that another optimizer will train.

    Args:
        arguments: arguments of ``deepspeed.initialize``. Iterators of parameters are replaced by
            lists, so that both this function and DeepSpeed can read them.
        source: the DeepSpeed config.
        rule: the engine's update rule.

    Raises:
        ValueError: there is such an object, and the config does not name KFACAdamW. If the config
            names KFACAdamW, this function only warns.
    """
    optimizer = arguments.get("optimizer")
    config_makes_it = optimizer is None and "optimizer" in source
    # if ``optimizer`` has no param_groups, it is a function that makes the optimizer
    trains = config_makes_it or hasattr(optimizer, "param_groups")
    if rule.given(optimizer) or not trains:
        return
    given = _as_lists(arguments)
    if not config_makes_it:
        given = optimizer.param_groups  # type: ignore[union-attr]
    elif given is None:
        given = list(arguments["model"].parameters())
    trained = [parameter for parameter in tensors_of(given) if parameter.requires_grad]
    count = max(other.unstepped(trained) for other in DIRECTIONS)
    if not count:
        return
    text = NOT_PASSED_ON.format(count=count)
    if rule.optimizer_type is None:
        raise ValueError(f"ds_kfac: {text}")
    warn(
        f"{text}. Here the DeepSpeed config names KFACAdamW, too, so this engine trains with the "
        "learning rates of the config"
    )


def _as_lists(arguments: dict[str, Any]) -> Any:
    """Return ``model_parameters`` of the arguments, with every iterator in it converted to a
    list. The arguments are changed in place."""
    given = arguments.get("model_parameters")
    if isinstance(given, Iterator):
        given = arguments["model_parameters"] = list(given)
    for group in given if isinstance(given, list | tuple) else ():
        if isinstance(group, dict) and isinstance(group.get("params"), Iterator):
            group["params"] = list(group["params"])
    return given


def trains_nothing(model: Any) -> bool:
    """Return whether the whole model is frozen. False for a pipeline, because its other stages may
    train."""
    if not isinstance(model, nn.Module) or isinstance(model, deepspeed.pipe.PipelineModule):
        return False
    return not any(parameter.requires_grad for parameter in model.parameters())


@contextmanager
def saying_how_to_launch() -> Iterator[None]:
    """If creating the process group fails inside this context, explain how to launch the script.

    If no launcher has set a rank's variables, DeepSpeed gets them from MPI.

    Raises:
        RuntimeError: DeepSpeed needs MPI, and mpi4py is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as problem:
        if problem.name != "mpi4py":
            raise
        script = Path(sys.argv[0]).name or "train.py"
        raise RuntimeError(NO_RANK.format(script=script)) from problem
