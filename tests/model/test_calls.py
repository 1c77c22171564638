"""Which calls of a layer count, and with what scale: each against the factors of the same loss without the trick."""

import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_kfac.model import capture
from ds_kfac.model.batch import BatchInfo
from ds_kfac.model.proof import Proof
from ds_kfac.model.scan import LayerChoice
from tests.close import close
from tests.model.test_capture import Recorder

N, T, WIDTH, CLASSES = 4, 3, 6, 5
LINEAR = LayerChoice(types=("Linear", "Conv1D"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, y=None):
        return self.loss(torch.tanh(self.inner(x)), y)

    def loss(self, z, y):
        z = self.head(z)
        return z if y is None else F.cross_entropy(z.reshape(-1, CLASSES), y.reshape(-1))


def batch(seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, T, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (N, T), generator=generator)


def factors(model, run=None, *, announced=True, **options) -> dict[str, tuple[torch.Tensor, ...]]:
    """Means and counts of what ``run`` shows; of the plain loss without."""
    recorder = Recorder(model, LINEAR, **options)
    run = run or (lambda model: model(*batch()))
    loss = run(model)
    with recorder.capture.own_backward() if announced else nullcontext():
        loss.backward()
    assert not recorder.capture.failed
    counts = {layer.name: recorder.counts(layer.name) for layer in recorder.layers}
    return {name: (*pair, torch.tensor(counts[name])) for name, pair in recorder.means().items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        for a, b in zip(found[name], expected[name], strict=True):
            close(a.float(), b.float(), sums=1000)


def labelled(arguments, keywords) -> BatchInfo:
    return BatchInfo(labelled=torch.ones(N, T, dtype=torch.bool))


# calls without a gradient, or with one that is zero


class Detached(Net):
    """Targets of the layer itself; a step against the input; a norm of the weight by its product with the identity."""

    def forward(self, x, y=None):
        with torch.no_grad():
            self.inner(x + 1)
        target = self.inner(3 * x[:2]).detach()
        scale = self.inner(torch.eye(WIDTH)).detach().norm()
        return super().forward(x, y) + 0 * target.sum() + 0 * scale


class Dummy(Net):
    """As vision-language models call what a batch has nothing for."""

    def forward(self, x, y=None):
        return super().forward(x, y) + 0.0 * self.inner(torch.full((7, WIDTH), 30.0)).sum()


class DummyFirst(Net):
    def forward(self, x, y=None):
        zero = 0.0 * self.inner(torch.full((7, WIDTH), 30.0)).sum()
        return super().forward(x, y) + zero


class Tower(Net):
    """Of texts and images; a batch without an image goes through the images' layers as zeros, or past them."""

    def __init__(self, dummy: bool) -> None:
        super().__init__()
        self.dummy, self.patches, self.image = dummy, nn.Conv1d(2, WIDTH, 3), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y=None, image=None):
        if image is not None:
            x = x + self.image(self.patches(image).mean(-1))[:, None]
        elif self.dummy:
            x = x + 0.0 * self.image(self.patches(torch.ones(N, 2, 5)).mean(-1))[:, None]
        return super().forward(x, y)


@pytest.mark.parametrize("kind", [Detached, Dummy, DummyFirst])
def test_a_call_without_a_gradient_counts_nothing(kind):
    assert_same(factors(kind(), read_batch=labelled), factors(Net()))


@pytest.mark.parametrize("last", [False, True])
def test_a_micro_batch_whose_gradients_are_zero_counts_no_loss_terms_either(last):
    """G would be diluted by the texts among images, and be a zero matrix as long as a gate is zero."""
    found = []
    for dummy in (True, False):
        recorder = Recorder(Tower(dummy), LayerChoice(types=("Linear", "Conv1d")), positions=False)
        for with_image in (last, not last):
            image = torch.arange(N * 2 * 5.0).reshape(N, 2, 5).sin() if with_image else None
            with recorder.capture.own_backward():
                recorder.model(*batch(), image).backward()
        names = [layer.name for layer in recorder.layers]
        counts = {name: recorder.counts(name) for name in names}
        assert counts["image"] == [N, N * T] and counts["inner"] == [2 * N * T] * 2
        found.append({name: (*pair, torch.tensor(counts[name])) for name, pair in recorder.means().items()})
    assert_same(*found)


# backwards inside of the model's forward


class Tiled(Net):
    """The head's loss and its gradients tile by tile in the forward, as DeepSpeed's TiledFusedLogitsLoss makes them."""

    def loss(self, z, y):
        return Tiles.apply(self, z, y)


class Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, model, z, y):
        z, losses = z.detach().requires_grad_(), []
        for tile, labels in enumerate(y.chunk(2)):
            with torch.enable_grad():
                loss = Net.loss(model, z.chunk(2)[tile], labels)
            torch.autograd.backward(loss, torch.tensor(0.5))
            losses.append(loss.detach())
        ctx.save_for_backward(z.grad)
        return torch.stack(losses).mean()

    @staticmethod
    def backward(ctx, gradient):
        return None, ctx.saved_tensors[0] * gradient, None


def test_a_backward_inside_the_forward_counts_before_and_after_the_first_announced_one():
    model = Tiled()
    recorder = Recorder(model, LINEAR, read_batch=labelled)
    expected = factors(Net())
    for _ in range(2):
        with recorder.capture.own_backward():
            pass
        loss = model(*batch())
        with recorder.capture.own_backward():
            loss.backward()
        assert recorder.counts("head")[0] == N * T
        found = recorder.means()
        close(found["head"][0], expected["head"][0], sums=100)
        close(found["head"][1], expected["head"][1], sums=1000)
        close(found["inner"][0], expected["inner"][0], sums=100)


def test_a_gradient_that_goes_to_no_weight_is_none_of_the_loss():
    """Forces, penalties, steps against the input."""

    class Adversarial(Net):
        def forward(self, x, y=None):
            x = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(100 * super().forward(x, y), x)
            return super().forward(x.detach() + 0 * gradient.sign(), y)

    for announced in (True, False):
        assert_same(factors(Adversarial(), announced=announced), factors(Net()))


# the scale of G


def two_halves(model):
    x, y = batch()
    return (model(x[:2], y[:2]) + model(x[2:], y[2:])) / 2


def test_a_mean_over_several_forwards_has_the_G_of_one_of_all():
    assert_same(factors(Net(), two_halves), factors(Net()))


def test_a_loss_that_the_caller_divides_has_the_same_G():
    assert_same(factors(Net(), lambda model: model(*batch()) / 8), factors(Net()))


# recomputed products


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts, self.router = nn.Parameter(torch.randn(2, WIDTH, WIDTH)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x):
        part = F.linear(x, self.router).softmax(-1)
        return sum(part[..., e : e + 1] * torch.tanh(x @ self.experts[e]) for e in range(2))


class Checkpointed(nn.Module):
    reentrant: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.mixture, self.head = Mixture(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, y):
        x = x.clone().requires_grad_()
        z = self.mixture(x) if self.reentrant is None else checkpoint(self.mixture, x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(z).reshape(-1, CLASSES), y.reshape(-1))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("announced", [True, False])
def test_products_are_seen_where_checkpointing_runs_them_again(reentrant, announced):
    plain, again = Checkpointed(), Checkpointed()
    again.load_state_dict(plain.state_dict())
    again.reentrant = reentrant
    found = factors(again, announced=announced)
    assert {"mixture.router", "mixture.experts.0", "mixture.experts.1"} <= found.keys()
    assert_same(found, factors(plain))


# what hooks do not understand


class Sparse(Net):
    def forward(self, x, y=None):
        return super().forward(x, y) + self.inner(torch.eye(WIDTH).to_sparse()).sum()


class Dict(Net):
    """Someone's hooks make something else of an output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.register_forward_hook(lambda module, inputs, output: {"out": output[:, :, :3]})

    def forward(self, x, y=None):
        z = self.inner(x)["out"]
        return self.loss(torch.tanh(torch.cat([z, z], -1)), y)


def test_a_hook_that_raises_leaves_its_layer_without_rows_and_says_so(caplog):
    recorder = Recorder(Net(), LINEAR)
    plain = capture.LAYERS["Linear"].gradient_rows
    try:
        capture.LAYERS["Linear"].gradient_rows = lambda module, x, g: 1 / 0
        recorder.model(*batch()).backward()
    finally:
        del capture.LAYERS["Linear"].gradient_rows
    assert capture.LAYERS["Linear"].gradient_rows == plain
    assert recorder.capture.failed.keys() == {"inner", "head"} and not recorder.means()
    assert "ZeroDivisionError" in caplog.text and "inner (Linear)" in caplog.text
    recorder.model(*batch()).backward()
    assert not recorder.means(), "nor later"


def test_an_input_that_is_no_dense_tensor_raises_nothing_and_is_said(caplog):
    recorder = Recorder(Sparse(), LINEAR)
    recorder.model(*batch()).backward()
    assert set(recorder.capture.failed) == {"inner"} and set(recorder.means()) == {"head"}
    assert "inner (Linear)" in caplog.text


def test_hooks_of_others_come_after_ours():
    found = factors(Dict())
    assert found["inner"][2].tolist() == [N * T, N * T]
    model = Dict()
    x, y = batch()
    outputs = []
    model.inner._forward_hooks.clear()
    z = model.inner(x)
    z.retain_grad()
    outputs.append(z)
    model.loss(torch.tanh(torch.cat([z[:, :, :3]] * 2, -1)), y).backward()
    rows = (outputs[0].grad * N * T).reshape(-1, WIDTH)
    packed = (rows.T @ rows / (N * T))[tuple(torch.tril_indices(WIDTH, WIDTH))]
    close(found["inner"][1], packed, sums=1000)


class ActorCritic(Net):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, x, y=None):
        z = torch.tanh(self.inner(x))
        return self.head(z), self.value(z).squeeze(-1)


@pytest.mark.parametrize("divisor", [1, 2])
def test_the_terms_of_a_forward_count_once_in_a_step_of_several_losses_of_it(divisor):
    """Backward one after the other, in a step that the caller ends, whatever he divides them by."""
    recorder, model, (x, y) = Recorder(ActorCritic(), LINEAR), ActorCritic(), batch()
    found = []
    model.inner.register_forward_hook(lambda module, inputs, output: output.register_hook(found.append) and None)
    for net in (model, recorder.model):
        policy, value = net(x)
        for loss in (F.cross_entropy(policy.mT, y) / divisor, 0.5 * F.mse_loss(value, x[..., 0]) / divisor):
            with recorder.capture.own_backward(loss, retain_graph=True) if net is recorder.model else nullcontext():
                recorder.capture.begin_backward(torch.tensor(1.0))
                loss.backward(retain_graph=True)
    recorder.capture.end_backward(last=True)
    assert recorder.counts("inner") == recorder.counts("head") == recorder.counts("value") == [N * T, N * T]
    G = sum(N * T * g.flatten(0, 1).T @ g.flatten(0, 1) for g in found[:2])[tuple(torch.tril_indices(WIDTH, WIDTH))]
    close(recorder.means()["inner"][1], G, sums=1000)


@pytest.mark.parametrize("first", ["a method", "the model"])
def test_a_method_of_the_model_may_be_called_in_place_of_the_model(first):
    model = nn.Sequential(nn.Linear(7, 5))
    recorder = Recorder(model)
    for rows, called in ((6, model if first == "the model" else model[0]), (3, model[0])):
        loss = called(torch.randn(rows, 7)).square().mean()
        with recorder.capture.own_backward(loss):
            loss.backward()
    assert recorder.counts("0") == [9, 9]


class Soft(Net):
    def loss(self, z, y):
        return -(y * self.head(z).log_softmax(-1)).sum() / N


def test_targets_of_earlier_micro_batches_are_let_go():
    recorder, alive = Recorder(Soft(), LINEAR), []
    for _ in range(3):
        targets = torch.rand(N, T, CLASSES)
        alive.append(weakref.ref(targets))
        loss = recorder.model(batch()[0], targets)
        recorder.backward(loss)
        del targets, loss
    assert sum(x() is not None for x in alive) == 1
    assert recorder.counts("head") == [3 * N * T, 3 * N * T]


def test_a_backward_of_another_engine_is_none_of_several_forwards():
    """A generator's goes through its discriminator, which proves its rows; then comes the discriminator's own."""
    judge, other = Recorder(nn.Sequential(nn.Linear(7, 5)), LINEAR), Recorder(nn.Sequential(nn.Linear(7, 7)), LINEAR)
    judge.begin(proof=Proof(judge.layers, judge.capture.inputs.key, 0, torch.device("cpu")))
    for recorder, x in ((other, other.model(torch.randn(6, 7))), (judge, torch.randn(6, 7))):
        loss = judge.model(x).square().mean()
        with recorder.capture.own_backward(loss):
            loss.backward()
    assert judge.counts("0") == [6, 6] and not judge.capture.several
