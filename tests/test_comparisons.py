"""What tests/close.py and tests/spread.py allow: other orders of sums, and no mistake."""

import math
from functools import partial, reduce

import pytest
import torch

from tests.close import RATIOS, close, exact, near
from tests.deepspeed.features import CASES, losses_of, whole_model
from tests.deepspeed.runs import reference
from tests.models import make_net
from tests.oracle import ReferenceKFAC
from tests.spread import PLAIN, Variation, difference, expected


@pytest.fixture(autouse=True)
def apart():
    """These ratios are no comparisons of ours."""
    before = dict(RATIOS)
    yield
    RATIOS.clear()
    RATIOS.update(before)


@pytest.mark.parametrize("length", [7, 301, 10007])
def test_orders_of_a_sum_stay_below_a_quarter_of_what_is_allowed_and_a_lost_term_does_not(length):
    x = torch.randn(401, length, generator=torch.Generator().manual_seed(length))
    order = torch.randperm(length, generator=torch.Generator().manual_seed(0))
    # one term after another: no library sums in a worse order
    one, other = (reduce(torch.add, terms.unbind(1)) for terms in (x, x[:, order]))
    assert not torch.equal(one, other)
    for exactly in (other, x.double().sum(1)):
        close(one, exactly, sums=length / 4**2, dtype=torch.float32)
    x = torch.ones(1000)
    with pytest.raises(AssertionError, match="element 0 is 999, expected 1000"):
        close(x[1:].sum(), x.sum(), sums=1000)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("compare", "actual", "expected", "message"),
    [
        *((kind, [NAN, NAN, INF], [1.0, NAN, INF], "") for kind in (close, exact)),
        *((kind, [1.0, NAN, -INF], [1.0, NAN, INF], "") for kind in (close, exact)),
        (partial(near, bound=5.0, because="a test"), NAN, 1.0, ""),
        (close, {"a": 1.0}, {"b": 1.0}, ""),
        (close, torch.ones(1), torch.ones(1, 1), "shape"),
        (exact, torch.ones(1), torch.ones(1).bfloat16(), "bfloat16"),
        (
            partial(near, bound=0.1, because="noise"),
            [1.0, 2.0],
            [1.0, 3.0],
            "expected 3, .*10 of",
        ),
    ],
)
def test_what_is_not_alike_is_told(compare, actual, expected, message):
    with pytest.raises(AssertionError, match=message or None):
        compare(actual, expected)


WORLD = 2
MISTAKES = ("sign", "terms", "a row")
# of the corrected eigenvalues of a deep net of layers alike rounding moves more than a scale does
SEEN = {"all": MISTAKES, "batched-corrected": ("sign", "a row")}


def wrong(mistake: str) -> type[ReferenceKFAC]:
    """The oracle with one mistake."""

    class Wrong(ReferenceKFAC):
        def __init__(self, model, **options) -> None:
            super().__init__(model, **options)
            nearest_rows = self.passes.nearest_rows
            if mistake == "terms":
                self.passes.nearest_rows = lambda number: 2 * nearest_rows(number)
            for layer in self.layers.values() if mistake == "sign" else ():
                layer.write = partial(lambda write, V: write(-V), layer.write)

        def update(self) -> None:
            if mistake == "a row" and self.steps == 0:
                for call in self.passes.calls():
                    for _, g in call.gradients:
                        call.x[0], g[0] = 0, 0
            super().update()

    return Wrong


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", SEEN)
def test_mistakes_are_outside_of_the_bound(name):
    case = CASES[name]
    mode = case.mode("z0", WORLD)
    model = whole_model(case)
    initial = weights(make_net(model))
    options = {"model": model, "losses": losses_of(name, WORLD), "kfac_config": mode.kfac}

    def train(variation: Variation, **kind) -> dict[str, torch.Tensor]:
        return reference(
            mode, case.accumulation, WORLD, initial, variation=variation, **options, **kind
        )

    found = expected(train, initial)
    off = {
        mistake: difference(train(PLAIN, kind=wrong(mistake)), found.weights, initial)
        for mistake in SEEN[name]
    }
    assert min(off.values()) > 2 * found.bound and off["sign"] > 10 * found.bound, (
        found.bound,
        off,
    )
    assert found.spread > 0
