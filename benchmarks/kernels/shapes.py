"""Layers of known models, as their factors and gradients are shaped: one block, repeated."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """Attributes:
    gradients: (O, I) of each matrix of a block, the bias a column of it.
    blocks: how often the block is repeated.
    """

    name: str
    gradients: tuple[tuple[int, int], ...]
    blocks: int

    def factors(self, blocks: int, max_dim: int) -> list[int]:
        """Sides of all factors of the first blocks, up to ``max_dim``."""
        return [dim for shape in self.gradients for dim in shape if dim <= max_dim] * min(
            blocks, self.blocks
        )

    def sides(self, max_dim: int) -> list[int]:
        """Distinct sides."""
        return sorted({dim for shape in self.gradients for dim in shape if dim <= max_dim})


def _transformer(name: str, width: int, blocks: int) -> Model:
    shapes = (
        (3 * width, width + 1),
        (width, width + 1),
        (4 * width, width + 1),
        (width, 4 * width + 1),
    )
    return Model(name, shapes, blocks)


def _bert(name: str, width: int, blocks: int) -> Model:
    shapes = ((width, width + 1),) * 4 + ((4 * width, width + 1), (width, 4 * width + 1))
    return Model(name, shapes, blocks)


_LLAMA = ((4096, 4096),) * 4 + ((11008, 4096),) * 2 + ((4096, 11008),)
_RESNET = (
    *((64, 147), (64, 576), (256, 64), (128, 1152), (512, 128), (256, 2304), (1024, 256)),
    *((512, 4608), (2048, 512), (1000, 2049)),
)

MODELS = {
    "gpt2": _transformer("GPT-2", 768, 12),
    "bert_large": _bert("BERT-Large", 1024, 24),
    "llama_7b": Model("Llama-7B", _LLAMA, 32),
    "squares": Model(
        "squares", tuple((dim, dim) for dim in (768, 1024, 1600, 2048, 4096, 6400, 8192)), 1
    ),
    "resnet50": Model("ResNet-50", _RESNET, 1),
}
