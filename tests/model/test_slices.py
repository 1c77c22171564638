"""Layers that get slices of a padded batch have the A and G of the whole: against the same model in one piece."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_kfac.model.batch import BatchInfo
from ds_kfac.model.slices import in_memory
from tests.close import close
from tests.model.test_capture import Recorder
from tests.model.test_row_masks import rows_seen
from tests.ops.specification import symmetric_pack

N, T, D, HIDDEN = 4, 6, 5, 7
SUMS = N * T + 2 * (D + HIDDEN)


class MLP(nn.Module):
    """Both layers see the same rows; ``normed``: even the first one sees no view of its input."""

    normed = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x * 1.0 if self.normed else x)))


def tiled(mlp: MLP, x: Tensor) -> Tensor:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    return TiledMLP.apply(lambda own, tile: own(tile), mlp, x, 3, [])


def tiled_sequence(mlp: MLP, x: Tensor) -> Tensor:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import SequenceTiledCompute

    return SequenceTiledCompute.apply(lambda x, own: own(x), x.shape[1], 3, ["x"], ["own"], "x", [], 1, None, x, mlp)


def again(mlp: MLP, x: Tensor) -> Tensor:
    return checkpoint(mlp, x, use_reentrant=True)


WAYS: dict[str, Callable[[MLP, Tensor], Tensor]] = {
    "whole": lambda mlp, x: mlp(x),
    "positions": lambda mlp, x: torch.cat([mlp(own) for own in x.chunk(4, 1)], 1),  # of 2, 2, 2
    "uneven positions": lambda mlp, x: torch.cat([mlp(own) for own in x.split(4, 1)], 1),
    "examples": lambda mlp, x: torch.cat([mlp(own) for own in x.split(3)]),
    "one by one": lambda mlp, x: torch.stack([mlp(own) for own in x]),
    "one by one, kept": lambda mlp, x: torch.cat([mlp(x[i : i + 1]) for i in range(len(x))]),
    "a position at a time": lambda mlp, x: torch.stack([mlp(x[:, t]) for t in range(x.shape[1])], 1),
    "from the last": lambda mlp, x: torch.stack([mlp(x[:, t]) for t in reversed(range(x.shape[1]))], 1).flip(1),
    "all rows": lambda mlp, x: torch.cat([mlp(own) for own in x.flatten(0, 1).split(5)]).view(x.shape),
    "tiles": tiled,
    "tiles of sequences": tiled_sequence,
    "sequences first": lambda mlp, x: mlp(x.transpose(0, 1)).transpose(0, 1),
    "sequences first, positions": lambda mlp, x: torch.cat([mlp(own) for own in x.transpose(0, 1).split(4)]).mT.mT
    .transpose(0, 1),
    "sequences first, examples": lambda mlp, x: torch.cat(
        [mlp(own) for own in x.transpose(0, 1).contiguous().split(3, 1)], 1
    ).transpose(0, 1),
    "sequences first, a position at a time": lambda mlp, x: torch.stack(
        [mlp(own) for own in x.transpose(0, 1).contiguous()], 1
    ),
    "twice": lambda mlp, x: sum(torch.stack([mlp(own) for own in x]) for _ in range(2)),
    "checkpointed, positions": lambda mlp, x: checkpoint(WAYS["uneven positions"], mlp, x, use_reentrant=True),
    "positions, checkpointed": lambda mlp, x: torch.cat([again(mlp, own) for own in x.split(4, 1)], 1),
    "checkpointed without reentry": lambda mlp, x: checkpoint(WAYS["one by one"], mlp, x, use_reentrant=False),
}  # fmt: skip


class Model(nn.Module):
    """First a layer of all rows that shows their order, then slices."""

    def __init__(self, way: str, normed: bool, sequences_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.mlp, self.head = nn.Linear(D, D), MLP(), nn.Linear(D, 3)
        self.mlp.normed, self.way, self.sequences_first = normed, way, sequences_first

    def forward(self, x: Tensor) -> Tensor:
        if self.sequences_first:
            x = x.transpose(0, 1)
        x = self.first(x)
        if self.sequences_first:
            x = x.transpose(0, 1)
        x = WAYS[self.way](self.mlp, x)
        return self.head(x)


def inputs(positions: int = T, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(positions) < torch.tensor([positions, 2, 3, 1])[:, None]
    return torch.randn(N, positions, D, generator=generator), mask


def expected(model: Model, x: Tensor, mask: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """A and G of the rows that count, from the model in one piece."""
    way, model.way = model.way, "whole"
    first, model.sequences_first = model.sequences_first, False
    found = {}
    for name, (xs, probes) in rows_seen(model, lambda own: own(x).square().mean()).items():
        a, g = xs[0][mask], probes[0].grad[mask]
        a = torch.cat([a, torch.ones(len(a), 1)], 1)
        found[name] = symmetric_pack(a.T @ a / len(a)), symmetric_pack(mask.sum() * g.T @ g)
    model.way, model.sequences_first = way, first
    model.zero_grad()
    return found


def step(recorder: Recorder, x: Tensor, mask: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    recorder.capture.read_batch = lambda arguments, keywords: BatchInfo(rows=mask)
    recorder.model(x).square().mean().backward()
    recorder.capture.end_backward()
    return recorder.means()


def assert_same(found: dict, wanted: dict, uses: int = 1) -> None:
    for name, (A, G) in wanted.items():
        close(found[name][0], A, sums=SUMS, what=f"A of {name}")
        close(
            found[name][1] / (uses if name == "mlp.up" or name == "mlp.down" else 1), G, sums=SUMS, what=f"G of {name}"
        )


POOLED = {"a position at a time", "from the last", "sequences first, a position at a time"}
"""One position of all examples may be pooled rows: only a layer whose input is a view of it has their mask."""


def made(way: str, computed: bool = False) -> Model:
    return Model(way, computed, way.startswith("sequences first"))


@pytest.mark.parametrize("way", [name for name in WAYS if name not in POOLED | {"twice"}])
def test_slices_that_are_views_have_their_part_of_the_mask_and_so_has_the_layer_that_follows(way, caplog):
    model, (x, mask) = made(way), inputs()
    wanted, recorder = expected(model, x, mask), Recorder(model)
    with caplog.at_level(logging.WARNING):
        assert_same(step(recorder, x, mask), wanted)
        recorder.capture._masks.begin()
    assert not caplog.records, "nothing here leaves a doubt"


@pytest.mark.parametrize("way", sorted(POOLED))
def test_one_position_of_all_examples_shows_nothing_of_the_layer_that_follows(way, caplog):
    model, (x, mask) = made(way), inputs()
    wanted, every = expected(model, x, mask), expected(model, x, torch.ones_like(mask))
    with caplog.at_level(logging.WARNING):
        found = step(Recorder(model), x, mask)
    for name, rows in ("mlp.up", wanted), ("mlp.down", every), ("head", wanted):
        close(found[name][0], rows[name][0], sums=SUMS, what=name)
    assert len(caplog.records) == 1 and "which rows of mlp.down count is ambiguous" in caplog.text


@pytest.mark.parametrize("way", [name for name in WAYS if name not in ("whole", "sequences first", "twice")])
def test_computed_slices_are_a_doubt_and_every_row_counts(way, caplog):
    model, (x, mask) = made(way, computed=True), inputs()
    wanted, every = expected(model, x, mask), expected(model, x, torch.ones_like(mask))
    recorder = Recorder(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = step(recorder, x, mask)
            close(found["mlp.up"][0], every["mlp.up"][0], sums=SUMS)
            close(found["head"][0], wanted["head"][0], sums=SUMS)
    assert len(caplog.records) == 1 and "which rows of mlp.up count is ambiguous" in caplog.text
    assert "every row counts" in caplog.text


def test_slices_of_as_many_examples_as_positions_lie_where_they_do():
    for way in ("one by one", "a position at a time", "positions", "sequences first, a position at a time"):
        model, (x, mask) = made(way), inputs(positions=N)
        wanted, recorder = expected(model, x, mask), Recorder(model)
        step(recorder, *inputs())  # in which the order of the first layer shows
        close(step(recorder, x, mask)["mlp.up"][0], wanted["mlp.up"][0], sums=SUMS, what=way)


def test_a_layer_that_gets_all_slices_twice_has_two_uses_of_each_row():
    model, (x, mask) = made("twice"), inputs()
    wanted, recorder = expected(made("one by one"), x, mask), Recorder(model)
    found = step(recorder, x, mask)
    close(found["mlp.up"][0], wanted["mlp.up"][0], sums=SUMS)
    close(found["mlp.down"][0], wanted["mlp.down"][0], sums=SUMS)


class Pooled(nn.Module):
    """As many rows as examples, once or as often as there are positions; a tower of fewer positions."""

    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.calls = nn.Linear(D, D), nn.Linear(D, 3), calls

    def forward(self, x: Tensor) -> Tensor:
        own = torch.tanh(self.first(x))
        return sum(self.head(own.mean(1)) for _ in range(self.calls)) + self.head(own[:, : T - 2] * 1.0).mean(1)


def test_pooled_rows_and_another_length_are_no_slices(caplog):
    model, (x, mask) = Pooled(), inputs()
    seen = rows_seen(model, lambda own: own(x).square().mean())["head"][0]
    rows = torch.cat([own.reshape(-1, D) for own in seen])
    rows = torch.cat([rows, torch.ones(len(rows), 1)], 1)
    recorder = Recorder(model)
    with caplog.at_level(logging.WARNING):
        found = step(recorder, x, mask)
    close(found["head"][0], symmetric_pack(rows.T @ rows / len(rows)), sums=SUMS)
    assert not caplog.records


def test_slices_of_whole_examples_are_reduced_as_in_the_batch_and_others_are_a_doubt(caplog):
    x, mask = inputs()
    found = {}
    with caplog.at_level(logging.WARNING):
        for way in ("whole", "examples", "one by one"):
            recorder = Recorder(made(way), sharing="reduce")
            found[way] = step(recorder, x, mask)
        assert not caplog.records
    for way in ("examples", "one by one"):
        assert_same(found[way], found["whole"])
    with caplog.at_level(logging.WARNING):
        step(Recorder(made("positions"), sharing="reduce"), x, mask)
    assert "slices that cut examples" in caplog.text


@pytest.mark.parametrize("way", ["one by one", "positions"])
def test_slices_have_their_part_in_a_monte_carlo_fisher(way):
    model, (x, mask) = made(way), inputs()
    wanted, recorder = expected(model, x, mask), Recorder(model, sampled=True)
    recorder.capture.read_batch = lambda arguments, keywords: BatchInfo(rows=mask)
    loss, calls = recorder.model(x).square().mean(), list(recorder.capture.pending)
    gradients = torch.autograd.grad(loss, [call.edge for call in calls])
    recorder.capture.add_sampled(calls, gradients, 1.0)
    assert_same(recorder.means(), wanted)


class Attends(nn.Module):
    """torch's attention, of some examples at a time, which turns them."""

    def __init__(self, step: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.head, self.step = nn.MultiheadAttention(D, 1, batch_first=True), nn.Linear(D, 3), step

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.attention(own, own, own)[0] for own in x.split(self.step)]))


def test_attention_of_some_examples_has_their_mask_where_its_rows_are_known(caplog):
    x, mask = inputs()
    found = {}
    for step_ in (N, 2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found[step_] = step(Recorder(Attends(step_)), x, mask)
    close(found[2]["attention.in_proj_weight"][0], found[N]["attention.in_proj_weight"][0], sums=SUMS)
    assert len(caplog.records) == 1 and "which rows of attention.out_proj count" in caplog.text
    every = step(Recorder(Attends(2)), x, torch.ones_like(mask))
    close(found[2]["attention.out_proj"][0], every["attention.out_proj"][0], sums=SUMS)


def test_a_view_of_the_first_positions_is_no_doubt_in_reduce(caplog):
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(D, D), nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.first(x)[:, 0])

    x, mask = inputs()
    recorder = Recorder(First(), sharing="reduce")
    recorder.capture.read_batch = lambda arguments, keywords: BatchInfo(rows=mask)
    with caplog.at_level(logging.WARNING):
        recorder.model(x).square().mean().backward()
    assert recorder.counts("head") == [N, N] and not caplog.records


def test_two_backwards_count_the_inputs_of_slices_once():
    model, (x, mask) = made("one by one"), inputs()
    wanted, recorder = expected(model, x, mask), Recorder(model)
    recorder.capture.read_batch = lambda arguments, keywords: BatchInfo(rows=mask)
    loss = recorder.model(x).square().mean()
    with recorder.capture.own_backward(retain_graph=True):
        loss.backward(retain_graph=True)
    with recorder.capture.own_backward():
        loss.backward()
    assert recorder.counts("mlp.up")[0] == int(mask.sum())
    close(recorder.means()["mlp.up"][0], wanted["mlp.up"][0], sums=SUMS)


WHOLE = torch.randn(N, T, D)
VIEWS = {
    "positions": (lambda x: x[:, 2:5], 0), "examples": (lambda x: x[1:3], 0), "an example": (lambda x: x[3], 0),
    "a position": (lambda x: x[:, 4], 0), "a position, kept": (lambda x: x[:, 4:5], 0), "a row": (lambda x: x[2, 3], 0),
    "rows in a row": (lambda x: x.flatten(0, 1)[5:12], 0), "transposed": (lambda x: x[:, 2:5].transpose(0, 1), 1),
    "transposed examples": (lambda x: x[1:3].transpose(0, 1), 1), "columns": (lambda x: x[:, 1:3, 2:4], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("first", [False, True], ids=["examples first", "sequences first"])
def test_a_view_shows_its_rows(name, first):
    cut, examples = VIEWS[name]
    numbers = torch.arange(N * T).view(N, T)
    rows = cut(numbers[..., None].expand(N, T, D).contiguous())[..., 0]
    whole = WHOLE.transpose(0, 1).contiguous().transpose(0, 1) if first else WHOLE
    if first and name == "rows in a row":
        return
    piece = in_memory(cut(whole), N, T, 1 if first else 0)
    assert piece is not None
    assert torch.equal(piece.of(numbers).reshape(rows.shape), rows)
    assert rows.ndim < 2 or piece.examples == examples


@pytest.mark.parametrize(
    "x", [torch.randn(N, D), torch.randn(2, T, D), WHOLE[:, ::2], WHOLE[..., ::2], WHOLE[:, :1].expand(N, 3, D),
          torch.randn(N, T, 2 * D).view(N, 2 * T, D)[:, :3], torch.empty(0, D), torch.randn(N, T + 1, D)[:, 1:]],
    ids=["pooled", "fresh", "every other", "every other column", "repeated", "longer", "empty", "without the first"],
)  # fmt: skip
def test_what_is_no_view_of_the_batch_shows_nothing(x):
    assert in_memory(x, N, T, 0) is None


def test_rows_that_are_as_wide_as_a_sequence_are_no_column_of_it():
    """[T, N D'], of one example and as many positions, has the strides of [N, T, D'] at one position."""
    assert in_memory(torch.randn(T, T * 2), T, T, 0) is None
