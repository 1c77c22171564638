"""Hooks on the layers: sums of a a^T and g g^T, taken when the gradient of a call's output arrives (docs/capture.md).

In a captured step the forward hook saves the layer's input as autograd does (``calls.py``) and puts a prehook on the
node of the output. When the gradient arrives there, the rows of a and g are added to the step's sums. A call that gets
no gradient has no rows. In other steps the hooks return at once.

Note: Scale of G. G is K times the sum over backward passes p of R_p times the sum of g^ g^^T. g^ is a row's part of the
averaged gradient; K counts the passes of the step on all ranks, and R_p the rows of the layer nearest to the loss in
pass p: the one whose gradient arrives first. Its later calls in the pass are not known then, so a pass has sums of its
own, which are multiplied by R_p when it has ended. K and the ranks' average follow after the reduction
(``step/factors.py``).

Note: Own passes. An engine's statistics are of its own loss, not of a generator's loss that runs through its
discriminator. Its own passes are those that the engine announces (:meth:`Capture.own_backward`). A backward pass inside
the model's forward, as of DeepSpeed's tiled loss, is a part of the pass that follows. As long as the engine has
announced none, a plain ``loss.backward()`` is its own, too, if no other engine announces one and the forward's inputs
have no graph. A backward pass that does not add to a layer's weight, such as ``torch.autograd.grad``, never counts.

Note: Hooks. A prehook of the output's node is needed, not a tensor hook, which would run before DeepSpeed divides the
gradient by the accumulation steps, nor a full backward hook, which breaks with in-place activations. No exception
leaves a hook: it would stop one rank in a backward pass that the others finish.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import _StopRecomputationError

from ds_kfac.log import logger
from ds_kfac.model.calls import Call, Rows, kept
from ds_kfac.model.layers import LayerSpec, key_of, tensors_of
from ds_kfac.model.masks import ArgumentMasks, Forward, ReadMask, Shape, masks_in
from ds_kfac.model.products import EVERY, Product, Products, Uses
from ds_kfac.model.proof import Proof
from ds_kfac.model.registry import LAYERS, is_linear_map
from ds_kfac.model.rows import PASSES, TERMS, BatchSum, RowSums, by_example, is_nonzero, kept_rows
from ds_kfac.model.shared import SharedInputs

CPU = torch.device("cpu")


class BackwardPass:
    """What one backward pass has brought so far.

    Attributes:
        sums: key -> sum over its rows of g^ g^^T, of factors that are made of gradients.
        nearest: the layer nearest to the loss, whose gradient arrived first; None: none has arrived.
        forwards: the forward passes that it went through.
        is_seen: whether a weight of K-FAC's got a part of its gradient, in a pass that was not announced. In others,
            such as ``autograd.grad`` through a frozen layer, none does.
    """

    def __init__(self) -> None:
        self.sums: dict[str, BatchSum] = {}
        self.is_seen = False
        self.nearest: str | None = None
        self.forwards: dict[Forward, None] = {}
        self._examples: int | None = None  # of the nearest layer
        self._counted: set[Rows] = set()
        self._more: int | Tensor = 0  # rows of the nearest layer that no forward has counted

    def arrived(self, rows: Rows, gradient: Tensor, weight_sharing: str) -> None:
        """The gradient of a call has arrived.

        Raises:
            ValueError: with ``weight_sharing`` "reduce", its first dimension is not that of the nearest layer's calls.
        """
        if not rows.recomputed:
            self.forwards[rows.forward] = None
        is_first = self.nearest is None
        if is_first:
            self.nearest = rows.layer
            self._examples = len(by_example(gradient))
        if weight_sharing == "reduce" and len(by_example(gradient)) != self._examples:
            raise ValueError(
                f'"weight_sharing": "reduce" takes the first dimension for the examples, but here that is '
                f"{len(by_example(gradient))}, and {self._examples} in {self.nearest}, the layer nearest to the loss"
            )
        if rows.layer != self.nearest or rows in self._counted:
            return
        self._counted.add(rows)
        mask = rows.forward.mask(rows.leading)
        if rows.recomputed:
            self._more = self._more + (rows.number if mask is None else mask.sum())
        if mask is not None and is_first:  # in that call a row with a gradient counts in any case
            left_out = is_nonzero(gradient) & ~mask
            self._more = self._more + (left_out.sum() if weight_sharing == "expand" else 0)

    def rows(self, weight_sharing: str) -> int | Tensor:
        """R_p: all rows of the nearest layer in these forward passes, without padding."""
        if self.nearest is None:
            return 0
        return self._more + sum(forward.rows(self.nearest, weight_sharing) for forward in self.forwards)


class Capture:
    """Installs the hooks. They return at once unless :attr:`active`.

    Args:
        scale: gives the loss scale of a backward pass, a number or a scalar on the device; asked with whether the
            engine announced the pass.
        device: of the sums.
        inputs: numbers the inputs, to find layers that share theirs.
        sampled: whether G comes from the gradients of a sampled loss, for which autograd is asked
            (:meth:`add_asked`), as ``ds_kfac.fit`` does for all. The calls wait in :attr:`pending` then.

    Attributes:
        sums: factor key -> sum of the step so far; missing if there is none.
        keys: keys of the factors that are summed -> of how many rows one is taken.
        passes, terms: this rank's number of own backward passes in the step, and the sum of their R_p.
        current: the running backward pass.
        forward: the model's last forward pass, or one for calls outside of any.
        pending: calls whose gradient autograd is to be asked for.
        proof, uses: in a step that proves, the proof, and a recorder of where weights are used; else None.
        failed: layer -> error that a hook raised. Such a layer has no rows any more.
        counted, outside: number of calls whose gradient came in an own pass, and in others.
        measured: layer -> number of its rows in a step in which these are counted, maybe a scalar on the device.
        seen: layers that had a row in this step, maybe without a gradient.
        read_mask: gives the attention masks of a forward.
    """

    _backwards: ClassVar[list["Capture"]] = []
    """Captures whose own backward pass is running, of all engines in the process."""

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[LayerSpec],
        scale: Callable[[bool], Tensor | float],
        *,
        device: torch.device = CPU,
        rows: RowSums | None = None,
        inputs: SharedInputs | None = None,
        sampled: bool = False,
    ) -> None:
        self._model = model
        self._scale = scale
        self._device = device
        self.rows = rows or RowSums()
        self.inputs = inputs or SharedInputs()
        self.sampled = sampled
        self.read_mask: ReadMask = ArgumentMasks(model)
        self.active = False
        self.failed: dict[str, str] = {}
        self._parted = set[tuple[str, ...]]()  # groups of layers that the user was told of
        self._announced = False  # whether a pass was ever announced
        self.step = -1
        self._forget()
        layers = tuple(layers)
        self._numels: dict[str, int] = {}
        self.of_gradients: set[str] = set()
        for layer in layers:
            A, G = layer.keys
            self._numels |= {A: layer.A.numel, G: layer.G.numel}
            self.of_gradients.add(A if LAYERS[layer.kind].needs_gradients else G)
        parameters = dict(model.named_parameters())
        self._weights = {layer.name: parameters[layer.weight] for layer in layers}
        self._stacks: dict[int, list[LayerSpec]] = {}  # id of a parameter -> its layers, in order
        self._handles: list[Any] = []
        self._install(layers)

    def _forget(self) -> None:
        """Forget everything of the step before."""
        self.sums: dict[str, BatchSum] = {}
        self.keys: Mapping[str, int] = {}
        self.passes = 0
        self.terms: int | Tensor = 0
        self.current = BackwardPass()
        self.forward = Forward()
        self._forwards: list[Forward] = []  # whose backward pass is to come
        self._begun: list[Forward] = []
        self._recomputing: tuple[int, Forward] | None = (
            None  # the outermost graph task of a pass, and what it recomputes
        )
        self.pending: list[Call] = []
        self.proof: Proof | None = None
        self.uses: Uses | None = None
        self._failed_before = frozenset(self.failed)
        self._forward_runs = False
        self._tasks: set[int] = set()  # graph tasks of a pass that was not announced
        self.counted = 0
        self.outside = 0
        self.measured: dict[str, int | Tensor] | None = None
        self.seen: set[str] = set()

    # the hooks

    def _install(self, layers: Sequence[LayerSpec]) -> None:
        model = self._model
        self._hook(model.register_forward_pre_hook, model, self._begin_forward, with_kwargs=True)
        self._hook(model.register_forward_hook, model, self._end_forward)
        hooked = set[nn.Module]()
        watched = {"": model}
        counts: dict[nn.Parameter, int] = {}
        for layer in layers:
            modules = {name: model.get_submodule(name) for name in (layer.module, *layer.also)}
            hooked.update(modules.values())
            if not layer.product:
                for module in modules.values():
                    called = partial(self._layer_called, layer)
                    # before the hooks of others, which may replace the output; but if autograd is asked for gradients
                    # after ZeRO-3's, which wraps it in a function that fetches the weights of its backward
                    prepend = not self.sampled
                    self._hook(
                        module.register_forward_hook,
                        module,
                        called,
                        with_kwargs=True,
                        prepend=prepend,
                    )
                continue
            watched |= modules
            if isinstance(modules[layer.module], nn.Linear):  # a module around it may multiply by its weight
                around = layer.module.rpartition(".")[0]
                watched |= {name: model.get_submodule(name) for name in (around, around.rpartition(".")[0])}
            weight = model.get_parameter(layer.weight)
            counts[weight] = layer.part[1]
            self._stacks.setdefault(id(weight), []).append(layer)
        for name, module in model.named_modules():
            if module not in hooked and is_linear_map(module):
                self._hook(
                    module.register_forward_hook,
                    module,
                    partial(self._other_called, name),
                    prepend=True,
                )
        self._products = Products(counts, self._product) if counts else None
        if self._products is None:
            return
        products = self._products
        enter: Any = lambda module, inputs: products.enter(module)  # noqa: E731
        leave: Any = lambda module, inputs, output: products.leave(module)  # noqa: E731
        for module in watched.values():
            self._hook(module.register_forward_pre_hook, module, enter)
            # before the hooks of others: DeepSpeed's profiler puts functions of torch back there that we replace
            self._hook(module.register_forward_hook, module, leave, always_call=True, prepend=True)

    def _hook(
        self,
        register: Callable[..., Any],
        ours: nn.Module,
        function: Callable[..., None],
        **how: Any,
    ) -> None:
        """``function`` as a hook of ``ours`` alone, not of its copies, that runs in captured forwards of no trace,
        export or torch.func. torch.compile sees the first condition alone."""

        def outside(module: nn.Module, *values: Any) -> None:
            if torch._C._functorch.peek_interpreter_stack() is torch._C._get_tracing_state() is None:
                function(module, *values)

        captured = torch.compiler.disable(outside)  # not as a decorator, which imports torch's compiler with ds_kfac

        def hook(module: nn.Module, *values: Any) -> None:
            if torch.is_grad_enabled():
                if self.active and module is ours and not torch.compiler.is_exporting():
                    captured(module, *values)
            elif not torch.compiler.is_compiling() and self.active and _in_backward():
                self._recomputed_forward()  # a first run in a recomputation: checkpoints in each other

        self._handles.append(register(hook, **how))

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self.leave()
        self.active = False

    def leave(self) -> None:
        """No forward runs any more: calls of torch are not looked at."""
        if self._products is not None:
            self._products.leave(None)

    # steps

    def begin_step(
        self,
        keys: Collection[str] | None,
        step: int,
        *,
        measure: bool = False,
        proof: Proof | None = None,
    ) -> None:
        """Prepare for a step; forgets all calls since the last one.

        Args:
            keys: keys of the factors that this rank captures in the step, in a mapping with of how many rows one is
                taken; None: the hooks do nothing.
            step: decides which rows are sampled, if not all are.
            measure: count the rows of all layers.
            proof: gets the rows of all layers, to compare them with the gradients.
        """
        self._forget()
        self.inputs.begin_step()
        self.active = keys is not None
        self.step = self.rows.turn = step
        self.keys = keys if isinstance(keys, Mapping) else dict.fromkeys(keys or (), 1)
        self.measured = {} if measure else None
        self.proof = proof
        self.uses = None if proof is None else Uses(self._weights)

    @torch.no_grad()
    def end_step(self) -> None:
        """All passes of the step have ended. Each sum gets their number, also one that has no row here."""
        self._end_plain_pass()
        for group in self.inputs.parted():
            self.sums.pop(key_of(group[0], "A"), None)
            if group not in self._parted:
                self._parted.add(group)
                logger.warning(
                    f"ds_kfac: {', '.join(group)} had one input in the first captured step, and now have several: the "
                    f"factor A that they share gets no rows in such steps (step {self.step})"
                )
        for key in self.keys:
            counts = self._sum(key).counts
            counts[PASSES].add_(self.passes)
            counts[TERMS].add_(self.terms)
            if self.sampled and key in self.of_gradients and self.passes:
                self.sums[key].sum_P.mul_(1 / self.passes**2)  # a sampled loss is not divided by their number

    # forward passes

    def _begin_forward(self, model: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        if _in_backward():
            return
        self.leave()  # still entered if the last forward raised
        self._end_plain_pass()
        self._forward_runs = True
        detached = all(x.grad_fn is None for x in tensors_of((arguments, keywords)))
        masks = (mask.to(self._device) for mask in masks_in(self.read_mask(arguments, keywords)))
        self.forward = Forward(masks, detached=detached)
        self._forwards.append(self.forward)
        self._begun.append(self.forward)

    def _end_forward(self, model: nn.Module, arguments: tuple, output: Any) -> None:
        if _in_backward():
            return
        self._forward_runs = False
        if self._announced:
            return
        for tensor in tensors_of(output):  # here a plain backward pass begins, outside of what it recomputes
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(self._plain_pass_begins, self.step, self.forward))

    def _forward_of(self, recomputed: bool) -> Forward:
        """The forward pass of a call."""
        if recomputed:
            return self._recomputed_forward()
        if self.forward not in self._forwards:  # a method of the model is called in place of the model
            self.forward = Forward()
            self._forwards.append(self.forward)
            self._begun.append(self.forward)
        return self.forward

    def _recomputed_forward(self) -> Forward:
        """The forward pass that made the node which recomputes. In a graph task inside that of the pass, it is the one
        that is recomputed there."""
        task, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
        if self._forward_runs and self not in self._backwards:
            return self.forward
        if self._recomputing is None or task <= self._recomputing[0]:
            number = self.forward.begins if node is None else node._sequence_nr()
            before = (forward for forward in reversed(self._begun) if forward.begins <= number)
            self._recomputing = task, next(before, self.forward)
        return self._recomputing[1]

    # calls

    def _layer_called(
        self, layer: LayerSpec, module: nn.Module, inputs: tuple, named: dict[str, Any], output: Any
    ) -> None:
        weight: Any = module._parameters.get("weight")  # module.weight would make ZeRO-3 fetch it
        if weight is not None and not weight.requires_grad:
            self._other_called(layer.weight, module, inputs, output)
            return
        with self._guarded([layer]):
            output = output[0] if isinstance(output, tuple) else output  # Megatron's linears return their bias, too
            if output.requires_grad:
                x = inputs[0] if inputs else next(iter(named.values()))
                leading = None if LAYERS[layer.kind].images else tuple(output.shape[:-1])
                rows = self._rows(layer.weight, leading, LAYERS[layer.kind].rows(x, output), len(output))
                self._called([Call(layer, LAYERS[layer.kind], module, rows, output.shape)], x, output)

    def _other_called(self, name: str, module: nn.Module, inputs: tuple, output: Any) -> None:
        """A layer was called that K-FAC does not step. It may be the one nearest to the loss."""
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(output, Tensor) and output.requires_grad:
            is_convolution = isinstance(module, nn.modules.conv._ConvNd)
            number = output.numel() // max(1, output.shape[1 if is_convolution else -1])
            rows = self._rows(name, None if is_convolution else tuple(output.shape[:-1]), number, len(output))
            node, place = _origin(output)
            node.register_prehook(partial(self._other_arrived, self.step, rows, output.shape, place))

    def _rows(self, layer: str, leading: Shape | None, number: int, examples: int) -> Rows:
        """The rows of a call, which its forward pass counts, but for those of a recomputation."""
        if self.rows.weight_sharing == "reduce":
            number = examples
        recomputed = _in_backward()
        forward = self._forward_of(recomputed)
        if not recomputed:
            forward.note(layer, leading, number)
        return Rows(layer, forward, leading, number, recomputed)

    def _called(self, calls: Sequence[Call], x: Tensor, output: Tensor) -> None:
        """A layer was called with ``x`` and returned ``output``, or a product with x of matrices did. Which tensors are
        saved is the same in a recomputation: it does not depend on what happens in between."""
        calls = [call for call in calls if call.layer.name not in self._failed_before]
        if not calls or (calls[0].rows.recomputed and self.sampled):
            return  # sampled gradients go to the calls of the first run
        for call in calls:
            call.input = self.inputs.number(call.layer.name, x)
            if x.numel():
                self.seen.add(call.layer.name)
        makes_A = any("A" in call.sides and self.inputs.key(call.layer) in self.keys for call in calls)
        multiplies = not calls[0].kind.needs_gradients
        node, place = _origin(output)
        if self.sampled:
            for call in calls:
                edge = GradientEdge(node, place)
                self.pending.append(replace(call, kept=kept(x, multiplies=multiplies), edge=edge))
        if not self.sampled or self.proof is not None:
            needed = makes_A or self.proof is not None or self.measured is not None
            holder = [kept(x, multiplies=multiplies)] if needed else []
            node.register_prehook(partial(self._arrived, self.step, calls, holder, place))

    def _product(self, product: Product) -> None:
        layers = self._stacks[id(product.param)]
        with self._guarded(layers):
            self._multiplied(layers, product)

    def _multiplied(self, layers: Sequence[LayerSpec], product: Product) -> None:
        """Turn a product into calls of its layers. A stack's shared A gets all rows from its first layer."""
        x, output, first = product.x, product.output, layers[0]
        kind = LAYERS[first.kind]
        module = self._model.get_submodule(first.module)
        if product.window is not None or kind.images:
            if product.window == tuple(getattr(module, x, None) for x in ("stride", "padding", "dilation", "groups")):
                rows = self._rows(first.weight, None, kind.rows(x, output), len(output))
                self._called([Call(first, kind, module, rows, output.shape)], x, output)
            return
        if first.bias is not None and not product.biased:  # the bias's gradient is not the sum of these rows
            return
        is_turned = product.transposed != kind.transposed and min(first.shape) > 1
        if is_turned or x.shape[-1] != first.A.dim - (first.bias is not None):  # not what was read from the code
            return
        is_stack = len(layers) > 1
        leading = torch.Size(x.shape[:-1])
        entries = [(layers[e], picked if is_stack or picked is not EVERY else None) for e, picked in product.entries]
        numbers = [leading.numel() if picked is None else _length(picked, leading.numel()) for _, picked in entries]
        is_whole = len(entries) == 1 and entries[0][1] is None
        examples = leading[0] if leading else 1
        rows_of_call = self._rows(first.weight, tuple(leading) if is_whole else None, sum(numbers), examples)
        calls: list[Call] = []

        def called(layer: LayerSpec, picked: slice | Tensor | None, number: int, sides: str) -> None:
            shape = torch.Size((*(leading if picked is None else (number,)), layer.G.dim))
            call = Call(layer, kind, module, rows_of_call, shape, sides, select=picked)
            call.columns, call.to_rows = product.columns, product.to_rows
            calls.append(call)

        shares = is_stack and layers[-1].shares is not None
        if shares and first.shares is None:
            called(first, product.rows, _length(product.rows, leading.numel()), "A")
        for (layer, picked), number in zip(entries, numbers, strict=True):
            called(layer, picked, number, "G" if shares else "AG")
        self._called(calls, x, output)

    # gradients

    def _arrived(
        self,
        step: int,
        calls: Sequence[Call],
        holder: list[Any],
        place: int,
        gradients: tuple[Tensor | None, ...],
    ) -> None:
        """The gradient of the output of some calls, those of one product, has arrived at its node.

        Args:
            holder: of the node that saves their input, if it is needed.
        """
        nodes = holder.copy()
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            holder.clear()  # autograd frees what its nodes saved, but not what ours did
        gradient = gradients[place]
        if gradient is None or not self.active or step != self.step:
            return
        is_own = self._is_own(calls[0].rows.forward)
        self.outside += not is_own
        if self.proof is None and (not is_own or self.sampled):
            return
        with self._guarded([call.layer for call in calls]):
            weight = self._weights[calls[0].layer.name]
            if not weight.requires_grad or not _runs(get_gradient_edge(weight).node):
                return
            x = nodes[0].saved_tensors[0] if nodes else None
        is_announced = self in self._backwards
        if is_own and not is_announced:
            self._watch_task()
            self.current.is_seen = True
        is_inner = self._forward_runs and not is_announced  # which DeepSpeed does not scale
        scale = 1.0 if is_inner else self._scale(is_announced)
        for call in calls:
            with self._guarded([call.layer]):
                if call.layer.name in self.failed:
                    continue
                if self.sampled or not is_own:
                    self._prove(call, x, call.gradient_rows(gradient), others=not is_own)
                else:
                    self._add(call, x, gradient, scale)

    def _other_arrived(
        self, step: int, rows: Rows, shape: torch.Size, place: int, gradients: tuple[Tensor | None, ...]
    ) -> None:
        """The gradient of a layer that K-FAC does not step, with an output of this shape, has arrived."""
        gradient = gradients[place]
        if gradient is None or not self.active or step != self.step or self.sampled:
            return
        is_announced = self in self._backwards
        if not is_announced and (self._forward_runs or not self._is_own(rows.forward)):
            return
        if self.current.nearest not in (None, rows.layer):
            return
        if not is_announced:
            self._watch_task()
        try:
            self.current.arrived(rows, gradient.detach().reshape(shape), self.rows.weight_sharing)
        except Exception as error:
            logger.warning(f"ds_kfac: a call of {rows.layer} is not counted: {type(error).__name__}: {error}")

    def _is_own(self, forward: Forward) -> bool:
        """Whether the running backward pass is this engine's. Note: Own passes."""
        if self._backwards:
            return self in self._backwards
        return self._forward_runs or (forward.detached and not self._announced)

    def _add(self, call: Call, x: Tensor | None, gradient: Tensor | None, scale: Tensor | float) -> None:
        """Add a call's rows to the sums.

        Args:
            gradient: of its output; None: the factors need none, and every row of an input counts but padding.
            scale: factor on the gradient.
        """
        self.counted += 1
        layer, kind = call.layer, call.kind
        A, G = self.inputs.key(layer), layer.keys[1]
        if gradient is not None:
            gradient = call.gradient_rows(gradient)
            self.current.arrived(call.rows, gradient, self.rows.weight_sharing)
            self._prove(call, x, gradient)
        x = None if x is None else call.input_rows(x)
        makes_A = "A" in call.sides and A in self.keys
        makes_G = "G" in call.sides and G in self.keys
        counts = self.measured is not None and ("G" if layer.part[1] > 1 and layer.product else "A") in call.sides
        if not (makes_A or makes_G or counts or self.inputs.searching):
            return
        if gradient is None:
            with_gradient = torch.ones(call.shape[:-1], dtype=torch.bool, device=self._device)
        else:
            with_gradient = gradient != 0 if kind.images else is_nonzero(gradient)
        alive = with_gradient.any()
        self.inputs.arrived(layer.name, call.input, None if gradient is None else alive)
        if makes_G and not kind.needs_gradients and gradient is not None:
            batch = self._sum(G, self.current.sums)
            self.rows.add_gradients(call, x, gradient, alive, batch, scale, stride=self.keys[G])
        if makes_A and kind.needs_gradients and gradient is not None:
            self.rows.add_gradients(call, x, gradient, alive, self._sum(A, self.current.sums), scale)
        gives = makes_A and not kind.needs_gradients and self.inputs.gives(layer, call.input)
        if not (gives or counts) or x is None:
            return
        kept_ = alive if kind.images else kept_rows(x, with_gradient, call.mask)
        if gives:
            self.rows.add_inputs(call, x, kept_, alive, self._sum(A), stride=self.keys[A])
        if counts and self.measured is not None:
            number = call.rows.number * alive if kind.images else kept_.sum()
            self.measured[layer.name] = self.measured.get(layer.name, 0) + number

    def _prove(self, call: Call, x: Tensor | None, gradient: Tensor, *, others: bool = False) -> None:
        if self.proof is not None and "G" in call.sides and x is not None:
            self.proof.see(call, call.input_rows(x), gradient, others=others)

    def _sum(self, key: str, sums: dict[str, BatchSum] | None = None) -> BatchSum:
        """The sum of a factor, in those of the step or of the pass."""
        sums = self.sums if sums is None else sums
        if key not in sums:
            sums[key] = BatchSum.empty(self._numels[key], self._device)
        return sums[key]

    # backward passes

    @contextmanager
    def own_backward(self) -> Iterator[None]:
        """Wraps an own backward pass, in steps without capture, too."""
        self._announced, self._recomputing = True, None
        self._backwards.append(self)
        products = self._products if self.active else None
        try:
            with nullcontext() if products is None else products.backward():
                yield
        finally:
            self._backwards.remove(self)
            self.leave()
            if self.active and not self.sampled:
                self.end_pass()

    def add_asked(self, calls: Sequence[Call], gradients: Sequence[Tensor | None], scale: Tensor | float) -> None:
        """Add the gradients, times ``scale``, that autograd was asked for, of some of :attr:`pending`. None: the loss
        does not depend on the call."""
        for call, gradient in zip(reversed(calls), reversed(gradients), strict=True):  # in a backward pass's order
            with self._guarded([call.layer]):
                if gradient is not None:
                    self._add(call, call.kept.saved_tensors[0], gradient, scale)
        done = set(map(id, calls))
        self.pending = [call for call in self.pending if id(call) not in done]

    @torch.no_grad()
    def end_pass(self) -> None:
        """A backward pass has ended: what it summed counts R_p times."""
        ended, self.current = self.current, BackwardPass()
        rows = ended.rows(self.rows.weight_sharing)
        self.passes += 1
        self.terms = self.terms + rows
        for key, batch in ended.sums.items():
            batch.sum_P.mul_(rows)
            if key in self.sums:
                self.sums[key].add_(batch)
            else:
                self.sums[key] = batch
        self._forwards = [forward for forward in self._forwards if forward not in ended.forwards]
        self._tasks.clear()
        self._recomputing = None
        self.inputs.end_pass()

    def _end_plain_pass(self) -> None:
        """End a pass that was not announced, if its end was not seen."""
        if self.current.nearest is None or self in self._backwards:
            return
        if self.current.is_seen:
            self.end_pass()
        else:
            self.current = BackwardPass()

    def _plain_pass_begins(self, step: int, forward: Forward, gradients: tuple[Tensor | None, ...]) -> None:
        if self.active and step == self.step and not self._backwards and self._is_own(forward):
            self._watch_task()

    def _watch_task(self) -> None:
        """End the pass when the running graph task, or the one around it, ends."""
        task = torch._C._current_graph_task_id()
        if task not in self._tasks and not self._forward_runs:
            self._tasks.add(task)
            Variable._execution_engine.queue_callback(partial(self._task_ended, task))

    def _task_ended(self, task: int) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._end_plain_pass()

    # errors

    @contextmanager
    def _guarded(self, layers: Sequence[LayerSpec]) -> Iterator[None]:
        """Keeps exceptions inside a hook, but for the one by which checkpointing ends a recomputation."""
        try:
            yield
        except _StopRecomputationError:
            raise
        except Exception as error:
            for layer in layers:
                self.fail(layer, error)

    def fail(self, layer: LayerSpec, error: Exception) -> None:
        """A hook raised: the layer has no rows in this step, nor in later ones."""
        self.failed[layer.name] = f"{type(error).__name__}: {error}"
        logger.warning(
            f"ds_kfac: the rows of {layer.name or '(model)'} ({layer.kind}) are not known: its factors stay as they "
            f"are, and from the next check of rows on it is without curvature: {self.failed[layer.name]}"
        )
        for key in (self.inputs.key(layer), layer.keys[1]):
            self.sums.pop(key, None)
            self.current.sums.pop(key, None)

    def used(self, layer: str) -> str:
        """Text that says where a layer's weight is used; "" if that was not recorded."""
        return "" if self.uses is None else self.uses.of(layer)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _length(rows: slice | Tensor, total: int) -> int:
    return len(range(total)[rows]) if isinstance(rows, slice) else len(rows)


def _origin(output: Tensor) -> tuple[Any, int]:
    """The node at which the gradient of an output arrives, and at which of its places. The output of a Linear with bias
    is a view; an in-place activation replaces a view's node, but not that of its base."""
    origin, base = output, output._base
    if base is not None and base.numel() == output.numel() and base.grad_fn is not None:
        origin = base
    assert origin.grad_fn is not None, "the output requires no gradient"
    return origin.grad_fn, origin.output_nr


def _runs(node: Any) -> bool:
    """Whether the running backward pass runs a parameter's node, and so adds to its gradient, as ``autograd.grad`` and
    other ``inputs`` do not."""
    with suppress(RuntimeError):  # autograd.grad with its tensor among the inputs: the gradient goes to the caller
        return bool(torch._C._will_engine_execute_node(node))
    return False
