"""Every engine mode trains like tests/oracle.py on one GPU, with NCCL at world 1; on a CPU some do.

NCCL does not allow several ranks on one GPU: what happens between ranks is tested with gloo, in
``tests/deepspeed/test_modes.py``.
"""

import csv

import pytest

from tests.deepspeed.modes import ADAM, ADAM_AUTOCAST, AUTOCAST, BY_NAME, MODES
from tests.gpu import modes

pytestmark = pytest.mark.distributed


def test_no_mode_is_left_out_and_equal_references_share_a_process():
    hands = modes.dealt(modes.all_cases(), processes=3)
    cases = [case for hand in hands for case in hand]
    assert len(cases) == len(set(cases))
    every = MODES + AUTOCAST + ADAM + ADAM_AUTOCAST
    assert {name for name, _ in cases} == {mode.name for mode in every}
    owner: dict[tuple[str, int], int] = {}
    for number, hand in enumerate(hands[:3]):
        for name, accumulation in hand:
            key = BY_NAME[name].mathematics, accumulation
            assert owner.setdefault(key, number) == number


@pytest.mark.gpu
def test_every_engine_mode_matches_reference_on_one_gpu(tmp_path, capfd):
    """Tolerances are those of the CPU, with TF32 off."""
    status = modes.main(["--out", str(tmp_path), "--seconds", "3000"])
    said = capfd.readouterr().out
    assert status == 0 and "goes on: nothing" in said, said
    with (tmp_path / "modes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert any(int(row["replays"]) for row in rows), "no CUDA graph was replayed"


def test_a_call_goes_on_where_the_last_one_stopped_and_says_what_failed(
    tmp_path, monkeypatch, capfd
):
    """Two calls on a CPU: the first has time for nothing, the second compares what is missing."""
    monkeypatch.setattr(modes, "REHEARSED", [("z3", 1), ("no such mode", 1)])
    monkeypatch.setattr(modes, "dealt", lambda groups, processes: [list(each) for each in groups])
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--rehearse"]
    assert modes.main([*arguments, "--seconds", "15"]) in (0, 1)
    assert "left out, the same command goes on: z3 x1, no such mode x1" in capfd.readouterr().out
    assert modes.main([*arguments, "--seconds", "300"]) == 1
    said = capfd.readouterr().out
    assert "no such mode: KeyError: 'no such mode'" in said
    assert "2 cases compared, 1 wrong" in said and "goes on: nothing" in said
