"""The table of bytes, collectives and memory of the distributed benchmark."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.distributed_cases import KFAC_PYTORCH, MEMORY_TARGETS, PAYLOAD_TARGETS, REFRESH, UPDATE

MB = 1e6
Row = Mapping[str, Any]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(header) + " |",
        "|---" * len(header) + "|",
        *("| " + " | ".join(r) + " |" for r in rows),
        "",
    ]


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


def amortised(measured: Row, way: str) -> dict[str, float]:
    """Kind -> payload bytes per step of one rank."""
    plain, update, refresh = (measured[step][way] for step in ("plain", "update", "refresh"))
    kinds = refresh.keys() | update.keys() | plain.keys()
    return {
        kind: plain.get(kind, 0)
        + (update.get(kind, 0) - plain.get(kind, 0)) / UPDATE
        + (refresh.get(kind, 0) - update.get(kind, 0)) / REFRESH
        for kind in sorted(kinds)
    }


def payload(case: Row) -> float:
    """Bytes per step of the rank that sends or receives most."""
    return max(sum(amortised(rank, way).values()) for rank in case["ranks"] for way in ("sent", "received"))


def planned(case: Row) -> float:
    """The same by the closed formulas."""
    return max(sum(flow[place] for flow in rank["planned"].values()) for rank in case["ranks"] for place in (0, 1))


def wire_bytes(case: Row) -> float:
    """What torch.distributed moved, likewise."""
    found = []
    for rank in case["ranks"]:
        for place in (0, 1):
            plain, update, refresh = (rank[step]["wire"][place] for step in ("plain", "update", "refresh"))
            found.append(plain + (update - plain) / UPDATE + (refresh - update) / REFRESH)
    return max(found)


def payload_target(case: Row) -> float | None:
    """[bytes], of cases that have one."""
    if case["world"] != 4 or case["wire"] == "fp32" or case["optimizer"] != "AdamW":
        return None
    if case["strategy"] == "ZeRO-3":
        gradient = 2 * case["ranks"][0]["gradient"]
        factors = max(amortised(rank, way)["factors"] for rank in case["ranks"] for way in ("sent", "received"))
        return 2 / case["world"] * gradient + factors
    target = PAYLOAD_TARGETS.get(case["strategy"])
    return None if target is None else target * MB


def bytes_section(rows: Sequence[Row], out: Path) -> list[str]:
    cells = []
    for case in rows:
        ranks, target = case["ranks"], payload_target(case)
        kinds = [amortised(rank, "sent") for rank in ranks]
        calls = [sum(ranks[0][step]["wrapped_calls"].values()) for step in ("plain", "update", "refresh")]
        four, memory = case["world"] == 4 and case["optimizer"] == "AdamW", max(rank["state"] for rank in ranks)
        theirs = KFAC_PYTORCH.get(case["strategy"]) if four else None
        memory_target = MEMORY_TARGETS.get(case["strategy"]) if four else None
        cells.append([
            str(case["world"]), case["strategy"], case["optimizer"], case["wire"],
            *(megabytes(max(_kind(kind, names) for kind in kinds)) for names in KINDS.values()),
            megabytes(payload(case)), _judged(payload(case), target), f"{theirs[0]:g}" if theirs else "",
            megabytes(planned(case)), megabytes(wire_bytes(case)), " / ".join(map(str, calls)),
            megabytes(memory), _judged(memory, memory_target and memory_target * MB),
            f"{theirs[1]:g}" if theirs else "",
            megabytes(max(rank["planned_state"] - rank["adam"] for rank in ranks)),
        ])  # fmt: skip
    header = ["ranks", "strategy", "optimizer", "wire", *KINDS, "payload", "target", "kfac-pytorch", "by formula",
              "on the wire", "collectives", "state", "target", "kfac-pytorch", "planned"]  # fmt: skip
    size = rows[0]["ranks"][0]
    return [
        "## Bytes, collectives and memory", "",
        f"A GPT of {size['parameters'] / 1e6:.1f} M parameters, {size['gradient'] / 1e6:.2f} M of them preconditioned; "
        f"MB per rank and step, amortised over factors every {UPDATE} and eigenbases every {REFRESH} steps.", "",
        *table(header, cells), *BYTES_NOTES, "",
    ]  # fmt: skip


KINDS = {"factors": ("factors",), "bases": ("eigenvectors", "eigenvalues"), "gradients": ("gradients",),
         "results": ("results",)}  # fmt: skip
BYTES_NOTES = [
    "factors to results: payload sent, of the rank that sends most of the kind. Payload: all kinds, of the rank that",
    "sends or receives most. On the wire: what torch.distributed was asked to move to and from other ranks, padding",
    "included. By formula: from the plan alone, without alignment and the few numbers that ranks tell each other.",
    "Collectives: in a plain, an update and a refresh step. State: factors and eigenbases of the fullest rank; planned:",
    "by the assignment, without Adam's moments. ZeRO-3's target: 2/world of the gradient in 16 bits, plus factors. kfac-pytorch's",
    "payload is the size of the fp32 tensors in the collectives that a rank takes part in; an all-reduce moves up to",
    "twice that.",
]


def _kind(kinds: Row, names: Sequence[str]) -> float:
    return sum(kinds.get(name, 0) for name in names)


def megabytes(nbytes: float) -> str:
    return f"{nbytes / MB:.3g}" if nbytes < 100 * MB else f"{nbytes / MB:.0f}"


def _judged(value: float, target: float | None) -> str:
    return "" if target is None else f"{target / MB:.3g} {'met' if value <= target else 'MISSED'}"
