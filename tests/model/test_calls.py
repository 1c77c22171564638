"""Calls that hooks do not understand, that are recomputed, or that another thread or engine
makes."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_kfac.model import capture
from ds_kfac.model.convolutions import phase
from ds_kfac.model.products import Products
from ds_kfac.model.proof import Proof
from ds_kfac.model.rows import ROWS
from tests.close import close
from tests.model.recorder import Recorder, compared, same
from tests.ops.specification import symmetric_pack

N, T, WIDTH, CLASSES = 4, 3, 6, 5


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


# recomputed products


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts, self.router = (
            nn.Parameter(torch.randn(2, WIDTH, WIDTH)),
            nn.Parameter(torch.randn(2, WIDTH)),
        )

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
        z = (
            self.mixture(x)
            if self.reentrant is None
            else checkpoint(self.mixture, x, use_reentrant=self.reentrant)
        )
        return F.cross_entropy(self.head(z).reshape(-1, CLASSES), y.reshape(-1))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("announced", [True, False])
def test_products_are_seen_where_checkpointing_runs_them_again(reentrant, announced):
    found = []
    for kind in (None, reentrant):
        model = Checkpointed()
        model.reentrant = kind
        torch.manual_seed(1)
        nn.init.normal_(model.head.weight)
        recorder = Recorder(model)
        loss = model(*batch())
        recorder.backward(loss) if announced else loss.backward()
        assert not recorder.capture.failed
        found.append(recorder.factors())
    assert {"mixture.router", "mixture.experts.0", "mixture.experts.1", "head"} == found[0].keys()
    same(found[1], found[0])


@pytest.mark.parametrize("captures", [(True, False), (False, True)])
def test_products_recomputed_after_the_steps_boundary_save_what_they_saved(captures):
    model = Checkpointed()
    model.reentrant = False
    recorder = Recorder(model)
    loss = None
    for step, active in enumerate(captures):
        recorder.begin(step) if active else recorder.capture.begin_step(None, step)
        loss = model(*batch()) if loss is None else loss
    recorder.backward(loss)
    assert not recorder.factors() and F.linear is recorder.capture._products.__dict__.get(
        "_plain", F.linear
    )


def test_a_layer_that_fails_between_the_two_runs_of_a_block_raises_nothing():
    """Its first gradient does, and checkpointing compares what the other block's runs save."""

    class Blocks(Net):
        def forward(self, x, y=None):
            for _ in range(3):
                x = checkpoint(
                    lambda x: torch.tanh(self.inner(x)), x.requires_grad_(), use_reentrant=False
                )
            return self.loss(x, y)

    recorder = Recorder(Blocks())
    kind = type(capture.LAYERS["Linear"])
    plain = kind.gradient_rows

    def fails(self, module, x, gradient):
        return 1 / 0 if gradient.shape[-1] == WIDTH else plain(self, module, x, gradient)

    kind.gradient_rows = fails
    try:
        recorder.backward(recorder.model(*batch()))
        recorder.backward(recorder.model(*batch()))
    finally:
        kind.gradient_rows = plain
    assert recorder.capture.failed.keys() == {"inner"} and recorder.rows() == {"head": 2 * N * T}
    assert recorder.model.inner.weight.grad is not None


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
    recorder = Recorder(Net())
    plain = capture.LAYERS["Linear"].gradient_rows
    try:
        capture.LAYERS["Linear"].gradient_rows = lambda module, x, g: 1 / 0
        recorder.backward(recorder.model(*batch()))
    finally:
        del capture.LAYERS["Linear"].gradient_rows
    assert capture.LAYERS["Linear"].gradient_rows == plain
    assert recorder.capture.failed.keys() == {"inner", "head"} and not recorder.factors()
    assert "ZeroDivisionError" in caplog.text and "inner (Linear)" in caplog.text
    recorder.backward(recorder.model(*batch()))
    assert not recorder.factors(), "nor later"


def test_an_input_that_is_no_dense_tensor_raises_nothing_and_is_said(caplog):
    recorder = Recorder(Sparse())
    recorder.backward(recorder.model(*batch()))
    assert set(recorder.capture.failed) == {"inner"} and recorder.rows() == {"head": N * T}
    assert "inner (Linear)" in caplog.text


def test_hooks_of_others_come_after_ours():
    recorder = Recorder(Dict())
    recorder.backward(recorder.model(*batch()))
    found = recorder.factors()
    assert found["inner"].rows == N * T
    model, (x, y) = Dict(), batch()
    model.inner._forward_hooks.clear()
    z = model.inner(x)
    z.retain_grad()
    model.loss(torch.tanh(torch.cat([z[:, :, :3]] * 2, -1)), y).backward()
    rows = z.grad.double().reshape(-1, WIDTH)
    close(found["inner"].G, N * T * symmetric_pack(rows.T @ rows), sums=1000)


@pytest.mark.parametrize("first", ["a method", "the model"])
def test_a_method_of_the_model_may_be_called_in_place_of_the_model(first):
    model = nn.Sequential(nn.Linear(7, 5))
    recorder = Recorder(model)
    for rows, called in ((6, model if first == "the model" else model[0]), (3, model[0])):
        recorder.backward(called(torch.randn(rows, 7)).square().mean())
    found = recorder.factors()["0"]
    assert (found.rows, found.terms) == (9, 9)


@pytest.mark.parametrize("how", ["vmap", "grad", "jvp", "trace", "export", "deepcopy"])
def test_transforms_traces_and_copies_in_a_captured_step_count_nothing_and_raise_nothing(how):
    model, (x, y) = Net(), batch()
    recorder = Recorder(model)
    recorder.capture.lock = threading.Lock()  # as what the hooks hold cannot be copied
    parameters = dict(model.named_parameters())
    if how == "vmap":
        torch.func.vmap(model)(x)
    elif how == "grad":
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (x, y)))(parameters)
    elif how == "jvp":
        torch.func.jvp(model, (x,), (x,))
    elif how == "trace":
        torch.jit.trace(model, (x,), check_trace=False)
    elif how == "export":
        torch.export.export(model, (x,))
    else:
        copy.deepcopy(model)(x, y).backward()
    assert (
        not recorder.capture.sums and not recorder.capture.counted and not recorder.capture.failed
    )
    recorder.backward(model(x, y))
    assert recorder.rows() == {"inner": N * T, "head": N * T}


# weight sharing by examples


def pooled(model, backward):
    x, _ = batch()
    backward(model(x).mean(dim=1).square().mean())


def two_batches(model, backward):
    """Of different numbers of examples, in one pass."""
    x, _ = batch()
    backward(model(x[:1]).mean(dim=1).square().mean() + model(x[1:]).mean(dim=1).square().mean())


def single_rows(model, backward):
    x, _ = batch()
    backward(model(x[:, 0]).square().mean())


@pytest.mark.parametrize(("program", "terms"), [(pooled, N), (two_batches, N), (single_rows, N)])
def test_with_reduce_a_row_is_an_example(program, terms):
    found = compared(Net(), program, sharing="reduce")
    assert (found["inner"].rows, found["inner"].terms) == (terms, terms)


class MaskedPool(Net):
    """A head of pooled rows, or of flattened ones."""

    def forward(self, x, attention_mask=None):
        z = self.head(torch.tanh(self.inner(x)))
        return (z * attention_mask[..., None]).sum(dim=1).square().mean()


MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)


def test_with_reduce_padding_is_in_no_mean_and_an_example_of_padding_is_no_row():
    x, _ = batch()
    program = lambda model, backward: backward(model(x, attention_mask=MASK))  # noqa: E731
    found = compared(MaskedPool(), program, sharing="reduce")
    assert (found["inner"].rows, found["head"].terms) == (3, 3)


def test_with_reduce_another_first_dimension_than_the_nearest_layers_is_said(caplog):
    """The rows of a layer whose examples are not its first dimension would be means over other
    things."""

    class Turned(Net):
        def forward(self, x, y=None):
            return self.head(torch.tanh(self.inner(x.transpose(0, 1)).transpose(0, 1)))

    recorder = Recorder(Turned(), sharing="reduce")
    pooled(recorder.model, recorder.backward)
    assert recorder.capture.failed.keys() == {"inner"} and recorder.rows() == {"head": N}
    assert (
        '"reduce" takes the first dimension for the examples, but here that is 3, and 4 in head'
        in caplog.text
    )


@pytest.mark.parametrize("last", [False, True])
def test_with_reduce_the_examples_are_not_those_of_a_layer_with_a_gradient_of_zeros(last):
    """A call of other dimensions that only keeps a weight in the graph; its gradient comes first or
    last."""

    class Dummy(Net):
        def forward(self, x, y=None):
            early = self.dummy(torch.ones(1, 2)) if last else 0.0
            z = super().forward(x)
            return z + 0 * (early if last else self.dummy(torch.ones(1, 2)))

    model = Dummy()
    model.dummy = nn.Linear(2, 1)
    recorder = Recorder(model, sharing="reduce")
    pooled(model, recorder.backward)
    assert not recorder.capture.failed
    assert recorder.rows() == {"inner": N, "head": N}


@pytest.mark.parametrize("frozen", [False, True])
def test_with_reduce_flattened_rows_and_a_mask_raise_nothing_in_the_users_backward(frozen):
    class Flat(Net):
        def forward(self, x, attention_mask=None):
            z = self.head(torch.tanh(self.inner(x.flatten(0, 1))))
            return (z * attention_mask.flatten()[:, None]).square().mean()

    recorder = Recorder(Flat(), sharing="reduce")
    recorder.model.head.requires_grad_(not frozen)
    recorder.backward(recorder.model(batch()[0], attention_mask=MASK))
    found = recorder.factors()
    assert (found["inner"].rows, found["inner"].terms) == (6, 6), (
        "a row of a flattened batch is an example"
    )


@pytest.mark.parametrize("frozen", [False, True])
def test_with_reduce_a_head_of_unequal_tiles_raises_nothing_in_the_users_backward(frozen):
    class Tiled(Net):
        def forward(self, x, y=None):
            z = torch.tanh(self.inner(x))
            return torch.cat([self.head(tile) for tile in z.split([1, 3])])

    recorder = Recorder(Tiled(), sharing="reduce")
    recorder.model.head.requires_grad_(not frozen)
    pooled(recorder.model, recorder.backward)
    assert not recorder.capture.failed and recorder.rows()["inner"] == N


# sub-sampling


def test_rows_by_a_stride_are_in_the_mean_over_its_places_all_of_them():
    x, y = batch()
    stride, of_place = 5, {}
    for step in range(60):  # the place moves with the step
        recorder = Recorder(Net())
        recorder.begin(step, stride=stride)
        recorder.backward(recorder.model(x, y))
        of_place[phase(step, stride)] = recorder.capture.sums
    whole = Recorder(Net())
    whole.backward(whole.model(x, y))
    assert len(of_place) == stride
    for key, expected in whole.capture.sums.items():
        close(sum(sums[key].sum_P for sums in of_place.values()) / stride, expected.sum_P, sums=100)
        counts = {float(sums[key].counts[ROWS]) for sums in of_place.values()}
        assert counts == {2.0 * stride, 3.0 * stride}, (
            "of 12 rows 2 or 3, each of which stands for 5"
        )


# other threads and engines


class Raw(Net):
    """Its first matrix is a parameter of its own; another thread runs while the forward does."""

    meanwhile = staticmethod(lambda: None)

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(self.inner.weight.detach().clone())

    def forward(self, x, y=None):
        copy = self.w.double()
        self.meanwhile()
        return self.loss(torch.tanh(F.linear(x.double(), copy).float()), y)


def in_thread(function) -> None:
    errors = []

    def run():
        try:
            function()
        except Exception as error:  # shown below, in the test's thread
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors, errors


@pytest.mark.parametrize(
    "what", ["evaluation", "evaluation that raises", "training", "another model"]
)
def test_another_thread_does_not_disturb_a_captured_forward(what):
    found = []
    for disturbed in (False, True):
        model = Raw()
        recorder = Recorder(model)

        def other(model=model):
            model.meanwhile = lambda: None
            if what == "training":
                model(*batch(5)).backward()
                model.zero_grad()
                return
            if what == "another model":
                F.linear(
                    torch.randn(2, WIDTH), torch.randn(3, WIDTH, requires_grad=True)
                ).sum().backward()
                return
            with torch.no_grad():
                model(*batch(5))
                if what == "evaluation that raises":
                    with pytest.raises(RuntimeError):
                        model(torch.randn(2, WIDTH + 1))

        if disturbed:
            model.meanwhile = lambda other=other: in_thread(other)
        plain = F.linear
        recorder.backward(model(*batch()))
        assert F.linear is plain and not recorder.capture.failed
        found.append(recorder.factors())
    assert "w" in found[0]
    if what != "training":  # its calls are the model's, too
        same(found[1], found[0])


def test_functions_of_torch_are_watched_in_the_thread_that_entered_alone():
    w = nn.Parameter(torch.randn(3, WIDTH))
    seen = []
    products = Products({w: 1}, seen.append)
    with products:
        in_thread(lambda: F.linear(torch.randn(2, WIDTH), w))
        assert not seen
        F.linear(torch.randn(2, WIDTH), w)
    assert len(seen) == 1


def test_a_backward_of_another_engine_is_none_of_several_forwards():
    """A generator's goes through its discriminator, which proves its rows; then comes the
    discriminator's own."""
    judge, other = (
        Recorder(nn.Sequential(nn.Linear(7, 5))),
        Recorder(nn.Sequential(nn.Linear(7, 7))),
    )
    judge.begin(proof=Proof(judge.layers, judge.capture.inputs.key, 0, torch.device("cpu")))
    for recorder, x in ((other, other.model(torch.randn(6, 7))), (judge, torch.randn(6, 7))):
        recorder.backward(judge.model(x).square().mean())
    assert judge.capture.outside == 1
    found = judge.factors()["0"]
    assert (found.rows, found.terms) == (6, 6)
