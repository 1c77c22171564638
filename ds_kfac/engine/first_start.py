"""DeepSpeed compiles for minutes at a first start on a CPU; a run killed then leaves a lock that stops later ones."""

import os
from functools import cache
from pathlib import Path

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
from torch.utils.cpp_extension import get_default_build_root

OP = "deepspeed_shm_comm"
AHEAD = 'python -c "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load()"'
WITHOUT = f'deepspeed.ops.__compatible_ops__["{OP}"] = False'


@cache
def announce() -> None:
    """Once a process, and on the first rank: what is about to be waited for, and how to avoid it."""
    if os.environ.get("RANK", "0") == "0" and (text := expected()):
        logger.warning(f"ds_kfac: {text}")


def expected() -> str | None:
    """What DeepSpeed will compile before it communicates; None if nothing."""
    if get_accelerator().device_name() != "cpu" or deepspeed.comm.is_initialized():
        return None
    if not deepspeed.ops.__compatible_ops__.get(OP):
        return None
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    folders = [root / OP, *root.glob(f"*/{OP}")]
    if any((folder / f"{OP}.so").exists() for folder in folders):
        return None
    locked = [str(folder / "lock") for folder in folders if (folder / "lock").exists()]
    if locked:
        return f"DeepSpeed waits for {locked[0]}: unless another run is compiling now, remove it, or it waits for ever"
    return (
        f"DeepSpeed compiles {OP} now, for one to two minutes, once; a run killed meanwhile leaves a lock. To build it "
        f"ahead: {AHEAD}; to do without it, before anything is initialized: {WITHOUT}"
    )
