"""Hooks on the layers. When the gradient of a call's output arrives, they add a a^T and g g^T to
the step's sums, for rows a of the input and g of the gradient. docs/explanation/capture.md explains
which rows count.

A captured step is one in which the hooks collect statistics. In a captured step the forward hook
saves the layer's input as autograd does (``calls.py``), and registers a prehook on the autograd
node of the output. When the gradient arrives there, the prehook adds the rows of a and g to the
step's sums. A call that gets no gradient adds no rows. In steps that are not captured, the hooks
return at once.

Note: Scale of G. G = K * sum_p (R_p * sum g^ g^^T). The outer sum is over backward passes p, and
    the inner sum is over the rows of pass p. g^ is a row's part of the averaged gradient, and K is
    the number of backward passes of the step, summed over all ranks. R_p is the number of rows of
    the layer nearest to the loss in pass p. The layer nearest to the loss is the first layer in the
    pass whose gradient is not zero. More calls of this layer may follow in the pass, so R_p is
    known only when the pass has ended. Therefore each pass has its own sums, which are multiplied
    by R_p when the pass ends. After the sums were reduced over ranks, ``step/factors.py``
    multiplies them by K, and corrects for the average over ranks. If the loss is a mean over the
    whole step instead of over each pass, G = M * sum g^ g^^T. This sum is over the rows of all
    passes, and M is the sum of R_p over all passes.

Note: Own passes. An engine collects statistics of its own loss only. An engine that trains a
    discriminator, for example, collects no statistics of the generator's loss, although the
    backward pass of that loss runs through the discriminator. The engine's own passes are the
    passes that it announces (:meth:`Capture.own_backward`). A backward pass inside the model's
    forward, as in DeepSpeed's tiled loss, is a part of the pass that follows. A plain
    ``loss.backward()`` is also an own pass if this engine has never announced a pass, no other
    engine has announced this pass, and the inputs of the forward have no autograd graph. A backward
    pass that does not add to the gradient of a layer's weight, such as ``torch.autograd.grad``,
    never counts.

Note: Recomputation. Activation checkpointing runs a part of the forward a second time, in the
    backward pass. Checkpointing compares the tensors that the two runs save, and raises an error in
    the user's backward pass if they differ. So a forward decides once which inputs it saves, and
    its recomputations save the same inputs. A recomputation belongs to the last forward whose
    output the running backward pass has reached. If the backward pass has not reached an output
    yet, for example because the loss is computed in tiles, the recomputation belongs to the last
    forward that began before the running autograd node was made. A backward pass may run after the
    step of its forward has ended. It then adds no rows, but its recomputations still save the
    tensors that the forward saved. Recomputations of a forward that was not captured save nothing.

Note: Kinds of hooks. Only a prehook on the output's autograd node works. A tensor hook would run
    before DeepSpeed divides the gradient by the accumulation steps, and a full backward hook breaks
    with in-place activations. No exception leaves a hook, because an exception would stop one rank
    in a backward pass that the other ranks finish.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import _StopRecomputationError

from ds_kfac.log import logger
from ds_kfac.model.calls import Call, Rows, node_that_saves
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
    """Installs the hooks, and holds the sums of the running step.

    The hooks do nothing unless :attr:`active` is True.

    Args:
        model: the model.
        layers: the layers whose rows are captured.
        scale: function that returns the loss scale of a backward pass, as a number or a scalar on
            the device. Its argument says whether the engine announced the pass.
        device: device of the sums.
        rows: the object that adds rows to the sums.
        inputs: the object that assigns numbers to inputs, to find layers that share inputs.
        sampled: whether G comes from gradients that are requested from autograd, such as the
            gradients of a sampled loss (:meth:`add_asked`). The calls then wait in :attr:`pending`.
            ``ds_kfac.fit`` requests all gradients in this way.
        counts_terms: whether :attr:`terms` is also needed in steps that update only factors made of
            inputs.
        mean_over_step: whether the loss is a mean over the whole step. See "Note: Scale of G".

    Attributes:
        sums: factor key -> the factor's sum in this step. A factor has no sum before its first row.
        keys: factor key -> stride, for the factors that are summed in this step. With a stride n,
            one of every n rows is taken.
        passes: number of the engine's own backward passes on this rank in the step.
        terms: sum of R_p over the backward passes that are counted in :attr:`passes`.
        current: the running backward pass.
        forward: the model's last forward pass, or a substitute for calls outside of forward passes.
        pending: calls whose gradient will be requested from autograd.
        proof: checks whether the captured rows make up the gradients (``proof.py``); None in steps
            without this check.
        uses: records which lines of code use a weight; None in steps without a proof.
        failed: layer name -> error that a hook raised. The rows of these layers are no longer
            captured.
        counted: number of calls in this step whose gradient arrived in one of the engine's own
            passes.
        outside: number of calls in this step whose gradient arrived in a pass that is not the
            engine's own.
        measured: layer name -> number of the layer's rows in this step, an int or a scalar on the
            device. None in a step that does not count rows.
        seen: names of the layers that had a row in this step, with or without a gradient.
        of_gradients: keys of the factors that are made of gradients.
        read_mask: returns the attention masks of a forward.
    """

    _backwards: ClassVar[list["Capture"]] = []
    """Captures in this process whose engine is running one of its own backward passes."""

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
        mean_over_step: bool = False,
    ) -> None:
        self._model = model
        self._scale = scale
        self._device = device
        self.rows = rows or RowSums()
        self.inputs = inputs or SharedInputs()
        self.sampled = sampled
        self._counts_terms = counts_terms
        self.mean_over_step = mean_over_step
        self.read_mask: ReadMask = ArgumentMasks(model)
        self.active = False
        self.failed: dict[str, str] = {}
        # groups of layers for which the user was warned that their inputs differ
        self._warned_groups: set[tuple[str, ...]] = set()
        self._announced = False  # whether a pass was ever announced
        self._thread = 0  # the thread that runs the forward
        self.step = -1
        self._forget()
        self._layers = tuple(layers)
        # names of the layers whose inputs this step's forwards save
        self._saved: frozenset[str] = frozenset()
        self._numels: dict[str, int] = {}
        self.of_gradients: set[str] = set()
        for layer in self._layers:
            A, G = layer.keys
            self._numels[A] = layer.A.numel
            self._numels[G] = layer.G.numel
            self.of_gradients.add(A if LAYERS[layer.kind].needs_gradients else G)
        parameters = dict(model.named_parameters())
        self._weights = {layer.name: parameters[layer.weight] for layer in self._layers}
        # parameter whose products are watched -> its layers, in the order of the stack
        self._stacks: dict[nn.Parameter, list[LayerSpec]] = {}
        self._handles: list[Any] = []
        self._products: Products | None = None
        self._install()

    def _forget(self) -> None:
        """Forget everything that belongs to the previous step."""
        self.sums: dict[str, BatchSum] = {}
        self.keys: Mapping[str, int] = {}
        self.passes = 0
        self.terms: int | Tensor = 0
        self.current = BackwardPass()
        self.forward = Forward()
        self._forwards: list[Forward] = []  # forwards whose backward pass has not ended
        self._begun: list[Forward] = []  # all forwards of the step
        self._running: Forward | None = None  # the one that the backward pass has reached
        self._unpacks = False  # whether an input is being read after its backward pass
        self.pending: list[Call] = []
        self.proof: Proof | None = None
        self.uses: Uses | None = None
        self._forward_runs = False
        self._tasks: set[int] = set()  # autograd's graph tasks of a pass that was not announced
        self.counted = 0
        self.outside = 0
        self.measured: dict[str, int | Tensor] | None = None
        self.seen: set[str] = set()

    # the hooks

    def _install(self) -> None:
        model = self._model
        self._hook(model.register_forward_pre_hook, model, self._begin_forward, with_kwargs=True)
        self._hook(model.register_forward_hook, model, self._end_forward, always_call=True)
        hooked = set[nn.Module]()
        multiplying: list[LayerSpec] = []
        for layer in self._layers:
            modules = [model.get_submodule(name) for name in (layer.module, *layer.also)]
            hooked.update(modules)
            if layer.product:
                multiplying.append(layer)
            else:
                for module in modules:
                    self._hook_layer(layer, module)
        for name, module in model.named_modules():
            if module not in hooked and is_linear_map(module):
                self._hook(
                    module.register_forward_hook,
                    module,
                    partial(self._other_called, name),
                    prepend=True,
                )
        if multiplying:
            self._hook_products(multiplying)

    def _hook_layer(self, layer: LayerSpec, module: nn.Module) -> None:
        """Hook a module. Each call of the module is then recorded as a call of the layer."""
        # This hook runs before the hooks of other code, which may replace the output. But if
        # gradients are requested from autograd, it runs after ZeRO-3's hook, which wraps the output
        # in a function that fetches the weights for the backward pass
        self._hook(
            module.register_forward_hook,
            module,
            partial(self._layer_called, layer),
            with_kwargs=True,
            prepend=not self.sampled,
        )

    def _hook_products(self, layers: Sequence[LayerSpec]) -> None:
        """Watch products with the matrices of these layers while the modules that compute the
        products run their forward."""
        model = self._model
        watched = {"": model}
        matrices: dict[nn.Parameter, int] = {}
        for layer in layers:
            names = [layer.module, *layer.also]
            # a module around a linear layer may multiply by the layer's weight
            if isinstance(model.get_submodule(layer.module), nn.Linear):
                around = layer.module.rpartition(".")[0]
                names += (around, around.rpartition(".")[0])
            watched |= {name: model.get_submodule(name) for name in names}
            weight = model.get_parameter(layer.weight)
            _, matrices[weight] = layer.part
            self._stacks.setdefault(weight, []).append(layer)
        self._products = Products(matrices, self._product)
        for module in watched.values():
            self._hook(module.register_forward_pre_hook, module, self._enter_module)
            # before the hooks of other code, because DeepSpeed's profiler restores functions of
            # torch that we replace
            self._hook(
                module.register_forward_hook,
                module,
                self._leave_module,
                always_call=True,
                prepend=True,
            )

    def _enter_module(self, module: nn.Module, inputs: tuple) -> None:
        assert self._products is not None
        self._products.enter(module)
        self._watch(self.active)

    def _leave_module(self, module: nn.Module, inputs: tuple, output: Any) -> None:
        assert self._products is not None
        self._products.leave(module)

    def _hook(
        self,
        register: Callable[..., Any],
        ours: nn.Module,
        function: Callable[..., None],
        **how: Any,
    ) -> None:
        """Register ``function`` as a hook that runs in captured forwards and their recomputations.

        It also runs in recomputations of forwards that an earlier step has captured. It does not
        run in traces, exports and torch.func, nor for copies of the module.

        Args:
            register: the module's method that registers the hook.
            ours: the module.
            function: the hook.
            how: keywords of ``register``.
        """

        def when_captured(module: nn.Module, *values: Any) -> None:
            is_traced = torch._C._get_tracing_state() is not None
            if is_traced or torch._C._functorch.peek_interpreter_stack() is not None:
                return
            is_others = self._forward_runs and self._thread != threading.get_ident()
            if self._recomputes() or (self.active and not is_others):
                function(module, *values)

        # torch.compile must not trace this function. ``disable`` is not used as a decorator,
        # because that would import torch's compiler together with ds_kfac
        untraced = torch.compiler.disable(when_captured)

        # torch.compile traces only the conditions in this function
        def hook(module: nn.Module, *values: Any) -> None:
            if not (torch.is_grad_enabled() and (self.active or self._running is not None)):
                return
            if module is ours and not torch.compiler.is_exporting():
                untraced(module, *values)

        self._handles.append(register(hook, **how))

    def remove(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()
        self.leave()
        self._watch(False)
        self.active = False

    def _watch(self, watched: bool) -> None:
        """Watch backward passes, or stop watching them. They are watched from a captured forward
        until its backward pass ends, or the step ends."""
        if self._products is not None:
            self._products.watch_backward(watched)

    def leave(self) -> None:
        """Record that no forward runs any more, and stop watching calls of torch."""
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
        """Prepare for a step, and forget the calls of the previous step.

        Args:
            keys: keys of the factors for which this rank collects statistics in the step. If this
                is a mapping, its values are strides: with a stride n, one of every n rows is taken.
                None: the hooks do nothing.
            step: number of the step. It decides which rows are in a sub-sample.
            measure: whether to count the rows of all layers.
            proof: gets the rows of all layers, to compare them with the gradients; None: this step
                makes no such comparison.
        """
        self._forget()
        self.inputs.begin_step()
        self._watch(False)
        self.active = keys is not None
        self.step = step
        self.rows.step = step
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
        """Whether R_p is needed in this step, for factors that are made of gradients or for the
        number of loss terms."""
        return self._counts_terms or not self.of_gradients.isdisjoint(self.keys)

    @torch.no_grad()
    def end_step(self) -> None:
        """End the step after its last pass, and store the numbers of passes and terms in the
        factors' sums.

        A factor without a row on this rank also gets a sum, so that each rank's numbers are
        included in the total over ranks.
        """
        self._end_plain_pass()
        self._watch(False)
        for group in self.inputs.parted() - self._warned_groups:
            self._warned_groups.add(group)
            logger.warning(
                f"ds_kfac: {', '.join(group)} had the same input in the first step that updated "
                f"factors, but different inputs in step {self.step}: the factor A that these "
                "layers share gets the rows of all these inputs. If the inputs will differ from "
                "now on, exclude some of the layers (kfac.layers.exclude)"
            )
        for key in self.keys:
            counts = self._sum(key).counts
            if key in self.of_gradients:
                counts[PASSES].add_(self.passes)
            if self._counts_terms or (self.mean_over_step and key in self.of_gradients):
                counts[TERMS].add_(self.terms)
            if self.sampled and key in self.of_gradients and self.passes:
                # a sampled loss is not divided by the number of passes
                self.sums[key].sum_P.mul_(1 / self.passes**2)

    # forward passes

    def _begin_forward(self, model: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        if self._recomputes():
            return
        self.leave()  # the mode is still entered if the last forward raised an error
        self._end_plain_pass()
        self._running = None  # it may be left over from a pass that an error has ended early
        self._tasks.clear()
        self._forward_runs = True
        self._thread = threading.get_ident()
        detached = all(x.grad_fn is None for x in tensors_of((arguments, keywords)))
        masks = (mask.to(self._device) for mask in masks_in(self.read_mask(arguments, keywords)))
        self._begin(Forward(masks, detached=detached, step=self.step, saved=self._saved))

    def _begin(self, forward: Forward) -> None:
        """Begin a forward pass. From now on, calls belong to it."""
        self.forward = forward
        self._forwards.append(forward)
        self._begun.append(forward)

    def _end_forward(self, model: nn.Module, arguments: tuple, output: Any) -> None:
        if self._recomputes():
            return
        self._forward_runs = False
        forward = self.forward
        # The prehook lives as long as the output. It refers to the forward weakly, so that a user
        # who keeps an output does not keep the masks
        late = Forward(step=forward.step, saved=forward.saved)
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(
                    partial(self._output_reached, weakref.ref(forward), late)
                )
                forward.is_watched = True

    def _forward_of(self, recomputed: bool) -> Forward | None:
        """Return the forward pass that a call belongs to; None if that pass was not captured. See
        "Note: Recomputation".

        Args:
            recomputed: whether the call is made inside of a backward pass.
        """
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
        # the user has called a method other than the model's forward
        if self.forward not in self._forwards:
            self._begin(Forward(step=self.step, saved=self._saved))
        return self.forward

    def _made(self) -> Forward | None:
        """Return the last forward pass of this step that began before the running autograd node was
        made; None if there is none."""
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        for forward in reversed(self._begun):
            if forward.begins <= number:
                return forward
        return None

    # calls

    def _layer_called(
        self, layer: LayerSpec, module: nn.Module, inputs: tuple, named: dict[str, Any], output: Any
    ) -> None:
        """Record a call of a layer's module.

        Args:
            inputs, named: positional and keyword arguments of the call. The first argument is the
                layer's input.
            output: result of the call.
        """
        weight: Any = module._parameters.get("weight")  # module.weight would make ZeRO-3 fetch it
        if weight is not None and not weight.requires_grad:
            self._other_called(layer.weight, module, inputs, output)
            return
        with self._guarded([layer]):
            # Megatron's linears also return their bias
            output = output[0] if isinstance(output, tuple) else output
            if not output.requires_grad:
                return
            x = inputs[0] if inputs else next(iter(named.values()))
            layer_type = LAYERS[layer.kind]
            leading = None if layer_type.images else tuple(output.shape[:-1])
            rows = self._rows(layer.weight, leading, layer_type.rows(x, output), len(output))
            if rows is not None:
                call = Call(layer, layer_type, module, rows, output.shape)
                self._called([call], x, output)

    def _other_called(self, name: str, module: nn.Module, inputs: tuple, output: Any) -> None:
        """Record a call of a linear map that K-FAC does not update. This map may be the layer
        nearest to the loss."""
        with self._guarded([]):
            output = output[0] if isinstance(output, tuple) else output
            if not isinstance(output, Tensor) or not output.requires_grad:
                return
            if isinstance(module, nn.modules.conv._ConvNd):
                leading = None
                channels = output.shape[1]
            else:
                leading = tuple(output.shape[:-1])
                channels = output.shape[-1]
            number = output.numel() // max(1, channels)
            rows = self._rows(name, leading, number, len(output))
            if rows is not None:
                node, output_nr = _origin(output)
                node.register_prehook(partial(self._other_arrived, rows, output_nr))

    def _rows(self, layer: str, leading: Shape | None, number: int, examples: int) -> Rows | None:
        """Return the rows of a call, and count them in its forward pass; None if that pass was not
        captured.

        The rows of a recomputation are not counted a second time.

        Args:
            layer: name of the parameter, or of the module.
            leading: leading dimensions of the rows; None if no mask can fit them.
            number: number of rows.
            examples: size of the rows' first dimension.
        """
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
        """Save the input of a call, and wait for the gradient of its output.

        Args:
            calls: one call for each layer whose matrix x was multiplied by, usually a single call.
            x: the input.
            output: the result.
        """
        rows = calls[0].rows
        if any(call.layer.name in rows.forward.saved for call in calls):
            node_of_x = node_that_saves(x, multiplies=not calls[0].kind.needs_gradients)
            for call in calls:
                call.kept = node_of_x
        if rows.forward.step != self.step or (rows.recomputed and self.sampled):
            return  # requested gradients belong to calls of the first run, not of a recomputation
        calls = [call for call in calls if call.layer.name not in self.failed]
        if not calls:
            return
        for call in calls:
            if x.numel():
                self.seen.add(call.layer.name)
            call.input = self.inputs.number(call.layer.name, x)
            self.inputs.called(call)
        node, output_nr = _origin(output)
        if self.sampled:
            edge = GradientEdge(node, output_nr)
            self.pending += [replace(call, edge=edge) for call in calls]
        if not self.sampled or self.proof is not None:
            node.register_prehook(partial(self._arrived, calls, output_nr))

    def _product(self, product: Product) -> None:
        """Record a product with the matrices of some layers."""
        layers = self._stacks[product.param]
        with self._guarded(layers):
            if product.window is not None or LAYERS[layers[0].kind].images:
                self._convolved(layers[0], product)
            else:
                self._multiplied(layers, product)

    def _convolved(self, layer: LayerSpec, product: Product) -> None:
        """Turn a convolution with a layer's weight into a call of the layer, if its stride, padding
        and other settings equal the settings of the layer's module."""
        module = self._model.get_submodule(layer.module)
        names = ("stride", "padding", "dilation", "groups")
        if product.window != tuple(getattr(module, name, None) for name in names):
            return
        layer_type = LAYERS[layer.kind]
        output = product.output
        number = layer_type.rows(product.x, output)
        rows = self._rows(layer.weight, None, number, len(output))
        if rows is not None:
            call = Call(layer, layer_type, module, rows, output.shape)
            self._called([call], product.x, output)

    def _multiplied(self, layers: Sequence[LayerSpec], product: Product) -> None:
        """Turn a product into calls of its layers. If the layers of a stack share one A, the call
        of the first layer adds the rows of all layers to this A."""
        first = layers[0]
        parts = parts_of(product, layers)
        if not parts:
            return
        leading = torch.Size(product.x.shape[:-1])
        is_plain = len(parts) == 1 and parts[0].picked is None
        number = sum(part.number for part in parts if part.sides != "A")
        examples = leading[0] if leading else 1
        rows = self._rows(first.weight, tuple(leading) if is_plain else None, number, examples)
        if rows is None:
            return
        module = self._model.get_submodule(first.module)
        calls = []
        for part in parts:
            leading_of_part = leading if part.picked is None else (part.number,)
            call = Call(
                layer=part.layer,
                kind=LAYERS[first.kind],
                module=module,
                rows=rows,
                shape=torch.Size((*leading_of_part, part.layer.G.dim)),
                sides=part.sides,
                select=part.picked,
                columns=product.columns,
                to_rows=product.to_rows,
            )
            calls.append(call)
        self._called(calls, product.x, product.output)

    # gradients

    def _arrived(
        self, calls: Sequence[Call], output_nr: int, gradients: tuple[Tensor | None, ...]
    ) -> None:
        """Add the rows of calls to the sums, after the gradient of the calls' output has arrived at
        the output's node.

        Args:
            calls: the calls that made the output.
            output_nr: index of the calls' output among the node's outputs.
            gradients: the gradients of all the node's outputs.
        """
        node_of_x = calls[0].kept  # the same for all calls
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            for call in calls:
                call.kept = None  # autograd frees what its nodes saved, but not what ours saved
        gradient = gradients[output_nr]
        calls = [call for call in calls if call.layer.name not in self.failed]
        if gradient is None or not calls or not self._is_current(calls[0].rows.forward):
            return
        is_own = self._is_own(calls[0].rows.forward)
        if not is_own:
            self.outside += len(calls)
        if self.proof is None and (not is_own or self.sampled):
            return
        with self._guarded([call.layer for call in calls]):
            weight = self._weights[calls[0].layer.name]
            if not weight.requires_grad or not _runs(get_gradient_edge(weight).node):
                return
            # read once for all calls, because checkpointing refuses to unpack a tensor twice
            x = None if node_of_x is None else node_of_x.saved_tensors[0]
            is_announced = self in self._backwards
            if is_own and not self.sampled and not is_announced:
                self._watch_task()
                self.current.adds = True
            # DeepSpeed does not scale the loss of a backward pass inside of the forward
            is_inner = self._forward_runs and not is_announced
            scale = 1.0 if is_inner else self._scale(is_announced)
            for call in calls:
                with self._guarded([call.layer]):
                    if self.sampled or not is_own:
                        self._prove(call, x, call.gradient_rows(gradient), others=not is_own)
                    else:
                        self._add(call, x, gradient, scale)

    def _other_arrived(
        self, rows: Rows, output_nr: int, gradients: tuple[Tensor | None, ...]
    ) -> None:
        """Record the gradient of a layer that K-FAC does not update."""
        gradient = gradients[output_nr]
        if gradient is None or self.sampled or not self.counts_rows:
            return
        if not self._is_current(rows.forward) or not self._is_own(rows.forward):
            return
        if self not in self._backwards:
            if self._forward_runs:  # the gradient may come from autograd.grad
                return
            self._watch_task()
        with self._guarded([]):
            with_gradient = gradient.detach() != 0
            if rows.leading is not None:  # the node of a view has the shape of its base
                with_gradient = with_gradient.reshape(*rows.leading, gradient.shape[-1]).any(dim=-1)
            self.current.arrived(rows, with_gradient, self.rows.weight_sharing)

    def _is_current(self, forward: Forward) -> bool:
        """Return whether a forward pass belongs to the running step and that step collects
        statistics."""
        return self.active and forward.step == self.step

    def _is_own(self, forward: Forward) -> bool:
        """Return whether the running backward pass is an own pass of this engine, see "Note: Own
        passes"."""
        if self._backwards:
            return self in self._backwards
        return self._forward_runs or (forward.detached and not self._announced)

    def _add(
        self, call: Call, x: Tensor | None, gradient: Tensor | None, scale: Tensor | float
    ) -> None:
        """Add a call's rows to the sums.

        Args:
            call: the call.
            x: the call's input, or the input of the whole product; None if it was not saved.
            gradient: the gradient of the output; None if the factors need no gradients. All rows of
                the input then count, except padding.
            scale: factor by which the loss was multiplied. The gradient is divided by it.
        """
        self.counted += 1
        if gradient is not None:
            gradient = call.gradient_rows(gradient)
            # with a sampled loss, the proof compares only the true loss's rows with the gradient
            if not self.sampled:
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
        """Record which rows of a call have a gradient. Returns a bool scalar that says whether any
        row has a gradient."""
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
        """Add a call's gradient to the sum of G, or to the sum of A if the layer's A is made of
        gradients."""
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
        """Return whether to count the rows of a call.

        Each row of a layer is counted once. In a stack, only calls that add rows to G are counted,
        because a layer may use another layer's A.
        """
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
        """Add an input to the sum of A."""
        call = complete.call
        x = complete.x
        alive = complete.alive
        A = self.inputs.key(call.layer)
        counts = alive if call.kind.images else kept_rows(x, complete.with_gradient, call.mask)
        self.rows.add_inputs(call, x, counts, alive, self._sum(A), stride=self.keys[A])

    def _prove(
        self, call: Call, x: Tensor | None, gradient: Tensor, *, others: bool = False
    ) -> None:
        if self.proof is not None and "G" in call.sides and x is not None:
            self.proof.see(call, call.input_rows(x), gradient, others=others)

    def _sum(self, key: str, sums: dict[str, BatchSum] | None = None) -> BatchSum:
        """Return the sum of a factor. If the factor has no sum, create an empty one.

        Args:
            key: key of the factor.
            sums: dict from factor key to sum, in which the sum is looked up or created. None: the
                step's sums.
        """
        sums = self.sums if sums is None else sums
        if key not in sums:
            sums[key] = BatchSum.empty(self._numels[key], self._device)
        return sums[key]

    # backward passes

    @contextmanager
    def own_backward(self) -> Iterator[None]:
        """Announce the backward pass that runs in this context as the engine's own.

        Use this context also in steps that collect no statistics.
        """
        self._announced = True
        self._backwards.append(self)
        self._watch(self.active)  # needed if the pass runs on a retained graph
        try:
            yield
        finally:
            self._backwards.remove(self)
            self._running = None
            self.leave()
            # a pass that reached no layer has not begun
            if self.active and not self.sampled and self.current.has_begun:
                self.end_pass()
            self._watch(self.active and bool(self._forwards))

    def add_asked(
        self,
        calls: Sequence[Call],
        gradients: Sequence[Tensor | None] | None,
        scale: Tensor | float,
    ) -> None:
        """Add the rows of some of the :attr:`pending` calls to the sums.

        Args:
            calls: the calls.
            gradients: for each call the gradient of its output, or None if the loss does not depend
                on the output. If None is passed instead of a sequence, G gets no rows, and in A all
                rows count except padding.
            scale: factor by which the loss was multiplied. The gradients are divided by it.
        """
        asked = [None] * len(calls) if gradients is None else gradients
        # in the order of a backward pass
        for call, gradient in zip(reversed(calls), reversed(asked), strict=True):
            with self._guarded([call.layer]):
                if gradient is not None or gradients is None:
                    self._add(call, self.unpacked(call), gradient, scale)
        done = set(calls)
        self.pending = [call for call in self.pending if call not in done]

    def rows_of_pass(
        self, calls: Sequence[Call], gradients: Sequence[Tensor | None]
    ) -> int | Tensor:
        """Return R_p of a pass whose gradients were all requested from autograd.

        Args:
            calls: all calls of the pass.
            gradients: the gradients of their outputs; None for each output on which the loss does
                not depend.
        """
        for call, gradient in zip(reversed(calls), reversed(gradients), strict=True):
            if gradient is not None:
                with_gradient = have_gradient(call.kind, call.gradient_rows(gradient))
                self.current.arrived(call.rows, with_gradient, self.rows.weight_sharing)
        return self.current.rows(self.rows.weight_sharing)

    @contextmanager
    def recomputing(self, forward: Forward) -> Iterator[None]:
        """Record that calls made in this context may be recomputations of a forward, although no
        backward pass runs."""
        self._running = forward
        try:
            yield
        finally:
            self._running = None

    def unpacked(self, call: Call) -> Tensor:
        """Return the input of one of the :attr:`pending` calls.

        With activation checkpointing this may recompute other calls, which do not count.
        """
        with self.recomputing(call.rows.forward):
            self._unpacks = True
            try:
                return call.kept.saved_tensors[0]
            finally:
                self._unpacks = False

    def _recomputes(self) -> bool:
        """Return whether calls that are made now are recomputations."""
        return self._unpacks or torch._C._current_graph_task_id() != -1

    @torch.no_grad()
    def end_pass(self) -> None:
        """End the running backward pass, and add its sums to the sums of the step. Unless the loss
        is a mean over the step, the pass's sums are first multiplied by R_p."""
        ended = self.current
        self.current = BackwardPass()
        rows = ended.rows(self.rows.weight_sharing) if self.counts_rows else 0
        self.passes += 1
        self.terms = self.terms + rows
        for key, batch in ended.sums.items():
            if not self.mean_over_step:
                batch.sum_P.mul_(rows)
            if key in self.sums:
                self.sums[key].add_(batch)
            else:
                self.sums[key] = batch
        self._forwards = [forward for forward in self._forwards if forward not in ended.forwards]
        self._watch(bool(self._forwards))
        self._tasks.clear()
        for waiting in self.inputs.end_pass():
            with self._guarded([waiting.call.layer]):
                self._add_input(waiting)

    def _end_plain_pass(self) -> None:
        """End a pass that was not announced, if no hook has noticed its end."""
        if not self.current.has_begun or self in self._backwards:
            return
        if self.current.adds:
            self.end_pass()
        else:
            self.current = BackwardPass()

    def _output_reached(
        self, reference: weakref.ref[Forward], late: Forward, gradients: tuple[Tensor | None, ...]
    ) -> None:
        """Record that a backward pass has reached the output of a forward.

        Args:
            reference: refers to the forward.
            late: used in place of the forward if the capture has forgotten it.
        """
        forward = reference() or late
        self._comes_to(forward)
        is_plain = not self.sampled and not self._backwards and self._is_own(forward)
        if is_plain and self._is_current(forward):
            self._watch_task()

    def _comes_to(self, forward: Forward) -> None:
        """Record that autograd's running graph task has reached a forward."""
        self._running = forward
        Variable._execution_engine.queue_callback(self._left)

    def _left(self) -> None:
        self._running = None

    def _watch_task(self) -> None:
        """Make the end of the running graph task end the pass, unless a graph task around it still
        runs."""
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
        """Catch the exceptions of a hook, except the exception by which checkpointing ends a
        recomputation.

        Args:
            layers: the layers whose rows are dropped after an exception, see :meth:`fail`.
        """
        try:
            yield
        except _StopRecomputationError:
            raise
        except Exception as error:
            for layer in layers:
                self.fail(layer, error)
            if not layers:
                logger.warning(
                    "ds_kfac: a hook on a layer that K-FAC does not precondition raised "
                    f"{type(error).__name__}: {error}"
                )

    def fail(self, layer: LayerSpec, error: Exception) -> None:
        """Drop the rows of a layer whose hook raised an error, in this step and all later steps."""
        if layer.name in self.failed:
            return
        self.failed[layer.name] = f"{type(error).__name__}: {error}"
        logger.warning(
            f"ds_kfac: the rows of {layer.name or '(model)'} ({layer.kind}) are not known, because "
            "a hook of K-FAC raised an error. The layer's factors stay as they are, and after the "
            "next check of its rows the layer has no curvature. "
            f"The error: {self.failed[layer.name]}"
        )
        for key in (self.inputs.key(layer), layer.keys[1]):
            self.sums.pop(key, None)
            self.current.sums.pop(key, None)

    def used(self, layer: str) -> str:
        """Return text that says where a layer's weight is used; "" if that was not recorded."""
        return "" if self.uses is None else self.uses.of(layer)


def _origin(output: Tensor) -> tuple[Any, int]:
    """Return the autograd node at which the gradient of an output arrives, and the index of this
    output among the node's outputs.

    The output of a Linear with a bias is a view. An in-place activation replaces the view's node,
    but not the node of the view's base, so the node of the base is taken.
    """
    origin = output
    base = output._base
    if base is not None and base.numel() == output.numel() and base.grad_fn is not None:
        origin = base
    assert origin.grad_fn is not None, "the output requires no gradient"
    return origin.grad_fn, origin.output_nr


def _runs(node: Any) -> bool:
    """Return whether the running backward pass executes a parameter's autograd node, and so adds to
    the parameter's gradient.

    ``autograd.grad`` does not execute the node, nor does a backward pass whose ``inputs`` do not
    contain the parameter.
    """
    # the function raises if autograd.grad was called for the node's own tensor
    with suppress(RuntimeError):
        return bool(torch._C._will_engine_execute_node(node))
    return False
