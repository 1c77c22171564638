"""Every engine mode trains exactly like tests/oracle.py in one process."""

import pytest

from tests.deepspeed.modes import ADAM, ADAM_AUTOCAST, AUTOCAST, BY_NAME, MODES, QR_STEPS
from tests.spread import within

pytestmark = pytest.mark.distributed
DTYPES = ("bfloat16", "float16")
"""torch_autocast is global to a process."""


def tabled(rows):
    """(case, world) or (case, world, dtype), a case being (mode, micro-batches of a step)."""
    rows = list(rows)
    names = ["case", "world", "dtype"][: len(rows[0])]
    ids = ["-".join([case[0], f"accumulation{case[1]}", f"{world}ranks"]) for case, world, *_ in rows]
    return pytest.mark.parametrize(names, rows, ids=ids)


def check(case: tuple[str, int], result: dict) -> None:
    mode, text = BY_NAME[case[0]], f"{case[0]} accumulation {case[1]}"
    wrong = within(text, result["difference"], result["bound"])
    if mode.wrapper and result["wrapper"] != mode.wrapper:
        wrong.append(f"{text}: DeepSpeed took {result['wrapper']}, the test meant {mode.wrapper}")
    if result["counts"].get("factor_updates", 0) != 4 * mode.rotate or result["counts"].get("skipped_steps"):
        wrong.append(f"{text}: counted {result['counts']}")
    assert not wrong, "\n".join(wrong)


@tabled(
    ((mode.name, accumulation), world)
    for world in (1, 2, 4)
    for mode in MODES
    if mode.stage or world < 4
    for accumulation in (1, 4)
)
def test_engine_mode_matches_reference(case, world, compared):
    check(case, compared)
    if case == ("z0", 1):
        assert compared["nu"] < 0.9, "kl-clip did not act, so it was not tested"


@tabled(
    ((mode.name, accumulation), world, dtype)
    for dtype in DTYPES
    for world in (1, 2, 4)
    for mode in AUTOCAST
    if mode.name.endswith(f"_{dtype}") and (mode.stage or world < 4)
    for accumulation in (1, 4)
)
def test_autocast_matches_reference(case, world, dtype, compared):
    check(case, compared)


# On one rank a single micro-batch has fewer rows than a factor is wide: its null space has no unique basis, to which
# Adam, unlike the K-FAC gradient, is not indifferent.
@tabled(
    ((mode.name, 4 if index % 2 or world == 1 else 1), world)
    for world in (1, 2, 4)
    for index, mode in enumerate(m for m in ADAM if world == 2 or (m.stage and m.name.count("-") < 3))
)
def test_kfac_adamw_matches_reference(case, world, compared):
    check(case, compared)


@tabled(((mode.name, 4), 2, dtype) for dtype in DTYPES for mode in ADAM_AUTOCAST if mode.name.endswith(f"_{dtype}"))
def test_kfac_adamw_matches_reference_under_autocast(case, world, dtype, compared):
    check(case, compared)


@tabled(((mode.name, 4), world) for world in (1, 2) for mode in QR_STEPS)
def test_qr_steps_between_exact_refreshes_match_reference(case, world, compared):
    """With more rows than a factor is wide: a step from the arbitrary basis of a null space is arbitrary too."""
    check(case, compared)
    counts = compared["counts"]
    assert counts["refreshes_qr"] == counts["refreshes_eigh"] > 0, counts
