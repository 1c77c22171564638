"""docs/reference/models.md and the page of all rows beside the results, from the results."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.coverage.architectures import TASKS
from benchmarks.coverage.measure import RATE, STAGES, STEPS
from benchmarks.distributed.section import table

STEPPED, CURVED = 0.95, 0.9
"""Goals for language models: shares of the matrix parameters."""
PHRASE = 70
"""Characters of a reason, at most."""
TITLES: Mapping[str, str] = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "seq2seq": "Sequence to sequence",
    "speech": "Speech and sound",
    "image": "Images",
    "image and text": "Images and text",
    "detection": "Detection",
}
SHORT = {
    "no K-FAC layer type for it": "its code shows no product",
    "it is not seen to multiply anything": "its code shows no product",
    "so its patches are not known": "a forward of its own",
    "is computed by a parametrization": "its weight is computed",
    "it is a parametrization": "weight norm makes the weight of it",
    "bias is shared with": "bias is another module's, too",
    "weight is shared by": "weight is shared by several modules",
    "its parent module uses its weight": "the module around it takes its weight",
}
"""A part of a reason -> what is said here."""

HEAD = """# Models

How much of which architecture does K-FAC precondition, and does a tiny model of it train?

The page has {count} architectures: all of transformers that have a causal, masked, sequence-to-sequence, image, speech
or detection head, and ten models of timm. A name is the `model_type` in a model's `config.json`; fine-tunes and sizes
share it. For other models and configs, `python -m ds_kfac check --model module:factory` prints the same before a run.

A name alone means that all matrices of the model are stepped by K-FAC, with curvature. A number is the share of them in
per cent; a second number is the share with curvature if it differs. [The
results](../../benchmarks/results/coverage/models.md) have a row for each
architecture: its size, its losses, what is left to AdamW and why, and what did not run.

## In short
"""
ROWS = """# Models, row by row

What [docs/reference/models.md](../../../docs/reference/models.md) is made from; it says how these {count}
architectures fare in short.
"""
READING = """## How to read a row

- **parameters**, **stepped** and **with curvature** are of the model that the architecture's default config describes,
  built on the meta device: which part of its matrix parameters KFACAdamW steps along orthogonalized directions, and
  which part belongs to layers of which A has more than a diagonal. Embeddings, position tables and vectors are no
  matrices; AdamW steps them, as with Muon.
- **left to AdamW**: the largest kind of matrix that is in no K-FAC layer, and why. Nothing is left out silently: what a
  run leaves out is in its report at attach.
- **loss**: of one batch before and after {steps} steps of KFACAdamW at rate {rate}, with a tiny random model of the
  architecture (widths of 64, two layers or one of each kind), one process, at ZeRO stages 0 and 2; once where both end
  equal to two digits. It shows that the architecture runs, not how well it trains. With BatchNorm on two examples a
  gradient may be what rounding leaves of zero: weights of MobileNet V2 that differ by 1e-7 give losses of 0.89 and 0.95
  after one step, at either stage, so its ends differ, too.
- **layers**: how many moved, of all. Those of a part that the batch does not reach stand still: towers for images and
  sounds where it has tokens only, experts that no token took. A layer that moved without statistics is called silent.
- A parameter without dimensions (CLIP's `logit_scale`) is one that DeepSpeed 0.19.8 itself refuses; the benchmark makes
  it `[1]` before `initialize`, as you must.
"""
MADE = (
    "Made by `python -m benchmarks.coverage` from `benchmarks/results/coverage/models.json`, with "
    "{versions}. ds_kfac "
    "reads which parameters a module multiplies from its code; it knows no model of these by name "
    "but DBRX, whose "
    "experts lie in one matrix."
)


def report(found: Mapping[str, Any]) -> str:
    """docs/reference/models.md: the names of those that are stepped whole, and a row for each of
    the others."""
    models = found["models"]
    lines = [HEAD.format(count=len(models))]
    lines += table(
        (
            "task",
            "architectures",
            f"stepped >= {STEPPED:.0%}",
            f"with curvature >= {CURVED:.0%}",
            "tiny ones trained",
            "silent layers",
        ),
        [
            (link(TITLES[task]), *summary([row for _, row in rows]))
            for task, rows in by_task(models).items()
            if rows
        ],
    )
    lines += below(models)
    for task, rows in by_task(models).items():
        if rows:
            lines += [f"## {TITLES[task]}", "", section(rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def all_rows(found: Mapping[str, Any]) -> str:
    """benchmarks/results/coverage/models.md."""
    models = found["models"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        ROWS.format(count=len(models)),
        READING.format(steps=STEPS, rate=RATE),
        fill(MADE.format(versions=versions)),
    ]
    head = (
        "architecture",
        "parameters",
        "stepped %",
        "with curvature %",
        "loss",
        "layers",
        "left to AdamW, and why",
    )
    for task, rows in by_task(models).items():
        if rows:
            lines += [
                "",
                f"## {TITLES[task]}",
                "",
                *table(head, [cells(name, row) for name, row in rows]),
            ]
    lines += without(models)
    return "\n".join(lines).rstrip() + "\n"


def by_task(models: Mapping[str, Any]) -> dict[str, list[tuple[str, Any]]]:
    return {
        task: [(n, row) for n, row in sorted(models.items()) if row["task"] == task]
        for task in TITLES
    }


def section(rows: Sequence[tuple[str, Any]]) -> str:
    """Of one task: names, with the part that is stepped where it is not all."""
    names = []
    for name, row in rows:
        _, _, stepped, curved = cells(name, row)[:4]
        shares = list(dict.fromkeys((stepped, curved)))
        names.append(
            name if shares == ["100"] else f"{name} ({' and '.join(shares) or 'not measured'})"
        )
    return fill(", ".join(names).replace("()", "(not run)"))


def fill(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False)


def link(title: str) -> str:
    return f"[{title}](#{title.lower().replace(' ', '-')})"


def below(models: Mapping[str, Any]) -> list[str]:
    """The architectures that miss a goal."""
    missed = [
        (
            name,
            percent(share["stepped"], share["matrices"]),
            percent(share["curved"], share["matrices"]),
            reason_of(share) or UNCURVED,
        )
        for name, share in ((name, row.get("shares", {})) for name, row in sorted(models.items()))
        if "matrices" in share
        and not (reaches(share, "stepped", STEPPED) and reaches(share, "curved", CURVED))
    ]
    if not missed:
        return []
    return [
        "Below that:",
        "",
        *table(("architecture", "stepped %", "with curvature %", "why"), missed),
    ]


UNCURVED = "convolves with a standardized weight: orthogonalized without curvature"


def reaches(share: Mapping[str, Any], what: str, goal: float) -> bool:
    return share[what] >= goal * share["matrices"]


def without(models: Mapping[str, Any]) -> list[str]:
    """What transformers has and does not run here: not at its default size, or no tiny one."""
    found = []
    for name, row in sorted(models.items()):
        runs = [
            row.get("train", {}).get(str(stage), {"error": "not run", "where": "build"})
            for stage in STAGES
        ]
        built = (
            [("default config", row["shares"]["error"])]
            if "error" in row.get("shares", {"error": ""})
            else []
        )
        tiny = [
            ("tiny model", run["error"]) for run in runs if run.get("where") in ("build", "forward")
        ][:1]
        found += [(name, what, phrase(error, 2 * PHRASE)) for what, error in (*built, *tiny)]
    if not found:
        return []
    said = (
        "Errors of transformers, with its default configs or smaller ones; neither DeepSpeed "
        "nor ds_kfac saw it."
    )
    return ["## Not run", "", said, "", *table(("architecture", "of", "error"), found)]


def summary(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    shares = [row["shares"] for row in rows if row.get("shares", {}).get("matrices")]
    runs = [
        row["train"]
        for row in rows
        if row.get("train") and not any("error" in run for run in row["train"].values())
    ]
    silent = sum(any(run["silent"] for run in train.values()) for train in runs)
    return (
        str(len(rows)),
        f"{sum(reaches(share, 'stepped', STEPPED) for share in shares)} of {len(shares)}",
        f"{sum(reaches(share, 'curved', CURVED) for share in shares)} of {len(shares)}",
        f"{len(runs)} of {len(rows)}",
        f"in {silent}" if silent else "none",
    )


def cells(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Of one architecture."""
    share = row.get("shares", {"error": "not measured"})
    counts, left = ("", "", ""), ""
    if "error" not in share:
        counts = (
            amount(share["parameters"]),
            percent(share["stepped"], share["matrices"]),
            percent(share["curved"], share["matrices"]),
        )
        left = reason_of(share)
    runs = [
        row.get("train", {}).get(str(stage), {"error": "not run", "where": "build"})
        for stage in STAGES
    ]
    first = next((run for run in runs if "error" not in run), None)
    layers = "" if first is None else f"{first['moved']} of {first['layers']}"
    silent = sum(len(run.get("silent", ())) for run in runs[:1])
    return (name, *counts, losses(runs), layers + (f", {silent} silent" if silent else ""), left)


def reason_of(share: Mapping[str, Any]) -> str:
    left = share["left"][0] if share["left"] else None
    return "" if left is None else f"{left[0]} {amount(left[2])}: {phrase(left[1])}"


def losses(runs: Sequence[Mapping[str, Any]]) -> str:
    """Before and after, at each stage."""
    # neither DeepSpeed nor ds_kfac has seen it
    if any(run.get("where") in ("build", "forward") for run in runs):
        return "[not run](#not-run)"
    for stage, run in zip(STAGES, runs, strict=True):
        if "error" in run:
            return f"**ZeRO {stage}, {run.get('where', '')}: {phrase(run['error'])}**"
    after = list(dict.fromkeys(f"{run['after']:.2g}" for run in runs))
    return f"{runs[0]['before']:.3g} to {' and '.join(after)}"


def phrase(reason: str, length: int = PHRASE) -> str:
    """A few words."""
    known = next((short for part, short in SHORT.items() if part in reason), reason)
    known = known.replace("|", "/").replace("\n", " ")
    return known if len(known) <= length else known[: length - 2].rstrip() + ".."


def percent(part: int, whole: int) -> str:
    """Rounded down: 100 is all."""
    return f"{part * 1000 // max(whole, 1) / 10:.1f}".replace("100.0", "100")


def amount(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


assert set(TITLES) == set(TASKS)
