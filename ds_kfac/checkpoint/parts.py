"""The part of a header that the ranks know together: layers, factors, and where each is in its schedule."""

from typing import Any

from ds_kfac.assignment.factor_spec import key_of
from ds_kfac.checkpoint.match import saved_names
from ds_kfac.step.preconditioner import KFACPreconditioner


def part_of(kfac: KFACPreconditioner) -> dict[str, Any]:
    """What one rank knows of one of its domains, in global names."""
    curvature, names = kfac.curvature, saved_names(kfac)
    keys = {key: key_of(names[key[:-2]], key[-1]) for key in kfac.curvature.specs}
    timetable = curvature.schedule.state()
    return {
        "domain": kfac.target.domain.name,
        "layers": {
            names[layer.name]: {"A": [layer.A.dim, layer.A.block], "G": [layer.G.dim, layer.G.block]}
            for layer in kfac.layers
        },
        "factors": {keys[key]: [spec.side.dim, spec.side.block] for key, spec in curvature.specs.items()},
        "peak_lr": {str(group): float(lr) for group, lr in kfac.peak_lr.items()},
        "damping_scale": None if kfac.damping_scale is None else float(kfac.damping_scale),
        "shared": [[names[name] for name in group] for group in kfac.known.groups]
        if kfac.known.groups is not None
        else None,
        "rows": {names[layer]: rows for layer, rows in (kfac.known.rows or {}).items()},
        "counts": [timetable["captured"], timetable["skipped"]],
        "clocks": {keys[key]: clock for key, clock in timetable["factors"].items()},
        "ready": [keys[key] for key in curvature.ready],
        "pending": {keys[key]: step for key, step in curvature.pending.items()},
    }


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The header's part that all ranks and domains together know."""
    groups = [group for part in parts for group in part["shared"] or ()]
    peaks = [pair for part in parts for pair in part["peak_lr"].items()]
    return {
        "layers": {name: sides for part in parts for name, sides in part["layers"].items()},
        "factors": {key: side for part in parts for key, side in part["factors"].items()},
        "peak_lr": {group: max(lr for other, lr in peaks if other == group) for group, _ in peaks},
        "damping_scale": parts[0]["damping_scale"],
        "shared": None
        if all(part["shared"] is None for part in parts)
        else [list(group) for group in dict.fromkeys(map(tuple, groups))],
        "rows": {layer: rows for part in parts for layer, rows in part["rows"].items()},
        "timetable": {
            "domains": {part["domain"]: part["counts"] for part in parts},
            "factors": {key: clock for part in parts for key, clock in part["clocks"].items()},
        },
        "ready": sorted({key for part in parts for key in part["ready"]}),
        "pending": dict(sorted({item for part in parts for item in part["pending"].items()})),
    }
