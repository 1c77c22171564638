"""``python -m ds_kfac``: ``run``, ``check``, ``estimate``, ``plot``, ``report``, ``config`` and ``schema``."""

import argparse
import sys

from ds_kfac.config.manual import manual
from ds_kfac.config.schema import schema
from ds_kfac.engine.environment import environment_report
from ds_kfac.estimate import command
from ds_kfac.integrations import launcher, plot
from ds_kfac.text import only_for_data

WITHOUT_ARGUMENTS = {"report": environment_report, "config": manual, "schema": schema}
WITH_ARGUMENTS = {"check": command.check, "estimate": command.run, "plot": plot.run}


def _text(arguments: argparse.Namespace) -> str:
    name = arguments.command
    return WITHOUT_ARGUMENTS[name]() if name in WITHOUT_ARGUMENTS else WITH_ARGUMENTS[name](arguments)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0; 1 and a line on stderr if something is wrong with config or model; 2 for wrong arguments."""
    parser = argparse.ArgumentParser("python -m ds_kfac", description="K-FAC for DeepSpeed")
    commands = parser.add_subparsers(dest="command", required=True)
    command.add_arguments(
        commands.add_parser(
            "estimate",
            help="memory, bytes, FLOPs and overhead of every strategy, before a run",
            description="What K-FAC would cost a rank, from the plan that a run would make; no model is allocated.",
        )
    )
    check = commands.add_parser("check", help="whether a config fits a model, and the report of attach, without a run")
    command.add_arguments(check, check=True)
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
            return 0
        with only_for_data():
            text = _text(arguments)
        print(text)
    except ValueError as problem:
        print(f"ds_kfac {arguments.command}: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
