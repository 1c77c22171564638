"""How much of a model is stepped along K-FAC's directions, and what is left out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ds_kfac.model.layers import LayerSpec, parameter_shape
from ds_kfac.model.scan import Scan, numel
from ds_kfac.model.tables import tables

NAMED = 3
"""Kinds of modules that are named, the largest ones."""
UNKNOWN = "parameter", "held by no module"


@dataclass(frozen=True)
class Share:
    """Trained parameters, counted.

    Attributes:
        matrices: elements of all matrices. A table is none: an embedding, what rows are looked up in, what is
            broadcast.
        stepped: of these, those in K-FAC layers.
        curved: of these, those of layers of which a factor has more than a diagonal.
        others: elements of all parameters that are in no K-FAC layer.
        left: (kind of module, reason) -> elements of matrices in no K-FAC layer, largest first.
    """

    matrices: int
    stepped: int
    curved: int
    kinds: tuple[tuple[str, int], ...]
    others: int
    left: tuple[tuple[tuple[str, str], int], ...]

    @property
    def fraction(self) -> float:
        return self.stepped / self.matrices if self.matrices else 1.0

    @property
    def curved_fraction(self) -> float:
        return self.curved / max(1, self.matrices)

    def __str__(self) -> str:
        return (
            f"{self.fraction:.0%} of the trained matrix parameters ({self.stepped:,} of {self.matrices:,}) in "
            f"{sum(n for _, n in self.kinds)} K-FAC layers ({', '.join(f'{n} {kind}' for kind, n in self.kinds)}), "
            f"{self.curved_fraction:.0%} with curvature"
        )

    def exceptions(self) -> str:
        named = [f"{kind} {n:,} ({reason})" for (kind, reason), n in self.left[:NAMED]]
        return ", ".join(named) + (", .." if len(self.left) > NAMED else "")


def share(layers: Sequence[LayerSpec], parameters: int) -> str:
    """Text that says which part of a model's parameters the layers are."""
    ours, kinds = sum(layer.numel for layer in layers), Counter(layer.kind for layer in layers)
    return (
        f"{parameters:,} parameters, {ours:,} of them ({ours / parameters:.0%}) in {len(layers)} K-FAC layers "
        f"({', '.join(f'{n} {kind}' for kind, n in kinds.items())})"
    )


def share_of(model: nn.Module, found: Scan) -> Share:
    """Of a model, or of a stage of it, by what :func:`ds_kfac.model.scan.scan` found."""
    ours = {name for layer in found.layers for name in layer.parameters}
    has = [layer for layer in found.layers if max(layer.A.block, layer.G.block) > 1]
    curved = {name for layer in has for name in layer.parameters}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    others = other_matrices(model, found)
    matrices = {n: numel(p) for n, p in trained.items() if n in others or (n in ours and is_matrix(p))}
    reasons = {left.name: (left.kind, left.reason) for left in found.skipped}
    left: Counter[tuple[str, str]] = Counter()
    for name in matrices.keys() - ours:
        left[reasons.get(name.rpartition(".")[0], reasons.get(name, UNKNOWN))] += matrices[name]
    return Share(
        matrices=sum(matrices.values()),
        stepped=sum(size for name, size in matrices.items() if name in ours),
        curved=sum(size for name, size in matrices.items() if name in curved),
        kinds=tuple(Counter(layer.kind for layer in found.layers).items()),
        others=sum(numel(p) for name, p in trained.items() if name not in ours),
        left=tuple(left.most_common()),
    )


def other_matrices(model: nn.Module, found: Scan) -> set[str]:
    """Names of the matrices that are in no K-FAC layer, trained or not; embeddings are tables and none."""
    ours = {name for layer in found.layers for name in layer.parameters}
    held = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    held |= tables(model)
    named = dict(model.named_parameters()).items()
    others = {n: p for n, p in named if n not in ours and id(p) not in held and is_matrix(p)}
    return {name for name, parameter in others.items() if not is_broadcast(model, name, parameter)}


def is_matrix(parameter: nn.Parameter) -> bool:
    """By its shape: two sides at least, and several outputs."""
    shape = parameter_shape(parameter)
    return sum(size > 1 for size in shape) > 1 and shape[0] > 1


def is_broadcast(model: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter in no layer is made to be broadcast, with a side of 1 where a stack of matrices has none."""
    module = model.get_submodule(name.rpartition(".")[0])
    shape = parameter_shape(parameter)  # which modules of TorchScript do not give by name
    return not isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and len(shape) > 2 and 1 in shape[:-1]
