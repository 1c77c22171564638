"""docs/models.md, from the results."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.coverage.architectures import TASKS
from benchmarks.coverage.measure import STAGES, STEPS
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
    "no K-FAC layer type for it": "no layer type",
    "so its patches are not known": "a forward of its own",
    "is computed by a parametrization": "weight is computed by a parametrization",
    "bias is shared with another module": "bias is another module's, too",
    "weight is shared by": "weight is shared by several modules",
    "the module around it takes its weight": "the module around it takes its weight",
}
"""A part of a reason -> what is said here."""

HEAD = """# Models

What K-FAC steps of the models that there are: every architecture of transformers that has a causal, masked,
sequence-to-sequence, image, speech or detection head, and ten of timm's models. Made by `python -m benchmarks.coverage`
from `benchmarks/results/coverage/models.json`; with {versions}; ds_kfac knows none of them by name{known}.

- **parameters**, **stepped** and **with curvature** are of the model that the architecture's default config describes,
  built on the meta device: which part of its matrix parameters KFACAdamW steps along K-FAC's directions, and which part
  belongs to layers of which A has more than a diagonal. Embeddings are tables and no matrices; those and all vectors
  are AdamW's, as with Muon.
- **left to AdamW**: the largest kind of matrix that is in no K-FAC layer, and why. Nothing is left out silently: what a
  run leaves out is in its report at attach.
- **loss**: of one batch before and after {steps} steps of a tiny random model of the architecture (widths of 64, two
  layers or one of each kind), by KFACAdamW at rate 0.002, at ZeRO stages 0 and 2, one process. It shows that the
  architecture runs, not how well it trains: where the batch has tokens only, the towers for images and sounds of a
  model stand still, and experts that no token took. **layers**: that moved, of all.
- A parameter without dimensions (CLIP's `logit_scale`) is one that DeepSpeed 0.19.8 itself cannot broadcast: make it
  `[1]` before `initialize`, as this benchmark does.

"""


def report(found: Mapping[str, Any]) -> str:
    """The page."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    by_task = {task: [(n, row) for n, row in found["models"].items() if row["task"] == task] for task in TITLES}
    lines = [HEAD.format(versions=versions, steps=STEPS, known=" but Dbrx, whose experts lie in one matrix")]
    lines += ["## In short", ""]
    lines += table(
        ("task", "architectures", f"stepped >= {STEPPED:.0%}", f"curvature >= {CURVED:.0%}", "tiny ones trained",
         "silent layers"),
        [(TITLES[task], *summary([row for _, row in rows])) for task, rows in by_task.items() if rows],
    )  # fmt: skip
    for task, rows in by_task.items():
        if not rows:
            continue
        lines += [f"## {TITLES[task]}", ""]
        head = ("architecture", "parameters", "stepped %", "with curvature %", "left to AdamW, and why")
        head += (*(f"loss, ZeRO {stage}" for stage in STAGES), "layers")
        lines += table(head, [cells(name, row) for name, row in sorted(rows)])
    return "\n".join(lines).rstrip() + "\n"


def summary(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    shares = [row["shares"] for row in rows if row.get("shares", {}).get("matrices")]
    runs = [
        row["train"] for row in rows if row.get("train") and not any("error" in run for run in row["train"].values())
    ]
    silent = sum(any(run["silent"] for run in train.values()) for train in runs)
    return (
        str(len(rows)),
        f"{sum(share['stepped'] >= STEPPED * share['matrices'] for share in shares)} of {len(shares)}",
        f"{sum(share['curved'] >= CURVED * share['matrices'] for share in shares)} of {len(shares)}",
        str(len(runs)),
        f"in {silent}" if silent else "none",
    )


def cells(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Of one architecture."""
    share = row.get("shares", {"error": "not measured"})
    if "error" in share:
        known = ("", "", "", f"its default config builds no model: {phrase(share['error'])}")
    else:
        left = share["left"][0] if share["left"] else None
        known = (
            amount(share["parameters"]),
            percent(share["stepped"], share["matrices"]),
            percent(share["curved"], share["matrices"]),
            "" if left is None else f"{left[0]} {amount(left[2])}: {phrase(left[1])}",
        )
    runs = [row.get("train", {}).get(str(stage), {"error": "not run", "where": "build"}) for stage in STAGES]
    first = next((run for run in runs if "error" not in run), None)
    layers = "" if first is None else f"{first['moved']} of {first['layers']}"
    silent = sum(len(run.get("silent", ())) for run in runs[:1])
    return (name, *known, *map(loss, runs), layers + (f", {silent} silent" if silent else ""))


def loss(run: Mapping[str, Any]) -> str:
    if "error" not in run:
        return f"{run['before']:.3g} to {run['after']:.3g}"
    if run.get("where") in ("build", "forward"):  # neither DeepSpeed nor ds_kfac has seen it
        return "no tiny one"
    return f"**{run.get('where', '')}: {phrase(run['error'])}**"


def phrase(reason: str) -> str:
    """A few words."""
    known = next((short for part, short in SHORT.items() if part in reason), reason)
    known = known.replace("|", "/").replace("\n", " ")
    return known if len(known) <= PHRASE else known[: PHRASE - 2].rstrip() + ".."


def percent(part: int, whole: int) -> str:
    """Rounded down: 100 is all."""
    return f"{part * 1000 // max(whole, 1) / 10:.1f}".replace("100.0", "100")


def amount(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


assert set(TITLES) == set(TASKS)
