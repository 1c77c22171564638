"""Decide which layers share one A. All functions are pure. Before training, the experts of a stack
may be given a common A. Other layers can only share an A after the first captured batch has shown
that they have the same input.

Note: Experts of a stack. A stack is one parameter that holds one matrix for each expert of a
mixture. If its matrices multiply the tokens that enter the mixture, the model scan gives all of
them one common A. If they multiply inputs that the experts compute themselves, the model scan gives
each matrix its own A, unless the matrices have more inputs than outputs. A matrix's own A always
fits better, because it has only the tokens that the expert gets. As long as memory allows,
:func:`own_inputs` replaces the common A of a stack by one A for each of its matrices. Stacks of one
mixture that get the same rows, such as w1 and w3, share their common A, or the A of each expert.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from ds_kfac.assignment.costs import FactorSpec, basis_bytes, packed_bytes
from ds_kfac.curvature.methods import Method
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import SHARDS

OWN_PART = 0.1
"""If each expert has its own A, the additional factors may take this fraction of the bytes of all
moments, or :data:`OWN_BYTES` per rank if that is more."""
OWN_BYTES = 1 << 28


def sharing_candidates(layers: Sequence[LayerSpec], method: Method) -> Mapping[str, Hashable]:
    """Return a dict from layer name to a key, for the layers that may share an A. Layers with equal
    keys share an A if they have the same input.

    A key has four parts: the side of A; whether A includes the 1 of a bias; whether G is the
    identity and the method therefore includes G's damping in A's decomposition; and the number of
    tensor-parallel ranks that have a copy of the layer, so that a shard never shares an A with a
    copied layer.
    """
    return {
        layer.name: (
            layer.A,
            layer.bias is not None,
            method.damps_identity and layer.G.block == 0,
            layer.copies,
        )
        for layer in layers
        if layer.part[1] == 1 and layer.kind in ("Linear", "Conv1D", *SHARDS) and layer.A.block
    }


def rows_from(factor: FactorSpec, layers: Mapping[str, LayerSpec]) -> tuple[str, ...]:
    """Return the names of the layers whose rows together are a factor's rows.

    A common A of a stack's experts has the rows of all experts. If other stacks share it too, only
    the rows of its first layer's stack count. Any other factor has the rows of its first layer,
    because all of its layers see the same rows.
    """
    first = layers[factor.layers[0]]
    if not factor.is_A or first.part[1] == 1 or not first.product:
        return (first.name,)
    return tuple(name for name in factor.layers if layers[name].weight == first.weight)


def common_inputs(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers, changed so that the experts of every stack share a common A."""
    stacks: dict[str, list[LayerSpec]] = {}
    for layer in layers:
        stacks.setdefault(layer.weight, []).append(layer)
    apart = {
        name: stack[0].name
        for name, stack in stacks.items()
        if not any(layer.shares for layer in stack)
    }

    def with_common_input(layer: LayerSpec) -> LayerSpec:
        leader = apart.get(layer.weight, layer.name)
        return layer if layer.name == leader else replace(layer, shares=leader)

    return tuple(with_common_input(layer) for layer in layers)


def own_inputs(
    layers: Sequence[LayerSpec], method: Method, *, moments: int, world: int
) -> tuple[tuple[LayerSpec, ...], tuple[str, ...]]:
    """Return the layers, changed so that some stacks whose experts shared a common A have an A for
    each expert.

    Stacks are changed as long as the additional memory stays within a bound. The stacks for which
    one A per expert takes the least memory, relative to their moments, are changed first. Stacks of
    equal cost are either all changed or all left as they are, so that all blocks of the model are
    treated alike.

    Args:
        moments: number of fp32 tensors of a gradient's shape that are kept for a layer.
        world: number of ranks over which the state is spread.

    Returns the layers, and texts for ``Plan.reasons`` that give the additional bytes and the bound.
    """
    mixtures: dict[str, list[list[LayerSpec]]] = {}  # first layer with the A -> stacks with it
    stacks: dict[str, list[LayerSpec]] = {}
    for layer in layers:
        if layer.product and layer.part[1] > 1:
            stacks.setdefault(layer.weight, []).append(layer)
    for stack in stacks.values():
        if stack[-1].shares is not None:
            mixtures.setdefault(stack[-1].shares, []).append(stack)
    by_cost: dict[float, list[str]] = {}  # bytes of A / bytes of moments -> first layers
    costs: dict[str, int] = {}
    for leader, sharing in mixtures.items():
        A = sharing[0][0].A
        count = len(sharing[0])
        costs[leader] = (count - 1) * (packed_bytes(A) + basis_bytes(A, method))
        moment_bytes = sum(4 * moments * layer.numel for stack in sharing for layer in stack)
        by_cost.setdefault(costs[leader] / max(1, moment_bytes), []).append(leader)
    bound = max(OWN_PART * sum(4 * moments * layer.numel for layer in layers), world * OWN_BYTES)
    with_own: set[str] = set()
    taken = 0
    for _, leaders in sorted(by_cost.items()):
        more = sum(costs[leader] for leader in leaders)
        if taken + more <= bound:
            with_own.update(leaders)
            taken += more
    shares: dict[str, str | None] = {}
    for leader in with_own:
        first, *others = mixtures[leader]
        shares |= dict.fromkeys([layer.name for layer in first])
        shares |= {
            layer.name: expert.name
            for stack in others
            for layer, expert in zip(stack, first, strict=True)
        }
    changed = tuple(
        replace(layer, shares=shares[layer.name]) if layer.name in shares else layer
        for layer in layers
    )
    limit = f"{bound / world / 1e6:,.0f} MB"
    left = sum(costs.values()) - taken
    reasons = []
    if with_own:
        reasons.append(
            f"each expert has its own A, which takes {taken / world / 1e6:,.1f} MB per rank more "
            f"than a common A would; the limit is {limit}"
        )
    if left:
        reasons.append(
            f"experts share one A: an A for each expert would take {left / world / 1e6:,.1f} MB "
            f"per rank more; the limit is {limit}"
        )
    return changed, tuple(reasons)
