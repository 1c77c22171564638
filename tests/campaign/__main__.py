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
from pathlib import Path

from tests.campaign import harness, kills, lifetime, numerics, table, usage


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument(
        "--only", default="", help="regex: only cases whose family or name it is found in"
    )
    parser.add_argument("--minutes", type=float, default=15, help="begin no case after so long")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor of all timeouts, for a busy machine"
    )
    parser.add_argument("--kills", type=int, default=20, help="per kind of job; there are four")
    parser.add_argument("--write", type=Path, help="a file for the table")
    parser.add_argument(
        "--parts",
        type=Path,
        help="results so far: read, and those of this run added; no case twice",
    )
    parser.add_argument("--list", action="store_true", help="only list the cases")
    options = parser.parse_args()
    kills.PATIENCE *= options.patience
    every = [
        *kills.cases(kills=options.kills, overwriting=options.kills),
        *usage.cases(),
        *lifetime.cases(),
        *numerics.cases(),
    ]
    cases = [
        harness.patient(c, options.patience)
        for c in every
        if re.search(options.only, f"{c.family}: {c.name}")
    ]
    if options.list:
        print("\n".join(f"{case.family:9} {case.name}" for case in cases))
        return 0
    # so that ranks and folders are cleared away
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start = time.monotonic()
    kills.DEADLINE = start + 60 * options.minutes
    had = harness.results_in(options.parts, cases)
    cases = [case for case in cases if all(case != result.case for result in had)]
    found = harness.run(
        cases, deadline=kills.DEADLINE, say=lambda text: print(text, flush=True), keep=options.parts
    )
    results = [*had, *found]
    seconds = time.monotonic() - start + sum(result.seconds for result in had)
    counts = sum((result.outcomes for result in results), Counter())
    missed = sum(not result.outcomes for result in results)
    totals = ", ".join(f"{one} {counts[one]}" for one in harness.OUTCOMES)
    print(f"{len(results)} cases in {seconds / 60:.1f} minutes: {totals}, not run {missed}")
    if options.write:
        command = " ".join(["python -m tests.campaign", *sys.argv[1:]])
        text = table.report(results, command=command, seconds=seconds)
        options.write.write_text(text)
    return 0 if all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
