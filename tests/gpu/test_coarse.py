"""Every engine mode at a GPU's default precision, TF32 and fp16, within a bound that follows from
these roundings."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests import oracle
from tests.deepspeed.test_modes import check
from tests.gpu.coarse import in_tf32, rounded_oracle
from tests.gpu.modes import PROCESSES, all_cases, dealt
from tests.ranks import run_alone

TARGET = "tests.gpu.coarse:compare"
LARGEST = 0.5
"""A bound above which nothing is held: a run without K-FAC is about 1 from one with it."""


def test_tf32_is_fp32_with_10_bits_rounded_to_even():
    step = 2.0**-10
    given = torch.tensor(
        [1.0, 1 + step / 2, 1 + 1.5 * step, 1 + 0.51 * step, -1 - 0.49 * step, float("inf"), 0.0]
    )
    expected = torch.tensor([1.0, 1.0, 1 + 2 * step, 1 + step, -1.0, float("inf"), 0.0])
    assert torch.equal(in_tf32(given), expected)
    assert in_tf32(torch.full((1,), float("nan"))).isnan().all()


def test_products_of_gradients_are_rounded_and_statistics_are_not():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5)
    kfac = oracle.ReferenceKFAC(model)
    x = torch.randn(32, 6)

    def stepped() -> tuple[torch.Tensor, torch.Tensor]:
        kfac.steps, kfac.layers[""].factors, kfac.layers[""].updates = 0, [], 0
        model.zero_grad()
        model(x).square().mean().backward()
        kfac.step(0.1)
        return model.weight.grad.clone(), kfac.layers[""].factors[0]

    plain, factor = stepped()
    with rounded_oracle():
        rounded, same = stepped()
    assert torch.equal(factor, same)
    apart = float((rounded - plain).norm() / plain.norm())
    assert 2.0**-13 < apart < 2.0**-7, apart  # four products, operands rounded by 2^-11 at most
    again, _ = stepped()
    assert torch.equal(again, plain)


@pytest.mark.distributed
def test_fp32_is_within_the_bound_and_the_bound_holds_something():
    """On a CPU, whose default is fp32."""
    results = run_alone(TARGET, device="cpu", payload=[(name, 4) for name in ("z1", "adam-z1")])
    for case, result in results.items():
        check(case, result)
        assert 10 * result["fp32 bound"] < result["bound"] < LARGEST, (case, result)


@pytest.mark.gpu
@pytest.mark.distributed
def test_every_engine_mode_is_within_the_bound_of_the_default_precision():
    hands = dealt(all_cases(), PROCESSES)
    results: dict = {}
    with ThreadPoolExecutor(len(hands)) as pool:
        for found in pool.map(lambda cases: run_alone(TARGET, device="cuda", payload=cases), hands):
            results |= found
    for case, result in results.items():
        check(case, result)
