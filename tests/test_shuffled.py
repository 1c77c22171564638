"""The shuffling mode permutes what is summed, and nothing else."""

import pytest
import torch
import torch.nn.functional as F

from tests.close import close, exact
from tests.shuffled import ShuffledSums

N, D = 301, 57


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def with_gradient(function):
    def run():
        x = normal(N, D).requires_grad_()
        value = function(x)
        (value * normal(*value.shape)).sum().backward()
        return torch.cat([value.detach().flatten(), x.grad.flatten()])

    return run


SUMS = {
    "addmm": lambda: torch.addmm(normal(D, 3), normal(D, N), normal(N, 3)),
    "mv": lambda: normal(D, N) @ normal(N),
    "einsum": lambda: torch.einsum("nd,ne->de", normal(N, D), normal(N, 3)),
    "norm": lambda: normal(N, D).norm(dim=0),
    "convolution": lambda: F.conv2d(normal(2, N, 3, 3), normal(4, N, 3, 3), padding=1),
    "linear": with_gradient(lambda x: F.linear(x, normal(3, D), normal(3)).tanh()),
    "a batch's mean": with_gradient(lambda x: x.square().mean(0)),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_come_in_another_order_and_are_the_same_sums(name):
    plain = SUMS[name]()
    with ShuffledSums(1) as mode:
        one, again = SUMS[name](), SUMS[name]()
    assert mode.seen
    exact(again, one)
    close(one, plain, sums=9 * N, scale=300.0)
    assert not torch.equal(one, plain), "nothing was permuted"


def test_grouped_convolutions_integers_scalars_and_random_numbers_are_left_alone():
    expected = normal(3)
    with ShuffledSums(1) as mode:
        F.conv2d(normal(2, 4, 3, 3), normal(4, 2, 3, 3), groups=2)
        assert torch.arange(9).sum() == 36 and torch.ones(()).sum() == 1
        assert torch.equal(normal(3), expected)
    assert mode.seen <= {"sum"}
