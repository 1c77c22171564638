"""Results as a page for people: all cases counted, and those listed that did not just survive."""

import platform
import re
from collections import Counter
from datetime import date
from importlib.metadata import version

from ds_kfac.curvature.factor import SETTLED
from tests.campaign.harness import OUTCOMES, SURVIVED, Result, counted
from tests.deepspeed.damages import DAMAGES, LATEST

HEAD = """# Reliability

What does a training run survive?

`make campaign` (`tests/campaign/`) disturbs training runs: it kills ranks, puts NaN, infinities and spikes into single
steps, uses engines in unusual ways, and runs one engine for thousands of steps. Then it reports how each case ended.
`make test` damages checkpoints in {damages} ways (`tests/deepspeed/damages.py`). Every rank must refuse to load a damaged
checkpoint, and must keep its state.

Each case has one of these outcomes:

- **survived**: training continues as it should. After a kill, every loss equals, to the bit, the loss of the same step
  in a run without kills.
- **loud**: an error or a warning names the cause.
- **crash**: an error does not name the cause, a correct program fails, or the case did not disturb the run as planned.
- **silent**: the result is wrong, and no message says so.
- **hang**: the case makes no progress.
- **lost**: training steps that a finished save contained are gone.

Two known weaknesses are not tried. In the first {settled} batches of a factor, K-FAC does not recognize a gradient spike, so
the spike stays in the factor until the running average has forgotten it. And at ZeRO 2, DeepSpeed aborts if only some
ranks use a layer, also without ds_kfac.

DeepSpeed skips a step whose gradients are not finite, so K-FAC does not see these gradients. But at stage 0 in fp32,
and in bf16 with `check_grad_overflow` off, DeepSpeed applies the step. After that the weights are not finite, as
without K-FAC, but K-FAC's own state must still be finite.
"""  # noqa: E501


def report(results: list[Result], *, command: str, seconds: float) -> str:
    """The page, in Markdown."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed"))
    lines = [HEAD.format(settled=SETTLED, damages=len(DAMAGES) + len(LATEST))]
    took = f"{date.today()}, {seconds / 60:.0f} minutes for all cases together"
    versions = f"Python {platform.python_version()}, {packages}, CPU, gloo"
    lines.append(f"`{command}`, {took}, {versions}.\n")
    lines += [
        "| | cases | " + " | ".join(OUTCOMES) + " | not run |",
        "|---" * (len(OUTCOMES) + 3) + "|",
    ]
    families = list(dict.fromkeys(result.case.family for result in results))
    for family in [*families, "all"]:
        own = [result for result in results if family in (result.case.family, "all")]
        counts = sum((result.outcomes for result in own), Counter())
        unrun = sum(not result.outcomes for result in own)
        row = [family, counts.total(), *(counts[one] for one in OUTCOMES), unrun]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    lines += [
        "",
        "Cases with something to report (z2 is ZeRO 2). Cases that ended alike for the same reason "
        "share a row.",
        "",
    ]
    lines += ["| | cases | outcome | |", "|---|---|---|---|"]
    for (family, how, _), own in _alike(results).items():
        names = list(dict.fromkeys(r.case.name for r in own))
        shown = "; ".join(names[:2])
        if len(names) > 2:
            shown += f"; {len(names) - 2} more"
        mark = "" if own[0].good else "**"
        cells = family, _plain(shown), f"{mark}{how}{mark}", _short(own[0].note)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _alike(results: list[Result]) -> dict[tuple[str, str, str], list[Result]]:
    """Those with something to say, by family, outcome and how the note begins."""
    found: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        if result.note or set(result.outcomes) != {SURVIVED} or result.case.alone:
            begins = result.case.name if result.case.alone else re.sub(r"\d", "", result.note)[:50]
            key = result.case.family, counted(result.outcomes), begins
            found.setdefault(key, []).append(result)
    return found


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "/").replace("<", "(").replace(">", ")")


def _short(note: str) -> str:
    text = _plain(note)
    return text[:200] + ("..." if len(text) > 200 else "")
