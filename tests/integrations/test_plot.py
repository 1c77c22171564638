"""``python -m ds_kfac plot``: all three kinds of logs, or a message."""

import json

import pytest

from ds_kfac.__main__ import main
from ds_kfac.integrations import plot


def write_logs(folder, tensorboard: bool) -> None:
    csv = folder / "job"
    csv.mkdir()
    for name in ("Train_Samples_train_loss", "Train_KFAC_refreshes", "Train_KFAC_sent_bytes_factors"):
        head = name.rsplit("_", 1)[1]
        (csv / f"{name}.csv").write_text(f"step,{head}\n4,2.5\nstep,{head}\n8,2.0\n")
    (folder / "trainer_state.json").write_text(
        json.dumps({"log_history": [{"loss": 3.0, "step": 1}, {"loss": 2.0, "step": 2}]})
    )
    if tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(folder / "events")) as writer:
            writer.add_scalar("train/loss", 1.5, 3)


def test_all_kinds_of_logs_are_read_and_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    write_logs(tmp_path, tensorboard=True)
    found = plot.read(tmp_path)
    assert found["Train_Samples_train_loss"] == [(4, 2.5), (8, 2.0)]
    assert found["loss"] == [(1, 3.0), (2, 2.0)]
    assert found["train/loss"] == [(3, 1.5)]
    assert main(["plot", str(tmp_path)]) == 0
    assert "wrote" in capsys.readouterr().out
    image = (tmp_path / "kfac.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 10_000


def test_a_line_without_a_number_is_named(tmp_path, capsys):
    (tmp_path / "loss.csv").write_text("step,loss\n4,2.5\n5,\n")
    assert main(["plot", str(tmp_path)]) == 1
    assert "loss.csv, line 3: got ['5', '']; must be two numbers" in capsys.readouterr().err


@pytest.mark.parametrize(
    "state", ["", '{"log', "[]", "3", "{}", '{"log_history": null}', '{"log_history": [{"loss": 1.0}]}', "\x00"]
)
def test_a_state_of_the_trainer_that_is_none_is_named(state, tmp_path, capsys):
    (tmp_path / "trainer_state.json").write_text(state)
    assert main(["plot", str(tmp_path)]) == 1
    assert 'trainer_state.json: its "log_history" is no list' in capsys.readouterr().err


def test_a_file_that_is_no_text_is_named(tmp_path, capsys):
    (tmp_path / "loss.csv").write_bytes(b"\xff\xfe")
    assert main(["plot", str(tmp_path)]) == 1
    assert "loss.csv: 'utf-8' codec can't decode" in capsys.readouterr().err


def test_a_folder_without_logs_is_an_error(tmp_path, capsys):
    assert main(["plot", str(tmp_path)]) == 1
    assert "csv_monitor" in capsys.readouterr().err
