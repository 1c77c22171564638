"""``ds_kfac.fit`` against factors computed in float64 from plain hooks' inputs and gradients."""

import errno
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ds_kfac
from ds_kfac.factors import files, fitting
from ds_kfac.factors.files import Factors, FactorsError
from ds_kfac.factors.fitting import fit
from examples.gpt import GPT, GPTConfig
from tests.close import close, exact
from tests.factors.worker import batches, model

WIDTH, CLASSES, T, N = 7, 5, 6, 3


class Sequences(nn.Module):
    """Two calls of one layer, a bias, a layer without; a mean over labelled terms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.twice, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return F.cross_entropy(self.head(h).reshape(-1, CLASSES), labels.flatten())


class Mixed(Sequences):
    """The same where a position sees those before it: rows without a label have gradients."""

    def forward(self, x: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(x + torch.tanh(self.twice(x)).cumsum(dim=1), labels)


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
    return [
        {
            "x": torch.randn(N, 2, 5, 7, generator=generator),
            "labels": torch.randint(CLASSES, (N,), generator=generator),
        }
        for _ in range(count)
    ]


def rows_of(own: nn.Module, batch: dict) -> tuple[dict[str, tuple[Tensor, Tensor]], int]:
    """Layer -> inputs [N, T, I] and gradients [N, T, O] of a mean loss's terms, calls behind each
    other, padding without a gradient set to zero; and the number of rows of the head."""
    seen: dict[str, list] = {}

    def keep(name: str, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        output.retain_grad()
        seen.setdefault(name, []).append((module, inputs[0], output))

    handles = [
        layer.register_forward_hook(partial(keep, name)) for name, layer in own.named_children()
    ]
    own(**batch).backward()
    for handle in handles:
        handle.remove()
    mask = batch.get("attention_mask", torch.ones(batch["labels"].shape))
    terms = int(mask.sum())
    found = {}
    for name, calls in seen.items():
        xs, gs = [], []
        for module, x, y in calls:
            x, g = x.detach(), y.grad * terms
            if isinstance(module, nn.Conv2d):
                x = F.unfold(x, module.kernel_size, padding=module.padding, stride=module.stride).mT
                g = g.flatten(2).mT
            x = (
                torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)
                if module.bias is not None
                else x
            )
            x, g = (t.reshape(len(batch["labels"]), -1, t.shape[-1]) for t in (x, g))
            if batch["labels"].ndim == 2:
                x = x * ((g != 0).any(-1) | (mask != 0)).unsqueeze(-1)
            xs, gs = [*xs, x], [*gs, g]
        found[name] = torch.cat(xs, dim=1), torch.cat(gs, dim=1)
    return found, terms


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (Sequences, sequences(4)),
        (Sequences, sequences(4, labelled=False)),
        (Sequences, sequences(4, padded=True)),
        (Mixed, sequences(4, padded=True)),
        (Images, images(4)),
    ],
    ids=["sequences", "some without a label", "padded", "padding with gradients", "images"],
)
def test_factors_and_eigenvalues_are_those_of_the_rows(kind, data, tmp_path):
    own = kind()
    found = fit(own, data, out=tmp_path / "factors", progress=False)
    double = kind().double()
    double_data = [
        {k: v.double() if v.is_floating_point() else v for k, v in batch.items()} for batch in data
    ]
    of_batches = [rows_of(double, batch) for batch in double_data]
    terms = sum(number for _, number in of_batches)
    for name in found:
        pairs = [rows[name] for rows, _ in of_batches]
        rows = sum(int((x != 0).any(-1).sum()) for x, _ in pairs)
        sums = rows + 100  # of the rows, and of the products and softmax in front of them
        A = sum(x.flatten(0, 1).mT @ x.flatten(0, 1) for x, _ in pairs)
        G = sum(g.flatten(0, 1).mT @ g.flatten(0, 1) for _, g in pairs)
        assert found.count(name, "A") == rows and found.count(name, "G") == terms
        close(found.factor(name, "A"), A / rows, sums=sums, dtype=torch.float32)
        close(found.factor(name, "G"), G / terms, sums=sums, condition=2, dtype=torch.float32)
        basis = {side: found.eigenbasis(name, side) for side in "AG"}
        Q = {side: basis[side].vectors[0][0].double() for side in "AG"}
        for side, factor in (("A", A / rows), ("G", G / terms)):
            back = Q[side] @ torch.diag(basis[side].values.double()) @ Q[side].mT
            close(back, factor, sums=sums + 4 * len(factor), condition=2, dtype=torch.float32)
        turned = [(x @ Q["A"], g @ Q["G"]) for x, g in pairs]
        squares = sum(((g.mT @ x) ** 2).sum(dim=0) for x, g in turned) / (N * len(data))
        close(found.corrected(name), squares, sums=sums, condition=4, dtype=torch.float32)
    assert found.header["sequences"] == N * len(data) and found.header["batches"] == len(data)


def test_a_model_is_left_as_it_was(tmp_path):
    own = Sequences()
    own.twice.eval()
    before = {name: value.clone() for name, value in own.state_dict().items()}
    fit(own, sequences(2), out=tmp_path, progress=False)
    exact(dict(own.state_dict()), before)
    assert own.training and not own.twice.training
    assert all(parameter.grad is None for parameter in own.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in own.modules())
    assert not torch.distributed.is_initialized()


def test_a_sum_of_terms_gives_the_same_as_their_mean(tmp_path):
    def total(own: nn.Module, batch: dict) -> Tensor:
        return own(**batch) * (batch["labels"] != -100).sum()

    data = sequences(3, padded=True)
    mean = fit(Sequences(), data, out=tmp_path / "mean", progress=False)
    summed = fit(Sequences(), data, total, out=tmp_path / "sum", reduction="sum", progress=False)
    for name in mean:
        for side in "AG":
            close(summed.factor(name, side), mean.factor(name, side), sums=N * T * 3)


def test_a_mask_of_ones_own_excludes_padding(tmp_path):
    data = sequences(3, padded=True)
    bare = [{"x": batch["x"], "labels": batch["labels"]} for batch in data]
    expected = fit(Sequences(), data, out=tmp_path / "argument", progress=False)
    found = fit(
        Sequences(),
        bare,
        out=tmp_path / "own",
        mask=lambda arguments, keywords: keywords["labels"] != -100,
        progress=False,
    )
    for name in found:
        for side in "AG":
            exact(found.factor(name, side), expected.factor(name, side))
    with pytest.raises(FactorsError, match=r"got \[3\]; must return masks \[N, T\]"):
        fit(Sequences(), bare, out=tmp_path / "no", mask=lambda *_: torch.ones(3), progress=False)


class Checkpointed(Sequences):
    def forward(self, x: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        def body(x: Tensor) -> Tensor:
            return torch.tanh(self.twice(torch.tanh(self.twice(x))))

        h = checkpoint(body, x, use_reentrant=False)
        return F.cross_entropy(self.head(h).reshape(-1, CLASSES), labels.flatten())


def test_activation_checkpointing_changes_nothing(tmp_path):
    data = sequences(2, padded=True)
    expected = fit(Sequences(), data, out=tmp_path / "plain", progress=False)
    found = fit(Checkpointed(), data, out=tmp_path / "checkpointed", progress=False)
    for name in expected:
        for side in "AG":
            exact(found.factor(name, side), expected.factor(name, side))
        exact(found.corrected(name), expected.corrected(name))


def test_without_gradients_only_A_is_there(tmp_path):
    data = sequences(3, padded=True)
    found = fit(
        Sequences(),
        data,
        out=tmp_path / "A",
        config={"factor": {"fisher": "activations_only"}},
        progress=False,
    )
    both = fit(Sequences(), data, out=tmp_path / "both", progress=False)
    exact(found.factor("head", "A"), both.factor("head", "A"))
    exact(found.factor("head", "G"), torch.eye(CLASSES))
    with pytest.raises(FactorsError, match=r"no head/corrected"):
        found.corrected("head")


def test_a_true_fisher_is_that_of_the_models_own_labels(tmp_path):
    """Of logits z = W x it is known: E over drawn labels of (p - y)(p - y)^T = diag(p) - p p^T."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    own, x = Classifier(), torch.randn(500, WIDTH, generator=torch.Generator().manual_seed(2))
    config = {"factor": {"fisher": "monte_carlo"}}
    found = fit(own, [(x,)] * 40, out=tmp_path, config=config, progress=False)
    p = own(x).softmax(-1).detach()
    expected = torch.diag(p.mean(0)) - p.mT @ p / len(p)
    # an entry is a mean of 20,000 products of numbers within 1: five standard errors of at most 1 /
    # sqrt(20,000)
    assert float((found.factor("head", "G") - expected).abs().max()) < 5 / 20_000**0.5


def test_labels_are_drawn_where_the_true_loss_has_terms(tmp_path):
    """Here half of the rows have none, so that G is twice the mean over the others."""
    torch.manual_seed(1)
    own, x = nn.Sequential(nn.Linear(WIDTH, CLASSES)), torch.randn(500, WIDTH)
    y = torch.cat([torch.zeros(250), torch.full((250,), -100)]).long()
    found = fit(
        own,
        [Pair(x, y)] * 40,
        lambda own, batch: F.cross_entropy(own(batch.x), batch.y),
        out=tmp_path,
        config={"factor": {"fisher": "monte_carlo"}},
        progress=False,
    )
    p = own(x[:250]).softmax(-1).detach()
    expected = 2 * (torch.diag(p.mean(0)) - p.mT @ p / len(p))
    assert float((found.factor("0", "G") - expected).abs().max()) < 2 * 5 / 10_000**0.5


class Pooled(nn.Module):
    """A loss for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(x)).mean(dim=1)), labels)


def test_with_sharing_by_examples_a_row_is_a_sequence(tmp_path):
    generator = torch.Generator().manual_seed(5)
    data = [
        (torch.randn(N, T, WIDTH, generator=generator), torch.tensor([0, 1, 2])) for _ in range(2)
    ]
    config = {"factor": {"weight_sharing": "reduce"}}
    found = fit(Pooled(), data, out=tmp_path, config=config, progress=False)
    own, A, G = Pooled().double(), 0, 0
    for x, labels in data:
        hidden = []
        handle = own.body.register_forward_hook(
            lambda *call, hidden=hidden: hidden.append(call[-1])
        )
        loss = own(x.double(), labels)
        handle.remove()
        (gradient,) = torch.autograd.grad(loss, hidden)
        a = torch.cat([x.double().mean(dim=1), torch.ones(N, 1)], dim=1)
        g = N * gradient.sum(dim=1)
        A, G = A + a.mT @ a / (2 * N), G + g.mT @ g / (2 * N)
    assert found.count("body", "A") == found.count("body", "G") == 2 * N
    close(found.factor("body", "A"), A, sums=100, dtype=torch.float32)
    close(found.factor("body", "G"), G, sums=100, condition=2, dtype=torch.float32)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@pytest.mark.parametrize("fisher", ["empirical", "monte_carlo", "activations_only"])
def test_a_loss_of_ones_own_calls_the_model_whatever_the_fisher(fisher, tmp_path):
    seen = []

    def loss(own: nn.Module, batch: Pair) -> Tensor:
        found = own(batch.x)
        seen.append(found.dtype)
        return F.cross_entropy(found.float(), batch.y)

    own, data = (
        nn.Sequential(nn.Linear(WIDTH, CLASSES)),
        [Pair(torch.ones(2, WIDTH), torch.tensor([0, 1]))],
    )
    with torch.autocast("cpu", torch.bfloat16):
        found = fit(
            own, data, loss, out=tmp_path, config={"factor": {"fisher": fisher}}, progress=False
        )
    assert found.count("0", "A") == 2
    assert set(seen) == {torch.bfloat16}  # of the autocast around the call
    with pytest.raises(FactorsError, match=r"the loss is no scalar: got shape \[2\]"):
        fit(own, data, lambda own, batch: own(batch.x)[:, 0], out=tmp_path / "no", progress=False)


# what goes wrong


class Broken(Sequences):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)


def poisoned(value: float) -> list[dict]:
    data = sequences(3)
    data[1]["x"][0, 0, 0] = value
    return data


CASES = {
    "empty": (Sequences, [], "the data is empty"),
    "no label": (
        Sequences,
        [{**b, "labels": torch.full((N, T), -100)} for b in sequences(1)],
        "loss is nan",
    ),
    "a NaN": (Sequences, poisoned(float("nan")), "batch 1: the loss is nan"),
    "never called": (Broken, sequences(1), "1 layers had no row: idle; they are never called"),
    "an iterator": (Sequences, iter(sequences(1)), "iterated once"),
    "no tensor": (Sequences, [{"x": 1}], "no tensor that has a dimension"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_said_and_nothing_loads(case, tmp_path):
    kind, data, said = CASES[case]
    with pytest.raises(FactorsError, match=said):
        fit(kind(), data, out=tmp_path, progress=False)
    with pytest.raises(FactorsError, match="not finished"):
        Factors.load(tmp_path)


def test_a_loader_that_raises_is_named(tmp_path):
    class Loader:
        def __iter__(self):
            yield sequences(1)[0]
            raise OSError("a worker died")

    with pytest.raises(FactorsError, match="rank 0, batch 1: OSError: a worker died"):
        fit(Sequences(), Loader(), out=tmp_path, progress=False)


def test_a_gradient_that_is_not_finite_is_found_though_the_loss_is(tmp_path):
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, CLASSES, bias=False)
            nn.init.zeros_(self.head.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).abs().sqrt().mean()

    with pytest.raises(FactorsError, match="batch 0: a gradient is not finite"):
        fit(Root(), [torch.ones(2, WIDTH)], out=tmp_path, progress=False)


def test_a_model_without_a_loss_is_told_of_the_argument(tmp_path):
    with pytest.raises(FactorsError, match="the argument loss"):
        fit(
            nn.Sequential(nn.Linear(WIDTH, 2)), [torch.ones(2, WIDTH)], out=tmp_path, progress=False
        )


def test_a_full_disk_leaves_nothing_that_loads(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.safetensors(), "save_file", full)
    with pytest.raises(FactorsError, match=r"could not be written .*No space left"):
        fit(Sequences(), sequences(1), out=tmp_path, progress=False)
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob("*.safetensors"))
    monkeypatch.undo()
    fit(Sequences(), sequences(1), out=tmp_path, progress=False)


def test_factors_that_are_there_are_replaced(tmp_path):
    fit(Sequences(), sequences(1), out=tmp_path, progress=False)
    expected = fit(Sequences(), sequences(2), out=tmp_path / "new", progress=False)
    found = fit(Sequences(), sequences(2), out=tmp_path, corrected=False, progress=False)
    exact(found.factor("head", "G"), expected.factor("head", "G"))
    assert not found.has("head", "corrected")


def test_a_run_that_is_killed_leaves_nothing_that_loads(tmp_path):
    def stops():
        yield sequences(1)[0]
        raise KeyboardInterrupt

    fit(Sequences(), sequences(1), out=tmp_path, progress=False)
    with pytest.raises(KeyboardInterrupt):
        fit(Sequences(), stops(), out=tmp_path, corrected=False, progress=False)
    with pytest.raises(FactorsError, match="not finished"):
        Factors.load(tmp_path)


def test_a_reduction_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match="reduction: got 'median'"):
        fit(Sequences(), sequences(1), out=tmp_path, reduction="median")


def test_names_that_are_not_there_are_answered_with_near_ones(tmp_path):
    found = fit(Sequences(), sequences(1), out=tmp_path, progress=False)
    with pytest.raises(FactorsError, match="no layer 'twise'; there is twice"):
        found.factor("twise", "A")
    (tmp_path / "factors-00000.safetensors").unlink()
    with pytest.raises(FactorsError, match=r"factors-00000\.safetensors: head/A is damaged"):
        Factors.load(tmp_path).factor("head", "A")


def test_the_passes_take_few_more_flops_than_training(tmp_path):
    """docs/howto/factors_for_other_tools.md has the number: 4.1 forward passes, where a training
    step takes 3."""
    own, batch = GPT(GPTConfig(width=128, blocks=1)), (torch.zeros(4, 128, dtype=torch.long),) * 2

    def flops(work) -> float:
        with FlopCounterMode(display=False) as counted:
            work()
        return counted.get_total_flops()

    forward = flops(lambda: own(*batch))
    first = flops(
        lambda: fit(own, [batch], out=tmp_path / "first", corrected=False, progress=False)
    )
    both = flops(lambda: fit(own, [batch], out=tmp_path / "both", progress=False))
    assert 2 * forward < first < 4.5 * forward
    assert both - first < 8 * forward


def test_layers_leave_in_rounds_of_bounded_size(tmp_path, monkeypatch):
    """The same whatever is in a round; transient sums are of at most ROUND_BYTES, or of one
    layer."""
    data = batches(2)
    one = fit(model(), data, out=tmp_path / "one", progress=False)
    monkeypatch.setattr(fitting, "ROUND_BYTES", 4096)
    plan = fitting.plan_of(
        ds_kfac.model.scan.scan(model()).layers, one_config(), 1, torch.device("cpu")
    )
    specs = {spec.key: spec for spec in plan.assignment.factors}
    found = list(fitting.rounds(plan.layers, specs))
    assert len(found) > 3
    assert [layer for layers in found for layer in layers] == list(plan.layers)
    for layers in found:
        nbytes = sum(
            4 * specs[key].side.numel for layer in layers for key in layer.keys if key in specs
        )
        assert len(layers) == 1 or nbytes <= 4096
    many = fit(model(), data, out=tmp_path / "many", progress=False)
    for name in one:
        exact(many.factor(name, "G"), one.factor(name, "G"))


def one_config():
    return fitting.resolve(ds_kfac.config.keys.parse({}), fisher="empirical")[0]
