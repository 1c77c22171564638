"""Base class for the computations of an update rule. In each step it computes, for each layer of
this rank, a result that replaces the gradient."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import LayerBasis
from ds_kfac.directions.step_tensors import RecordedStep
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.plan import Plan
from ds_kfac.update.groups import LayerGroup, group_by_shape, in_order
from ds_kfac.update.state import Moments
from ds_kfac.zero.exchange import GradientExchange, Gradients


@dataclass(frozen=True)
class StepContext:
    """Facts about the current training step that an update rule may read.

    Attributes:
        step: number of steps that were applied before this one.
        groups: the optimizer's parameter groups.
        factor_is_zero: bool scalar on the device. True if DeepSpeed multiplies the gradients of
            this step by 0, as it does when it clips by an infinite norm. The step must then change
            neither weights nor moments. None: DeepSpeed does not multiply gradients.
    """

    step: int
    groups: Sequence[Mapping[str, Any]]
    factor_is_zero: Tensor | None = None


@dataclass
class Outcome:
    """Numbers that a rank has computed in :meth:`Direction.step`, in addition to the results.

    Scalars stay on the device, so that the host does not wait for them. Counts that do not apply to
    an update rule stay 0.

    Attributes:
        numbers: fp32 scalars that are summed over all ranks before :meth:`Direction.finish`.
        flags: fp32 [layers], 1 or 0 for each layer in the order of :attr:`Direction.layers`. The
            rule defines what a flag means, and :meth:`Direction.finish` receives the flags of all
            ranks. None if the rule does not use flags.
        replaced: number of layers whose result was replaced by 0, because the gradient, the result,
            or the gradient norm that DeepSpeed uses for clipping was not finite.
        unused: number of layers whose gradient was exactly zero.
        limited: number of layers whose gradient was scaled down before it entered the running
            second moment.
        left_out: fp32 [layers], in the order of :attr:`Direction.names`: 1 if the layer's gradient
            was too large for the moments, else 0.
    """

    numbers: Sequence[Tensor] = ()
    flags: Tensor | None = None
    replaced: Tensor | float = 0.0
    unused: Tensor | float = 0.0
    limited: Tensor | float = 0.0
    left_out: Tensor | float = 0.0


class Direction:
    """Computes results from gradients in two calls: :meth:`step` and :meth:`finish`.

    Between the two calls the results are sent to the ranks that hold the gradients. The same
    message contains the scalars of :attr:`Outcome.numbers`, which are summed over all ranks.

    A subclass implements :meth:`layer`, which computes the result of one layer. A subclass that
    processes several layers in one batch overrides :meth:`step` instead. :meth:`finish` is
    optional.

    Args:
        moments: class of the moments that are kept for each layer; None: no moments are kept.

    Attributes:
        layer_groups: groups of this rank's layers with their state. A group consists of layers of
            the same shape that are processed in one batch. Groups with the largest matrices come
            first.
        layers, names: this rank's layers and their names, in the order of the groups.
        precision: precision of the products that rotate gradients.
        recorded: records a step's kernels as a CUDA graph, and replays them; None if steps are not
            recorded.
        parameter_groups: dict from layer name to a tuple of parameter group indices, one for each
            of the layer's parameters.
        last: ``(squared norm, learning rate)`` of the last step. The squared norm is that of the
            directions of all layers on all ranks together, a scalar on the device. The learning
            rate is that of the first parameter group. None if the rule leaves the step to the
            user's optimizer.
    """

    recorded: RecordedStep | None = None
    last: tuple[Tensor, Any] | None = None

    def __init__(
        self, plan: Plan, exchange: GradientExchange, moments: type[Moments] | None
    ) -> None:
        self.config = plan.config
        self.exchange = exchange
        self.parameter_groups = {
            layer.name: exchange.group_indices(layer) for layer in exchange.worker_layers
        }
        self.precision = plan.precision
        batch_key = self.batch_key if plan.batched else None
        self.layer_groups = [
            LayerGroup(
                layers,
                method=plan.method,
                moments=moments,
                precision=plan.precision,
                device=exchange.device,
            )
            for layers in in_order(group_by_shape(exchange.worker_layers, key=batch_key))
        ]
        self.layers = [layer for group in self.layer_groups for layer in group.layers]
        self.names = [layer.name for layer in self.layers]

    def batch_key(self, layer: LayerSpec) -> Hashable:
        """Return a layer's key. Layers of the same shape may be processed in one batch if their
        keys are equal."""
        return layer.copies

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs in addition to the layers' states. The state is
        empty, or has one entry "peak_lr": a dict from the index of a parameter group to the group's
        largest learning rate so far."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of :meth:`state`. Called after the layers' states were loaded.
        An entry that is missing from ``state`` starts empty."""

    def step(self, context: StepContext, gradients: Gradients) -> Outcome:
        """Compute the results of this rank's layers. This is the first half of a step.

        The method calls ``gradients.pop`` and ``exchange.put`` once for each layer, and changes
        moments in place. This implementation processes the layers one by one. If a layer has no
        eigenbasis yet, its result is its gradient. If a layer's gradient or result is not finite,
        its result is 0, its moments do not change, and it counts as replaced. If
        ``context.factor_is_zero`` is True, all layers are treated in this way.
        """
        outcome = Outcome()
        for group in self.layer_groups:
            for index, layer in enumerate(group.layers):
                gradient = gradients.pop(layer.name)
                basis = group.preconditioner(index)
                moments = group.state(index).moments
                result = gradient
                new_moments = moments
                if basis is not None:
                    result, new_moments = self.layer(context, layer, gradient, basis, moments)
                # the largest entry is tested, because isfinite() would need a mask of the matrix's
                # size
                largest = [torch.linalg.vector_norm(x, ord=torch.inf) for x in (gradient, result)]
                moves = torch.stack(largest).isfinite().all()
                if context.factor_is_zero is not None:
                    moves = moves & ~context.factor_is_zero
                outcome.replaced = outcome.replaced + (~moves).float()
                if new_moments is not moments:
                    pairs = zip(vars(moments).values(), vars(new_moments).values(), strict=True)
                    for old, new in pairs:
                        torch.where(moves, new, old, out=old)
                self.exchange.put([layer], [torch.where(moves, result, 0.0)])
        return outcome

    def layer(
        self,
        context: StepContext,
        layer: LayerSpec,
        gradient: Tensor,
        basis: LayerBasis,
        moments: Any,
    ) -> tuple[Tensor, Any]:
        """Compute the result of one layer that has an eigenbasis.

        This method must not wait for the device. Two cases need care:

        - In the null space of A or G, the rotated gradient consists of rounding errors. (A has a
          null space if an input is always 0. The G of a head has a null space, because the
          gradients of a softmax sum to 0 over the classes.) Taking signs, or dividing as Adam does,
          scales these errors up to a full step. Use :func:`ds_kfac.update.rotation.mask_null_space`
          to set them to 0.
        - If the step did not use a layer, its gradient is zero, but its moments may still
          produce a step. If the layer must not change, multiply the result by
          ``(gradient != 0).any()``.

        Args:
            gradient: fp32, of shape ``layer.shape``. DeepSpeed has averaged, unscaled and clipped
                it.
            basis: the layer's eigenbasis, whose methods rotate matrices into it and back. If
                ``preconditioner.method`` computes no eigenbases, this is the object that
                ``Method.of_layer`` returns. Only rules whose ``needs_basis`` is False allow such a
                method.
            moments: the layer's moments, of the class that :meth:`UpdateRule.moments` returns.

        Returns ``(result, new moments)``. The result is fp32 of the gradient's shape, and the
        optimizer reads it in place of the gradient. The new moments are copied into the old ones.
        """
        raise NotImplementedError

    def finish(
        self, context: StepContext, outcome: Outcome, totals: Sequence[Tensor], flags: Tensor | None
    ) -> Mapping[str, Tensor] | None:
        """Return factors by which the results are multiplied. This is the second half of a step.

        Args:
            outcome: what :meth:`step` returned.
            totals: ``Outcome.numbers``, summed over all ranks.
            flags: the ``Outcome.flags`` of all ranks as one tensor, bool [layers of all ranks], in
                the plan's order; None if :meth:`UpdateRule.flags` returns False.

        Returns a dict from layer name to factor (a scalar), for the layers of all ranks. If the
        method returns None, as this implementation does, results are not changed.
        """
        return None
