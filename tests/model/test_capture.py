"""Hooks: what they count in every way a layer can be run. No DeepSpeed here."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_kfac.model import capture
from ds_kfac.model.products import Products
from ds_kfac.model.proof import Proof
from ds_kfac.model.scan import LayerChoice, scan
from tests.close import exact
from tests.model.recorder import Recorder, equal_bits, proven, unannounced
from tests.model.written import module, written
from tests.models import FEATURES, make_batch, make_net
from tests.rule_cases import LlamaRMSNorm

N, TOKENS = 4, 3
ALL_ROWS = {"first": 12, "middle": 12, "head": 12}


def loss_of(model, backward):
    backward(model(*make_batch(0, N, TOKENS)))


# which passes count


def test_a_plain_backward_counts_until_the_engine_has_announced_one():
    recorder = Recorder(make_net())
    for backward in (unannounced, recorder.backward, unannounced):
        loss_of(recorder.model, backward)
    assert recorder.rows() == {name: 2 * rows for name, rows in ALL_ROWS.items()}


def test_a_pass_that_raised_leaves_the_ends_of_later_passes_to_be_seen():
    recorder = Recorder(make_net())
    x = make_batch(0, N)[0].requires_grad_()
    x.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(recorder.model(x).sum(), x)
    for loss in [recorder.model(*make_batch(seed, N)) for seed in (1, 2)]:
        loss.backward()
    recorder.capture.end_step()
    assert recorder.capture.passes == 2


@pytest.mark.parametrize("style", ["engine", "torch", "frozen"])
def test_another_model_s_loss_counts_nothing(style):
    """The generator's backward is announced by its engine, by nobody, or the discriminator is
    frozen meanwhile."""
    torch.manual_seed(0)
    generator, x = nn.Sequential(nn.Linear(FEATURES, FEATURES)), torch.randn(N, FEATURES)
    critic = nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), nn.Linear(9, 1))
    other = Recorder(generator)

    def step(generates: bool):
        recorder = Recorder(critic)
        announced = style == "engine"
        for batch in (x, generator(x).detach()):
            if generates:
                critic.requires_grad_(style != "frozen")
                loss = critic(generator(x)).square().mean()
                (other.backward if announced else unannounced)(loss)
                critic.requires_grad_(True)
            loss = critic(batch).square().mean()
            (recorder.backward if announced else unannounced)(loss)
        found = recorder.factors()
        recorder.capture.remove()
        return found

    equal_bits(step(generates=True), step(generates=False))
    assert torch.count_nonzero(generator[0].weight.grad) > 0


def test_a_backward_of_another_engine_is_none_of_several_forwards():
    """A generator's goes through its discriminator, which proves its rows; then comes the
    discriminator's own."""
    judge = Recorder(nn.Sequential(nn.Linear(7, 5)))
    other = Recorder(nn.Sequential(nn.Linear(7, 7)))
    judge.begin(proof=Proof(judge.layers, judge.capture.inputs.key, 0, torch.device("cpu")))
    for recorder, x in ((other, other.model(torch.randn(6, 7))), (judge, torch.randn(6, 7))):
        recorder.backward(judge.model(x).square().mean())
    assert judge.capture.outside == 1
    assert judge.factors()["0"][2:] == (6, 6)


@pytest.mark.parametrize("first", ["a method", "the model"])
def test_a_method_of_the_model_may_be_called_in_place_of_the_model(first):
    model = nn.Sequential(nn.Linear(7, 5))
    recorder = Recorder(model)
    for rows, called in ((6, model if first == "the model" else model[0]), (3, model[0])):
        recorder.backward(called(torch.randn(rows, 7)).square().mean())
    assert recorder.factors()["0"][2:] == (9, 9)


@pytest.mark.parametrize("how", ["vmap", "trace", "export", "deepcopy"])
def test_transforms_traces_and_copies_in_a_captured_step_count_nothing_and_raise_nothing(how):
    model, (x, y) = make_net(), make_batch(0, N)
    recorder = Recorder(model, sampled=how == "deepcopy")
    recorder.capture.lock = threading.Lock()  # what the hooks hold cannot be copied
    model(x, y)
    begun, pending = recorder.capture.forward, list(recorder.capture.pending)
    if how == "vmap":
        torch.func.vmap(model)(x)
    elif how == "trace":
        torch.jit.trace(model, (x,), check_trace=False)
    elif how == "export":
        torch.export.export(model, (x,))
    else:
        average = copy.deepcopy(model)
        average(x, y).backward()
        assert recorder.capture.forward is begun and recorder.capture.pending == pending
    counted = recorder.capture.counted + recorder.capture.outside
    assert not (recorder.capture.sums or counted or recorder.capture.failed)
    recorder = Recorder(model)
    recorder.backward(model(x, y))
    assert recorder.rows() == ALL_ROWS


# what hooks do not understand


CHANGED = "x = self.linear(x).bfloat16()\nz = self.norm(x)\nx += 1\nreturn self.head(z + x.float())"
SPARSE = "return self.head(x) + self.norm(self.linear(torch.eye(6).to_sparse())).sum()"


@pytest.mark.parametrize(
    ("code", "failed", "text", "rows"),
    [
        (CHANGED, "norm", "modified by an inplace", {"linear": 7, "head": 7}),
        (SPARSE, "linear", "linear (Linear)", {"norm": 6, "head": 7}),
    ],
    ids=["an input that is changed in place", "an input that is no dense tensor"],
)
def test_a_call_that_hooks_do_not_understand_raises_nothing_and_its_layer_is_named(
    code, failed, text, rows, caplog
):
    model = module(code, linear=nn.Linear(6, 6), norm=LlamaRMSNorm(6), head=nn.Linear(6, 5))
    recorder = Recorder(model, LayerChoice(types=("Linear", "RMSNorm")))
    recorder.backward(model(torch.randn(7, 6)).square().mean())
    assert recorder.capture.failed.keys() == {failed} and recorder.rows() == rows
    assert f"the rows of {failed} (" in caplog.text and text in caplog.text
    assert model.get_submodule(failed).weight.grad is not None


def test_a_hook_that_raises_leaves_its_layer_without_rows_and_says_so(caplog, monkeypatch):
    recorder, kind = Recorder(make_net()), type(capture.LAYERS["Linear"])
    with monkeypatch.context() as patched:
        patched.setattr(kind, "gradient_rows", lambda self, module, x, gradient: 1 / 0)
        loss_of(recorder.model, recorder.backward)
    loss_of(recorder.model, recorder.backward)
    assert recorder.capture.failed.keys() == ALL_ROWS.keys() and not recorder.factors(), "nor later"
    assert "ZeroDivisionError" in caplog.text and "middle (Linear)" in caplog.text


def test_hooks_of_others_come_after_ours():
    """Someone's hooks make something else of an output."""
    code = """
        z = self.inner(x)
        return self.head(z["out"] if isinstance(z, dict) else z).square().mean()
    """
    found = []
    for hook in (lambda *_: None, lambda module, x, output: {"out": output}):
        torch.manual_seed(0)
        model = module(code, inner=nn.Linear(FEATURES, 6), head=nn.Linear(6, 5))
        model.inner.register_forward_hook(hook)
        recorder = Recorder(model)
        recorder.backward(model(make_batch(0, N)[0]))
        found.append(recorder.factors())
    equal_bits(*found)


# rows that are examples


def test_with_reduce_another_first_dimension_than_the_nearest_layers_is_said(caplog):
    """The rows of a layer whose examples are not its first dimension would be means over other
    things."""
    code = "return self.head(self.inner(x.transpose(0, 1)).tanh().transpose(0, 1)).mean(1)"
    model = module(code, inner=nn.Linear(6, 6), head=nn.Linear(6, 5))
    recorder = Recorder(model, sharing="reduce")
    recorder.backward(recorder.model(torch.randn(N, TOKENS, 6)).square().mean())
    assert recorder.capture.failed.keys() == {"inner"} and recorder.rows() == {"head": N}
    assert "its size is 3 in this layer, and 4 in head" in caplog.text


# convolutions


def test_both_sides_of_a_sample_are_from_the_same_positions():
    """With one-hot images A and G say where their rows came from."""
    recorder = Recorder(nn.Sequential(nn.Conv2d(64, 64, 1, bias=False)), positions=True)
    x = torch.eye(64).view(1, 64, 8, 8).repeat(20, 1, 1, 1)
    weight = torch.randn(20, 64, 8, 8)
    diagonal = torch.arange(1, 65).cumsum(0) - 1
    for turn in range(3):
        recorder.begin(turn)
        y = recorder.model(x)
        recorder.backward((y * weight * x).sum())  # channel c has a gradient at position c only
        seen = [packed[diagonal] > 0 for packed in recorder.factors()["0"][:2]]
        assert torch.equal(seen[0], seen[1]) and 0 < int(seen[0].sum()) < 64


def test_an_image_without_a_batch_dimension_is_a_batch_of_one():
    torch.manual_seed(0)
    up = nn.ConvTranspose2d(4, 4, 2, groups=2)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), up)
    x = torch.randn(3, 6, 6)  # of 4 channels and 4 rows where the second layer sees it
    found = []
    for image in (x, x[None]):
        recorder = Recorder(copy.deepcopy(model))
        recorder.backward(recorder.model(image).square().mean())
        found.append(recorder.factors())
    assert [factors.rows for factors in found[0].values()] == [16, 16]
    exact(found[0], found[1])


FORWARDS = {
    "causal": "return super(type(self), self).forward(F.pad(x, (2, 0)))",
    "same": "return F.conv1d(F.pad(x, (0, 1)), self.weight, self.bias, self.stride, groups=2)",
    # passes on what it was given; the weight in another dtype is a copy
    "copied": """
        def _conv_forward(self, x, weight, bias):
            return super(type(self), self)._conv_forward(
                x.double(), weight.double(), bias.double()
            ).float()
    """,
    "of tokens [N, L, C]": "return super(type(self), self).forward(x.mT).mT[:, :4]",
    "another window": "return F.conv1d(x, self.weight, self.bias, dilation=2, groups=2)",
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_convolution_with_a_forward_of_its_own_is_seen_where_it_convolves(name):
    """A window that is not the module's is not taken for it: the layer is silent, of which the
    engine warns."""
    torch.manual_seed(0)
    conv = written(FORWARDS[name], nn.Conv1d)(4, 6, 3, stride=1 + (name == "same"), groups=2)
    model = nn.Sequential(conv, nn.Tanh(), nn.Conv1d(6, 2, 1))
    if "tokens" in name:
        model = nn.Sequential(conv)
    x = torch.randn(5, 4, 4 if "tokens" in name else 9)
    layers = scan(model, LayerChoice(types=("Conv1d",))).layers
    found = proven(model, layers, [x], loss=lambda model, x: model(x).square().mean())
    assert all(seen.fits for seen in found.values()) or name == "another window"
    assert (found["0"].calls == 0) == (name == "another window")


# other threads


# its first matrix is a parameter of its own; another thread runs while the forward does
RAW = """
copy = self.w.double()
self.meanwhile()
return self.head(torch.tanh(F.linear(x.double(), copy).float())).square().mean()
"""


def in_thread(function) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


@pytest.mark.parametrize("what", ["evaluation that raises", "another model"])
def test_another_thread_does_not_disturb_a_captured_forward(what):
    model, x = module(RAW, w=(6, 6), head=nn.Linear(6, 5)), torch.randn(N, TOKENS, 6)

    def other():
        model.meanwhile = lambda: None
        if what == "another model":
            F.linear(torch.randn(2, 6), torch.randn(3, 6, requires_grad=True)).sum().backward()
        else:
            with torch.no_grad():
                model(x)
                with pytest.raises(RuntimeError):
                    model(torch.randn(2, 7))

    found, plain = [], F.linear
    for meanwhile in (lambda: None, lambda: in_thread(other)):
        recorder = Recorder(model)
        model.meanwhile = meanwhile
        recorder.backward(model(x))
        assert F.linear is plain and not recorder.capture.failed
        found.append(recorder.factors())
        recorder.capture.remove()
    assert "w" in found[0]
    equal_bits(found[1], found[0])


def test_functions_of_torch_are_watched_in_the_thread_that_entered_alone():
    w, seen = nn.Parameter(torch.randn(3, 6)), []
    with Products({w: 1}, seen.append):
        in_thread(lambda: F.linear(torch.randn(2, 6), w))
        assert not seen
        F.linear(torch.randn(2, 6), w)
    assert len(seen) == 1
