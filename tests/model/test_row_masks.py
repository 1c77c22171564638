"""Which rows count: masks by shape, in encoder-decoders by place; sequences first, examples first and flattened."""

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_kfac.model.batch import ArgumentReader, fit
from tests.close import close
from tests.model.test_capture import Recorder
from tests.ops.specification import symmetric_pack

WIDTH, VOCABULARY, EXAMPLES = 8, 11, 3
SUMS = 20 * WIDTH
"""Of products one after another, through both halves of a model and back, and the rows of a factor."""
MASK = torch.tensor([[True, True, False], [True, False, False]])


@pytest.mark.parametrize(
    ("batch", "known", "found", "examples", "doubt"),
    [
        ((2, 3), None, MASK, 0, ""),
        ((3, 2), None, MASK.T, 1, ""),
        ((6,), None, MASK, 0, ""),
        ((6,), 1, MASK.T, 1, "flattened"),
        ((2, 3, 1), None, MASK, 0, ""),
        ((2, 1, 3), None, MASK, 0, ""),
        ((1, 2, 3), None, MASK[None], 0, ""),  # choices
        ((2,), None, None, 0, ""),  # pooled
        ((2, 4), None, None, 0, ""),  # with a class token
        ((6, 1), None, None, 0, "only the number of rows fits"),
        ((1, 6), None, None, 0, "only the number of rows fits"),
        ((0, 3), None, None, 0, ""),
    ],
)
def test_a_mask_is_used_as_its_shape_says(batch, known, found, examples, doubt):
    result = fit(MASK, batch, known)
    assert (result.mask is None) == (found is None) and (found is None or torch.equal(result.mask, found))
    assert result.examples == examples and doubt in result.doubt and bool(result.doubt) == bool(doubt)


def test_as_many_examples_as_positions_are_a_doubt_unless_their_order_is_known():
    square = torch.tensor([[True, True], [True, False]])
    square = torch.stack([square[0], torch.tensor([False, True])])
    assert "as many examples as positions" in fit(square, (2, 2)).doubt
    assert torch.equal(fit(square, (2, 2), 0).mask, square) and not fit(square, (2, 2), 0).doubt
    assert torch.equal(fit(square, (2, 2), 1).mask, square.T) and not fit(square, (2, 2), 1).doubt
    one = torch.ones(1, 1, dtype=torch.bool)
    assert not fit(one, (1, 1)).doubt and not fit(torch.ones(1, 4, dtype=torch.bool), (4,), 1).doubt


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, counted: Tensor | None) -> Tensor:
        scores = self.q(x) @ self.k(memory).transpose(-1, -2)
        if counted is not None:
            scores = scores.masked_fill(counted[:, None, :] == 0, -1e9)
        return self.o(scores.softmax(-1) @ self.v(memory))


class Block(nn.Module):
    def __init__(self, decoder: bool) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.cross = Attention() if decoder else None
        self.mlp = nn.Linear(WIDTH, WIDTH)


class Stack(nn.Module):
    """T5's: it embeds its tokens with the embedding that both stacks share."""

    def __init__(self, shared: nn.Embedding, decoder: bool) -> None:
        super().__init__()
        self.embed_tokens, self.block = shared, Block(decoder)

    def forward(self, input_ids, attention_mask=None, encoder_hidden_states=None, encoder_attention_mask=None):
        x = self.embed_tokens(input_ids)
        x = x + self.block.self_attn(x, x, attention_mask)
        if self.block.cross is not None:
            x = x + self.block.cross(x, encoder_hidden_states, encoder_attention_mask)
        return {"last_hidden_state": x + torch.tanh(self.block.mlp(x))}


class T5(nn.Module):
    """T5's structure and signature: encoder and decoder are children of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = Stack(self.shared, False), Stack(self.shared, True)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids, attention_mask=None, decoder_input_ids=None, decoder_attention_mask=None, labels=None):
        memory = self.encoder(input_ids, attention_mask)["last_hidden_state"]
        shifted = labels.roll(1, 1).clamp(min=0) if decoder_input_ids is None else decoder_input_ids
        hidden = self.decoder(shifted, decoder_attention_mask, memory, attention_mask)["last_hidden_state"]
        logits = self.lm_head(hidden * WIDTH**-0.5)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Bart(nn.Module):
    """BART's: they are children of an inner model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = T5()

    def forward(self, input_ids, attention_mask=None, decoder_input_ids=None, decoder_attention_mask=None, labels=None):
        return self.model(input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, labels)


class Torch(nn.Module):
    """torch's own nn.Transformer, sequences first by default, between embeddings and a head."""

    batch_first = False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 12, dropout=0.0, batch_first=self.batch_first)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids, attention_mask=None, decoder_input_ids=None, decoder_attention_mask=None, labels=None):
        shifted = labels.roll(1, 1).clamp(min=0)
        source, target = self.embed(input_ids), self.embed(shifted)
        if not self.batch_first:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
        padding = None if attention_mask is None else attention_mask == 0
        hidden = self.transformer(source, target, src_key_padding_mask=padding, memory_key_padding_mask=padding)
        logits = self.lm_head(hidden if self.batch_first else hidden.transpose(0, 1))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class TorchBatchFirst(Torch):
    batch_first = True


def data(source: int, target: int):
    """Uneven masks and labels, some of them ignored inside of a sequence."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (EXAMPLES, source), generator=generator)
    labels = torch.randint(VOCABULARY, (EXAMPLES, target), generator=generator)
    mask = torch.ones(EXAMPLES, source, dtype=torch.int64)
    mask[0, 2:], mask[1, -1:] = 0, 0
    labels[0, 1], labels[2, 3:] = -100, -100
    return tokens, mask, labels


def rows_seen(model: nn.Module, forward) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Inputs and output gradients of every linear layer, by plain autograd."""
    seen: dict[str, tuple[list[Tensor], list[Tensor]]] = {}

    def keep(name):
        def hook(module, inputs, output):
            probe = torch.zeros_like(output, requires_grad=True)
            seen.setdefault(name, ([], []))[0].append(inputs[0].detach())
            seen[name][1].append(probe)
            return output + probe

        return hook

    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    forward(model).backward()
    for handle in handles:
        handle.remove()
    return seen


def expected(model: nn.Module, forward, mask: Tensor | None, labelled: Tensor, name_side) -> dict:
    """A = mean over counted rows, G = M sum of g g^T over counted rows of gradients of a mean over M."""
    results, terms = {}, labelled.sum()
    for name, (inputs, probes) in rows_seen(model, forward).items():
        counted = labelled if name_side(name) == "target" else mask
        x, g = inputs[0], probes[0].grad
        if x.shape[0] != EXAMPLES:
            x, g = x.transpose(0, 1), g.transpose(0, 1)
        counted = torch.ones(x.shape[:2]) if counted is None else counted.float()
        if model.get_submodule(name).bias is not None:
            x = torch.cat([x, torch.ones(*x.shape[:2], 1)], -1)
        x, g = x * counted[..., None], g * counted[..., None]
        x, g = x.flatten(0, 1), g.flatten(0, 1)
        results[name] = symmetric_pack(x.T @ x / counted.sum()), symmetric_pack(terms * g.T @ g)
    return results


def side_of(name: str) -> str:
    """What a person says."""
    source = ".encoder." in f".{name}" or "cross.k" in name or "cross.v" in name
    return "source" if source else "target"


def record(model: nn.Module, forward, sharing: str = "expand") -> dict:
    recorder = Recorder(model)
    recorder.capture.rows.weight_sharing = sharing
    recorder.capture.read_batch = ArgumentReader(model)
    forward(model).backward()
    return recorder.means()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("with_mask", [True, False])
@pytest.mark.parametrize("lengths", [(5, 5), (6, 4), (4, 4)])
@pytest.mark.parametrize("kind", [T5, Bart, Torch, TorchBatchFirst])
def test_sources_are_counted_by_their_mask_and_targets_by_their_labels(kind, lengths, with_mask, caplog):
    torch.manual_seed(0)
    model = kind().train()
    tokens, mask, labels = data(*lengths)
    given = mask if with_mask else None

    def forward(model):
        return model(tokens, attention_mask=given, labels=labels)["loss"]

    wanted = expected(model, forward, given, labels >= 0, side_of)
    with caplog.at_level(logging.WARNING):
        found = record(model, forward)
    seen = {name for name in found if float(found[name][0].abs().sum()) > 0}
    inside = {name for name in seen if "in_proj_weight" in name or "attn.out_proj" in name}  # see test_products.py
    assert wanted.keys() == seen - inside
    for name, (A, G) in wanted.items():
        close(found[name][0], A, sums=SUMS, what=f"A of {name}")
        close(found[name][1], G, sums=SUMS, what=f"G of {name}")
    assert not caplog.records, "nothing here leaves a doubt"


class SequenceFirst(nn.Module):
    """One stack that works on [T, N, D]; its head sees rows as ``head`` lays them."""

    head = "examples first"

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = torch.tanh(self.inner(self.embed(input_ids).transpose(0, 1)))
        if self.head == "flattened":
            return F.cross_entropy(self.out(hidden.flatten(0, 1)), labels.T.flatten())
        return F.cross_entropy(self.out(hidden.transpose(0, 1)).flatten(0, 1), labels.flatten())


class Flattened(SequenceFirst):
    head = "flattened"


@pytest.mark.parametrize("kind", [SequenceFirst, Flattened])
def test_sequences_first_are_masked_as_such(kind, caplog):
    torch.manual_seed(0)
    model = kind()
    tokens, mask, labels = data(5, 5)
    counted = (labels >= 0) & mask.bool()

    def forward(model):
        return model(tokens, mask, labels)

    seen = rows_seen(model, forward)
    x = seen["inner"][0][0][counted.T]
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    h = seen["out"][0][0]
    h = h[counted.T.flatten()] if kind is Flattened else h[counted]
    h = torch.cat([h, torch.ones(len(h), 1)], 1)
    with caplog.at_level(logging.WARNING):
        found = record(model, forward)
    close(found["inner"][0], symmetric_pack(x.T @ x / len(x)), sums=len(x))
    close(found["out"][0], symmetric_pack(h.T @ h / len(h)), sums=len(h))
    said = [record.message for record in caplog.records]
    assert len(said) == (kind is Flattened)
    assert not said or "which rows of out count is ambiguous (rows [15], mask [3, 5])" in said[0]


def test_a_doubt_is_said_once_with_layer_and_shapes(caplog):
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.first = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.second = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, input_ids, attention_mask):
            return self.second(self.first(self.embed(input_ids))).sum()

    recorder = Recorder(Plain())
    recorder.capture.read_batch = ArgumentReader(recorder.model)
    tokens = torch.ones(4, 4, dtype=torch.int64)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            recorder.model(tokens, tokens).backward()
    assert len(caplog.records) == 1
    assert "which rows of first count is ambiguous (rows [4, 4], mask [4, 4])" in caplog.records[0].message
    caplog.clear()
    known = Recorder(Plain())
    known.capture.read_batch = ArgumentReader(known.model)
    with caplog.at_level(logging.WARNING):
        for tokens in (torch.ones(4, 3, dtype=torch.int64), torch.ones(4, 4, dtype=torch.int64)):
            known.model(tokens, tokens).backward()
    assert not caplog.records, "another batch has told the order"
