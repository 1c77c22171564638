"""The truth about A and G: plain hooks that keep every input and gradient, and sums over rows.

Nothing of ``ds_kfac`` takes part. tests/oracle.py has its rows from here. A call of a layer is one
forward of an ``nn.Linear``, of transformers' ``Conv1D`` or of a convolution. Its rows have inputs
a, with a 1 appended for a trained bias, and gradients g, which reach its output.

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
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

CONVOLUTIONS = (nn.modules.conv._ConvNd,)
TRANSPOSED = (nn.modules.conv._ConvTransposeNd,)


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

    def rows(self, g: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(a [N, T, I] without the bias' 1, g [N, T, O]) of every group."""
        module = self.module
        if not isinstance(module, CONVOLUTIONS):
            return [tuple(x.reshape(*self.NT, x.shape[-1]) for x in (self.x, g))]
        if isinstance(module, TRANSPOSED):
            a, g = pixels(self.x, module.groups), patches(module, g)
        else:
            a, g = patches(module, self.x), pixels(g, module.groups)
        return list(zip(a.unbind(2), g.unbind(2), strict=True))

    def taken(
        self, a: Tensor, g: Tensor, sharing: str, *, bias: bool, mean: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows a [M, I] and g [M, O] of :meth:`rows`, zeros where one is left out, and which are
        not.

        Args:
            bias: a 1 is appended to a.
            mean: an example's a is the mean over its rows, not the sum.
        """
        kept = (g.any(-1) | (self.attended(a.shape[:2]) & a.any(-1))).unsqueeze(-1)
        a = torch.cat([a, torch.ones_like(a[..., :1])], -1) if bias else a
        a, g = (torch.where(kept, x, torch.zeros_like(x)) for x in (a, g))
        if sharing == "reduce":
            counts = kept.sum(1)
            return a.sum(1) / (counts.clamp(min=1) if mean else 1), g.sum(1), counts[:, 0] > 0
        return a.flatten(0, 1), g.flatten(0, 1), kept.flatten()

    def attended(self, NT: tuple[int, ...]) -> Tensor:
        """Which rows [N, T] no mask leaves out: those that one of the masks of the call's shape
        attends to. The rows of a transposed convolution are positions of its input."""
        masks = [] if isinstance(self.module, CONVOLUTIONS) else self.forward.masks
        fitting = [fitted for mask in masks if (fitted := self._fitting(mask)) is not None]
        if not fitting:
            return torch.ones(NT, dtype=torch.bool, device=self.x.device)
        attended = torch.stack(fitting).any(0)
        for _ in self.leading[attended.ndim :]:  # dimensions after the mask's
            attended = attended.unsqueeze(-1)
        return attended.expand(self.leading).reshape(NT).to(self.x.device)

    def _fitting(self, mask: Tensor) -> Tensor | None:
        if self.leading == (mask.numel(),):
            others = [transposed_to(mask, call.leading) for call in self.forward.calls]
            return mask.flatten() if all(other is None for other in others) else None
        return transposed_to(mask, self.leading)


class Truth:
    """What happens to a model's layers while this is entered: one training step, on one rank. After
    :meth:`listen` until :meth:`clear`, if no backward pass runs in another one.

    Args:
        mask: (args, kwargs) of the model's forward -> its mask [N, T] or None; by default every
            argument whose name ends in "attention_mask".
        scale: the loss scale.
        sharing: "expand" or "reduce".
        norms: modules whose calls are kept, too.
        dtype: in which rows are kept.

    Attributes:
        listens: whether gradients that arrive now are those of the loss that G is made of.
        inside: how many forwards of the model run, in each other.
        passes: number of backward passes that have ended.
        running: for each backward pass that runs in another one, as reentrant recomputations do,
            the forward that it is part of; None for the outermost.
        graph_task: torch's number of the last pass, if this is not entered.
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
        norms: Collection[nn.Module] = (),
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.model, self.mask, self.scale, self.sharing = model, mask, scale, sharing
        self.norms, self.dtype = norms, dtype
        self.names: dict[int, str] = {}  # id of a weight -> its layer
        # id of a module -> id of its weight, which functional_call may replace
        self.weights: dict[int, int] = {}
        self.inside = 0
        self.passes = 0
        self.running: list[Forward | None] = []
        self.listens = True
        self.run_backward: Callable | None = None
        self.graph_task = -1
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self.forwards = [Forward()]
        self.accumulated: dict[int, set[int]] = {}
        self.first_arrivals: dict[int, tuple[Call, Tensor]] = {}

    def listen(self) -> None:
        self.handles = [
            self.model.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.model.register_forward_hook(self._end, always_call=True),
        ]
        for name, module in self.model.named_modules():
            is_map = isinstance(module, (nn.Linear, *CONVOLUTIONS))
            if is_map or type(module).__name__ == "Conv1D" or module in self.norms:
                self.names.setdefault(id(module.weight), name)
                self.weights[id(module)] = id(module.weight)
                self.handles.append(module.register_forward_hook(self._called, with_kwargs=True))
        for p in self.model.parameters():
            if p.requires_grad:
                self.handles.append(p.register_post_accumulate_grad_hook(self._accumulated))

    def __enter__(self) -> "Truth":
        self.listen()
        self.run_backward = torch.autograd._engine_run_backward
        torch.autograd._engine_run_backward = self._backward
        return self

    def __exit__(self, *_) -> None:
        torch.autograd._engine_run_backward, self.run_backward = self.run_backward, None
        self.leave()

    def leave(self) -> None:
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
        call = Call(name, module, x.to(self.dtype).clone(), y.shape, self._forward(), made_in)
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
            self.listens = kwargs.get("accumulate_grad", False)
        self.running.append(self._forward() if self.running else None)
        try:
            return self.run_backward(*args, **kwargs)
        finally:
            self.running.pop()
            # a pass inside a forward, such as that of a tiled loss, is part of the next one
            if self.listens and not self.running and not self.inside:
                self.passes += 1

    def _number(self) -> int:
        """Of the outermost pass that runs."""
        graph_task = torch._C._current_graph_task_id()
        if self.run_backward is None and graph_task != self.graph_task:
            self.graph_task = graph_task
            self.passes += 1
            self.accumulated[self.passes] = set()
        return self.passes

    def _arrived(self, call: Call, output: int, gradients: tuple) -> None:
        if self.listens and gradients[output] is not None:
            number = self._number()
            g = gradients[output].detach().to(self.dtype).reshape(call.shape).clone()
            call.gradients.append((number, g))
            if g.any() and call.module not in self.norms:
                self.first_arrivals.setdefault(number, (call, g))

    def _accumulated(self, p: Tensor) -> None:
        if self.listens:
            self.accumulated.setdefault(self._number(), set()).add(id(p))

    # what it amounts to

    def calls(self) -> list[Call]:
        return [call for forward in self.forwards for call in forward.calls]

    def nearest_rows(self, number: int) -> int:
        """R_p of a backward pass."""
        if number not in self.first_arrivals:
            return 0
        first, _ = self.first_arrivals[number]
        arrived = {call for call in self.calls() if any(of == number for of, _ in call.gradients)}
        forwards = {call.forward for call in arrived}
        total = 0
        for call in self.calls():
            brought = call in arrived or (call.made_in is None and call.forward in forwards)
            if call.layer == first.layer and brought:
                rows = call.attended(call.NT)
                channels = 1 if isinstance(call.module, CONVOLUTIONS) else -1
                for of, gradient in call.gradients:
                    if of == number:
                        rows = rows | gradient.any(channels).reshape(call.NT)
                total += int(rows.any(1).sum() if self.sharing == "reduce" else rows.sum())
        return total

    def terms(self) -> dict[int, int]:
        """R_p of every backward pass; there are K."""
        return {number: self.nearest_rows(number) for number in self.accumulated}

    def sums(self) -> dict[str, Any]:
        """Plain data, which :func:`factors_of_ranks` adds up: K, the sum of R_p, and of each layer
        the sum of a a^T, the number of rows, and the sum of R_p g g^T."""
        layers: dict[str, list] = {}
        R = self.terms()
        for call in self.calls():
            for number, gradient in call.gradients:
                accumulates = self.weights[id(call.module)] in self.accumulated.get(number, ())
                if not gradient.any() or not accumulates:
                    continue
                groups = call.rows(gradient / self.scale)
                for group, (a, g) in enumerate(groups):
                    name = call.layer if len(groups) == 1 else f"{call.layer}:{group}"
                    a, g, kept = call.taken(a, g, self.sharing, bias=has_bias(call.module))
                    sums = layers.setdefault(name, [0.0, 0, 0.0])
                    sums[0] = sums[0] + a.T @ a
                    sums[1] += int(kept.sum())
                    sums[2] = sums[2] + R[number] * g.T @ g
        layers = {name: sums for name, sums in layers.items() if sums[1]}
        return {"passes": len(R), "terms": sum(R.values()), "layers": layers}

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
        A, rows, G = (sum(parts) for parts in zip(*sums, strict=True))
        factors[name] = A / rows, K * G / len(ranks) ** 2, rows
    return factors


def patches(module: Any, x: Tensor) -> Tensor:
    """What a convolution, or the one that a transposed one is the transpose of, sees of x: [N, T,
    groups, D]. It is the module itself with filters of a single 1."""
    seen = x.shape[1] // module.groups * module.weight[0, 0].numel()
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[x.ndim - 2]
    names = ("stride", "padding", "dilation", "groups", "padding_mode")
    options = {name: getattr(module, name) for name in names}
    picks = kind(x.shape[1], seen * module.groups, module.kernel_size, bias=False, **options).to(x)
    with torch.no_grad():
        picks.weight.copy_(torch.eye(seen).repeat(module.groups, 1).view(picks.weight.shape))
        return pixels(picks(x), module.groups)


def pixels(x: Tensor, groups: int) -> Tensor:
    """[N, C, ..] -> [N, T, groups, C / groups]."""
    return x.flatten(2).mT.unflatten(-1, (groups, -1))


def has_bias(module: Any) -> bool:
    """Whether a row's inputs end with a 1 for a trained bias."""
    bias = None if isinstance(module, TRANSPOSED) else module.bias
    return bias is not None and bias.requires_grad


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
