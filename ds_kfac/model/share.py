"""Counts how much of a model K-FAC steps, and which matrices it leaves out."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ds_kfac.model.layers import LayerSpec, parameter_shape
from ds_kfac.model.product_code import tables
from ds_kfac.model.scan import Scan, numel

NAMED = 3
"""How many (kind of module, reason) pairs the report names: those with the most elements."""
UNKNOWN = "parameter", "held by no module"


@dataclass(frozen=True)
class Share:
    """Counts of trained parameters.

    Attributes:
        matrices: elements of all matrices. Tables, in which rows are looked up, and parameters that
            are broadcast are none.
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
        """The fraction of the matrices' elements that K-FAC steps."""
        return self.stepped / self.matrices if self.matrices else 1.0

    @property
    def curved_fraction(self) -> float:
        """The fraction of the matrices' elements that have curvature."""
        return self.curved / max(1, self.matrices)

    def __str__(self) -> str:
        layers = sum(count for _, count in self.kinds)
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds)
        return (
            f"{self.fraction:.0%} of the trained matrix parameters ({self.stepped:,} of "
            f"{self.matrices:,}) in {layers} K-FAC layers ({kinds}), "
            f"{self.curved_fraction:.0%} with curvature"
        )

    def exceptions(self) -> str:
        """Return text that names the largest matrices in no K-FAC layer, with the reasons."""
        named = [f"{kind} {n:,} ({reason})" for (kind, reason), n in self.skipped[:NAMED]]
        return ", ".join(named) + (", .." if len(self.skipped) > NAMED else "")


def share(layers: Sequence[LayerSpec], parameters: int) -> str:
    """Return text that says which part of a model's parameters is in its K-FAC layers.

    Args:
        layers: the layers.
        parameters: number of elements of all parameters.
    """
    ours = sum(layer.numel for layer in layers)
    counts = Counter(layer.kind for layer in layers)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return (
        f"{parameters:,} parameters, {ours:,} of them ({ours / parameters:.0%}) in {len(layers)} "
        f"K-FAC layers ({kinds})"
    )


def share_of(model: nn.Module, scan: Scan, without: Collection[str] = ()) -> Share:
    """Return the share of a model, or of a pipeline stage, that is in K-FAC layers.

    Args:
        model: the model.
        scan: its layers.
        without: names of the layers that have lost their curvature.
    """
    ours = {name for layer in scan.layers for name in layer.parameters}
    curved = {
        name
        for layer in scan.layers
        if max(layer.A.block, layer.G.block) > 1 and layer.name not in without
        for name in layer.parameters
    }
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    others = other_matrices(model, scan)
    matrices = {
        name: numel(p)
        for name, p in trained.items()
        if name in others or (name in ours and is_matrix(p))
    }
    # module or parameter -> (its kind, why it is in no layer)
    reasons = {each.name: (each.kind, each.reason) for each in scan.skipped}
    skipped: Counter[tuple[str, str]] = Counter()
    for name in matrices.keys() - ours:
        module = name.rpartition(".")[0]
        reason = reasons.get(module, reasons.get(name, UNKNOWN))
        skipped[reason] += matrices[name]
    return Share(
        matrices=sum(matrices.values()),
        stepped=sum(size for name, size in matrices.items() if name in ours),
        curved=sum(size for name, size in matrices.items() if name in curved),
        kinds=tuple(Counter(layer.kind for layer in scan.layers).items()),
        others=sum(numel(p) for name, p in trained.items() if name not in ours),
        skipped=tuple(skipped.most_common()),
    )


def other_matrices(model: nn.Module, scan: Scan) -> set[str]:
    """Return the names of the matrices in no K-FAC layer, trained or frozen.

    Tables, such as embeddings, are no matrices here.
    """
    ours = {name for layer in scan.layers for name in layer.parameters}
    in_tables: set[Tensor] = {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    in_tables |= tables(model)
    others = set[str]()
    for name, parameter in model.named_parameters():
        if name in ours or parameter in in_tables or not is_matrix(parameter):
            continue
        # the module is looked up by name, because modules of TorchScript have no attribute weight
        module = model.get_submodule(name.rpartition(".")[0])
        is_kernel = isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
        # a tensor of more dimensions with a side of 1 is made to be broadcast
        shape = parameter_shape(parameter)
        if is_kernel or len(shape) == 2 or 1 not in shape[:-1]:
            others.add(name)
    return others


def is_matrix(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has the shape of a matrix: at least two sides are longer than 1,
    the first one among them."""
    shape = parameter_shape(parameter)
    return sum(size > 1 for size in shape) > 1 and shape[0] > 1
