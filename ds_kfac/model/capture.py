"""Hooks on the layers: batch sums of a a^T and g g^T, only on the micro-steps that need them (docs/capture.md).

A is summed in the forward hook and waits, a sum and not the inputs, for the gradient of the layer's output; both are
counted when it arrives. What never gets one is never counted.

**Own backwards.** An engine's statistics are of its own loss, not of a generator's that goes through its discriminator.
Own is a backward that the engine announced; or, as long as it never announced any, one outside of all engines'
announced ones through a forward whose inputs came from no other graph: a plain ``loss.backward()``.

Activation checkpointing runs a forward twice. Reentrant: the first run has gradients disabled and is passed over.
Non-reentrant: the first run counts; the recomputation's graph never gets a gradient, so it must not count A. Hence
a forward inside a backward sums A only once its gradient arrives.

torch.compile traces the hooks up to their first condition, which is all that steps without capture have of them.

With a Monte-Carlo Fisher the gradients of the true loss are passed over; those of a sampled loss are fed in, for the
calls that :attr:`Capture.pending` lists.

No exception leaves a hook: it would stop one rank in a backward that the others finish.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ds_kfac.model.batch import EVERY_ROW, BatchInfo, Fit, ReadBatch, RowMasks, tensors_of
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.loss import Forward
from ds_kfac.model.noise import NoiseScale
from ds_kfac.model.products import EVERY, Product, Products
from ds_kfac.model.registry import LAYERS
from ds_kfac.model.rows import BatchSum, Call, RowSums, SharedInputs


class Capture:
    """Installs the hooks; they return at once unless :attr:`active`.

    Args:
        fallback_seed: the scale of a backward that nobody announced by :meth:`begin_backward`.
        inputs: receives every input of a captured call, to find and verify layers that share theirs.
        sampled: whether G comes from a sampled loss instead of the true one.
        asked: for :mod:`ds_kfac.factors`, which asks autograd for the gradients of :attr:`pending` calls: in any mode,
            training or evaluation, and A is summed with the gradients, so that sums of some layers can leave before
            those of others begin.
        info_of: a micro-batch's information -> that of a module's call in it, where they differ.

    Attributes:
        pending: calls without gradients yet, of all forwards; filled only if ``sampled`` or ``asked``.
        forward: the model's last one.
        sums: factor key -> rows of the step so far, see :meth:`begin_step`; missing where there are none.
        measured: layer name -> rows of its calls since the last step here, also where none are summed: of first runs
            and of recomputations; None: they are not counted.
        noise: measures samples' gradients in captured steps, if there is one.
        counted, outside: calls since the last step whose gradients came in the engine's own backward, and in others.
        called: names of layers that were seen to run.
    """

    _backwards: ClassVar[list["Capture"]] = []
    """Whose own backward is running, of all engines of the process."""

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[LayerSpec],
        fallback_seed: Callable[[], Tensor | float],
        *,
        rows: RowSums | None = None,
        inputs: SharedInputs | None = None,
        sampled: bool = False,
        asked: bool = False,
        read_batch: ReadBatch | None = None,
        info_of: Callable[[str, BatchInfo], BatchInfo] | None = None,
    ) -> None:
        self.active, self._model, self.sampled, self.asked = False, model, sampled or asked, asked
        self.rows, self.inputs = rows or RowSums(divided=not sampled), inputs or SharedInputs()
        self.read_batch: ReadBatch = read_batch or (lambda arguments, keywords: BatchInfo())
        self.pending: list[Call] = []
        self.sums: dict[str, BatchSum] = {}
        self.noise: NoiseScale | None = None
        self.measured: dict[str, list[int]] | None = None
        self.counted = self.outside = 0
        self._keys = frozenset[str]()  # of the sums
        self._announced, self.forward = False, Forward()  # whether any own backward ever was
        self._running: Forward | None = None  # whose gradients come in this backward
        self._arrived: list[Call] = []  # in this backward, with an input to be released after it
        self._fallback_seed = fallback_seed
        self._seed: Tensor | float | None = None
        self._info_of, self._masks, self.called = info_of, RowMasks(model), set[str]()
        self._handles: list[Any] = []
        self._hook_model(model)
        parameters, owners = dict(model.named_parameters()), {"": model}
        self._stacks: dict[int, list[LayerSpec]] = {}  # id of a parameter -> its layers, in order
        counts: dict[nn.Parameter, int] = {}
        for layer in layers:
            modules = {name: model.get_submodule(name) for name in (layer.module, *layer.also)}
            if not layer.product:
                for module in modules.values():
                    self._hook_layer(layer, module, model)
                continue
            owners |= modules
            if isinstance(modules[layer.module], nn.Linear):  # maybe called as a function, by a method around it
                around = layer.module.rpartition(".")[0]
                owners |= {name: model.get_submodule(name) for name in (around, around.rpartition(".")[0])}
            counts[parameters[layer.weight]] = layer.part[1]
            self._stacks.setdefault(id(parameters[layer.weight]), []).append(layer)
        self._products: Products | None = None
        if counts:
            self._products = Products(counts, self._product)
            for module in owners.values():
                self._hook_owner(self._products, module, model)

    def begin_step(self, keys: frozenset[str] | None, step: int, *, measure: bool = False) -> None:
        """Make ready for the captures of a step; forgets what came since the last one.

        Args:
            keys: factors that are due and that this rank contributes to; None: the hooks rest.
            step: decides which rows are sampled, if not all are.
            measure: count the rows of all layers.
        """
        if self.active:
            self.forward, self.pending, self.counted, self.outside = Forward(), [], 0, 0
            self.end_backward()
            self.inputs.broken.clear()
        self.sums, self._keys, self.active, self.rows.turn = {}, keys or frozenset(), keys is not None, step
        self.measured = {} if measure else None
        if self.noise is not None:
            self.noise.begin(active=self.active)

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        if self._products is not None:
            self._products.leave(None)
        self._masks.remove()
        self.active = False

    @contextmanager
    def own_backward(self, *, retain_graph: bool = False) -> Iterator[None]:
        """Around a backward of the engine's loss, also where nothing is captured: its gradients, and no others, count.
        Closes the micro-batch. ``retain_graph``: a second backward through the graph may follow."""
        self._announced = True
        self._backwards.append(self)
        if self.active and self._products is not None:
            self._products.enter(self._model)  # functions that checkpointing runs again may be no module's call
        try:
            yield
        finally:
            self._backwards.remove(self)
            if self._products is not None:
                self._products.leave(None)
            if retain_graph:
                self._arrived.clear()
            self.end_backward()

    def begin_backward(self, seed: Tensor) -> None:
        """The gradient that reached the user's loss: by what every output gradient is scaled from here on."""
        self._seed = seed.detach().float()

    def end_backward(self) -> None:
        """Close the micro-batch: the next rows are new loss terms, not another use of the same ones."""
        self._seed = self._running = None
        self.rows.counted.clear()
        for call in self._arrived:
            call.x = None
        self._arrived.clear()
        self.inputs.end_batch()

    def add_sampled(self, calls: Sequence[Call], gradients: Sequence[Tensor | None], seed: Tensor | float) -> None:
        """Gradients of the sampled loss, times ``seed``, for some of :attr:`pending`; None where unused."""
        self._seed = seed
        for call, gradient in zip(reversed(calls), reversed(gradients), strict=True):  # as a backward would come by
            if gradient is not None:
                self._add_rows(call, gradient)
        done = set(map(id, calls))
        self.pending = [call for call in self.pending if id(call) not in done]
        self.end_backward()

    # Hooks are plain functions, see :func:`ds_kfac.model.batch.own_hook`; torch.compile sees their first condition.
    # What it must not see is marked here, not where it is defined: that would import torch's compiler with ds_kfac

    def _hook_model(self, own: nn.Module) -> None:
        begin_batch, end_batch = map(torch.compiler.disable, (self._begin_batch, self._end_batch))

        def begin(module: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
            if (module.training or self.asked) and self.active and torch.is_grad_enabled():
                begin_batch(module is own, arguments, keywords)

        def end(module: nn.Module, arguments: tuple, output: Any) -> None:
            if (module.training or self.asked) and self.active and torch.is_grad_enabled():
                end_batch(module is own, output)

        self._handles.append(own.register_forward_pre_hook(begin, with_kwargs=True))
        self._handles.append(own.register_forward_hook(end))

    def _begin_batch(self, own: bool, arguments: tuple, keywords: dict[str, Any]) -> None:
        if not own or torch._C._current_graph_task_id() != -1:
            return
        if self._products is not None:  # of a forward that raised
            self._products.leave(None)
        if self.rows.counted:  # a loss.backward() that nobody closed
            self.end_backward()
        detached = all(x.grad_fn is None for x in tensors_of((arguments, keywords)))
        self.forward = Forward(self.read_batch(arguments, keywords), detached)
        self.inputs.begin_batch()
        self._masks.begin()

    def _end_batch(self, own: bool, output: Any) -> None:
        if own and torch._C._current_graph_task_id() == -1:
            self.forward.returned(output, weight_sharing=self.rows.weight_sharing)
            self._masks.end()

    def _hook_layer(self, layer: LayerSpec, own: nn.Module, model: nn.Module) -> None:
        def hook(module: nn.Module, inputs: tuple, named: dict[str, Any], output: Any) -> None:
            if (model.training or self.asked) and self.active and torch.is_grad_enabled():  # a part may be in eval mode
                capture(module, inputs, named, output)

        @torch.compiler.disable
        def capture(module: nn.Module, inputs: tuple, named: dict[str, Any], output: Any) -> None:
            if isinstance(output, tuple):  # Megatron's linears return their bias too
                output = output[0]
            weight: Any = module._parameters.get("weight")  # as an attribute ZeRO-3 would fetch it
            if module is not own or not output.requires_grad or not (weight is None or weight.requires_grad):
                return
            x = inputs[0] if inputs else next(iter(named.values()))
            self.inputs.see(layer.name, x)
            self._called(layer, module, x, output)

        self._handles.append(own.register_forward_hook(hook, with_kwargs=True))

    def _called(
        self,
        layer: LayerSpec,
        module: nn.Module,
        x: Tensor,
        output: Tensor,
        *,
        sides: str = "AG",
        select: slice | Tensor | None = None,
        columns: slice | None = None,
        lay: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """A layer was called with ``x`` and gave ``output``; see :class:`ds_kfac.model.rows.Call` for the others."""
        recomputed, kind = torch._C._current_graph_task_id() != -1, LAYERS[layer.kind]
        if recomputed and self.sampled:  # the first run's calls are those that are sampled
            return
        self.called.add(layer.name)
        A, G = layer.keys
        makes_A = "A" in sides and A in self._keys
        captured = makes_A or ("G" in sides and G in self._keys)
        shape, dispatched, stacked = output.shape, x.ndim == 3, layer.part[1] > 1 and layer.product
        measures = self.measured is not None and not stacked and "A" in sides
        noted = self.noise is not None and self.noise.active and layer.name in self.noise.place
        noted = noted and select is columns is lay is None  # all rows of its input and output
        if not captured and not measures and not noted:
            return
        if select is not None:
            x = x.reshape(-1, x.shape[-1])[select]
        if not (select is columns is lay is None):
            shape = torch.Size((*x.shape[:-1], layer.G.dim))
        if measures:
            self._measure(layer, kind.rows(x, output) if select is None else len(x))
        if not captured and not noted:
            return
        # several may have run before the backward of this one, with other masks
        forward = self._running if recomputed and self._running is not None else self.forward
        x, info, rows = x.detach(), forward.info, EVERY_ROW
        if self._info_of is not None:
            info = self._info_of(layer.module, info)
        if stacked or info.places:  # rows are tokens, sorted by who takes them; a place without one is zero
            rows = Fit((x != 0).any(-1)) if dispatched or info.places else rows
        elif not kind.images:
            rows = self._masks.of(layer.module, x, info)
        with_gradient = recomputed or kind.needs_gradients or self.asked
        kept = x if noted or (with_gradient and makes_A) or self.asked else None
        call = Call(layer, kind, module, info, rows, shape, sides, forward, kept, recomputed, select, columns, lay)
        call.noted = noted
        if makes_A and not with_gradient and x.numel():
            self.rows.add_input(call, x, _sum(forward.waiting, layer.name, layer.A.numel, x))
        # An in-place activation replaces the grad_fn of a view, which the output of a Linear with bias is; the node of
        # the viewed tensor stays
        base = output._base
        origin = base if base is not None and base.numel() == output.numel() and base.grad_fn is not None else output
        assert origin.grad_fn is not None, "the output requires no gradient"
        if self.sampled:
            call.edge = GradientEdge(origin.grad_fn, origin.output_nr)
            self.pending.append(call)
            return
        # By a prehook on the node. A tensor hook would run before DeepSpeed divides an engine output's gradient by the
        # accumulation steps, and a full backward hook breaks with in-place activations.
        origin.grad_fn.register_prehook(partial(self._on_gradient, call, origin.output_nr))

    def _measure(self, layer: LayerSpec, rows: int) -> None:
        assert self.measured is not None
        self.measured.setdefault(layer.name, [0, 0])[torch._C._current_graph_task_id() != -1] += rows

    def _hook_owner(self, products: Products, own: nn.Module, model: nn.Module) -> None:
        """Products are seen while a captured forward, or a recomputation, of a module runs."""
        begin, end = map(torch.compiler.disable, (products.enter, products.leave))

        def enter(module: nn.Module, inputs: tuple) -> None:
            if (model.training or self.asked) and self.active and torch.is_grad_enabled():
                if module is own:
                    begin(module)

        def leave(module: nn.Module, inputs: tuple, output: Any) -> None:
            if (model.training or self.asked) and self.active and torch.is_grad_enabled():
                end(module)

        self._handles.append(own.register_forward_pre_hook(enter))
        self._handles.append(own.register_forward_hook(leave, always_call=True))

    def _product(self, product: Product) -> None:
        """Of a stack whose layers have one A: all rows at once are those of the first."""
        layers, x, output, lay = self._stacks[id(product.param)], product.x, product.output, product.lay
        stacked, first = len(layers) > 1, layers[0]
        module = self._model.get_submodule(first.module)
        if product.window is not None or LAYERS[first.kind].images:
            if product.window == tuple(getattr(module, x, None) for x in ("stride", "padding", "dilation", "groups")):
                self._called(first, module, x, output)
            return
        if first.bias is not None and not product.biased:  # it has another gradient than the rows say
            return
        other = product.turned != LAYERS[first.kind].turned and min(first.shape) > 1
        if other or x.shape[-1] != first.A.dim - (first.bias is not None):  # other sides than the code seemed to have
            return
        self.called.update(layer.name for layer in layers)
        shared = stacked and layers[-1].shares is not None
        if shared and first.shares is None:
            self._called(first, module, x, output, sides="A", select=product.rows, lay=lay)
        for entry, select in product.entries:
            layer = layers[entry]
            if stacked and self.measured is not None:
                self._measure(layer, len(x.reshape(-1, x.shape[-1])[select]))
            if not stacked and select is EVERY:
                self._called(layer, module, x, output, columns=product.columns, lay=lay)
            else:
                self._called(layer, module, x, output, sides="G" if shared else "AG", select=select, lay=lay)

    def _on_gradient(self, call: Call, place: int, gradients: tuple[Tensor | None, ...]) -> None:
        gradient, running = gradients[place], self._backwards
        if gradient is None or not self.active:
            return
        if self in running if running else call.forward.detached and not self._announced:
            self._running = call.forward
            self._add_rows(call, gradient)
        else:
            self.outside += 1

    def _add_rows(self, call: Call, gradient: Tensor) -> None:
        """Of both sides; a call with an empty batch has none."""
        self.counted += 1
        layer, of_gradients = call.layer, call.kind.needs_gradients  # even A
        A, G = layer.keys
        makes_A, makes_G = "A" in call.sides and A in self._keys, "G" in call.sides and G in self._keys
        waiting = call.forward.waiting.pop(layer.name, None) if "A" in call.sides else None
        if makes_A and waiting is not None:
            total = self.sums.setdefault(A, waiting)
            if total is not waiting:
                total.sum_P.add_(waiting.sum_P)
                total.count.add_(waiting.count)
        late = call.recomputed or self.asked
        if makes_A and not of_gradients and late and call.x is not None and call.x.numel():
            self.rows.add_input(call, call.x, _sum(self.sums, A, layer.A.numel, gradient))
        makes = makes_A and call.x is not None if of_gradients else makes_G
        if makes and gradient.numel():
            seed = self._fallback_seed() if self._seed is None else self._seed
            key, side = (A, layer.A) if of_gradients else (G, layer.G)
            sum_ = _sum(self.sums, key, side.numel, gradient)
            self.rows.add_gradient(call, call.gradient_of(gradient), sum_, seed)
        if call.noted and call.x is not None and self.noise is not None:
            self.noise.add(layer, call.x, call.gradient_of(gradient), call.rows.examples)
        if call.recomputed:
            call.x = None
        elif call.x is not None:
            self._arrived.append(call)


def _sum(sums: dict[str, BatchSum], key: str, numel: int, like: Tensor) -> BatchSum:
    """Where rows of a factor go: memory from the first ones on."""
    if key not in sums:
        sums[key] = BatchSum.empty(numel, like.device)
    return sums[key]
