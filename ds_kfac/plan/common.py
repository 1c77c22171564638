"""Which layers have one A in common: pure, known before training, or agreed on after the first
captured batch.

**Experts of a stack.** The scan gives the experts one A of the tokens that enter, and each its own
of what it makes of them unless that is wider than the weight. An A for each expert of the rest is
nearer to its tokens; :func:`own_inputs` says where it is worth its memory. Stacks of one mixture
that get the same rows, as w1 and w3, share them in either case: expert by expert then.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from ds_kfac.assignment.costs import FactorSpec, basis_bytes, packed_bytes
from ds_kfac.curvature.methods import Method
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import SHARDS

OWN_PART = 0.1
"""Of the moments on a rank: so much may own As take beside common ones, or :data:`OWN_BYTES` if
that is more."""
OWN_BYTES = 1 << 28


def sharing_candidates(layers: Sequence[LayerSpec], method: Method) -> Mapping[str, Hashable]:
    """Layers that may share A, and what must be equal for it: the side, whether a bias's 1 is in
    it, whether G is the identity, if its damping is part of what is kept of A, and whether other
    tensor-parallel ranks have copies: where A is a shard's, too, its plan would be the shard's."""
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
    """Names of the layers whose rows together are a factor's: of a stack's common A all that are in
    the stack of its first, else its first alone, whose rows are the others', too."""
    first = layers[factor.layers[0]]
    if not factor.is_A or first.part[1] == 1 or not first.product:
        return (first.name,)
    return tuple(name for name in factor.layers if layers[name].weight == first.weight)


def common_inputs(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """With one A for the experts of a stack that have an A each."""
    stacks: dict[str, list[LayerSpec]] = {}
    for layer in layers:
        stacks.setdefault(layer.weight, []).append(layer)
    apart = {
        name: stack[0].name
        for name, stack in stacks.items()
        if not any(layer.shares for layer in stack)
    }
    return tuple(
        replace(layer, shares=apart[layer.weight])
        if layer.name != apart.get(layer.weight, layer.name)
        else layer
        for layer in layers
    )


def own_inputs(
    layers: Sequence[LayerSpec], method: Method, *, moments: int, world: int
) -> tuple[tuple[LayerSpec, ...], tuple[str, ...]]:
    """With an A for each expert of the stacks that have one A, as far as their memory is within the
    bound: those first that take the least beside their own moments, and those of equal shapes
    together, so that all blocks are alike.

    Args:
        moments: fp32 tensors of a gradient's shape that are kept of a layer.
        world: ranks that the state is spread over.

    Returns the layers, and sentences with bytes and bound for the plan's reasons.
    """
    mixtures: dict[str, list[list[LayerSpec]]] = {}  # the layer whose A it is -> stacks
    stacks: dict[str, list[LayerSpec]] = {}
    for layer in layers:
        if layer.product and layer.part[1] > 1:
            stacks.setdefault(layer.weight, []).append(layer)
    for stack in stacks.values():
        if stack[-1].shares is not None:
            mixtures.setdefault(stack[-1].shares, []).append(stack)
    by_cost: dict[float, list[str]] = {}  # bytes of own As over those of the moments -> leaders
    costs: dict[str, int] = {}
    for leader, sharing in mixtures.items():
        A, count = sharing[0][0].A, len(sharing[0])
        costs[leader] = (count - 1) * (packed_bytes(A) + basis_bytes(A, method))
        moment_bytes = sum(4 * moments * layer.numel for stack in sharing for layer in stack)
        by_cost.setdefault(costs[leader] / max(1, moment_bytes), []).append(leader)
    bound = max(OWN_PART * sum(4 * moments * layer.numel for layer in layers), world * OWN_BYTES)
    with_own, taken = set[str](), 0
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
    limit, left = f"{bound / world / 1e6:,.0f} MB a rank", sum(costs.values()) - taken
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
