"""Estimates as text."""

from collections.abc import Sequence

from ds_kfac.curvature.forms import FACTOR_FORMS
from ds_kfac.estimate.estimates import Estimate, Refused
from ds_kfac.estimate.machine import Machine
from ds_kfac.estimate.memory import STATE, TRANSIENT, state_bytes, transient_bytes
from ds_kfac.estimate.seconds import HIDDEN, STAGES
from ds_kfac.estimate.subject import Subject
from ds_kfac.estimate.traffic import KINDS, PARTS, StepTraffic
from ds_kfac.model.share import share
from ds_kfac.text import columns, number, wrapped

STRATEGY_COLUMNS = (
    ("strategy", ""),
    ("K-FAC state", "fullest rank"),
    ("", "mean rank"),
    ("in a step", "temporary"),
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


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def subject_lines(subject: Subject) -> list[str]:
    """Layers that are preconditioned, and all that is not, by kind and reason."""
    sharing = f"; {len(subject.shared)} groups share an input" if subject.shared else ""
    lines = [f"  {share(subject.layers, subject.parameters)}{sharing}"]
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
        words = estimate.plan.form.words if kind == "eigenbases" else kind
        rows.append((words, number(nbytes.max(), "B"), number(nbytes.mean(), "B")))
    passing = {kind: estimate.memory[kind] for kind in TRANSIENT}
    for kind, nbytes in passing.items():
        rows.append((f"{kind} of a step that captures all", number(nbytes.max(), "B"), number(nbytes.mean(), "B")))
    return columns(rows, right=True)


def traffic_lines(estimate: Estimate) -> list[str]:
    """Kind by kind: payload that the rank with most of it sends, per step."""
    steps = (estimate.mean, estimate.plain, estimate.update, estimate.refresh)
    rows: list[tuple[str, ...]] = [("bytes sent by a rank", "mean", "no update", "update", "refresh")]
    own = {part.kind for part in estimate.plan.form.parts}
    others = set(PARTS) - own
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
        "captures of the busiest rank, per update of all": float(work.captures.max()) if work.rows else None,
        "decompositions of the busiest rank, all refreshed": float(work.decompose_flops.max()),
        "preconditioning by the busiest rank, every step": float(work.precondition_flops.max()),
    }
    rows = [("work", "FLOPs")]
    rows += [(what, "?" if flops is None else number(flops, "")) for what, flops in busiest.items()]
    seconds: list[tuple[str, ...]] = [("seconds per step, mean", *STAGES, "hidden", "K-FAC", "model")]
    timing = estimate.timing
    model = "?" if estimate.model is None else _seconds(estimate.model)
    stages = (_seconds(timing.stages[stage]) for stage in (*STAGES, "hidden"))
    seconds.append(("", *stages, _seconds(timing.mean), model))
    hidden = wrapped(f"hidden behind the model, assumed: {HIDDEN:.0%} of decompositions that have steps to be done in")
    return [*columns(rows, right=True), "", *columns(seconds, right=True), *(hidden if work.costs.beside else [])]


def verdict(estimate: Estimate) -> str:
    """The answer in a line, for the fullest rank."""
    state, beside = estimate.state.max(), transient_bytes(estimate.memory).max()
    memory = f"{number(state, 'B')} of state on a rank, at most {number(beside, 'B')} beside it in a step"
    if estimate.overhead is None or estimate.model is None:
        return f"K-FAC takes {memory}"
    worst = (estimate.model + estimate.timing.worst) / (estimate.model + estimate.timing.mean)
    return f"K-FAC adds {estimate.overhead:.1%} to a step, its worst step is {worst:.2f} x the mean; {memory}"


def machine_lines(machine: Machine, method: str) -> list[str]:
    """The constants that predictions of a method are made from, and whether a clock has seen them."""
    costs, form = machine.costs, FACTOR_FORMS[method]

    def of(field: str) -> str:
        return "measured" if field in costs.measured else "assumed"

    times = ", ".join(f"{size}: {_seconds(seconds)}" for size, seconds in getattr(costs, form.solver_seconds))
    if form.product_solver_flops:
        times += f"; or {form.product_solver_flops} n^3 FLOPs of products, where faster"
    within = costs.node_bytes or costs.link_bytes
    nodes = f"; {costs.node_size} ranks a node, {8 * within / 1e9:.4g} Gbit/s within" if costs.node_size > 1 else ""
    products, moments, model = (
        number(rate, "") for rate in (costs.gemm_flops, costs.syrk_flops, machine.model_flops or costs.gemm_flops)
    )
    link, call = 8 * costs.link_bytes / 1e9, _seconds(costs.call_seconds)
    lines = {
        form.solver_seconds: f"{form.solver} {times}",
        "gemm_flops": f"FLOP/s of products {products}, second moments {moments}; memory "
        f"{number(costs.copy_bytes, 'B/s')}, {call} a kernel",
        "model_flops": f"FLOP/s of the model, and of our products in 16 bits, {model}",
        "link_bytes": f"{link:.4g} Gbit/s a rank, each way, {_seconds(costs.link_seconds)} latency{nodes}",
    }
    return [f"  {of(field)}: {text}" for field, text in lines.items()]
