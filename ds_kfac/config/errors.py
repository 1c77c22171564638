"""What lies between a raw config block and its models: nulls, and errors that say where, what and what instead."""

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ds_kfac.config.values import TOO_LARGE, form_of, holds_value

Model = type[BaseModel]
AUTO = "auto"


def without_nulls(values: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """null, and "auto" of Hugging Face's configs, are the same as leaving a known key out; an unknown one must still be
    seen."""
    pruned = {}
    for key, value in values.items():
        field = model.model_fields.get(key)
        if field is not None and (value is None or value == AUTO):
            continue
        inner = _inner_model(field, value)
        pruned[key] = without_nulls(value, inner) if inner and isinstance(value, Mapping) else value
    return pruned


def explain(detail: Any, block: Mapping[str, Any], model: Model) -> str:
    """One of pydantic's errors as a line; ``block`` is the raw input of ``model``."""
    path, got = ".".join(map(str, detail["loc"])), detail["input"]
    if detail["type"] == "extra_forbidden":
        return f"kfac.{path}: unknown key; {_nearest(detail['loc'], block, model)}"
    if detail["type"] == "missing":
        return f"kfac.{path}: missing in {got!r}; must be given"
    if detail["type"] == "model_type":
        return f"kfac.{path}: got {got!r}; must be an object"
    message = detail["msg"].removeprefix("Value error, ")
    huge = detail["type"] == TOO_LARGE and isinstance(got, int)  # whose digits say nothing
    shown = f"about 10^{math.log10(abs(got)):.0f}" if huge else repr(got)
    return f"kfac.{path}: got {shown}; {message[0].lower()}{message[1:]}"


def _nearest(location: tuple[str, ...], block: Mapping[str, Any], model: Model) -> str:
    """The valid key closest to an unknown one, in the same object or, for blocks, in any other."""
    *parents, key = location
    prefix = "".join(f"{parent}." for parent in parents)
    parent_model, in_schedule = _model_at(parents, block, model)
    siblings = [prefix + name for name in parent_model.model_fields]
    close = [prefix + name for name in difflib.get_close_matches(key, parent_model.model_fields, n=1, cutoff=0.6)]
    if not close and not in_schedule:
        valid = list(_paths(model))
        close = [name for name in valid if name.split(".")[-1] == key]
        close = close or difflib.get_close_matches(prefix + key, valid, n=1, cutoff=0.5)
    return (
        f"did you mean kfac.{close[0]}?" if close else "valid keys: " + ", ".join(f"kfac.{name}" for name in siblings)
    )


def _model_at(parents: list[str], block: Mapping[str, Any], model: Model) -> tuple[Model, bool]:
    """The model of the object at a path that pydantic has descended to, and whether it is a schedule."""
    in_schedule = False
    for parent in parents:
        field = model.model_fields[parent]
        block = block[parent]
        inner = _inner_model(field, block)
        assert inner is not None  # pydantic found keys in it
        model, in_schedule = inner, holds_value(field.annotation)
    return model, in_schedule


def _inner_model(field: FieldInfo | None, raw: Any) -> Model | None:
    """The model of a field that is a block of its own, or is given as a schedule."""
    annotation = field.annotation if field else None
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return form_of(raw) if isinstance(raw, Mapping) and holds_value(annotation) else None


def _paths(model: Model, prefix: str = "") -> Iterator[str]:
    """Every key of every block."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if inner := _inner_model(field, None):
            yield from _paths(inner, f"{prefix}{name}.")
