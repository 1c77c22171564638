"""Estimates as text."""

from collections import Counter
from collections.abc import Sequence

from ds_kfac.columns import columns, wrapped
from ds_kfac.estimate.estimates import Estimate, Refused
from ds_kfac.estimate.machine import Machine
from ds_kfac.estimate.memory import STATE, TRANSIENT, state_bytes, transient_bytes
from ds_kfac.estimate.seconds import STAGES
from ds_kfac.estimate.subject import Subject
from ds_kfac.estimate.traffic import KINDS, StepTraffic

UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))

STRATEGY_COLUMNS = (
    ("strategy", ""),
    ("K-FAC state", "fullest rank"),
    ("", "mean rank"),
    ("in a step", "beside it"),
    ("sent/step", "mean"),
    ("other nodes", "of that"),
    ("no update", "sent"),
    ("update", "sent"),
    ("refresh", "sent"),
    ("time/step", "mean"),
    ("worst step", "at once"),
    ("worst step", "staggered"),
    ("of the", "model's time"),
)


def number(value: float, unit: str) -> str:
    """Three digits and a decimal prefix."""
    for prefix, size in UNITS:
        if abs(value) >= 0.9995 * size:
            return (
                f"{value / size:.3g} {prefix}{unit}"
                if abs(value) < 999.5 * size
                else f"{value / size:.0f} {prefix}{unit}"
            )
    return f"{value:.3g} {unit}"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def subject_lines(subject: Subject) -> list[str]:
    """Layers that are preconditioned, and all that is not, by kind and reason."""
    share = subject.preconditioned / subject.parameters
    kinds = Counter(layer.kind for layer in subject.layers)
    sharing = f"; {len(subject.shared)} groups share an input" if subject.shared else ""
    lines = [
        f"  {subject.parameters:,} parameters, {subject.preconditioned:,} of them ({share:.0%}) in "
        f"{len(subject.layers)} K-FAC layers ({', '.join(f'{n} {kind}' for kind, n in kinds.items())}){sharing}"
    ]
    if not subject.trace.units:
        lines.append("  no forward was traced: no layers are assumed to share their inputs, each sees a row a token")
    left: dict[tuple[str, str], list[int]] = {}
    for skipped in subject.skipped:
        left.setdefault((skipped.kind, skipped.reason), []).append(skipped.numel)
    table = [("not preconditioned", "modules", "parameters", "why")]
    table += [(kind, str(len(n)), f"{sum(n):,}", why) for (kind, why), n in left.items()]
    return lines + (["", *columns(table)] if left else [])


def strategy_lines(found: Sequence[Estimate | Refused], machine: Machine, chosen: Estimate | None) -> list[str]:
    """A row for every strategy; ``chosen``, the config's own, is marked."""
    rows = [tuple(upper for upper, _ in STRATEGY_COLUMNS), tuple(lower for _, lower in STRATEGY_COLUMNS)]
    refused: list[str] = []
    for estimate in found:
        if isinstance(estimate, Refused):
            refused += wrapped(f"{estimate.name}: refused: {estimate.reason}")
            continue
        mark = " *" if chosen is not None and estimate.name == chosen.name else ""
        elsewhere = machine.elsewhere(estimate.plan.assignment.world)
        steps = (estimate.plain, estimate.update, estimate.refresh)
        rows.append(
            (
                estimate.name + mark,
                number(estimate.state.max(), "B"),
                number(estimate.state.mean(), "B"),
                number(transient_bytes(estimate.memory).max(), "B"),
                number(estimate.mean.sent().max(), "B"),
                number(estimate.mean.between(elsewhere).max(), "B"),
                *(number(step.sent().max(), "B") for step in steps),
                _seconds(estimate.timing.mean),
                _seconds(estimate.at_once.worst),
                _seconds(estimate.spread.worst),
                "?" if estimate.overhead is None else f"{estimate.overhead:.1%}",
            )
        )
    if len(rows) == 2:
        return refused
    note = ["  * what this config chooses"] if chosen is not None else []
    return [*columns(rows, right=True), *refused, *note]


def memory_lines(estimate: Estimate) -> list[str]:
    """Kind by kind: of the fullest rank, and of the mean one."""
    rows = [("memory", "most", "mean")]
    kept = {**{kind: estimate.memory[kind] for kind in STATE}, "state": state_bytes(estimate.memory)}
    for kind, nbytes in kept.items():
        inverses = kind == "eigenbases" and estimate.plan.method == "inverse"
        rows.append(("inverses" if inverses else kind, number(nbytes.max(), "B"), number(nbytes.mean(), "B")))
    passing = {kind: estimate.memory[kind] for kind in TRANSIENT}
    for kind, nbytes in passing.items():
        rows.append((f"{kind} of a step that captures all", number(nbytes.max(), "B"), number(nbytes.mean(), "B")))
    return columns(rows, right=True)


def traffic_lines(estimate: Estimate) -> list[str]:
    """Kind by kind: payload that the rank with most of it sends, per step."""
    steps = (estimate.mean, estimate.plain, estimate.update, estimate.refresh)
    rows: list[tuple[str, ...]] = [("bytes sent by a rank", "mean", "no update", "update", "refresh")]
    others = ("eigenvectors", "eigenvalues") if estimate.plan.method == "inverse" else ("inverses",)
    for kind in (kind for kind in KINDS if kind not in others):
        rows.append((kind, *(number(step.sent(kind).max(), "B") for step in steps)))
    rows.append(("all", *(number(step.sent().max(), "B") for step in steps)))
    rows.append(("received", *(number(step.received().max(), "B") for step in steps)))
    rows.append(("collectives", *(_calls(step) for step in steps)))
    return columns(rows, right=True)


def _calls(step: StepTraffic) -> str:
    return f"{step.collectives:.3g}"


def work_lines(estimate: Estimate) -> list[str]:
    """FLOPs of the busiest rank, and seconds by stage."""
    work = estimate.work
    busiest = {
        "capture, every rank, per update of all": float(sum(work.capture_flops.values())) if work.rows else None,
        "decompositions of the busiest rank, all refreshed": float(work.decompose_flops.max()),
        "preconditioning by the busiest rank, every step": float(work.precondition_flops.max()),
    }
    rows = [("work", "FLOPs")]
    rows += [(what, "?" if flops is None else number(flops, "")) for what, flops in busiest.items()]
    seconds: list[tuple[str, ...]] = [("seconds per step, mean", *STAGES, "K-FAC", "model")]
    timing = estimate.timing
    model = "?" if estimate.model is None else _seconds(estimate.model)
    seconds.append(("", *(_seconds(timing.stages[stage]) for stage in STAGES), _seconds(timing.mean), model))
    return [*columns(rows, right=True), "", *columns(seconds, right=True)]


def machine_lines(machine: Machine, method: str) -> list[str]:
    """The constants that predictions of a method are made from."""
    costs = machine.costs
    table = costs.cholesky_seconds if method == "inverse" else costs.eigh_seconds
    decompositions = ", ".join(f"{size}: {_seconds(seconds)}" for size, seconds in table)
    name = "inverse by Cholesky" if method == "inverse" else "eigh"
    within = costs.node_bytes or costs.link_bytes
    nodes = f"; {costs.node_size} ranks a node, {8 * within / 1e9:.4g} Gbit/s within" if costs.node_size > 1 else ""
    model = number(machine.model_flops or costs.gemm_flops, "")
    return [
        f"  assumed: {name} {decompositions}",
        f"    FLOP/s: products {number(costs.gemm_flops, '')}, second moments {number(costs.syrk_flops, '')}, model "
        f"{model}; memory {number(costs.copy_bytes, 'B/s')}, {_seconds(costs.call_seconds)} a kernel",
        f"    {8 * costs.link_bytes / 1e9:.4g} Gbit/s a rank, each way, {_seconds(costs.link_seconds)} latency{nodes}",
    ]
