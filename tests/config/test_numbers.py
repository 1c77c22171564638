"""Numbers that nothing can hold, in every key that takes a number: an error that names the key,
never NaN in a run."""

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from ds_kfac.config.keys import KFACConfig, parse
from ds_kfac.config.values import LARGEST, holds_value

WRONG = [
    float("inf"),
    float("-inf"),
    float("nan"),
    1e300,
    -1e300,
    10**400,
    -(10**400),
    10**5000,
    2**63,
]


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


def test_the_keys_are_found():
    assert (
        ("adam", "whiten") in NUMBERS
        and ("factor", "rows") in NUMBERS
        and ("damping", "value") in SCHEDULES
    )
    assert len(NUMBERS) >= 8 and len(SCHEDULES) >= 5


@pytest.mark.parametrize("path", [*NUMBERS, *SCHEDULES], ids=".".join)
def test_a_number_that_nothing_can_hold_is_an_error_of_its_key(path):
    for value in WRONG:
        (line,) = errors(path, value)
        assert re.match(rf"  kfac\.{re.escape('.'.join(path))}: got .*; input should be ", line), (
            line
        )
        assert len(line) < 140, line


@pytest.mark.parametrize("path", SCHEDULES, ids=".".join)
def test_so_is_one_inside_a_schedule(path):
    ramp = {"schedule": "linear", "start": 0.5, "end": 0.5, "steps": 7, "delay": 3}
    pieces = {"schedule": "piecewise", "values": [0.5, 0.5], "steps": [7]}
    if errors(path, 0.5):
        ramp, pieces = {**ramp, "start": 5, "end": 5}, {**pieces, "values": [5, 5]}
    assert not errors(path, ramp) and not errors(path, pieces)
    for value in WRONG:
        for wrong, where in (
            *(({**ramp, key: value}, key) for key in ("start", "end", "steps", "delay")),
            (
                {**pieces, "values": [5, value]}
                if errors(path, 0.5)
                else {**pieces, "values": [0.5, value]},
                "values.1",
            ),
            ({**pieces, "steps": [value]}, "steps.0"),
        ):
            (line,) = errors(path, wrong)
            assert line.startswith(f"  kfac.{'.'.join(path)}.{where}: got ") and len(line) < 140, (
                line
            )


@pytest.mark.parametrize("path", [path for path, kind in keys() if kind is not bool], ids=".".join)
def test_a_value_of_another_type_is_one_error_in_words_of_the_config(path):
    for value in ({"a": {}}, b"x"):
        lines = errors(path, value)
        of_key = rf"  kfac\.{re.escape('.'.join(path))}(\.(a|schedule))?: "
        assert lines and all(re.match(of_key, line) for line in lines), lines
        assert not any("constrained" in line or "literal[" in line for line in lines), lines


def test_rows_say_what_they_can_be():
    for value in (0, -3, "every", 2.5, True):
        (line,) = errors(("factor", "rows"), value)
        assert (
            line
            == f"  kfac.factor.rows: got {value!r}; input should be an integer of at least 1, or "
            f"'all'"
        )
    assert (
        parse({"factor": {"rows": "all"}}).factor.rows == "all"
        and parse({"factor": {"rows": 7}}).factor.rows == 7
    )


@pytest.mark.parametrize("value", [0, True, 2.0, "3", [], [64, -1], 10**30, {"a": 1}])
def test_blocks_say_what_they_can_be(value):
    with pytest.raises(ValueError) as error:
        parse({"adam": {"blocks": {"qkv": value}}})
    lines = str(error.value).splitlines()[1:]
    assert lines == [
        f"  kfac.adam.blocks.qkv: got {value!r}; input should be an integer of at least 1, or a "
        f"list of such"
    ]
    assert parse({"adam": {"blocks": {"qkv": 3, "up": [2, 1]}}}).adam.blocks == {
        "qkv": 3,
        "up": [2, 1],
    }


def test_the_largest_number_that_fits_can_be_computed_with():
    block = {
        "factor": {"update_interval": LARGEST, "rows": LARGEST},
        "eigenbasis": {"refresh_interval": LARGEST},
    }
    for steps in (LARGEST, 0):
        assert parse({**block, "burn_in": {"steps": steps}}).schedule.intervals(0)[0] >= 2**62 - 1
