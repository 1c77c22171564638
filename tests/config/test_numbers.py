"""Numbers that nothing can hold, in every key that takes a number: an error that names the key,
never NaN in a run."""

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from ds_kfac.config.keys import KFACConfig, parse
from ds_kfac.config.values import holds_value

WRONG = [float("inf"), float("nan"), -1e300, -(10**400), 10**5000, 2**63]


def numeric(annotation: Any) -> bool:
    return annotation in (int, float) or any(numeric(part) for part in get_args(annotation))


def keys(
    model: type[BaseModel] = KFACConfig, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and type of every key."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys(inner, (*path, name))
        else:
            yield (*path, name), inner


def errors(path: tuple[str, ...], value: Any) -> list[str]:
    """Their lines."""
    for key in reversed(path):
        value = {key: value}
    try:
        parse(value)
    except ValueError as error:
        return str(error).splitlines()[1:]
    return []


NUMBERS = [path for path, kind in keys() if numeric(kind)]
SCHEDULES = [path for path, kind in keys() if holds_value(kind)]


@pytest.mark.parametrize("path", [*NUMBERS, *SCHEDULES], ids=".".join)
def test_a_number_that_nothing_can_hold_is_an_error_of_its_key(path):
    assert len(NUMBERS) >= 8 and len(SCHEDULES) >= 5
    for value in WRONG:
        (line,) = errors(path, value)
        key = re.escape(".".join(path))
        assert re.match(rf"  kfac\.{key}: got .*; input should be ", line), line
        assert len(line) < 140, line


@pytest.mark.parametrize("path", SCHEDULES, ids=".".join)
def test_so_is_one_inside_a_schedule(path):
    good = 5 if errors(path, 0.5) else 0.5
    ramp = {"schedule": "linear", "start": good, "end": good, "steps": 7, "delay": 3}
    pieces = {"schedule": "piecewise", "values": [good, good], "steps": [7]}
    assert not errors(path, ramp) and not errors(path, pieces)
    for value in WRONG:
        wrong = {key: {**ramp, key: value} for key in ("start", "end", "steps", "delay")}
        wrong["values.1"] = {**pieces, "values": [good, value]}
        wrong["steps.0"] = {**pieces, "steps": [value]}
        for where, schedule in wrong.items():
            (line,) = errors(path, schedule)
            assert line.startswith(f"  kfac.{'.'.join(path)}.{where}: got ") and len(line) < 140


@pytest.mark.parametrize("path", [path for path, kind in keys() if kind is not bool], ids=".".join)
def test_a_value_of_another_type_is_one_error_in_words_of_the_config(path):
    for value in ({"a": {}}, b"x"):
        lines = errors(path, value)
        of_key = rf"  kfac\.{re.escape('.'.join(path))}(\.(a|schedule))?: "
        assert lines
        for line in lines:
            assert re.match(of_key, line) and "constrained" not in line and "literal[" not in line


ROWS = "an integer of at least 1, or 'all'"
COUNTS = "an integer of at least 1, or a list of such integers"


@pytest.mark.parametrize(
    ("key", "said", "value"),
    [("factor.rows", ROWS, value) for value in (0, -3, "every", 2.5, True)]
    + [
        ("adam.blocks.qkv", COUNTS, value)
        for value in (0, True, 2.0, "3", [], [64, -1], [64, 0], None, 10**30, {"a": 1})
    ],
)
def test_rows_and_blocks_say_what_they_can_be(key, said, value):
    (line,) = errors(tuple(key.split(".")), value)
    assert line == f"  kfac.{key}: got {value!r}; input should be {said}"
    assert parse({"factor": {"rows": "all"}}).factor.rows == "all"
    blocks = {"qkv": 3, "up": [2, 1], "(?i:Gate)": 1}
    assert parse({"adam": {"blocks": blocks}}).adam.blocks == blocks
