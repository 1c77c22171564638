"""Which rows of a micro-batch count, and how many loss terms it has: read from the model's own arguments."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MASK, DECODER_MASK, LABELS, ITEMS = "attention_mask", "decoder_attention_mask", "labels", "num_items_in_batch"
"""Names of Hugging Face's arguments."""
NO_LOSS = -100
"""Its label without a loss."""


@dataclass(frozen=True)
class BatchInfo:
    """What K-FAC has to know about a micro-batch; None: every row counts, and what the model returns gives M.

    Attributes:
        rows: bool [N, T], True where a row counts; used by layers whose rows are N x T, in whatever order. With an
            encoder and a decoder, the decoder's.
        labelled: bool [N] or [N, T]: True where the loss has a term. Its sum is M, the number of loss terms.
        divisor: what the loss divides the sum of its terms by, where that is not M: with sequence parallelism maybe
            the terms of the whole sequence.
        encoder_rows: bool [N, S], True where a row of the source counts, with an encoder and a decoder.
        items: what the loss that the model returns divides the sum of its terms by, whatever is done to it outside:
            Hugging Face's ``num_items_in_batch``, of all micro-batches and maybe all ranks.
        ranks: from how many ranks the rows come, each with as many loss terms as this one (experts).
        tokens: loss terms, where neither labels nor the model's output show them; None: as many as the layer nearest to
            the loss has rows.
        places: whether its rows are places for tokens, zero where there is none (experts).
    """

    rows: Tensor | None = None
    labelled: Tensor | None = None
    divisor: Tensor | float | None = None
    encoder_rows: Tensor | None = None
    items: Tensor | float | None = None
    ranks: int = 1
    tokens: int | None = None
    places: bool = False

    def terms(self, *, weight_sharing: str) -> Tensor | None:
        """M, a fp32 scalar on the device: loss terms, or with "reduce" examples that have one."""
        if self.labelled is None:
            return None
        labelled = self.labelled.flatten(1).any(dim=1) if weight_sharing == "reduce" else self.labelled
        return labelled.sum().float()


def encoder_decoders(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of encoders and their decoders: siblings called so, made of parts (T5, BART, nn.Transformer)."""
    for name, module in model.named_modules():
        pair = [getattr(module, part, None) for part in ("encoder", "decoder")]
        if all(isinstance(part, nn.Module) and any(True for _ in part.children()) for part in pair):
            prefix = f"{name}." if name else ""
            yield f"{prefix}encoder", f"{prefix}decoder"


ReadBatch = Callable[[tuple, Mapping[str, Any]], BatchInfo]
"""(arguments, keyword arguments) of the model's forward -> BatchInfo. A user may set ``engine.kfac.read_batch``."""


class ArgumentReader:
    """Reads a padding mask and labels from the forward's arguments, by Hugging Face's names for them: a [N, T] mask, 0
    where a row is padding (with an encoder and a decoder one of the source, one of the target), and integer labels.

    Position t of a model whose class is a causal language model's is trained on label t + 1.

    Args:
        model: the engine's module; its signature gives positional arguments their names.
        count: "labelled": rows that are attended and whose own label counts. "attended": rows of the mask. "all".
    """

    def __init__(self, model: nn.Module, *, count: str = "labelled") -> None:
        self._signature = inspect.signature(model.forward)
        self.count = count
        self.shifted = any(word in type(model).__name__ for word in ("CausalLM", "LMHeadModel"))
        self.two_sided = any(True for _ in encoder_decoders(model))

    def __call__(self, arguments: tuple, keywords: Mapping[str, Any]) -> BatchInfo:
        try:
            given = self._named(arguments, keywords)
        except TypeError:  # the call itself will say what is wrong with it
            return BatchInfo()
        labels, items = given.get(LABELS), given.get(ITEMS)
        labelled = None
        if isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dtype != torch.bool:
            labelled = labels != NO_LOSS
            if self.shifted and labelled.ndim == 2:
                labelled = torch.cat([labelled[:, 1:], labelled.new_zeros(len(labelled), 1)], dim=1)
        rows, encoder_rows = self._mask(given, MASK), None
        if self.two_sided:
            rows, encoder_rows = self._mask(given, DECODER_MASK), rows
        if self.count == "labelled" and labelled is not None and labelled.ndim == 2:
            rows = labelled if rows is None or rows.shape != labelled.shape else rows & labelled
        return BatchInfo(rows, labelled, encoder_rows=encoder_rows, items=items)

    def _mask(self, given: Mapping[str, Any], name: str) -> Tensor | None:
        mask = given.get(name)
        return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 and self.count != "all" else None

    def _named(self, arguments: tuple, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
        bound = self._signature.bind_partial(*arguments, **keywords).arguments
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound = {**bound, **bound.get(name, {})}
        return bound
