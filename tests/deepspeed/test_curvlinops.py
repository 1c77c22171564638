"""A, G and EKFAC's corrected eigenvalues of an engine are those of the library curvlinops (Dangel
et al.)."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from curvlinops import EKFACLinearOperator, KFACLinearOperator
from torch import Tensor, nn

from tests import spread
from tests.deepspeed.modes import Mode
from tests.deepspeed.runs import build
from tests.deepspeed.test_numpy import Mlp
from tests.models import cross_entropy, make_batch, make_net
from tests.ranks import of_ranks
from tests.spread import Variation, difference

ROWS, LAYERS = 40, ("first", "middle", "head")
STILL = {"type": "SGD", "params": {"lr": 0.0}}
KFAC = {
    "factor": {"rows": "all", "update_interval": 1000},
    "eigenbasis": {"refresh_interval": 1000},
    "burn_in": {"steps": 0},
    "preconditioner": {"eigenvalues": "corrected"},
}


def data() -> tuple[Tensor, Tensor]:
    x, y = make_batch(0, ROWS, tokens=1)
    return x.flatten(0, 1), y.flatten()


@patch("ds_kfac.directions.kfac_gradient.DECAY", 0.9999)
def matrices_of_an_engine(stage: int) -> dict[str, Tensor]:
    """Of an engine that captures the whole batch at its first step and then, at rate 0, sees it row
    by row.

    The first step makes A, G and the eigenbases. Corrected eigenvalues S are a mean over steps of N
    R^2: that of the batch's gradient, then those of N single rows. Without the first, and over N,
    it is the mean over rows of R^2.
    """
    mode = Mode("still", stage, clip=0.0, kfac=KFAC, inner=STILL)
    engine = build(mode, model=make_net(Mlp))
    kfac, (x, y) = engine.kfac.preconditioner, data()

    def step(rows: slice) -> dict[str, Tensor]:
        engine.backward(cross_entropy(engine(x[rows]), y[rows]))
        engine.step()
        moments = {name: state.moments for name, state in kfac.state.items()}
        return {name: own.second_OI.clone() for name, own in moments.items()}

    rank, part = dist.get_rank(), ROWS // dist.get_world_size()
    batch = step(slice(rank * part, (rank + 1) * part))
    for row in range(ROWS):
        rows = step(slice(row, row + 1))  # on both ranks: the gradient is this row's
    found = {f"{n} S": ((ROWS + 1) * rows[n] - batch[n]) / ROWS**2 for n in rows}
    for key, factor in kfac.curvature.factors.items():
        found[key.replace("/", " ")] = factor.side.blocks(factor.packed_P)[0][0]
    return {name: value for of_rank in of_ranks(found) for name, value in of_rank.items()}


def by_curvlinops(start: dict[str, Tensor], variation: Variation) -> dict[str, Tensor]:
    x, y = variation.rows(*data())
    model = Mlp()
    model.load_state_dict(start)
    batches = [(x.to(variation.dtype(x.dtype)), y)]
    arguments = model, nn.CrossEntropyLoss(), list(model.parameters()), batches
    options = {
        "fisher_type": "empirical",
        "separate_weight_and_bias": False,
        "check_deterministic": False,
    }
    kfac = KFACLinearOperator(*arguments, **options)
    ekfac = EKFACLinearOperator(*arguments, **options)
    kfac.compute_kronecker_factors()
    ekfac.compute_eigenvalue_correction()
    factors, corrected = kfac.state_dict(), ekfac.state_dict()["corrected_eigenvalues"]
    found = {}
    for name in LAYERS:
        S = corrected[name]
        found[f"{name} A"] = factors["input_covariances"][name]
        found[f"{name} G"] = factors["gradient_covariances"][name]
        # without a bias: by parameter
        found[f"{name} S"] = S if isinstance(S, Tensor) else next(iter(S.values()))
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_engines_have_curvlinops_matrices(stage):
    own = matrices_of_an_engine(stage)
    start = {name: p.detach().clone() for name, p in make_net(Mlp).named_parameters()}
    for what, value in own.items():
        zero = {what: torch.zeros_like(value)}
        found = spread.expected(
            lambda variation, what=what: {what: by_curvlinops(start, variation)[what]}, zero
        )
        assert found.spread < 1e-2, "the bound must mean something"
        off = difference({what: value}, found.weights, zero)
        assert not spread.within(what, off, found.bound)
    assert own.keys() == {f"{name} {which}" for name in LAYERS for which in "AGS"}
