"""SP-NGD's learning rate."""

from collections.abc import Mapping
from typing import Any


class PolynomialDecay:
    """SP-NGD's learning rate (Osawa et al. 2020, arXiv:2002.06015; Osawa et al. 2019,
    arXiv:1811.12019): ``"scheduler": {"type": "PolynomialDecay", "params": {"start": 100, "end":
    3000, "power": 3.5}}``.

        rate(t) = rate_0 (1 - (t - start) / (end - start))^power   from start to end, else constant
        momentum(t) = momentum_0 rate(t) / rate_0                  if "ties_momentum"

    The papers' velocity holds the rate, v <- m (rate / last rate) v - rate g, W <- W + v. torch's
    does not, W <- W - rate b with b <- m b + g, which is the same.

    Args:
        optimizer: torch's, or DeepSpeed's wrapper of one.
        start, end: steps between which the rate falls. Training may end before ``end``.
        power: 1 is linear.
        ties_momentum: whether the momentum of groups that have one falls with the rate.

    Raises ValueError if the steps or the power cannot be.
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
        inner = getattr(optimizer, "optimizer", optimizer)
        self.optimizer, self.start, self.end, self.power = inner, start, end, power
        self.ties_momentum, self.steps = ties_momentum, 0
        self.first = [(float(group["lr"]), group.get("momentum")) for group in inner.param_groups]
        self._set()

    @property
    def part(self) -> float:
        """Fraction of the first rate that holds now."""
        done = (self.steps - self.start) / (self.end - self.start)
        return (1 - min(max(done, 0.0), 1.0)) ** self.power

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by an optimizer step, or to a given one."""
        self.steps = self.steps + 1 if last_batch_iteration is None else last_batch_iteration
        self._set()

    def get_lr(self) -> list[float]:
        """The rate of every group."""
        return [rate * self.part for rate, _ in self.first]

    get_last_lr = get_lr

    @property
    def last_batch_iteration(self) -> int:
        """The number of steps, by the name that DeepSpeed's schedulers have for it."""
        return self.steps

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "first": self.first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, first = state["steps"], [tuple(pair) for pair in state["first"]]
        # else the save has other groups, and the config's rates hold
        if len(first) == len(self.first):
            self.first = first
        self._set()

    def _set(self) -> None:
        for group, (rate, momentum) in zip(self.optimizer.param_groups, self.first, strict=True):
            group["lr"] = rate * self.part
            if self.ties_momentum and momentum is not None:
                group["momentum"] = momentum * self.part
