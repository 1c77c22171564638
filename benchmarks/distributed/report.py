"""The distributed benchmark's report: targets, a section a phase, tables as csv; from the JSON
files of the phases."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.distributed.bytes_section import bytes_section
from benchmarks.distributed.section import Row, Section, Verdict, table
from benchmarks.distributed.simulation_section import simulation_section
from benchmarks.distributed.times_section import times_section
from benchmarks.distributed.training_section import adaptive_section, options_section, rows_section

SECTIONS: Mapping[str, Callable[[Sequence[Row], Path], Section]] = {
    "bytes": bytes_section,
    "times": times_section,
    "rows": rows_section,
    "adaptive": adaptive_section,
    "options": options_section,
    "simulate": simulation_section,
}


def report(out: Path) -> str:
    """Write a markdown file next to the folder, csv files and plots into it; returns the
    markdown."""
    lines: list[str] = []
    verdicts: list[Verdict] = []
    for name, section_of in SECTIONS.items():
        path = out / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            section = section_of(found["rows"], out)
            section.write_csv(out / f"{name}.csv")
            verdicts += section.verdicts
            made = (
                f"Made by `{found['command']}` at commit {found['commit']} on {found['date']}: "
                f"{found['machine']}; "
            )
            lines += [*section.markdown(out.name), f"{made}{found['versions']}.", ""]
    head = ["# Several ranks", "", "From benchmarks/distributed. MB are 10^6 bytes.", ""]
    if verdicts:
        missed = sum(not verdict.met for verdict in verdicts)
        absent = [name for name in SECTIONS if not (out / f"{name}.json").exists()]
        without = f" Not measured, and not in this: {', '.join(absent)}." if absent else ""
        head += ["## Targets", "", f"{len(verdicts) - missed} of {len(verdicts)} met.{without}", ""]
        head += table(("what", "target", "measured", ""), [verdict.cells for verdict in verdicts])
    text = "\n".join([*head, *lines])
    (out.parent / f"{out.name}.md").write_text(text)
    return text
