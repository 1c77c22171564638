"""The pieces of work: factors, separate from layers as two layers that see one input have one A; and what each costs a
rank that it is given to, in seconds per step and in bytes. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ds_kfac.assignment.costs import ELEMENT_BYTES, CostModel
from ds_kfac.curvature.factor import Side
from ds_kfac.curvature.methods import EIGEN, Method
from ds_kfac.model.layers import LayerSpec, key_of


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


def packed_bytes(side: Side) -> int:
    """A running factor: fp32 packed triangles and its count."""
    return 4 * side.numel + 4


def kept_bytes(side: Side, method: Method) -> int:
    """What workers keep of a factor, in fp32."""
    return 4 * method.numel(side)


def sent_bytes(side: Side, method: Method) -> int:
    """The same on the wire in fp32."""
    return 4 * method.wire_numel(side)


@dataclass(frozen=True)
class Work:
    """Cost of every task that can be assigned to a rank.

    Seconds per step are amortised over the intervals. Both ends pay for what is sent, a sender for every copy; results
    leave and arrive at once, so the longer direction counts. What every rank does alike, capturing and sending batch
    sums, is left out.

    Attributes:
        held: per layer name, gradient elements on each rank; None if all ranks hold all gradients.
        moments: fp32 tensors [O, I] that a worker keeps for a layer (0, 1 or 2).
        method: what workers keep of a factor.
    """

    layers: Sequence[LayerSpec]
    factors: Sequence[FactorSpec]
    world: int
    held: Mapping[str, Sequence[int]] | None
    costs: CostModel
    update_interval: int
    refresh_interval: int
    moments: int = 0
    method: Method = EIGEN

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
        """Seconds per step on the eigen worker: receive and fold batch sums, decompose."""
        return {
            factor.key: (self.costs.transfer(packed_bytes(factor.side)) + self.costs.fold(factor.side))
            / self.update_interval
            + self.costs.decompose(factor.side, self.method) / self.refresh_interval
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
        """State of a layer on each worker, except eigenbases, which layers may share: moments and their counter, and
        the eigenvalues of identities."""
        ones = sum(kept_bytes(side, self.method) for side in (layer.A, layer.G) if side.block == 0)
        return ones + self.moment_bytes(layer)

    def moment_bytes(self, layer: LayerSpec) -> int:
        return 4 * self.moments * layer.numel + 4 if self.moments else 0

    def loads(self, workers: Mapping[str, tuple[int, ...]], eigen_workers: Mapping[str, int]) -> list[float]:
        """Seconds per step of every rank; factors without an eigen worker are left out."""
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
            if factor.key in eigen_workers:
                self.decompose(loads, factor, eigen_workers[factor.key], self.users(factor, workers))
        return loads

    def decompose(self, loads: list[float], factor: FactorSpec, rank: int, users: set[int]) -> None:
        """Add a factor's seconds to its eigen worker, and its eigenbasis' to both ends of its way to other workers."""
        loads[rank] += self.factor[factor.key]
        others, nbytes = users - {rank}, sent_bytes(factor.side, self.method)
        near, far = (self.costs.transfer(nbytes, within_node=w) / self.refresh_interval for w in (True, False))
        start = rank - rank % self.costs.node_size
        node = range(start, start + self.costs.node_size)
        for user in others:
            loads[user] += near if user in node else far
        at_home = sum(user in node for user in others)
        loads[rank] += at_home * near + (len(others) - at_home) * far

    def _pay_for_pieces(self, loads: list[float], layer: LayerSpec, worker: int) -> None:
        assert self.held is not None
        missing = self.moved(layer, worker)
        if missing == 0:
            return
        loads[worker] += missing
        for rank, elements in enumerate(self.held[layer.name]):
            if rank != worker and elements:
                loads[rank] += self.costs.transfer(2 * ELEMENT_BYTES * elements)

    def state(
        self, workers: Mapping[str, tuple[int, ...]], eigen_workers: Mapping[str, int]
    ) -> Mapping[str, Sequence[int]]:
        """Kind -> bytes of state of every rank: packed factors on eigen workers; eigenbases, each once, and moments
        with their counter on workers. An eigen worker that is no worker keeps no eigenbasis."""
        found = {kind: [0] * self.world for kind in ("factors", "eigenbases", "moments")}
        for layer in self.layers:
            moments = self.moment_bytes(layer)
            ones = self.worker_bytes(layer) - moments
            for rank in workers[layer.name]:
                found["eigenbases"][rank] += ones
                found["moments"][rank] += moments
        for factor in self.factors:
            if factor.key in eigen_workers:
                found["factors"][eigen_workers[factor.key]] += packed_bytes(factor.side)
            size = kept_bytes(factor.side, self.method)
            for rank in self.users(factor, workers):
                found["eigenbases"][rank] += size
        return found

    def memory(self, workers: Mapping[str, tuple[int, ...]], eigen_workers: Mapping[str, int]) -> list[int]:
        """Bytes of :meth:`state` of every rank."""
        return [sum(kinds) for kinds in zip(*self.state(workers, eigen_workers).values(), strict=True)]

    def beside(self, workers: Mapping[str, tuple[int, ...]], eigen_workers: Mapping[str, int]) -> list[int]:
        """Bytes that a step takes of every rank beside the state, without messages: sums of the factors that it
        averages, gradients of its layers and what they become."""
        found = [0] * self.world
        for factor in self.factors:
            found[eigen_workers[factor.key]] += ELEMENT_BYTES * factor.side.numel
        for layer in self.layers:
            for rank in workers[layer.name]:
                found[rank] += 2 * ELEMENT_BYTES * layer.numel
        return found

    @staticmethod
    def users(factor: FactorSpec, workers: Mapping[str, tuple[int, ...]]) -> set[int]:
        """Ranks that precondition with a factor."""
        return {rank for layer in factor.layers for rank in workers[layer]}
