"""The rule by which rows make A and G (docs/explanation/capture.md), against tests/truth.py."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_kfac.model.masks import masks_in
from ds_kfac.model.scan import LayerChoice
from tests.close import close
from tests.model.recorder import Recorder, compared

N, T, WIDTH, CLASSES = 4, 3, 6, 5
ATTENDED = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 1, 1]], dtype=torch.bool)


class Net(nn.Module):
    """Two layers and a head; the loss is a mean over positions that are attended."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, y=None, attention_mask=None):
        z = self.head(torch.relu_(self.inner(torch.tanh(self.first(x)))))
        return z if y is None else cross_entropy(z, y)


def cross_entropy(z, y):
    """A mean over labels that are not -100."""
    return F.cross_entropy(z.reshape(-1, CLASSES).float(), y.reshape(-1))


def batch(seed=1, shape=(N, T)):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, shape, generator=generator)


def padded(seed=1):
    """A batch whose rows that are not attended have no label."""
    x, y = batch(seed)
    return x, y.masked_fill(~ATTENDED, -100)


# which rows are padding


def test_a_row_is_padding_if_its_gradient_is_zero_and_the_mask_leaves_it_out():
    x, y = padded()
    program = lambda model, backward: backward(model(x, y, ATTENDED))  # noqa: E731
    found = compared(Net(), program)
    assert found["first"].rows == found["head"].terms == ATTENDED.sum() == 8


def test_a_row_without_a_gradient_that_is_attended_counts():
    x, y = batch()
    y[:, 1:] = -100  # a prompt
    found = compared(Net(), lambda model, backward: backward(model(x, y, ATTENDED)))
    assert found["first"].rows == 9, (
        "of the last text the first position is masked, and has a label"
    )
    found = compared(Net(), lambda model, backward: backward(model(x, y)))
    assert found["first"].rows == found["first"].terms == N * T


def test_a_mask_alone_excludes_no_row_that_the_weights_gradient_contains():
    x, y = batch()
    found = compared(Net(), lambda model, backward: backward(model(x, y, ATTENDED)))
    assert found["first"].rows == found["first"].terms == N * T


class Turned(Net):
    """Sequence first inside."""

    def forward(self, x, y=None, attention_mask=None):
        z = super().forward(x.transpose(0, 1)).transpose(0, 1)
        return cross_entropy(z, y)


class Flattened(Net):
    def forward(self, x, y=None, attention_mask=None):
        return cross_entropy(super().forward(x.flatten(0, 1)), y)


class FlatHead(Net):
    """The mask fits [N, T]; so rows [N T] may be of something else, and all count."""

    def forward(self, x, y=None, attention_mask=None):
        z = self.inner(torch.tanh(self.first(x))).flatten(0, 1)
        return cross_entropy(self.head(torch.tanh(z)), y)


class Heads(Net):
    """Rows [N, T, 2]."""

    def forward(self, x, y=None, attention_mask=None):
        z = super().forward(torch.stack([x, x.sin()], dim=2)).mean(dim=2)
        return cross_entropy(z, y)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (Turned, {"first": 8, "inner": 8, "head": 8}),
        (Flattened, {"first": 8, "inner": 8, "head": 8}),
        (FlatHead, {"first": 8, "inner": 8, "head": 12}),
        (Heads, {"first": 16, "inner": 16, "head": 16}),
    ],
)
def test_a_mask_fits_rows_in_each_of_their_usual_shapes(kind, rows):
    x, y = padded()
    found = compared(kind(), lambda model, backward: backward(model(x, y, ATTENDED)))
    assert {name: factors.rows for name, factors in found.items()} == rows


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.uint8]
)
def test_a_mask_may_be_of_numbers(dtype):
    x, y = padded()
    mask = ATTENDED.to(dtype)
    compared(Net(), lambda model, backward: backward(model(x, y, attention_mask=mask)))


@pytest.mark.parametrize(
    "mask",
    [
        torch.where(ATTENDED, 0.0, -1e9),
        torch.where(ATTENDED, 0.0, float("-inf")),
        ATTENDED.long() * 2,  # numbers of packed documents
        ATTENDED[:, None, None, :],
        ATTENDED[:2],
        "causal",
    ],
    ids=["additive", "additive, infinite", "other numbers", "4-D", "another batch", "no tensor"],
)
def test_what_is_no_mask_of_rows_leaves_nothing_out(mask):
    x, y = padded()
    found = compared(Net(), lambda model, backward: backward(model(x, y, mask)))
    assert found["first"].rows == N * T


class Encoder(Net):
    """Two texts of one shape, as a question and a document."""

    def forward(self, x, y=None, attention_mask=None, document_attention_mask=None):
        return super().forward(x, y)


@pytest.mark.parametrize("how", ["named", "mapping", "returned"])
def test_of_several_masks_each_must_leave_a_row_out(how):
    x, y = padded()
    other = torch.zeros(N, T, dtype=torch.bool)
    other[2] = True  # positions of text 2 that ATTENDED leaves out
    recorder = Recorder(Encoder())
    masks = {"attention_mask": ATTENDED, "document_attention_mask": other.long()}
    if how == "returned":
        recorder.capture.read_mask = lambda arguments, keywords: [keywords["attention_mask"], other]
    if how == "mapping":
        recorder.model.forward = lambda inputs: Net.forward(recorder.model, inputs["x"], y)
        recorder.backward(recorder.model({"x": x, **masks}))
    else:
        recorder.backward(recorder.model(x, y, **masks))
    assert recorder.rows() == dict.fromkeys(("first", "inner", "head"), 10)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_a_mask_is_that_of_the_forward_though_its_memory_is_used_again(dtype):
    """As a loader's buffer, which has the next batch before the backward pass."""
    x, y = padded()
    mask = ATTENDED.clone().to(dtype)
    recorder = Recorder(Net())
    loss = recorder.model(x, y, mask)
    mask.fill_(1)
    recorder.backward(loss)
    assert recorder.rows()["first"] == 8


def test_a_function_that_returns_no_mask_is_told_what_it_must_return():
    with pytest.raises(
        ValueError, match=r"engine.kfac.mask: got \[4, 3, 1\]; must return masks \[N, T\], or None"
    ):
        list(masks_in(ATTENDED[..., None]))
    with pytest.raises(ValueError, match="got str"):
        list(masks_in(["mask"]))
    assert list(masks_in(None)) == []


def test_a_row_whose_input_and_gradient_are_zero_is_none():
    """As an empty place of an expert."""
    x, y = batch()
    x[1:, 0], y[1:, 0] = 0, -100
    found = compared(Net(), lambda model, backward: backward(model(x, y)))
    assert (found["first"].rows, found["inner"].rows) == (9, 12), (
        "inner gets the bias of first there"
    )


def test_padding_on_the_right_does_not_change_the_factors_of_texts():
    x, y = batch(shape=(N, T))
    lengths = [3, 2, 1, 3]
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    y = y.masked_fill(~mask, -100)
    found = compared(Net(), lambda model, backward: backward(model(x, y, mask)))

    def one_by_one(model, backward):
        texts = [(model(x[n : n + 1, :length]), y[n, :length]) for n, length in enumerate(lengths)]
        backward(
            sum(F.cross_entropy(z[0], label, reduction="sum") for z, label in texts) / sum(lengths)
        )

    alone = compared(Net(), one_by_one)
    for name, factors in alone.items():
        assert factors.rows == found[name].rows
        close(factors.A, found[name].A, sums=1000)
        close(factors.G, found[name].G, sums=1000)


# calls without a gradient


class Detached(Net):
    """Targets of the layer itself; a dummy input; a call of which nothing becomes."""

    def forward(self, x, y=None, attention_mask=None):
        with torch.no_grad():
            self.inner(x + 1)
        target = self.inner(3 * x[:2]).detach().sum()
        dummy = 0.0 * self.inner(torch.full((7, WIDTH), 30.0)).sum()
        self.inner(x)
        return super().forward(x, y) + 0 * target + dummy


def test_a_call_without_a_gradient_or_with_zeros_alone_has_no_rows():
    x, y = batch()
    found = compared(Detached(), lambda model, backward: backward(model(x, y)))
    assert found["inner"].rows == N * T
    plain = compared(Net(), lambda model, backward: backward(model(x, y)))
    for one, other in zip(found["inner"][:2], plain["inner"][:2], strict=True):
        close(one, other, sums=1000)


def test_a_layer_below_a_head_of_zeros_has_no_rows_until_it_has_a_gradient():
    model = Net()
    nn.init.zeros_(model.head.weight)
    found = compared(model, lambda model, backward: backward(model(*batch())))
    assert set(found) == {"head"} and found["head"].terms == N * T


def test_one_micro_batch_of_zero_gradients_adds_no_rows_but_is_a_pass():
    def program(model, backward):
        backward(model(*batch()) * 0.5)
        backward(model(*batch(2)) * 0.0)

    found = compared(Net(), program)
    assert found["first"].rows == N * T and found["first"].terms == N * T


# R_p and K


def two_tasks(model, backward):
    x, y = batch()
    first, second = model(x), model(batch(2, (2, T))[0])
    backward(cross_entropy(first, y) / 2)
    backward(second.square().mean() / 2)


def several_forwards(model, backward):
    x, y = batch()
    backward((model(x[:1], y[:1]) + model(x[1:], y[1:])) / 2)


def one_of_several_forwards(model, backward):
    model(*batch(3))  # its backward never comes
    backward(model(*batch()))


def retained(model, backward):
    loss = model(*batch())
    backward(loss, retain_graph=True)
    backward(3 * loss)


def losses_of_one_forward(model, backward):
    z = model(batch()[0])
    backward(z[:, 0].square().mean(), retain_graph=True)
    backward(z[:, 1:].exp().mean())


def unequal_micro_batches(model, backward):
    for seed, shape in ((1, (1, 2)), (2, (3, 5)), (3, (7,))):
        backward(model(*batch(seed, shape)) / 3)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("program", "terms"),
    [
        (two_tasks, N * T + 2 * T),
        (several_forwards, N * T),
        (one_of_several_forwards, N * T),
        (retained, 2 * N * T),
        (losses_of_one_forward, 2 * N * T),
        (unequal_micro_batches, 2 + 15 + 7),
    ],
)
def test_each_pass_counts_the_rows_of_the_layer_nearest_to_the_loss(program, terms, plain):
    found = compared(Net(), program, plain=plain)
    assert found["first"].terms == terms


def test_a_pass_that_raised_leaves_the_ends_of_later_passes_to_be_seen():
    recorder = Recorder(Net())
    model, x = recorder.model, batch()[0].requires_grad_()
    x.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(model(x).sum(), x)
    losses = [model(*batch(seed)) for seed in (1, 2)]
    for loss in losses:
        loss.backward()
    recorder.capture.end_step()
    assert recorder.capture.passes == 2


def test_the_split_into_micro_batches_does_not_change_the_factors():
    x, y = batch()
    found = []
    for parts in ([N], [2, 2], [1] * N):

        def program(model, backward, parts=parts):
            for xs, ys in zip(x.split(parts), y.split(parts), strict=True):
                backward(model(xs, ys) / len(parts))

        found.append(compared(Net(), program))
    for other in found[1:]:
        for name in other:
            close(other[name].A, found[0][name].A, sums=1000)
            close(other[name].G, found[0][name].G, sums=1000)


def test_the_division_of_the_loss_is_none_of_the_rules_but_its_scale_is():
    """K sum R_p g g^T has what g has: a loss that is 8 times as large has 64 times the G."""
    once, eight = (
        compared(Net(), lambda model, backward, factor=factor: backward(factor * model(*batch())))
        for factor in (1, 8)
    )
    close(64 * once["first"].G, eight["first"].G, sums=1000)
    close(once["first"].A, eight["first"].A, sums=1000)


class TiledHead(Net):
    def forward(self, x, y=None, attention_mask=None):
        z = torch.tanh(self.inner(torch.tanh(self.first(x))))
        return cross_entropy(torch.cat([self.head(tile) for tile in z.split(1, dim=1)], dim=1), y)


@pytest.mark.parametrize("plain", [False, True])
def test_a_head_that_is_called_for_each_tile_has_the_rows_of_all(plain):
    x, y = batch()
    whole = compared(Net(), lambda model, backward: backward(model(x, y)))
    model = TiledHead()
    found = compared(model, lambda model, backward: backward(model(x, y)), plain=plain)
    assert found["head"].terms == whole["head"].terms == N * T and found["head"].rows == N * T


class Doubled(Net):
    """The head has two rows for each of its inputs' rows, so that those of another layer would
    show."""

    def forward(self, x, y=None, attention_mask=None):
        z = torch.tanh(self.inner(torch.tanh(self.first(x))))
        return cross_entropy(self.head(torch.cat([z, z.sin()])), torch.cat([y, y]))


def test_a_frozen_head_counts_the_rows_that_are_no_padding():
    x, y = padded()
    y[2, 1] = 0  # a row that the mask leaves out, and that has a gradient
    model = Net()
    model.head.requires_grad_(False)
    program = lambda model, backward: backward(model(x, y, ATTENDED))  # noqa: E731
    found = compared(model, program)
    assert (found["first"].rows, found["first"].terms) == (9, 9)


@pytest.mark.parametrize(
    "how", ["frozen", "frozen but its bias", "frozen after attach", "no layer"]
)
def test_a_head_without_curvature_is_the_layer_nearest_to_the_loss(how):
    def program(model, backward):
        if how == "frozen after attach":
            model.head.requires_grad_(False)
        backward(model(*batch()))

    model, options = Doubled(), {}
    if how == "no layer":
        layers = Recorder(Doubled()).layers
        options["layers"] = tuple(layer for layer in layers if layer.name != "head")
    elif how != "frozen after attach":
        model.head.weight.requires_grad_(False)
        model.head.bias.requires_grad_(how != "frozen")
    found = compared(model, program, **options)
    assert set(found) == {"first", "inner"} and found["first"].terms == 2 * N * T


class Tiles(torch.autograd.Function):
    """The head's loss and gradients tile by tile in the forward, as DeepSpeed's
    TiledFusedLogitsLoss."""

    @staticmethod
    def forward(ctx, model, z, y):
        z, losses = z.detach().requires_grad_(), []
        for start in range(0, N, 2):
            with torch.enable_grad():
                loss = cross_entropy(model.head(z[start : start + 2]), y[start : start + 2]) / 2
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        ctx.save_for_backward(z.grad)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx, gradient):
        return None, ctx.saved_tensors[0] * gradient, None


class Tiled(Net):
    def forward(self, x, y=None, attention_mask=None):
        return Tiles.apply(self, torch.tanh(self.inner(torch.tanh(self.first(x)))), y)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_pass_inside_of_the_forward_belongs_to_the_one_that_follows(micro_batches, plain):
    def program(model, backward):
        for seed in range(micro_batches):
            backward(model(*batch(seed)))

    found = compared(Tiled(), program, plain=plain)
    assert found["head"].rows == found["head"].terms == micro_batches * N * T


class Checkpointed(Net):
    reentrant: bool | None = None

    def forward(self, x, y=None, attention_mask=None):
        block = lambda x: torch.relu_(self.inner(torch.tanh(self.first(x))))  # noqa: E731
        x = x.clone().requires_grad_()
        z = (
            block(x)
            if self.reentrant is None
            else checkpoint(block, x, use_reentrant=self.reentrant)
        )
        head = lambda z: self.head(z)  # noqa: E731
        z = head(z) if self.reentrant is None else checkpoint(head, z, use_reentrant=self.reentrant)
        return z if y is None else cross_entropy(z, y)


def masked(model, backward):
    backward(model(*padded(), ATTENDED))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "program",
    [
        masked,
        two_tasks,
        several_forwards,
        unequal_micro_batches,
        retained,
        losses_of_one_forward,
        one_of_several_forwards,
    ],
)
def test_checkpointing_changes_no_bit(program, reentrant, plain):
    found = []
    for kind in (None, reentrant):
        model = Checkpointed()
        model.reentrant = kind
        recorder = Recorder(model)
        backward = (lambda loss, **how: loss.backward(**how)) if plain else recorder.backward
        program(model, backward)
        assert not recorder.capture.failed
        found.append(recorder.factors())
    expected, actual = found
    assert expected.keys() == actual.keys() and len(expected) == 3
    for name in expected:
        assert actual[name][2:] == expected[name][2:], name
        for one, other in zip(actual[name][:2], expected[name][:2], strict=True):
            assert torch.equal(one, other), name


def test_a_sampled_loss_has_the_same_factors_with_checkpointing():
    """Autograd is asked for the gradients at the calls of the first run; the recomputation has none
    of its own."""
    found = []
    for kind in (None, False):
        model = Checkpointed()
        model.reentrant = kind
        recorder = Recorder(model, sampled=True)
        loss = model(*batch())
        calls = list(recorder.capture.pending)
        gradients = torch.autograd.grad(loss, [call.edge for call in calls], retain_graph=True)
        recorder.capture.add_asked(calls, gradients, 1.0)
        recorder.capture.end_pass()
        recorder.backward(loss)
        assert not recorder.capture.failed and not recorder.capture.pending
        found.append(recorder.factors())
    plain = compared(Net(), lambda model, backward: backward(model(*batch())))
    for factors in found:
        assert factors.keys() == plain.keys()
        for name, expected in plain.items():
            assert factors[name].rows == expected.rows
            close(factors[name].A, expected.A, sums=1000)
            close(factors[name].G, expected.G, sums=1000)


def test_a_gradient_that_goes_to_no_weight_counts_nothing():
    def program(model, backward):
        x, y = batch()
        x.requires_grad_()
        torch.autograd.grad(100 * model(x, y), x)
        torch.autograd.grad(100 * model(x, y), model.head.weight)
        torch.autograd.backward(100 * model(x, y), inputs=[x])
        backward(model(x, y))

    def only_backward(model, backward):
        backward(model(*batch()))

    for plain in (True, False):
        found = compared(Net(), program, true_program=only_backward, plain=plain)
        assert found["first"].terms == N * T


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rms = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, x, y=None, attention_mask=None):
        return super().forward(self.rms(self.norm(x) * x.sin()), y, attention_mask)


def test_a_norm_has_a_gradient_of_weight_and_bias_for_each_position():
    model, outputs = Normed(), {}
    for name in ("norm", "rms"):

        def keep(module, inputs, output, name=name):
            output.retain_grad()
            outputs.setdefault(name, []).append(output)

        getattr(model, name).register_forward_hook(keep)
    recorder = Recorder(model, LayerChoice(types=("Linear", "LayerNorm", "RMSNorm")))
    for seed in (1, 2):
        recorder.backward(model(*batch(seed)) / 2)
    found = recorder.factors()
    assert (found["norm"].rows, found["norm"].terms) == (2 * N * T, 2 * N * T)
    expected = {}
    for (
        name,
        of_calls,
    ) in outputs.items():  # weights are 1 and biases 0: an output is the normalized input
        normalized = torch.cat([output.detach().double().flatten(0, 1) for output in of_calls])
        g = torch.cat([output.grad.double().flatten(0, 1) for output in of_calls])
        of_weight, of_bias = normalized * g, g
        blocks = [of_weight.square(), of_weight * of_bias, of_bias.square()][
            : 3 if name == "norm" else 1
        ]
        expected[name] = (
            2 * N * T * torch.stack([block.sum(dim=0) for block in blocks], dim=1).flatten()
        )
    for name, A in expected.items():
        close(found[name].A, A, sums=100, what=name)
