"""When: which work is due at a step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Due:
    """What a step has to do beside preconditioning."""

    capture: bool
    """Fold this step's batch into the factors."""
    refresh: bool
    """Decompose the factors again."""


@dataclass(frozen=True)
class Schedule:
    """Decoupled constant intervals (Pauloski et al. 2020): factors every ``update_interval``, bases less often."""

    update_interval: int
    refresh_interval: int

    def due(self, step: int) -> Due:
        """Work due at ``step``, the number of applied steps before it. Step 0 does everything."""
        return Due(capture=step % self.update_interval == 0, refresh=step % self.refresh_interval == 0)
