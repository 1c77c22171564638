"""A config key that takes a number or a schedule object, checked in every number it names, and read as a Value."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError, field_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from ds_kfac.costs import BUILTIN, from_dict
from ds_kfac.schedule import Value

Number = TypeVar("Number")
EXAMPLE = '{"schedule": "linear", "start": 1, "end": 10, "steps": 1000}'


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)


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
    steps: list[Annotated[int, Field(ge=1)]]

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
        return form[number].model_validate(dict(raw)).value()  # type: ignore[index]
    if isinstance(raw, bool) or not isinstance(raw, (int, float)):
        message = f"Input should be a valid {name} or a schedule such as {EXAMPLE}"
        raise PydanticCustomError("number_or_schedule", message)
    return Value.constant(TypeAdapter(number, config=ConfigDict(strict=True)).validate_python(raw))


def _validator(number: Any, name: str) -> PlainValidator:
    return PlainValidator(lambda raw: _parse(raw, number, name))


_FINITE = Annotated[float, Field(allow_inf_nan=False)]

Interval = Annotated[Value, _validator(Annotated[int, Field(ge=1)], "integer")]
"""Steps, at least 1. Between the integers of a ramp it is rounded: :meth:`Value.interval_at`."""
Decay = Annotated[Value, _validator(Annotated[_FINITE, Field(ge=0, lt=1)], "number")]
Positive = Annotated[Value, _validator(Annotated[_FINITE, Field(gt=0)], "number")]
NotNegative = Annotated[Value, _validator(Annotated[_FINITE, Field(ge=0)], "number")]


def _costs(raw: Any) -> Any:
    """Check what replaces rates of a cost model; which model does not matter."""
    if isinstance(raw, Mapping):
        given = {key: value for key, value in raw.items() if value is not None}
        try:
            from_dict(given, BUILTIN["cpu"])
        except ValueError as problem:
            raise PydanticCustomError("costs", "{problem}", {"problem": str(problem).removeprefix("costs.")}) from None
        return given
    if raw not in ("builtin", "measure"):
        raise PydanticCustomError("costs", 'Must be builtin, measure or an object such as {"link_bytes": 1e9}')
    return raw


Costs = Annotated[Literal["builtin", "measure"] | dict[str, Any], PlainValidator(_costs)]
"""Of :class:`ds_kfac.costs.CostModel`: the name of one, or some of its fields."""
