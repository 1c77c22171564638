"""What K-FAC keeps on a rank, measured."""

from typing import Any


def nbytes_of(kfac: Any) -> tuple[int, int]:
    """Bytes of a preconditioner's factors and eigenbases, and of its moments."""
    states = kfac.state.values()
    bases = {id(x): x.nbytes for state in states for x in (state.A, state.G) if x}
    factors = sum(factor.nbytes for factor in kfac.curvature.factors.values())
    return factors + sum(bases.values()), sum(state.moments.nbytes for state in states if state.moments is not None)
