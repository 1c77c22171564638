"""At which of the losses that a model returned G's scale is taken: each against one loss made by plain torch."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_kfac.model.batch import BatchInfo
from ds_kfac.model.divisors import divided_by, micro_batches, parts_of
from ds_kfac.model.loss import losses_in
from ds_kfac.model.output import of_levels, returned_loss, terms_of
from ds_kfac.model.reductions import Reduction, terms_in
from ds_kfac.model.scan import LayerChoice
from tests.close import close
from tests.model.test_capture import Recorder

N, D, C = 6, 7, 5
KINDS = LayerChoice(types=("Linear", "Conv2d"))


class Net(nn.Module):
    """Two losses of one trunk, returned as they are asked for."""

    def __init__(self, returned: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.one, self.other = nn.Linear(D, 8), nn.Linear(8, C), nn.Linear(8, 1)
        self.scale, self.returned = nn.Parameter(torch.tensor(0.5)), returned

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.trunk(x))
        aux = F.mse_loss(self.other(h).squeeze(-1), t)
        raw = self.one(h)
        logits = raw * self.scale.exp()
        ce = F.cross_entropy(logits, y)
        values = {"ce": ce, "aux": aux, "sum": ce + 0.01 * aux, "accuracy": ce.detach(), "scale": self.scale.exp()}
        values |= {"raw": raw, "logits": logits, "hidden": h, "part": h.square().mean(), "list": [{"logits": logits}]}
        values["losses"] = torch.stack([ce, aux])
        return {name: values[name] for name in self.returned.split()}


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, t = torch.randn(N, D, generator=generator), torch.randn(N, generator=generator)
    return x, torch.randint(C, (N,), generator=generator), t


def expected(model: Net, loss_of) -> dict[str, Tensor]:
    """Of each layer G = mean over rows of (N g)(N g)^T, packed."""
    model, found = copy.deepcopy(model), {}
    for name in ("trunk", "one", "other"):

        def see(module, inputs, output, name=name) -> None:
            output.register_hook(lambda g: found.update({name: N * g.T @ g}))

        getattr(model, name).register_forward_hook(see)
    loss_of(model(*batch())).backward()
    return {name: G[tuple(torch.tril_indices(*G.shape))] for name, G in found.items()}


CASES = {
    "weighed": ("aux ce", lambda v: v["ce"] + 0.1 * v["aux"], 1),
    "weighed, the first less": ("ce aux", lambda v: 0.1 * v["ce"] + v["aux"], 1),
    "a mean of a stack": ("ce aux", lambda v: torch.stack([v["ce"], 3 * v["aux"]]).mean(), 1),
    "one of two, bounded and divided": ("aux ce", lambda v: v["ce"].clamp(max=50).sqrt().square() / 8, 8),
    "one of those of several ranks, weighed and divided": (
        "aux ce",
        lambda v: (torch.where(CHOSEN, torch.stack([v["ce"], v["ce"].detach()]), 0.0) * CHOSEN).sum() / 8,
        8,
    ),
    "one of those of several ranks, cast and divided": (
        "aux ce",
        lambda v: torch.stack([v["ce"], v["ce"].detach()]).double().sum() / 8,
        8,
    ),
    "a vector of them": ("losses", lambda v: v["losses"] @ torch.tensor([1.0, 0.1]), 1),
    "a vector of them first": ("losses logits", lambda v: v["losses"].mean(), 1),
    "one of two, divided": ("aux ce", lambda v: v["ce"] / 8, 8),
    "their sum, returned last": ("ce aux sum", lambda v: v["sum"] / 8, 8),
    "their sum, returned first": ("sum aux ce", lambda v: v["sum"].float() / 8, 8),
    "a number first": ("accuracy ce", lambda v: v["ce"] / 8, 8),
    "a temperature first": ("scale ce", lambda v: v["ce"] / 8, 8),
    "a part, and a loss of the prediction": ("logits aux", lambda v: outside(v) + 0.01 * v["aux"], 1),
    "a part, and a loss of what is in a list": ("aux list", lambda v: 0.01 * v["aux"] + outside(v["list"][0]), 1),
    "a part that is made last": ("raw part", lambda v: outside({"logits": v["raw"]}) + 0.01 * v["part"], 1),
    "one, and a distillation of its logits": ("ce logits hidden", lambda v: 0.1 * v["ce"] + 0.9 * outside(v), 1),
    "one times 0, and a distillation": ("ce logits", lambda v: 0 * v["ce"] + outside(v), 1),
    "one and a penalty, divided": ("ce logits", lambda v: (v["ce"] + PENALTY.square().mean().sqrt()) / 8, 8),
    "one beside its logits, divided": ("logits ce hidden", lambda v: v["ce"] / 8, 8),
}
CHOSEN = torch.tensor([True, False])
PENALTY = nn.Parameter(torch.ones(D, D))


def outside(values) -> Tensor:
    return F.cross_entropy(values["logits"], batch()[1].flip(0))


PLAIN = (
    "their sum, returned first", "a number first", "a temperature first", "one beside its logits, divided",
    "a part, and a loss of the prediction", "a part, and a loss of what is in a list", "a part that is made last",
)  # fmt: skip
"""Where a plain loss.backward() is of the first that can be one; of others it is not known which they are of."""


@pytest.mark.parametrize(("name", "announced"), [*((name, True) for name in CASES), *((name, False) for name in PLAIN)])
def test_the_scale_of_G_is_that_of_the_loss_that_is_trained(name, announced):
    """What the caller makes of one loss does not matter; of several it makes the loss."""
    returned, loss_of, divided = CASES[name]
    model = Net(returned)
    recorder = Recorder(model, KINDS)
    loss = loss_of(model(*batch()))
    if announced:
        recorder.backward(loss)
    else:
        loss.backward()
    whole = expected(model, lambda values: loss_of(values) * divided)
    found = {name: G for name, (_, G) in recorder.means().items()}
    assert found.keys() == whole.keys()
    for layer, G in whole.items():
        close(found[layer], G, sums=10 * N)


def test_losses_of_two_forwards_give_their_scale_whatever_is_made_of_both_predictions():
    """A mean over two forwards, as with R-Drop."""
    found = []
    for weight in (0.0, 1.0):
        model = Net("ce logits")
        recorder = Recorder(model, KINDS)
        one, other = model(*batch()), model(*batch())
        loss = (one["ce"] + other["ce"]) / 2 + weight * F.mse_loss(one["logits"], other["logits"])  # no gradient
        recorder.backward(loss)
        found.append({name: G for name, (_, G) in recorder.means().items()})
    whole = expected(Net("ce logits"), lambda values: values["ce"])
    for name, G in found[0].items():
        close(G, whole[name], sums=10 * N)
        close(found[1][name], G, sums=10 * N)


@dataclass
class Output:
    loss: Tensor | None
    sample: Tensor


class Shaped(Net):
    """The loss in another form, beside what else is returned."""

    form: Callable[[Tensor, Tensor], object]

    def forward(self, *values: Tensor) -> object:
        found = super().forward(*values)
        return self.form(found["ce"], found["logits"])


TARGET = torch.zeros(2, 7, 4)
FORMS = {
    "a vector of one": lambda ce, logits: ce.unsqueeze(0), "[1, 1], in a tuple": lambda ce, logits: (ce.view(1, 1),),
    "a dataclass": lambda ce, logits: Output(ce, logits), "a namespace": lambda ce, logits: SimpleNamespace(loss=ce),
    "with its parts": lambda ce, logits: (ce, torch.stack([ce, ce, ce]).detach()),
    "a target first": lambda ce, logits: {"target": TARGET, "loss": ce, "prediction": logits},
    "without a graph": lambda ce, logits: (ce, logits.detach()),
}  # fmt: skip


def first_loss(output: object) -> Tensor:
    while not isinstance(output, Tensor):
        output = output[0] if isinstance(output, tuple) else output["loss"] if isinstance(output, dict) else output.loss
    return output.mean()


@pytest.mark.parametrize("name", FORMS)
def test_a_loss_is_found_in_whatever_form_it_is_returned(name):
    model = Shaped("ce logits")
    model.form = FORMS[name]
    recorder = Recorder(model, KINDS)
    loss = first_loss(model(*batch())) / 8
    recorder.backward(loss)
    whole = expected(Net("ce"), lambda values: values["ce"])
    for layer, (_, G) in recorder.means().items():
        close(G, whole[layer], sums=10 * N)


def test_numbers_to_look_at_and_targets_are_no_predictions():
    values = Net("ce logits")(*batch())
    terms = [
        terms_of(FORMS[name](values["ce"], values["logits"]), BatchInfo(), weight_sharing="expand").number
        for name in ("with its parts", "a target first")
    ]
    assert terms == [None, N]


ERRORS = {
    "squared": lambda v: (v - 1.5).square(), "of a constant": lambda v: 2 * (1.5 - v) ** 2,
    "mse": lambda v: F.mse_loss(v, torch.tensor(1.5)), "huber": lambda v: F.smooth_l1_loss(v, torch.tensor(0.2)),
    "logistic": lambda v: F.binary_cross_entropy_with_logits(v, torch.tensor(1.0)) + 0.1,
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_a_value_of_one_example_is_no_loss(name):
    """As of the last example of a data set, squeezed: what reaches it is of its error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
    found = []
    for squeezed in (False, True):
        recorder = Recorder(model, KINDS)
        handle = (
            model.register_forward_hook(lambda module, inputs, output: output[0], prepend=True) if squeezed else None
        )
        output = model(batch()[0][:1])
        loss = ERRORS[name](output if squeezed else output[0])
        recorder.backward(loss)
        found.append([G for _, G in recorder.means().values()])
        recorder.capture.remove()
        if handle is not None:
            handle.remove()
    for G, expected_G in zip(*found, strict=True):
        close(G, expected_G, sums=10)


def test_a_prediction_is_found_in_a_dataclass():
    assert terms_of(Output(None, torch.zeros(N, T, C)), BatchInfo(), weight_sharing="expand").number == N * T


T = 3


class Several(nn.Module):
    """Tokens, and what is made of all tokens of an example; of no row the outputs of a task that the batch has not."""

    def __init__(self, returned: str) -> None:
        super().__init__()
        self.trunk, self.head, self.score, self.returned = nn.Linear(D, 8), nn.Linear(8, C), nn.Linear(8, 1), returned

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        tokens = torch.tanh(self.trunk(x))
        values = {"tokens": tokens, "pooled": self.head(tokens.mean(1)), "score": self.score(tokens[:, 0]).squeeze(-1)}
        values |= {"none": self.head(tokens[:0, 0]), "aux": tokens.square().mean(), "hidden": (tokens, x)}
        return {name: values[name] for name in self.returned.split()}


@pytest.mark.parametrize(("returned", "of", "terms"), [
    ("tokens pooled", "tokens", N * T), ("tokens pooled", "pooled", N), ("tokens pooled", "tokens pooled", N * T),
    ("pooled tokens", "tokens", N * T), ("tokens score", "score", N), ("tokens score hidden", "hidden", N * T),
    ("none pooled", "none pooled", N), ("none pooled", "none", 0), ("aux tokens pooled", "pooled", N),
    ("aux tokens pooled", "aux", N * T), ("aux tokens pooled", "aux pooled", N),
])  # fmt: skip
def test_loss_terms_are_those_of_the_prediction_that_the_loss_is_made_of(returned, of, terms):
    torch.manual_seed(0)
    model = Several(returned)
    recorder = Recorder(model, KINDS)
    values = model(torch.randn(N, T, D))
    parts = (values[name][0] if name == "hidden" else values[name] for name in of.split())
    loss = sum(part.square().sum() for part in parts)
    recorder.backward(loss)
    assert recorder.counts("trunk")[1] == terms


def test_a_temperature_that_is_returned_is_no_loss():
    model = Net("scale ce")
    output = model(*batch())
    assert returned_loss(output) is output["ce"]
    assert returned_loss({"scale": output["scale"], "features": output["ce"].expand(3)}) is None
    assert len(losses_in(output["ce"])) == 1, "what scales logits is no part of a sum"


def test_a_small_vector_that_is_squared_over_and_over_is_walked_once():
    x = torch.ones(3, requires_grad=True)
    for _ in range(64):  # 2^64 paths
        x = x * x
    assert len(losses_in(x.sum())) == 1


@pytest.mark.parametrize(("make", "terms"), [
    (lambda x: nn.Linear(D, C)(x[0]), 1),
    (lambda x: x[0] @ nn.Parameter(torch.ones(D, C)), 1),
    (lambda x: nn.Parameter(torch.ones(C, D)) @ x[0], 1),
    (lambda x: torch.tanh(nn.Linear(D, C)(x[:1])).squeeze(0), 1),
    (lambda x: nn.Linear(D, 1)(x).squeeze(-1), N),
    (lambda x: nn.Linear(D, 1)(x)[:, 0], N),
    (lambda x: x @ nn.Parameter(torch.ones(D)), N),
    (lambda x: nn.Linear(D, C)(x).logsumexp(-1), N),
    (lambda x: nn.Parameter(torch.ones(N)) * 2, N),
])  # fmt: skip
def test_a_vector_is_one_row_s_outputs_or_a_term_for_each_example(make, terms):
    """As an agent has it that acts on one state."""
    assert terms_of(make(batch()[0]), BatchInfo(), weight_sharing="expand").number == terms


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, C, 1)

    def forward(self, x: Tensor, sizes: tuple[int, ...] = (1, 2)) -> list[Tensor]:
        h = torch.tanh(self.below(x))
        return [self.head(F.avg_pool2d(h, size)) for size in sizes]


def test_predictions_of_several_sizes_are_told_once(caplog):
    model, x = Pyramid(), torch.randn(2, 1, 4, 4)
    for sizes, told in (((1, 1), 0), ((1, 2), 1), ((1, 2), 1)):
        if told < 2 and sizes == (1, 1):
            recorder = Recorder(model, KINDS)
        loss = torch.cat([z.flatten(2) for z in model(x, sizes)], dim=2).square().mean()
        with recorder.capture.own_backward(loss):
            loss.backward()
        assert sum("of several sizes" in record.message for record in caplog.records) == told


def test_what_a_model_returns_beside_its_prediction_is_no_other_size_of_it():
    logits, hidden = (nn.Linear(D, C)(torch.randn(N, 3, D)) for _ in range(2))
    other = nn.Linear(D, C + 1)(torch.randn(N, 4, D))
    assert not of_levels({"hidden": hidden[:, :2], "logits": logits})
    assert not of_levels((logits, hidden, other, other.mean(1), torch.zeros(N, 2, C)))
    assert of_levels((logits, other, hidden[:, :2]))


def diamond(x: Tensor, times: int = 60) -> Tensor:
    for _ in range(times):
        x = x + x
    return x


@pytest.mark.parametrize(
    ("loss", "most", "expected"),
    [
        (lambda x, y: F.cross_entropy(x, y), 4, 1),
        (lambda x, y: F.cross_entropy(x, y) / 4, 4, 4),
        (lambda x, y: F.cross_entropy(x, y) / 3, 4, 3),
        (lambda x, y: F.cross_entropy(x, y) / 2 / 4, 4, 4),
        (lambda x, y: F.cross_entropy(x, y) / 7, 4, 1),
        (lambda x, y: F.cross_entropy(x, y, reduction="sum"), 4, 4),
        (lambda x, y: diamond(F.cross_entropy(x, y)), 4, 1),
        (lambda x, y: torch.tensor(0.25) * F.cross_entropy(x, y), 4, 4),
        (lambda x, y: torch.tensor(1 / 3) * F.cross_entropy(x, y), 4, 3),
    ],
)
def test_the_last_micro_batches_of_an_epoch_are_fewer(loss, most, expected):
    x = torch.randn(N, C, requires_grad=True)
    assert micro_batches(loss(x, torch.arange(N) % C).grad_fn, most) == expected
    assert micro_batches(None, most) == most, "a leaf, as of a rank without targets"


def test_a_caller_has_divided_by_the_number_of_backwards_if_every_loss_shows_it():
    assert parts_of([]) == parts_of([(1, [])]) == parts_of([(1, [1])]) == 1
    assert parts_of([(1, [4])] * 4) == parts_of([(2, [3, 4])] * 8) == 4
    assert parts_of([(4, [4])] * 4) == 1, "DeepSpeed has"
    assert parts_of([(1, [4])] * 3) == parts_of([(1, [4])] * 3 + [(1, [])]) == parts_of([(2, [4])] * 7) == 1
    assert parts_of([(1, [2]), (2, [2])]) == 1


@pytest.mark.parametrize(
    ("loss", "number", "expected"),
    [
        (lambda x, y: F.cross_entropy(x, y), 4, False),
        (lambda x, y: F.cross_entropy(x, y) / 4, 4, True),
        (lambda x, y: F.cross_entropy(x, y) * 0.25 + x.square().mean(), 4, True),
        (lambda x, y: F.cross_entropy(x, y) / 3, 4, False),
        (lambda x, y: x.square().mean() * 2, torch.tensor(4), False),
        (lambda x, y: F.cross_entropy(x, y, reduction="sum") / 4.0, torch.tensor(4), True),
        (lambda x, y: (F.cross_entropy(x, y, reduction="sum") / torch.tensor(4)) * 0.3, 4, True),
        (lambda x, y: (F.cross_entropy(x, y, reduction="none") / 4).sum(), 4, True),
        (lambda x, y: F.mse_loss(x, x.detach() + 1), None, False),
        (lambda x, y: x.square().sum(), None, True),
        (lambda x, y: F.cross_entropy(x, y) * 0.5, 0, False),
        (lambda x, y: F.cross_entropy(x, y) / 0.5, torch.tensor([2, 2]), False),
        (lambda x, y: F.cross_entropy(x, y) * (1 / 49), 49, True),
        (lambda x, y: (1 / torch.tensor(49)) * F.cross_entropy(x, y), torch.tensor(49), True),
    ],
)
def test_a_division_of_a_loss_is_seen_and_a_mean_is_none(loss, number, expected):
    x = torch.randn(N, C, requires_grad=True)
    assert divided_by(loss(x, torch.arange(N) % C).grad_fn, number) is expected


def test_a_number_of_terms_that_the_host_knows_is_none_of_the_cpus_tensors():
    """Beside a GPU's it could not be stacked."""
    sums = [Reduction((at, 0), terms=terms, made=(str(at),)) for at, terms in enumerate((3, 5, 0))]
    assert type(terms_in(sums)) is int and terms_in(sums) == 5
    assert terms_in(sums[2:]) == 0 and terms_in([]) is None
    assert terms_in([*sums, Reduction((9, 0), terms=torch.tensor(4), made=("9",))]) == 5
