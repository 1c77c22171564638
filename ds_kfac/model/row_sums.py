"""Adds the rows of a call to its layer's sums: inputs to A, output gradients per loss term to G."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ds_kfac.model.batch_sum import BatchSum
from ds_kfac.model.calls import Call
from ds_kfac.model.layers.convolution import Convolution
from ds_kfac.model.loss_terms import LossTerms
from ds_kfac.model.rows import RowRule, gradient_rows, input_rows

logger = logging.getLogger("ds_kfac")


class RowSums:
    """Turns the tensors of layer calls into rows and adds them to the sums of the step.

    Args:
        rule: how rows are made.
        stage: context in which rows are added, for timings.
        divided: whether the loss may be divided by something else than its terms, according to the micro-batch.

    Attributes:
        turn: the step, moves the sub-sample.
    """

    def __init__(
        self, rule: RowRule, stage: Callable[[], AbstractContextManager[None]] = nullcontext, *, divided: bool = True
    ) -> None:
        self.rule, self.turn = rule, 0
        self._stage, self._divided = stage, divided
        self._counted: set[tuple[LossTerms, str]] = set()  # layers whose loss terms are
        self._warned = False

    @property
    def open(self) -> bool:
        """Whether gradients came since the last :meth:`close`."""
        return bool(self._counted)

    def close(self) -> None:
        """The next gradients are of other loss terms."""
        self._counted.clear()

    @torch.no_grad()
    def add_input(self, call: Call, x: Tensor, sum_A: BatchSum) -> None:
        """Of a call with ``x``."""
        layer, kind, bias = call.layer, call.kind, call.layer.bias is not None
        with self._stage():
            if self.rule.weight_sharing == "expand" and isinstance(kind, Convolution):
                patches = kind.input_patches(call.module, x)
                grid = patches.grid(self.rule, self.turn, max(layer.shape[-2:]))
                patches.add_to_(sum_A.sum_P, layer.A, grid, bias=bias)
                sum_A.count.add_(patches.count)
                return
            tensor = kind.input_rows(call.module, x)
            assert tensor is not None  # the type does not wait for gradients
            rows = input_rows(tensor, call.rows.mask, self.rule, turn=self.turn, examples=call.rows.examples)
            layer.A.accumulate_(sum_A.sum_P, rows.x, ones_column=rows.counts_R1 if bias else None)
            sum_A.count.add_(rows.count)

    @torch.no_grad()
    def add_gradient(
        self, call: Call, gradient: Tensor, sum_A: BatchSum | None, sum_G: BatchSum | None, seed: Tensor | float
    ) -> None:
        """Rows of M g-hat / seed: the gradient of each loss term, M of them averaged in the loss.

        Or of items g-hat / seed, where the loss that the model returned divides by items, and seed is what reached it.

        fp32 rows are unscaled before the product: the square of a gradient scaled by 2^16 may overflow. Rows in 16
        bits go as they are, the square of M / seed comes after: fp16 squares stay below 2^32, bf16 is not scaled.
        """
        layer, kind, gradient = call.layer, call.kind, gradient.detach().reshape(call.shape)
        with self._stage():
            if self.rule.weight_sharing == "expand" and isinstance(kind, Convolution):
                if sum_G is not None:
                    patches = kind.gradient_patches(call.module, gradient)
                    gain = self._gain(call, patches.examples, seed, sum_G)
                    grid = patches.grid(self.rule, self.turn, max(layer.shape[-2:]))  # the same for both sides
                    patches.add_to_(sum_G.sum_P, layer.G, grid, gain=gain)
                return
            tensors = kind.gradient_rows(call.module, call.x, gradient)
            for tensor, side, sum_ in zip(tensors, (layer.A, layer.G), (sum_A, sum_G), strict=True):
                if tensor is None or sum_ is None:
                    continue
                rows, own, factor = gradient_rows(
                    tensor, call.rows.mask, self.rule, turn=self.turn, examples=call.rows.examples
                )
                gain, scale = self._gain(call, own, seed, sum_), factor
                if rows.dtype == torch.float32:
                    rows = rows * gain
                else:
                    scale = factor * gain**2
                side.accumulate_(sum_.sum_P, rows, scale=scale)

    def _gain(self, call: Call, own: Tensor | int, seed: Tensor | float, sum_: BatchSum) -> Any:
        """What output gradients are multiplied by. Counts the call's loss terms in ``sum_``, unless they are: a second
        use of a layer in a forward adds rows, not terms.

        Args:
            own: the call's rows that count.
        """
        loss, info = call.forward.loss, call.info
        terms, divisor = self._terms(call, own), info.divisor
        key = loss, call.layer.name  # A's and G's rows are the same terms, and one of both is made
        if key not in self._counted:
            self._counted.add(key)
            sum_.count.add_(terms * info.ranks)
        if loss.seed is not None and info.items is not None:
            seed, divisor = loss.seed, info.items
        return (divisor if self._divided and divisor is not None else terms) / seed

    def _terms(self, call: Call, own: Tensor | int) -> Tensor | int:
        """M of the call's forward, the same for all layers."""
        loss = call.forward.loss
        if loss.terms is not None:
            return loss.terms
        own = own if call.info.tokens is None else call.info.tokens
        if call.select is not None and loss.guess is not None:  # rows of one of several layers say nothing of it
            return loss.guess
        if loss.guess is None:
            loss.guess = own
        known = isinstance(own, int) and isinstance(loss.guess, int)  # numbers on the device are not looked at
        if not self._warned and (own != loss.guess if known else type(own) is not type(loss.guess)):
            self._warned = True
            logger.warning(
                f"ds_kfac: {call.layer.name} has other rows than the layer nearest to the loss. The number of loss "
                "terms is taken from that layer, because neither labels nor an output of the model show it. Set "
                "engine.kfac.read_batch to return the labels (docs/tuning.md)"
            )
        return loss.guess
