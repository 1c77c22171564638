"""A, G and EKFAC's corrected eigenvalues of an engine are those of the library curvlinops (Dangel
et al.)."""

import functools
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from curvlinops import EKFACLinearOperator, KFACLinearOperator
from torch import Tensor, nn

from tests import spread
from tests.deepspeed.still import still_engine
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch, make_net
from tests.ranks import run_ranks
from tests.spread import Variation, difference

pytestmark = pytest.mark.distributed
WORLD, ROWS = 2, 40


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(FEATURES, 11), nn.Linear(11, 7, bias=False)
        self.head = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Cnn(nn.Module):
    """On images made of the features, with every position's rows counted."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(3, 5, (3, 2), padding=(0, 1), dilation=(2, 1), bias=False)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        images = x[:, None, :, None] * x[:, None, None, :]
        return self.head(torch.tanh(self.middle(torch.tanh(self.first(images)))).mean((2, 3)))


LAYERS = ("first", "middle", "head")
RUNS = [(Mlp, 0), (Mlp, 2), (Cnn, 2)]


def data() -> tuple[Tensor, Tensor]:
    x, y = make_batch(0, ROWS, tokens=1)
    return x.flatten(0, 1), y.flatten()


def engine_states(folders: list[str]) -> list[dict[str, Tensor]]:
    """Where each run's engine saves."""
    return [engine_state(*run, folder) for run, folder in zip(RUNS, folders, strict=True)]


@patch("ds_kfac.directions.kfac_gradient.DECAY", 0.9999)
def engine_state(kind: type[nn.Module], stage: int, folder: str) -> dict[str, Tensor]:
    """Of an engine that captures the whole batch at its first step and then, at rate 0, sees it row
    by row.

    The first step makes A, G and the eigenbases. Corrected eigenvalues S are a mean over steps of N
    R^2: that of the batch's gradient, then those of N single rows. Without the first, and over N,
    it is the mean over rows of R^2.
    """
    kfac = {
        "factor": {"rows": "all", "update_interval": 1000},
        "eigenbasis": {"refresh_interval": 1000},
        "burn_in": {"steps": 0},
        "preconditioner": {"eigenvalues": "corrected"},
    }
    engine = still_engine(make_net(kind), stage=stage, micro_batch=ROWS // WORLD, kfac=kfac)

    def step(x: Tensor, y: Tensor) -> None:
        engine.backward(cross_entropy(engine(x), y))
        engine.step()

    x, y = data()
    mine = slice(dist.get_rank() * ROWS // WORLD, (dist.get_rank() + 1) * ROWS // WORLD)
    step(x[mine], y[mine])
    engine.save_checkpoint(folder, "batch")
    for row in range(ROWS):
        step(x[row : row + 1], y[row : row + 1])  # on both ranks: the gradient is this row's
    engine.save_checkpoint(folder, "rows")
    dist.barrier()
    engine.destroy()
    batch, rows = (saved(Path(folder, tag, "kfac")) for tag in ("batch", "rows"))
    found = {}
    for name in LAYERS:
        A, G = batch[f"{name}.A.factor.pt"], batch[f"{name}.G.factor.pt"]
        found |= {f"{name} A": dense(A["packed"]), f"{name} G": dense(G["packed"])}
        whole, single = (
            files[f"{name}.layer.pt"]["moments"]["second_OI"] for files in (batch, rows)
        )
        found[f"{name} S"] = ((ROWS + 1) * single - whole) / ROWS**2
    return found


def saved(folder: Path) -> dict:
    """File name -> its content, of the save that is named as the last one."""
    files = (folder / (folder / "latest").read_text().strip()).glob("*.pt")
    return {path.name: torch.load(path) for path in files}


def dense(packed: Tensor) -> Tensor:
    """A symmetric matrix of its lower triangle, row by row."""
    side = int((2 * len(packed)) ** 0.5)
    C = torch.zeros(side, side)
    i, j = torch.tril_indices(side, side)
    C[i, j] = C[j, i] = packed
    return C


def by_curvlinops(
    kind: type[nn.Module], start: dict[str, Tensor], variation: Variation
) -> dict[str, Tensor]:
    x, y = variation.rows(*data())
    model = kind()
    model.load_state_dict(start)
    arguments = (
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        [(x.to(variation.dtype(x.dtype)), y)],
    )
    options = {
        "fisher_type": "empirical",
        "separate_weight_and_bias": False,
        "check_deterministic": False,
    }
    kfac, ekfac = (
        KFACLinearOperator(*arguments, **options),
        EKFACLinearOperator(*arguments, **options),
    )
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


@pytest.fixture(scope="module")
def states(tmp_path_factory) -> list[dict[str, Tensor]]:
    """Of each run."""
    folders = [str(tmp_path_factory.mktemp("saves")) for _ in RUNS]
    return run_ranks("tests.deepspeed.test_curvlinops:engine_states", world=WORLD, payload=folders)[
        0
    ]


@pytest.fixture(scope="module")
def curvlinops() -> Callable[[type[nn.Module], Variation], dict[str, Tensor]]:
    starts = {
        kind: {name: p.detach().clone() for name, p in make_net(kind).named_parameters()}
        for kind, _ in RUNS
    }
    return functools.cache(lambda kind, variation: by_curvlinops(kind, starts[kind], variation))


@pytest.mark.parametrize("kind", [Mlp, Cnn])
@pytest.mark.parametrize("what", [f"{name} {which}" for name in LAYERS for which in "AGS"])
def test_engines_have_curvlinops_matrices(states, curvlinops, kind, what):
    own = [state for (of, _), state in zip(RUNS, states, strict=True) if of is kind]
    zero = {what: torch.zeros_like(own[0][what])}
    found = spread.expected(lambda variation: {what: curvlinops(kind, variation)[what]}, zero)
    assert found.spread < 1e-2, "the bound must mean something"
    for state in own:
        assert not spread.within(
            what, difference({what: state[what]}, found.weights, zero), found.bound
        )
