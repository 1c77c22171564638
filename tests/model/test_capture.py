"""Hooks: what they count in every way a layer can be run. No DeepSpeed here."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_kfac.model import capture
from ds_kfac.model.convolutions import phase
from ds_kfac.model.products import Products
from ds_kfac.model.proof import Proof
from ds_kfac.model.rows import ROWS
from ds_kfac.model.scan import LayerChoice
from tests.close import close
from tests.model.recorder import Recorder, compared, equal_bits, same, unannounced
from tests.model.written import written
from tests.models import FEATURES, Stoppable, cross_entropy, make_batch, make_net
from tests.ops.specification import symmetric_pack

N, TOKENS = 4, 3
ALL_ROWS = {"first": 12, "middle": 12, "head": 12}


def loss_of(model, backward):
    backward(model(*make_batch(0, N, TOKENS)))


def captured(model: nn.Module, **options):
    """The factors of the usual loss."""
    recorder = Recorder(model, **options)
    loss_of(recorder.model, recorder.backward)
    return recorder.factors()


class Twice(nn.Module):
    """One module called twice, or two with the same parameters."""

    def __init__(self, names: int) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 5)
        self.again = self.inner
        if names > 1:
            self.again = nn.Linear(FEATURES, FEATURES)
            self.again.weight, self.again.bias = self.inner.weight, self.inner.bias

    def forward(self, x, y):
        return cross_entropy(self.head(self.again(torch.tanh(self.inner(x)))), y)


@pytest.mark.parametrize("names", [1, 2])
def test_modules_with_the_same_parameters_count_as_one_that_is_called_twice(names):
    found = compared(Twice(names), loss_of)
    assert found["inner"][2:] == (2 * N * TOKENS, N * TOKENS)


def test_what_has_no_backward_counts_nothing_whatever_mode_it_runs_in():
    """And a model in eval mode counts as in training: from_pretrained leaves it so."""
    recorder = Recorder(make_net().eval())
    for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with mode:
            recorder.model(*make_batch(0, N, TOKENS))
    loss_of(recorder.model, recorder.backward)
    equal_bits(recorder.factors(), captured(make_net()))


@pytest.mark.parametrize("how", ["inactive", "removed"])
def test_inactive_and_removed_hooks_do_nothing(how):
    recorder = Recorder(make_net())
    recorder.begin(active=False)
    if how == "removed":
        recorder.capture.remove()
        recorder.begin()
    loss_of(recorder.model, recorder.backward)
    assert not (recorder.capture.sums or recorder.capture.counted or recorder.capture.passes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_saves_the_16_bit_copy_and_sums_in_fp32(dtype):
    """The input itself may be changed in place after the layer: its product has a copy."""
    code = "x = x * 1.0\nz = self.linear(x)\nx.zero_()\nreturn z.float().square().mean()"
    model = written(code)()
    model.linear = nn.Linear(FEATURES, 5)
    recorder, x = Recorder(model), make_batch(0, N, TOKENS)[0].flatten(0, 1)
    with torch.autocast("cpu", dtype):
        loss = model(x)
    recorder.backward(loss)
    assert not recorder.capture.failed
    x = torch.cat([x.to(dtype).double(), torch.ones(len(x), 1)], dim=1)
    A = recorder.factors()["linear"].A
    assert A.dtype is torch.float32
    close(A, symmetric_pack(x.T @ x / len(x)), sums=len(x))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_an_empty_batch_counts_no_rows(sharing, sampled):
    names = {"norm": nn.LayerNorm(7), "linear": nn.Linear(7, 5), "other": nn.Linear(5, 3)}
    model = nn.Sequential()
    for name, module in names.items():
        model.add_module(name, module)
    choice = LayerChoice(types=("Linear", "LayerNorm"))
    recorder = Recorder(model, choice, sharing=sharing, sampled=sampled)

    def run(*shape: int) -> dict[str, float]:
        loss = model(torch.randn(*shape, 7).requires_grad_()).square().sum()
        (recorder.sample if sampled else recorder.backward)(loss)
        assert not recorder.capture.failed
        return recorder.rows()

    for shape in ((0, TOKENS), (0,)):
        assert not run(*shape)
    assert run(N, TOKENS) == dict.fromkeys(names, N if sharing == "reduce" else N * TOKENS)


def test_rows_by_a_stride_are_in_the_mean_over_its_places_all_of_them():
    """The place moves with the step."""
    stride, of_place = 5, {}
    for step in range(60):
        recorder = Recorder(make_net())
        recorder.begin(step, stride=stride)
        loss_of(recorder.model, recorder.backward)
        of_place[phase(step, stride)] = recorder.capture.sums
    whole = Recorder(make_net())
    loss_of(whole.model, whole.backward)
    assert len(of_place) == stride
    for key, expected in whole.capture.sums.items():
        close(sum(sums[key].sum_P for sums in of_place.values()) / stride, expected.sum_P, sums=100)
        counts = {float(sums[key].counts[ROWS]) for sums in of_place.values()}
        # of 12 rows 2 or 3, each of which stands for 5
        assert counts == {2.0 * stride, 3.0 * stride}


# which passes count


@pytest.mark.parametrize("announced", [True, False])
def test_a_forward_without_backward_counts_nothing(announced):
    """A batch whose loss is NaN and is skipped, a second training-mode forward: before, between and
    after."""
    recorder = Recorder(make_net())
    nan = torch.full((N, TOKENS, FEATURES), float("nan"))
    # its graph stays alive
    skipped = recorder.model(nan, torch.zeros(N, TOKENS, dtype=torch.long))
    loss = recorder.model(*make_batch(0, N, TOKENS))
    recorder.model(nan)
    recorder.backward(loss) if announced else loss.backward()
    recorder.model(nan)
    assert torch.isnan(skipped)
    equal_bits(recorder.factors(), captured(make_net()))


def test_a_plain_backward_counts_until_the_engine_has_announced_one():
    recorder = Recorder(make_net())
    for backward in (unannounced, recorder.backward, unannounced):
        loss_of(recorder.model, backward)
    assert recorder.rows() == {name: 2 * rows for name, rows in ALL_ROWS.items()}


def test_a_backward_that_is_stopped_counts_what_it_reached_and_the_next_micro_batch_is_whole():
    recorder = Recorder(make_net(Stoppable))
    for stops in (True, False):
        recorder.model.stops = stops
        try:
            loss_of(recorder.model, recorder.backward)
        except FloatingPointError:
            assert stops
    assert recorder.rows() == {"first": 12, "middle": 24, "head": 24}
    loss_of(recorder.model, recorder.backward)
    equal_bits(recorder.factors(), captured(make_net()))


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


@pytest.mark.parametrize("how", ["vmap", "grad", "jvp", "trace", "export", "deepcopy"])
def test_transforms_traces_and_copies_in_a_captured_step_count_nothing_and_raise_nothing(how):
    model, (x, y) = make_net(), make_batch(0, N)
    recorder = Recorder(model, sampled=how == "deepcopy")
    recorder.capture.lock = threading.Lock()  # what the hooks hold cannot be copied
    parameters = dict(model.named_parameters())
    model(x, y)
    begun, pending = recorder.capture.forward, list(recorder.capture.pending)
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
        average = copy.deepcopy(model)
        average(x, y).backward()
        assert recorder.capture.forward is begun and recorder.capture.pending == pending
    counted = recorder.capture.counted + recorder.capture.outside
    assert not (recorder.capture.sums or counted or recorder.capture.failed)
    recorder = Recorder(model)
    recorder.backward(model(x, y))
    assert recorder.rows() == ALL_ROWS


# what hooks do not understand


class LlamaRMSNorm(nn.Module):
    """As transformers': in fp32 whatever its input, so that torch does not need a 16-bit input
    after the call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x):
        z = x.float()
        scale = torch.rsqrt(z.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * z * scale


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
    model = written(code)()
    model.linear, model.norm, model.head = nn.Linear(6, 6), LlamaRMSNorm(6), nn.Linear(6, 5)
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

    def run(model, backward):
        z = model.inner(make_batch(0, N)[0])
        z = z["out"] if isinstance(z, dict) else z[:, :, :3]
        backward(model.head(torch.tanh(torch.cat([z, z], -1))).square().mean())

    def make():
        torch.manual_seed(0)
        return nn.ModuleDict({"inner": nn.Linear(FEATURES, 6), "head": nn.Linear(6, 5)})

    hooked = make()
    hooked.inner.register_forward_hook(lambda module, x, output: {"out": output[:, :, :3]})
    recorder = Recorder(hooked)
    run(hooked, recorder.backward)
    same(recorder.factors(), compared(make(), run))


# rows that are examples

REDUCED = {
    # model's code -> rows of inner, of head; R
    "two batches of different numbers of examples in one pass": (
        "one, more = (self.head(self.inner(x).tanh()).mean(1) for x in (x[:1], x[1:]))\n"
        "return torch.cat([one, more])",
        (4, 4),
    ),
    "single rows": ("return self.head(self.inner(x[:, 0]).tanh())", (4, 4)),
    "unequal tiles": (
        "z = self.inner(x).tanh()\nreturn torch.cat([self.head(tile) for tile in z.split([1, 3])])",
        (4, 4),
    ),
    "padding": (
        "return (self.head(self.inner(x).tanh()) * self.mask()[..., None]).sum(1)",
        (3, 3),
    ),
    "flattened rows": (
        "z = self.head(self.inner(x.flatten(0, 1)).tanh())\n"
        "return z * self.mask().flatten()[:, None]",
        (6, 6),
    ),
}
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)


def reducing(code: str) -> nn.Module:
    torch.manual_seed(0)
    model = written(code)()
    model.inner, model.head, model.dummy = nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(2, 1)
    model.mask = MASK.float
    return model


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", REDUCED)
def test_with_reduce_a_row_is_an_example(name, frozen):
    code, (rows, terms) = REDUCED[name]
    model, x = reducing(code), torch.randn(N, TOKENS, 6)
    model.head.requires_grad_(not frozen)
    mask = (lambda *_: MASK) if "mask" in code else lambda *_: None
    program = lambda model, backward: backward(model(x).square().mean())  # noqa: E731
    assert compared(model, program, sharing="reduce", mask=mask)["inner"][2:] == (rows, terms)


@pytest.mark.parametrize("last", [False, True])
def test_with_reduce_the_examples_are_not_those_of_a_layer_with_a_gradient_of_zeros(last):
    """A call of other dimensions that only keeps a weight in the graph; its gradient comes first or
    last."""
    first = "zero = 0 * self.dummy(torch.ones(1, 2))\n"
    code = "z = self.head(self.inner(x).tanh()).mean(1)\n"
    recorder = Recorder(
        reducing((first + code if last else code + first) + "return z + zero"), sharing="reduce"
    )
    recorder.backward(recorder.model(torch.randn(N, TOKENS, 6)).square().mean())
    assert not recorder.capture.failed and recorder.rows() == {"inner": N, "head": N}


def test_with_reduce_another_first_dimension_than_the_nearest_layers_is_said(caplog):
    """The rows of a layer whose examples are not its first dimension would be means over other
    things."""
    code = "return self.head(self.inner(x.transpose(0, 1)).tanh().transpose(0, 1)).mean(1)"
    recorder = Recorder(reducing(code), sharing="reduce")
    recorder.backward(recorder.model(torch.randn(N, TOKENS, 6)).square().mean())
    assert recorder.capture.failed.keys() == {"inner"} and recorder.rows() == {"head": N}
    assert "but here that is 3, and 4 in head" in caplog.text


# other threads


class Raw(nn.Module):
    """Its first matrix is a parameter of its own; another thread runs while the forward does."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.head = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 5)
        self.meanwhile = lambda: None

    def forward(self, x):
        copy = self.w.double()
        self.meanwhile()
        return self.head(torch.tanh(F.linear(x.double(), copy).float())).square().mean()


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
    model, x = make_net(Raw), torch.randn(N, TOKENS, 6)

    def other():
        model.meanwhile = lambda: None
        if what == "training":
            model(x).backward()
            model.zero_grad()
        elif what == "another model":
            F.linear(torch.randn(2, 6), torch.randn(3, 6, requires_grad=True)).sum().backward()
        else:
            with torch.no_grad():
                model(x)
                if what == "evaluation that raises":
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
    if what != "training":  # its calls are the model's, too
        equal_bits(found[1], found[0])


def test_functions_of_torch_are_watched_in_the_thread_that_entered_alone():
    w, seen = nn.Parameter(torch.randn(3, 6)), []
    with Products({w: 1}, seen.append):
        in_thread(lambda: F.linear(torch.randn(2, 6), w))
        assert not seen
        F.linear(torch.randn(2, 6), w)
    assert len(seen) == 1
