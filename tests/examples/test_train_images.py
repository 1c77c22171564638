"""The image example as a user runs it: both kinds of networks, every reader of data, resuming,
wrong input."""

import json
import pickle
import sys
import tarfile

import numpy as np
import pytest
import torch

from tests.examples.test_train_gpt import one_rank, rows_of
from tests.ranks import ROOT, run_ranks

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


def worker(payload) -> list[int]:
    from examples import train_images

    return [train_images.main(argv) for argv in payload]


def arguments(out, data, config, **more) -> list[str]:
    base = [
        "--deepspeed_config",
        str(ROOT / f"configs/{config}.json"),
        "--out",
        str(out),
        "--eval-interval",
        "4",
    ]
    base += [] if data is None else ["--data", data]
    return base + [
        text for name, value in more.items() for text in (f"--{name.replace('_', '-')}", str(value))
    ]


def test_every_config_trains_and_a_resumed_run_goes_on(tmp_path):
    data = write_npz(tmp_path / "halves.npz")
    more = {"model": "resnet8", "save_interval": 4, "steps": 12}
    runs = [arguments(tmp_path, data, name, **more) for name in CONFIGS]
    assert (
        run_ranks("tests.examples.test_train_images:worker", world=2, payload=runs)
        == [[0] * len(runs)] * 2
    )
    for name in CONFIGS:
        rows = rows_of(tmp_path / name)
        assert len(rows) == 12 and float(rows[-1]["loss"]) < float(rows[0]["loss"])
        assert [bool(row["held_out_accuracy"]) for row in rows] == [False, False, False, True] * 3
        for file in ("accuracy_by_step.png", "loss_by_step.png", "step_time.png"):
            assert (tmp_path / name / file).stat().st_size > 0
    # the schedule is that of 12 steps in both: the last part is cut off by its table and checkpoint
    unbroken, table = rows_of(tmp_path / CONFIGS[0]), tmp_path / CONFIGS[0] / "metrics.csv"
    latest = tmp_path / CONFIGS[0] / "checkpoints/latest"
    # a row more than steps were saved
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:6]))
    latest.write_text("global_step4")
    resumed = [[*runs[0], "--resume"]]
    assert (
        run_ranks("tests.examples.test_train_images:worker", world=2, payload=resumed) == [[0]] * 2
    )
    results = [
        [(row["step"], row["loss"], row["held_out_accuracy"]) for row in rows]
        for rows in (unbroken, rows_of(tmp_path / CONFIGS[0]))
    ]
    assert latest.read_text() == "global_step12"
    assert results[0] == results[1], "with the statistics of BatchNorm of both ranks"


def test_published_recipes_run_on_a_stand_in(tmp_path):
    data, runs = write_npz(tmp_path / "halves.npz"), []
    for name in RECIPES:
        config = json.loads((ROOT / f"configs/{name}.json").read_text())
        config.pop("train_batch_size", None)
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        more = arguments(tmp_path, data, name, model="resnet8", steps=3, lr=0.02, mixup=0.6)
        runs.append(
            [
                "--deepspeed_config",
                str(tmp_path / f"{name}.json"),
                *more[2:],
                "--erase",
                "--no-plots",
            ]
        )
    assert (
        run_ranks("tests.examples.test_train_images:worker", world=2, payload=runs) == [[0, 0]] * 2
    )
    for name in RECIPES:
        rows = rows_of(tmp_path / name)
        assert len(rows) == 3 and all(np.isfinite(float(row["loss"])) for row in rows), name


def test_mixup_and_erasing_follow_their_formulas():
    torch.manual_seed(0)
    mix = mixing.RunningMixup(0.6, 3)
    x, y = torch.rand(4, 1, 5, 5), torch.tensor([0, 1, 2, 0])
    first, labels = mix(x, y)
    assert torch.equal(first, x) and torch.equal(labels.argmax(1), y)
    state = torch.get_rng_state()
    b = torch.distributions.Beta(0.6, 0.6).sample((4,))
    torch.set_rng_state(state)
    lam = torch.maximum(b, 1 - b)
    second, mixed = mix(x.flip(0), y.flip(0))
    for i in range(4):
        close(second[i], lam[i] * x[3 - i] + (1 - lam[i]) * x[i])
        close(mixed[i].sum(), torch.ones(()), sums=3)
        assert float(mixed[i, y[3 - i]]) >= float(lam[i]) - 1e-6  # rounding of 1 - (1 - lam)
    third, _ = mix(x, y)
    assert (third - x).abs().max() > 0.01 and mix._last[0] is third, "the mixed batch is kept"
    images_in = torch.ones(400, 1, 20, 20)
    gone = (mixing.erased(images_in) == 0).float().mean((1, 2, 3))
    assert 0.4 < float((gone > 0).float().mean()) < 0.6
    # of the image; pixels are whole
    assert 0.01 < float(gone[gone > 0].min()) and float(gone.max()) < 0.3


def test_a_network_without_linear_layers_labels_every_pixel(tmp_path):
    pytest.importorskip("sklearn")
    payload = [arguments(tmp_path, None, CONFIGS[-1], model="unet", steps=8, name="unet")]
    assert run_ranks("tests.examples.test_train_images:worker", world=1, payload=payload) == [[0]]
    rows = rows_of(tmp_path / "unet")
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])


def test_readers_agree_on_the_same_images(tmp_path):
    from PIL import Image

    with np.load(write_npz(tmp_path / "halves.npz")) as data:
        arrays = {key: data[key] for key in data.files}
    cifar, folder = tmp_path / "cifar", tmp_path / "folder"
    cifar.mkdir()
    parts = {"train": "train", "test": "test"}
    for part, name in parts.items():
        x, y = arrays[f"x_{name}"], arrays[f"y_{name}"]
        large = np.kron(x, np.ones((1, 4, 4, 1), dtype=np.uint8))
        rows = large.transpose(0, 3, 1, 2).reshape(len(x), -1)
        (cifar / part).write_bytes(pickle.dumps({b"data": rows, b"fine_labels": y.tolist()}))
        for index, (image, label) in enumerate(zip(x, y, strict=True)):
            place = folder / part / f"class{label}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{index:03}.png")
    above = tmp_path / "torchvision"
    above.mkdir()
    cifar.rename(above / "cifar-100-python")
    archives = {"cifar_archive": above, "folder_archive": folder}
    for name, packed in archives.items():
        with tarfile.open(tmp_path / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(packed, arcname="." if packed == folder else "")
    cifar = above / "cifar-100-python"
    of = {
        name: images.load(str(path))
        for name, path in {"npz": tmp_path / "halves.npz", "cifar": cifar, "folder": folder}.items()
    }
    assert torch.equal(of["cifar"].train.pixels[:, :, ::4, ::4], of["npz"].train.pixels)
    assert torch.equal(of["cifar"].held_out.labels, of["npz"].held_out.labels)
    order = of["npz"].train.labels.argsort(stable=True)
    assert torch.equal(of["folder"].train.pixels, of["npz"].train.pixels[order])
    of |= {name: images.load(str(tmp_path / f"{name}.tar.xz")) for name in archives}
    of["torchvision"] = images.load(str(above))
    for name, other in {
        "cifar_archive": "cifar",
        "torchvision": "cifar",
        "folder_archive": "folder",
    }.items():
        for part in ("train", "held_out"):
            one, same = getattr(of[name], part), getattr(of[other], part)
            assert torch.equal(one.pixels, same.pixels) and torch.equal(one.labels, same.labels), (
                name
            )
    assert {found.classes for found in of.values()} == {2}
    x, y = of["npz"].draw(0, 0, 64)
    _, labels = of["npz"].draw(0, 60, 8)
    assert torch.equal(y.sort().values, of["npz"].train.labels.sort().values), (
        "an epoch has every image once"
    )
    assert torch.equal(labels[:4], y[60:]) and x.shape == (64, 3, 8, 8)
    assert abs(float(x.mean())) < 0.4


def test_every_image_is_shifted_by_up_to_an_eighth_and_mirrored_or_not(tmp_path):
    data = images.load(write_npz(tmp_path / "halves.npz"))
    plain = {bytes(pixels.numpy().tobytes()) for pixels in data.train.pixels}
    x, _ = data.draw(0, 0, 64)
    pixels = ((x * data.std + data.mean) * 255).round().to(torch.uint8)
    padded = torch.nn.functional.pad(data.train.pixels, (1,) * 4)
    moved = [padded[..., i : i + 8, j : j + 8] for i in range(3) for j in range(3)]
    ways = torch.stack([*moved, *(way.flip(-1) for way in moved)])  # [18, 64, 3, 8, 8]
    found = (pixels[:, None, None] == ways[None]).all((3, 4, 5))  # [64, 18, 64]
    assert found.any((1, 2)).all(), "each is one of the 18 of some image"
    assert len(found.any(2).any(0).nonzero()) > 12 and len(plain) == 64


def test_some_images_are_the_same_in_every_run_and_of_all_classes(tmp_path):
    data = images.load(write_npz(tmp_path / "halves.npz"))
    few = data.first(40)
    assert torch.equal(few.train.pixels, data.first(40).train.pixels) and len(few.train) == 40
    assert sorted(few.train.labels.unique().tolist()) == [0, 1] and few.name.startswith(
        "40 images of "
    )
    assert torch.equal(data.tested_on(8).held_out.labels, data.held_out.labels[::4])
    with pytest.raises(ValueError, match="--images 65: the training part has 64"):
        data.first(65)


def test_large_images_are_read_when_they_are_drawn(tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setattr(images, "SIZE", 32)
    for part, count in (("train", 6), ("val", 3)):
        for label in range(2):
            place = tmp_path / part / str(label)
            place.mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (90, 70), (40 + 100 * label, index, 0)).save(
                    place / f"{index}.jpg"
                )
    data = images.load(str(tmp_path))
    x, y = data.draw(0, 0, 12)
    assert x.shape == (12, 3, 32, 32) and torch.equal(x[:, 0, 0, 0] > 0.2, y == 1)
    shares = [list(data.batches(2, rank, 2)) for rank in range(2)]
    assert sum(len(y) for share in shares for _, y in share) == 6


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"data": "nowhere"}, "neither a CIFAR folder"),
        (
            {"model": "resnet2000"},
            "give one of resnet8, resnet20, resnet32, resnet50, unet, module:factory, or timm:NAME",
        ),
        ({"model": "no_such_module:net"}, "No module named 'no_such_module'"),
        ({"model": "unet"}, "needs a label for each pixel"),
    ],
)
def test_wrong_input_is_one_clear_line(more, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = more.pop("data", None) or write_npz(tmp_path / "halves.npz")
    from examples import train_images

    with pytest.raises(ValueError, match=message):
        train_images.make(
            train_images.arguments_of(["--data", data, "--model", more.get("model", "resnet8")])
        )


def test_the_launcher_environment_is_asked_for(capsys, monkeypatch):
    from examples import train_images

    for name in one_rank():
        monkeypatch.delenv(name, raising=False)
    assert train_images.main([]) == 2
    assert (
        "examples/train_images.py --deepspeed_config configs/images_zero2_kfac.json"
        in capsys.readouterr().err
    )
