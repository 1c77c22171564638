"""What tests compare with: what tests/close.py and tests/spread.py allow, other orders of sums, and
which cases of a table run."""

import math
from functools import partial, reduce
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from tests.close import RATIOS, close, exact, near
from tests.covering import covering, pairs, some
from tests.deepspeed.features import CASES, losses_of, whole_model
from tests.deepspeed.modes import BY_NAME, MICRO_ROWS
from tests.deepspeed.runs import Rounding16, reference
from tests.models import cross_entropy, make_batch, make_net
from tests.oracle import ReferenceKFAC
from tests.shuffled import ShuffledSums
from tests.spread import PLAIN, Variation, difference, expected


@pytest.fixture(autouse=True)
def apart():
    """These ratios are no comparisons of ours."""
    before = dict(RATIOS)
    yield
    RATIOS.clear()
    RATIOS.update(before)


def ratio(*args, **terms):
    RATIOS.clear()
    try:
        close(*args, **terms)
    except AssertionError:
        pass
    (found,) = RATIOS.values()
    return found


@pytest.mark.parametrize("length", [7, 301, 10007])
def test_orders_of_a_sum_stay_below_a_quarter_of_what_is_allowed(length):
    x = torch.randn(401, length, generator=torch.Generator().manual_seed(length))
    order = torch.randperm(length, generator=torch.Generator().manual_seed(0))
    # one term after another: no library sums in a worse order
    one, other = (reduce(torch.add, terms.unbind(1)) for terms in (x, x[:, order]))
    assert 0 < ratio(one, other, sums=length) < 0.25
    assert ratio(one, x.double().sum(1), sums=length) < 0.25


def test_a_term_of_a_sum_left_out_is_outside():
    x = torch.ones(1000)
    assert ratio(x[1:].sum(), x.sum(), sums=1000) > 1


def test_the_bound_is_of_the_coarser_format_and_scales_with_every_term():
    wanted = torch.tensor([1.0, 3.0])
    off = wanted.double() + torch.tensor([0.0, 2**-20])
    plain = 2**-20 / (8 * 2**-23 * 3)
    for value, terms, factor in (
        (wanted, {}, 1),
        (wanted.double(), {"dtype": torch.float32}, 1),
        (wanted, {"sums": 4}, 1 / 2),
        (wanted, {"condition": 2}, 1 / 2),
        (wanted, {"scale": 6.0}, 1 / 2),
        (wanted, {"scale": wanted.abs()}, 1),
        (wanted, {"scale": 1.0}, 3),
        (wanted.bfloat16(), {}, 2**-16),
    ):
        assert ratio(off, value, **terms) == plain * factor, terms
    assert ratio(off[1].item(), 3.0) > 1e8
    close(torch.zeros(3), torch.zeros(3))
    assert ratio(torch.full((3,), 1e-30), torch.zeros(3)) == math.inf, "zero allows zero only"


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("compare", "actual", "expected", "message"),
    [
        *((kind, [NAN, NAN, INF], [1.0, NAN, INF], "") for kind in (close, exact)),
        *((kind, [1.0, 2.0, INF], [1.0, NAN, INF], "") for kind in (close, exact)),
        *((kind, [1.0, NAN, -INF], [1.0, NAN, INF], "") for kind in (close, exact)),
        (partial(near, bound=5.0, because="a test"), NAN, 1.0, ""),
        (close, {"a": 1.0}, {"b": 1.0}, ""),
        (close, [1.0], [1.0, 2.0], ""),
        (close, torch.ones(1), torch.ones(1, 1), "shape"),
        (close, None, 1.0, ""),
        (exact, torch.ones(1), torch.ones(1).bfloat16(), "bfloat16"),
        (
            partial(near, bound=0.1, because="noise", what="case"),
            [1.0, 2.0],
            [1.0, 3.0],
            r"case\[1\]: element 0 is 2, expected 3, allowed 1\.00e-01 \(noise\); 10 of",
        ),
        (partial(near, bound=0.1, because=""), 1.0, 1.0, "say what"),
    ],
)
def test_what_is_not_alike_is_told(compare, actual, expected, message):
    with pytest.raises(AssertionError, match=message or None):
        compare(actual, expected)


def test_structures_and_numbers_that_are_not_finite_may_be_alike():
    for compare in (close, exact):
        compare({"a": [1.0, (2.0, None)]}, {"a": [1.0, (2.0, None)]})
        compare(torch.tensor([1.0, NAN, INF]), torch.tensor([1.0, NAN, INF]))


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


WORLD = 2
MISTAKES = ("sign", "terms", "refreshed every step", "a row")
# Adam in an eigenbasis does not care how large a factor is, nor does damping relative to the mean
# eigenvalue. With the corrected eigenvalues of a deep net of layers alike rounding moves more than
# an interval does.
SEEN = {"all": MISTAKES, "corrected": MISTAKES, "batched-corrected": ("sign", "a row")}


def wrong(mistake: str) -> type[ReferenceKFAC]:
    """The oracle with one mistake."""

    class Wrong(ReferenceKFAC):
        def __init__(self, model, **options) -> None:
            if mistake == "refreshed every step":
                options["refresh_interval"] = 1
            super().__init__(model, **options)
            if mistake == "sign":
                for layer in self.layers.values():
                    layer.write = partial(lambda write, V: write(-V), layer.write)
            elif mistake == "terms":
                nearest_rows = self.passes.nearest_rows
                self.passes.nearest_rows = lambda number: 2 * nearest_rows(number)

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


@pytest.mark.parametrize("name", ["z2-bf16", "adam-z2-fp16"])
def test_roundings_of_engines_in_16_bits_are_part_of_the_spread(name):
    """They are larger than those of another order, and are nothing but roundings."""
    mode, model = BY_NAME[name], make_net()
    initial = weights(model)
    plain, ordered, rounded = (
        reference(mode, 4, WORLD, initial, variation=variation)
        for variation in (PLAIN, Variation(order=1), Variation(rounded=True))
    )
    order, ours = (difference(run, plain, initial) for run in (ordered, rounded))
    # of 4 steps with 3 roundings each
    assert order < ours < 16 * torch.finfo(torch.bfloat16).eps, (order, ours)
    rounding = Rounding16(mode, model, WORLD, 4)
    rounding.dtype, rounding.kept, rounding.twin = torch.float32, torch.float32, make_net()
    x, y = make_batch(0, WORLD * 4 * MICRO_ROWS)
    cross_entropy(model(x), y).backward()
    whole = [p.grad for p in model.parameters()]
    rounding.gradients(model, x, y)
    # rows, and sides of three layers
    close([p.grad for p in model.parameters()], whole, sums=2 * y.numel() + 40)


FACTORS = {"a": "xyz", "b": "123", "c": "pq", "d": "uv", "e": "mno"}
TABLE = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]


@pytest.mark.parametrize("table", [TABLE, TABLE[::3], TABLE[::-7]], ids=len)
def test_every_pair_of_the_table_is_in_one_of_few_cases_in_their_order(table):
    chosen = covering(table, dict, lambda case: ["this"] if case == table[-5] else [])
    assert set().union(*map(pairs, table)) == set().union(*map(pairs, chosen))
    assert table[-5] in chosen, "what must be there always is"
    assert chosen == [case for case in table if case in chosen]
    # nine pairs of two factors of three values need as many
    assert 9 <= len(chosen) <= 15


def test_every_case_runs_on_one_rank_and_on_two_or_on_four():
    assert some(TABLE, 1) == TABLE and some(range(9), 4) == [0, 3, 4, 7, 8]
    assert sorted(some(range(9), 2) + some(range(9), 4)) == list(range(9))
