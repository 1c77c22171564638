"""The truth about A and G: plain hooks that keep every input and gradient, and a loop over rows in
float64.

Nothing of ``ds_kfac`` takes part. A call of a layer is one forward of an ``nn.Linear``, of
transformers' ``Conv1D`` or of a convolution. Its rows have inputs a, with a 1 appended for a
trained bias, and gradients g, which reach its output.

- A call whose gradient does not arrive, or is zero in every entry, has no rows.
- A row is left out if its gradient is zero and a mask leaves it out, or if its input and gradient
  are both zero.
- A = mean a a^T over the other rows of all calls, backward passes and ranks. A layer without a row
  has no factors.
- G = K sum_p R_p sum g^ g^^T, where g^ = g / (loss scale) / (number of ranks).
- K is the number of outermost backward passes over all ranks that reach a parameter of the model.
- R_p is the number of rows of the first layer in pass p whose gradient is not zero, in all its
  calls in the forwards of that pass, whether they have a gradient or not, without the rows that a
  mask leaves out though they have no gradient.
- Rows are positions; with ``sharing="reduce"`` they are examples: the mean of the inputs of an
  example's rows, and the sum of their gradients. A group of a convolution is a layer of its own,
  "<name>:<group>".

    truth = Truth(model)
    with truth:
        loss_of(model(...)).backward()  # any number of forwards and backward passes
    A, G, rows = truth.factors()["head"]
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracle_images import CONVOLUTIONS, TRANSPOSED, patches, pixels


@dataclass(eq=False)
class Forward:
    """A forward of the whole model: its masks, its calls, and torch's number of the first autograd
    node it may make."""

    masks: list[Tensor] = field(default_factory=list)
    calls: list["Call"] = field(default_factory=list)
    first_node: int = 0


@dataclass(eq=False)
class Call:
    """A call of a layer.

    Attributes:
        layer: name of the first module that has this weight.
        x: a copy of its input.
        shape: of its output.
        made_in: number of the backward pass that made it, as recomputations are; None: a forward.
        gradients: (number of the backward pass, gradient of the output), as they arrived.
    """

    layer: str
    module: Any
    x: Tensor
    shape: torch.Size
    forward: Forward
    made_in: int | None
    gradients: list[tuple[int, Tensor]] = field(default_factory=list)

    @property
    def leading(self) -> torch.Size:
        """Dimensions of its output's rows."""
        is_image = isinstance(self.module, CONVOLUTIONS)
        return torch.Size([self.shape[0], *self.shape[2:]]) if is_image else self.shape[:-1]

    @property
    def NT(self) -> tuple[int, int]:
        """Examples and positions."""
        leading = self.leading or torch.Size([1])  # a single row has no leading dimension
        return leading[0], leading[1:].numel()

    def rows(self, g: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, a [N, T, I] without the bias' 1, g [N, T, O]) of every group."""
        module = self.module
        if not isinstance(module, CONVOLUTIONS):
            yield self.layer, *(x.reshape(*self.NT, x.shape[-1]) for x in (self.x, g))
            return
        if isinstance(module, TRANSPOSED):
            a, g = pixels(self.x, module.groups), patches(module, g)
        else:
            a, g = patches(module, self.x), pixels(g, module.groups)
        for group in range(module.groups):
            name = self.layer if module.groups == 1 else f"{self.layer}:{group}"
            yield name, a[:, :, group], g[:, :, group]

    def attended(self) -> Tensor:
        """Which rows [N, T] no mask leaves out: those that one of the masks of the call's shape
        attends to."""
        masks = [] if isinstance(self.module, CONVOLUTIONS) else self.forward.masks
        fitting = [fitted for mask in masks if (fitted := self._fitting(mask)) is not None]
        if not fitting:
            return torch.ones(self.NT, dtype=torch.bool)
        attended = torch.stack(fitting).any(0)
        for _ in self.leading[attended.ndim :]:  # dimensions after the mask's
            attended = attended.unsqueeze(-1)
        return attended.expand(self.leading).reshape(self.NT)

    def _fitting(self, mask: Tensor) -> Tensor | None:
        if self.leading == (mask.numel(),):
            others = [transposed_to(mask, call.leading) for call in self.forward.calls]
            return mask.flatten() if all(other is None for other in others) else None
        return transposed_to(mask, self.leading)


class Truth:
    """What happens to a model's layers while this is entered: one training step, on one rank.

    Args:
        mask: (args, kwargs) of the model's forward -> its mask [N, T] or None; by default every
            argument whose name ends in "attention_mask".
        scale: the loss scale.
        sharing: "expand" or "reduce".

    Attributes:
        inside: how many forwards of the model run, in each other.
        passes: number of backward passes that have ended.
        running: for each backward pass that runs in another one, as reentrant recomputations do,
            the forward that it is part of; None for the outermost.
        accumulates: whether the outermost pass adds to gradients.
        accumulated: pass -> ids of the parameters to whose gradient it adds.
        first_arrivals: pass -> the call whose gradient is the first that is not zero, and that
            gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mask: Callable[[tuple, dict], Tensor | None] | None = None,
        scale: float = 1.0,
        sharing: str = "expand",
    ) -> None:
        self.model, self.mask, self.scale, self.sharing = model, mask, scale, sharing
        self.names: dict[int, str] = {}  # id of a weight -> its layer
        # id of a module -> id of its weight, which functional_call may replace
        self.weights: dict[int, int] = {}
        self.forwards = [Forward()]
        self.inside = 0
        self.passes = 0
        self.running: list[Forward | None] = []
        self.accumulates = False
        self.accumulated: dict[int, set[int]] = {}
        self.first_arrivals: dict[int, tuple[Call, Tensor]] = {}

    def __enter__(self) -> "Truth":
        self.handles = [
            self.model.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.model.register_forward_hook(self._end, always_call=True),
        ]
        for name, module in self.model.named_modules():
            if isinstance(module, (nn.Linear, *CONVOLUTIONS)) or type(module).__name__ == "Conv1D":
                self.names.setdefault(id(module.weight), name)
                self.weights[id(module)] = id(module.weight)
                self.handles.append(module.register_forward_hook(self._called, with_kwargs=True))
        for p in self.model.parameters():
            if p.requires_grad:
                self.handles.append(p.register_post_accumulate_grad_hook(self._accumulated))
        self.run_backward = torch.autograd._engine_run_backward
        torch.autograd._engine_run_backward = self._backward
        return self

    def __exit__(self, *_) -> None:
        torch.autograd._engine_run_backward = self.run_backward
        for handle in self.handles:
            handle.remove()

    # what happens, in order

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.inside += 1
        if self.mask is None:
            masks = attention_masks(module, args, kwargs)
        else:
            masks = [self.mask(args, kwargs)]
        masks = [mask.detach().bool().clone() for mask in masks if is_mask(mask)]
        self.forwards.append(Forward(masks, first_node=next_node()))

    def _end(self, *_) -> None:
        self.inside -= 1

    def _called(self, module: Any, args: tuple, kwargs: dict, y: Tensor) -> None:
        if not y.requires_grad:
            return
        x = (args or tuple(kwargs.values()))[0].detach()
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        made_in = self.passes if self.running else None
        name = self.names[self.weights[id(module)]]
        call = Call(name, module, x.double().clone(), y.shape, self._forward(), made_in)
        call.forward.calls.append(call)
        # the node of a view is another one once the view is changed in place
        base = y if y._base is None else y._base
        base.grad_fn.register_prehook(partial(self._arrived, call, base.output_nr))

    def _forward(self) -> Forward:
        """The forward that a call is part of: a recomputation's is the one that made the node which
        recomputes."""
        if self.inside or not self.running:
            return self.forwards[-1]
        if self.running[-1] is not None:
            return self.running[-1]
        node = torch._C._current_autograd_node()._sequence_nr()
        return [forward for forward in self.forwards if forward.first_node <= node][-1]

    def _backward(self, *args, **kwargs) -> Any:
        """In place of what ``Tensor.backward`` and ``torch.autograd.grad`` call."""
        if not self.running:
            self.accumulates = kwargs.get("accumulate_grad", False)
        self.running.append(self._forward() if self.running else None)
        try:
            return self.run_backward(*args, **kwargs)
        finally:
            self.running.pop()
            # a pass inside a forward, such as that of a tiled loss, is part of the next one
            if self.accumulates and not self.running and not self.inside:
                self.passes += 1

    def _arrived(self, call: Call, output: int, gradients: tuple) -> None:
        if self.accumulates and gradients[output] is not None:
            g = gradients[output].detach().double().reshape(call.shape).clone()
            call.gradients.append((self.passes, g))
            if g.any():
                self.first_arrivals.setdefault(self.passes, (call, g))

    def _accumulated(self, p: Tensor) -> None:
        self.accumulated.setdefault(self.passes, set()).add(id(p))

    # what it amounts to

    def nearest_rows(self, number: int) -> int:
        """R_p of a backward pass."""
        if number not in self.first_arrivals:
            return 0
        first, _ = self.first_arrivals[number]
        calls = [call for forward in self.forwards for call in forward.calls]
        arrived = {call for call in calls if any(of == number for of, _ in call.gradients)}
        forwards = {call.forward for call in arrived}
        total = 0
        for call in calls:
            brought = call in arrived or (call.made_in is None and call.forward in forwards)
            if call.layer == first.layer and brought:
                rows = call.attended()
                channels = 1 if isinstance(call.module, CONVOLUTIONS) else -1
                for of, gradient in call.gradients:
                    if of == number:
                        rows = rows | gradient.any(channels).reshape(call.NT)
                total += int(rows.any(1).sum() if self.sharing == "reduce" else rows.sum())
        return total

    def sums(self) -> dict[str, Any]:
        """Plain data, which :func:`factors_of_ranks` adds up: K, the sum of R_p, and of each layer
        the sum of a a^T, the number of rows, the sum of R_p g g^T, and the sum of g a^T, which is
        the gradient of the weight."""
        layers: dict[str, list] = {}
        R = {number: self.nearest_rows(number) for number in self.accumulated}
        for call in [call for forward in self.forwards for call in forward.calls]:
            for number, gradient in call.gradients:
                accumulates = self.weights[id(call.module)] in self.accumulated.get(number, ())
                if not gradient.any() or not accumulates:
                    continue
                for name, a, g in call.rows(gradient / self.scale):
                    self._add(layers.setdefault(name, [0.0, 0, 0.0, 0.0]), call, a, g, R[number])
        layers = {name: sums for name, sums in layers.items() if sums[1]}
        return {"passes": len(self.accumulated), "terms": sum(R.values()), "layers": layers}

    def _add(self, sums: list, call: Call, a_NTI: Tensor, g_NTO: Tensor, R: int) -> None:
        bias = not isinstance(call.module, TRANSPOSED) and call.module.bias is not None
        bias = bias and call.module.bias.requires_grad
        attended = call.attended()
        if isinstance(call.module, TRANSPOSED):  # its rows are positions of its input
            attended = torch.ones(a_NTI.shape[:2], dtype=torch.bool)
        for of_example, a_TI, g_TO in zip(attended, a_NTI, g_NTO, strict=True):
            rows = []
            for is_attended, a, g in zip(of_example, a_TI, g_TO, strict=True):
                left_out = not g.any() and (not is_attended or not a.any())
                if not left_out:
                    rows.append((torch.cat([a, a.new_ones(1)]) if bias else a, g))
            if self.sharing == "reduce" and rows:
                rows = [(sum(a for a, _ in rows) / len(rows), sum(g for _, g in rows))]
            for a, g in rows:
                sums[0] = sums[0] + torch.outer(a, a)
                sums[1] += 1
                sums[2] = sums[2] + R * torch.outer(g, g)
                sums[3] = sums[3] + torch.outer(g, a)

    def factors(self) -> dict[str, tuple[Tensor, Tensor, int]]:
        """{layer: (A, G, rows)}, if this is the only rank."""
        return factors_of_ranks([self.sums()])


def factors_of_ranks(ranks: list[dict[str, Any]]) -> dict[str, tuple[Tensor, Tensor, int]]:
    """{layer: (A, G, rows)} of the :meth:`Truth.sums` of all ranks. DeepSpeed averages over their
    losses."""
    K = sum(of_rank["passes"] for of_rank in ranks)
    factors = {}
    for name in dict.fromkeys(name for of_rank in ranks for name in of_rank["layers"]):
        sums = [of_rank["layers"][name] for of_rank in ranks if name in of_rank["layers"]]
        A, rows, G, _ = (sum(parts) for parts in zip(*sums, strict=True))
        factors[name] = A / rows, K * G / len(ranks) ** 2, rows
    return factors


def next_node() -> int:
    """The number that torch gives to an autograd node made now; later ones have larger numbers."""
    with torch.inference_mode(False), torch.enable_grad():
        return torch.zeros((), requires_grad=True).neg().grad_fn._sequence_nr()


def attention_masks(model: nn.Module, args: tuple, kwargs: dict) -> list[Any]:
    arguments = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    return [x for name, x in {**arguments, **kwargs}.items() if name.endswith("attention_mask")]


def is_mask(x: Any) -> bool:
    """Whether it is [N, T] of booleans, or of zeros and ones."""
    return isinstance(x, Tensor) and x.ndim == 2 and bool(((x == 0) | (x == 1)).all())


def transposed_to(mask: Tensor, leading: torch.Size) -> Tensor | None:
    """The mask as [N, T] or [T, N], whichever a call's leading dimensions are."""
    return next((m for m in (mask, mask.T) if len(leading) > 1 and leading[:2] == m.shape), None)
