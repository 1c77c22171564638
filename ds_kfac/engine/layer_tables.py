"""Tables of a model's layers and of what is left out, equal ones in one row."""

import re
from collections.abc import Mapping, Sequence

from ds_kfac.config.kfac import KFACConfig
from ds_kfac.directions.base import UpdateRule
from ds_kfac.model.layers.base import LayerSpec
from ds_kfac.model.scan import Scan
from ds_kfac.text import columns

Row = tuple[str, ...]


def layer_lines(
    scan: Scan, config: KFACConfig, rule: UpdateRule, where: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """The preconditioned layers.

    Args:
        where: layer name -> gradient workers and decomposers, for a row for each layer; None: equal layers in a row.
    """
    choices = [rule.choice(config, layer) for layer in scan.layers]
    step = any(choice is not None for choice in choices)
    rows = []
    for layer, choice in zip(scan.layers, choices, strict=True):
        ranks = where[layer.name] if where else ()
        rows.append((layer.name or "(model)", *_sides(layer), *ranks, *([choice or ""] if step else [])))
    ranks = ("workers", "decomposed on") if where else ()
    head = ("layer", "type", "G", "A", "bias", *ranks, *(["step"] if step else []))
    return columns([head, *(rows if where else folded(rows))])


def _sides(layer: LayerSpec) -> Row:
    sides = (f"{side.dim}{'' if side.kind == 'dense' else f' ({side.kind})'}" for side in (layer.G, layer.A))
    kind = layer.kind if len(layer.uses) == 1 else f"Tied to {layer.uses[0].module}"
    return (kind, *sides, "yes" if layer.bias else "no")


def skipped_lines(scan: Scan, *, whole: bool = False) -> list[str]:
    """What is not preconditioned, and why; nothing if all is.

    Args:
        whole: a row for each module.
    """
    if not scan.skipped:
        return []
    rows = [(left.name or "(model)", left.kind, f"{left.numel:,}", left.reason) for left in scan.skipped]
    return ["", *columns([("not preconditioned", "type", "parameters", "why"), *(rows if whole else folded(rows))])]


def folded(rows: Sequence[Row]) -> list[Row]:
    """Rows whose names differ in numbers only, all else equal, as one: ``blocks.[0-31].mlp.up x 32``."""
    together: dict[Row, list[list[int]]] = {}
    for name, *cells in rows:
        numbers = [int(number) for number in re.findall(r"\d+", name)]
        together.setdefault((re.sub(r"\d+", "#", name), *cells), []).append(numbers)
    return [(_name(pattern, found), *cells) for (pattern, *cells), found in together.items()]


def _name(pattern: str, found: Sequence[Sequence[int]]) -> str:
    ranges = [(min(column), max(column)) for column in zip(*found, strict=True)]
    texts = iter(str(low) if low == high else f"[{low}-{high}]" for low, high in ranges)
    return re.sub("#", lambda _: next(texts), pattern) + (f" x {len(found)}" if len(found) > 1 else "")
