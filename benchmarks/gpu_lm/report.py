"""What runs say: rates, steps and seconds to AdamW's and Muon's final loss, memory; curves as csv
and as a picture."""

import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.convergence.results import is_diverged
from benchmarks.gpu_lm.plan import METHODS, PARTS, RATES_OF, Job, parsed

GOALS = (
    ("KFACAdamW", "Muon", "step", 0.70),
    ("KFACAdamW", "Muon", "seconds", 0.75),
    ("KFACAdamW", "AdamW", "step", 0.35),
)
TARGETS = ("AdamW", "Muon")
SHORTER = (("d70", "Muon"), ("d35", "AdamW"))
"""Parts with fewer steps in which KFACAdamW is to reach what another method has at the end of part
d."""


@dataclass(frozen=True)
class Run:
    """A run that is finished. ``rows``: cells that are empty are nan."""

    job: Job
    rows: list[dict[str, float]]
    facts: dict

    @property
    def family(self) -> str:
        return METHODS[self.job.method].name

    @property
    def curve(self) -> list[dict[str, float]]:
        return [row for row in self.rows if math.isfinite(row["held_out_loss"])]

    @property
    def final(self) -> float:
        """Infinite if it diverged."""
        diverged = is_diverged(self.rows[-1]["loss"], self.rows[0]["loss"])
        return math.inf if diverged or not self.curve else self.curve[-1]["held_out_loss"]

    @property
    def memory(self) -> float:
        return max((row["memory_mb"] for row in self.curve), default=math.nan)

    def at(self, loss: float, axis: str) -> float:
        """Step or seconds at which the held-out loss is first that low, on a line between
        evaluations; infinite if never."""
        before = None
        for row in self.curve:
            if row["held_out_loss"] <= loss:
                if before is None:
                    return row[axis]
                part = (before["held_out_loss"] - loss) / (
                    before["held_out_loss"] - row["held_out_loss"]
                )
                return before[axis] + part * (row[axis] - before[axis])
            before = row
        return math.inf


def warmed(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """The rows with seconds in which a cold step, which compiles, counts as the mean of the
    others."""
    others = [row["step_seconds"] for row in rows if not row["cold"]]
    if not others:
        return rows
    mean, total, found = fmean(others), 0.0, []
    for row in rows:
        total += mean if row["cold"] else row["step_seconds"]
        found.append({**row, "seconds": total})
    return found


def runs_in(out: Path, steps: Mapping[str, int]) -> list[Run]:
    """Finished ones. ``steps``: of each part."""
    found = []
    for path in sorted((out / "runs").glob("*.csv")):
        job, known = parsed(path.stem), path.with_suffix(".json")
        with path.open(newline="") as file:
            rows = [
                {name: float(cell or "nan") for name, cell in row.items()}
                for row in csv.DictReader(file)
                if None not in row.values()
            ]
        if rows and known.exists():
            run = Run(job, warmed(rows), json.loads(known.read_text()))
            if rows[-1]["step"] == steps[job.part] or is_diverged(
                rows[-1]["loss"], rows[0]["loss"]
            ):
                found.append(run)
    return found


def by_family(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Families in the order of METHODS, and of each its seeds."""
    found: dict[str, list[Run]] = {}
    for method in METHODS.values():
        found.setdefault(method.name, [])
    for run in runs:
        found[run.family].append(run)
    return {family: sorted(of, key=lambda run: run.job.seed) for family, of in found.items() if of}


def ratio(of: list[Run], to: list[Run], axis: str) -> float:
    """What ``of`` takes to the final loss of ``to``, as a part of what that took; mean over seeds
    that both have."""
    last = {run.job.seed: run for run in to}
    pairs = [(run, last[run.job.seed]) for run in of if run.job.seed in last]
    parts = [
        run.at(other.final, axis) / other.rows[-1][axis]
        for run, other in pairs
        if math.isfinite(other.final)
    ]
    return fmean(parts) if parts else math.nan


def _said(value: float, form: Callable[[float], str]) -> str:
    return "not there" if math.isnan(value) else "never" if math.isinf(value) else form(value)


def rates(runs: list[Run]) -> list[str]:
    """Lines of part a or r."""
    lines = ["| method | rate | last held-out loss | step, s |", "|---|---|---|---|"]
    for run in sorted(runs, key=lambda run: (list(METHODS).index(run.job.method), run.job.rate)):
        mean = run.rows[-1]["seconds"] / len(run.rows)
        lines.append(
            f"| {run.job.method} | {run.job.rate:g} | {_said(run.final, '{:.4f}'.format)} | "
            f"{mean:.4g} |"
        )
    return lines


def races(runs: list[Run], bytes_per_token: float) -> list[str]:
    """Lines of a part with one rate a method."""
    families = by_family(runs)
    heads = [f"{axis} to {name}'s" for name in TARGETS for axis in ("steps", "seconds")]
    heads = [
        "method",
        "rate",
        "seeds",
        "final loss, nats a token",
        "nats a byte",
        "seconds",
        "memory, GB",
        *heads,
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for family, of in families.items():
        final, seconds = (
            fmean(run.final for run in of),
            fmean(run.rows[-1]["seconds"] for run in of),
        )
        cells = [
            f"{family}",
            f"{of[0].job.rate:g}",
            f"{len(of)}",
            _said(final, "{:.4f}".format),
            _said(final / bytes_per_token, "{:.4f}".format),
            f"{seconds:.4g}",
            f"{max(run.memory for run in of) / 1e3:.3g}",
        ]
        for name in TARGETS:
            for axis in ("step", "seconds"):
                cells.append(_said(ratio(of, families.get(name, []), axis), "{:.2f}".format))
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    for method, target, axis, goal in GOALS:
        value = ratio(families.get(method, []), families.get(target, []), axis)
        verdict = "not measured" if math.isnan(value) else "met" if value <= goal else "missed"
        what = {"step": "steps"}.get(axis, axis)
        lines.append(
            f"- {method}'s {what} of {target}'s: {_said(value, '{:.2f}'.format)}, goal "
            f"{goal:.2f}: {verdict}"
        )
    return lines


def shorter(runs: list[Run]) -> list[str]:
    """Lines: KFACAdamW at the end of a shorter schedule beside another method at the end of part
    d."""
    lines = []
    for part, target in SHORTER:
        ours = {
            run.job.seed: run for run in runs if run.job.part == part and run.family == "KFACAdamW"
        }
        for other in (
            run
            for run in runs
            if run.job.part == "d" and run.family == target and run.job.seed in ours
        ):
            run = ours[other.job.seed]
            steps, seconds = (
                run.rows[-1][axis] / other.rows[-1][axis] for axis in ("step", "seconds")
            )
            there = [
                run.at(other.final, axis) / other.rows[-1][axis] for axis in ("step", "seconds")
            ]
            lines.append(
                f"- seed {run.job.seed}: KFACAdamW (lr {run.job.rate:g}) ends at {run.final:.4f}, "
                f"after "
                f"{steps:.2f} of {target}'s steps and {seconds:.2f} of its seconds; {target} (lr "
                f"{other.job.rate:g}) at {other.final:.4f}, where KFACAdamW is after "
                f"{_said(there[0], '{:.2f}'.format)} of its steps and "
                f"{_said(there[1], '{:.2f}'.format)} of "
                "its seconds: " + ("met" if run.final <= other.final else "missed")
            )
    return ["## Shorter schedules", "", *lines, ""] if lines else []


def page(runs: list[Run], corpus: Mapping, sizes: str) -> str:
    of = {
        f"{run.facts['device']}, torch {run.facts['torch']}, DeepSpeed {run.facts['deepspeed']}"
        for run in runs
    }
    lines = [
        "# A language model on Python sources",
        "",
        f"Machines: {'; '.join(sorted(of)) or 'none'}.",
        f"Corpus {corpus['sha256'][:16]}, {corpus['encoding']}; tokens: {corpus['tokens']}.",
        "Seconds are of training with its refreshes, without evaluations and saves; of each "
        "call's first two "
        "steps, which compile, each counts as the mean of the run's others.",
        "",
    ]
    if sizes != "full":
        lines += [f"**Sizes are {sizes}: a rehearsal, no result.**", ""]
    if len(of) > 1:
        lines += ["**Runs are of several machines: seconds do not compare.**", ""]
    for part, settings in PARTS[sizes].items():
        found = [run for run in runs if run.job.part == part]
        if found and part not in dict(SHORTER):
            held_out = settings.held_out
            title = (
                f"{settings.steps} steps of {settings.micro_batches} micro-batches, losses of "
                f"{held_out} data"
            )
            lines += [f"## {part}: {title}", ""]
            per_token = corpus["bytes"][held_out] / corpus["tokens"][held_out]
            lines += [*(races(found, per_token) if part in RATES_OF else rates(found)), ""]
    return "\n".join([*lines, *shorter(runs)])


def curves(runs: list[Run], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["part", "method", "rate", "seed", "step", "seconds", "held_out_loss"])
        for run in runs:
            for row in run.curve:
                cells = (
                    f"{row['step']:.0f}",
                    f"{row['seconds']:.4f}",
                    f"{row['held_out_loss']:.5f}",
                )
                writer.writerow(
                    [run.job.part, run.job.method, f"{run.job.rate:g}", run.job.seed, *cells]
                )


def draw(runs: list[Run], path: Path) -> bool:
    """Loss over steps and over seconds; False without matplotlib, or without a run."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    if not runs:
        return False
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    colors = dict(zip(dict.fromkeys(run.family for run in runs), plt.cm.tab10.colors, strict=False))
    for axis, column in zip(axes, ("step", "seconds"), strict=True):
        for family, of in by_family(runs).items():
            for number, run in enumerate(of):
                points = [(row[column], row["held_out_loss"]) for row in run.curve]
                label = (
                    f"{family}, lr {run.job.rate:g}, {run.rows[-1]['step']:.0f} steps"
                    if number == 0
                    else None
                )
                axis.plot(*zip(*points, strict=True), color=colors[family], label=label)
        axis.set(xlabel=column)
        axis.grid(alpha=0.3)
    ends = [run.final for run in runs if math.isfinite(run.final)]
    if ends:
        axes[0].set_ylim(min(ends) - 0.05, max(ends) + 1.0)
    axes[0].set(ylabel="held-out loss [nats per token]")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def write(out: Path, sizes: str) -> str:
    """The page, which is also in ``out`` with the curves; pictures of b, c and d."""
    runs = runs_in(out, {part: settings.steps for part, settings in PARTS[sizes].items()})
    corpus = json.loads((out / "corpus" / "corpus.json").read_text())
    text = page(runs, corpus, sizes)
    (out / "report.md").write_text(text)
    curves(runs, out / "curves.csv")
    for part in ("b", "c", "d"):
        draw([run for run in runs if run.job.part.startswith(part)], out / f"curves_{part}.png")
    return text
