"""The factors of a plan, separate from layers: two layers that see the same input have one A."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_kfac.curvature.side import Side
from ds_kfac.model.layers.base import LayerSpec, key_of


@dataclass(frozen=True)
class FactorSpec:
    """A factor that some rank reduces, averages and decomposes. Identity sides have none.

    Attributes:
        key: "<layer>/A" or "<layer>/G", after the first layer that has it.
        side: width and structure.
        layers: names of the layers whose side it is; several if they share their input.
    """

    key: str
    side: Side
    layers: tuple[str, ...]

    @property
    def is_A(self) -> bool:
        return self.key.endswith("/A")


def factor_specs(layers: Sequence[LayerSpec], shared: Sequence[Sequence[str]] = ()) -> tuple[FactorSpec, ...]:
    """All factors, in module order, A before G. Layers that name another one in ``shares`` have its A.

    Args:
        shared: more groups of names of layers that see one input; the first of a group names the factor.
    """
    leader = {name: group[0] for group in shared for name in group}
    users: dict[str, list[str]] = {}
    sides: dict[str, Side] = {}
    for layer in layers:
        for which, side in (("A", layer.A), ("G", layer.G)):
            if side.block == 0:
                continue
            owner = leader.get(layer.name) or layer.shares or layer.name
            key = key_of(owner if which == "A" else layer.name, which)
            assert sides.setdefault(key, side) == side, f"{key} and {layer.name} share an input of another kind"
            users.setdefault(key, []).append(layer.name)
    return tuple(FactorSpec(key, sides[key], tuple(users[key])) for key in users)


def rows_from(factor: FactorSpec, layers: Mapping[str, LayerSpec]) -> tuple[str, ...]:
    """Names of the layers whose rows together are a factor's: of a stack's common A all that are in the stack of its
    first, else its first alone, whose rows are the others', too."""
    first = layers[factor.layers[0]]
    if not factor.is_A or first.part[1] == 1 or not first.product:
        return (first.name,)
    return tuple(name for name in factor.layers if layers[name].weight == first.weight)


def factors_by_layer(factors: Sequence[FactorSpec]) -> Mapping[str, Mapping[str, FactorSpec]]:
    """Layer name -> {"A": .., "G": ..}, without identity sides."""
    found: dict[str, dict[str, FactorSpec]] = {}
    for factor in factors:
        for layer in factor.layers:
            found.setdefault(layer, {})["A" if factor.is_A else "G"] = factor
    return found
