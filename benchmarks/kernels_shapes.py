"""Layers of known models, as their factors and gradients are shaped: one block, repeated."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Conv:
    """A convolution's input and kernel: channels, side of the image, side of the kernel, stride."""

    channels: int
    image: int
    kernel: int
    stride: int


@dataclass(frozen=True)
class Model:
    """Attributes:
    gradients: (O, I) of each matrix of a block, the bias a column of it.
    blocks: how often the block is repeated.
    convolutions: those of the model, without repetition.
    """

    name: str
    gradients: tuple[tuple[int, int], ...]
    blocks: int
    convolutions: tuple[Conv, ...] = ()

    def factors(self, blocks: int, max_dim: int) -> list[int]:
        """Sides of all factors of the first blocks, as far as they are not larger than ``max_dim``."""
        return [dim for shape in self.gradients for dim in shape if dim <= max_dim] * min(blocks, self.blocks)

    def sides(self, max_dim: int) -> list[int]:
        """Distinct sides."""
        return sorted({dim for shape in self.gradients for dim in shape if dim <= max_dim})


def _transformer(name: str, width: int, blocks: int) -> Model:
    shapes = ((3 * width, width + 1), (width, width + 1), (4 * width, width + 1), (width, 4 * width + 1))
    return Model(name, shapes, blocks)


def _bert(name: str, width: int, blocks: int) -> Model:
    shapes = ((width, width + 1),) * 4 + ((4 * width, width + 1), (width, 4 * width + 1))
    return Model(name, shapes, blocks)


_LLAMA = ((4096, 4096),) * 4 + ((11008, 4096),) * 2 + ((4096, 11008),)
_RESNET = (
    *((64, 147), (64, 64), (64, 576), (256, 64), (64, 256), (128, 256), (128, 1152), (512, 128), (128, 512)),
    *((256, 512), (256, 2304), (1024, 256), (256, 1024), (512, 1024), (512, 4608), (2048, 512), (512, 2048)),
    (1000, 2049),
)
_CONVOLUTIONS = (Conv(3, 224, 7, 2), Conv(64, 56, 3, 1), Conv(128, 28, 3, 1), Conv(256, 14, 3, 1), Conv(512, 7, 3, 1))

MODELS = {
    "gpt2": _transformer("GPT-2", 768, 12),
    "bert_large": _bert("BERT-Large", 1024, 24),
    "llama_7b": Model("Llama-7B", _LLAMA, 32),
    "squares": Model("squares", tuple((dim, dim) for dim in (768, 1024, 1600, 2048, 4096, 6400, 8192)), 1),
    "resnet50": Model("ResNet-50", _RESNET, 1, _CONVOLUTIONS),
}
