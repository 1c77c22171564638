"""What an update rule computes in a step: the results of a rank's layers."""

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
    """What holds at this step.

    Attributes:
        step: applied steps so far.
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
    """What a rank has computed, beside the results. Scalars are on the device, of which the host
    does not wait.

    Attributes:
        numbers: scalars that are summed over all ranks before :meth:`Direction.finish`.
        flags: of each of :attr:`Direction.layers`, fp32: 1 for layers of which
            :meth:`Direction.finish` asks. None: it asks of none.
        replaced: how many layers stood still because something was not finite, maybe the norm by
            which DeepSpeed clips.
        unused: how many layers' gradients were exactly zero, where the direction asks.
        limited: how many layers' gradients were scaled down for their running second moment.
        left_out: fp32 [layers] by :attr:`Direction.names`: 1 where a gradient was too large for
            moments, where it asks.
    """

    numbers: Sequence[Tensor] = ()
    flags: Tensor | None = None
    replaced: Tensor | float = 0.0
    unused: Tensor | float = 0.0
    limited: Tensor | float = 0.0
    left_out: Tensor | float = 0.0


class Direction:
    """One way of turning gradients into steps. Between its two halves results are sent, and numbers
    with them that are summed over all ranks.

    A subclass has :meth:`layer`, and maybe :meth:`finish`; one that steps layers together has
    :meth:`step` instead.

    Args:
        moments: what is kept of each layer's gradients; None: nothing.

    Attributes:
        layer_groups: this rank's layers and what is kept of them, those of one shape that are
            stepped in one batch, the largest first.
        layers, names: these layers, in the order of the groups.
        precision: of their products.
        recorded: what repeats the layers' step, if it is recorded.
        parameter_groups: layer name -> parameter groups of its parameters.
        last: squared norm of the last step's directions over all layers and ranks, a device scalar,
            and the rate of the first parameter group that they were multiplied by; None where the
            user's optimizer decides on the step.
    """

    recorded: RecordedStep | None = None
    last: tuple[Tensor, Any] | None = None

    def __init__(
        self, plan: Plan, exchange: GradientExchange, moments: type[Moments] | None
    ) -> None:
        self.config, self.exchange = plan.config, exchange
        self.parameter_groups = {
            layer.name: exchange.group_indices(layer) for layer in exchange.owned
        }
        self.precision = plan.precision
        groups = in_order(
            group_by_shape(exchange.owned, key=self.batch_key if plan.batched else None)
        )
        kept: dict[str, Any] = {
            "method": plan.method,
            "moments": moments,
            "precision": plan.precision,
        }
        self.layer_groups = [
            LayerGroup(layers, **kept, device=exchange.device) for layers in groups
        ]
        self.layers = [layer for group in self.layer_groups for layer in group.layers]
        self.names = [layer.name for layer in self.layers]

    def batch_key(self, layer: LayerSpec) -> Hashable:
        """Layers of one shape with equal keys may be stepped in one batch."""
        return layer.copies

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the layers' states: "peak_lr", parameter group ->
        largest learning rate so far, or nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`, after the layers' states were loaded. What is missing begins
        empty."""

    def step(self, context: StepContext, gradients: Gradients) -> Outcome:
        """The first half, of this rank's layers: each gradient is taken, each result put, once;
        moments change in place. Here one by one: :meth:`layer` steps those that have a basis, the
        others keep their gradients. A layer whose gradient or result is not finite stands still:
        its result is 0, its moments stay, and it counts as replaced. So do all layers where
        ``context.factor_is_zero``."""
        outcome = Outcome()
        for group in self.layer_groups:
            for index, layer in enumerate(group.layers):
                gradient, basis = gradients.pop(layer.name), group.preconditioner(index)
                result, moments = gradient, group.state(index).moments
                new = moments
                if basis is not None:
                    result, new = self.layer(context, layer, gradient, basis, moments)
                # no mask in memory
                sizes = [torch.linalg.vector_norm(x, ord=torch.inf) for x in (gradient, result)]
                moves = torch.stack(sizes).isfinite().all()
                if context.factor_is_zero is not None:
                    moves = moves & ~context.factor_is_zero
                outcome.replaced = outcome.replaced + (~moves).float()
                if new is not moments:
                    for old, now in zip(vars(moments).values(), vars(new).values(), strict=True):
                        torch.where(moves, now, old, out=old)
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
        """The step of one layer that has a basis.

        Where A or G has no range (an input that is always 0, the sum over a softmax's classes) the
        rotated gradient is rounding noise, of which a sign or Adam's quotient makes a whole step:
        :func:`ds_kfac.update.rotation.mask_null_space` makes it 0.

        A layer that the step did not use has a gradient of zeros, and whatever the moments make of
        it as a step: a rule that wants it to stand still multiplies by ``(gradient != 0).any()``.
        Nothing here may wait for the device.

        Args:
            gradient: fp32 of ``layer.shape``, as DeepSpeed would apply it: averaged, without a loss
                scale, clipped.
            basis: rotates into the eigenbasis and restores. Of a method that keeps none, which only
                a rule meets that does not need one, what ``Method.of_layer`` gives.
            moments: those of :meth:`UpdateRule.moments`.

        Returns the result, fp32 of the same shape, which the optimizer reads in place of the
        gradient; and new moments, which are copied into the old ones.
        """
        raise NotImplementedError

    def finish(
        self, context: StepContext, outcome: Outcome, totals: Sequence[Tensor], flags: Tensor | None
    ) -> Mapping[str, Tensor] | None:
        """The second half: layer name -> what its result is multiplied by, of all ranks' layers;
        None, as here: nothing.

        Args:
            outcome: what :meth:`step` gave.
            totals: ``Outcome.numbers``, summed over ranks.
            flags: ``Outcome.flags`` of all ranks' layers, bool, in the plan's order; None unless
                :meth:`UpdateRule.flags`.
        """
        return None
