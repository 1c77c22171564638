"""Parts of the distributed benchmark's report: a table, what is said about it, and which targets
are met."""

import csv
import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
MB = 1e6


@dataclass(frozen=True)
class Verdict:
    """A target, and whether a measurement meets it."""

    claim: str
    target: str
    measured: str
    met: bool

    @property
    def cells(self) -> tuple[str, ...]:
        return self.claim, self.target, self.measured, "met" if self.met else "MISSED"


@dataclass(frozen=True)
class Section:
    """Of one phase.

    Attributes:
        before, after: paragraphs around the table.
        plots: drawn already, in the report's folder.
        shown: which rows the markdown has; the csv file has all.
    """

    title: str
    before: str
    header: Sequence[str]
    cells: Sequence[Sequence[str]]
    after: str = ""
    plots: Sequence[Path] = ()
    verdicts: Sequence[Verdict] = ()
    shown: Sequence[bool] | None = None

    def markdown(self, folder: str) -> list[str]:
        """Lines; plots are looked for in ``folder``."""
        drawn = [
            line for plot in self.plots for line in (f"![{plot.stem}]({folder}/{plot.name})", "")
        ]
        cells = self.cells if self.shown is None else itertools.compress(self.cells, self.shown)
        return [
            f"## {self.title}",
            "",
            *_wrapped(self.before),
            *table(self.header, cells),
            *drawn,
            *_wrapped(self.after),
        ]

    def write_csv(self, path: Path) -> None:
        with open(path, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([self.header, *self.cells])


def _wrapped(paragraph: str) -> list[str]:
    return [*textwrap.wrap(paragraph, 120), ""] if paragraph else []


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


def megabytes(nbytes: float) -> str:
    return f"{nbytes / MB:.3g}" if nbytes < 100 * MB else f"{nbytes / MB:.0f}"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f}" if seconds > 0.01 or seconds == 0 else f"{1000 * seconds:.2g}"
