"""``python -m ds_kfac run``: DeepSpeed's launcher, with K-FAC enabled in every process that it starts.

Each of them runs this file as a module, which enables K-FAC and then runs the user's script in its place: that needs
no variable, which launchers do not carry to other nodes.
"""

import os
import runpy
import sys

from deepspeed.launcher import runner

from ds_kfac.engine.entry import enable


def launch(arguments: list[str]) -> None:
    """Run DeepSpeed's launcher with the arguments of its command; ends the process as it does.

    Raises:
        ValueError: ``--no_python``.
    """
    given = runner.parse_args(arguments)
    if given.no_python:
        raise ValueError("--no_python: only Python scripts are known here; set DS_KFAC=1 in the environment instead")
    launcher_arguments = arguments[: len(arguments) - len(given.user_args) - 1]
    script = ["-m", given.user_script] if given.module else [given.user_script]
    module = [] if given.module else ["--module"]
    runner.main([*launcher_arguments, *module, __spec__.name, *script, *given.user_args])


def run_script(arguments: list[str]) -> None:
    """In a rank: enable K-FAC, then run a script as ``python`` would: maybe ``--local_rank=N``, then ``script.py`` or
    ``-m module``, then the script's own arguments."""
    enable()
    local_rank = [arguments.pop(0)] if arguments[0].startswith("--local_rank") else []
    as_module = arguments[0] == "-m"
    script, *rest = arguments[as_module:]
    sys.argv = [script, *local_rank, *rest]
    if as_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    run_script(sys.argv[1:])
