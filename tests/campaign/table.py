"""Results as a table for people: every line that needs one, all others counted."""

import platform
from collections import Counter
from importlib.metadata import version

from tests.campaign.harness import OUTCOMES, Result

HEAD = """# Reliability

What a training run survives, tried by a program: `make campaign` (`tests/campaign/`, at most {minutes:g} minutes on 2
cores). It kills ranks, damages checkpoints, feeds values that should not be, uses engines as they should not be used,
and looks at what happened.

- **survived**: the run goes on as it should; after a kill, every loss to the bit that of a run nobody disturbed.
- **loud**: an error or a warning that names the cause.
- **crash**: an error that does not, or one in a program that is right.
- **silent**: wrong, without a word. **hang**: no progress. **lost**: work gone that a finished save had.

"""


def report(results: list[Result], *, command: str, minutes: float, seconds: float) -> str:
    """The page, in Markdown."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed"))
    lines = [HEAD.format(minutes=minutes)]
    lines.append(
        f"`{command}`, {seconds / 60:.1f} minutes, Python {platform.python_version()}, {packages}, CPU, gloo.\n"
    )
    lines += ["| | cases | " + " | ".join(OUTCOMES) + " | not run |", "|---" * (len(OUTCOMES) + 3) + "|"]
    families = list(dict.fromkeys(result.case.family for result in results))
    for family in [*families, "all"]:
        own = [result for result in results if family in (result.case.family, "all")]
        counts = sum((result.outcomes for result in own), Counter())
        row = [family, sum(counts.values()), *(counts[one] for one in OUTCOMES), sum(not r.outcomes for r in own)]
        lines.append("| " + " | ".join(str(cell) for cell in row) + " |")
    lines += ["", "## Case by case", "", "| case | outcome | |", "|---|---|---|"]
    for (family, name), own in _grouped(results).items():
        counts = sum((result.outcomes for result in own), Counter())
        told = ", ".join(f"{counts[one]} {one}" for one in OUTCOMES if counts[one]) or "not run"
        notes = list(dict.fromkeys(_short(_what(r) + r.note) for r in own if r.note and (not r.good or len(own) == 1)))
        mark = "" if all(r.good for r in own) else "**"
        lines.append(f"| {family}: {name} | {mark}{told}{mark} | {'; '.join(notes[:2])} |")
    return "\n".join(lines) + "\n"


def _grouped(results: list[Result]) -> dict[tuple[str, str], list[Result]]:
    """Cases that differ only in what follows the last colon of their names, the engine's mode, are one line."""
    found: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        name = result.case.name if result.case.alone else result.case.name.rsplit(": ", 1)[0]
        found.setdefault((result.case.family, name), []).append(result)
    return found


def _what(result: Result) -> str:
    """The mode of a case that ended badly."""
    return "" if result.good or ": " not in result.case.name else result.case.name.rsplit(": ", 1)[1] + ": "


def _short(note: str) -> str:
    text = " ".join(note.split()).replace("|", "/").replace("<", "(").replace(">", ")")
    return text[:140] + ("..." if len(text) > 140 else "")
