"""``python -m ds_kfac``: the commands of :data:`COMMANDS`, and ``run``.

What a command needs is imported when it runs: help and keys must not wait for torch and DeepSpeed.
"""

import argparse
import math
import sys
from importlib import import_module

from ds_kfac import __version__, only_for_data
from ds_kfac.factors import arguments as factors
from ds_kfac.integrations import plot

RUN = "python -m ds_kfac run [deepspeed launcher arguments] script.py [script arguments]"


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
        parser.add_argument("--data", metavar="MODULE:FUNCTION", help="(rank, ranks) -> batches, arguments of a model "
                            "that returns a loss: proves on a few that each layer's rows are those of its "
                            "gradient; runs the model on the CPU")  # fmt: skip
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
    "check": "ds_kfac.estimate.command:check", "estimate": "ds_kfac.estimate.command:run",
    "factors": "ds_kfac.factors.command:run", "convert": "ds_kfac.factors.command:run_convert",
    "plot": "ds_kfac.integrations.plot:run", "report": "ds_kfac.engine.environment:report",
    "doctor": "ds_kfac.engine.doctor:doctor",
    "config": "ds_kfac.config.manual:manual", "schema": "ds_kfac.config.manual:schema",
}  # fmt: skip
"""What makes a command's text, of its arguments."""


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0; 1 and a line on stderr if something is wrong with config or model; 2 for wrong arguments."""
    parser = argparse.ArgumentParser("python -m ds_kfac", description="K-FAC for DeepSpeed")
    parser.add_argument("--version", action="version", version=f"ds_kfac {__version__}")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # of DeepSpeed's launcher
    commands = parser.add_subparsers(dest="command", required=True)
    what = "memory, bytes, FLOPs and overhead of every strategy, before a run"
    more = "What K-FAC would cost a rank, from the plan that a run would make; no model is allocated."
    _describe(commands.add_parser("estimate", help=what, description=more))
    check = commands.add_parser("check", help="whether a config fits a model, and the report of attach, without a run")
    _describe(check, check=True)
    text = "factors of a model over some data, without training; on several ranks by deepspeed --module ds_kfac factors"
    factors.of_factors(commands.add_parser("factors", help=text))
    text = "factors for kronfluence, RegMean, GPTQ or PEFT's EVA"
    factors.of_convert(commands.add_parser("convert", help=text))
    plot.add_arguments(commands.add_parser("plot", help="draw a run's logs: csv, tensorboard, or the Trainer's"))
    # its arguments are DeepSpeed's launcher's, see below
    commands.add_parser("run", help=f"start a script with K-FAC enabled: {RUN}", add_help=False)
    commands.add_parser("doctor", help="in eleven lines, whether this environment will work, and what mends it")
    commands.add_parser("report", help="versions, accelerator, and what is supported here")
    commands.add_parser("config", help='every key of the "kfac" block, as Markdown')
    commands.add_parser("schema", help='JSON schema of a DeepSpeed config with a "kfac" block, for editors')
    given = sys.argv[1:] if argv is None else argv
    launches = given[:1] == ["run"]
    arguments = parser.parse_args(given[: 1 if launches else None])
    try:
        if launches:
            import_module("ds_kfac.integrations.launcher").launch(given[1:])
        else:
            with only_for_data():
                module, _, function = COMMANDS[arguments.command].partition(":")
                text = getattr(import_module(module), function)(arguments)
            print(text, end="\n" if text else "")
    except ValueError as problem:
        print(f"ds_kfac {arguments.command}: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
