"""Parameters of KFACAdamW, checked: by name in the config's "optimizer" block, or as arguments."""

import difflib
import reprlib
import sys
from collections.abc import Mapping
from numbers import Real
from typing import Any

from ds_kfac.directions.kfac_adamw.optimizer import NAME, OWN, PARAMS


def checked(given: Any, where: str) -> dict[str, Any]:
    """Those that are not left open by null or "auto"; numbers as float, because torch's AdamW takes no 0 for 0.0.

    Args:
        where: what the errors begin with.

    Raises:
        ValueError: not an object, an unknown name, or a wrong value.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{where.rstrip('.')}: got {given!r}; must be an object")
    params = {key: value for key, value in given.items() if value is not None and value != "auto"}
    known = [*PARAMS, *OWN]
    for key, value in params.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"valid: {', '.join(known)}"
            raise ValueError(f"{where}{key}: {NAME} has no such parameter; {hint}")
        if wrong := _wrong(key, value):
            raise ValueError(f"{where}{key}: got {reprlib.repr(value)}; must be {wrong}")
    if "adam_lr" in params and params.get("lr") == 0:
        raise ValueError(f"{where}lr: got 0; must be above 0 with adam_lr, whose ratio to it schedules keep")
    return {key: _as_float(value) for key, value in params.items()}


def checked_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group, its own values of :data:`PARAMS` as :func:`checked` leaves them, all else as it is.

    Raises:
        ValueError: a wrong value, or one that only a whole optimizer has.
    """
    for key in OWN:
        if key in group:
            raise ValueError(
                f"{NAME}: {key} in a parameter group: it is the whole optimizer's, as are all but {', '.join(PARAMS)}; "
                "the group's lr scales both of its rates"
            )
    others = {key: value for key, value in group.items() if key not in PARAMS}
    own = {key: value for key, value in group.items() if key in PARAMS}
    return {**others, **checked(own, f"{NAME}: in a parameter group, ")}


def _wrong(key: str, value: Any) -> str | None:
    """What a parameter must be, if it is not."""
    if key == "torch_adam":
        return None if isinstance(value, bool) else "true or false"
    if key == "betas":
        fits = isinstance(value, (list, tuple)) and len(value) == 2 and all(_number(x) and x < 1 for x in value)
        return None if fits else "two numbers of at least 0 and below 1, such as [0.9, 0.95]"
    return None if _number(value) else "a number of at least 0, finite, no string"


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and bool(0 <= value <= sys.float_info.max)  # type: ignore[operator]


def _as_float(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(float, value))
    return value if isinstance(value, bool) else float(value)
