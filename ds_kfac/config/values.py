"""Extend pydantic for the ``"kfac"`` block: types for schedules, counts and regexes, the removal of
nulls, and errors that name the key, the value that was found, and what to write instead."""

import difflib
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

import hjson
import pydantic
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from ds_kfac.schedule.timetable import Value

Number = TypeVar("Number")
EXAMPLE = '{"schedule": "linear", "start": 1, "end": 10, "steps": 1000}'
LARGEST = 2**63 - 1
"""Largest number that a key takes. It fits into an int64 tensor, and its square fits into fp32."""


def fits(value: Any) -> Any:
    """Return a value unchanged. Raises PydanticCustomError if it is a number over
    :data:`LARGEST`, or NaN."""
    # "not <=" instead of ">", because NaN compares false with everything
    if isinstance(value, (int, float)) and not abs(value) <= LARGEST:
        raise PydanticCustomError("too_large", "Input should be a finite number, below 2^63")
    return value


def _checked(
    annotation: Any, accepts: Callable[[Any], bool], message: str, schema: dict[str, Any]
) -> Any:
    """Return a pydantic type whose values are checked by a function.

    Args:
        annotation: the type for type checkers.
        accepts: returns whether a value is valid.
        message: text of the error for an invalid value.
        schema: the type's JSON schema.
    """

    def check(value: Any) -> Any:
        if accepts(value):
            return value
        raise PydanticCustomError("checked", message)

    return Annotated[annotation, pydantic.PlainValidator(check), pydantic.WithJsonSchema(schema)]


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= LARGEST


def _is_count_or_counts(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_count, value))
    return _is_count(value)


_COUNT = {"minimum": 1, "type": "integer"}
Rows = _checked(
    int | Literal["all"],
    lambda value: value == "all" or _is_count(value),
    "Input should be an integer of at least 1, or 'all'",
    {"anyOf": [_COUNT, {"const": "all", "type": "string"}]},
)
"""A count, or "all"."""
BlockRows = _checked(
    int | list[int],
    _is_count_or_counts,
    "Input should be an integer of at least 1, or a list of such integers",
    {"anyOf": [_COUNT, {"items": _COUNT, "minItems": 1, "type": "array"}]},
)
"""Blocks of a weight: the number of equal blocks, or a list with the rows of each block."""


def _compiles(template: str, message: Any) -> pydantic.AfterValidator:
    """Return a validator of regexes.

    Args:
        template: a regex with ``{}``, which is replaced by the value before the regex is compiled.
        message: text of the error; ``{problem}`` in it stands for Python's own error.
    """

    def check(pattern: str) -> str:
        try:
            # Python 3.10 only warns of flags inside a regex, and applies them to the whole regex
            with warnings.catch_warnings():
                warnings.simplefilter("error", DeprecationWarning)
                re.compile(template.format(pattern))
        except (re.error, DeprecationWarning) as problem:
            raise PydanticCustomError("regex", message, {"problem": str(problem)}) from None
        return pattern

    return pydantic.AfterValidator(check)


Pattern = Annotated[str, _compiles("{}", "Must be a regular expression: {problem}")]
"""A Python regex."""
NameEnd = Annotated[
    Pattern,
    _compiles(
        "(?:{})", "Must be valid inside a longer regular expression: write flags as in (?i:head)"
    ),
]
"""A regex for the end of a name. It becomes part of a longer regex, so it cannot have flags that
apply to the whole regex."""


class _Form(BaseModel):
    """Common settings of schedule objects. The attributes of these classes have no docstrings,
    because pydantic would look for them in the source of each generic model, which takes a quarter
    of a second."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    _numbers_fit = field_validator("*", mode="before")(fits)


class Ramp(_Form, Generic[Number]):
    """Schedule from one number to another. Checking these two numbers is enough, because all values
    lie between them."""

    schedule: str
    start: Number = Field(description="Until step ``delay``.")
    end: Number = Field(description="From step ``delay + steps`` on.")
    steps: int = Field(ge=1)
    delay: int = Field(0, ge=0)

    def value(self) -> Value:
        start: Any = self.start
        end: Any = self.end
        return Value.ramp(self.schedule, start, end, self.steps, self.delay)


class Piecewise(_Form, Generic[Number]):
    """Schedule of several numbers, of which one applies at a time. ``steps`` lists the steps at
    which the second and all later numbers take effect."""

    schedule: str
    values: list[Number] = Field(min_length=1)
    steps: list[Annotated[int, Field(ge=1), BeforeValidator(fits)]]

    @field_validator("steps")
    @classmethod
    def _fit(cls, steps: list[int], info: Any) -> list[int]:
        values = info.data.get("values")  # None if the values have errors
        if values is not None and len(steps) != len(values) - 1:
            raise ValueError(
                f"must have one entry fewer than values: {len(values) - 1} for {len(values)} values"
            )
        if any(later <= earlier for earlier, later in pairwise(steps)):
            raise ValueError("steps must be strictly increasing")
        return steps

    def value(self) -> Value:
        return Value.piecewise(self.values, self.steps)  # type: ignore[arg-type]


RAMPS = ("linear", "cosine", "exponential")
FORMS: dict[str, type[Ramp] | type[Piecewise]] = {
    **dict.fromkeys(RAMPS, Ramp),
    "piecewise": Piecewise,
}


def form_of(raw: Mapping[str, Any]) -> type[BaseModel] | None:
    """Return the model of a schedule object; None if its "schedule" is missing or unknown."""
    name = raw.get("schedule")
    return FORMS.get(name) if isinstance(name, str) else None


def holds_value(annotation: Any) -> bool:
    """Return whether a field of this type takes a number or a schedule."""
    return annotation is Value or any(holds_value(part) for part in get_args(annotation))


def _parse(raw: Any, number: Any, name: str) -> Value:
    """Return a Value from a number or a schedule object. An error names the place inside the
    object, and pydantic adds the key.

    Args:
        raw: what the user wrote.
        number: type of the numbers.
        name: what errors call a number of this type, such as "integer".
    """
    if isinstance(raw, Mapping):
        form = form_of(raw)
        if form is None:
            problem = PydanticCustomError("schedule_kind", "Must be one of " + ", ".join(FORMS))
            where = InitErrorDetails(type=problem, loc=("schedule",), input=raw.get("schedule"))
            raise ValidationError.from_exception_data("schedule", [where])
        if raw["schedule"] == "exponential":
            number = Annotated[number, Field(gt=0)]
        checked_form = form[Annotated[number, BeforeValidator(fits)]]  # type: ignore[index]
        return checked_form.model_validate(dict(raw)).value()
    if isinstance(raw, bool) or not isinstance(raw, (int, float)):
        message = f"Input should be a valid {name} or a schedule such as {EXAMPLE}"
        raise PydanticCustomError("number_or_schedule", message)
    adapter = TypeAdapter(number, config=ConfigDict(strict=True))
    return Value.constant(adapter.validate_python(raw))


def _number_or_schedule(number: Any, name: str) -> Any:
    """Return a type for a number or a schedule object, with a JSON schema of both."""
    schemas = [TypeAdapter(number).json_schema()]
    for form, schedules in ((Ramp, RAMPS), (Piecewise, ("piecewise",))):
        form_schema = form[number].model_json_schema()
        form_schema["properties"]["schedule"] = {"enum": list(schedules)}
        schemas.append({**form_schema, "title": " or ".join(schedules)})
    validator = pydantic.PlainValidator(lambda raw: _parse(raw, number, name))
    return Annotated[Value, validator, pydantic.WithJsonSchema({"anyOf": schemas})]


Interval = _number_or_schedule(Annotated[int, Field(ge=1)], "integer")
"""Number of steps, at least 1. :meth:`Value.interval_at` rounds a ramp to integers."""
Decay = _number_or_schedule(Annotated[float, Field(ge=0, lt=1)], "number")
Positive = _number_or_schedule(Annotated[float, Field(gt=0)], "number")
NotNegative = _number_or_schedule(Annotated[float, Field(ge=0)], "number")


Model = type[BaseModel]
REMOVED = {
    "preconditioner.step": "was removed in 0.2, because no step uses a quadratic model of the loss "
    "any more: leave the key out",
    "preconditioner.method=root": 'was removed in 0.2, because on GPUs "eigen" is refreshed as '
    "cheaply: leave the key out",
    "factor.sample_positions": "was removed in 0.2, because positions are now sampled unless "
    '"rows" is "all": leave the key out',
    "preconditioner.graft": "was removed in 0.2, because corrected eigenvalues, the default for "
    "optimizers like Adam, did better without it: leave the key out",
    "damping.kind=adaptive": "was removed in 0.2, because no step uses a quadratic model of the "
    "loss any more: leave the key out",
    "assignment.costs": "was removed in 0.2, because runs plan with builtin speeds: leave the key "
    "out, and pass the file to python -m ds_kfac estimate as --costs",
    "eigenbasis.lag": "was removed in 0.2, because refreshes are now spread over steps and take "
    "effect at once: leave the key out",
    "checkpoint.eigenbasis": "was removed in 0.2, because eigenbases are now always saved, so that "
    "resuming is exact: leave the key out",
}
"""dict from a removed key, or key=value, to the text that says why it was removed and what to do
instead."""
AUTO = "auto"
"""Hugging Face's word for "choose for me"; the same as null."""
KEY = "kfac"
"""Name of our block in a DeepSpeed config."""
OF_OPTIMIZER = ("lr", "adam_lr", "betas", "eps", "weight_decay", "torch_adam")
"""Names of KFACAdamW's parameters. They are not keys of the "kfac" block."""


def without_nulls(values: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """Return a block without the keys whose value is null or "auto". Unknown keys stay, because
    they are errors."""
    pruned = {}
    for key, value in values.items():
        field = model.model_fields.get(key)
        if field is not None and (value is None or value == AUTO):
            continue
        inner = _inner_model(field, value)
        if inner is not None and isinstance(value, Mapping):
            value = without_nulls(value, inner)
        pruned[key] = value
    return pruned


def explain(detail: Any, block: Mapping[str, Any], model: Model) -> str:
    """Describe one of pydantic's errors in a line of text.

    Args:
        detail: an element of ``ValidationError.errors()``.
        block: what the user wrote for ``model``.
        model: model of the whole block.
    """
    location = detail["loc"]
    error_type = detail["type"]
    got = detail["input"]
    path = ".".join(map(str, location))
    removed = REMOVED.get(path)
    if removed is None and isinstance(got, str):
        removed = REMOVED.get(f"{path}={got}")
    if removed is not None:
        return f"kfac.{path}: got {got!r}; {removed}"
    if error_type == "extra_forbidden":
        nested = _nested(path, got, model)
        if nested is not None:
            return f'kfac: "{path}": keys are nested, not joined by dots; write {nested}'
        return f"kfac.{path}: unknown key; {_nearest(location, block, model)}"
    if error_type == "missing":
        return f"kfac.{path}: must be given, but is missing in {got!r}"
    if error_type == "model_type":
        return f"kfac.{path}: got {got!r}; must be an object{_such_as(location, got, model)}"
    if error_type == "too_large" and isinstance(got, int):
        # all digits would fill the screen, and Python refuses to print more than 4,300
        shown = f"about 10^{math.log10(abs(got)):.0f}"
    else:
        shown = repr(got)
    message = detail["msg"].removeprefix("Value error, ")
    return f"kfac.{path}: got {shown}; {message[0].lower()}{message[1:]}"


def _nested(path: str, value: Any, model: Model) -> str | None:
    """Return the nested form of a key that was written as one name with dots; None if the key does
    not exist."""
    key = path.removeprefix(f"{KEY}.")
    if "." not in path or key not in set(paths(model)):
        return None
    return _nest(key, value)


def _nest(path: str, value: Any) -> str:
    """Return JSON of nested objects for a key with dots."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return json.dumps(value, default=repr)


def _such_as(location: tuple[str, ...], got: Any, model: Model) -> str:
    """Return the end of an error message: an example of the object that a block must be, or the
    names of its keys."""
    for name in location:
        model = _inner_model(model.model_fields[name], None) or BaseModel
    if "value" in model.model_fields and isinstance(got, (int, float)):
        return f" such as {json.dumps({'value': got})}"
    names = ", ".join(model.model_fields)
    return f" whose keys may be: {names}" if names else ""


def _nearest(location: tuple[str, ...], block: Mapping[str, Any], model: Model) -> str:
    """Return a hint that names the valid key most similar to an unknown key. The search covers the
    keys of the same block first, then the keys of all blocks.

    Args:
        location: the names of the blocks around the unknown key, followed by the key itself.
        block: what the user wrote for ``model``.
        model: model of the whole block.
    """
    *parents, key = location
    if key in OF_OPTIMIZER:
        return "this parameter of KFACAdamW belongs in optimizer.params of the DeepSpeed config"
    prefix = "".join(f"{parent}." for parent in parents)
    inner = model
    in_schedule = False
    for parent in parents:
        field = inner.model_fields[parent]
        block = block[parent]
        inner = _inner_model(field, block) or BaseModel
        in_schedule = holds_value(field.annotation)
    siblings = inner.model_fields
    # first the keys that begin with the unknown key: for "damp" difflib would find adam
    longer = [name for name in siblings if len(key) > 2 and name.startswith(key)]
    names = longer[:1] or difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    close = [prefix + name for name in names]
    if not close and not in_schedule:
        if key == "schedule" and "value" in siblings:
            return (
                f'a schedule belongs in kfac.{prefix}value: write {{"value": {{"schedule": ..}}}}'
            )
        valid = list(paths(model))
        close = [path for path in valid if path.split(".")[-1] == key]
        close = close or difflib.get_close_matches(prefix + key, valid, n=1, cutoff=0.5)
    if close:
        return f"did you mean kfac.{close[0]}?"
    return "valid keys: " + ", ".join(f"kfac.{prefix}{name}" for name in siblings)


def _inner_model(field: FieldInfo | None, raw: Any) -> Model | None:
    """Return the pydantic model for a field's value if the field is a block, or if the raw value is
    a schedule object. Otherwise return None."""
    annotation = field.annotation if field else None
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return form_of(raw) if isinstance(raw, Mapping) and holds_value(annotation) else None


def paths(model: Model, prefix: str = "") -> Iterator[str]:
    """Yield the names of all keys. A key of an inner block is "block.key"."""
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = _inner_model(field, None)
        if inner is not None:
            yield from paths(inner, f"{prefix}{name}.")


def find_block(ds_config: Mapping[str, Any]) -> Any | None:
    """Return the ``"kfac"`` block of a DeepSpeed config; None if there is none.

    Raises:
        ValueError: a key looks like a misspelt ``"kfac"``, or the block is inside another block.
            DeepSpeed would silently ignore such a key or block.
    """
    if KEY in ds_config:
        return ds_config[KEY]
    for key, value in ds_config.items():
        if str(key).startswith(f"{KEY}."):
            raise ValueError(
                f'DeepSpeed config: neither DeepSpeed nor ds_kfac reads the key "{key}"; keys are '
                f"nested, not joined by dots: write {_nest(str(key), value)}"
            )
        letters = "".join(c for c in str(key).lower() if c.isalnum())
        has_k_and_f = set("kf") <= set(letters)  # "face" and "fact" are other words
        if has_k_and_f and difflib.get_close_matches(letters, [KEY], cutoff=0.7):
            raise ValueError(
                f'DeepSpeed config: neither DeepSpeed nor ds_kfac reads the key "{key}"; did you '
                'mean "kfac"?'
            )
        if isinstance(value, Mapping) and isinstance(value.get(KEY), Mapping):
            raise ValueError(
                f'DeepSpeed config: "kfac" is not read inside of "{key}"; move it up one level, '
                f'beside "{key}"'
            )
    return None


def read_config(source: Mapping[str, Any] | str | os.PathLike) -> Mapping[str, Any]:
    """Return a DeepSpeed config from a mapping or a JSON file, which may have comments. Raises
    ValueError if the config is not a JSON object."""
    try:
        config = source if isinstance(source, Mapping) else hjson.loads(Path(source).read_text())
    except (OSError, ValueError) as problem:
        raise ValueError(
            f"{source}: not JSON ({problem}); pass the path of a DeepSpeed config file"
        ) from None
    if not isinstance(config, Mapping):
        raise ValueError(f"{source}: not a JSON object; pass the path of a DeepSpeed config file")
    return config
