"""``python -m ds_kfac estimate`` and ``python -m ds_kfac report``."""

import argparse
import sys

from ds_kfac.environment import environment_report
from ds_kfac.estimate import command


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
    commands.add_parser("report", help="versions, accelerator, and what is supported here")
    arguments = parser.parse_args(argv)
    try:
        print(environment_report() if arguments.command == "report" else command.run(arguments))
    except ValueError as problem:
        print(f"ds_kfac {arguments.command}: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
