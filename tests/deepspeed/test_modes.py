"""Every engine mode trains exactly like tests/oracle.py in one process.

Of modes x ranks x micro-batches run every mode on several ranks and every pair of two settings, see
tests/covering.py; with ALL_MODES=1 in the environment, every case.
"""

import os

import pytest

from tests.covering import covering
from tests.deepspeed.modes import ADAM, ADAM_AUTOCAST, AUTOCAST, BY_NAME, MODES
from tests.deepspeed.runs import compared
from tests.spread import within

pytestmark = pytest.mark.ranks
DTYPES = ("bfloat16", "float16")
"""torch_autocast is global to a process."""


def factors(row) -> dict[str, str]:
    (name, accumulation), world, *_ = row
    return {**BY_NAME[name].factors, "accumulation": str(accumulation), "world": str(world)}


def on_several_ranks(row) -> list[str]:
    """One rank cuts nothing."""
    return [row[0][0]] if row[1] > 1 else []


def tabled(rows):
    """(case, world) or (case, world, dtype), a case being (mode, micro-batches of a step)."""
    rows = list(rows)
    chosen = rows if os.environ.get("ALL_MODES") else covering(rows, factors, on_several_ranks)
    names = ["case", "world", "dtype"][: len(rows[0])]
    ids = [
        "-".join([case[0], f"accumulation{case[1]}", f"{world}ranks"]) for case, world, *_ in chosen
    ]
    return pytest.mark.parametrize(names, chosen, ids=ids)


def check(case: tuple[str, int], result: dict) -> None:
    mode, text = BY_NAME[case[0]], f"{case[0]} accumulation {case[1]}"
    wrong = within(text, result["difference"], result["bound"])
    if mode.wrapper and result["wrapper"] != mode.wrapper:
        wrong.append(f"{text}: DeepSpeed took {result['wrapper']}, the test meant {mode.wrapper}")
    if result["counts"].get("factor_updates", 0) != 4 * mode.rotate or result["counts"].get(
        "skipped_steps"
    ):
        wrong.append(f"{text}: counted {result['counts']}")
    assert not wrong, "\n".join(wrong)


@tabled(
    ((mode.name, accumulation), world)
    for world in (1, 2, 4)
    for mode in MODES
    if world < 4 or (mode.stage and mode.name.count("-") < 2)
    for accumulation in (1, 4)
)
def test_engine_mode_matches_reference(case, world):
    result = compared(*case)
    check(case, result)
    if case[0] == "z0":
        assert result["nu"] < 0.9, "kl-clip did not act, so it was not tested"


@tabled(
    ((mode.name, accumulation), world, dtype)
    for dtype in DTYPES
    for world in (1, 2, 4)
    for mode in (*AUTOCAST, *ADAM_AUTOCAST)
    if mode.name.endswith(f"_{dtype}") and (world == 2 if mode.adam else mode.stage or world < 4)
    for accumulation in ((4,) if mode.adam else (1, 4))
)
def test_autocast_matches_reference(case, world, dtype):
    check(case, compared(*case))


# On one rank a single micro-batch has fewer rows than a factor is wide: its null space has no
# unique basis, to which Adam, unlike the K-FAC gradient, is not indifferent.
@tabled(
    ((mode.name, 4 if index % 2 or world == 1 else 1), world)
    for world in (1, 2, 4)
    for index, mode in enumerate(
        m for m in ADAM if world == 2 or (m.stage and m.name.count("-") < (3 if world == 1 else 2))
    )
)
def test_kfac_adamw_matches_reference(case, world):
    check(case, compared(*case))
