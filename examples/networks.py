"""Networks for images: ResNets (He et al. 2015, arXiv:1512.03385) and a U-Net (Ronneberger et al.
2015, arXiv:1505.04597)."""

import importlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

LARGE = 64
"""Images above it are halved twice at the start, as ImageNet's are."""


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class Block(nn.Module):
    """Two 3x3 convolutions, or with ``inner`` 1x1, 3x3, 1x1; and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, inner: int | None = None) -> None:
        super().__init__()
        if inner is None:
            shapes: list[tuple] = [(inputs, outputs, 3, stride), (outputs, outputs, 3, 1)]
        else:
            shapes = [(inputs, inner, 1, 1), (inner, inner, 3, stride), (inner, outputs, 1, 1)]
        self.convolutions = nn.ModuleList([conv(*shape) for shape in shapes])
        self.norms = nn.ModuleList([nn.BatchNorm2d(shape[1]) for shape in shapes])
        self.around: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.around = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        z = x
        for index, (one, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            z = norm(one(torch.relu(z) if index else z))
        return torch.relu(z + self.around(x))


class ResNet(nn.Module):
    """Stages of blocks; each after the first halves the image."""

    def __init__(
        self,
        widths: Sequence[int],
        blocks: Sequence[int],
        *,
        channels: int,
        classes: int,
        bottleneck: int = 1,
        large: bool = False,
    ) -> None:
        super().__init__()
        first = widths[0]
        self.stem = conv(channels, first, 7 if large else 3, 2 if large else 1)
        self.norm = nn.BatchNorm2d(first)
        self.pool: nn.Module = nn.MaxPool2d(3, 2, padding=1) if large else nn.Identity()
        stages, inputs = [], first
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            inner = width if bottleneck > 1 else None
            for index in range(count):
                stride = 2 if stage and not index else 1
                stages.append(Block(inputs, width * bottleneck, stride, inner=inner))
                inputs = width * bottleneck
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> logits [N, classes]."""
        x = self.blocks(self.pool(torch.relu(self.norm(self.stem(x)))))
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """Down and up again, with a way across at each size. Without any nn.Linear."""

    def __init__(self, *, channels: int, classes: int, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            [self._pair(a, b) for a, b in zip([channels, *widths[:-1]], widths, strict=True)]
        )
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1])]
        )
        self.across = nn.ModuleList([self._pair(2 * w, w) for w in reversed(widths[:-1])])
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Sequential:
        parts: list[nn.Module] = []
        for a in (inputs, outputs):
            parts += [conv(a, outputs), nn.BatchNorm2d(outputs), nn.ReLU()]
        return nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> logits [N, classes, H, W]; sides are multiples of 2^depth."""
        kept = []
        for index, pair in enumerate(self.down):
            x = pair(x if index == 0 else nn.functional.max_pool2d(x, 2))
            kept.append(x)
        for up, across, level in zip(self.up, self.across, reversed(kept[:-1]), strict=True):
            x = across(torch.cat([up(x), level], dim=1))
        return self.head(x)


def resnet8(*, channels: int, classes: int, size: int) -> nn.Module:
    return ResNet((16, 32, 64), (1, 1, 1), channels=channels, classes=classes)


def resnet20(*, channels: int, classes: int, size: int) -> nn.Module:
    return ResNet((16, 32, 64), (3, 3, 3), channels=channels, classes=classes)


def resnet32(*, channels: int, classes: int, size: int) -> nn.Module:
    return ResNet((16, 32, 64), (5, 5, 5), channels=channels, classes=classes)


def resnet50(*, channels: int, classes: int, size: int) -> nn.Module:
    options = {"channels": channels, "classes": classes, "large": size > LARGE}
    return ResNet((64, 128, 256, 512), (3, 4, 6, 3), bottleneck=4, **options)


def unet(*, channels: int, classes: int, size: int) -> nn.Module:
    return UNet(channels=channels, classes=classes)


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "resnet8": resnet8,
    "resnet20": resnet20,
    "resnet32": resnet32,
    "resnet50": resnet50,
    "unet": unet,
}


def build(name: str, *, channels: int, classes: int, size: int) -> nn.Module:
    """One of :data:`NETWORKS`, "timm:NAME", or what "module:factory" returns, called with the same
    keywords.

    Raises:
        ValueError: no such network.
    """
    shape = {"channels": channels, "classes": classes, "size": size}
    if name in NETWORKS:
        return NETWORKS[name](**shape)
    where, colon, what = name.partition(":")
    if not colon:
        raise ValueError(
            f"--model {name}: give one of {', '.join(NETWORKS)}, module:factory, or timm:NAME"
        )
    try:
        module = importlib.import_module(where)
    except ImportError as error:
        raise ValueError(f"--model {name}: {error}") from None
    if where == "timm":
        if not module.is_model(what):
            raise ValueError(f"--model {name}: timm has no model {what}")
        return module.create_model(what, in_chans=channels, num_classes=classes)
    factory = getattr(module, what, None)
    if not callable(factory):
        raise ValueError(f"--model {name}: {where} has no function {what}")
    return factory(**shape)
