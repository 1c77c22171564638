"""The command line, ``python -m ds_kfac`` or ``ds_kfac``: the commands in :data:`COMMANDS`, and
``run``.

A command's modules are imported when the command runs. So help, the list of config keys, and errors
about missing files appear without importing torch and DeepSpeed.
"""

import argparse
import difflib
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from ds_kfac import __version__, only_for_data
from ds_kfac.diagnostics.text import fitted
from ds_kfac.integrations import launcher, plot


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; must be an integer of at least 1")
    return int(text)


def _rate(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(
        f"got {text!r}; must be a positive number such as 25 or 1.5e14"
    )


def _describe(parser: argparse.ArgumentParser, *, check: bool = False) -> None:
    """Add the arguments of the command ``estimate``, or of the command ``check`` if ``check`` is
    True."""
    parser.add_argument(
        "--model",
        required=True,
        help="module:factory, where factory() is called on the meta device and returns a model or "
        "the pair (model, example inputs); or hf:PATH, where PATH is a config.json of transformers "
        "or its folder",
    )
    parser.add_argument(
        "--optimizer",
        metavar="TYPE",
        help="type of the optimizer that the script passes, such as AdamW; needed if the config "
        "names none",
    )
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help='dtype of the parameters, if the config does not set it or says "auto"',
    )
    parser.add_argument(
        "--lora",
        type=_count,
        metavar="R",
        help="assume that peft adds LoRA adapters of rank R, and that only these are trained",
    )
    default = "" if check else '; default: KFACAdamW at stage 0 with an empty "kfac" block'
    parser.add_argument("--config", required=check, help=f"DeepSpeed config (JSON){default}")
    parser.add_argument(
        "--world", type=_count, required=not check, default=1, help="number of data-parallel ranks"
    )
    if check:
        return
    parser.add_argument(
        "--stage", type=int, choices=range(4), help="ZeRO stage; default: the stage in the config"
    )
    parser.add_argument(
        "--batch-rows",
        type=_count,
        metavar="N",
        help="tokens (or images) that a rank processes in a step; "
        "default: the batch size in the config times the model's context length",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device type whose builtin speeds are used; default: cuda, with an H100's speeds",
    )
    parser.add_argument(
        "--device-flops",
        type=_rate,
        metavar="F",
        help="FLOP/s that a rank reaches in K-FAC's matrix products; default: a builtin value",
    )
    parser.add_argument(
        "--model-flops",
        type=_rate,
        metavar="F",
        help="FLOP/s that a rank reaches in the model's forward and backward passes; default: the "
        "value of --device-flops, or else a builtin value",
    )
    parser.add_argument(
        "--costs",
        metavar="FILE",
        help="file with a machine's speeds, as python -m benchmarks.kernels.costs writes it; "
        "default: the builtin speeds, with which training runs plan",
    )
    parser.add_argument(
        "--link-gbps",
        type=_rate,
        metavar="G",
        help="network bandwidth of a rank in each direction, in Gbit/s",
    )
    parser.add_argument(
        "--node-size", type=_count, metavar="N", help="number of ranks per node; default: 1"
    )
    parser.add_argument(
        "--node-gbps",
        type=_rate,
        metavar="G",
        help="bandwidth of a rank inside its node, in Gbit/s; default: the same as between nodes",
    )


def _describe_factors(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``factors``."""
    parser.add_argument(
        "--model",
        required=True,
        help="hf:PATH, where transformers loads PATH; or module:function, where function() returns "
        "a model",
    )
    parser.add_argument(
        "--data",
        required=True,
        help="with --model hf:PATH: a text file, a .jsonl with a field text, or a folder that the "
        "package datasets has saved; otherwise module:function, where function(rank, ranks) "
        "returns the batches of a rank",
    )
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        help="folder for the files; factors that are already in it are replaced",
    )
    parser.add_argument(
        "--config",
        help='DeepSpeed config; only its ZeRO stage, bf16, offload and "kfac" block are used',
    )
    parser.add_argument(
        "--length",
        type=_count,
        default=512,
        metavar="T",
        help="with --model hf:PATH: texts are joined and cut into sequences of T tokens; "
        "default: 512",
    )
    parser.add_argument(
        "--batch",
        type=_count,
        default=8,
        metavar="N",
        help="with --model hf:PATH: number of sequences in each rank's batch; default: 8",
    )
    parser.add_argument(
        "--limit", type=_count, metavar="N", help="with --model hf:PATH: use at most N sequences"
    )
    parser.add_argument(
        "--fisher",
        choices=("empirical", "monte_carlo", "activations_only"),
        help="gradients from which G is computed: the training gradients (empirical), gradients "
        "for drawn labels (monte_carlo, the true Fisher), or none (activations_only computes A "
        "alone); default: the choice in the config",
    )
    parser.add_argument(
        "--no-corrected", action="store_true", help="skip the pass that computes EKFAC eigenvalues"
    )


def _describe_convert(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``convert``."""
    parser.add_argument(
        "factors",
        type=Path,
        help="folder that the command factors, or engine.kfac.export, has written",
    )
    parser.add_argument("--to", required=True, choices=TOOLS)
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        help="safetensors file to write; for kronfluence, the folder that it calls output_dir",
    )
    parser.add_argument(
        "--name", default="ds_kfac", help="only for kronfluence: the factors' name (factors_name)"
    )
    parser.add_argument(
        "--rank", type=int, default=16, help="only for eva: mean of LoRA's r over the layers"
    )
    parser.add_argument(
        "--rho",
        type=float,
        default=2.0,
        help="only for eva: largest r of a layer, as a multiple of --rank",
    )


TOOLS = ("kronfluence", "regmean", "gptq", "eva")
"""Tools in whose format factors can be written."""
COMMANDS = {
    "check": "ds_kfac.estimate.command:check",
    "estimate": "ds_kfac.estimate.command:run",
    "factors": "ds_kfac.factors.command:run",
    "convert": "ds_kfac.factors.command:run_convert",
    "plot": "ds_kfac.integrations.plot:run",
    "doctor": "ds_kfac.diagnostics.doctor:doctor",
    "config": "ds_kfac.config.manual:manual",
    "schema": "ds_kfac.config.manual:schema",
}
"""dict from command name to the function that runs the command. The function takes the parsed
arguments, and returns a text, or a pair (text, exit status)."""
FOR_PROGRAMS = ("config", "schema")
"""Commands whose output is not wrapped, because users redirect it to files."""
GONE = {"report": "doctor"}
"""dict from the name of a command that an earlier version had to the command that replaces it."""


def _misspelt(argv: Sequence[str], commands: Sequence[str]) -> str | None:
    """Return an error message if the given command does not exist, otherwise None. The message
    names the most similar command. If no command is given, return None."""
    # a number is the value of --local_rank
    words = (word for word in argv if not word.startswith("-") and not word.isdigit())
    word = next(words, None)
    if word is None or word in commands:
        return None
    begins = [name for name in commands if len(word) > 1 and name.startswith(word)] or [
        *filter(None, [GONE.get(word)])
    ]
    close = begins or difflib.get_close_matches(word, commands, n=1, cutoff=0.5)
    return (
        f"no command {word!r}; "
        f"{f'did you mean {close[0]}?' if close else 'commands: ' + ', '.join(commands)}"
    )


def must_exist(option: str, path: str | os.PathLike, what: str) -> None:
    """Raise ValueError if a path does not exist.

    Args:
        option: text before the path in the error message.
        path: the path.
        what: kind of file that the option takes, as text for the error message.
    """
    if not os.path.exists(path):
        raise ValueError(f"{option}{path}: no such file or folder in {os.getcwd()}; give {what}")


def _check_files(arguments: argparse.Namespace) -> None:
    """Raise ValueError if an argument names a file that does not exist, or a module that is not
    installed."""
    model = getattr(arguments, "model", None) or ""
    data = getattr(arguments, "data", None) or ""
    config = getattr(arguments, "config", None)
    if config:
        must_exist("--config ", config, "a DeepSpeed config")
    costs = getattr(arguments, "costs", None)
    if costs:
        must_exist("--costs ", costs, "a file that python -m benchmarks.kernels.costs has written")
    if arguments.command == "convert":
        must_exist(
            "factors ",
            arguments.factors,
            "the folder that the command factors, or engine.kfac.export, has written",
        )
    if model.startswith("hf:"):
        must_exist(
            "--model hf:",
            model.removeprefix("hf:"),
            "a config.json of transformers, or its folder; nothing is downloaded",
        )
        if data:
            must_exist(
                "--data ", data, "a text file, a .jsonl, or a folder of the package datasets"
            )
        data = ""
    for option, name in (("--model", model), ("--data", data)):
        module = name.partition(":")[0].partition(".")[0] if ":" in name else "hf"
        if (
            module.isidentifier()
            and module != "hf"
            and module not in sys.modules
            and find_spec(module) is None
        ):
            raise ValueError(
                f"{option} {name}: no module {module}; is it installed, or is its folder in "
                "PYTHONPATH?"
            )


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status.

    The status is 0 on success, 1 if ``doctor`` finds a fault, and 2 if the arguments are wrong. If
    the config or the model is wrong, the status is 1, and standard error has a message.
    """
    script = os.path.basename(sys.argv[0]) == "ds_kfac"
    program = "ds_kfac" if script else "python -m ds_kfac"
    if script and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # like python -m, so that --model finds modules there
    parser, names = _parser(program)
    argv = sys.argv[1:] if argv is None else argv
    problem = _misspelt(argv, names)
    if problem:
        print(fitted(f"{program}: {problem}"), file=sys.stderr)
        return 2
    if argv[:1] == ["run"]:  # its arguments go to DeepSpeed's launcher unparsed
        arguments = parser.parse_args(argv[:1])
    else:
        arguments = parser.parse_args(argv)
    try:
        return _run(arguments, argv[1:], program)
    except ValueError as error:
        print(fitted(f"ds_kfac {arguments.command}: {error}"), file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace, rest: list[str], program: str) -> int:
    """Run a command and print its output. Return the exit status.

    Args:
        arguments: the parsed arguments.
        rest: all arguments after the command. Only ``run`` uses them, for DeepSpeed's launcher.
        program: command that the user typed, such as "ds_kfac", for help texts.
    """
    if arguments.command == "run":
        if launcher.wants_help(rest):
            print(launcher.HELP.format(program=program, usage=launcher.USAGE))
        else:
            launcher.launch(rest)
        return 0
    _check_files(arguments)
    with only_for_data():
        module, _, function = COMMANDS[arguments.command].partition(":")
        answer = getattr(import_module(module), function)(arguments)
    text, status = answer if isinstance(answer, tuple) else (answer, 0)
    text = text if arguments.command in FOR_PROGRAMS else fitted(text)
    print(text, end="\n" if text else "")
    return status


def _parser(program: str) -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the parser of the command line, and the names of the commands."""
    parser = argparse.ArgumentParser(program, description="K-FAC for DeepSpeed")
    parser.add_argument("--version", action="version", version=f"ds_kfac {__version__}")
    # DeepSpeed's launcher passes this option
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True)
    what = "predict memory, traffic, FLOPs and time of K-FAC for every strategy"
    more = (
        "Predict what K-FAC will cost each rank, from the plan that a run would make. No memory is "
        "allocated for the model."
    )
    _describe(commands.add_parser("estimate", help=what, description=more))
    check = commands.add_parser(
        "check",
        help="tell without training whether a config fits a model, and print attach's report",
    )
    _describe(check, check=True)
    text = (
        "compute factors of a model over some data, without training; for several ranks, use "
        "deepspeed --module ds_kfac factors"
    )
    _describe_factors(commands.add_parser("factors", help=text))
    text = "write factors in the format of kronfluence, RegMean, GPTQ or PEFT's EVA"
    _describe_convert(commands.add_parser("convert", help=text))
    plot.add_arguments(
        commands.add_parser("plot", help="draw a run's logs: csv, tensorboard, or the Trainer's")
    )
    text = f"start a script with K-FAC enabled: {program} run {launcher.USAGE}"
    commands.add_parser("run", help=text, add_help=False)
    commands.add_parser(
        "doctor",
        help="tell whether this environment will work, and how to fix it; bug reports need this",
    )
    commands.add_parser("config", help='print every key of the "kfac" block, as Markdown')
    commands.add_parser(
        "schema", help='print a JSON schema of a DeepSpeed config with a "kfac" block, for editors'
    )
    return parser, list(commands.choices)


if __name__ == "__main__":
    sys.exit(main())
