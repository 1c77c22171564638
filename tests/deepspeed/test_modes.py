"""Every engine mode trains exactly like ds_kfac/reference.py in one process."""

import pytest

from tests.deepspeed.modes import ADAM, ADAM_AUTOCAST, AUTOCAST, BY_NAME, MODES, QR_STEPS
from tests.ranks import run_ranks
from tests.spread import within

pytestmark = pytest.mark.distributed


def check(results: dict) -> None:
    """One message with every mode that differs."""
    wrong = []
    for (name, accumulation), result in results.items():
        mode = BY_NAME[name]
        case = f"{name} accumulation {accumulation}"
        wrong += within(case, result["difference"], result["bound"])
        if mode.wrapper and result["wrapper"] != mode.wrapper:
            wrong.append(f"{case}: DeepSpeed took {result['wrapper']}, the test meant {mode.wrapper}")
        if result["counts"]["factor_updates"] != 4 or result["counts"].get("skipped_steps"):
            wrong.append(f"{case}: counted {result['counts']}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("world", [1, 2])
def test_every_engine_mode_matches_reference(world):
    cases = [(mode.name, accumulation) for mode in MODES for accumulation in (1, 4)]
    results = run_ranks("tests.deepspeed.runs:compare", world=world, payload=cases)[0]
    check(results)
    assert any(result["nu"] < 0.9 for result in results.values()), "kl-clip never acted, so it was not tested"


def test_every_zero_mode_matches_reference_on_4_ranks():
    cases = [(mode.name, accumulation) for mode in MODES if mode.stage for accumulation in (1, 4)]
    check(run_ranks("tests.deepspeed.runs:compare", world=4, payload=cases)[0])


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])  # torch_autocast is global to a process
def test_autocast_matches_reference(dtype, world):
    modes = [mode for mode in AUTOCAST if mode.name.endswith(f"_{dtype}") and (mode.stage or world < 4)]
    cases = [(mode.name, accumulation) for mode in modes for accumulation in (1, 4)]
    check(run_ranks("tests.deepspeed.runs:compare", world=world, payload=cases)[0])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_kfac_adamw_matches_reference_in_every_engine_mode(world):
    modes = [mode for mode in ADAM if world == 2 or (mode.stage and mode.name.count("-") < 3)]
    # On one rank a single micro-batch has fewer rows than a factor is wide: its null space has no unique basis, to
    # which Adam, unlike the K-FAC gradient, is not indifferent.
    cases = [(mode.name, 4 if index % 2 or world == 1 else 1) for index, mode in enumerate(modes)]
    check(run_ranks("tests.deepspeed.runs:compare", world=world, payload=cases)[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kfac_adamw_matches_reference_under_autocast(dtype):
    cases = [(mode.name, 4) for mode in ADAM_AUTOCAST if mode.name.endswith(f"_{dtype}")]
    check(run_ranks("tests.deepspeed.runs:compare", world=2, payload=cases)[0])


@pytest.mark.parametrize("world", [1, 2])
def test_qr_steps_between_exact_refreshes_match_reference(world):
    """With more rows than a factor is wide: a step from the arbitrary basis of a null space is arbitrary too."""
    results = run_ranks("tests.deepspeed.runs:compare", world=world, payload=[(mode.name, 4) for mode in QR_STEPS])[0]
    check(results)
    for (name, _), result in results.items():
        counts = result["counts"]
        assert counts["refreshes_qr"] == counts["refreshes_eigh"] > 0, (name, counts)
