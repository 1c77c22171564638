"""What an update rule computes in a step: for each layer of this rank, the tensor that takes the
gradient's place."""

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
        factor_is_zero: bool scalar on the device, whether DeepSpeed multiplies the gradients of
            this step by 0, as it does to clip an infinite norm: no layer may move then, nor change
            what is kept of its gradients. None: it multiplies them by nothing.
    """

    step: int
    groups: Sequence[Mapping[str, Any]]
    factor_is_zero: Tensor | None = None


@dataclass
class Outcome:
    """What a rank has computed in :meth:`Direction.step`, apart from the results themselves.

    Scalars stay on the device, so that the host does not wait for them. A count that an update rule
    does not make stays 0.

    Attributes:
        numbers: fp32 scalars that are summed over all ranks before :meth:`Direction.finish`.
        flags: fp32 [layers], in the order of :attr:`Direction.layers`: 1 or 0 for each layer, which
            :meth:`Direction.finish` gets from all ranks. None if it needs no flags.
        replaced: number of layers that stood still because something was not finite,
            such as the norm by which DeepSpeed clips.
        unused: number of layers whose gradient was exactly zero.
        limited: number of layers whose gradient was scaled down before it entered the running
            second moment.
        left_out: fp32 [layers], in the order of :attr:`Direction.names`: 1 where the gradient was
            too large for the moments.
    """

    numbers: Sequence[Tensor] = ()
    flags: Tensor | None = None
    replaced: Tensor | float = 0.0
    unused: Tensor | float = 0.0
    limited: Tensor | float = 0.0
    left_out: Tensor | float = 0.0


class Direction:
    """One way of turning gradients into results, in two halves: :meth:`step` and :meth:`finish`.

    Between the two halves the results are sent to the ranks that hold slices of them. The scalars
    of :attr:`Outcome.numbers` travel in the same message and are summed over all ranks.

    A subclass implements :meth:`layer`, which steps one layer. A subclass that steps several layers
    in one batch overrides :meth:`step` instead. :meth:`finish` is optional.

    Args:
        moments: class of what is kept of each layer's gradients; None if nothing is kept.

    Attributes:
        layer_groups: this rank's layers with their state. Layers of one shape that are stepped in
            one batch form a group. The largest matrices come first.
        layers, names: these layers and their names, in the order of the groups.
        precision: precision of the products that rotate gradients.
        recorded: repeats the layers' step from a recording; None if steps are not recorded.
        parameter_groups: layer name -> indices of the parameter groups of its parameters.
        last: ``(squared norm, learning rate)`` of the last step. The norm is that of the directions
            over all layers and ranks, a scalar on the device; the learning rate is the first
            parameter group's. None if the user's optimizer decides on the step.
    """

    recorded: RecordedStep | None = None
    last: tuple[Tensor, Any] | None = None

    def __init__(
        self, plan: Plan, exchange: GradientExchange, moments: type[Moments] | None
    ) -> None:
        self.config = plan.config
        self.exchange = exchange
        self.parameter_groups = {
            layer.name: exchange.group_indices(layer) for layer in exchange.owned
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
            for layers in in_order(group_by_shape(exchange.owned, key=batch_key))
        ]
        self.layers = [layer for group in self.layer_groups for layer in group.layers]
        self.names = [layer.name for layer in self.layers]

    def batch_key(self, layer: LayerSpec) -> Hashable:
        """Return a key of the layer. Layers of one shape may be stepped in one batch if their keys
        are equal."""
        return layer.copies

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the layers' states: "peak_lr", parameter group ->
        largest learning rate so far, or nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`, after the layers' states were loaded. What is missing begins
        empty."""

    def step(self, context: StepContext, gradients: Gradients) -> Outcome:
        """Compute the results of this rank's layers: the first half of a step.

        The method takes each gradient once, puts each result once, and changes moments in place.
        This implementation steps the layers one by one. A layer that has no eigenbasis yet keeps
        its gradient. A layer whose gradient or result is not finite stands still: its result is 0,
        its moments stay as they are, and it counts as replaced. So do all layers if
        ``context.factor_is_zero``.
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
                # the largest entry instead of isfinite(): no mask of the matrix's size in memory
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

        Nothing in this method may wait for the device. Two traps:

        - In the null space of A or G (an input that is always 0, the sum over a softmax's classes)
          the rotated gradient is rounding error. A sign, or Adam's quotient, scales this error up
          to a full step. Use :func:`ds_kfac.update.rotation.mask_null_space` to set it to 0.
        - A layer that the step did not use has a gradient of zeros, but its moments still produce a
          step. If the layer shall stand still, multiply the result by ``(gradient != 0).any()``.

        Args:
            gradient: fp32 of ``layer.shape``, as DeepSpeed would apply it: averaged, without the
                loss scale, clipped.
            basis: rotates into the eigenbasis and back. If ``preconditioner.method`` keeps no
                eigenbasis, which only a rule without ``needs_basis`` allows, this is what
                ``Method.of_layer`` returns.
            moments: the layer's moments, of the class that :meth:`UpdateRule.moments` returns.

        Returns ``(result, new moments)``. The result is fp32 of the gradient's shape; the optimizer
        reads it in place of the gradient. The new moments are copied into the old ones.
        """
        raise NotImplementedError

    def finish(
        self, context: StepContext, outcome: Outcome, totals: Sequence[Tensor], flags: Tensor | None
    ) -> Mapping[str, Tensor] | None:
        """Return what the results are multiplied by: the second half of a step.

        Args:
            outcome: what :meth:`step` returned.
            totals: ``Outcome.numbers``, summed over all ranks.
            flags: bool [layers of all ranks], ``Outcome.flags`` in the plan's order; None if
                :meth:`UpdateRule.flags` is false.

        Returns layer name -> a scalar, for the layers of all ranks. None, as here, leaves the
        results as they are.
        """
        return None
