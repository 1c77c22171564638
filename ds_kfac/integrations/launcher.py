"""``python -m ds_kfac run``: run DeepSpeed's launcher, and enable K-FAC in every process that it
starts.

Each process runs this file as a module, which enables K-FAC and then runs the user's script. An
environment variable would not do, because launchers do not pass it on to other nodes. DeepSpeed is
imported only when it is needed, so that help and the error for a missing script appear at once.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec

USAGE = "[deepspeed launcher arguments] script.py [script arguments]"
HELP = """\
usage: {program} run {usage}

Starts a script with DeepSpeed's launcher, and enables K-FAC in every process.
deepspeed.initialize then attaches K-FAC if the DeepSpeed config names KFACAdamW or has a "kfac"
block. The script itself need not be changed.

  {program} run train.py --deepspeed ds_config.json       every GPU of this machine
  {program} run --num_gpus 2 train.py                     two GPUs
  {program} run --include localhost:1,3 train.py          GPUs 1 and 3
  {program} run --hostfile hosts --master_port 29501 train.py
  {program} run --module package.train                    a module instead of a file

Arguments before the script go to DeepSpeed's launcher; `deepspeed --help` lists them."""
HOSTS = "-H", "--hostfile"


def wants_help(arguments: Sequence[str]) -> bool:
    """Return whether to print help instead of starting a script: there is no argument, or an option
    before the script asks for help."""
    if not arguments:
        return True
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word in ("-h", "--help"):
            return True
        if word.endswith(".py") or (not word.startswith("-") and os.path.isfile(word)):
            return False
        if word == "--module":
            return following in ("-h", "--help", "")
    return False


def check_script(arguments: Sequence[str]) -> None:
    """Raise ValueError if the script does not exist. The script is assumed to be the first argument
    that ends with .py. With a hostfile nothing is checked, because the script may exist only on
    another node. A module is not checked here, because it is looked up later."""
    if any(word.split("=")[0] in (*HOSTS, "--module", "--no_python") for word in arguments):
        return
    script = next(
        (word for word in arguments if word.endswith(".py") and not word.startswith("-")), None
    )
    if script is not None and not os.path.isfile(script):
        raise ValueError(missing(script))


def missing(script: str) -> str:
    return (
        f"{script}: no such file in {os.getcwd()}; give the script's path, after the arguments of "
        "the launcher"
    )


def launch(arguments: list[str]) -> None:
    """Run DeepSpeed's launcher with its command-line arguments. Like the launcher, this may end the
    process.

    Raises:
        ValueError: the arguments have ``--no_python``, or the script does not exist.
    """
    check_script(arguments)
    from deepspeed.launcher import runner

    given = runner.parse_args(arguments)
    if given.no_python:
        raise ValueError(
            "--no_python: this command starts only Python scripts; set DS_KFAC=1 in the "
            "environment instead"
        )
    if not (given.module or os.path.isfile(given.hostfile) or os.path.isfile(given.user_script)):
        raise ValueError(missing(given.user_script))
    launcher_arguments = arguments[: len(arguments) - len(given.user_args) - 1]
    script = ["-m", given.user_script] if given.module else [given.user_script]
    module = [] if given.module else ["--module"]
    runner.main([*launcher_arguments, *module, __spec__.name, *script, *given.user_args])


def run_script(arguments: list[str]) -> None:
    """Enable K-FAC in this process, then run a script as ``python`` would.

    Args:
        arguments: optionally ``--local_rank=N``, then ``script.py`` or ``-m module``, then the
            script's own arguments.
    """
    from ds_kfac.engine.entry import enable

    enable()
    local_rank = [arguments.pop(0)] if arguments[0].startswith("--local_rank") else []
    as_module = arguments[0] == "-m"
    script, *rest = arguments[as_module:]
    sys.argv = [script, *local_rank, *rest]
    if as_module:
        if find_spec(script.split(".")[0]) is None:
            sys.exit(f"ds_kfac run: no module {script}; is its folder in PYTHONPATH?")
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        if not os.path.exists(script):
            sys.exit(f"ds_kfac run: {missing(script)}")
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    run_script(sys.argv[1:])
