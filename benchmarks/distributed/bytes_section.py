"""The report's section on bytes, collectives and memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.distributed.cases import (
    KFAC_PYTORCH,
    MEMORY_TARGETS,
    PAYLOAD_TARGETS,
    REFRESH,
    UPDATE,
)
from benchmarks.distributed.plots import draw_payload
from benchmarks.distributed.section import MB, Row, Section, Verdict, megabytes
from ds_kfac.comm.message import ALIGNMENT

STEPS = ("plain", "update", "refresh")
WAYS = ("sent", "received")
KINDS = {
    "factors": ("factors",),
    "bases": ("eigenvectors", "eigenvalues"),
    "gradients": ("gradients",),
    "results": ("results",),
}
TARGET_WORLD, MOST_COLLECTIVES = 4, 4
FORMULA_TOLERANCE = 0.02


def amortised(rank: Row, way: str) -> dict[str, float]:
    """Kind -> payload bytes per step of one rank."""
    plain, update, refresh = (rank[step][way] for step in STEPS)
    kinds = refresh.keys() | update.keys() | plain.keys()
    return {
        kind: plain.get(kind, 0)
        + (update.get(kind, 0) - plain.get(kind, 0)) / UPDATE
        + (refresh.get(kind, 0) - update.get(kind, 0)) / REFRESH
        for kind in sorted(kinds)
    }


def payload(case: Row) -> float:
    """Bytes per step of the rank that sends or receives most."""
    return max(sum(amortised(rank, way).values()) for rank in case["ranks"] for way in WAYS)


def planned(case: Row) -> float:
    """The same by the closed formulas."""
    return max(
        sum(flow[place] for flow in rank["planned"].values())
        for rank in case["ranks"]
        for place in (0, 1)
    )


def wire_bytes(case: Row) -> float:
    """What torch.distributed moved, likewise."""
    found = []
    for rank in case["ranks"]:
        for place in (0, 1):
            plain, update, refresh = (rank[step]["wire"][place] for step in STEPS)
            found.append(plain + (update - plain) / UPDATE + (refresh - update) / REFRESH)
    return max(found)


def state(case: Row) -> int:
    """Bytes of factors and eigenbases on the fullest rank."""
    return max(rank["state"] for rank in case["ranks"])


def planned_state(case: Row) -> int:
    """The same by the assignment, which counts moments too, Adam's or of corrected eigenvalues."""
    return max(rank["planned_state"] - rank["adam"] for rank in case["ranks"])


def unexplained(case: Row) -> int:
    """Largest difference of the channel's bytes and torch.distributed's that padding does not
    explain, in any step: every message is padded to ``ALIGNMENT`` bytes for every rank."""
    most = 0
    for rank in case["ranks"]:
        for step in STEPS:
            calls = sum(rank[step]["wrapped_calls"].values())
            assert calls == sum(rank[step]["calls"].values()), "the channel miscounts its calls"
            for place, way in enumerate(WAYS):
                # the proof's all-reduce, once in many steps, is not among the bytes that are
                # watched
                ours = sum(nbytes for kind, nbytes in rank[step][way].items() if kind != "proof")
                padding = rank[step]["wire"][place] - ours
                if not 0 <= padding < max(1, ALIGNMENT * calls * case["world"]):
                    most = max(most, abs(padding))
    return most


def bytes_section(rows: Sequence[Row], out: Path) -> Section:
    size = rows[0]["ranks"][0]
    header = [
        "ranks",
        "strategy",
        "optimizer",
        "wire",
        *(f"{kind} [MB]" for kind in KINDS),
        "payload [MB]",
        "by formula [MB]",
        "to torch.distributed [MB]",
        "kfac-pytorch's payload [MB]",
        "collectives plain / update / refresh",
        "state [MB]",
        "planned [MB]",
        "kfac-pytorch's state [MB]",
    ]
    before = (
        f"A GPT of {size['parameters'] / 1e6:.1f} M parameters, {size['gradient'] / 1e6:.2f} M of "
        f"them preconditioned; "
        f"MB per rank and step, amortised over factors every {UPDATE} and eigenbases every "
        f"{REFRESH} steps."
    )
    bars = _bars(rows)
    plots = [draw_payload(bars, out / "payload.png")] if bars else []
    cells = [_cells(case) for case in rows]
    return Section(
        "Bytes, collectives and memory", before, header, cells, NOTES, plots, _verdicts(rows)
    )


NOTES = (
    "factors to results: payload sent, of the rank that sends most of the kind. Payload: all "
    "kinds, of the rank "
    "that sends or receives most; what this rank has to itself is not counted. To "
    "torch.distributed: what it was "
    "asked to move to and from other ranks, counted by wrapping it, padding of messages to 16 "
    "bytes included; "
    "gloo and NCCL add headers of their own below that. By formula: from the plan alone, without "
    "padding and the "
    "few exchanged scalars. State: factors and eigenbases of the fullest rank; planned: by the "
    "assignment. KFACAdamW's moments are not in it: they replace the optimizer's. kfac-pytorch's "
    "payload is the "
    "size of the fp32 tensors in the collectives that a rank takes part in, of which a ring "
    "all-reduce puts up to "
    "twice as much on the wire: per update 48.8 MB of factors (24.4 as triangles), per refresh "
    "61.7 MB of "
    "eigenbases (COMM-OPT), per step 12.9 MB of gradients (MEM-OPT)."
)


def _cells(case: Row) -> list[str]:
    kinds = [amortised(rank, "sent") for rank in case["ranks"]]
    theirs = KFAC_PYTORCH.get(case["strategy"]) if _judged(case) else None
    calls = (
        max(sum(rank[step]["wrapped_calls"].values()) for rank in case["ranks"]) for step in STEPS
    )
    return [
        str(case["world"]),
        case["strategy"],
        case["optimizer"],
        case["wire"],
        *(
            megabytes(max(sum(kind.get(name, 0) for name in names) for kind in kinds))
            for names in KINDS.values()
        ),
        megabytes(payload(case)),
        megabytes(planned(case)),
        megabytes(wire_bytes(case)),
        f"{theirs[0]:g}" if theirs else "",
        " / ".join(map(str, calls)),
        megabytes(state(case)),
        megabytes(planned_state(case)),
        f"{theirs[1]:g}" if theirs else "",
    ]


def _bars(rows: Sequence[Row]) -> list[tuple[str, Mapping[str, float], float | None]]:
    """kfac-pytorch's payload, then ours with bf16: of the rank and way with most of it, by kind."""
    cases = {case["strategy"]: case for case in rows if _judged(case) and case["wire"] == "bf16"}
    bars: list[tuple[str, Mapping[str, float], float | None]] = []
    for strategy in cases:
        if strategy in KFAC_PYTORCH:
            bars.append(
                (
                    f"kfac-pytorch\n{strategy}\nfp32",
                    {"all of kfac-pytorch": KFAC_PYTORCH[strategy][0]},
                    None,
                )
            )
    for strategy, case in cases.items():
        flows = (amortised(rank, way) for rank in case["ranks"] for way in WAYS)
        most = max(flows, key=lambda flow: sum(flow.values()))
        parts = {
            kind: sum(most.get(name, 0) for name in names) / MB for kind, names in KINDS.items()
        }
        target = _payload_target(case)
        bars.append((f"{strategy}\nbf16", parts, target and target / MB))
    return bars


def _judged(case: Row) -> bool:
    """Targets and kfac-pytorch's figures are of A and G on 4 ranks."""
    return case["world"] == TARGET_WORLD and case["optimizer"] == "AdamW"


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for case in filter(_judged, rows):
        if case["wire"] == "bf16":
            limit, value = _payload_target(case), payload(case)
            if limit is not None:
                theirs = KFAC_PYTORCH.get(case["strategy"])
                claim = f"payload per rank and step, {case['strategy']}, bf16"
                claim += f"; kfac-pytorch {theirs[0]:g}" if theirs else ""
                found.append(
                    Verdict(
                        claim, f"<= {megabytes(limit)} MB", f"{megabytes(value)} MB", value <= limit
                    )
                )
            limit, value = MEMORY_TARGETS.get(case["strategy"]), state(case)
            if limit is not None:
                found.append(
                    Verdict(
                        f"K-FAC state per rank, {case['strategy']}",
                        f"<= {limit:g} MB",
                        f"{megabytes(value)} MB",
                        value <= limit * MB,
                    )
                )
    most = max(
        sum(rank[step]["wrapped_calls"].values())
        for case in rows
        for rank in case["ranks"]
        for step in STEPS
    )
    found.append(
        Verdict(
            "collectives on any step, every case",
            f"<= {MOST_COLLECTIVES}",
            str(most),
            most <= MOST_COLLECTIVES,
        )
    )
    counted = max(unexplained(case) for case in rows)
    found.append(
        Verdict(
            "the channel's counters against wrapping torch.distributed, every case and step",
            "equal except padding",
            f"{counted} bytes unexplained",
            counted == 0,
        )
    )
    for name, by_plan, measured in (("payload", planned, payload), ("state", planned_state, state)):
        error = max(
            (abs(by_plan(case) / measured(case) - 1) for case in rows if measured(case)),
            default=0.0,
        )
        found.append(
            Verdict(
                f"{name} by formula against measured, every case",
                f"within {FORMULA_TOLERANCE:.0%}",
                f"within {error:.2%}",
                error <= FORMULA_TOLERANCE,
            )
        )
    return found


def _payload_target(case: Row) -> float | None:
    """[bytes], of strategies that have one."""
    if case["strategy"] == "ZeRO-3":
        gradient = 2 * case["ranks"][0]["gradient"]
        factors = max(amortised(rank, way)["factors"] for rank in case["ranks"] for way in WAYS)
        return 2 / case["world"] * gradient + factors
    target = PAYLOAD_TARGETS.get(case["strategy"])
    return None if target is None else target * MB
