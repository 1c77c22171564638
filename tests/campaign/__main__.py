"""The campaign. ``python -m tests.campaign [--only PATTERN] [--minutes N] [--write
docs/reliability.md]``

Ends with 1 if any case ended otherwise than it may, or was not run.
"""

import argparse
import re
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from tests.campaign import harness, kills, lifetime, numerics, table, usage


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    add = parser.add_argument
    add("--only", default="", help="regex: only cases whose family or name it is found in")
    add("--minutes", type=float, default=15, help="begin no case after so long")
    add("--patience", type=float, default=1.0, help="factor of all timeouts, for a busy machine")
    add("--kills", type=int, default=20, help="per kind of job; there are four")
    add("--write", type=Path, help="a file for the table")
    add("--parts", type=Path, help="results so far: read, and added to; no case runs twice")
    add("--list", action="store_true", help="only list the cases")
    options = parser.parse_args()
    kills.PATIENCE *= options.patience
    every = [*kills.cases(options.kills), *usage.cases(), *lifetime.cases(), *numerics.cases()]
    wanted = [case for case in every if re.search(options.only, f"{case.family}: {case.name}")]
    cases = [replace(case, seconds=case.seconds * options.patience) for case in wanted]
    if options.list:
        print("\n".join(f"{case.family:9} {case.name}" for case in cases))
        return 0
    # so that ranks and folders are cleared away
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start = time.monotonic()
    kills.DEADLINE = start + 60 * options.minutes
    had = harness.results_in(options.parts, cases)
    cases = [case for case in cases if all(case != result.case for result in had)]
    results = [*had, *harness.run(cases, deadline=kills.DEADLINE, keep=options.parts)]
    seconds = time.monotonic() - start + sum(result.seconds for result in had)
    missed = sum(not result.outcomes for result in results)
    totals = harness.counted(sum((result.outcomes for result in results), Counter()))
    print(f"{len(results)} cases in {seconds / 60:.1f} minutes: {totals}; {missed} not run")
    if options.write:
        command = " ".join(["python -m tests.campaign", *sys.argv[1:]])
        options.write.write_text(table.report(results, command=command, seconds=seconds))
    return 0 if all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
