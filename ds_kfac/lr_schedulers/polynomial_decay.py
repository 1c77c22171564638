"""SP-NGD's learning-rate scheduler."""

from collections.abc import Mapping
from typing import Any


class PolynomialDecay:
    """Set the learning rate of SP-NGD.

        "scheduler": {
            "type": "PolynomialDecay",
            "params": {"start": 100, "end": 3000, "power": 3.5}
        }

    Sources: Osawa et al. 2020 (arXiv:2002.06015); Osawa et al. 2019 (arXiv:1811.12019).

        rate(t) = rate_0 (1 - (t - start) / (end - start))^power   from start to end, else constant
        momentum(t) = momentum_0 rate(t) / rate_0                  if "ties_momentum"

    In the papers the velocity v includes the learning rate:
    v <- m (rate / previous rate) v - rate g, then W <- W + v. In torch the buffer b does not
    include it: b <- m b + g, then W <- W - rate b. The weights are the same, because v = -rate b.

    Args:
        optimizer: a torch optimizer, or DeepSpeed's wrapper of one.
        start: step at which the learning rate begins to fall.
        end: step at which the learning rate reaches 0. Training may end before this step.
        power: exponent of the decay; 1 is linear.
        ties_momentum: whether momentum falls in proportion to the learning rate, in each group that
            has a momentum.

    Attributes:
        steps: number of steps taken.
        first: initial learning rate and momentum of every parameter group.

    Raises:
        ValueError: ``start`` is negative or not below ``end``, or ``power`` is negative.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        end: float,
        start: float = 0,
        power: float = 1.0,
        ties_momentum: bool = False,
    ) -> None:
        if not 0 <= start < end or power < 0:
            raise ValueError(
                f"PolynomialDecay: needs 0 <= start < end and power >= 0, got start {start}, end "
                f"{end}, power {power}"
            )
        self.optimizer = getattr(optimizer, "optimizer", optimizer)
        self.start = start
        self.end = end
        self.power = power
        self.ties_momentum = ties_momentum
        self.steps = 0
        self.first = [
            (float(group["lr"]), group.get("momentum")) for group in self.optimizer.param_groups
        ]
        self._set()

    @property
    def part(self) -> float:
        """The current learning rate as a fraction of the first one."""
        progress = (self.steps - self.start) / (self.end - self.start)
        return (1 - min(max(progress, 0.0), 1.0)) ** self.power

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one step, or to step ``last_batch_iteration`` if this number is given."""
        self.steps = self.steps + 1 if last_batch_iteration is None else last_batch_iteration
        self._set()

    def get_lr(self) -> list[float]:
        """Return the learning rate of every parameter group."""
        return [rate * self.part for rate, _ in self.first]

    get_last_lr = get_lr

    @property
    def last_batch_iteration(self) -> int:
        """The number of steps, under the name that DeepSpeed's schedulers use."""
        return self.steps

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "first": self.first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        first = [tuple(pair) for pair in state["first"]]
        # if the checkpoint has other groups, keep the learning rates of the config
        if len(first) == len(self.first):
            self.first = first
        self._set()

    def _set(self) -> None:
        for group, (rate, momentum) in zip(self.optimizer.param_groups, self.first, strict=True):
            group["lr"] = rate * self.part
            if self.ties_momentum and momentum is not None:
                group["momentum"] = momentum * self.part
