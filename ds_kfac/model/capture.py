"""Hooks on the layers: sums of a a^T and g g^T, taken when the gradient of a call's output arrives.

docs/explanation/capture.md has the rule.

In a captured step the forward hook saves the layer's input as autograd does (``calls.py``) and puts
a prehook on the node of the output. When the gradient arrives there, the rows of a and g are added
to the step's sums. A call that gets no gradient has no rows. In other steps the hooks return at
once.

Note: Scale of G. G is K times the sum over backward passes p of R_p times the sum of g^ g^^T. g^ is
    a row's part of the
averaged gradient; K counts the passes of the step on all ranks, and R_p the rows of the layer
nearest to the loss in pass p: the first whose gradient is not zero. Its later calls in the pass are
not known then, so a pass has sums of its own, which are multiplied by R_p when it has ended. K and
the ranks' average follow after the reduction (``step/factors.py``).

Note: Own passes. An engine's statistics are of its own loss, not of a generator's loss that runs
    through its
discriminator. Its own passes are those that the engine announces (:meth:`Capture.own_backward`). A
backward pass inside the model's forward, as of DeepSpeed's tiled loss, is a part of the pass that
follows. As long as the engine has announced none, a plain ``loss.backward()`` is its own, too, if
no other engine announces one and the forward's inputs have no graph. A backward pass that does not
add to a layer's weight, such as ``torch.autograd.grad``, never counts.

Note: Recomputation. Activation checkpointing compares what its two runs save, and raises in the
    user's backward if they
differ. So a forward decides once which inputs it saves, and what is recomputed follows the forward
that it belongs to: the last one to whose output the backward pass has come; before that, as in a
loss in tiles, the one after whose begin the node was made that recomputes. A backward pass may come
after the step of its forward, which has no rows then, but saves the same tensors; and what is
recomputed of a forward that was not captured saves none.

Note: Hooks. A prehook of the output's node is needed, not a tensor hook, which would run before
    DeepSpeed divides the
gradient by the accumulation steps, nor a full backward hook, which breaks with in-place
activations. No exception leaves a hook: it would stop one rank in a backward pass that the others
finish.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
from ds_kfac.model.layers import LayerSpec, tensors_of
from ds_kfac.model.masks import ArgumentMasks, Forward, ReadMask, Shape, masks_in
from ds_kfac.model.passes import BackwardPass
from ds_kfac.model.products import Product, Products, Uses, parts_of
from ds_kfac.model.proof import Proof
from ds_kfac.model.registry import LAYERS, is_linear_map
from ds_kfac.model.rows import PASSES, TERMS, BatchSum, RowSums, have_gradient, kept_rows
from ds_kfac.model.shared import Input, SharedInputs

CPU = torch.device("cpu")


class Capture:
    """Installs the hooks. They return at once unless :attr:`active`.

    Args:
        scale: gives the loss scale of a backward pass, a number or a scalar on the device; asked
            with whether the engine announced the pass.
        device: of the sums.
        inputs: numbers the inputs, to find layers that share theirs.
        sampled: whether G comes from the gradients of a sampled loss, for which autograd is asked
            (:meth:`add_asked`), as ``ds_kfac.fit`` does for all. The calls wait in :attr:`pending`
            then.
        counts_terms: whether :attr:`terms` are needed in steps that update no factor made of
            gradients, too.

    Attributes:
        sums: factor key -> sum of the step so far; missing if there is none.
        keys: keys of the factors that are summed -> of how many rows one is taken.
        passes, terms: this rank's number of own backward passes in the step, and the sum of their
            R_p.
        current: the running backward pass.
        forward: the model's last forward pass, or one for calls outside of any.
        pending: calls whose gradient autograd is to be asked for.
        proof, uses: in a step that proves, the proof, and a recorder of where weights are used;
            else None.
        failed: layer -> error that a hook raised. Such a layer has no rows any more.
        counted, outside: number of calls whose gradient came in an own pass, and in others.
        measured: layer -> number of its rows in a step in which these are counted, maybe a scalar
            on the device.
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
        counts_terms: bool = False,
    ) -> None:
        self._model = model
        self._scale = scale
        self._device = device
        self.rows = rows or RowSums()
        self.inputs = inputs or SharedInputs()
        self.sampled = sampled
        self._counts_terms = counts_terms
        self.read_mask: ReadMask = ArgumentMasks(model)
        self.active = False
        self.failed: dict[str, str] = {}
        self._told: set[tuple[str, ...]] = set()  # groups whose inputs have parted
        self._announced = False  # whether a pass was ever announced
        self._thread = 0  # that runs the forward
        self.step = -1
        self._forget()
        self._layers = layers = tuple(layers)
        # names of the layers whose inputs this step's forwards save
        self._saved: frozenset[str] = frozenset()
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
        self._begun: list[Forward] = []  # all of the step
        self._running: Forward | None = None  # to which the running backward pass has come
        self._unpacks = False  # whether an input is read after its backward pass
        self.pending: list[Call] = []
        self.proof: Proof | None = None
        self.uses: Uses | None = None
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
        self._hook(model.register_forward_hook, model, self._end_forward, always_call=True)
        hooked = set[nn.Module]()
        watched = {"": model}
        counts: dict[nn.Parameter, int] = {}
        for layer in layers:
            modules = {name: model.get_submodule(name) for name in (layer.module, *layer.also)}
            hooked.update(modules.values())
            if not layer.product:
                for module in modules.values():
                    called = partial(self._layer_called, layer)
                    # before the hooks of others, which may replace the output; but if autograd is
                    # asked for gradients after ZeRO-3's, which wraps it in a function that fetches
                    # the weights of its backward
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
            # a module around it may multiply by its weight
            if isinstance(modules[layer.module], nn.Linear):
                around = layer.module.rpartition(".")[0]
                watched |= {
                    name: model.get_submodule(name) for name in (around, around.rpartition(".")[0])
                }
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
            # before the hooks of others: DeepSpeed's profiler puts functions of torch back there
            # that we replace
            self._hook(module.register_forward_hook, module, leave, always_call=True, prepend=True)

    def _hook(
        self,
        register: Callable[..., Any],
        ours: nn.Module,
        function: Callable[..., None],
        **how: Any,
    ) -> None:
        """``function`` as a hook of ``ours`` alone, not of its copies, that runs in captured
        forwards of no trace, export or torch.func, and in recomputations of earlier ones.
        torch.compile sees the first condition alone."""

        def outside(module: nn.Module, *values: Any) -> None:
            is_plain = (
                torch._C._functorch.peek_interpreter_stack()
                is torch._C._get_tracing_state()
                is None
            )
            # of a forward in another thread
            is_others = self._forward_runs and self._thread != threading.get_ident()
            if is_plain and (self._recomputes() or (self.active and not is_others)):
                function(module, *values)

        # not as a decorator, which imports torch's compiler with ds_kfac
        captured = torch.compiler.disable(outside)

        def hook(module: nn.Module, *values: Any) -> None:
            if not (torch.is_grad_enabled() and (self.active or self._running is not None)):
                return
            if module is ours and not torch.compiler.is_exporting():
                captured(module, *values)

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
            keys: keys of the factors that this rank captures in the step, in a mapping with of how
                many rows one is taken; None: the hooks do nothing.
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
        saves_all = self.sampled or measure or proof is not None
        self._saved = frozenset(
            layer.name
            for layer in self._layers
            if layer.name not in self.failed and (saves_all or self.inputs.key(layer) in self.keys)
        )

    @property
    def counts_rows(self) -> bool:
        """Whether R_p is needed in this step: for factors that are made of gradients, or for their
        number of terms."""
        return self._counts_terms or not self.of_gradients.isdisjoint(self.keys)

    @torch.no_grad()
    def end_step(self) -> None:
        """All passes of the step have ended. Each sum gets their number, also one that has no row
        here."""
        self._end_plain_pass()
        for group in self.inputs.parted() - self._told:
            self._told.add(group)
            logger.warning(
                f"ds_kfac: {', '.join(group)} had one input in the first captured step, and have "
                f"several in step "
                f"{self.step}: the factor A that they share has the rows of all of them. If their "
                f"inputs differ "
                "for good, exclude some of these layers (kfac.layers.exclude)"
            )
        for key in self.keys:
            counts = self._sum(key).counts
            if key in self.of_gradients:
                counts[PASSES].add_(self.passes)
            if self._counts_terms:
                counts[TERMS].add_(self.terms)
            if self.sampled and key in self.of_gradients and self.passes:
                # a sampled loss is not divided by their number
                self.sums[key].sum_P.mul_(1 / self.passes**2)

    # forward passes

    def _begin_forward(self, model: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        if self._recomputes():
            return
        self.leave()  # still entered if the last forward raised
        self._end_plain_pass()
        self._running = None  # of a pass that raised, which has no end
        self._tasks.clear()
        self._forward_runs = True
        self._thread = threading.get_ident()
        detached = all(x.grad_fn is None for x in tensors_of((arguments, keywords)))
        masks = (mask.to(self._device) for mask in masks_in(self.read_mask(arguments, keywords)))
        self._begin(Forward(masks, detached=detached, step=self.step, saved=self._saved))

    def _begin(self, forward: Forward) -> None:
        """Calls belong to this forward pass from now on."""
        self.forward = forward
        self._forwards.append(forward)
        self._begun.append(forward)

    def _end_forward(self, model: nn.Module, arguments: tuple, output: Any) -> None:
        if self._recomputes():
            return
        self._forward_runs = False
        forward = self.forward
        # who keeps an output does not keep the masks
        late = Forward(step=forward.step, saved=forward.saved)
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(
                    partial(self._output_reached, weakref.ref(forward), late)
                )
                forward.is_watched = True

    def _forward_of(self, recomputed: bool) -> Forward | None:
        """The forward pass of a call; None: it was not captured. Note: Recomputation."""
        if recomputed:
            if self._running is not None:
                return self._running
            if self._forward_runs:
                return self.forward
            made = self._made()
            if made is not None:
                self._comes_to(made)
                return made
            unwatched = [forward for forward in self._forwards if not forward.is_watched]
            return unwatched[-1] if unwatched else None
        # a method of the model is called in place of the model
        if self.forward not in self._forwards:
            self._begin(Forward(step=self.step, saved=self._saved))
        return self.forward

    def _made(self) -> Forward | None:
        """The forward pass of this step that made, or after which was made, the node that runs
        now."""
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        return next(
            (forward for forward in reversed(self._begun) if forward.begins <= number), None
        )

    # calls

    def _layer_called(
        self, layer: LayerSpec, module: nn.Module, inputs: tuple, named: dict[str, Any], output: Any
    ) -> None:
        weight: Any = module._parameters.get("weight")  # module.weight would make ZeRO-3 fetch it
        if weight is not None and not weight.requires_grad:
            self._other_called(layer.weight, module, inputs, output)
            return
        with self._guarded([layer]):
            # Megatron's linears return their bias, too
            output = output[0] if isinstance(output, tuple) else output
            if output.requires_grad:
                x = inputs[0] if inputs else next(iter(named.values()))
                leading = None if LAYERS[layer.kind].images else tuple(output.shape[:-1])
                rows = self._rows(
                    layer.weight, leading, LAYERS[layer.kind].rows(x, output), len(output)
                )
                if rows is not None:
                    self._called(
                        [Call(layer, LAYERS[layer.kind], module, rows, output.shape)], x, output
                    )

    def _other_called(self, name: str, module: nn.Module, inputs: tuple, output: Any) -> None:
        """A layer was called that K-FAC does not step. It may be the one nearest to the loss."""
        with self._guarded([]):
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor) and output.requires_grad:
                is_convolution = isinstance(module, nn.modules.conv._ConvNd)
                number = output.numel() // max(1, output.shape[1 if is_convolution else -1])
                rows = self._rows(
                    name, None if is_convolution else tuple(output.shape[:-1]), number, len(output)
                )
                if rows is not None:
                    node, place = _origin(output)
                    node.register_prehook(partial(self._other_arrived, rows, place))

    def _rows(self, layer: str, leading: Shape | None, number: int, examples: int) -> Rows | None:
        """The rows of a call, which its forward pass counts, but for those of a recomputation;
        None: its forward pass was not captured."""
        if self.rows.weight_sharing == "reduce":
            number = examples
        recomputed = self._recomputes()
        forward = self._forward_of(recomputed)
        if forward is None:
            return None
        if not recomputed:
            forward.note(layer, leading, number)
        return Rows(layer, forward, leading, number, recomputed)

    def _called(self, calls: Sequence[Call], x: Tensor, output: Tensor) -> None:
        """A layer was called with ``x`` and returned ``output``, or a product of x with the
        matrices of several layers did: then there is a call for each of these."""
        rows = calls[0].rows
        if any(call.layer.name in rows.forward.saved for call in calls):
            node_of_x = kept(x, multiplies=not calls[0].kind.needs_gradients)
            for call in calls:
                call.kept = node_of_x
        if rows.forward.step != self.step or (rows.recomputed and self.sampled):
            return  # sampled gradients go to the calls of the first run
        calls = [call for call in calls if call.layer.name not in self.failed]
        if not calls:
            return
        for call in calls:
            if x.numel():
                self.seen.add(call.layer.name)
            call.input = self.inputs.number(call.layer.name, x)
            self.inputs.called(call)
        node, place = _origin(output)
        if self.sampled:
            self.pending += [replace(call, edge=GradientEdge(node, place)) for call in calls]
        if not self.sampled or self.proof is not None:
            node.register_prehook(partial(self._arrived, calls, place))

    def _product(self, product: Product) -> None:
        layers = self._stacks[id(product.param)]
        with self._guarded(layers):
            self._multiplied(layers, product)

    def _multiplied(self, layers: Sequence[LayerSpec], product: Product) -> None:
        """Turn a product into calls of its layers. A stack's shared A gets all rows from its first
        layer."""
        x, output, first = product.x, product.output, layers[0]
        kind = LAYERS[first.kind]
        module = self._model.get_submodule(first.module)
        if product.window is not None or kind.images:
            if product.window == tuple(
                getattr(module, x, None) for x in ("stride", "padding", "dilation", "groups")
            ):
                rows = self._rows(first.weight, None, kind.rows(x, output), len(output))
                if rows is not None:
                    self._called([Call(first, kind, module, rows, output.shape)], x, output)
            return
        parts = parts_of(product, layers)
        if not parts:
            return
        leading = torch.Size(x.shape[:-1])
        is_whole = len(parts) == 1 and parts[0].picked is None
        number = sum(part.number for part in parts if part.sides != "A")
        examples = leading[0] if leading else 1
        rows = self._rows(first.weight, tuple(leading) if is_whole else None, number, examples)
        if rows is None:
            return
        calls = []
        for part in parts:
            shape = torch.Size(
                (*(leading if part.picked is None else (part.number,)), part.layer.G.dim)
            )
            call = Call(part.layer, kind, module, rows, shape, part.sides, select=part.picked)
            call.columns = product.columns
            call.to_rows = product.to_rows
            calls.append(call)
        self._called(calls, x, output)

    # gradients

    def _arrived(
        self, calls: Sequence[Call], place: int, gradients: tuple[Tensor | None, ...]
    ) -> None:
        """The gradient of an output has arrived at its node; ``calls`` are those that made the
        output."""
        nodes = [call.kept for call in calls]
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            for call in calls:
                call.kept = None  # autograd frees what its nodes saved, but not what ours did
        gradient = gradients[place]
        calls = [call for call in calls if call.layer.name not in self.failed]
        if gradient is None or not calls or not self._is_current(calls[0].rows.forward):
            return
        is_own = self._is_own(calls[0].rows.forward)
        self.outside += 0 if is_own else len(calls)
        if self.proof is None and (not is_own or self.sampled):
            return
        with self._guarded([call.layer for call in calls]):
            weight = self._weights[calls[0].layer.name]
            if not weight.requires_grad or not _runs(get_gradient_edge(weight).node):
                return
            # once: checkpointing refuses a second time
            x = None if nodes[0] is None else nodes[0].saved_tensors[0]
            is_announced = self in self._backwards
            if is_own and not self.sampled and not is_announced:
                self._watch_task()
                self.current.adds = True
            is_inner = self._forward_runs and not is_announced  # which DeepSpeed does not scale
            scale = 1.0 if is_inner else self._scale(is_announced)
            for call in calls:
                with self._guarded([call.layer]):
                    if self.sampled or not is_own:
                        self._prove(call, x, call.gradient_rows(gradient), others=not is_own)
                    else:
                        self._add(call, x, gradient, scale)

    def _other_arrived(self, rows: Rows, place: int, gradients: tuple[Tensor | None, ...]) -> None:
        """The gradient of a layer that K-FAC does not step has arrived."""
        gradient = gradients[place]
        if gradient is None or self.sampled or not self.counts_rows:
            return
        if not self._is_current(rows.forward) or not self._is_own(rows.forward):
            return
        if self not in self._backwards:
            if self._forward_runs:  # maybe autograd.grad
                return
            self._watch_task()
        with self._guarded([]):
            with_gradient = gradient.detach() != 0
            if rows.leading is not None:  # the node of a view has the shape of its base
                with_gradient = with_gradient.reshape(*rows.leading, gradient.shape[-1]).any(dim=-1)
            self.current.arrived(rows, with_gradient, self.rows.weight_sharing)

    def _is_current(self, forward: Forward) -> bool:
        """Whether a forward pass is of the running step, and that captures."""
        return self.active and forward.step == self.step

    def _is_own(self, forward: Forward) -> bool:
        """Whether the running backward pass is this engine's. Note: Own passes."""
        if self._backwards:
            return self in self._backwards
        return self._forward_runs or (forward.detached and not self._announced)

    def _add(
        self, call: Call, x: Tensor | None, gradient: Tensor | None, scale: Tensor | float
    ) -> None:
        """Add a call's rows to the sums.

        Args:
            gradient: of its output; None: the factors need none, and every row of an input counts
                but padding.
            scale: factor on the gradient.
        """
        self.counted += 1
        if gradient is not None:
            gradient = call.gradient_rows(gradient)
            if not self.sampled:  # else the true gradient's rows are proven
                self._prove(call, x, gradient)
        if x is not None:
            x = call.input_rows(x)
        makes_A = "A" in call.sides and self.inputs.key(call.layer) in self.keys
        makes_G = "G" in call.sides and call.layer.keys[1] in self.keys
        counts = self._counts_rows_of(call)
        if gradient is None:
            every = torch.ones(call.shape[:-1], dtype=torch.bool, device=self._device)
            with_gradient = every if call.mask is None else call.mask
            alive = with_gradient.any()
        elif makes_A or makes_G or counts or self.counts_rows or self.inputs.searching:
            with_gradient = have_gradient(call.kind, gradient)
            alive = self._gradient_arrived(call, gradient, with_gradient)
            self._add_gradient(call, x, gradient, alive, scale, makes_A=makes_A, makes_G=makes_G)
        else:
            self.current.reaches(call.rows)
            return
        if x is None:
            return
        if makes_A and not call.kind.needs_gradients:
            arrived = Input(call, x, alive if call.kind.images else with_gradient, alive)
            complete = self.inputs.complete(arrived)
            if complete is not None:
                self._add_input(complete)
        if counts:
            self._count_rows(call, x, with_gradient, alive)

    def _gradient_arrived(self, call: Call, gradient: Tensor, with_gradient: Tensor) -> Tensor:
        """Note the rows of a call that have a gradient. Returns the rows that count."""
        alive = self.current.arrived(call.rows, with_gradient, self.rows.weight_sharing)
        if self.rows.weight_sharing == "reduce":
            self.current.check_examples(call.rows, gradient)
        self.inputs.arrived(call.layer.name, call.input, alive)
        return alive

    def _add_gradient(
        self,
        call: Call,
        x: Tensor | None,
        gradient: Tensor,
        alive: Tensor,
        scale: Tensor | float,
        *,
        makes_A: bool,
        makes_G: bool,
    ) -> None:
        """Add to the sums of G, or to those of the A of a layer whose A needs gradients."""
        sums = self.current.sums
        if call.kind.needs_gradients:
            if makes_A:
                batch = self._sum(self.inputs.key(call.layer), sums)
                self.rows.add_gradients(call, x, gradient, alive, batch, scale)
        elif makes_G:
            G = call.layer.keys[1]
            batch = self._sum(G, sums)
            self.rows.add_gradients(call, x, gradient, alive, batch, scale, stride=self.keys[G])

    def _counts_rows_of(self, call: Call) -> bool:
        """Whether the rows of a call are counted: once for a layer, whose A may be another's."""
        if self.measured is None:
            return False
        is_entry_of_stack = call.layer.product and call.layer.part[1] > 1
        return ("G" if is_entry_of_stack else "A") in call.sides

    def _count_rows(self, call: Call, x: Tensor, with_gradient: Tensor, alive: Tensor) -> None:
        if call.kind.images:
            number = call.rows.number * alive
        else:
            number = kept_rows(x, with_gradient, call.mask).sum()
        assert self.measured is not None
        name = call.layer.name
        self.measured[name] = self.measured.get(name, 0) + number

    def _add_input(self, complete: Input) -> None:
        call, x, alive = complete.call, complete.x, complete.alive
        A = self.inputs.key(call.layer)
        kept_ = alive if call.kind.images else kept_rows(x, complete.with_gradient, call.mask)
        self.rows.add_inputs(call, x, kept_, alive, self._sum(A), stride=self.keys[A])

    def _prove(
        self, call: Call, x: Tensor | None, gradient: Tensor, *, others: bool = False
    ) -> None:
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
        self._announced = True
        self._backwards.append(self)
        watched: AbstractContextManager[None] = nullcontext()
        if self.active and self._products is not None:
            watched = self._products.backward()
        try:
            with watched:
                yield
        finally:
            self._backwards.remove(self)
            self._running = None
            self.leave()
            # else it came to no layer
            if self.active and not self.sampled and self.current.has_begun:
                self.end_pass()

    def add_asked(
        self,
        calls: Sequence[Call],
        gradients: Sequence[Tensor | None] | None,
        scale: Tensor | float,
    ) -> None:
        """Add some of :attr:`pending`, with the gradients, times ``scale``, that autograd was asked
        for. None: the loss does not depend on the call. Without ``gradients`` there is no G, and
        every row of an input counts but padding.
        """
        asked = [None] * len(calls) if gradients is None else gradients
        # in a backward pass's order
        for call, gradient in zip(reversed(calls), reversed(asked), strict=True):
            with self._guarded([call.layer]):
                if gradient is not None or gradients is None:
                    self._add(call, self.unpacked(call), gradient, scale)
        done = set(map(id, calls))
        self.pending = [call for call in self.pending if id(call) not in done]

    def rows_of_pass(
        self, calls: Sequence[Call], gradients: Sequence[Tensor | None]
    ) -> int | Tensor:
        """R_p of a pass of which autograd was asked for all gradients."""
        for call, gradient in zip(reversed(calls), reversed(gradients), strict=True):
            if gradient is not None:
                with_gradient = have_gradient(call.kind, call.gradient_rows(gradient))
                self.current.arrived(call.rows, with_gradient, self.rows.weight_sharing)
        return self.current.rows(self.rows.weight_sharing)

    @contextmanager
    def recomputing(self, forward: Forward) -> Iterator[None]:
        """Wraps what may recompute calls of a forward outside of its backward pass."""
        self._running = forward
        try:
            yield
        finally:
            self._running = None

    def unpacked(self, call: Call) -> Tensor:
        """The input of one of :attr:`pending`. With activation checkpointing this recomputes other
        calls, too, which are none of the step's."""
        with self.recomputing(call.rows.forward):
            self._unpacks = True
            try:
                return call.kept.saved_tensors[0]
            finally:
                self._unpacks = False

    def _recomputes(self) -> bool:
        """Whether a call that is made now is a recomputation, if any is."""
        return self._unpacks or torch._C._current_graph_task_id() != -1

    @torch.no_grad()
    def end_pass(self) -> None:
        """A backward pass has ended: what it summed counts R_p times."""
        ended, self.current = self.current, BackwardPass()
        rows = ended.rows(self.rows.weight_sharing) if self.counts_rows else 0
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
        for waiting in self.inputs.end_pass():
            with self._guarded([waiting.call.layer]):
                self._add_input(waiting)

    def _end_plain_pass(self) -> None:
        """End a pass that was not announced, if its end was not seen."""
        if not self.current.has_begun or self in self._backwards:
            return
        if self.current.adds:
            self.end_pass()
        else:
            self.current = BackwardPass()

    def _output_reached(
        self, reference: weakref.ref[Forward], late: Forward, gradients: tuple[Tensor | None, ...]
    ) -> None:
        """A backward pass has come to the output of a forward; ``late`` stands for one that is
        forgotten."""
        forward = reference() or late
        self._comes_to(forward)
        is_plain = not self.sampled and not self._backwards and self._is_own(forward)
        if is_plain and self._is_current(forward):
            self._watch_task()

    def _comes_to(self, forward: Forward) -> None:
        """The running graph task has come to a forward."""
        self._running = forward
        Variable._execution_engine.queue_callback(self._left)

    def _left(self) -> None:
        self._running = None

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
        """Keeps exceptions inside a hook, but for the one by which checkpointing ends a
        recomputation."""
        try:
            yield
        except _StopRecomputationError:
            raise
        except Exception as error:
            for layer in layers:
                self.fail(layer, error)
            if not layers:
                logger.warning(
                    f"ds_kfac: a hook of a layer without curvature raised {type(error).__name__}: "
                    f"{error}"
                )

    def fail(self, layer: LayerSpec, error: Exception) -> None:
        """A hook raised: the layer has no rows in this step, nor in later ones."""
        if layer.name in self.failed:
            return
        self.failed[layer.name] = f"{type(error).__name__}: {error}"
        logger.warning(
            f"ds_kfac: the rows of {layer.name or '(model)'} ({layer.kind}) are not known: its "
            f"factors stay as they "
            f"are, and from the next check of rows on it is without curvature: "
            f"{self.failed[layer.name]}"
        )
        for key in (self.inputs.key(layer), layer.keys[1]):
            self.sums.pop(key, None)
            self.current.sums.pop(key, None)

    def used(self, layer: str) -> str:
        """Text that says where a layer's weight is used; "" if that was not recorded."""
        return "" if self.uses is None else self.uses.of(layer)


def _origin(output: Tensor) -> tuple[Any, int]:
    """The node at which the gradient of an output arrives, and at which of its places. The output
    of a Linear with bias is a view; an in-place activation replaces a view's node, but not that of
    its base."""
    origin, base = output, output._base
    if base is not None and base.numel() == output.numel() and base.grad_fn is not None:
        origin = base
    assert origin.grad_fn is not None, "the output requires no gradient"
    return origin.grad_fn, origin.output_nr


def _runs(node: Any) -> bool:
    """Whether the running backward pass runs a parameter's node, and so adds to its gradient, as
    ``autograd.grad`` and other ``inputs`` do not."""
    # autograd.grad with its tensor among the inputs: the gradient goes to the caller
    with suppress(RuntimeError):
        return bool(torch._C._will_engine_execute_node(node))
    return False
