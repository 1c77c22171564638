"""Describe the current state of a layer in words: the text of ``engine.kfac.explain()``.

The text is made from the plan, the timetable and the state on this rank. Scalars are read from the
device only when ``explain`` is called, so steps do not wait for them. There is no communication. If
only another rank knows a fact, the text names that rank.
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

NO_ROWS = "a hook failed ({}): this process no longer captures the layer's rows"
COLUMNS = ("layer", "state", "next update", "next refresh", "decomposed on", "state on")


def explain(job: Job, scan: Scan, name: str | None = None) -> str:
    """Return the text that describes a layer. If ``name`` is None, return a table of all K-FAC
    layers in this rank's part of the model.

    Local. Call it between steps.

    Raises:
        ValueError: no module of this rank has the name.
    """
    explanations = {
        layer.name: LayerExplanation(kfac, layer)
        for kfac in job.preconditioners
        for layer in kfac.layers
    }
    if name is None:
        rows = folded([explanation.row() for explanation in explanations.values()])
        return "\n".join(columns([COLUMNS, *rows]))
    layer_name = name.removeprefix("(model)")  # a model that is one layer has an empty name
    if layer_name in explanations:
        return explanations[layer_name].text()
    for module in scan.skipped:
        if module.name == layer_name:
            return (
                f"{name} ({module.kind}, {module.numel:,} parameters) is not preconditioned; the "
                f"reason when K-FAC attached: {module.reason}"
            )
    near = get_close_matches(name, [*explanations, *(module.name for module in scan.skipped)])
    hint = f"similar names: {', '.join(near)}; " if near else ""
    raise ValueError(
        f"ds_kfac: explain({name!r}): no such layer on this rank; {hint}engine.kfac.explain() "
        "lists all layers"
    )


class LayerExplanation:
    """Makes the text and the table row that describe one layer.

    Attributes:
        kfac: the preconditioner of the layer. Experts and dense layers may have different ones.
        factors: "A" or "G" -> specification of the layer's factor. Empty if the layer has no
            factors according to the config.
        state: the layer's state on this rank; None if this rank is not one of the layer's gradient
            workers.
        basis: "basis" or "inverse", the word for the matrices that precondition the layer.
    """

    def __init__(self, kfac: KFACPreconditioner, layer: LayerSpec) -> None:
        self.kfac = kfac
        self.layer = layer
        self.curvature = kfac.curvature
        self.factors = self.curvature.of_layer.get(layer.name, {})
        self.state = kfac.state.get(layer.name)
        self.basis = "basis" if kfac.plan.method.rotates else "inverse"

    # the two forms

    def row(self) -> tuple[str, ...]:
        """Return the layer's row in the table, with a cell for each of :data:`COLUMNS`."""
        next_steps = [str(step) for step in self._next_due()] if self.factors else ["-", "-"]
        decomposed_on = ", ".join(
            f"{side} {self._owner(factor)}" for side, factor in self.factors.items()
        )
        return (
            self.layer.name,
            self._has() or self._lacks(),
            *next_steps,
            decomposed_on or "-",
            self._gradient_workers(),
        )

    def text(self) -> str:
        """Return the full description, one fact per line."""
        kfac = self.kfac
        layer = self.layer
        schedule = self.kfac.plan.schedule
        state = self._has()
        if not state:
            state = f"{self._lacks()}; {kfac.rule.facts.without_curvature}"
        lines = [
            f"{layer.name or '(model)'} ({layer.kind}, {list(layer.shape)}) after {kfac.steps} "
            f"applied steps, seen from rank {self._ranks([kfac.rank])}:",
            f"state: {state}",
        ]
        for side, factor in self.factors.items():
            lines.append(f"{side}: {self._factor_text(factor)}")
        if self.factors:
            update, refresh = self._next_due()
            lines.append(
                f"next update: step {update}; next refresh: step {refresh}{self._displacement()}"
            )
        if kfac.steps < schedule.burnt_in:
            lines.append(f"burn-in: its shorter intervals hold until step {schedule.burnt_in}")
        moments = " and moments" if kfac.moments else ""
        lines.append(
            f"gradient{moments}: preconditioned and kept on rank {self._gradient_workers()}"
        )
        return "\n  ".join(lines)

    # ranks

    def _ranks(self, in_group: Sequence[int]) -> str:
        """Convert ranks from numbers in this layer's process group to numbers in the whole job, and
        join them by commas."""
        in_job = torch.distributed.get_process_group_ranks(self.kfac.channel.group)
        return ", ".join(str(in_job[rank]) for rank in in_group)

    def _owner(self, factor: FactorSpec) -> str:
        """Name the rank that keeps and decomposes a factor."""
        return self._ranks([self.kfac.plan.assignment.owners[factor.key]])

    def _gradient_workers(self) -> str:
        """Name the ranks that precondition the layer's gradient."""
        return self._ranks(self.kfac.plan.assignment.workers[self.layer.name])

    # steps

    def _next_due(self) -> tuple[int, int]:
        """Return the step of the layer's next factor update, and the step of its next refresh.

        A layer without a basis is refreshed at its next update. A layer that failed the last proof
        is refreshed one update later, because the next update only repeats the proof.
        """
        timetable = self.curvature.timetable
        steps = self.kfac.steps
        keys = [factor.key for factor in self.factors.values()]
        ordinary = [timetable.next_due(key, steps) for key in keys]
        is_repeated = any(key in self.kfac.due.capture for key in keys)
        update = steps if is_repeated else min(update for update, _ in ordinary)
        if self.layer.name in self.kfac.proving.unfit:
            return update, min(timetable.next_due(key, update + 1)[0] for key in keys)
        waits_for_basis = self.state is not None and self.state.preconditioner is None
        if waits_for_basis:
            return update, update
        return update, min(refresh for _, refresh in ordinary)

    def _displacement(self) -> str:
        """Say by how many steps the layer's factors are staggered, and which of them skip scheduled
        updates. The text begins with a separator. It is empty if none of the factors is staggered
        or skips updates."""
        texts = [""]
        offsets = self.kfac.plan.offsets
        if offsets:
            by_side = [
                f"{side} by {offsets.get(factor.key, 0)}" for side, factor in self.factors.items()
            ]
            texts.append(f"staggered: {', '.join(by_side)} steps")
        clocks = self.curvature.timetable.clocks
        intervals = {side: clocks[factor.key].interval for side, factor in self.factors.items()}
        rare = [
            f"{side} takes 1 of {interval}" for side, interval in intervals.items() if interval > 1
        ]
        if rare:
            texts.append(f"adaptive: {', '.join(rare)} ordinary updates")
        return "; ".join(texts)

    # the basis

    def _has(self) -> str:
        """Say which basis or inverse preconditions the layer. Empty if it has none."""
        if self.layer.name in self.kfac.proving.unfit:
            return ""
        if not self.factors:
            return "no factors, because the config asks for none: nothing to decompose"
        if self.state is None:
            return self._kept_elsewhere()
        if self.state.preconditioner is None:
            return ""
        texts = [f"{self.basis} of {self._refreshed_in()}"]
        hook_error = self.kfac.capture.failed.get(self.layer.name)
        if hook_error:
            texts.append(
                f"{NO_ROWS.format(hook_error)}; after the next check of rows, the layer will be "
                "updated without curvature"
            )
        for side, factor in self.factors.items():
            step, outcome = self.curvature.log.tried.get(factor.key, (0, FRESH))
            if outcome == UNUSABLE:
                texts.append(f"{side} had nothing to decompose in step {step}")
            if outcome == FAILED:
                texts.append(
                    f"the refresh of {side} in step {step} failed on rank {self._owner(factor)}"
                )
        return "; ".join(texts)

    def _kept_elsewhere(self) -> str:
        """Say which rank keeps the layer's basis. Only called if this rank does not keep it."""
        curvature = self.curvature
        rank = f"rank {self._gradient_workers()}"
        is_known = curvature.travels and all(
            factor.key in curvature.ready for factor in self.factors.values()
        )
        if is_known:
            return f"its {self.basis} is on {rank}"
        return f"known on {rank}: call explain there"

    def _refreshed_in(self) -> str:
        """Say in which step each factor was decomposed for the basis in use."""
        steps: dict[str, str] = {}
        for side, factor in self.factors.items():
            step = self.curvature.log.fresh.get(factor.key)
            steps[side] = "a checkpoint" if step is None else f"step {step}"
        if len(set(steps.values())) == 1:
            return next(iter(steps.values()))
        return ", ".join(f"{side} of {step}" for side, step in steps.items())

    def _lacks(self) -> str:
        """Say that the layer has no basis or inverse, and why."""
        return f"no {self.basis}: {self._missing()}"

    def _missing(self) -> str:
        """Say why the layer has no basis or inverse."""
        kfac = self.kfac
        name = self.layer.name
        if name in kfac.proving.unfit:
            hook_error = kfac.capture.failed.get(name)
            if hook_error:
                return NO_ROWS.format(hook_error)
            return (
                "not proven, because its rows do not make up its gradient: "
                f"{kfac.proving.unfit[name]}; the next update repeats the proof"
            )
        state = self.state
        decomposed = {"A": state and state.A, "G": state and state.G}
        reasons = [
            f"{side} {self._not_decomposed(factor)}"
            for side, factor in self.factors.items()
            if decomposed[side] is None
        ]
        return ", ".join(reasons)

    # a factor

    def _not_decomposed(self, factor: FactorSpec) -> str:
        """Say why a factor is not decomposed."""
        curvature = self.curvature
        key = factor.key
        owner = f"rank {self._owner(factor)}"
        step, outcome = curvature.log.tried.get(key, (0, FRESH))
        if outcome == FAILED:
            return f"could not be decomposed on {owner} in step {step}"
        if key not in curvature.factors:
            return f"had nothing to decompose on {owner}: call explain there"
        average = curvature.factors[key]
        if not float(average.updates):
            return "has taken no batch yet" if key in curvature.log.batches else "has no update yet"
        if not bool(average.packed_P.isfinite().all()):
            return "is not finite"
        if not bool((average.packed_P != 0).any()):
            return "is zero, because all its rows are zero"
        return "waits for its next update"

    def _factor_text(self, factor: FactorSpec) -> str:
        """Say how wide a factor is, where it is kept, and how many updates it has taken."""
        curvature = self.curvature
        key = factor.key
        others = ", ".join(name for name in factor.layers if name != self.layer.name)
        shared = f", shared with {others}" if others else ""
        text = f"{factor.side.kind}, {factor.side.dim} wide{shared}; on rank {self._owner(factor)}"
        if key not in curvature.factors:
            return f"{text}: call explain there for its updates"
        count = float(curvature.factors[key].updates)
        text += f"; {count:.0f} updates"
        if key not in curvature.log.batches:
            return f"{text}, none since this process started or loaded a checkpoint"
        return f"{text}; last batch: {self._last_batch_text(factor, has_updates=count > 0)}"

    def _last_batch_text(self, factor: FactorSpec, *, has_updates: bool) -> str:
        """Say how many rows the factor's last batch had, and whether it changed the factor."""
        batch = self.curvature.log.batches[factor.key]
        limited, unchanged, rows, changed = batch.tolist()
        unit = "rows" if factor.is_A else "loss terms"
        text = f"step {batch.step}, {rows:.0f} {unit}"
        if unchanged or rows <= 0:
            if rows > 0:
                reason = ", but its values are not finite"
            elif self.kfac.proving.frozen(self.layer):
                reason = " because its weight is frozen"
            else:
                reason = " on the ranks that contribute"
            text += f"{reason}, so the factor did not change"
            if has_updates:
                is_here = changed >= 0
                since = (
                    f"step {changed:.0f}"
                    if is_here
                    else "this process started or loaded a checkpoint"
                )
                text += f"; unchanged since {since}"
            return text
        wanted = self.kfac.plan.config.factor.rows
        if factor.is_A and not isinstance(wanted, str):
            asked = needed(factor, wanted)
            if rows < asked:
                text += f", fewer than the {asked} that an update asks for (factor.rows)"
        far_above = "scaled down because its trace was far above that of the average"
        return f"{text}, {far_above}" if limited else text
