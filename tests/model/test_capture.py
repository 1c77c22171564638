"""Hooks: exact sums in every way a layer can be run. No DeepSpeed here; the seed is given by hand."""

import copy
import gc
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from ds_kfac.curvature.factor import Side
from ds_kfac.model.batch import BatchInfo
from ds_kfac.model.capture import Capture
from ds_kfac.model.layers import key_of
from ds_kfac.model.rows import BatchSum, RowSums
from ds_kfac.model.scan import LayerChoice, scan
from tests.close import close
from tests.model.test_scan import Conv1D
from tests.models import FEATURES, Net, Stoppable, cross_entropy, make_batch, make_net
from tests.ops.specification import symmetric_pack

ROWS, TOKENS = 4, 3
SUMS = ROWS * TOKENS + 2 * (13 + 17 + 19 + 19)
"""Rows of a factor, and widths of tests/models.py's layers, forward and back."""
LINEAR = LayerChoice(types=("Linear", "Conv1D"))


class Recorder:
    """A model with capture, and the means it should have seen by plain autograd."""

    def __init__(
        self,
        model: nn.Module,
        choice: LayerChoice = LINEAR,
        *,
        sharing="expand",
        positions=True,
        sampled=False,
        **options,
    ) -> None:
        self.model, self.layers = model, scan(model, choice).layers
        rows = RowSums(sharing, positions, divided=not sampled)
        self.capture = Capture(model, self.layers, lambda: 1.0, rows=rows, sampled=sampled, **options)
        self.begin()

    def begin(self, step: int = 0, **options) -> None:
        """A step, with sums of everything."""
        self.sides = {key_of(layer.name, side): getattr(layer, side) for layer in self.layers for side in "AG"}
        self.capture.begin_step(frozenset(self.sides), step, **options)

    def backward(self, loss: torch.Tensor, scale: float = 1.0) -> None:
        """As an engine's, at a loss scale."""
        with self.capture.own_backward(loss):
            self.capture.begin_backward(torch.tensor(scale))
            (loss if scale == 1.0 else loss * scale).backward()

    def sums(self, name: str) -> SimpleNamespace:
        """Zeros where there are no rows."""
        keys = {side: key_of(name, side) for side in "AG"}
        empty = {side: BatchSum.empty(self.sides[key].numel, torch.device("cpu")) for side, key in keys.items()}
        return SimpleNamespace(**{side: self.capture.sums.get(key, empty[side]) for side, key in keys.items()})

    def counts(self, name: str) -> list[int]:
        """Rows of A, loss terms of G."""
        return [int(part.count) for part in (self.sums(name).A, self.sums(name).G)]

    def means(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Of the layers that had rows, which begin anew."""
        seen = [layer.name for layer in self.layers if not self.capture.sums.keys().isdisjoint(layer.keys)]
        used = {name: self.sums(name) for name in seen}
        self.begin()
        return {name: (s.A.sum_P / s.A.count, s.G.sum_P / s.G.count) for name, s in used.items()}


@pytest.mark.parametrize("sampled", [False, True])
def test_a_copy_of_the_model_is_made_and_leaves_no_trace(sampled):
    recorder = Recorder(Normed(8, kind="plain"), NORMED, sampled=sampled)
    recorder.capture.lock = threading.Lock()  # nothing that the hooks hold can be copied, as process groups cannot
    x = torch.randn(5, 8, requires_grad=True)
    recorder.model(x).sum()
    begun, pending = recorder.capture.forward, list(recorder.capture.pending)
    average = copy.deepcopy(recorder.model)
    average(x).sum().backward()
    assert recorder.capture.forward is begun and recorder.capture.pending == pending
    assert recorder.capture.counted == recorder.capture.outside == 0


def expected_means(model: nn.Module, forward, loss_terms: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A = mean a a^T and G = M sum g-hat g-hat^T, from outputs kept by ``retain_grad``."""
    seen: dict[str, list] = {layer.name: [] for layer in scan(model, LINEAR).layers}

    def keep(name, has_bias):
        def hook(module, inputs, output):
            rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).clone()
            if has_bias:
                rows = torch.cat([rows, torch.ones(len(rows), 1)], 1)
            probe = torch.zeros_like(output, requires_grad=True)  # output + 0: its gradient is the output's
            seen[name].append((rows, probe))
            return output + probe

        return hook

    handles = [
        model.get_submodule(layer.name).register_forward_hook(keep(layer.name, layer.bias is not None))
        for layer in scan(model, LINEAR).layers
    ]
    forward(model).backward()
    for handle in handles:
        handle.remove()
    means = {}
    for name, uses in seen.items():
        if uses:
            a = torch.cat([rows for rows, _ in uses])
            g = torch.cat([probe.grad.reshape(-1, probe.shape[-1]) for _, probe in uses])
            means[name] = symmetric_pack(a.T @ a / len(a)), symmetric_pack(loss_terms * g.T @ g)
    return means


def assert_same(actual: dict, expected: dict) -> None:
    assert expected
    for name, (A, G) in expected.items():
        close(actual[name][0], A, sums=SUMS, what=f"A of {name}")
        close(actual[name][1], G, sums=SUMS, what=f"G of {name}")


def loss_of(step: int = 0):
    x, y = make_batch(step, ROWS, TOKENS)
    return lambda model: model(x, y)


def test_means_are_exact_with_an_in_place_activation():
    recorder = Recorder(make_net())
    loss_of()(recorder.model).backward()
    assert_same(recorder.means(), expected_means(make_net(), loss_of(), ROWS * TOKENS))


def test_conv1d_has_the_same_factors_as_linear():
    linear, conv = nn.Sequential(nn.Linear(FEATURES, 5)), nn.Sequential(Conv1D(5, FEATURES))
    conv[0].weight.data, conv[0].bias.data = linear[0].weight.data.T.clone(), linear[0].bias.data.clone()
    x, y = make_batch(0, ROWS)
    means = []
    for model in (linear, conv):
        recorder = Recorder(model)
        cross_entropy(model(x), y).backward()
        means.append(recorder.means()["0"])
    close(means[0], means[1], sums=SUMS)


def test_scaling_the_loss_does_not_change_the_factors():
    plain, scaled = Recorder(make_net()), Recorder(make_net())
    loss_of()(plain.model).backward()
    loss = loss_of()(scaled.model)
    scaled.capture.begin_backward(torch.tensor(2.0**16))
    (loss * 2.0**16).backward()
    for name, (A, G) in plain.means().items():
        close(scaled.sums(name).A.sum_P / (ROWS * TOKENS), A)
        close(scaled.sums(name).G.sum_P / (ROWS * TOKENS), G)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bits_are_multiplied_as_they_are(dtype, monkeypatch):
    recorder, seen = Recorder(nn.Sequential(nn.Linear(FEATURES, 63)).to(dtype)), []
    recorder.capture.begin_backward(torch.tensor(2.0**16))
    accumulate = Side.accumulate_
    monkeypatch.setattr(Side, "accumulate_", lambda side, s, x, **o: seen.append(x) or accumulate(side, s, x, **o))
    output = recorder.model(torch.randn(ROWS, TOKENS, FEATURES).to(dtype))
    output.retain_grad()
    (output.float().square().mean() * 2.0**16).backward()
    g = output.grad.double().view(-1, 63) * (ROWS * TOKENS / 2.0**16)
    assert seen[1].dtype == dtype and g.abs().max() < 1
    close(recorder.sums("0").G.sum_P, symmetric_pack(g.T @ g), sums=ROWS * TOKENS)


@pytest.mark.parametrize("parts", [[4], [2, 2], [1, 3], [1, 1, 1, 1]], ids=str)
def test_means_do_not_depend_on_the_split_into_micro_batches(parts):
    recorder = Recorder(make_net())
    x, y = make_batch(0, ROWS, TOKENS)
    for xs, ys in zip(x.split(parts), y.split(parts), strict=True):
        recorder.model(xs, ys).backward()
        recorder.capture.end_backward()
    assert_same(recorder.means(), expected_means(make_net(), loss_of(), ROWS * TOKENS))


def test_a_plain_backward_without_announcement_closes_with_the_next_forward():
    recorder = Recorder(make_net())
    x, y = make_batch(0, ROWS, TOKENS)
    for xs, ys in zip(x.chunk(2), y.chunk(2), strict=True):
        recorder.model(xs, ys).backward()
    assert_same(recorder.means(), expected_means(make_net(), loss_of(), ROWS * TOKENS))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("inside", ["all", "part"])
def test_activation_checkpointing_counts_every_row_once(use_reentrant, inside):
    class Checkpointed(Net):
        def forward(self, x, y):
            x = x.requires_grad_()  # reentrant checkpointing needs an input with a gradient
            if inside == "all":
                z = checkpoint(super().forward, x, use_reentrant=use_reentrant)
            else:
                z = checkpoint(lambda x: self.norm(self.silu(self.first(x))), x, use_reentrant=use_reentrant)
                z = self.head(torch.tanh(checkpoint(self.middle, z, use_reentrant=use_reentrant)))
            return cross_entropy(z, y)

    recorder = Recorder(make_net(Checkpointed))
    loss_of()(recorder.model).backward()
    assert recorder.counts("first") == [ROWS * TOKENS, ROWS * TOKENS]
    assert_same(recorder.means(), expected_means(make_net(), loss_of(), ROWS * TOKENS))


def test_a_module_called_twice_adds_rows_but_no_loss_terms():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 5)

        def forward(self, x, y):
            return cross_entropy(self.head(self.inner(torch.tanh(self.inner(x)))), y)

    recorder = Recorder(make_net(Twice))
    loss_of()(recorder.model).backward()
    assert recorder.counts("inner") == [2 * ROWS * TOKENS, ROWS * TOKENS]
    assert_same(recorder.means(), expected_means(make_net(Twice), loss_of(), ROWS * TOKENS))


def test_modules_with_the_same_parameters_count_as_one_that_is_called_twice():
    class Two(nn.Module):
        def __init__(self, names: int) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 5)
            self.again = self.inner
            if names > 1:
                self.again = nn.Linear(FEATURES, FEATURES)
                self.again.weight, self.again.bias = self.inner.weight, self.inner.bias

        def forward(self, x, y):
            return cross_entropy(self.head(self.again(torch.tanh(self.inner(x)))), y)

    torch.manual_seed(0)
    once = Two(names=1)
    several = Two(names=2)
    several.load_state_dict(once.state_dict())
    found = []
    for model in (once, several):
        recorder = Recorder(model)
        loss_of()(model).backward()
        assert recorder.counts("inner") == [2 * ROWS * TOKENS, ROWS * TOKENS]
        found.append(recorder.means())
    assert_same(*found)


def test_a_module_that_is_not_called_counts_nothing():
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(3, 3)

    recorder = Recorder(make_net(Unused))
    loss_of()(recorder.model).backward()
    assert recorder.counts("unused") == [0, 0]
    assert recorder.counts("first")[0]


def test_what_has_no_backward_counts_nothing_whatever_mode_it_runs_in():
    recorder = Recorder(make_net())
    with torch.no_grad():
        loss_of()(recorder.model)
    recorder.model.eval()
    loss_of()(recorder.model)
    assert not recorder.means()


def test_a_model_in_eval_mode_is_captured_as_in_training():
    """from_pretrained leaves it so."""
    means = []
    for training in (True, False):
        recorder = Recorder(make_net().train(training))
        loss_of()(recorder.model).backward()
        means.append(recorder.means())
    assert means[0].keys() == means[1].keys() and means[0]
    for name in means[0]:
        assert all(torch.equal(a, b) for a, b in zip(means[0][name], means[1][name], strict=True)), name


def test_inactive_capture_allocates_nothing():
    recorder = Recorder(make_net())
    recorder.capture.begin_step(None, 0)
    loss_of()(recorder.model).backward()
    assert not recorder.capture.sums and not recorder.capture.counted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_factors_are_fp32_sums_of_rounded_rows(dtype):
    recorder = Recorder(make_net())
    with torch.autocast("cpu", dtype):
        loss = loss_of()(recorder.model)
    loss.backward()
    expected = expected_means(make_net(), loss_of(), ROWS * TOKENS)
    for name, (A, G) in recorder.means().items():
        assert A.dtype == G.dtype == torch.float32
        # one rounding of each row's entries is allowed, a product or average in 16 bits is not
        eps = torch.finfo(dtype).eps
        assert (A - expected[name][0]).norm() <= 2 * eps * expected[name][0].norm()
        assert (G - expected[name][1]).norm() <= 8 * eps * expected[name][1].norm()


def test_removed_hooks_do_nothing():
    recorder = Recorder(make_net())
    recorder.capture.remove()
    recorder.capture.active = True
    loss_of()(recorder.model).backward()
    assert not recorder.means()


# what a backward of its own decides


def own_backward(recorder: Recorder, loss: torch.Tensor, **options) -> None:
    """As ``engine.backward``."""
    with recorder.capture.own_backward(**options):
        loss.backward(**options)


@pytest.mark.parametrize("announced", [True, False])
def test_a_forward_without_backward_counts_nothing(announced):
    """A batch whose loss is NaN and is skipped, a second training-mode forward: before, between and after."""
    recorder = Recorder(make_net())
    nan = torch.full((ROWS, TOKENS, FEATURES), float("nan"))
    skipped = recorder.model(nan, torch.zeros(ROWS, TOKENS, dtype=torch.long))  # its graph stays alive
    loss = loss_of()(recorder.model)
    recorder.model(nan)
    own_backward(recorder, loss) if announced else loss.backward()
    recorder.model(nan)
    assert torch.isnan(skipped)
    assert_same(recorder.means(), expected_means(make_net(), loss_of(), ROWS * TOKENS))


def test_a_backward_that_is_stopped_counts_what_it_reached_and_the_next_micro_batch_is_whole():
    recorder = Recorder(make_net(Stoppable))
    recorder.model.stops = True
    with pytest.raises(FloatingPointError):
        own_backward(recorder, loss_of()(recorder.model))
    assert recorder.counts("head") == recorder.counts("middle") == [ROWS * TOKENS, ROWS * TOKENS]
    assert recorder.counts("first") == [0, 0]
    recorder.model.stops = False
    own_backward(recorder, loss_of()(recorder.model))
    assert recorder.counts("head") == [2 * ROWS * TOKENS, 2 * ROWS * TOKENS]
    assert_same(recorder.means(), expected_means(make_net(), loss_of(), ROWS * TOKENS))


class Critic(nn.Module):
    """Of two numbers, so that a generator's loss through it has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(FEATURES, 9), nn.Linear(9, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(x))).square().mean()


@pytest.mark.parametrize("style", ["engine", "torch", "frozen"])
def test_another_model_s_loss_counts_nothing(style):
    """The generator's backward is announced by its engine, by nobody, or the discriminator is frozen meanwhile."""
    torch.manual_seed(0)
    generator, critic, x = nn.Linear(FEATURES, FEATURES), Critic(), torch.randn(ROWS, FEATURES)
    recorder, other = Recorder(critic), Recorder(nn.Sequential(generator))

    def generate() -> None:
        critic.requires_grad_(style != "frozen")
        loss = critic(other.model(x))
        own_backward(other, loss) if style == "engine" else loss.backward()
        critic.requires_grad_(True)

    def judge() -> None:
        for batch in (x, other.model(x).detach()):
            loss = critic(batch)
            own_backward(recorder, loss) if style == "engine" else loss.backward()
            recorder.capture.end_backward()

    generate()
    judge()
    generate()
    actual = recorder.means()
    recorder.capture.remove()
    recorder = Recorder(critic)
    judge()
    wanted = recorder.means()
    assert set(actual) == set(wanted) == {"inner", "head"}
    for name in wanted:
        for mine, theirs in zip(actual[name], wanted[name], strict=True):
            assert torch.equal(mine, theirs), name
    assert torch.count_nonzero(generator.weight.grad) > 0


# an empty batch


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

    def run(*shape: int) -> list[list[int]]:
        loss = recorder.model(torch.zeros(*shape, dtype=torch.long)).sum()
        if sampled:
            calls = recorder.capture.pending
            gradients = torch.autograd.grad(loss, [call.edge for call in calls], allow_unused=True)
            recorder.capture.add_sampled(calls, gradients, 1.0)
        else:
            own_backward(recorder, loss)
        recorder.capture.end_backward()
        return [[float(part.count), float(part.sum_P.sum())] for part in recorder.capture.sums.values()]

    for shape in ((0, TOKENS), (0,)):
        assert not any(map(any, run(*shape)))
    counted = run(ROWS, TOKENS)
    assert any(map(any, counted)) and run(0, TOKENS) == counted


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
            x = block(x) if self.kind == "plain" else checkpoint(block, x, use_reentrant=self.kind == "reentrant")
        return x.square().mean()


NORMED = LayerChoice(types=("Linear", "LayerNorm"))
KINDS = ["plain", "reentrant", "non_reentrant"]


class Watched:
    """Which inputs of modules live: their memory, whether Python knows of them or not."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[StorageWeakRef] = []
        self.most = 0
        for module in model.modules():
            module.register_forward_pre_hook(self._see)

    def _see(self, module, inputs) -> None:
        self.most = max(self.most, self.living())
        self.seen.append(StorageWeakRef(inputs[0].untyped_storage()))

    def living(self) -> int:
        return len({one.cdata for one in self.seen if not one.expired()})


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
            own_backward(recorder, loss)
        if sampled:
            recorder.begin()  # the next step
        del loss
        assert len(watched.seen) > 8 and watched.living() == 0
    finally:
        gc.enable()


def test_the_norms_inputs_go_with_their_backward_though_the_loss_is_kept():
    recorder = Recorder(Normed(8), NORMED)
    watched = Watched(recorder.model)
    loss = recorder.model(torch.randn(5, 8))
    own_backward(recorder, loss)
    assert loss > 0 and watched.living() == 0


def test_a_retained_graph_is_counted_again():
    recorder = Recorder(Normed(8), NORMED)
    loss = recorder.model(torch.randn(5, 8))
    own_backward(recorder, loss, retain_graph=True)
    once = {key: part.sum_P.clone() for key, part in recorder.capture.sums.items() if "norms" in key}
    own_backward(recorder, loss)
    assert len(once) == 4
    for key, sum_P in once.items():
        close(recorder.capture.sums[key].sum_P, 2 * sum_P, sums=5)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_recomputed_inputs_do_not_all_live_at_once(kind):
    """As many as without capture."""
    most = []
    for active in (False, True):
        recorder = Recorder(Normed(8, blocks=6, kind=kind), NORMED)
        recorder.capture.active = active
        watched = Watched(recorder.model)
        own_backward(recorder, recorder.model(torch.randn(5, 8, requires_grad=True)))
        most.append(watched.most)
    assert most[0] == most[1]


def test_a_recomputation_belongs_to_the_forward_whose_backward_runs():
    """Of two forwards, as a pipeline has them on their way, each has its own mask."""

    class Masked(Net):
        def forward(self, x, y, mask):
            z = checkpoint(self.middle, self.norm(self.silu(self.first(x))), use_reentrant=True)
            return cross_entropy(self.head(torch.tanh(z)), y)

    def counted(together: bool) -> dict[str, list[int]]:
        recorder = Recorder(make_net(Masked), read_batch=lambda arguments, keywords: BatchInfo(rows=arguments[2]))
        batches = [(*make_batch(step, ROWS), torch.arange(TOKENS).expand(ROWS, -1) < step + 1) for step in range(2)]
        losses = [recorder.model(*batch) for batch in batches] if together else []
        for index, batch in enumerate(batches):
            own_backward(recorder, losses[index] if together else recorder.model(*batch))
        return {name: recorder.counts(name) for name in ("first", "middle", "head")}

    assert counted(together=True) == counted(together=False)


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
        recorder.capture.begin_step(frozenset(recorder.sides) if active else None, 0)
        with torch.compiler.set_stance("force_eager" if active else "default"):
            loss = model(torch.randn(7, 6)).square().mean()
        with recorder.capture.own_backward(loss):
            loss.backward()
    assert {key: float(sums.count) for key, sums in recorder.capture.sums.items()} == dict.fromkeys(
        (f"{name}/{side}" for name in ("0.first", "0.block.0", "1") for side in "AG"), 7.0
    )
