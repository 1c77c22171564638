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
    """Return the layers that may share A: layer name -> key. Layers with equal keys may share A if
    they have the same input.

    The key has A's side; whether it includes the 1 of a bias; whether G is the identity, if G's
    damping is then part of A's decomposition; and whether other tensor-parallel ranks have copies
    of the layer, because a layer that is a shard has a plan of its own.
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

    A common A of a stack's experts has the rows of all experts in the stack of the factor's first
    layer. Any other factor has the rows of its first layer, which all of its layers see.
    """
    first = layers[factor.layers[0]]
    if not factor.is_A or first.part[1] == 1 or not first.product:
        return (first.name,)
    return tuple(name for name in factor.layers if layers[name].weight == first.weight)


def common_inputs(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers with one A for all experts of a stack, where they had an A each."""
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
    """Return the layers with an A for each expert of a stack, where the experts had one A for all.

    This is done as long as the additional memory is within a bound. The stacks whose As take the
    least memory, compared with their moments, come first. Stacks of equal shapes are changed
    together or not at all, so that all blocks of the model are treated alike.

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
