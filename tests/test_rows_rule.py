"""The rule of A and G on cases whose answer is known by hand: tests/truth.py, by which the capture
is tested."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.close import close
from tests.models import make_net
from tests.oracle_images import ImageKFAC
from tests.rule_cases import CASES, IGNORED, TOKENS, Bert, Case, Llama, Mlp, TimeFirst, truth_of
from tests.rule_cases import Forward as Model
from tests.spread import in_float64
from tests.truth import Truth, factors_of_ranks

SUMS = 200
"""Terms that are added one after another on the way to an element, at most."""
INPUTS, OUTPUTS = 3, 2


class OneLayer(nn.Module):
    """A linear layer, whose output is weighed by ``weights`` [N, T] and summed up."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, OUTPUTS, bias=bias)

    def forward(self, x: Tensor, weights: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.layer(x)) * torch.tensor([1.0, 2.0])
        return (y * weights.unsqueeze(-1)).sum()


@pytest.fixture(autouse=True)
def float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def step(model: nn.Module, train: Callable[[Model], None], **options) -> Truth:
    truth = Truth(model, **options)
    with truth:
        train(model)
    return truth


def row_gradients(model: OneLayer, x: Tensor, weights: Tensor) -> Tensor:
    """[N, T, O]: of the weighted sum, by hand."""
    y = x @ model.layer.weight.T + (0 if model.layer.bias is None else model.layer.bias)
    slope = 1 - torch.tanh(y) ** 2
    return (slope * torch.tensor([1.0, 2.0]) * weights.unsqueeze(-1)).detach()


def with_ones(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


def test_every_row_counts_without_a_mask():
    model, x = OneLayer(), torch.randn(2, 3, INPUTS)
    weights = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]])
    A, G, rows = step(model, lambda model: model(x, weights).backward()).factors()["layer"]
    a, g = with_ones(x).flatten(0, 1), row_gradients(model, x, weights).flatten(0, 1)
    assert rows == 6
    close(A, a.T @ a / 6, sums=SUMS)
    close(G, 6 * g.T @ g, sums=SUMS)


def test_a_row_that_the_mask_leaves_out_counts_only_if_it_has_a_gradient():
    model, x = OneLayer(), torch.randn(2, 3, INPUTS)
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 3.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])  # the second text's last token has a gradient
    A, G, rows = step(model, lambda model: model(x, weights, mask).backward()).factors()["layer"]
    a = with_ones(x)[torch.tensor([[True, True, False], [True, False, True]])]
    g = row_gradients(model, x, weights).flatten(0, 1)
    assert rows == 4
    close(A, a.T @ a / 4, sums=SUMS)
    close(G, 4 * g.T @ g, sums=SUMS)


def test_a_row_without_input_and_gradient_adds_nothing_to_the_bias():
    model, x = OneLayer(), torch.randn(1, 4, INPUTS)
    x[0, 1:3] = 0
    weights = torch.tensor([[1.0, 0.0, 2.0, 0.0]])
    A, G, rows = step(model, lambda model: model(x, weights).backward()).factors()["layer"]
    a, g = with_ones(x[0, [0, 2, 3]]), row_gradients(model, x, weights).flatten(0, 1)
    assert rows == 3
    close(A, a.T @ a / 3, sums=SUMS)
    close(G, 4 * g.T @ g, sums=SUMS)  # R counts places of the layer, whatever is in them


def test_a_call_without_a_gradient_has_no_rows():
    model, x = OneLayer(), torch.randn(2, 3, INPUTS)

    def train(model: OneLayer) -> None:
        with torch.no_grad():
            model(x, torch.ones(2, 3))
        model(x, torch.ones(2, 3))
        model(x, torch.zeros(2, 3)).backward()

    assert step(model, train).factors() == {}


@pytest.mark.parametrize("bias", ["trained", "frozen", "none"])
def test_a_trained_bias_appends_a_one(bias):
    model = OneLayer(bias=bias != "none")
    if bias == "frozen":
        model.layer.bias.requires_grad_(False)
    x, weights = torch.randn(2, 3, INPUTS), torch.ones(2, 3)
    A, *_ = step(model, lambda model: model(x, weights).backward()).factors()["layer"]
    assert A.shape == ((INPUTS + 1,) * 2 if bias == "trained" else (INPUTS,) * 2)


@pytest.mark.parametrize(
    "change", ["transposed", "flattened", "of another shape", "additive", "by a function"]
)
def test_masks_fit_calls_of_their_leading_dimensions(change):
    model, x = OneLayer(), torch.randn(2, 3, INPUTS)
    weights = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    mask, options, counted = weights.bool(), {}, 3
    if change == "transposed":
        x, weights = x.transpose(0, 1), weights.T
    elif change == "flattened":
        x, weights = x.flatten(0, 1), weights.flatten()
    elif change == "of another shape":
        mask, counted = torch.ones(2, 4), 6
    elif change == "additive":
        mask, counted = (mask.double() - 1) * 1e9, 6
    else:
        options, mask, kept = {"mask": lambda args, kwargs: kept}, None, mask
    _, _, rows = step(model, lambda model: model(x, weights, mask).backward(), **options).factors()[
        "layer"
    ]
    assert rows == counted


def test_a_flattened_call_has_no_mask_if_another_call_has_its_shape():
    batch = CASES["flattened tokens"], CASES["time first"]
    flat, not_flat = (truth_of(case)[1].factors()["inner"][2] for case in batch)
    assert flat == not_flat == 14, "of 20 tokens"

    class Both(TimeFirst):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            x = self.inner(self.embed(input_ids))
            return self.lm_head(x.flatten(0, 1))[::4].sum()

    mask = torch.ones(4, TOKENS)
    mask[:, 2:] = 0
    model = Both()
    ids = torch.zeros(4, TOKENS, dtype=torch.long)
    factors = step(model, lambda model: model(ids, mask).backward()).factors()
    assert factors["lm_head"][2] == 4 * TOKENS
    assert factors["inner"][2] < 4 * TOKENS


def test_the_gradient_is_that_of_an_optimizer_at_a_loss_scale():
    x, weights = torch.randn(2, 3, INPUTS), torch.ones(2, 3)
    model = OneLayer()
    plain = step(model, lambda model: model(x, weights).backward())
    scaled = step(model, lambda model: (model(x, weights) * 256).backward(), scale=256.0)
    close(scaled.factors(), plain.factors(), sums=SUMS)


# G is the second moment of the gradients of a loss's terms


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.other = nn.Linear(INPUTS, 4), nn.Linear(4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor, y: Tensor, task: str = "head") -> Tensor:
        return F.cross_entropy(self.get_submodule(task)(torch.tanh(self.inner(x))), y)


def examples(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, INPUTS), torch.randint(3, (rows,))


def test_G_is_the_second_moment_of_the_gradients_of_a_means_terms():
    model, (x, y) = Classifier(), examples(7)
    _, G, _ = step(model, lambda model: model(x, y).backward()).factors()["inner"]
    hidden = model.inner(x).detach().requires_grad_()
    (g,) = torch.autograd.grad(
        F.cross_entropy(model.head(torch.tanh(hidden)), y, reduction="sum"), hidden
    )
    close(G, g.T @ g / 7, sums=SUMS)


def test_micro_batches_of_equal_rows_have_the_factors_of_the_batch():
    model, (x, y) = Classifier(), examples(8)

    def in_parts(model: Model) -> None:
        for xs, ys in zip(x.split(2), y.split(2), strict=True):
            (model(xs, ys) / 4).backward()

    close(
        step(model, in_parts).factors(),
        step(model, lambda model: model(x, y).backward()).factors(),
        sums=SUMS,
    )


def test_several_forwards_before_a_backward_pass_have_the_factors_of_one():
    model, (x, y) = Classifier(), examples(8)

    def by_two(model: Model) -> None:
        ((model(x[:2], y[:2]) * 2 + model(x[2:], y[2:]) * 6) / 8).backward()

    close(
        step(model, by_two).factors(),
        step(model, lambda model: model(x, y).backward()).factors(),
        sums=SUMS,
    )


def test_two_tasks_of_different_sizes_have_the_mean_of_their_factors():
    """G of a step whose loss is the mean of two tasks' losses is the mean of what each task has
    alone."""
    model, many, few = Classifier(), examples(8), examples(3)
    alone = [
        step(model, lambda model: model(*many, task="head").backward()).factors()["inner"][1],
        step(model, lambda model: model(*few, task="other").backward()).factors()["inner"][1],
    ]

    def both(model: Model) -> None:
        (model(*many, task="head") / 2).backward()
        (model(*few, task="other") / 2).backward()

    truth = step(model, both)
    _, G, rows = truth.factors()["inner"]
    close(G, sum(alone) / 2, sums=SUMS)
    assert rows == 11
    assert truth.sums()["terms"] == 11
    close(
        truth.factors()["other"][1],
        step(model, lambda model: model(*few, task="other").backward()).factors()["other"][1] / 2,
        sums=SUMS,
    )


def test_a_graph_that_is_kept_brings_its_rows_in_each_pass():
    model, (x, y) = Classifier(), examples(6)

    def twice(model: Model) -> None:
        loss = model(x, y) / 2
        loss.backward(retain_graph=True)
        loss.backward()

    truth, once = step(model, twice), step(model, lambda model: model(x, y).backward())
    for name, (A, G, rows) in once.factors().items():
        twice_A, twice_G, twice_rows = truth.factors()[name]
        assert twice_rows == 2 * rows
        close((twice_A, twice_G), (A, G), sums=SUMS)
    assert truth.sums()["terms"] == 12


def test_a_pass_that_adds_to_no_gradient_is_none():
    model, (x, y) = Classifier(), examples(6)

    def looked_at(model: Classifier) -> None:
        torch.autograd.grad(model(x, y), list(model.parameters()), allow_unused=True)
        model(x.requires_grad_(), y).backward(inputs=[x])
        model(x, y).backward()

    found = step(model, looked_at)
    close(
        found.factors(),
        step(model, lambda model: model(x, y).backward()).factors(),
        sums=SUMS,
    )
    assert found.sums()["passes"] == 1


def test_ranks_have_the_factors_of_their_batches_together():
    model, (x, y) = Classifier(), examples(9)
    of_ranks = [
        step(model, lambda model, part=part: model(x[part], y[part]).backward()).sums()
        for part in (slice(0, 3), slice(3, 6), slice(6, 9))
    ]
    close(
        factors_of_ranks(of_ranks),
        step(model, lambda model: model(x, y).backward()).factors(),
        sums=SUMS,
    )


@pytest.mark.parametrize("stepped", [True, False])
def test_the_layer_nearest_to_the_loss_counts_if_it_is_frozen(stepped):
    model, (x, y) = Classifier(), examples(6)
    model.head.requires_grad_(stepped)
    truth = step(model, lambda model: model(x, y).backward())
    assert truth.sums()["terms"] == 6
    assert ("head" in truth.factors()) == stepped


def test_examples_are_means_of_inputs_and_sums_of_gradients():
    model, x = OneLayer(), torch.randn(2, 3, INPUTS)
    weights = torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    truth = step(model, lambda model: model(x, weights, mask).backward(), sharing="reduce")
    A, G, rows = truth.factors()["layer"]
    g = row_gradients(model, x, weights).sum(1)
    a = torch.stack([with_ones(x[0, :2]).mean(0), with_ones(x[1]).mean(0)])
    assert rows == truth.sums()["terms"] == 2
    close(A, a.T @ a / 2, sums=SUMS)
    close(G, 2 * g.T @ g, sums=SUMS)


# real models


@pytest.mark.parametrize("name", CASES)
def test_rows_make_the_gradient_of_their_weight(name):
    model, truth = truth_of(CASES[name])
    if CASES[name].sharing == "reduce":
        return
    layers = truth.sums()["layers"]
    assert layers
    for layer, (_, rows, _, gradient) in layers.items():
        module_name, _, group = layer.partition(":")
        module = model.get_submodule(module_name)
        groups = getattr(module, "groups", 1)
        expected = module.weight.grad
        if type(module).__name__ == "Conv1D":
            expected = expected.T
        if isinstance(module, nn.ConvTranspose2d):
            expected = expected.flatten(1).T
        elif expected.ndim > 2:
            expected = expected.unflatten(0, (groups, -1))[int(group or 0)].flatten(1)
        assert rows > 0
        close(gradient[:, : expected.shape[1]], expected, sums=SUMS, what=layer)


@pytest.mark.parametrize("name", CASES)
def test_layers_have_factors_unless_nothing_reaches_them(name):
    model, truth = truth_of(CASES[name])
    names = {layer.partition(":")[0] for layer in truth.factors()}
    expected = {
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear | nn.modules.conv._ConvNd) or type(m).__name__ == "Conv1D"
        if m.weight.requires_grad
    }
    assert names == expected - set(CASES[name].left)


COUNTS = {
    # rows of the named layer, sum of R_p
    "mlp": ("first", 6, 6),
    "llama": ("blocks.0.q_proj", 20, 20),
    "llama, padded on the right": ("blocks.0.q_proj", 14, 14),
    "llama, prompts without labels": ("blocks.0.q_proj", 14, 14),
    "llama, padded micro-batches": ("blocks.0.q_proj", 14, 14),
    "llama, a mask from the user": ("blocks.0.q_proj", 14, 14),
    "llama, pads without a mask": ("blocks.0.q_proj", 20, 20),
    "gpt2": ("h.1.mlp_fc", 14, 14),
    "bert, words": ("transform", 14, 14),
    "bert, classes": ("blocks.1.output", 14, 4),
    "vit": ("projection", 27, 3),
    "tagger, examples": ("inner", 4, 4),
    "cnn, dense prediction": ("stem", 27, 3 * 6 * 8),
    "two tasks": ("first", 8, 8),
    "retained graph": ("first", 12, 12),
    "several forwards": ("first", 6, 6),
    "chosen and rejected": ("first", 6, 6),
    "evaluated between": ("first", 6, 6),
    "detours": ("first", 6, 6),
    "tiled loss": ("head", 6, 6),
    "frozen head": ("first", 6, 6),
}


@pytest.mark.parametrize("name", COUNTS)
def test_rows_and_loss_terms_are_counted(name):
    layer, rows, terms = COUNTS[name]
    _, truth = truth_of(CASES[name])
    assert (truth.factors()[layer][2], truth.sums()["terms"]) == (rows, terms)


@pytest.mark.parametrize("name", ["llama, checkpointed", "llama, checkpointed reentrantly"])
def test_checkpointed_calls_count_once(name):
    expected = truth_of(CASES["llama, prompts without labels"])[1]
    truth = truth_of(CASES[name])[1]
    close(truth.factors(), expected.factors(), sums=SUMS)
    assert truth.sums()["terms"] == expected.sums()["terms"]


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_call_has_the_mask_of_its_forward(reentrant, nested):
    def train(forward: Model, backward, rank: int) -> None:
        """The first text has no pads, and its pass comes last."""
        batch = CASES["llama, padded on the right"].step
        losses: list[Tensor] = []
        batch(forward, losses.append, rank)
        batch(forward, losses.append, rank + 1)
        ids = torch.randint(11, (4, TOKENS))
        losses.append(
            forward(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)),
        )
        for loss in losses:
            backward(loss)

    found = []
    for options in ({"reentrant": reentrant, "nested": nested}, {}):
        torch.manual_seed(3)
        found.append(truth_of(Case(lambda options=options: Llama(**options), train, passes=3))[1])
    close(found[0].factors(), found[1].factors(), sums=SUMS)
    assert found[0].sums()["terms"] == found[1].sums()["terms"] == 14 + 14 + 20


@pytest.mark.parametrize("name", [name for name in CASES if name != "llama, padded on the left"])
def test_layers_of_one_input_have_one_A(name):
    """So that it does not matter which of them gives the rows."""
    factors = truth_of(CASES[name])[1].factors()
    siblings = ["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"], ["query", "key", "value"]
    for first, *others in siblings:
        for layer in [layer for layer in factors if layer.endswith(first)]:
            for other in others:
                A, _, rows = factors[layer.removesuffix(first) + other]
                assert rows == factors[layer][2]
                close(A, factors[layer][0], sums=SUMS)


def test_a_pad_that_predicts_the_first_token_is_a_row_of_values_only():
    """It attends to itself alone, so that its query and its key have no gradient."""
    factors = truth_of(CASES["llama, padded on the left"])[1].factors()
    rows = [factors[f"blocks.0.{name}_proj"][2] for name in "qkv"]
    assert rows == [14, 14, 17]


NOT_BY_ORACLE = [
    "tiled",
    "padded micro-batches",
    "checkpointed",
    "chosen",
    "evaluated",
    "gpt2",
    "time first",
]
"""It has one mask [N, T] a step, knows no Conv1D, and sees a forward and its backward pass in
turn."""


@pytest.mark.parametrize("name", [n for n in CASES if not any(word in n for word in NOT_BY_ORACLE)])
def test_the_oracle_has_the_factors_of_the_rule(name):
    case = CASES[name]
    model = make_net(case.make).double()
    kfac = ImageKFAC(
        model,
        types=("Linear", "Conv2d", "ConvTranspose2d"),
        sharing=case.sharing,
        exclude=case.layers.get("exclude", ()),
    )

    def forward(*args, **kwargs) -> Tensor:
        masks = [x for name, x in kwargs.items() if name.endswith("attention_mask")]
        kfac.mask = case.mask(args, kwargs) if case.mask else next(iter(masks), None)
        return model(*args, **kwargs)

    def backward(loss: Tensor, **options) -> None:
        (loss * 8 / case.passes).backward(**options)

    kfac.scale = 8.0
    with in_float64():
        case.step(forward, backward, 0)
        kfac.fold()
    truth = truth_of(case)[1]
    found = {name.removesuffix(":0"): tuple(C) for name, C in kfac.factors.items() if C}
    for layer, (A, G, _) in truth.factors().items():
        if layer.removesuffix(":0") not in case.layers.get("exclude", ()):
            close(found[layer.removesuffix(":0")], (A, G), sums=SUMS, what=layer)
    assert {layer.terms for layer in kfac.layers.values() if layer.factors} == {
        truth.sums()["terms"]
    }


def test_a_pass_inside_a_forward_is_part_of_the_next():
    (_, tiled), (_, plain) = truth_of(CASES["tiled loss"]), truth_of(Case(Tanh, CASES["mlp"].step))
    close(tiled.factors(), plain.factors(), sums=SUMS)
    assert tiled.sums()["passes"] == 1


class Tanh(Mlp):
    """What Tiled computes, in one piece."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.first(x.double()))), y)


def texts_of(lengths: list[int], to: int) -> list[dict[str, Tensor]]:
    """Texts of these lengths, one in a batch, padded on the right ``to`` a length."""
    batches = []
    for index, length in enumerate(lengths):
        ids = torch.randint(11, (1, length), generator=torch.Generator().manual_seed(index))
        pads = (0, to - length)
        batches.append(
            {
                "input_ids": F.pad(ids, pads, value=3),
                "labels": F.pad(ids, pads, value=IGNORED),
                "attention_mask": F.pad(torch.ones_like(ids), pads),
            }
        )
    return batches


def joined(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("lengths", [[3, 3, 3], [3, 5, 4]], ids=str)
def test_texts_one_by_one_have_the_factors_of_a_padded_batch(kind, lengths):
    """A for any lengths. G if the passes are alike, else a pass counts by its own R."""
    make = Llama if kind == "llama" else lambda: Bert("words")
    terms = [length - 1 if kind == "llama" else length for length in lengths]
    torch.manual_seed(0)
    model = make()

    def one_by_one(model: Model) -> None:
        for length, number in zip(lengths, terms, strict=True):
            (batch,) = texts_of([length], length)
            (model(**batch) * number / sum(terms)).backward()

    def padded(model: Model) -> None:
        model(**joined([texts_of([length], TOKENS)[0] for length in lengths])).backward()

    alone, together = step(model, one_by_one), step(model, padded)
    assert alone.sums()["terms"] == together.sums()["terms"] == sum(lengths)
    expected = together.factors()
    for name, (A, G, rows) in alone.factors().items():
        assert rows == sum(lengths) == expected[name][2]
        close(A, expected[name][0], sums=SUMS, what=f"A of {name}")
        if len(set(lengths)) == 1:
            close(G, expected[name][1], sums=SUMS, what=f"G of {name}")
