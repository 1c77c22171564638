"""The quadratic model of a step: its minimum, and damping that follows its predictions."""

import pytest
import torch

from ds_kfac.update.kfac import RATE, QuadraticModel, adapted
from tests.close import close


def model(d_2: float = 1.0) -> tuple[QuadraticModel, torch.Tensor]:
    """Of gradient g and Fisher F in 4 dimensions along two directions, the second one ``d_2`` times its size."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(4, 2, generator=generator, dtype=torch.float64) * torch.tensor([1.0, d_2])
    root, g = torch.randn(4, 4, generator=generator).double(), torch.randn(4, generator=generator).double()
    return QuadraticModel(directions.T @ g, directions.T @ root @ root.T @ directions, directions.T @ directions), g


def test_the_weights_minimise_the_damped_model():
    quadratic, _ = model()
    damping = torch.tensor(0.3)
    w = quadratic.weights(damping)
    damped = quadratic.M + 0.3 * quadratic.D
    close(damped @ w, -quadratic.b, sums=4, condition=torch.linalg.cond(damped), dtype=torch.float32)
    shifted = quadratic.change(w + 0.01) + 0.15 * (w + 0.01) @ quadratic.D @ (w + 0.01)
    assert quadratic.change(w) + 0.15 * w @ quadratic.D @ w < shifted


@pytest.mark.parametrize("parallel", [False, True], ids=["no last update", "last update along the gradient"])
def test_without_a_second_direction_the_first_has_a_rate_of_its_own(parallel):
    quadratic, _ = model()
    b, M, D = quadratic.b[0], quadratic.M[0, 0], quadratic.D[0, 0]
    both = torch.tensor([1.0, 2.0 if parallel else 0.0], dtype=torch.float64)
    quadratic = QuadraticModel(b * both, M * torch.outer(both, both), D * torch.outer(both, both))
    w = quadratic.weights(torch.tensor(0.5))
    close(w, torch.stack([-b / (M + 0.5 * D), torch.zeros_like(b)]), sums=4)


@pytest.mark.parametrize(
    ("actual", "predicted", "power"),
    [(-1.0, -1.0, 5), (-0.8, -1.0, 5), (-0.5, -1.0, 0), (-0.2, -1.0, -5), (1.0, -1.0, -5), (float("nan"), -1.0, -5),
     (float("inf"), -1.0, -5), (0.0, 0.0, 0)],
)  # fmt: skip
def test_damping_falls_where_the_loss_falls_as_predicted_and_grows_where_not(actual, predicted, power):
    numbers = {"actual": torch.tensor(actual).double(), "predicted": torch.tensor(predicted).double()}
    found = adapted(torch.tensor(2.0), steps=5, **numbers)
    close(found, torch.tensor(2 * RATE**power), condition=abs(power) + 1)
