"""Hooks: what they count in every way a layer can be run, and what they keep alive. No DeepSpeed
here."""

import copy
import gc
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_kfac.curvature.factor import Side
from ds_kfac.model.scan import LayerChoice
from tests.close import close
from tests.model.recorder import Recorder, Watched, compared, same
from tests.model.test_scan import Conv1D
from tests.models import FEATURES, Net, Stoppable, cross_entropy, make_batch, make_net
from tests.ops.specification import symmetric_pack

ROWS, TOKENS = 4, 3


def loss_of(model, backward):
    backward(model(*make_batch(0, ROWS, TOKENS)))


def equal_bits(found, expected) -> None:
    assert expected and found.keys() == expected.keys()
    for name in expected:
        assert found[name][2:] == expected[name][2:], name
        assert all(
            torch.equal(a, b) for a, b in zip(found[name][:2], expected[name][:2], strict=True)
        ), name


def captured(model: nn.Module, **options):
    """The factors of the usual loss."""
    recorder = Recorder(model, **options)
    loss_of(model, recorder.backward)
    return recorder.factors()


@pytest.mark.parametrize("sampled", [False, True])
def test_a_copy_of_the_model_is_made_and_leaves_no_trace(sampled):
    recorder = Recorder(Normed(8), NORMED, sampled=sampled)
    capture = recorder.capture
    # nothing that the hooks hold can be copied, as process groups cannot
    capture.lock = threading.Lock()
    x = torch.randn(5, 8, requires_grad=True)
    recorder.model(x).sum()
    begun, pending = capture.forward, list(capture.pending)
    average = copy.deepcopy(recorder.model)
    average(x).sum().backward()
    assert capture.forward is begun and capture.pending == pending
    assert capture.counted == capture.outside == 0


@pytest.mark.parametrize("plain", [False, True])
def test_factors_are_exact_with_an_in_place_activation(plain):
    compared(make_net(), loss_of, plain=plain)


def test_conv1d_has_the_same_factors_as_linear():
    linear, conv = nn.Sequential(nn.Linear(FEATURES, 5)), nn.Sequential(Conv1D(5, FEATURES))
    conv[0].weight.data, conv[0].bias.data = (
        linear[0].weight.data.T.clone(),
        linear[0].bias.data.clone(),
    )
    x, y = make_batch(0, ROWS)
    found = []
    for model in (linear, conv):
        recorder = Recorder(model)
        recorder.backward(cross_entropy(model(x), y))
        found.append(recorder.factors())
    same(found[1], found[0])


def test_the_loss_scale_does_not_change_the_factors():
    recorder = Recorder(make_net(), scale=2.0**16)
    loss_of(recorder.model, lambda loss: recorder.backward(loss * 2.0**16))
    same(recorder.factors(), captured(make_net()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bits_are_multiplied_as_they_are(dtype, monkeypatch):
    recorder = Recorder(nn.Sequential(nn.Linear(FEATURES, 63)).to(dtype), scale=2.0**16)
    dtypes = []
    accumulate = Side.accumulate_

    def recorded(side, sum_P, x, **options):
        dtypes.append(x.dtype)
        return accumulate(side, sum_P, x, **options)

    monkeypatch.setattr(Side, "accumulate_", recorded)
    output = recorder.model(torch.randn(ROWS, TOKENS, FEATURES).to(dtype))
    output.retain_grad()
    recorder.backward(output.float().square().mean() * 2.0**16)
    g = output.grad.double().view(-1, 63) / 2.0**16
    assert dtypes == [dtype, dtype]
    close(recorder.factors()["0"].G, ROWS * TOKENS * symmetric_pack(g.T @ g), sums=ROWS * TOKENS)


class Twice(nn.Module):
    """One module called twice, or two with the same parameters."""

    def __init__(self, names: int = 1) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 5)
        self.again = self.inner
        if names > 1:
            self.again = nn.Linear(FEATURES, FEATURES)
            self.again.weight, self.again.bias = self.inner.weight, self.inner.bias

    def forward(self, x, y):
        return cross_entropy(self.head(self.again(torch.tanh(self.inner(x)))), y)


def test_a_module_called_twice_has_the_rows_of_both_calls():
    found = compared(make_net(Twice), loss_of)
    assert found["inner"].rows == 2 * ROWS * TOKENS and found["inner"].terms == ROWS * TOKENS


def test_modules_with_the_same_parameters_count_as_one_that_is_called_twice():
    several = Twice(names=2)
    several.load_state_dict({**make_net(Twice).state_dict()})
    equal_bits(captured(several), captured(make_net(Twice)))


def test_a_module_that_is_not_called_counts_nothing():
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(3, 3)

    assert set(captured(make_net(Unused))) == {"first", "middle", "head"}


def test_what_has_no_backward_counts_nothing_whatever_mode_it_runs_in():
    recorder = Recorder(make_net())
    batch = make_batch(0, ROWS, TOKENS)
    with torch.no_grad():
        recorder.model(*batch)
    with torch.inference_mode():
        recorder.model(*batch)
    recorder.model.eval()
    recorder.model(*batch)
    assert not recorder.factors()


def test_a_model_in_eval_mode_is_captured_as_in_training():
    """from_pretrained leaves it so."""
    equal_bits(captured(make_net().eval()), captured(make_net()))


def test_inactive_capture_allocates_nothing():
    recorder = Recorder(make_net())
    recorder.capture.begin_step(None, 0)
    loss_of(recorder.model, recorder.backward)
    assert (
        not recorder.capture.sums and not recorder.capture.counted and recorder.capture.passes == 0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_saves_the_16_bit_copy_and_sums_in_fp32(dtype):
    """The input itself may be changed in place after the layer: its product has a copy."""

    class Changed(Net):
        def forward(self, x, y=None):
            x = x * 1.0
            z = self.first(x)
            x.zero_()
            return cross_entropy(self.head(self.middle(self.norm(self.silu(z)))), y)

    def run(model, backward):
        with torch.autocast("cpu", dtype):
            loss = model(*make_batch(0, ROWS, TOKENS))
        backward(loss)

    recorder = Recorder(make_net(Changed))
    run(recorder.model, recorder.backward)
    assert not recorder.capture.failed
    x = make_batch(0, ROWS, TOKENS)[0].to(dtype).double().flatten(0, 1)
    x = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    A = recorder.factors()["first"].A
    assert A.dtype is torch.float32
    close(A, symmetric_pack(x.T @ x / len(x)), sums=ROWS * TOKENS)


def test_removed_hooks_do_nothing():
    recorder = Recorder(make_net())
    recorder.capture.remove()
    recorder.capture.active = True
    loss_of(recorder.model, recorder.backward)
    assert not recorder.factors()


# which passes count


@pytest.mark.parametrize("announced", [True, False])
def test_a_forward_without_backward_counts_nothing(announced):
    """A batch whose loss is NaN and is skipped, a second training-mode forward: before, between and
    after."""
    recorder = Recorder(make_net())
    nan = torch.full((ROWS, TOKENS, FEATURES), float("nan"))
    # its graph stays alive
    skipped = recorder.model(nan, torch.zeros(ROWS, TOKENS, dtype=torch.long))
    loss = recorder.model(*make_batch(0, ROWS, TOKENS))
    recorder.model(nan)
    recorder.backward(loss) if announced else loss.backward()
    recorder.model(nan)
    assert torch.isnan(skipped)
    equal_bits(recorder.factors(), captured(make_net()))


def test_a_backward_that_is_stopped_counts_what_it_reached_and_the_next_micro_batch_is_whole():
    recorder = Recorder(make_net(Stoppable))
    recorder.model.stops = True
    with pytest.raises(FloatingPointError):
        loss_of(recorder.model, recorder.backward)
    assert recorder.capture.sums.keys() == {
        f"{name}/{side}" for name in ("head", "middle") for side in "AG"
    }
    recorder.model.stops = False
    loss_of(recorder.model, recorder.backward)
    found = recorder.factors()
    assert {name: factors.rows for name, factors in found.items()} == {
        "first": 12,
        "middle": 24,
        "head": 24,
    }
    recorder.begin(1)
    loss_of(recorder.model, recorder.backward)
    equal_bits(recorder.factors(), captured(make_net()))


class Critic(nn.Module):
    """Of two numbers, so that a generator's loss through it has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(FEATURES, 9), nn.Linear(9, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(x))).square().mean()


@pytest.mark.parametrize("style", ["engine", "torch", "frozen"])
def test_another_model_s_loss_counts_nothing(style):
    """The generator's backward is announced by its engine, by nobody, or the discriminator is
    frozen meanwhile."""
    torch.manual_seed(0)
    generator, critic, x = nn.Linear(FEATURES, FEATURES), Critic(), torch.randn(ROWS, FEATURES)
    recorder, other = Recorder(critic), Recorder(nn.Sequential(generator))

    def generate() -> None:
        critic.requires_grad_(style != "frozen")
        loss = critic(other.model(x))
        other.backward(loss) if style == "engine" else loss.backward()
        critic.requires_grad_(True)

    def judge() -> None:
        for batch in (x, other.model(x).detach()):
            loss = critic(batch)
            recorder.backward(loss) if style == "engine" else loss.backward()

    generate()
    judge()
    generate()
    actual = recorder.factors()
    recorder.capture.remove()
    recorder = Recorder(critic)
    judge()
    equal_bits(actual, recorder.factors())
    assert torch.count_nonzero(generator.weight.grad) > 0


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_an_empty_batch_counts_no_rows(sharing, sampled):
    class Every(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm = nn.Embedding(FEATURES, 7), nn.LayerNorm(7)
            self.linear, self.conv = nn.Linear(7, 5), Conv1D(3, 5)

        def forward(self, tokens):
            return self.conv(self.linear(self.norm(self.embedding(tokens))))

    choice = LayerChoice(types=("Linear", "Conv1D", "LayerNorm"))
    recorder = Recorder(Every(), choice, sharing=sharing, sampled=sampled)
    assert len(recorder.layers) == 3

    def run(*shape: int) -> dict[str, float]:
        loss = recorder.model(torch.zeros(*shape, dtype=torch.long)).square().sum()
        if sampled:
            calls = recorder.capture.pending
            gradients = torch.autograd.grad(loss, [call.edge for call in calls], allow_unused=True)
            recorder.capture.add_asked(calls, gradients, 1.0)
            recorder.capture.end_pass()
        else:
            recorder.backward(loss)
        assert not recorder.capture.failed
        return recorder.rows()

    for shape in ((0, TOKENS), (0,)):
        assert not run(*shape)
    assert run(ROWS, TOKENS) == dict.fromkeys(
        ("norm", "linear", "conv"), 4 if sharing == "reduce" else 12
    )


# what stays in memory


class Normed(nn.Module):
    """Blocks of a norm and a linear, maybe checkpointed."""

    def __init__(self, width: int, blocks: int = 4, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(blocks)])
        self.linears = nn.ModuleList([nn.Linear(width, width) for _ in range(blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        for norm, linear in zip(self.norms, self.linears, strict=True):
            block = lambda x, norm=norm, linear=linear: torch.tanh(linear(norm(x)))  # noqa: E731
            x = (
                block(x)
                if self.kind == "plain"
                else checkpoint(block, x, use_reentrant=self.kind == "reentrant")
            )
        return x.square().mean()


NORMED = LayerChoice(types=("Linear", "LayerNorm"))
KINDS = ["plain", "reentrant", "non_reentrant"]


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_activation_outlives_its_graph(kind, sampled, backward):
    """Not even until the garbage collector comes, which does not see cycles through C++."""
    recorder = Recorder(Normed(8, kind=kind), NORMED, sampled=sampled)
    watched = Watched(recorder.model)
    gc.disable()
    try:
        loss = recorder.model(torch.randn(5, 8, requires_grad=True))
        if backward:
            recorder.backward(loss)
        if sampled:
            recorder.begin()  # the next step
        del loss
        assert len(watched.seen) > 8 and watched.living() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_let_go_with_their_gradient_though_the_loss_is_kept(kind, plain):
    recorder = Recorder(Normed(8, kind=kind), NORMED)
    x = torch.randn(5, 8).requires_grad_()
    watched = Watched(recorder.model)
    loss = recorder.model(x)
    loss.backward() if plain else recorder.backward(loss)
    assert loss > 0 and watched.living() == 1, "x alone"


def test_each_input_is_let_go_before_the_next_layers_gradient_arrives():
    """As without capture: the most memory is needed in the middle of a backward pass."""
    living = []
    for active in (False, True):
        recorder = Recorder(Normed(8), NORMED)
        recorder.capture.active = active
        watched = Watched(recorder.model)
        for linear in recorder.model.linears:
            linear.bias.register_post_accumulate_grad_hook(
                lambda bias, watched=watched: living.append(watched.living())
            )
        recorder.backward(recorder.model(torch.randn(5, 8)))
    assert len(living) == 8 and living[:4] == living[4:] and living[3] < living[0]


def test_inputs_are_kept_with_a_retained_graph_and_counted_again():
    recorder = Recorder(Normed(8), NORMED)
    watched = Watched(recorder.model)
    loss = recorder.model(torch.randn(5, 8))
    recorder.backward(loss, retain_graph=True)
    assert watched.living() > 0
    once = recorder.factors()
    loss = recorder.model(torch.randn(5, 8))
    for retains in (True, False):
        recorder.backward(loss, retain_graph=retains)
    twice = recorder.factors()
    assert len(once) == len(twice) == 8 and watched.living() == 0
    assert all(twice[name].rows == 2 * once[name].rows for name in once)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_recomputed_inputs_do_not_all_live_at_once(kind):
    """As many as without capture."""
    most = []
    for active in (False, True):
        recorder = Recorder(Normed(8, blocks=6, kind=kind), NORMED)
        recorder.capture.active = active
        watched = Watched(recorder.model)
        recorder.backward(recorder.model(torch.randn(5, 8, requires_grad=True)))
        most.append(watched.most)
    assert most[0] == most[1]


@pytest.mark.parametrize("kind", ["reentrant", "non_reentrant"])
@pytest.mark.parametrize("last", ["linear", "norm"])
def test_an_early_end_of_a_recomputation_passes_through_our_hooks(kind, last):
    """The last tensor that checkpointing needs may be the one that our node saves."""

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x):
            layers = [self.norm, self.linear] if last == "linear" else [self.linear, self.norm]
            return checkpoint(nn.Sequential(*layers), x, use_reentrant=kind == "reentrant").sum()

    recorder = Recorder(Last(), NORMED)
    for _ in range(2):
        recorder.backward(recorder.model(torch.randn(5, 8, requires_grad=True)))
        assert not recorder.capture.failed
        assert recorder.rows() == {"linear": 5, "norm": 5}


# checkpointing, steps and forwards


class Masked(Net):
    def forward(self, x, y, attention_mask):
        z = checkpoint(self.middle, self.norm(self.silu(self.first(x))), use_reentrant=True)
        return cross_entropy(self.head(torch.tanh(z)), y)


@pytest.mark.parametrize("known", ["by its output", "by its nodes"])
def test_a_recomputation_belongs_to_the_forward_whose_backward_runs(known):
    """Of two forwards each has its own mask, as a pipeline has several on their way. An output that
    nobody can look into does not show its backward pass, but the node that recomputes was made
    after the forward began."""

    class Hidden:
        def __init__(self, loss):
            self.loss = loss

    class Opaque(Masked):
        def forward(self, x, y, attention_mask):
            return Hidden(super().forward(x, y, attention_mask))

    recorder = Recorder(make_net(Masked if known == "by its output" else Opaque))
    masks = [torch.arange(TOKENS).expand(ROWS, -1) < length for length in (1, 2)]
    losses = []
    for step, mask in enumerate(masks):
        x, y = make_batch(step, ROWS)
        output = recorder.model(x, y.masked_fill(~mask, -100), mask)
        losses.append(output if known == "by its output" else output.loss)
    for loss in losses:
        recorder.backward(loss)
    assert recorder.rows() == dict.fromkeys(("first", "middle", "head"), ROWS * (1 + 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("captures", [(True, False), (False, True), (True, True)])
def test_a_backward_pass_after_the_steps_boundary_runs_and_counts_nothing(kind, captures):
    """A forward of an earlier step: checkpointing compares what was saved in its two runs."""
    recorder = Recorder(Normed(8, kind=kind), NORMED)
    x = torch.randn(5, 8, requires_grad=True)
    first, second = captures
    recorder.begin() if first else recorder.capture.begin_step(None, 0)
    loss = recorder.model(x)
    recorder.begin(1) if second else recorder.capture.begin_step(None, 1)
    recorder.backward(loss)
    grads = [p.grad.clone() for p in recorder.model.parameters()]
    assert (
        not any(sums.counts.any() for sums in recorder.capture.sums.values())
        and not recorder.capture.failed
    )
    recorder.model.zero_grad()
    recorder.capture.begin_step(None, 2)
    recorder.backward(recorder.model(x))
    assert all(
        torch.equal(p.grad, grad)
        for p, grad in zip(recorder.model.parameters(), grads, strict=True)
    )


class CheckpointedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.block, self.first(x), use_reentrant=True)


def test_a_compiled_block_that_a_backward_runs_again_is_captured():
    """Its first run is without gradients, and the backward is under no stance of ours."""
    model = nn.Sequential(CheckpointedBlock(), nn.Linear(6, 3))
    model[0].block.compile(backend="eager")
    recorder = Recorder(model)
    for active in (False, True, False, True):
        recorder.begin() if active else recorder.capture.begin_step(None, 0)
        with torch.compiler.set_stance("force_eager" if active else "default"):
            loss = model(torch.randn(7, 6)).square().mean()
        recorder.backward(loss)
    assert recorder.rows() == {"0.first": 7, "0.block.0": 7, "1": 7}


# what our hooks cannot read


class LlamaRMSNorm(nn.Module):
    """As transformers': in fp32 whatever its input, so that torch does not need a 16-bit input
    after the call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x):
        z = x.float()
        return (
            self.weight * z * torch.rsqrt(z.square().mean(-1, keepdim=True) + self.variance_epsilon)
        )


class ChangedInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Linear(8, 8), LlamaRMSNorm(8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.embedding(x).bfloat16()
        z = self.norm(x)
        x += 1
        return self.head(z + x.float()).square().mean()


def test_an_input_that_is_changed_in_place_names_its_layer_and_raises_nothing(caplog):
    recorder = Recorder(ChangedInput(), LayerChoice(types=("Linear", "RMSNorm")))
    recorder.backward(recorder.model(torch.randn(7, 8)))
    assert recorder.capture.failed.keys() == {"norm"} and recorder.rows() == {
        "embedding": 7,
        "head": 7,
    }
    assert (
        "the rows of norm (RMSNorm) are not known" in caplog.text
        and "modified by an inplace" in caplog.text
    )
    assert recorder.model.norm.weight.grad is not None
