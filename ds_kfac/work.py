"""What K-FAC's pieces of work cost the ranks they are given to, in seconds per step and in bytes. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ds_kfac.costs import ELEMENT_BYTES, CostModel
from ds_kfac.eigenbasis import basis_numel
from ds_kfac.factor_spec import FactorSpec, factors_by_layer
from ds_kfac.inverse import inverse_numel
from ds_kfac.layers.base import LayerSpec
from ds_kfac.side import Side


def packed_bytes(side: Side) -> int:
    """A running factor: fp32 packed triangles and its count."""
    return 4 * side.numel + 4


def kept_bytes(side: Side, method: str) -> int:
    """What workers keep of a factor: an eigenbasis, fp32 vectors, which a diagonal has none of, and values; or an
    inverse."""
    return 4 * (inverse_numel(side) if method == "inverse" else basis_numel(side) + side.dim)


def sent_bytes(side: Side, method: str) -> int:
    """The same on the wire in fp32: of an inverse its lower triangles."""
    return 4 * side.numel if method == "inverse" else kept_bytes(side, method)


@dataclass(frozen=True)
class Work:
    """All that is to be given to ranks.

    Seconds per step are amortised over the intervals. Both ends pay for what is sent, a sender for every copy; results
    leave and arrive at once, so the longer direction counts. What every rank does alike, capturing and sending batch
    sums, is left out.

    Attributes:
        held: per layer name, gradient elements on each rank; None if all ranks hold all gradients.
        moments: fp32 tensors [O, I] that a worker keeps for a layer (0, 1 or 2).
        exact_every: of so many refreshes one is exact.
        method: "eigen" or "inverse": what workers keep of a factor.
    """

    layers: Sequence[LayerSpec]
    factors: Sequence[FactorSpec]
    world: int
    held: Mapping[str, Sequence[int]] | None
    costs: CostModel
    update_interval: int
    refresh_interval: int
    moments: int = 0
    exact_every: int = 1
    method: str = "eigen"

    @cached_property
    def used(self) -> Mapping[str, tuple[FactorSpec, ...]]:
        """Factors of each layer; none for a layer of identity sides."""
        by_layer = factors_by_layer(self.factors)
        return {layer.name: tuple(by_layer.get(layer.name, {}).values()) for layer in self.layers}

    @cached_property
    def precondition(self) -> Mapping[str, float]:
        """Seconds per step on each worker of a layer."""
        return {layer.name: self.costs.precondition(layer, self.method) for layer in self.layers}

    @cached_property
    def factor(self) -> Mapping[str, float]:
        """Seconds per step on the decomposer: receive and fold batch sums, decompose."""
        return {
            factor.key: (self.costs.transfer(packed_bytes(factor.side)) + self.costs.fold(factor.side))
            / self.update_interval
            + self.costs.refresh(factor.side, self.method, exact_every=self.exact_every) / self.refresh_interval
            for factor in self.factors
        }

    @cached_property
    def travel(self) -> Mapping[str, float]:
        """Seconds per step for either end of sending one copy of an eigenbasis to another node."""
        return {
            factor.key: self.costs.transfer(sent_bytes(factor.side, self.method)) / self.refresh_interval
            for factor in self.factors
        }

    def result(self, layer: LayerSpec, width: int) -> tuple[float, float]:
        """Seconds per step to send a layer's result along a row of ``width`` consecutive ranks, and to receive it (on
        average)."""
        nbytes, within = ELEMENT_BYTES * layer.numel, min(width, self.costs.node_size) - 1
        sends = within * self.costs.transfer(nbytes, within_node=True)
        sends += (width - 1 - within) * self.costs.transfer(nbytes)
        return sends, sends / max(1, width - 1)

    def moved(self, layer: LayerSpec, rank: int) -> float:
        """Seconds per step on a layer's only worker: gather what others hold of the gradient, return the result."""
        if self.held is None:
            return 0.0
        return self.costs.transfer(2 * ELEMENT_BYTES * max(0, layer.numel - self.held[layer.name][rank]))

    def worker_bytes(self, layer: LayerSpec) -> int:
        """State of a layer on each worker, but for eigenbases, which layers may share: moments and their counter, and
        the eigenvalues of identities."""
        ones = sum(kept_bytes(side, self.method) for side in (layer.A, layer.G) if side.block == 0)
        return ones + (4 * self.moments * layer.numel + 4 if self.moments else 0)

    def loads(self, workers: Mapping[str, tuple[int, ...]], decomposers: Mapping[str, int]) -> list[float]:
        """Seconds per step of every rank; factors without a decomposer are left out."""
        loads, sent, received, to_all = [0.0] * self.world, [0.0] * self.world, [0.0] * self.world, 0.0
        for layer in self.layers:
            ranks = workers[layer.name]
            sends, receives = self.result(layer, self.world // len(ranks)) if self.held is None else (0.0, 0.0)
            to_all += receives
            for rank in ranks:
                loads[rank] += self.precondition[layer.name]
                sent[rank] += sends
                received[rank] -= receives
            if self.held is not None:
                self._pay_for_pieces(loads, layer, ranks[0])
        loads = [load + max(out, to_all + back) for load, out, back in zip(loads, sent, received, strict=True)]
        for factor in self.factors:
            if factor.key in decomposers:
                self.decompose(loads, factor, decomposers[factor.key], self.users(factor, workers))
        return loads

    def decompose(self, loads: list[float], factor: FactorSpec, rank: int, users: set[int]) -> None:
        """Add a factor's seconds to its decomposer, and its eigenbasis' to both ends of its way to other workers."""
        loads[rank] += self.factor[factor.key]
        nbytes = sent_bytes(factor.side, self.method)
        for user in users - {rank}:
            within = self.costs.same_node(rank, user)
            seconds = self.costs.transfer(nbytes, within_node=within) / self.refresh_interval
            loads[user] += seconds
            loads[rank] += seconds

    def _pay_for_pieces(self, loads: list[float], layer: LayerSpec, worker: int) -> None:
        assert self.held is not None
        missing = self.moved(layer, worker)
        if missing == 0:
            return
        loads[worker] += missing
        for rank, elements in enumerate(self.held[layer.name]):
            if rank != worker and elements:
                loads[rank] += self.costs.transfer(2 * ELEMENT_BYTES * elements)

    def memory(self, workers: Mapping[str, tuple[int, ...]], decomposers: Mapping[str, int]) -> list[int]:
        """Bytes of state of every rank: packed factors on decomposers; eigenbases, each once, and moments on workers.

        A decomposer that is no worker keeps no eigenbasis.
        """
        memory = [0] * self.world
        for layer in self.layers:
            size = self.worker_bytes(layer)
            for rank in workers[layer.name]:
                memory[rank] += size
        for factor in self.factors:
            if factor.key in decomposers:
                memory[decomposers[factor.key]] += packed_bytes(factor.side)
            size = kept_bytes(factor.side, self.method)
            for rank in self.users(factor, workers):
                memory[rank] += size
        return memory

    @staticmethod
    def users(factor: FactorSpec, workers: Mapping[str, tuple[int, ...]]) -> set[int]:
        """Ranks that precondition with a factor."""
        return {rank for layer in factor.layers for rank in workers[layer]}
