"""What K-FAC has for a layer at this moment, in words: the text of ``engine.kfac.explain()``.

It reads what is there: the plan, the timetable, and what this rank keeps. Device scalars are read
when somebody asks, so no step waits for it, and there is no collective in it: what only another
rank knows, it says is known there.
"""

from collections.abc import Sequence
from difflib import get_close_matches

import torch

from ds_kfac.assignment.assign import needed
from ds_kfac.assignment.costs import FactorSpec
from ds_kfac.diagnostics.text import columns, folded
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.scan import Scan
from ds_kfac.step.job import Job
from ds_kfac.step.messages import FAILED, FRESH, UNUSABLE
from ds_kfac.step.preconditioner import KFACPreconditioner

NO_ROWS = "a hook failed ({}): its rows are not taken any more in this process"


def explain(job: Job, scan: Scan, name: str | None = None) -> str:
    """A layer's text, or of None the table of all layers of this rank's domains. Local; call it
    between steps.

    Raises:
        ValueError: no module of this rank has the name.
    """
    asked = {
        layer.name: Asked(kfac, layer) for kfac in job.preconditioners for layer in kfac.layers
    }
    if name is None:
        head = ("layer", "state", "next update", "next refresh", "decomposed on", "state on")
        return "\n".join(columns([head, *folded([one.row() for one in asked.values()])]))
    if (own := name.removeprefix("(model)")) in asked:
        return asked[own].text()
    for left in scan.skipped:
        if left.name == own:
            return (
                f"{name} ({left.kind}, {left.numel:,} parameters) is not preconditioned; at "
                f"attach: {left.reason}"
            )
    near = get_close_matches(name, [*asked, *(left.name for left in scan.skipped)])
    raise ValueError(
        f"ds_kfac: explain({name!r}): no such layer on this rank; "
        + (f"near it are {', '.join(near)}; " if near else "")
        + "engine.kfac.explain() lists all"
    )


class Asked:
    """One layer, and its domain's preconditioner."""

    def __init__(self, kfac: KFACPreconditioner, layer: LayerSpec) -> None:
        self.kfac, self.layer, self.curvature = kfac, layer, kfac.curvature
        self.sides = self.curvature.of_layer.get(layer.name, {})
        self.state = kfac.state.get(layer.name)  # None: this rank is no gradient worker of it
        self.what = "basis" if kfac.plan.method.rotates else "inverse"

    def row(self) -> tuple[str, ...]:
        due = [str(step) for step in self.due()] if self.sides else ["-", "-"]
        eigen_workers = ", ".join(
            f"{side} {self.ranks([self.owner(spec)])}" for side, spec in self.sides.items()
        )
        state = self.has() or f"no {self.what}: {self.missing()}"
        return (self.layer.name, state, *due, eigen_workers or "-", self.ranks(self.workers))

    def text(self) -> str:
        kfac, layer, schedule = self.kfac, self.layer, self.kfac.plan.schedule
        state = (
            self.has() or f"no {self.what}: {self.missing()}; {kfac.rule.facts.without_curvature}"
        )
        lines = [
            f"{layer.name or '(model)'} ({layer.kind}, {list(layer.shape)}) after {kfac.steps} "
            f"applied steps, seen "
            f"from rank {self.ranks([kfac.rank])}:",
            f"state: {state}",
            *(f"{side}: {self.factor(spec)}" for side, spec in self.sides.items()),
        ]
        if self.sides:
            update, refresh = self.due()
            lines.append(
                f"next update: step {update}; next refresh: step {refresh}{self.displaced()}"
            )
        if kfac.steps < schedule.burnt_in:
            lines.append(f"burn-in: its shorter intervals hold until step {schedule.burnt_in}")
        moments = " and moments" if kfac.moments else ""
        lines.append(
            f"gradient{moments}: preconditioned and kept on rank {self.ranks(self.workers)}"
        )
        return "\n  ".join(lines)

    @property
    def workers(self) -> Sequence[int]:
        return self.kfac.plan.assignment.workers[self.layer.name]

    def owner(self, factor: FactorSpec) -> int:
        return self.kfac.plan.assignment.eigen_workers[factor.key]

    def ranks(self, of_group: Sequence[int]) -> str:
        """Their numbers in the job, which differ from those in the domain's group where there are
        several domains."""
        of_job = torch.distributed.get_process_group_ranks(self.kfac.channel.group)
        return ", ".join(str(of_job[rank]) for rank in of_group)

    def due(self) -> tuple[int, int]:
        """The next steps at which a factor of the layer is updated, and refreshed: of a layer
        without a basis at its next update; of one that is not proven at the update after that,
        which may prove it."""
        timetable, steps = self.curvature.timetable, self.kfac.steps
        dues = [timetable.next_due(spec.key, steps) for spec in self.sides.values()]
        again = any(spec.key in self.kfac.due.capture for spec in self.sides.values())
        update = steps if again else min(update for update, _ in dues)
        if self.layer.name in self.kfac.proving.unfit:
            return update, min(
                timetable.next_due(spec.key, update + 1)[0] for spec in self.sides.values()
            )
        waits = self.state is not None and self.state.preconditioner is None
        return update, update if waits else min(refresh for _, refresh in dues)

    def displaced(self) -> str:
        """What keeps the factors from the ordinary intervals."""
        offsets, clocks, text = self.kfac.plan.offsets, self.curvature.timetable.clocks, ""
        if offsets:
            by_side = [f"{side} by {offsets.get(spec.key, 0)}" for side, spec in self.sides.items()]
            text += f"; staggered: {', '.join(by_side)} steps"
        rare = [
            f"{side} every {n}"
            for side, spec in self.sides.items()
            if (n := clocks[spec.key].interval) > 1
        ]
        return text + (f"; adaptive: {', '.join(rare)} ordinary updates" if rare else "")

    def has(self) -> str:
        """What it is stepped with; empty: with nothing."""
        if self.layer.name in self.kfac.proving.unfit:
            return ""
        if not self.sides:
            return "no factors by the config: nothing to decompose"
        curvature, log = self.curvature, self.curvature.log
        if self.state is None:
            known = curvature.travels and all(
                spec.key in curvature.ready for spec in self.sides.values()
            )
            where = f"on rank {self.ranks(self.workers)}"
            return f"its {self.what} is {where}" if known else f"known {where}: call explain there"
        if self.state.preconditioner is None:
            return ""
        fresh = {side: log.fresh.get(spec.key) for side, spec in self.sides.items()}
        steps = {
            side: "a checkpoint" if step is None else f"step {step}" for side, step in fresh.items()
        }
        alike = len(set(steps.values())) == 1
        text = (
            f"{self.what} of "
            f"{steps.popitem()[1] if alike else ', '.join(map(' of '.join, steps.items()))}"
        )
        if hook := self.kfac.capture.failed.get(self.layer.name):
            text += (
                f"; {NO_ROWS.format(hook)}, and from the next check of rows on it is without "
                f"curvature"
            )
        for side, spec in self.sides.items():
            step, outcome = log.tried.get(spec.key, (0, FRESH))
            if outcome == UNUSABLE:
                text += f"; {side} had nothing to decompose in step {step}"
            if outcome == FAILED:
                text += (
                    f"; the refresh of {side} in step {step} failed on rank "
                    f"{self.ranks([self.owner(spec)])}"
                )
        return text

    def missing(self) -> str:
        """Why it has no basis or inverse."""
        kfac, name = self.kfac, self.layer.name
        if name in kfac.proving.unfit:
            if hook := kfac.capture.failed.get(name):
                return NO_ROWS.format(hook)
            why = kfac.proving.unfit[name]
            return (
                f"not proven, its rows do not make up its gradient: {why}; the next update "
                f"proves again"
            )
        decomposed = {"A": self.state and self.state.A, "G": self.state and self.state.G}
        whys = [
            f"{side} {self._missing(spec)}"
            for side, spec in self.sides.items()
            if decomposed[side] is None
        ]
        return ", ".join(whys)

    def _missing(self, factor: FactorSpec) -> str:
        curvature, key, owner = (
            self.curvature,
            factor.key,
            f"rank {self.ranks([self.owner(factor)])}",
        )
        step, outcome = curvature.log.tried.get(key, (0, FRESH))
        if outcome == FAILED:
            return f"could not be decomposed on {owner} in step {step}, whose log has the error"
        if key not in curvature.factors:
            return f"had nothing to decompose on {owner}: call explain there"
        if not float(curvature.factors[key].updates):
            return "has taken no batch yet" if key in curvature.log.updates else "has no update yet"
        packed = curvature.factors[key].packed_P
        if not bool(packed.isfinite().all()):
            return "is not finite"
        if not bool((packed != 0).any()):
            return "is zero, as all its rows are"
        return "waits for its next update"

    def factor(self, factor: FactorSpec) -> str:
        """A factor's updates, and the last of them."""
        curvature, key, wanted = self.curvature, factor.key, self.kfac.plan.config.factor.rows
        others = ", ".join(name for name in factor.layers if name != self.layer.name)
        shared = f", one with {others}" if others else ""
        head = (
            f"{factor.side.kind}, {factor.side.dim} wide{shared}; on rank "
            f"{self.ranks([self.owner(factor)])}"
        )
        if key not in curvature.factors:
            return f"{head}: call explain there for its updates"
        count = float(curvature.factors[key].updates)
        updates = f"{head}; {count:.0f} updates"
        if key not in curvature.log.updates:
            return f"{updates}, none since this process started or loaded"
        step, column, numbers = curvature.log.updates[key]
        limited, unchanged, rows, changed = numbers[:, column].tolist()
        last = (
            f"{updates}; last batch: step {step}, {rows:.0f} "
            f"{'rows' if factor.is_A else 'loss terms'}"
        )
        if unchanged or rows <= 0:
            frozen = " as its weight is frozen" if self.kfac.proving.frozen(self.layer) else ""
            why = ", not finite" if rows > 0 else frozen or " on the ranks that contribute"
            since = f"step {changed:.0f}" if changed >= 0 else "this process started or loaded"
            return f"{last}{why}, so it left the factor as it was" + (
                f"; unchanged since {since}" if count else ""
            )
        if factor.is_A and not isinstance(wanted, str) and rows < needed(factor, wanted):
            last += (
                f", fewer than the {needed(factor, wanted)} that an update asks for (factor.rows)"
            )
        return f"{last}, scaled down: far above the average" if limited else last
