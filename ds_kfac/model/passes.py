"""The sums collected in one backward pass, and the row count R_p of the layer nearest to the loss.

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
    """The sums of outer products and the numbers of rows that one backward pass has added up so
    far.

    Attributes:
        sums: factor key -> sum of g^ g^^T over the pass's rows, for factors that are made of
            gradients. g^ is a row's part of the averaged gradient.
        has_begun: whether any gradient has arrived.
        adds: whether the pass adds to the gradient of a weight that K-FAC updates. For example,
            ``autograd.grad`` through a frozen layer does not. Only set for passes that no engine
            has announced as its own.
        forwards: the forward passes that the pass went through; a dict in place of an ordered set.
        alive: layer name -> bool scalar on the device, whether a nonzero gradient has arrived at
            the layer. Layers are in the order in which their first gradients arrived.
    """

    def __init__(self) -> None:
        self.sums: dict[str, BatchSum] = {}
        self.has_begun = False
        self.adds = False
        self.forwards: dict[Forward, None] = {}
        self.alive: dict[str, Tensor] = {}
        # (forward pass, layer name) -> number of examples in each call of the layer
        self._examples: dict[tuple[Forward, str], list[int]] = {}
        self._counted: set[Rows] = set()
        # layer name -> number of the layer's rows that no forward pass has counted
        self._uncounted: dict[str, int | Tensor] = {}

    def reaches(self, rows: Rows) -> None:
        """Record that the pass has reached a call."""
        self.has_begun = True
        if not rows.recomputed:
            self.forwards[rows.forward] = None

    def arrived(self, rows: Rows, with_gradient: Tensor, weight_sharing: str) -> Tensor:
        """Record that a call's gradient has arrived. Returns a bool scalar that says whether the
        gradient has a nonzero entry.

        Args:
            rows: the rows of the call.
            with_gradient: bool, True for rows of the gradient with a nonzero entry; for images,
                True for nonzero entries.
            weight_sharing: see :class:`ds_kfac.model.rows.RowSums`.
        """
        self.reaches(rows)
        alive = with_gradient.any()
        before = self.alive.get(rows.layer)
        self.alive[rows.layer] = alive if before is None else before | alive
        if rows in self._counted:
            return alive
        self._counted.add(rows)
        examples = len(with_gradient) if with_gradient.ndim else 1
        self._examples.setdefault((rows.forward, rows.layer), []).append(examples)
        mask = rows.forward.mask(rows.leading)
        uncounted: int | Tensor = 0
        if rows.recomputed:
            uncounted = rows.number if mask is None else mask.sum()
        # a row with a gradient counts, even if the mask leaves it out
        if mask is not None and weight_sharing == "expand":
            uncounted = uncounted + (with_gradient & ~mask).sum()
        self._uncounted[rows.layer] = self._uncounted.get(rows.layer, 0) + uncounted
        return alive

    def check_examples(self, rows: Rows, gradient: Tensor) -> None:
        """Check that the first dimension of a call is the dimension of the examples, as
        ``weight_sharing`` "reduce" requires.

        Args:
            rows: the rows of the call.
            gradient: the call's output gradient, [N, ..], or [O] for a single example.

        Raises:
            ValueError: in the same forward pass, the layer nearest to the loss had another number
                of examples.
        """
        examples = len(gradient) if gradient.ndim > 1 else 1
        nearest = next(iter(self.alive))
        if self._fits(examples, rows.forward, nearest) or not self.alive[rows.layer]:
            return
        # this waits for the device, but only where the sizes differ
        if not self.alive[nearest]:
            nearest = next(layer for layer, alive in self.alive.items() if alive)
        if not self._fits(examples, rows.forward, nearest):
            raise ValueError(
                '"weight_sharing": "reduce" takes the first dimension for the examples, but its '
                f"size is {examples} in this layer, and {self._examples[rows.forward, nearest][0]} "
                f"in {nearest}, the layer nearest to the loss"
            )

    def _fits(self, examples: int, forward: Forward, layer: str) -> bool:
        """Return whether one of a layer's calls, or all of them together, have this number of
        examples; True if there are no calls."""
        sizes = self._examples.get((forward, layer), [])
        return not sizes or examples in (*sizes, sum(sizes))

    def rows(self, weight_sharing: str) -> int | Tensor:
        """Return R_p: the number of rows of the layer nearest to the loss.

        That is the first layer whose gradient is not zero. All rows of its calls in the pass's
        forwards count, except padding. Only the device knows which layer this is, so the number of
        rows is computed for all layers, and the device chooses one of these numbers. Successive
        layers with equal calls are treated as one layer.
        """
        total: int | Tensor = 0
        is_found: Tensor | None = None  # whether an earlier layer had a nonzero gradient
        for _, layers in groupby(self.alive, self._calls):
            names = list(layers)
            alive = torch.stack([self.alive[name] for name in names]).any()
            rows = sum(forward.rows(names[0], weight_sharing) for forward in self.forwards)
            rows = torch.where(alive, rows + self._uncounted.get(names[0], 0), 0)
            total = rows if is_found is None else torch.where(is_found, total, rows)
            is_found = alive if is_found is None else is_found | alive
        return total

    def _calls(self, layer: str) -> tuple[Any, ...]:
        """Return a key for grouping layers. Layers with equal keys have the same number of rows."""
        uncounted = self._uncounted.get(layer, 0)
        calls = [(*forward.calls.get(layer, ()),) for forward in self.forwards]
        # the host does not know the value of a tensor
        return (*calls, uncounted if isinstance(uncounted, int) else layer)
