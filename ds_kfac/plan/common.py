"""Decide which layers have a common A. Pure. Some of this is known before training, the rest is
agreed on after the first captured batch.

Note: Experts of a stack. The model scan gives all experts of a stack one common A for the tokens
that enter. For inputs that the experts compute themselves, it gives each expert its own A, unless
the weight has more inputs than outputs. Where all experts have a common A, an own A for each expert
would be closer to the tokens that the expert gets. :func:`own_inputs` decides where this is worth
its memory. Stacks of one mixture that get the same rows, such as w1 and w3, share their As in
either case. If the experts have own As, these are shared expert by expert.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from ds_kfac.assignment.costs import FactorSpec, basis_bytes, packed_bytes
from ds_kfac.curvature.methods import Method
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import SHARDS

OWN_PART = 0.1
"""Own As may take this fraction of the moments' bytes in addition to common As, or
:data:`OWN_BYTES` per rank if that is more."""
OWN_BYTES = 1 << 28


def sharing_candidates(layers: Sequence[LayerSpec], method: Method) -> Mapping[str, Hashable]:
    """Return layer name -> key for the layers that may share A. Layers with equal keys may share A
    if they have the same input.

    A key has four parts: A's side; whether A includes the 1 of a bias; whether G is the identity,
    if A's decomposition then includes G's damping; and how many tensor-parallel ranks have copies
    of the layer, because a layer that is a shard has its own plan.
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

    If the experts of a stack have a common A, it has the rows of all experts in the stack of the
    factor's first layer. Any other factor has the rows of its first layer, because all of its
    layers see the same rows.
    """
    first = layers[factor.layers[0]]
    if not factor.is_A or first.part[1] == 1 or not first.product:
        return (first.name,)
    return tuple(name for name in factor.layers if layers[name].weight == first.weight)


def common_inputs(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers with one common A for all experts of a stack, where each expert had its own
    A."""
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
    """Return the layers with an own A for each expert of a stack, where all experts had a common A.

    Stacks are changed as long as the additional memory stays within a bound. The stacks whose As
    take the least memory, relative to their moments, come first. Stacks of equal cost are changed
    together or not at all, so that all blocks of the model are treated alike.

    Args:
        moments: number of fp32 tensors of a gradient's shape that are kept for a layer.
        world: number of ranks over which the state is spread.

    Returns the layers, and sentences that give the bytes and the bound for the plan's reasons.
    """
    mixtures: dict[str, list[list[LayerSpec]]] = {}  # owner of the common A -> its users
    stacks: dict[str, list[LayerSpec]] = {}
    for layer in layers:
        if layer.product and layer.part[1] > 1:
            stacks.setdefault(layer.weight, []).append(layer)
    for stack in stacks.values():
        if stack[-1].shares is not None:
            mixtures.setdefault(stack[-1].shares, []).append(stack)
    by_cost: dict[float, list[str]] = {}  # bytes of own As over moments' -> owners
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
    limit = f"{bound / world / 1e6:,.0f} MB a rank"
    left = sum(costs.values()) - taken
    reasons = []
    if with_own:
        reasons.append(
            f"own As of experts: {taken / world / 1e6:,.1f} MB more than one for all, of at most "
            f"{limit}"
        )
    if left:
        reasons.append(
            f"one A for all experts: own ones would take {left / world / 1e6:,.1f} MB more, of at "
            f"most {limit}"
        )
    return changed, tuple(reasons)
