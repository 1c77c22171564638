"""What a run is predicted for: rates of the device and its links, and which ranks share a node."""

from dataclasses import dataclass

import numpy as np

from ds_kfac.assignment.costs import CostModel


@dataclass(frozen=True)
class Machine:
    """See the module's docstring.

    Attributes:
        costs: of K-FAC's work and of links.
        model_flops: FLOP per second that the model's forward and backward reach; None: those of a product in ``costs``.
            Products of ours in 16 bits reach them too.
    """

    costs: CostModel
    model_flops: float | None = None

    def elsewhere(self, world: int) -> np.ndarray:
        """[W, W]: whether two ranks are of different nodes."""
        node = np.arange(world) // self.costs.node_size
        return node[:, None] != node[None, :]

    def travel(self, payload: np.ndarray, collectives: float) -> np.ndarray:
        """Seconds [W] to send and receive bytes [W, W]: the longer direction, and a latency per collective."""
        elsewhere = self.elsewhere(len(payload))
        seconds = np.full(len(payload), collectives * self.costs.link_seconds)
        rates = ((elsewhere, self.costs.link_bytes), (~elsewhere, self.costs.node_bytes or self.costs.link_bytes))
        for where, rate in rates:
            moved = payload * where
            seconds += np.maximum(moved.sum(axis=0), moved.sum(axis=1)) / rate
        return seconds

    def orthogonal(self, flops: float, width: float, precision: str | None) -> float:
        """Seconds of an orthogonalization: on a GPU in fp16, unless ``precision`` is "highest"."""
        half = self.costs.beside and precision != "highest"
        return flops / max(self.costs.rate(width), (self.model_flops or 0.0) if half else 0.0)

    def model_seconds(self, multiplications: float) -> float:
        """Of a forward and backward: 2 FLOPs a multiplication forward, 4 backward."""
        return 6.0 * multiplications / (self.model_flops or self.costs.gemm_flops)
