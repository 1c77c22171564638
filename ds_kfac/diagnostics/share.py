"""How much of a model K-FAC updates, and which matrices it leaves out."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ds_kfac.directions.kfac_adamw.matrices import (
    embeddings,
    is_matrix,
    other_matrices,
    tables_and_embeddings,
)
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.scan import Scan, numel

NAMED = 3
"""Number of left-out parameters, or kinds of modules, that the report names."""
UNKNOWN = "parameter", "held by no module"
"""Kind and reason for a matrix that the scan did not see."""


@dataclass(frozen=True)
class Share:
    """Counts of trained parameters.

    Attributes:
        matrices: number of elements of all matrices. Tables in which rows are looked up, such as
            embeddings, do not count as matrices. Neither do parameters that are broadcast.
        updated: number of elements of the matrices in K-FAC layers.
        curved: number of elements of the matrices in K-FAC layers that have a dense or blocked
            factor and have not lost their curvature.
        kinds: one ``(type of layer, number of layers)`` pair for each type of K-FAC layer.
        others: number of elements of all parameters outside of K-FAC layers.
        skipped: ``((type of module, reason), number of elements)`` pairs for the matrices outside
            of K-FAC layers, largest first.
        outside: one ``(name, number of elements)`` pair for each matrix outside of K-FAC layers,
            largest first.
        tables: one ``(name, number of elements)`` pair for each parameter that counts as a table
            because the model's code looks up rows in it, largest first. Weights of embedding
            modules are left out.
        unclear: one ``(name, number of elements)`` pair for each large parameter outside of K-FAC
            layers if neither its shape nor the module's code shows whether it is a matrix or a
            table. The largest comes first. A parameter is large if it has more elements than a bias
            can have.
    """

    matrices: int
    updated: int
    curved: int
    kinds: tuple[tuple[str, int], ...]
    others: int
    skipped: tuple[tuple[tuple[str, str], int], ...]
    outside: tuple[tuple[str, int], ...]
    tables: tuple[tuple[str, int], ...]
    unclear: tuple[tuple[str, int], ...]

    @property
    def fraction(self) -> float:
        """Fraction of the matrix elements that K-FAC updates; 1 for a model without matrices."""
        return self.updated / self.matrices if self.matrices else 1.0

    @property
    def curved_fraction(self) -> float:
        """Elements that :attr:`curved` counts, divided by the elements of all matrices."""
        return self.curved / max(1, self.matrices)

    @property
    def unclear_fraction(self) -> float:
        """Elements of unclear parameters, divided by the elements of matrices and unclear
        parameters."""
        unclear = sum(size for _, size in self.unclear)
        return unclear / max(1, self.matrices + unclear)

    def __str__(self) -> str:
        layer_count = sum(count for _, count in self.kinds)
        return (
            f"{self.fraction:.0%} of the trained matrix parameters ({self.updated:,} of "
            f"{self.matrices:,}) in {layer_count} K-FAC layers ({_listed(self.kinds)}), "
            f"{self.curved_fraction:.0%} with curvature"
        )

    def exceptions(self) -> str:
        """Name the largest matrices that K-FAC does not update, with the reasons."""
        return largest([f"{kind} {count:,} ({reason})" for (kind, reason), count in self.skipped])


def largest(texts: Sequence[str]) -> str:
    """Join the first :data:`NAMED` texts, and show whether there are more."""
    shown = list(texts[:NAMED])
    if len(texts) > NAMED:
        shown.append("..")
    return ", ".join(shown)


def named(parameters: Sequence[tuple[str, int]]) -> str:
    """Return a text that names the first :data:`NAMED` parameters of a list of ``(name, number of
    elements)`` pairs."""
    return largest([f"{name} {count:,}" for name, count in parameters])


def share(layers: Sequence[LayerSpec], parameters: int) -> str:
    """Say how many of a model's parameters are in the layers. ``parameters`` is the number of the
    model's parameters."""
    in_layers = sum(layer.numel for layer in layers)
    kinds = Counter(layer.kind for layer in layers)
    return (
        f"{parameters:,} parameters, {in_layers:,} of them ({in_layers / parameters:.0%}) in "
        f"{len(layers)} K-FAC layers ({_listed(kinds.items())})"
    )


def share_of(model: nn.Module, scan: Scan, without: Collection[str] = ()) -> Share:
    """Count the parameters of a model, or of a pipeline stage, that are in the layers of ``scan``.

    Args:
        without: names of layers that have lost their curvature.
    """
    in_layers = {name for layer in scan.layers for name in layer.parameters}
    curved = {
        name
        for layer in scan.layers
        if layer.name not in without and max(layer.A.block, layer.G.block) > 1
        for name in layer.parameters
    }
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    others = other_matrices(model, scan)
    matrices = {
        name: numel(parameter)
        for name, parameter in trained.items()
        if name in others or (name in in_layers and is_matrix(parameter))
    }
    reasons = {module.name: (module.kind, module.reason) for module in scan.skipped}
    outside = {name: size for name, size in matrices.items() if name not in in_layers}
    skipped: Counter[tuple[str, str]] = Counter()
    for name, size in outside.items():
        module_name = name.rpartition(".")[0]
        # scan.skipped has the name of the module, or of the parameter itself
        reason = reasons.get(module_name, reasons.get(name, UNKNOWN))
        skipped[reason] += size
    looked_up = tables_and_embeddings(model)
    found_in_code = looked_up - embeddings(model)
    tables = {
        name: numel(parameter)
        for name, parameter in trained.items()
        if name not in in_layers and parameter in found_in_code
    }
    widest = max((max(layer.A.dim, layer.G.dim) for layer in scan.layers), default=0)
    unclear = {
        name: numel(parameter)
        for name, parameter in trained.items()
        if name not in in_layers
        and name not in matrices
        and parameter not in looked_up
        and numel(parameter) > widest
    }
    return Share(
        matrices=sum(matrices.values()),
        updated=sum(size for name, size in matrices.items() if name in in_layers),
        curved=sum(size for name, size in matrices.items() if name in curved),
        kinds=tuple(Counter(layer.kind for layer in scan.layers).items()),
        others=sum(numel(p) for name, p in trained.items() if name not in in_layers),
        skipped=tuple(skipped.most_common()),
        outside=_largest_first(outside),
        tables=_largest_first(tables),
        unclear=_largest_first(unclear),
    )


def _largest_first(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(Counter(sizes).most_common())


def _listed(kinds: Collection[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds)
