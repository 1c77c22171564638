"""Results as a page for people: all cases counted, and those listed that did not just survive."""

import platform
import re
from collections import Counter
from datetime import date
from importlib.metadata import version

from tests.campaign.harness import OUTCOMES, SURVIVED, Result

HEAD = """# Reliability

What a training run survives, tried by a program: `make campaign` (`tests/campaign/`, at most {minutes:g} minutes on 2
cores). It kills ranks, feeds values that should not be, uses engines as they should not be used, and looks at what
happened. Damaged checkpoints, and programs that change what they call, are part of `make test`.

- **survived**: the run goes on as it should; after a kill, every loss to the bit that of a run nobody disturbed.
- **loud**: an error or a warning that names the cause.
- **crash**: an error that does not, or one in a program that is right.
- **silent**: wrong, without a word. **hang**: no progress. **lost**: work gone that a finished save had.

Known and not tried: a gradient spike in the first ten batches of a factor is taken for its scale and stays in it until
its average has forgotten it. What DeepSpeed alone does not survive either (a NaN gradient in fp32, which it does not
check for; at ZeRO-2 a layer that only some ranks use) is named as such, or left out.

"""  # noqa: E501


def report(results: list[Result], *, command: str, minutes: float, seconds: float) -> str:
    """The page, in Markdown."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed"))
    lines = [HEAD.format(minutes=minutes)]
    took = (
        f"{date.today()}, {seconds / 60:.1f} minutes, Python {platform.python_version()}, "
        f"{packages}, CPU, gloo"
    )
    lines.append(f"`{command}`, {took}.\n")
    lines += [
        "| | cases | " + " | ".join(OUTCOMES) + " | not run |",
        "|---" * (len(OUTCOMES) + 3) + "|",
    ]
    families = list(dict.fromkeys(result.case.family for result in results))
    for family in [*families, "all"]:
        own = [result for result in results if family in (result.case.family, "all")]
        counts = sum((result.outcomes for result in own), Counter())
        row = [
            family,
            sum(counts.values()),
            *(counts[one] for one in OUTCOMES),
            sum(not r.outcomes for r in own),
        ]
        lines.append("| " + " | ".join(str(cell) for cell in row) + " |")
    lines += [
        "",
        "All cases but those that just survived; what ended alike for the same reason is one row.",
        "",
    ]
    lines += ["| | cases | outcome | |", "|---|---|---|---|"]
    for (family, counted, _), own in _alike(results).items():
        names = list(dict.fromkeys(r.case.name for r in own))
        mark = "" if own[0].good else "**"
        lines.append(
            f"| {family} | {_plain('; '.join(names))} | {mark}{counted}{mark} | "
            f"{_short(own[0].note)} |"
        )
    return "\n".join(lines) + "\n"


def _alike(results: list[Result]) -> dict[tuple[str, str, str], list[Result]]:
    """Those with something to say, by family, outcome and how the note begins."""
    found: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        if result.note or set(result.outcomes) != {SURVIVED} or result.case.alone:
            counts = {one: result.outcomes[one] for one in OUTCOMES if result.outcomes[one]}
            many = sum(counts.values()) > 1
            counted = (
                ", ".join(f"{n} {one}" if many else one for one, n in counts.items()) or "not run"
            )
            begins = result.case.name if result.case.alone else re.sub(r"\d", "", result.note)[:50]
            found.setdefault((result.case.family, counted, begins), []).append(result)
    return found


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "/").replace("<", "(").replace(">", ")")


def _short(note: str) -> str:
    text = _plain(note)
    return text[:200] + ("..." if len(text) > 200 else "")
