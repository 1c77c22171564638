"""How much of a model K-FAC steps, and which matrices it leaves out."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from ds_kfac.model.layers import LayerSpec, parameter_shape
from ds_kfac.model.product_code import tables
from ds_kfac.model.scan import Scan, numel

NAMED = 3
"""Kinds of modules that the report names, those with the most elements."""
UNKNOWN = "parameter", "held by no module"


@dataclass(frozen=True)
class Share:
    """Counts of trained parameters.

    Attributes:
        matrices: elements of all matrices, without tables (where rows are looked up) and parameters
            that are broadcast.
        stepped: elements of matrices in K-FAC layers.
        curved: elements of matrices in K-FAC layers with a factor that is more than a diagonal.
        kinds: (kind of layer, number of layers).
        others: elements of all parameters in no K-FAC layer.
        skipped: ((kind of module, reason), elements of matrices in no K-FAC layer), the largest
            first.
    """

    matrices: int
    stepped: int
    curved: int
    kinds: tuple[tuple[str, int], ...]
    others: int
    skipped: tuple[tuple[tuple[str, str], int], ...]

    @property
    def fraction(self) -> float:
        return self.stepped / self.matrices if self.matrices else 1.0

    @property
    def curved_fraction(self) -> float:
        return self.curved / max(1, self.matrices)

    def __str__(self) -> str:
        return (
            f"{self.fraction:.0%} of the trained matrix parameters ({self.stepped:,} of "
            f"{self.matrices:,}) in "
            f"{sum(n for _, n in self.kinds)} K-FAC layers "
            f"({', '.join(f'{n} {kind}' for kind, n in self.kinds)}), "
            f"{self.curved_fraction:.0%} with curvature"
        )

    def exceptions(self) -> str:
        named = [f"{kind} {n:,} ({reason})" for (kind, reason), n in self.skipped[:NAMED]]
        return ", ".join(named) + (", .." if len(self.skipped) > NAMED else "")


def share(layers: Sequence[LayerSpec], parameters: int) -> str:
    """Text that says which part of a model's parameters the layers are."""
    ours, kinds = sum(layer.numel for layer in layers), Counter(layer.kind for layer in layers)
    return (
        f"{parameters:,} parameters, {ours:,} of them ({ours / parameters:.0%}) in {len(layers)} "
        f"K-FAC layers "
        f"({', '.join(f'{n} {kind}' for kind, n in kinds.items())})"
    )


def share_of(model: nn.Module, scan: Scan, without: Collection[str] = ()) -> Share:
    """The share of a model, or of a pipeline stage, that is in the layers of ``scan``; the layers
    ``without``, by name, have lost their curvature."""
    ours = {name for layer in scan.layers for name in layer.parameters}
    curved_layers = [layer for layer in scan.layers if max(layer.A.block, layer.G.block) > 1]
    curved = {
        name for layer in curved_layers if layer.name not in without for name in layer.parameters
    }
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    others = other_matrices(model, scan)
    matrices = {
        n: numel(p) for n, p in trained.items() if n in others or (n in ours and is_matrix(p))
    }
    reasons = {each.name: (each.kind, each.reason) for each in scan.skipped}
    skipped: Counter[tuple[str, str]] = Counter()
    for name in matrices.keys() - ours:
        skipped[reasons.get(name.rpartition(".")[0], reasons.get(name, UNKNOWN))] += matrices[name]
    return Share(
        matrices=sum(matrices.values()),
        stepped=sum(size for name, size in matrices.items() if name in ours),
        curved=sum(size for name, size in matrices.items() if name in curved),
        kinds=tuple(Counter(layer.kind for layer in scan.layers).items()),
        others=sum(numel(p) for name, p in trained.items() if name not in ours),
        skipped=tuple(skipped.most_common()),
    )


def other_matrices(model: nn.Module, scan: Scan) -> set[str]:
    """Names of the matrices in no K-FAC layer, trained or frozen; tables, such as embeddings, do
    not count."""
    ours = {name for layer in scan.layers for name in layer.parameters}
    table_ids = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    table_ids |= tables(model)
    others = set[str]()
    for name, parameter in model.named_parameters():
        if name not in ours and id(parameter) not in table_ids and is_matrix(parameter):
            module = model.get_submodule(name.rpartition(".")[0])
            # not module.weight's: modules of TorchScript have no parameters by name
            shape = parameter_shape(parameter)
            kernel = isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
            # with a side of 1 it is made to be broadcast
            if kernel or len(shape) == 2 or 1 not in shape[:-1]:
                others.add(name)
    return others


def is_matrix(parameter: nn.Parameter) -> bool:
    """Whether a parameter has the shape of a matrix: at least two sides above 1, and several
    outputs."""
    shape = parameter_shape(parameter)
    return sum(size > 1 for size in shape) > 1 and shape[0] > 1
