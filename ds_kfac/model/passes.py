"""One backward pass: its sums, and R_p, the rows of the layer nearest to the loss.

See "The scale of G" in docs/explanation/formulas.md.
"""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ds_kfac.model.calls import Rows
from ds_kfac.model.masks import Forward
from ds_kfac.model.rows import BatchSum


class BackwardPass:
    """What one backward pass has brought so far.

    Attributes:
        sums: key -> sum over its rows of g^ g^^T, of factors that are made of gradients.
        has_begun: whether any gradient has arrived.
        forwards: the forward passes that it went through.
        alive: layer -> whether a gradient that is not zero has arrived there, a bool scalar; in the
            order of arrival.
        adds: whether a weight of K-FAC's gets a part of its gradient, in a pass that was not
            announced. In others, such as ``autograd.grad`` through a frozen layer, none does.
    """

    def __init__(self) -> None:
        self.sums: dict[str, BatchSum] = {}
        self.has_begun = False
        self.adds = False
        self.forwards: dict[Forward, None] = {}
        self.alive: dict[str, Tensor] = {}
        # numbers of examples of a layer's calls
        self._examples: dict[tuple[Forward, str], list[int]] = {}
        self._counted: set[Rows] = set()
        self._more: dict[str, int | Tensor] = {}  # layer -> rows that no forward has counted

    def reaches(self, rows: Rows) -> None:
        """The pass has come to a call."""
        self.has_begun = True
        if not rows.recomputed:
            self.forwards[rows.forward] = None

    def arrived(self, rows: Rows, with_gradient: Tensor, weight_sharing: str) -> Tensor:
        """The gradient of a call has arrived. Returns whether it has an entry that is not zero, a
        bool scalar.

        Args:
            with_gradient: bool, which rows have such an entry; of images which entries.
        """
        self.reaches(rows)
        alive = with_gradient.any()
        self.alive[rows.layer] = (
            self.alive[rows.layer] | alive if rows.layer in self.alive else alive
        )
        if rows in self._counted:
            return alive
        self._counted.add(rows)
        examples = len(with_gradient) if with_gradient.ndim else 1
        self._examples.setdefault((rows.forward, rows.layer), []).append(examples)
        mask = rows.forward.mask(rows.leading)
        more: int | Tensor = 0
        if rows.recomputed:
            more = rows.number if mask is None else mask.sum()
        # a row with a gradient counts in any case
        if mask is not None and weight_sharing == "expand":
            more = more + (with_gradient & ~mask).sum()
        self._more[rows.layer] = self._more.get(rows.layer, 0) + more
        return alive

    def check_examples(self, rows: Rows, gradient: Tensor) -> None:
        """Check that with ``weight_sharing`` "reduce" a call's first dimension is that of the
        examples.

        Raises:
            ValueError: it is not that of the calls of the layer nearest to the loss in the same
                forward pass.
        """
        examples = len(gradient) if gradient.ndim > 1 else 1
        first = next(iter(self.alive))
        if self._fits(examples, rows.forward, first) or not self.alive[rows.layer]:
            return
        if not self.alive[first]:  # waits for the device, as seldom as numbers differ
            first = next(layer for layer, alive in self.alive.items() if alive)
        if not self._fits(examples, rows.forward, first):
            raise ValueError(
                f'"weight_sharing": "reduce" takes the first dimension for the examples, but here '
                f"that is {examples}, "
                f"and {self._examples[rows.forward, first][0]} in {first}, the layer nearest to "
                f"the loss"
            )

    def _fits(self, examples: int, forward: Forward, layer: str) -> bool:
        known = self._examples.get((forward, layer), [])
        return not known or examples in (*known, sum(known))

    def rows(self, weight_sharing: str) -> int | Tensor:
        """R_p: the rows of the layer nearest to the loss, the first one whose gradient is not zero.
        They are all rows of its calls in these forward passes, without padding. Which one it is
        only the device knows; neighbours with equal calls are looked at together."""
        total: int | Tensor = 0
        found: Tensor | None = None
        for _, layers in groupby(self.alive, self._calls):
            names = list(layers)
            alive = torch.stack([self.alive[name] for name in names]).any()
            rows = sum(forward.rows(names[0], weight_sharing) for forward in self.forwards)
            rows = torch.where(alive, rows + self._more.get(names[0], 0), 0)
            total = rows if found is None else torch.where(found, total, rows)
            found = alive if found is None else found | alive
        return total

    def _calls(self, layer: str) -> tuple[Any, ...]:
        """Equal for layers that have as many rows."""
        more = self._more.get(layer, 0)
        calls = [(*forward.calls.get(layer, ()),) for forward in self.forwards]
        return (*calls, more if isinstance(more, int) else layer)
