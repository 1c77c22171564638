"""From a raw ``"kfac"`` block to its model: nulls, and errors that say where, what and what instead."""

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ds_kfac.config.keys import FactorConfig, KFACConfig
from ds_kfac.config.values import LARGEST, TOO_LARGE, form_of, holds_value
from ds_kfac.curvature.methods import METHODS

Model = type[BaseModel]
AUTO = "auto"
KEY = "kfac"
"""Of a DeepSpeed config."""


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


def parse(block: Any) -> KFACConfig:
    """Check a ``"kfac"`` block.

    Raises:
        ValueError: one message with every error: unknown keys with the nearest valid one, wrong types and ranges,
            and keys that contradict each other.
    """
    if not isinstance(block, Mapping):
        raise ValueError(f'"kfac" must be an object such as {{"enabled": true}}, got {block!r}')
    errors, config = [], None
    try:
        config = KFACConfig(**without_nulls(block, KFACConfig))
    except ValidationError as error:
        errors = [explain(detail, block, KFACConfig) for detail in error.errors()]
    errors += _contradictions(block)
    if errors or config is None:
        raise ValueError('invalid DeepSpeed config, block "kfac":\n  ' + "\n  ".join(errors))
    return config


def _contradictions(block: Mapping[str, Any]) -> list[str]:
    """Constraints between keys; on the raw block, so that they are reported together with other errors."""

    def given(section: str, key: str) -> Any:
        values = block.get(section)
        value = values.get(key) if isinstance(values, Mapping) else None
        return None if value == AUTO else value

    errors = []
    update, refresh = given("factor", "update_interval"), given("eigenbasis", "refresh_interval")
    update = FactorConfig().update_interval.interval_at(0) if update is None else update
    # Of schedules nothing is asked: their refreshes wait for the next factor update.
    plain = all(type(interval) is int and 1 <= interval <= LARGEST for interval in (update, refresh))
    if plain and refresh % update:
        errors.append(
            f"kfac.eigenbasis.refresh_interval ({refresh}) must be a multiple of kfac.factor.update_interval "
            f"({update}); otherwise a refresh would see stale factors"
        )
    kind, method = given("damping", "kind"), given("preconditioner", "method")
    known = METHODS.get(method) if isinstance(method, str) else None
    if known is not None and not known.rotates and given("preconditioner", "eigenvalues") == "corrected":
        errors.append(
            f'kfac.preconditioner.method "{method}" keeps no eigenbasis, so kfac.preconditioner.eigenvalues must be '
            '"kronecker"; or use method "eigen"'
        )
    if given("preconditioner", "step") != "quadratic":
        if kind == "adaptive":
            errors.append(
                'kfac.damping.kind "adaptive" needs the quadratic model of kfac.preconditioner.step "quadratic"'
            )
        return errors
    why = 'with kfac.preconditioner.step "quadratic"'
    needs = {"eigenvalues": "kronecker", "graft": "none", "method": "eigen", "kl_clip": 0}
    errors += [
        f"{why} kfac.preconditioner.{key} must be {needed!r}, got {given('preconditioner', key)!r}"
        for key, needed in needs.items()
        if given("preconditioner", key) not in (None, needed)
    ]
    if kind == "relative":
        errors.append(f'{why} damping is one number for the model: kfac.damping.kind must be "adaptive" or "tikhonov"')
    return errors


def find_block(ds_config: Mapping[str, Any]) -> Any | None:
    """The ``"kfac"`` block of a whole DeepSpeed config; None if there is none.

    Raises:
        ValueError: no such key, but one that looks like a misspelt one: DeepSpeed would ignore it silently.
    """
    if KEY in ds_config:
        return ds_config[KEY]
    for key in ds_config:
        if "".join(c for c in str(key).lower() if c.isalnum()) in ("kfac", "dskfac", "kfacs", "kfak"):
            raise ValueError(f'DeepSpeed config: key "{key}" is not read by anyone; did you mean "kfac"?')
    return None
