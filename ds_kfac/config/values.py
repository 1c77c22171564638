"""A config key that takes a number or a schedule object, checked in every number it names, and read as a Value."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from ds_kfac.curvature.methods import METHODS
from ds_kfac.schedule.timetable import Value

Number = TypeVar("Number")
EXAMPLE = '{"schedule": "linear", "start": 1, "end": 10, "steps": 1000}'
LARGEST = 2**63 - 1
"""Size of a number that everything can hold: tensors of integers, and fp32 its square."""
TOO_LARGE = "too_large"
"""Type of the error of one that is larger."""


def fits(value: Any) -> Any:
    """Whatever is no number, or one of at most :data:`LARGEST`."""
    if isinstance(value, (int, float)) and not abs(value) <= LARGEST:  # so that it is said of nan
        raise PydanticCustomError(TOO_LARGE, "Input should be a finite number, below 2^63")
    return value


def _rows(value: Any) -> Any:
    if value == "all" or (type(value) is int and value >= 1):
        return value
    raise PydanticCustomError("rows", "Input should be an integer of at least 1, or 'all'")


Rows = Annotated[
    int | Literal["all"],
    PlainValidator(_rows),
    WithJsonSchema({"anyOf": [{"minimum": 1, "type": "integer"}, {"const": "all", "type": "string"}]}),
]
"""A count, or all."""


@dataclass(frozen=True)
class OneOf:
    """Accepts the names in a table, which may grow."""

    table: Mapping[str, Any]

    def __call__(self, name: str) -> str:
        if name not in self.table:
            raise PydanticCustomError("one_of", "Input should be " + " or ".join(map(repr, self.table)))
        return name


Method = Annotated[str, AfterValidator(OneOf(METHODS)), WithJsonSchema({"enum": list(METHODS)})]


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as problem:
        raise PydanticCustomError(
            "regex", "Must be a regular expression: {problem}", {"problem": str(problem)}
        ) from None
    return pattern


def _compiles_inside(pattern: str) -> str:
    try:
        re.compile(f"(?:{_compiles(pattern)})")
    except re.error:
        raise PydanticCustomError(
            "regex", "Must be a part of a regular expression: flags are written as in (?i:head)"
        ) from None
    return pattern


def _blocks(value: Any) -> Any:
    counts = value if isinstance(value, list) else [value]
    if counts and all(type(count) is int and 1 <= count <= LARGEST for count in counts):
        return value
    raise PydanticCustomError("blocks", "Input should be an integer of at least 1, or a list of such")


_COUNT = {"minimum": 1, "type": "integer"}
BlockRows = Annotated[
    int | list[int],
    PlainValidator(_blocks),
    WithJsonSchema({"anyOf": [_COUNT, {"items": _COUNT, "minItems": 1, "type": "array"}]}),
]
"""How many, or the rows of each."""
Pattern = Annotated[str, AfterValidator(_compiles)]
"""A Python regex."""
NameEnd = Annotated[str, AfterValidator(_compiles_inside)]
"""The same for the end of a name: it becomes part of a longer one, where flags for all of it cannot be."""


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)
    _numbers_fit = field_validator("*", mode="before")(fits)


class Ramp(_Form, Generic[Number]):
    """From one number to another. Between them nothing leaves their range, so checking both is enough."""

    schedule: str
    start: Number
    """Until step ``delay``."""
    end: Number
    """From step ``delay + steps`` on."""
    steps: int = Field(ge=1)
    delay: int = Field(0, ge=0)

    def value(self) -> Value:
        return Value.ramp(self.schedule, self.start, self.end, self.steps, self.delay)  # type: ignore[arg-type]


class Piecewise(_Form, Generic[Number]):
    """Numbers, and the step from which on each but the first holds."""

    schedule: str
    values: list[Number] = Field(min_length=1)
    steps: list[Annotated[int, Field(ge=1), BeforeValidator(fits)]]

    @field_validator("steps")
    @classmethod
    def _fit(cls, steps: list[int], info: Any) -> list[int]:
        values = info.data.get("values")  # missing if they are wrong themselves
        if values is not None and len(steps) != len(values) - 1:
            raise ValueError(f"must be one fewer than the values, {len(values) - 1} for {len(values)}")
        if any(later <= earlier for earlier, later in pairwise(steps)):
            raise ValueError("steps must be strictly increasing")
        return steps

    def value(self) -> Value:
        return Value.piecewise(self.values, self.steps)  # type: ignore[arg-type]


FORMS: dict[str, type[Ramp] | type[Piecewise]] = {
    "linear": Ramp,
    "cosine": Ramp,
    "exponential": Ramp,
    "piecewise": Piecewise,
}


def form_of(raw: Mapping[str, Any]) -> type[BaseModel] | None:
    """The model of a schedule object; None if its kind is missing or unknown."""
    kind = raw.get("schedule")
    return FORMS.get(kind) if isinstance(kind, str) else None


def holds_value(annotation: Any) -> bool:
    """Whether a field of this type takes a number or a schedule."""
    return annotation is Value or any(holds_value(part) for part in get_args(annotation))


def _parse(raw: Any, number: Any, name: str) -> Value:
    """Check a number or a schedule object.

    Raises:
        ValidationError: located inside the object; pydantic puts the path of the key before it.
        PydanticCustomError: neither a number nor an object.
    """
    if isinstance(raw, Mapping):
        form = form_of(raw)
        if form is None:
            problem = PydanticCustomError("schedule_kind", "Must be one of " + ", ".join(FORMS))
            where = InitErrorDetails(type=problem, loc=("schedule",), input=raw.get("schedule"))
            raise ValidationError.from_exception_data("schedule", [where])
        if raw["schedule"] == "exponential":
            number = Annotated[number, Field(gt=0)]
        return form[Annotated[number, BeforeValidator(fits)]].model_validate(dict(raw)).value()  # type: ignore[index]
    if isinstance(raw, bool) or not isinstance(raw, (int, float)):
        message = f"Input should be a valid {name} or a schedule such as {EXAMPLE}"
        raise PydanticCustomError("number_or_schedule", message)
    return Value.constant(TypeAdapter(number, config=ConfigDict(strict=True)).validate_python(raw))


def _schema(number: Any) -> dict[str, Any]:
    """Of JSON: a number, or one of the objects, its kind spelt out."""
    kinds = {form: [kind for kind, other in FORMS.items() if other is form] for form in FORMS.values()}
    objects = [form[number].model_json_schema() for form in kinds]  # type: ignore[index]
    for found, names in zip(objects, kinds.values(), strict=True):
        found["properties"]["schedule"] = {"enum": names}
        found["title"] = " or ".join(names)
    return {"anyOf": [TypeAdapter(number).json_schema(), *objects]}


def _number_or_schedule(number: Any, name: str) -> Any:
    validator = PlainValidator(lambda raw: _parse(raw, number, name))
    return Annotated[Value, validator, WithJsonSchema(_schema(number))]


Interval = _number_or_schedule(Annotated[int, Field(ge=1)], "integer")
"""Steps, at least 1. Between the integers of a ramp it is rounded: :meth:`Value.interval_at`."""
Decay = _number_or_schedule(Annotated[float, Field(ge=0, lt=1)], "number")
Positive = _number_or_schedule(Annotated[float, Field(gt=0)], "number")
NotNegative = _number_or_schedule(Annotated[float, Field(ge=0)], "number")
