"""Bounds from a run's own spread: rounding stays within them, a mistake in one term does not."""

from functools import partial

import pytest
import torch

from tests.close import close
from tests.deepspeed.features import CASES, losses_of, whole_model
from tests.deepspeed.modes import BY_NAME, MICRO_ROWS
from tests.deepspeed.runs import Rounding16, reference
from tests.models import cross_entropy, make_batch, make_net
from tests.oracle import ReferenceKFAC
from tests.spread import PLAIN, Variation, difference, expected

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
