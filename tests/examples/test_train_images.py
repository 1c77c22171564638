"""The image example as a user runs it: both kinds of networks, every reader of data, resuming,
wrong input."""

import json
import pickle
import sys
import tarfile

import numpy as np
import pytest
import torch

from examples import train_images
from tests.examples.runs import arguments_of, assert_trains, losses_of, rows_of
from tests.ranks import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import images
import mixing

from tests.close import close

pytestmark = pytest.mark.distributed
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("images_*.json"))
RECIPES = ["resnet50_kaisa", "resnet50_spngd_32k"]
"""As published, for many GPUs: run here on a small stand-in."""


def write_npz(path) -> str:
    """Bright halves: which one is the class."""
    generator = np.random.default_rng(0)
    y = generator.integers(0, 2, 96)
    x = generator.integers(0, 100, (96, 8, 8, 3), dtype=np.uint8)
    x[y == 1, :4] += 120
    x[y == 0, 4:] += 120
    np.savez(path, x_train=x[:64], y_train=y[:64], x_test=x[64:], y_test=y[64:])
    return str(path)


def test_every_config_trains_and_a_resumed_run_goes_on(tmp_path):
    data = write_npz(tmp_path / "halves.npz")
    options = {"model": "resnet8", "save_interval": 4, "steps": 12, "eval_interval": 4}
    runs = [arguments_of(tmp_path, name, data=data, **options) for name in CONFIGS]
    published = {"model": "resnet8", "steps": 3, "lr": 0.02, "mixup": 0.6, "data": data}
    for name in RECIPES:
        config = json.loads((ROOT / f"configs/{name}.json").read_text())
        config.pop("train_batch_size", None)
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        path = tmp_path / f"{name}.json"
        runs.append(arguments_of(tmp_path, path, "--erase", "--no-plots", **published))
    assert_trains("train_images", *runs)
    for name in RECIPES:
        losses = losses_of(tmp_path / name)
        assert len(losses) == 3 and np.isfinite(losses).all(), name
    for name in CONFIGS:
        rows, losses = rows_of(tmp_path / name), losses_of(tmp_path / name)
        assert len(rows) == 12 and losses[-1] < losses[0]
        assert [bool(row["held_out_accuracy"]) for row in rows] == [False, False, False, True] * 3
        for file in ("accuracy_by_step.png", "loss_by_step.png", "step_time.png"):
            assert (tmp_path / name / file).stat().st_size > 0
    # the schedule is that of 12 steps in both: the last part is cut off by its table and checkpoint
    unbroken, table = rows_of(tmp_path / CONFIGS[0]), tmp_path / CONFIGS[0] / "metrics.csv"
    latest = tmp_path / CONFIGS[0] / "checkpoints/latest"
    # a row more than steps were saved
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:6]))
    latest.write_text("global_step4")
    assert_trains("train_images", [*runs[0], "--resume"])
    expected, found = (
        [(row["step"], row["loss"], row["held_out_accuracy"]) for row in rows]
        for rows in (unbroken, rows_of(tmp_path / CONFIGS[0]))
    )
    assert latest.read_text() == "global_step12"
    assert found == expected, "with the statistics of BatchNorm of both ranks"


def test_mixup_and_erasing_follow_their_formulas():
    torch.manual_seed(0)
    mix = mixing.RunningMixup(0.6, 3)
    x, y = torch.rand(4, 1, 5, 5), torch.tensor([0, 1, 2, 0])
    first, labels = mix(x, y)
    assert torch.equal(first, x) and torch.equal(labels.argmax(1), y)
    second, mixed = mix(x.flip(0), y.flip(0))
    lam = ((second - x) / (x.flip(0) - x)).flatten(1).median(1).values
    assert ((0.5 <= lam) & (lam <= 1)).all()
    close(mixed, lam[:, None] * labels.flip(0) + (1 - lam)[:, None] * labels, condition=100)
    third, _ = mix(x, y)
    assert (third - x).abs().max() > 0.01 and mix._last[0] is third, "the mixed batch is kept"
    gone = (mixing.erased(torch.ones(400, 1, 20, 20)) == 0).float().mean((1, 2, 3))
    assert 0.4 < float((gone > 0).float().mean()) < 0.6
    # of the image; pixels are whole
    assert 0.01 < float(gone[gone > 0].min()) and float(gone.max()) < 0.3


def test_a_network_without_linear_layers_labels_every_pixel(tmp_path):
    pytest.importorskip("sklearn")
    options = {"model": "unet", "steps": 8, "eval_interval": 4, "name": "unet"}
    assert_trains("train_images", arguments_of(tmp_path, CONFIGS[-1], **options), world=1)
    losses = losses_of(tmp_path / "unet")
    assert losses[-1] < losses[0]


def test_readers_agree_on_the_same_images(tmp_path):
    from PIL import Image

    with np.load(write_npz(tmp_path / "halves.npz")) as data:
        arrays = {key: data[key] for key in data.files}
    above, folder = tmp_path / "torchvision", tmp_path / "folder"
    cifar = above / "cifar-100-python"
    cifar.mkdir(parents=True)
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        large = np.kron(x, np.ones((1, 4, 4, 1), dtype=np.uint8))
        rows = large.transpose(0, 3, 1, 2).reshape(len(x), -1)
        (cifar / part).write_bytes(pickle.dumps({b"data": rows, b"fine_labels": y.tolist()}))
        for index, (image, label) in enumerate(zip(x, y, strict=True)):
            place = folder / part / f"class{label}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{index:03}.png")
    for name, packed, inside in (("cifar", above, ""), ("folder", folder, ".")):
        with tarfile.open(tmp_path / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(packed, arcname=inside)
    places = {
        "npz": "halves.npz",
        "cifar": f"{above.name}/{cifar.name}",
        "folder": "folder",
        "torchvision": above.name,
        "cifar_archive": "cifar.tar.xz",
        "folder_archive": "folder.tar.xz",
    }
    of = {name: images.load(str(tmp_path / place)) for name, place in places.items()}
    assert torch.equal(of["cifar"].train.pixels[:, :, ::4, ::4], of["npz"].train.pixels)
    assert torch.equal(of["cifar"].held_out.labels, of["npz"].held_out.labels)
    order = of["npz"].train.labels.argsort(stable=True)
    assert torch.equal(of["folder"].train.pixels, of["npz"].train.pixels[order])
    same = {"cifar_archive": "cifar", "torchvision": "cifar", "folder_archive": "folder"}
    for name, other in same.items():
        assert torch.equal(of[name].train.pixels, of[other].train.pixels), name
        assert torch.equal(of[name].held_out.labels, of[other].held_out.labels), name
    assert {found.classes for found in of.values()} == {2}
    x, y = of["npz"].draw(0, 0, 64)
    every = of["npz"].train.labels.sort().values
    assert torch.equal(y.sort().values, every), "an epoch has every image once"
    assert x.shape == (64, 3, 8, 8) and abs(float(x.mean())) < 0.4
    with pytest.raises(ValueError, match="--images 65: the training part has 64"):
        of["npz"].first(65)


def test_large_images_are_read_when_they_are_drawn(tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setattr(images, "SIZE", 32)
    for part, count in (("train", 6), ("val", 3)):
        for label in range(2):
            place = tmp_path / part / str(label)
            place.mkdir(parents=True)
            for index in range(count):
                image = Image.new("RGB", (90, 70), (40 + 100 * label, index, 0))
                image.save(place / f"{index}.jpg")
    data = images.load(str(tmp_path))
    x, y = data.draw(0, 0, 12)
    assert x.shape == (12, 3, 32, 32) and torch.equal(x[:, 0, 0, 0] > 0.2, y == 1)
    shares = [list(data.batches(2, rank, 2)) for rank in range(2)]
    assert sum(len(y) for share in shares for _, y in share) == 6


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ("nowhere", "resnet8", "neither a CIFAR folder"),
        ("halves.npz", "resnet2000", "give one of resnet8, .*, unet, module:factory, or timm:NAME"),
        ("halves.npz", "no_such_module:net", "No module named 'no_such_module'"),
        ("halves.npz", "unet", "needs a label for each pixel"),
    ],
)
def test_wrong_input_is_one_clear_line(data, model, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_npz("halves.npz")
    with pytest.raises(ValueError, match=message):
        train_images.make(train_images.arguments_of(["--data", data, "--model", model]))
