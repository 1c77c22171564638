"""Hooks on the layers: batch sums of a a^T and g g^T, only on the micro-steps that need them (docs/capture.md).

The forward hook sums A, and the call keeps the sum, not the inputs, until the gradient of the layer's output arrives;
then both A and G count. A call whose gradient never arrives, or is zero to the last bit, does not count. From the
second call of a layer on, the call keeps the sum or a copy of the inputs, whichever is smaller.

**Own backwards.** An engine's statistics are of its own loss, not of a generator's loss that passes its discriminator.
Its own backwards are those that the engine announced, and those that the model runs inside its forward, as DeepSpeed's
tiled loss does. As long as the engine has announced none, a plain ``loss.backward()`` is its own, too, if no engine is
in an announced backward and the forward's inputs have no graph. A backward that does not accumulate into the layer's
weight, such as autograd.grad for forces or a penalty, never counts.

**Activation checkpointing** runs a forward twice. Reentrant: the first run has gradients disabled, and is ignored.
Non-reentrant: the first run counts; the recomputation's graph never gets a gradient, so it must not count A. Hence
a forward inside a backward sums A only once its gradient arrives.

torch.compile traces a hook up to its first condition, where steps that do not capture return. With a Monte-Carlo Fisher
the gradients come from a sampled loss, for the calls in :attr:`Capture.pending`. No exception leaves a hook: it would
stop one rank in a backward that the others finish.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ds_kfac.model.batch import EVERY_ROW, ArgumentReader, BatchInfo, ReadBatch, RowMasks
from ds_kfac.model.calls import SharedInputs, StepSums
from ds_kfac.model.divisors import divisors, whole
from ds_kfac.model.expert_rows import Siblings
from ds_kfac.model.graph import runs
from ds_kfac.model.layers import LayerSpec, key_of, tensors_of
from ds_kfac.model.loss import Forward, losses_in, trained
from ds_kfac.model.products import EVERY, Product, Products, Uses
from ds_kfac.model.proof import Proof
from ds_kfac.model.registry import LAYERS
from ds_kfac.model.rows import Call, RowSums
from ds_kfac.model.slices import counted


class Capture(StepSums):
    """Installs the hooks; they return at once unless :attr:`active`.

    Args:
        fallback_seed: gives the scale of a backward that was not announced by :meth:`begin_backward`.
        inputs: receives every input of a captured call, to find and verify layers that share theirs.
        sampled: whether G comes from a sampled loss instead of the true one.
        on_demand: for :mod:`ds_kfac.factors`, which asks autograd for the gradients of :attr:`pending` calls. A is
            summed when a gradient comes, so that some layers' sums can be sent before others' begin.
        info_of: (module name, a micro-batch's information) -> information of that module's call, where they differ.

    Attributes:
        pending: calls of all forwards that have no gradient yet; filled only if ``sampled`` or ``on_demand``.
        counted, outside: number of calls since the last step whose gradients came in an own backward, and in others.
        seen: layers called in this step with an input that has elements.
        every_row: layers whose masks belong to other rows: all their rows count.
    """

    _backwards: ClassVar[list["Capture"]] = []
    """Captures whose own backward is running, of all engines in the process."""

    def __init__(
        self, model: nn.Module, layers: Iterable[LayerSpec], fallback_seed: Callable[[], Tensor | float], *,
        rows: RowSums | None = None, inputs: SharedInputs | None = None, sampled: bool = False,
        on_demand: bool = False, read_batch: ReadBatch | None = None,
        info_of: Callable[[str, BatchInfo], BatchInfo] | None = None,
    ) -> None:  # fmt: skip
        layers = tuple(layers)
        super().__init__(
            rows or RowSums(divided=not sampled), inputs or SharedInputs(), fallback_seed,
            Siblings(model, () if on_demand else layers), on_demand=on_demand,
        )  # fmt: skip
        self.active, self._model, self.sampled, self.outside = False, model, sampled or on_demand, 0
        self.read_batch: ReadBatch = read_batch or (lambda arguments, keywords: BatchInfo())
        self.pending: list[Call] = []
        self._announced = False  # whether a backward was ever announced
        self._info_of, self._masks, self.seen = info_of, RowMasks(model), set[str]()
        self._captures_G = False  # whether gradients are captured
        self._forwards: list[Forward] = []  # of this step that returned tensors beside losses
        self.every_row: Collection[str] = ()
        self._handles: list[Any] = []
        self._hook(model.register_forward_pre_hook, model, self._begin_batch, with_kwargs=True)
        self._hook(model.register_forward_hook, model, self._end_batch)
        parameters, owners = dict(model.named_parameters()), {"": model}
        self._weights = {layer.name: parameters[layer.weight] for layer in layers}
        self.of_gradients = {key_of(x.name, "GA"[LAYERS[x.kind].needs_gradients]) for x in layers}
        self._stacks: dict[int, list[LayerSpec]] = {}  # id of a parameter -> its layers, in order
        counts: dict[nn.Parameter, int] = {}
        for layer in layers:
            modules = {name: model.get_submodule(name) for name in (layer.module, *layer.also)}
            if not layer.product:
                # before the hooks of others, which may replace the output; but if autograd.grad is called on it,
                # after ZeRO-3's, which wraps it in a function that fetches and releases the weights of its backward
                for ours in modules.values():
                    called = partial(self._layer_called, layer)
                    self._hook(ours.register_forward_hook, ours, called, with_kwargs=True, prepend=not self.sampled)
                continue
            owners |= modules
            if isinstance(modules[layer.module], nn.Linear):  # a module around it may multiply by its weight
                around = layer.module.rpartition(".")[0]
                owners |= {name: model.get_submodule(name) for name in (around, around.rpartition(".")[0])}
            counts[parameters[layer.weight]] = layer.part[1]
            self._stacks.setdefault(id(parameters[layer.weight]), []).append(layer)
        self._products: Products | None = None
        if counts:
            products = self._products = Products(counts, self._product)
            for ours in owners.values():  # observe products while a captured forward, or a recomputation, of it runs
                self._hook(ours.register_forward_pre_hook, ours, lambda module, inputs: products.enter(module))
                # before the hooks of others: DeepSpeed's profiler puts functions of torch back there that we replace
                left = lambda module, *_: products.leave(module)  # noqa: E731
                self._hook(ours.register_forward_hook, ours, left, always_call=True, prepend=True)

    def begin_step(
        self, keys: Collection[str] | None, step: int, *, measure: bool = False, proof: Proof | None = None
    ) -> None:
        """Prepare for a step; forgets all calls since the last one.

        Args:
            keys: keys of the factors that this rank captures in the step, in a mapping with of how many rows one is
                taken; None: the hooks do nothing.
            step: decides which rows are sampled, if not all are.
            measure: count the rows of all layers.
            proof: gets the rows of all layers, to compare them with the gradients.
        """
        self.proof = proof
        self.uses = None if proof is None else Uses(self._weights)
        if self.active:
            self.forward, self.pending, self.counted, self.outside = self.loose, [], 0, 0
            self.end_backward()
            self.earlier.clear()
            self.rows.counted.clear()
            self.inputs.begin_step()
            self.siblings.terms, self.siblings.dues, self.siblings.rows = {}, {}, {}
        self.sums, self.active, self.rows.turn = {}, keys is not None, step
        self.keys = keys if isinstance(keys, Mapping) else dict.fromkeys(keys or (), 1)
        self._captures_G = not self.sampled and not self.of_gradients.isdisjoint(self.keys)
        self.seen, self._forwards, self.divided, self.measured = set(), [], [], {} if measure else None

    def leave(self) -> None:
        """No forward runs any more: calls of torch are not looked at."""
        if self._products is not None:
            self._products.leave(None)

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self.leave()
        self._masks.remove()
        self.active = False

    @contextmanager
    def own_backward(self, loss: Tensor | None = None, *, retain_graph: bool = False, parts: int = 1) -> Iterator[None]:
        """Wraps an own backward, in steps without capture, too; afterwards the micro-batch is closed. ``retain_graph``:
        a second one may follow. ``parts``: by how many micro-batches the loss is known to be divided."""
        self._announced = True
        if self.active and loss is not None and loss.grad_fn is not None:
            made, forwards = self.reductions if self._captures_G else None, () if self.sampled else self._forwards
            self.losses = trained(loss, forwards, made) if forwards else losses_in(loss, made)
            if self._captures_G:  # before their numbers are freed
                self.divided.append((parts, whole(divisors(loss.grad_fn)[0])))
        self._backwards.append(self)
        if self.active and self._products is not None:
            self._products.enter(self._model)  # checkpointing may recompute functions outside of any module's call
        try:
            yield
        finally:
            self._backwards.remove(self)
            self.leave()
            if retain_graph:
                self.arrived.clear()
            if parts > 1:  # its loss is a part of a mean over them: again the whole forward's terms
                self.rows.counted.clear()
            self.end_backward()

    def begin_backward(self, seed: Tensor) -> None:
        """The gradient that reached the user's loss: the factor on all gradients of this backward."""
        self.seed = seed.detach().float()

    def repeats(self, forward: Forward) -> None:
        """The next backward belongs to this forward: recomputed calls are its calls."""
        self.running = forward

    def add_sampled(self, calls: Sequence[Call], gradients: Sequence[Tensor | None], seed: Tensor | float) -> None:
        """Add gradients of the sampled loss, times ``seed``, for some of :attr:`pending`; None for an unused call."""
        self.seed = seed
        for call, gradient in zip(reversed(calls), reversed(gradients), strict=True):  # a backward's order
            if gradient is not None:
                self.add(call, gradient)
        done = set(map(id, calls))
        self.pending = [call for call in self.pending if id(call) not in done]
        self.rows.counted.clear()
        self.end_backward()

    def _hook(self, register: Callable[..., Any], ours: nn.Module, function: Callable[..., None], **how: Any) -> None:
        """``function`` as a hook of ``ours`` alone, not of its copies (:func:`ds_kfac.model.batch.own_hook`), that runs
        in captured forwards of no trace, export or torch.func. torch.compile sees the first condition alone."""

        def outside(module: nn.Module, *values: Any) -> None:
            if torch._C._functorch.peek_interpreter_stack() is torch._C._get_tracing_state() is None:
                function(module, *values)

        captured = torch.compiler.disable(outside)  # not as a decorator, which imports torch's compiler with ds_kfac

        def hook(module: nn.Module, *values: Any) -> None:
            if torch.is_grad_enabled() and self.active and module is ours and not torch.compiler.is_exporting():
                captured(module, *values)

        self._handles.append(register(hook, **how))

    def _begin_batch(self, model: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        self.leave()  # still entered if the last forward raised
        if self.passed:  # after a plain loss.backward(), which nothing closes
            self.end_backward()
        self.inside, info = True, self.read_batch(arguments, keywords)
        detached = all(x.grad_fn is None for x in tensors_of((arguments, keywords)))
        self.forward = Forward(info, self._captures_G, detached, isinstance(self.read_batch, ArgumentReader))
        if info.labelled is not None:  # labelled positions, with "reduce" labelled examples
            self.forward.terms = counted(info.labelled, self.rows.weight_sharing)
        self.inputs.begin_batch()
        self.siblings.rows = {}
        self._masks.begin((*arguments, keywords))

    def _end_batch(self, model: nn.Module, arguments: tuple, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.inside = False
            self.forward.returned(output, weight_sharing=self.rows.weight_sharing)
            if self.forward.tensors:
                self._forwards.append(self.forward)
            self._masks.end()

    def _layer_called(
        self, layer: LayerSpec, module: nn.Module, inputs: tuple, named: dict[str, Any], output: Any
    ) -> None:
        weight: Any = module._parameters.get("weight")  # module.weight would make ZeRO-3 fetch it
        try:
            output = output[0] if isinstance(output, tuple) else output  # Megatron's linears return their bias, too
            if output.requires_grad and (weight is None or weight.requires_grad):
                x = inputs[0] if inputs else next(iter(named.values()))
                self.inputs.see(layer.name, x)
                self._called(layer, module, x, output)
        except Exception as error:
            self.fail(layer, error)

    def _called(
        self, layer: LayerSpec, module: nn.Module, x: Tensor, output: Tensor, *, product: Product | None = None,
        sides: str = "AG", select: slice | Tensor | None = None,
    ) -> None:  # fmt: skip
        """A layer was called with ``x`` and returned ``output``, or a product of its matrix with x did. ``sides``,
        ``select``: see :class:`ds_kfac.model.rows.Call`."""
        recomputed, kind = torch._C._current_graph_task_id() != -1, LAYERS[layer.kind]
        if (recomputed and self.sampled) or layer.name in self.failed:  # sampled gradients go to the first run's calls
            return
        if x.numel():
            self.seen.add(layer.name)
        if layer.name in self.siblings.entries:
            self.siblings.see(layer.name, x, self.sums)
        A, G = self.inputs.key(layer), layer.keys[1]
        given, stacked, picked = x, layer.part[1] > 1 and layer.product, product is not None and product.picked
        makes_A = "A" in sides and A in self.keys and (stacked or self.inputs.gives(layer))
        captured = makes_A or ("G" in sides and G in self.keys) or (A in self.keys and self.inputs.grouped(layer.name))
        if layer.name in self.siblings.known:
            captured |= "G" in sides and self.siblings.due(layer.name, self.keys)
        measured = self.measured if ("G" if stacked else "A") in sides else None
        if not captured and measured is None and self.proof is None:
            return
        if select is not None and select is not EVERY:
            x = x.reshape(-1, x.shape[-1])[select]
        shape = output.shape if product is None else torch.Size((*x.shape[:-1], layer.G.dim))
        if not (self.inside or recomputed or x.requires_grad) and self.forward.mark in self.earlier:
            self.forward = self.loose = Forward()  # a method of the model is called after the forward's backward
        # other forwards, with other masks, may have run since this recomputation's first run
        forward = self.running if recomputed and self.running is not None else self.forward
        x, info, rows = x.detach(), forward.info, EVERY_ROW
        if self._info_of is not None:
            info = self._info_of(layer.module, info)
            if info.places:
                self.siblings.know(layer.name, self.sums)
        if layer.name in self.every_row:
            info = replace(info, rows=None, encoder_rows=None)
        if stacked or picked or info.places:  # picked: rows of one expert, maybe the only one on this rank
            rows = self._masks.of_stack(layer.module, given, select, info, picked=picked)
        elif not kind.images:
            reduced = self.rows.weight_sharing == "reduce"
            rows = self._masks.fit_call(layer.module, x, info, reduced=reduced)
        many: Tensor | int | None = None
        if measured is not None:
            of_call = kind.rows(x, output) if select is None else x.shape[:-1].numel()
            many = of_call if rows.mask is None else rows.mask.sum()
        if not captured and self.proof is None:
            self.measure(layer.name, many, recomputed)
            return
        if select is None and not kind.images:
            forward.note_call(rows, shape)
        call = Call(layer, kind, module, info, rows, shape, sides, A, forward, None, recomputed, select)
        call.taken = self.rows.taken(self.keys.get(A, 1), call), self.rows.taken(self.keys.get(G, 1), call)
        if product is not None:
            call.columns, call.to_rows = product.columns, product.to_rows
        call.many, call.proof, call.proves = many, self.proof, "G" in sides and not self.sampled
        if call.proof is not None:
            call.proof.see_inputs(call, x)
        self.keep(call, x, makes_A=makes_A)
        # the output of a Linear with bias is a view; an in-place activation replaces a view's grad_fn, but not that of
        # its base
        base = output._base
        origin = base if base is not None and base.numel() == output.numel() and base.grad_fn is not None else output
        assert origin.grad_fn is not None, "the output requires no gradient"
        if self.sampled:
            # the proof needs the true loss's gradient; a copy of the call, as a node must not hold an edge to itself
            if call.proof is not None:
                hook = partial(
                    self._on_gradient,
                    replace(call, waiting=None, late=False, sides="", proves="G" in sides, many=None),
                    origin.output_nr,
                )
                origin.grad_fn.register_prehook(hook)
            call.edge = GradientEdge(origin.grad_fn, origin.output_nr)
            self.pending.append(call)
            return
        # a prehook of the node: a tensor hook would run before DeepSpeed divides an engine output's gradient by the
        # accumulation steps, and a full backward hook breaks with in-place activations
        origin.grad_fn.register_prehook(partial(self._on_gradient, call, origin.output_nr))

    def _product(self, product: Product) -> None:
        try:
            self._multiplied(product)
        except Exception as error:
            for layer in self._stacks[id(product.param)]:
                self.fail(layer, error)

    def _multiplied(self, product: Product) -> None:
        """Turn a product into calls of its layers. A stack's shared A gets all rows from its first layer."""
        layers, x, output = self._stacks[id(product.param)], product.x, product.output
        stacked, first = len(layers) > 1, layers[0]
        module = self._model.get_submodule(first.module)
        if product.window is not None or LAYERS[first.kind].images:
            if product.window == tuple(getattr(module, x, None) for x in ("stride", "padding", "dilation", "groups")):
                self._called(first, module, x, output)
            return
        if first.bias is not None and not product.biased:  # the bias's gradient is not the sum of these rows
            return
        other = product.transposed != LAYERS[first.kind].transposed and min(first.shape) > 1
        if other or x.shape[-1] != first.A.dim - (first.bias is not None):  # not the sides that were read from the code
            return
        shared = stacked and layers[-1].shares is not None
        if shared and first.shares is None:
            self._called(first, module, x, output, product=product, sides="A", select=product.rows)
        for entry, rows in product.entries:
            select = rows if stacked or rows is not EVERY else None
            sides = "G" if shared else "AG"
            self._called(layers[entry], module, x, output, product=product, sides=sides, select=select)

    def _on_gradient(self, call: Call, place: int, gradients: tuple[Tensor | None, ...]) -> None:
        gradient, running = gradients[place], self._backwards
        if gradient is None or not self.active or call.layer.name in self.failed:
            return
        inner = self.inside and not running
        own = self in running if running else inner or (call.forward.detached and not self._announced)
        self.outside += not own
        if not own and call.proof is None:
            return
        try:
            weight = self._weights[call.layer.name]
            if not weight.requires_grad or not runs(get_gradient_edge(weight).node):
                return
            if own:
                self.running = call.forward
                self.passed.add(call.forward)
                self.add(call, gradient, 1.0 if inner else None)
            else:
                call.proof.see_gradient(call, call.gradient_of(gradient), others=True)
        except Exception as error:
            self.fail(call.layer, error)
