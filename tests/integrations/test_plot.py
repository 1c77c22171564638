"""``python -m ds_kfac plot``: all three kinds of logs, or a message."""

import json

import pytest

from ds_kfac.__main__ import main
from ds_kfac.integrations import plot
from ds_kfac.metrics import STAGES
from tests.close import close

STATE = json.dumps({"log_history": [{"loss": 3.0, "step": 1}, {"loss": 2.0, "step": 2}]})


def write_logs(folder) -> None:
    from torch.utils.tensorboard import SummaryWriter

    csv = folder / "job"
    csv.mkdir()
    for name in ("Train_Samples_train_loss", "Train_KFAC_refreshes"):
        head = name.rsplit("_", 1)[1]
        (csv / f"{name}.csv").write_text(f"step,{head}\n4,2.5\nstep,{head}\n8,2.0\n")
    (folder / "trainer_state.json").write_text(STATE)
    with SummaryWriter(str(folder / "events")) as writer:
        writer.add_scalar("train/loss", 1.5, 3)


def test_all_kinds_of_logs_are_read_and_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    write_logs(tmp_path)
    found = plot.read(tmp_path)
    assert found["Train_Samples_train_loss"] == [(4, 2.5), (8, 2.0)]
    assert found["loss"] == [(1, 3.0), (2, 2.0)]
    assert found["train_loss"] == [(3, 1.5)], "named as in csv, so that two logs are one line"
    assert main(["plot", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("wrote") == 1 and "timings = True" in said
    for missing in ("seconds", "failures", "step to weight"):
        assert f"no {missing} in these logs" in said
    image = (tmp_path / "kfac.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 10_000
    assert main(["plot", str(tmp_path / "trainer_state.json"), "--out", str(tmp_path / "new")]) == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["kfac.png"], "one page"


def series(name: str, *points: tuple[float, float]) -> plot.Series:
    return {name: list(points)}


def test_seconds_are_seconds_of_a_step():
    """DeepSpeed's are milliseconds of one step, ours are sums over all of them, at samples."""
    steps = series("Train_KFAC_steps", (32, 1.0), (96, 3.0))
    logged = series("Train_Samples_elapsed_time_ms_forward", (32, 250.0))
    logged |= series("Train_KFAC_seconds_reduce", (32, 0.5), (96, 1.5)) | steps
    found = plot.lines(logged, plot.QUESTIONS["seconds"])
    assert found == {"forward (DeepSpeed's)": [(32, 0.25)], "reduce": [(32, 0.5), (96, 0.5)]}
    # a Trainer's logs count from where it went on, here after step 20
    logged = series("kfac_seconds_refresh", (10, 100.0), (20, 400.0), (30, 50.0))
    assert plot.lines(logged, plot.QUESTIONS["seconds"]) == {"refresh": [(20, 30.0)]}


def test_kfacs_share_of_a_step_is_that_of_its_stages_in_deepspeeds_times():
    """capture is inside of forward and backward, all else of the optimizer's step; the first step
    does not count."""
    engine = {"forward": 1.0, "backward": 2.0, "step": 1.0, "backward_inner": 1.9}
    found = {
        f"{name} (DeepSpeed's)": [(1, 99.0), (2, seconds), (3, seconds)]
        for name, seconds in engine.items()
    }
    found["forward (DeepSpeed's)"] += [(4, 50.0), (5, 1.0)]  # with an evaluation in it
    stages = {"capture": 0.5, "reduce": 0.1, "refresh": 0.2, "relayout": 0.1, "precondition": 0.1}
    found |= {name: [(1, 99.0), (2, 0.0), (3, 2 * seconds)] for name, seconds in stages.items()}
    parts, share = plot.parts_of_step(found)
    close(parts, {"forward and backward": 2.5, "optimizer": 0.5, **stages}, sums=10)
    close(share, sum(stages.values()) / 4, sums=10)
    close(sum(parts.values()), 4.0, sums=10)
    unknown = plot.parts_of_step({name: found[name] for name in stages})[1]
    assert unknown is None, "of what is not known"
    assert plot.STAGES == STAGES


def test_the_pages_titles_say_what_was_found(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    parts = {f"{name} (DeepSpeed's)": 4 / 3 for name in ("forward", "backward", "step")}
    parts["refresh"] = 0.5
    panels = {question: {} for question in plot.QUESTIONS}
    panels["seconds"] = {name: [(1, 9.0), (2, value)] for name, value in parts.items()}
    panels["failures"] = {"refresh_failures": [(1, 0.0), (2, 3.0)], "empty": [(1, 0.0), (2, 0.0)]}
    plot.draw(panels, tmp_path / "page.png")
    assert [axis.get_title(loc="left") for axis in pyplot.gcf().axes] == [
        "no loss",
        "K-FAC takes 12% of a step",
        "no step to weight",
        "failures: refresh_failures 3; always 0: 1 others",
    ]


NO_LIST = 'trainer_state.json: its "log_history" is not a list'
LINE_3 = "loss.csv, line 3: got ['5', '']; must be two numbers"
STATES = ('{"log', "[]", '{"log_history": [{"loss": 1.0}]}')


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("loss.csv", b"step,loss\n4,2.5\n5,\n", LINE_3),
        ("loss.csv", b"\xff\xfe", "loss.csv: 'utf-8' codec can't decode"),
        *(("trainer_state.json", state.encode(), NO_LIST) for state in STATES),
        ("log.txt", b"", "csv_monitor"),
    ],
)
def test_what_is_no_log_is_named(file, content, told, tmp_path, capsys):
    (tmp_path / file).write_bytes(content)
    assert main(["plot", str(tmp_path)]) == 1
    assert told in capsys.readouterr().err
