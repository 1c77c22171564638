"""Compute EKFAC's eigenvalues in a second pass over the data.

They are the mean over sequences of (Q_G^T dW Q_A)^2, elementwise, where a sequence's dW is the sum
of g a^T over its rows (George et al. 2018, arXiv:1806.03884; Grosse et al. 2023, arXiv:2308.03296).

Shape suffixes: N sequences, T positions, O and I the sides of a layer's matrix.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ds_kfac.factors.passes import Batch, Passes
from ds_kfac.model.capture import Capture
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import LAYERS
from ds_kfac.model.rows import is_nonzero, kept_rows, pairs
from ds_kfac.ops.functional import block_product
from ds_kfac.plan.plan import Plan

ATTENTION = nn.MultiheadAttention, NonDynamicallyQuantizableLinear
"""Classes of the modules in torch's attention. The first dimension of their inputs is the
positions, whatever ``batch_first`` says."""


@torch.no_grad()
def corrected(
    passes: Passes, capture: Capture, plan: Plan, bases: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a dict from "<layer>/corrected" to eigenvalues, fp32 [O, I], for the layers that this
    rank owns. Collective.

    A layer is left out if it was called with an input whose first dimension is not the batch's
    sequences.

    Args:
        bases: tensors of this rank's eigenbases, by their names in the files.
    """
    roles = plan.assignment
    group = passes.channel.group
    specs = {spec.key: spec for spec in roles.factors}
    sums: dict[str, Tensor] = {}
    sequences = torch.zeros((), dtype=torch.float64, device=passes.device)
    for batch in passes.over("corrected eigenvalues", capture, frozenset(specs)):
        sequences += batch.sequences
        for layer in filter(correctable, plan.layers):
            vectors: dict[str, list[Tensor]] = {"A": [], "G": []}  # of the side's blocks
            for key in layer.keys:
                if key not in specs or specs[key].side.block <= 1:
                    continue  # an identity or a diagonal: there is nothing to rotate
                for k, (n, b) in enumerate(specs[key].side.groups):
                    zeros = torch.zeros(n, b, b, device=passes.device, dtype=torch.float32)
                    of_group = bases.get(f"{key}/vectors.{k}", zeros).contiguous()
                    dist.broadcast(of_group, roles.owners[key], group=group)
                    vectors[key[-1]].append(of_group)
            total = torch.zeros(layer.shape, device=passes.device, dtype=torch.float32)
            _add_squares(total, batch, layer, vectors, capture)
            owner = roles.workers[layer.name][0]
            dist.reduce(total, owner, group=group)
            if owner == passes.channel.rank:
                sums[layer.name] = sums.get(layer.name, 0.0) + total.double()
    count = passes.channel.sum(sequences)
    means = {f"{name}/corrected": (total / count).float() for name, total in sums.items()}
    return {name: mean for name, mean in means.items() if not mean.isnan().any()}


def _add_squares(
    total: Tensor,
    batch: Batch,
    layer: LayerSpec,
    vectors: Mapping[str, Sequence[Tensor]],
    capture: Capture,
) -> None:
    """Add the squared, rotated gradients of a batch's sequences to ``total``. ``total`` becomes NaN
    if the first dimension of a call's input is not the batch's sequences."""
    rows = []  # (inputs [N, T, I], output gradients [N, T, O]) of each call
    for call, gradient in zip(batch.calls, batch.gradients or (), strict=True):
        if call.layer.name == layer.name and gradient is not None:
            x = capture.unpacked(call)
            g = call.gradient_rows(gradient)
            kept = gradient.any() if call.kind.images else kept_rows(x, is_nonzero(g), call.mask)
            x_NTI, g_NTO = pairs(call, x, g, kept)
            if isinstance(call.module, ATTENTION):
                x_NTI = x_NTI.reshape(-1, batch.sequences, x_NTI.shape[-1]).transpose(0, 1)
                g_NTO = g_NTO.reshape(-1, batch.sequences, g_NTO.shape[-1]).transpose(0, 1)
            rows.append((x_NTI, g_NTO))
    if any(len(x) != batch.sequences for x, _ in rows):
        total.fill_(torch.nan)
        return
    joined = [torch.cat(parts, dim=1) for parts in zip(*rows, strict=True)]
    for x_TI, g_TO in zip(*joined, strict=True):
        x_TI = block_product([], x_TI, vectors["A"])
        g_TO = block_product([], g_TO, vectors["G"]) * batch.gain
        total += (g_TO.mT @ x_TI).square_()


def correctable(layer: LayerSpec) -> bool:
    """Return whether a layer's gradient is one sum of g a^T over a batch's rows."""
    is_plain = layer.groups == 1 and layer.part[1] == 1
    return is_plain and not LAYERS[layer.kind].needs_gradients
