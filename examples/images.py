"""Images and their labels: scikit-learn's digits, CIFAR, npz files, and folders or archives of
class folders."""

import functools
import io
import pickle
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor
from torch.nn import functional as F

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
HELD_OUT = ("val", "test", "valid", "validation")
IN_MEMORY = 64
"""Largest side of images that are kept in memory as they are; larger ones are read from their files
when drawn."""
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
CIFAR = ("cifar-10-batches-py", "cifar-100-python")
"""Folders that torchvision unpacks below the one that it is given."""
SIZE = 224
DIGITS_HELD_OUT = 360


@dataclass
class Part:
    """Images of one part of a data set.

    Attributes:
        labels: int64 [n], or [n, H, W] of one per pixel.
        pixels: uint8 [n, C, H, W]; None where files are read when they are drawn.
    """

    labels: Tensor
    pixels: Tensor | None = None
    files: list[Path] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, index: Tensor) -> "Part":
        pixels = None if self.pixels is None else self.pixels[index]
        return Part(
            self.labels[index],
            pixels,
            [self.files[i] for i in index.tolist()] if self.files else [],
        )

    def to(self, device: torch.device) -> "Part":
        return replace(
            self,
            labels=self.labels.to(device),
            pixels=None if self.pixels is None else self.pixels.to(device),
        )


@dataclass
class Images:
    """A data set.

    Attributes:
        mirrored: whether an image's mirror image is of the same class.
        mean, std: fp32 [C, 1, 1], of the training part's pixels in 0 .. 1.
    """

    name: str
    train: Part
    held_out: Part
    classes: int
    mirrored: bool
    mean: Tensor
    std: Tensor

    @property
    def channels(self) -> int:
        return len(self.mean)

    def to(self, device: torch.device) -> "Images":
        """Drawn there, the same ones as here."""
        parts = {"train": self.train.to(device), "held_out": self.held_out.to(device)}
        return replace(self, **parts, mean=self.mean.to(device), std=self.std.to(device))

    def first(self, count: int) -> "Images":
        """With so many images of the training part, in every run the same ones of all classes."""
        if not 0 < count <= len(self.train):
            raise ValueError(f"--images {count}: the training part has {len(self.train)}")
        index = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(0))[:count]
        return replace(self, train=self.train.at(index), name=f"{count} images of {self.name}")

    def tested_on(self, count: int) -> "Images":
        """With so many images of the held-out part, evenly spread, so of all classes."""
        if not 0 < count <= len(self.held_out):
            raise ValueError(f"{count} held-out images: there are {len(self.held_out)}")
        return replace(
            self, held_out=self.held_out.at(torch.arange(count) * len(self.held_out) // count)
        )

    def draw(self, seed: int, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Images ``start`` .. ``start + count`` of an endless sequence of epochs, each in an order
        of its own, shifted, mirrored or cropped at random: fp32 [count, C, H, W] and their
        labels."""
        n, pieces = len(self.train), []
        for epoch in range(start // n, (start + count - 1) // n + 1):
            first, last = max(start - epoch * n, 0), min(start + count - epoch * n, n)
            pieces.append(_order(n, seed * 7919 + epoch)[first:last])
        generator = torch.Generator().manual_seed(seed * 1_000_003 + start)
        index = torch.cat(pieces)
        if self.train.pixels is None:
            x = self._read(self.train, index.tolist(), torch.rand(count, 4, generator=generator))
            return self._normalized(x), self.train.labels[index]
        index = index.to(self.train.pixels.device)
        x, y = self.train.pixels[index], self.train.labels[index]
        together = torch.cat([x, y.unsqueeze(1).to(x.dtype)], dim=1) if y.ndim > 1 else x
        together = self._augmented(together, generator)
        if y.ndim > 1:
            return self._normalized(together[:, :-1]), together[:, -1].long()
        return self._normalized(together), y

    def batches(self, rows: int, rank: int, world: int):
        """This rank's share of the held-out part, as it is."""
        device = self.held_out.labels.device
        for indices in torch.arange(rank, len(self.held_out), world, device=device).split(rows):
            pixels, labels = self.held_out.pixels, self.held_out.labels[indices]
            x = (
                self._read(self.held_out, indices.tolist(), None)
                if pixels is None
                else pixels[indices]
            )
            yield self._normalized(x), labels

    def _augmented(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Shifted by up to an eighth, zeros coming in, and mirrored or not."""
        shift, (height, width) = max(1, x.shape[-1] // 8), x.shape[-2:]
        places = torch.randint(2 * shift + 1, (len(x), 2), generator=generator).to(x.device)
        mirrored = (torch.rand(len(x), generator=generator) < 0.5).to(x.device)
        rows, columns = (
            places[:, i, None] + torch.arange(side, device=x.device)
            for i, side in enumerate((height, width))
        )  # [n, H], [n, W]
        if self.mirrored:
            columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        image, channel = (
            torch.arange(len(x), device=x.device),
            torch.arange(x.shape[1], device=x.device),
        )
        padded = F.pad(x, (shift,) * 4)
        return padded[
            image[:, None, None, None],
            channel[:, None, None],
            rows[:, None, :, None],
            columns[:, None, None],
        ]

    def _read(self, part: Part, indices: list[int], randoms: Tensor | None) -> Tensor:
        with ThreadPoolExecutor(8) as pool:
            crops: list = [None] * len(indices) if randoms is None else randoms.tolist()
            return torch.stack(
                list(
                    pool.map(
                        lambda one: _file(part.files[one[0]], one[1]),
                        zip(indices, crops, strict=True),
                    )
                )
            )

    def _normalized(self, x: Tensor) -> Tensor:
        return (x.float() / 255 - self.mean) / self.std


def load(path: str | None, *, per_pixel: bool = False) -> Images:
    """Read a data set.

    Args:
        path: a CIFAR folder (python version, or the one above it, as torchvision has it), an npz
            file with x_train, y_train, x_test, y_test (labels of images or of pixels), a folder
            with "train" and "val" or "test", each with a folder per class, or a tar archive of
            either folder, which is not unpacked. None: digits.
        per_pixel: whether every pixel needs a label. Digits then have their class where there is
            ink, and 0 elsewhere.

    Raises:
        ValueError: none of these.
    """
    if path is None:
        found = _digits(per_pixel)
    else:
        root = Path(path)
        if root.is_file() and root.suffix == ".npz":
            found = _npz(root)
        elif root.is_file() and root.name.endswith(ARCHIVES):
            found = _archive(root)
        elif folder := next(
            (folder for folder in (root, *map(root.joinpath, CIFAR)) if _is_cifar(folder)), None
        ):
            found = _cifar(
                lambda name: (folder / name).read_bytes() if (folder / name).is_file() else None,
                "CIFAR",
            )
        elif root.is_dir() and (root / "train").is_dir():
            found = _folder(root)
        else:
            raise ValueError(
                f"--data {root}: neither a CIFAR folder (python version), an npz file, nor a "
                "folder or tar archive with train/ and val/ or test/ of class folders"
            )
    if (found.train.labels.ndim > 1) != per_pixel:
        want = "a label for each pixel" if per_pixel else "a label for each image"
        raise ValueError(
            f"--data {path}: this model needs {want}, labels are {list(found.train.labels.shape)}"
        )
    return found


def _made(name: str, train: Part, held_out: Part, *, mirrored: bool) -> Images:
    assert train.pixels is not None
    values = train.pixels.transpose(0, 1).flatten(1).float() / 255
    mean, std = values.mean(1).view(-1, 1, 1), values.std(1).clamp(min=1e-3).view(-1, 1, 1)
    classes = int(max(train.labels.max(), held_out.labels.max())) + 1
    return Images(
        f"{name} ({len(train)} + {len(held_out)} held out)",
        train,
        held_out,
        classes,
        mirrored,
        mean,
        std,
    )


def _digits(per_pixel: bool) -> Images:
    from sklearn.datasets import load_digits

    data = load_digits()
    x = (torch.from_numpy(data.images) * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
    y = torch.from_numpy(data.target).long()
    if per_pixel:
        y = torch.where(x[:, 0] > 100, y[:, None, None] + 1, 0)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held, rest = order[:DIGITS_HELD_OUT], order[DIGITS_HELD_OUT:]
    return _made(
        "scikit-learn's digits", Part(y[rest], x[rest]), Part(y[held], x[held]), mirrored=False
    )


def _npz(path: Path) -> Images:
    import numpy as np

    with np.load(path) as data:
        missing = [key for key in ("x_train", "y_train", "x_test", "y_test") if key not in data]
        if missing:
            raise ValueError(f"--data {path}: has no {', '.join(missing)}")
        parts = []
        for part in ("train", "test"):
            x, y = torch.from_numpy(data[f"x_{part}"]), torch.from_numpy(data[f"y_{part}"]).long()
            if x.dtype != torch.uint8 or x.ndim not in (3, 4):
                raise ValueError(f"--data {path}: x_{part} must be uint8 [n, H, W] or [n, H, W, C]")
            x = x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2).contiguous()
            parts.append(Part(y.flatten() if y.numel() == len(x) else y, x))
    return _made(path.name, *parts, mirrored=True)


def _is_cifar(folder: Path) -> bool:
    return (folder / "data_batch_1").is_file() or (folder / "train").is_file()


def _cifar(read: Callable[[str], bytes | None], name: str) -> Images:
    """``read``: a file of the data set; None if it has none of that name."""
    names = (
        [f"data_batch_{i}" for i in range(1, 6)] if read("data_batch_1") is not None else ["train"]
    )
    held = "test_batch" if len(names) > 1 else "test"

    def part(files: list[str]) -> Part:
        pixels, labels = [], []
        for file in files:
            content = read(file)
            if content is None:
                raise ValueError(f"--data: {name} has no {file}")
            batch = pickle.loads(content, encoding="bytes")
            pixels.append(torch.from_numpy(batch[b"data"]).view(-1, 3, 32, 32))
            labels += batch.get(b"labels", batch.get(b"fine_labels"))
        return Part(torch.tensor(labels), torch.cat(pixels))

    return _made(name, part(names), part([held]), mirrored=True)


def _archive(path: Path) -> Images:
    """Read from end to end, as a compressed one has to be."""
    batches: dict[str, bytes] = {}
    found: dict[str, list[tuple[str, str, Tensor]]] = {}  # part -> class, file, pixels
    with tarfile.open(path) as archive:
        for member in archive:
            place = PurePosixPath(member.name)
            at = next(
                (
                    i
                    for i, name in enumerate(place.parts[:-2])
                    if name == "train" or name in HELD_OUT
                ),
                None,
            )
            file = archive.extractfile(member) if member.isfile() else None
            if file is None:
                continue
            if at is not None and place.suffix.lower() in SUFFIXES:
                pixels = _pixels(_image(io.BytesIO(file.read())))
                if max(pixels.shape) > IN_MEMORY:
                    raise ValueError(
                        f"--data {path}: images above {IN_MEMORY} pixels are read one by one: "
                        "unpack it"
                    )
                part, label, *rest = place.parts[at:]
                found.setdefault(part, []).append((label, "/".join(rest), pixels))
            elif place.parent.name in CIFAR:
                batches[place.name] = file.read()
    if batches:
        return _cifar(batches.get, path.name)
    held = next((name for name in HELD_OUT if name in found), None)
    if "train" not in found or held is None:
        raise ValueError(
            f"--data {path}: has no train/ and {', '.join(name + '/' for name in HELD_OUT)} of "
            "images"
        )
    names = sorted({label for label, _, _ in found["train"]})
    parts = []
    for name in ("train", held):
        ordered = sorted(
            (names.index(label), file, i)
            for i, (label, file, _) in enumerate(found[name])
            if label in names
        )
        labels = torch.tensor([label for label, _, _ in ordered])
        parts.append(Part(labels, torch.stack([found[name][i][2] for _, _, i in ordered])))
    return _made(path.name, *parts, mirrored=True)


def _folder(root: Path) -> Images:
    held = next((root / name for name in HELD_OUT if (root / name).is_dir()), None)
    if held is None:
        raise ValueError(
            f"--data {root}: has train/, but none of {', '.join(name + '/' for name in HELD_OUT)}"
        )
    names = sorted(folder.name for folder in (root / "train").iterdir() if folder.is_dir())

    def part(folder: Path) -> Part:
        files, labels = [], []
        for label, name in enumerate(names):
            own = sorted(
                file for file in (folder / name).rglob("*") if file.suffix.lower() in SUFFIXES
            )
            files += own
            labels += [label] * len(own)
        if not files:
            raise ValueError(
                f"--data {folder}: no images in class folders ({', '.join(sorted(SUFFIXES))})"
            )
        return Part(torch.tensor(labels), files=files)

    train, test = part(root / "train"), part(held)
    if max(_image(train.files[0]).size) <= IN_MEMORY:
        for one in (train, test):
            one.pixels = torch.stack([_pixels(_image(file)) for file in one.files])
        return _made(root.name, train, test, mirrored=True)
    mean, std = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])  # ImageNet's
    shape = (-1, 1, 1)
    name = f"{root.name} ({len(train)} + {len(test)} held out)"
    return Images(
        name,
        train,
        test,
        len(names),
        True,
        torch.tensor(mean).view(shape),
        torch.tensor(std).view(shape),
    )


@functools.lru_cache(2)
def _order(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def _image(file: Path | io.BytesIO):
    from PIL import Image

    return Image.open(file).convert("RGB")


def _pixels(image) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def _file(file: Path, randoms: list[float] | None) -> Tensor:
    """A random part of 8 to 100 % of the image, maybe mirrored; or its middle, 7/8 of the shorter
    side."""
    image = _image(file)
    width, height = image.size
    if randoms is None:
        side = min(width, height) * 7 / 8
        left, top, w, h = (width - side) / 2, (height - side) / 2, side, side
    else:
        area, ratio = (0.08 + 0.92 * randoms[0]) * width * height, (3 / 4) * (16 / 9) ** randoms[1]
        w, h = min(width, (area * ratio) ** 0.5), min(height, (area / ratio) ** 0.5)
        left, top = (width - w) * randoms[2], (height - h) * (randoms[3] * 2 % 1)
    found = _pixels(image.resize((SIZE, SIZE), box=(left, top, left + w, top + h)))
    return found.flip(-1) if randoms is not None and randoms[3] < 0.5 else found
