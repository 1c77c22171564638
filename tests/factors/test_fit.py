"""``ds_kfac.fit`` against tests/truth.py and gradients of sequences in float64, however a model and
data are given."""

from argparse import Namespace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from ds_kfac.factors import fitting
from ds_kfac.factors.files import Factors, FactorsError
from tests.close import close, exact
from tests.truth import Truth

WIDTH, CLASSES, T, N = 7, 5, 6, 3
fit = partial(fitting.fit, progress=False)


class Sequences(nn.Module):
    """Two calls of one layer, a bias, a layer without; a mean over labelled terms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.twice, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.twice(torch.tanh(self.twice(x))))

    def forward(self, x: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)).reshape(-1, CLASSES), labels.flatten())


class Mixed(Sequences):
    """The same where a position sees those before it: rows without a label have gradients."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(x + torch.tanh(self.twice(x)).cumsum(dim=1))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.head = nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.relu(self.conv(x)).mean((2, 3))), labels)


def sequences(count: int, *, padded: bool = False, labelled: bool = True) -> list[dict]:
    """Batches; ``padded``: a sequence of each has four positions of padding, with a mask; without
    ``labelled`` four positions of a sequence have no label."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(count):
        labels = torch.randint(CLASSES, (N, T), generator=generator)
        batch = {"x": torch.randn(N, T, WIDTH, generator=generator), "labels": labels}
        if padded or not labelled:
            labels[number % N, 2:] = -100
        if padded:
            batch["attention_mask"] = (labels != -100).long()
        found.append(batch)
    return found


def images(count: int) -> list[dict]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, N, 2, 5, 7, generator=generator)
    labels = torch.randint(CLASSES, (count, N), generator=generator)
    return [{"x": x[number], "labels": labels[number]} for number in range(count)]


class Pooled(Sequences):
    """A loss for each sequence."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x).mean(dim=1)), labels)


def pooled(count: int) -> list[dict]:
    return [{**batch, "labels": batch["labels"][:, 0]} for batch in sequences(count)]


def turned_squares(found: Factors, name: str, gradients: list[dict[str, Tensor]]) -> Tensor:
    """The mean of the squares of gradients of sequences in a layer's eigenbasis."""
    about = found.layers[name]
    Q = {side: found.eigenbasis(name, side).vectors[0][0].double() for side in "AG"}
    total = torch.zeros(len(Q["G"]), len(Q["A"]), dtype=torch.float64)
    for own in gradients:
        weight = own[about["weight"]].flatten(1)
        if about["bias"] is not None:
            weight = torch.cat([weight, own[about["bias"]].unsqueeze(-1)], dim=-1)
        total += (Q["G"].mT @ weight @ Q["A"]) ** 2
    return total / len(gradients)


def sequence_gradients(own: nn.Module, batch: dict) -> list[dict[str, Tensor]]:
    """Of the terms of each sequence: of a mean over the labels, times the rows that count."""
    mask = batch.get("attention_mask", torch.ones(batch["labels"].shape))
    labels = batch["labels"] != -100
    found = []
    for index, labelled in enumerate(labels):
        one = {name: x[index : index + 1] for name, x in batch.items()}
        own.zero_grad()
        (own(**one) * labelled.sum() / labels.sum() * mask.sum()).backward()
        found.append({name: p.grad.clone() for name, p in own.named_parameters()})
    return found


@pytest.mark.parametrize(
    ("kind", "data", "sharing"),
    [
        (Sequences, sequences(4), "expand"),
        (Sequences, sequences(4, labelled=False), "expand"),
        (Sequences, sequences(4, padded=True), "expand"),
        (Mixed, sequences(4, padded=True), "expand"),
        (Images, images(4), "expand"),
        (Pooled, pooled(4), "reduce"),
    ],
    ids="sequences|some without a label|padded|padding with gradients|images|examples".split("|"),
)
def test_factors_and_eigenvalues_are_those_of_the_rows(kind, data, sharing, tmp_path):
    config = {"factor": {"weight_sharing": sharing}}
    found = fit(kind(), data, out=tmp_path / "factors", config=config)
    own = kind().double()
    truth, gradients = Truth(own, sharing=sharing), []
    for batch in data:
        batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
        with truth:
            (own(**batch) / len(data)).backward()
        gradients += sequence_gradients(own, batch)
    terms = sum(int(batch.get("attention_mask", batch["labels"] * 0 + 1).sum()) for batch in data)
    expected = truth.factors()
    assert set(found) == set(expected)
    for name in found:
        A, G, rows = expected[name]
        sums = rows + 100  # of the rows, and of the products and softmax in front of them
        options = {"condition": 2, "dtype": torch.float32}
        assert found.count(name, "A") == rows and found.count(name, "G") == terms
        for side, factor in (("A", A), ("G", G)):
            close(found.factor(name, side), factor, sums=sums, **options)
            basis = found.eigenbasis(name, side)
            Q = basis.vectors[0][0].double()
            back = Q @ torch.diag(basis.values.double()) @ Q.mT
            close(back, factor, sums=sums + 4 * len(factor), **options)
        squares = turned_squares(found, name, gradients)
        close(found.corrected(name), squares, sums=sums, condition=4, dtype=torch.float32)
    assert found.header["sequences"] == N * len(data) and found.header["batches"] == len(data)


class Checkpointed(Sequences):
    def body(self, x: Tensor) -> Tensor:
        return checkpoint(super().body, x, use_reentrant=False)


class Around(nn.Module):
    """A model whose only child is called "module", as that of an engine, and which returns
    something else of the loss."""

    def __init__(self, model: nn.Module | None = None, returned=lambda loss: loss) -> None:
        super().__init__()
        self.module, self.returned = model or Sequences(), returned

    def forward(self, **batch: Tensor):
        return self.returned(self.module(**batch))


class Moved(tuple):
    """A batch that moves itself."""

    def to(self, device: torch.device) -> dict:
        return {name: x.to(device) for name, x in self[0].items()}


class Stream(IterableDataset):
    """Has no length."""

    def __iter__(self):
        return iter(DATA)


DATA = sequences(2, padded=True)
LABELLED = {"mask": lambda arguments, keywords: keywords["labels"] != -100}
UNMASKED = [{"x": batch["x"], "labels": batch["labels"]} for batch in DATA]


RETURNED = (
    lambda loss: {"logits": torch.ones(3), "loss": loss},
    lambda loss: (torch.ones(3), loss),
    lambda loss: Namespace(loss=loss),
)


def total(own: nn.Module, batch: dict) -> Tensor:
    return own(**batch) * (batch["labels"] != -100).sum()


@pytest.mark.parametrize(
    ("make", "data", "options"),
    [
        (Sequences, DATA, {"loss": total, "reduction": "sum"}),
        (Sequences, UNMASKED, LABELLED),
        (Checkpointed, DATA, {}),
        (Around, DATA, {}),
        (lambda: nn.DataParallel(Sequences()), DATA, {}),
        (Sequences, DataLoader(Stream(), batch_size=None), {}),
        (Sequences, [Moved([batch]) for batch in DATA], {}),
        *((lambda returned=returned: Around(returned=returned), DATA, {}) for returned in RETURNED),
    ],
    ids="sum mask checkpoint around DataParallel stream moved mapping tuple object".split(),
)
def test_every_way_to_give_a_model_and_data_has_the_same_factors(make, data, options, tmp_path):
    expected = fit(Sequences(), DATA, out=tmp_path / "plain")
    found = fit(make(), data, out=tmp_path / "own", **options)
    assert found.header["batches"] == 2
    for name, own in zip(expected, found, strict=True):
        for side in "AG":
            close(found.factor(own, side), expected.factor(name, side), sums=N * T * 3)
        close(found.corrected(own), expected.corrected(name), sums=N * T * 3, condition=4)


def test_a_model_is_left_as_it_was(tmp_path):
    own = Sequences()
    own.twice.eval()
    before = {name: value.clone() for name, value in own.state_dict().items()}
    fit(own, sequences(2), out=tmp_path)
    exact(dict(own.state_dict()), before)
    assert own.training and not own.twice.training
    assert all(parameter.grad is None for parameter in own.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in own.modules())
    assert not torch.distributed.is_initialized()


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@pytest.mark.parametrize("labelled", [500, 250])
def test_a_true_fisher_is_that_of_the_models_own_labels_where_the_true_loss_has_terms(
    labelled, tmp_path
):
    """Of logits z = W x it is known: E over drawn labels of (p - y)(p - y)^T = diag(p) - p p^T. If
    half of the rows have no term, G is twice the mean over the others."""
    torch.manual_seed(1)
    own, x = nn.Sequential(nn.Linear(WIDTH, CLASSES)), torch.randn(500, WIDTH)
    y = torch.zeros(500).long()
    y[labelled:] = -100

    def loss(own: nn.Module, batch: Pair) -> Tensor:
        return F.cross_entropy(own(batch.x), batch.y)

    config = {"factor": {"fisher": "monte_carlo"}}
    found = fit(own, [Pair(x, y)] * 40, loss, out=tmp_path, config=config)
    p, share = own(x[:labelled]).softmax(-1).detach(), 500 / labelled
    expected = share * (torch.diag(p.mean(0)) - p.mT @ p / len(p))
    # an entry is a mean of as many products of numbers within 1 as labels are drawn: five standard
    # errors of at most 1 / sqrt of their number
    bound = share * 5 / (40 * labelled) ** 0.5
    assert float((found.factor("0", "G") - expected).abs().max()) < bound


@pytest.mark.parametrize("fisher", ["empirical", "monte_carlo", "activations_only"])
def test_an_autocast_around_the_call_counts_whatever_the_fisher(fisher, tmp_path):
    def loss(own: nn.Module, batch: Pair) -> Tensor:
        found = own(batch.x)
        assert found.dtype == torch.bfloat16
        return F.cross_entropy(found.float(), batch.y)

    data = [Pair(torch.ones(2, WIDTH), torch.tensor([0, 1]))]
    own, config = nn.Sequential(nn.Linear(WIDTH, CLASSES)), {"factor": {"fisher": fisher}}
    with torch.autocast("cpu", torch.bfloat16):
        assert fit(own, data, loss, out=tmp_path, config=config).count("0", "A") == 2


class Broken(Sequences):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)


class Root(nn.Module):
    """Its loss is finite, its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).abs().sqrt().mean()


def of_experts() -> nn.Module:
    own = Sequences()
    own.head.weight.allreduce = False  # DeepSpeed's mark
    return own


class Raises:
    def __iter__(self):
        yield sequences(1)[0]
        raise OSError("a worker died")


ROW = [torch.ones(2, WIDTH)]
UNLABELLED = [{**batch, "labels": torch.full((N, T), -100)} for batch in sequences(1)]
CASES = {
    "empty": (Sequences, [], {}, "the data is empty"),
    "no label": (Sequences, UNLABELLED, {}, "loss is nan"),
    "gradient": (Root, ROW, {}, "batch 0: a gradient is not finite"),
    "never called": (Broken, sequences(1), {}, "had no row: idle. Either they are never"),
    "an iterator": (Sequences, iter(sequences(1)), {}, "iterated once"),
    "no tensor": (Sequences, [{"x": 1}], {}, "no tensor with at least one dimension"),
    "loader": (Sequences, Raises(), {}, "rank 0, batch 1: OSError: a worker died"),
    "no loss": (lambda: nn.Sequential(nn.Linear(WIDTH, 2)), ROW, {}, "the argument loss"),
    "no scalar": (
        Sequences,
        sequences(1),
        {"loss": lambda own, batch: own(**batch).expand(2)},
        r"the loss is not a scalar: got shape \[2\]",
    ),
    "mask": (
        Sequences,
        sequences(1),
        {"mask": lambda *_: torch.ones(3)},
        r"got \[3\]; must return a mask \[N, T\]",
    ),
    "experts": (of_experts, sequences(1), {}, "head.weight is a tensor-parallel shard"),
    "no layer": (nn.Identity, sequences(1), {}, "Identity has no layer to precondition"),
    "reduction": (Sequences, sequences(1), {"reduction": "median"}, "reduction: got 'median'"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_said_and_nothing_loads(case, tmp_path):
    make, data, options, said = CASES[case]
    with pytest.raises((FactorsError, ValueError), match=said):
        fit(make(), data, out=tmp_path, **options)
    with pytest.raises(FactorsError, match="not finished"):
        Factors.load(tmp_path)
