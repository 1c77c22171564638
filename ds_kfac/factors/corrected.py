"""EKFAC's eigenvalues: second moments of gradients in the eigenbasis, in place of products of the factors' eigenvalues.

    per token       E over loss terms n of     (Q_G^T g_n a_n^T Q_A)^2 = (Q_G^T g_n)^2 (Q_A^T a_n)^2 ^T
    per sequence    E over sequences of        (sum over its terms of Q_G^T g_n a_n^T Q_A)^2

George et al. 2018 (arXiv:1806.03884) have the second, as tools for influence do (Grosse et al. 2023, arXiv:2308.03296).
Every rank has rows of all layers; layer by layer the bases are broadcast and the sums reduced to an owner.

Shape suffixes: N sequences, T positions, O and I the sides of a layer's matrix.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ds_kfac.assignment.assign import Assignment
from ds_kfac.comm.message import Channel
from ds_kfac.curvature.eigen import Eigenbasis, LayerBasis
from ds_kfac.factors.files import KINDS
from ds_kfac.log import logger
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.rows import Call, RowSums
from ds_kfac.ops.functional import block_product

ATTENTION = nn.MultiheadAttention, NonDynamicallyQuantizableLinear
"""Modules inside torch's attention, whose rows have positions first, whatever its ``batch_first``."""
CHUNK = 1 << 26
"""Most elements of sequences' products at a time (256 MB), unless one sequence has more."""


def squares(x_NTI: Tensor, g_NTO: Tensor, basis: LayerBasis, *, sequences: bool = True) -> tuple[Tensor, Tensor | None]:
    """(sum over terms, sum over sequences), fp32 [O, I]; None for the second if rows are not in ``sequences``.

    Cost: R (I^2 + O^2 + O I) for R = N T rows, N T O I for the sequences.
    """
    (N, T, I), O = x_NTI.shape, g_NTO.shape[-1]  # noqa: E741
    x_NTI = block_product([], x_NTI.reshape(-1, I), basis.A.vectors).view(N, T, I)
    g_NTO = block_product([], g_NTO.reshape(-1, O), basis.G.vectors).view(N, T, O)
    token = g_NTO.square().flatten(0, 1).mT @ x_NTI.square().flatten(0, 1)
    if not sequences:
        return token, None
    if T == 1:
        return token, token
    total = torch.zeros_like(token)
    for x, g in zip(x_NTI.split(step := max(1, CHUNK // (O * I))), g_NTO.split(step), strict=True):
        total += (g.mT @ x).square_().sum(dim=0)
    return token, total


class Corrected:
    """The sums of a pass over the data.

    Args:
        layers: layers with both bases; no grouped maps, no norms.
        roles: a layer's first worker keeps its sums, a factor's eigen worker has its basis.
        bases: factor key -> eigenbasis, for factors decomposed on this rank.
        keys: layer name -> side -> factor key.

    Attributes:
        sums: "<layer>/corrected.<kind>" -> fp64 [O, I], for this rank's layers. NaN for rows without sequences.
    """

    def __init__(
        self, layers: Sequence[LayerSpec], roles: Assignment, bases: Mapping[str, Eigenbasis],
        keys: Mapping[str, Mapping[str, str]], rows: RowSums, channel: Channel, device: torch.device,
    ) -> None:  # fmt: skip
        self.layers, self.roles, self.bases, self.keys = layers, roles, bases, keys
        self.rows, self.channel, self.device = rows, channel, device
        self.sums: dict[str, Tensor] = {}
        self._warned = False

    @torch.no_grad()
    def add(self, calls: Sequence[tuple[Call, Tensor | None]], seed: float, examples: int, positions: int) -> None:
        """Add a batch of every rank; ranks without one add nothing. Collective.

        Args:
            calls: (call, gradient of its output), in the order in which they ran.
            examples, positions: number of sequences in the batch, and of positions in all of them.
        """
        of_layer: dict[str, list[tuple[Call, Tensor]]] = {}
        for call, gradient in calls:
            if gradient is not None and call.x is not None and call.x.numel() and "G" in call.sides:
                of_layer.setdefault(call.layer.name, []).append((call, gradient))
        for layer in reversed(self.layers):  # in a backward's order: the first layer's rows give the number of terms
            basis = LayerBasis(*(self._basis(layer, side) for side in "GA"))
            batch = [torch.zeros(layer.shape, device=self.device, dtype=torch.float32) for _ in KINDS]
            pairs, ordered = self._pairs(of_layer.get(layer.name, ()), seed, examples, positions)
            for x_NTI, g_NTO in pairs:
                token, sequence = squares(x_NTI, g_NTO, basis, sequences=ordered)
                batch[0] += token
                batch[1] += torch.nan if sequence is None else sequence
            total, owner = torch.stack(batch), self.roles.workers[layer.name][0]
            dist.reduce(total, owner, group=self.channel.group)
            for kind, part in zip(KINDS, total, strict=True) if owner == self.channel.rank else ():
                name = f"{layer.name}/corrected.{kind}"
                self.sums[name] = self.sums[name] + part if name in self.sums else part.double()
        self.rows.counted.clear()

    def _pairs(
        self, calls: Sequence[tuple[Call, Tensor]], seed: float, examples: int, positions: int
    ) -> tuple[list[tuple[Tensor, Tensor]], bool]:
        """(x, g) of a layer's calls, and whether they are in sequences. If so all calls are joined into one pair, as a
        sequence's gradient is the sum over its calls."""
        pairs, ordered = list[tuple[Tensor, Tensor]](), True
        shape = examples, positions // max(1, examples)
        square = shape[0] == shape[1] > 1
        for call, gradient in reversed(calls):
            x, g = self.rows.pairs(call, call.gradient_of(gradient), seed)
            rows = call.rows
            first = isinstance(call.module, ATTENTION) or (tuple(x.shape[:2]) == shape[::-1] and not square)
            transposed = first and rows.mask is None and rows.examples == 0
            # an expert's rows, of some sequences only, are not flattened sequences
            flat = len(x) != examples and x.shape[1] == 1 and call.select is None
            if transposed or (flat and len(x) == positions):
                sides = shape[::-1] if transposed else shape
                if ordered := ordered and x.shape[:2].numel() == positions:
                    x, g = (rows.reshape(*sides, rows.shape[-1]) for rows in (x, g))
                    x, g = (rows.transpose(0, 1) if transposed else rows for rows in (x, g))
            # ambiguous: rows of one sequence after another, or of one position after another
            either = square and len(calls) % examples == 0 and x.shape[1] == 1
            ordered &= len(x) == examples and call.select is None and not either
            if rows.doubt and not self._warned:
                self._warned = True
                logger.warning(
                    f"ds_kfac.fit: {call.layer.name} gets rows {list(call.shape[:-1])}: {rows.doubt}. If positions "
                    "come first, its corrected eigenvalues per sequence are wrong; give batches of another size "
                    "(shown once, for the first such layer)"
                )
            pairs.append((x, g))
        pieces = [call.rows.piece for call, _ in reversed(calls) if call.rows.piece is not None]
        if pairs and len(pieces) == len(pairs):  # slices of the batch, which may cut sequences
            places = torch.cat([piece.rows(*shape) for piece in pieces])
            counts = (places // shape[1]).bincount(minlength=examples)
            if ordered := bool((counts == counts[0]).all()):
                order = places.argsort(stable=True).to(self.device)
                x, g = (torch.cat([part.flatten(0, 1) for part in side])[order] for side in zip(*pairs, strict=True))
                pairs = [(x.view(examples, -1, x.shape[-1]), g.view(examples, -1, g.shape[-1]))]
            return pairs, ordered
        if ordered and len(pairs) > 1:
            xs, gs = zip(*pairs, strict=True)
            pairs = [(torch.cat(xs, dim=1), torch.cat(gs, dim=1))]
        return pairs, ordered

    def _basis(self, layer: LayerSpec, side: str) -> Eigenbasis:
        """Eigenvectors of a side, broadcast from the rank that has them. Collective."""
        shape, key = getattr(layer, side), self.keys[layer.name].get(side)
        if key is None or shape.block < 2:
            return Eigenbasis((), torch.ones(0, device=self.device, dtype=torch.float32))
        if key in self.bases:
            vectors = tuple(x.to(self.device) for x in self.bases[key].vectors)
        else:
            vectors = tuple(torch.empty(n, b, b, device=self.device, dtype=torch.float32) for n, b in shape.groups)
        for tensor in vectors:
            dist.broadcast(tensor, self.roles.eigen_workers[key], group=self.channel.group)
        return Eigenbasis(vectors, torch.ones(0, device=self.device, dtype=torch.float32))
