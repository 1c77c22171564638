"""What an update rule is: a line of ``DIRECTIONS``, and what it computes in a step."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from ds_kfac.config.keys import KFACConfig
from ds_kfac.config.resolve import adaptive, resolve
from ds_kfac.curvature.eigen import LayerBasis
from ds_kfac.curvature.methods import METHODS
from ds_kfac.directions.facts import RuleFacts
from ds_kfac.directions.step_tensors import RecordedStep
from ds_kfac.metrics import Metrics
from ds_kfac.model.blocks import cut
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.scan import LayerChoice
from ds_kfac.plan.plan import Plan
from ds_kfac.update.groups import LayerGroup, group_by_shape, in_order
from ds_kfac.update.state import LayerState, Moments, PendingEigenvalues, PendingMoments
from ds_kfac.zero.exchange import GradientExchange, Outbox
from ds_kfac.zero.layout import ShardLayout


@dataclass(frozen=True)
class StepContext:
    """What holds at this step, for :meth:`Direction.local`.

    Attributes:
        step: applied steps so far.
        norm: global norm of all gradients as stored, a device scalar; None unless the engine clips.
        peak_lr: parameter group -> largest learning rate so far.
        fresh: layers with eigenbases that arrived in this step, and go if it is skipped.
        clip: device scalar that clips gradients; None unless the engine clips, and for a rule with an optimizer.
    """

    step: int
    norm: Tensor | None
    peak_lr: Mapping[int, Any]
    fresh: Collection[str] = ()
    clip: Tensor | None = None


@dataclass
class LocalResult:
    """What a rank computed for its layers in a step. Counts are device scalars, of which the host does not wait.

    Attributes:
        outbox: results, until they are sent.
        states: layer name -> state after this step.
        numbers: scalars that are summed over all ranks before :meth:`Direction.finish`.
        replaced: how many layers' results were not finite.
        unused: how many layers' gradients were exactly zero, where the direction asks.
        limited: how many layers' gradients were scaled down for their running second moment.
        left_out: fp32 [layers] by :attr:`Direction.names`: 1 where a gradient was too large for moments, where it asks.
        pending: what moments of ``states`` take in once the step was applied.
        norm: of all gradients, where the engine clips.
    """

    outbox: Outbox
    states: dict[str, LayerState]
    numbers: tuple[Tensor, ...] = ()
    replaced: Tensor | float = 0.0
    unused: Tensor | float = 0.0
    limited: Tensor | float = 0.0
    left_out: Tensor | float = 0.0
    pending: Sequence[PendingMoments | PendingEigenvalues] = ()
    norm: Tensor | None = None


class Direction:
    """One way of turning gradients into steps. Between its two halves results are sent, and scalars with them that are
    summed over all ranks.

    A subclass has :meth:`layer`, and maybe :meth:`finish`; one that steps layers together has :meth:`local` instead.

    Attributes:
        layer_groups: this rank's layers, those of one shape that are stepped in one batch, the largest first.
        layers, names: these layers, in the order of the groups.
        precision: of their products.
        recorded: what repeats the layers' step, if it is recorded.
        parameter_groups: layer name -> parameter groups of its parameters.
        last: squared norm of the last step's directions over all layers and ranks, a device scalar, and the rate of
            the first parameter group that they were multiplied by; None where the user's optimizer decides on the step.
    """

    recorded: RecordedStep | None = None
    last: tuple[Tensor, Any] | None = None

    def __init__(self, plan: Plan, layout: ShardLayout, exchange: GradientExchange) -> None:
        self.config, self.layout, self.exchange = plan.config, layout, exchange
        self.parameter_groups = {layer.name: exchange.group_indices(layer) for layer in exchange.owned}
        self.precision = plan.precision
        groups = in_order(group_by_shape(exchange.owned, key=self.batch_key if plan.batched else None))
        order = -1 if layout.last_first else 1  # as gradients lie in memory, so that a batch of them may be a view
        self.layer_groups = [LayerGroup(layers[::order], plan.precision) for layers in groups]
        self.layers = [layer for group in self.layer_groups for layer in group.layers]
        self.names = [layer.name for layer in self.layers]

    def batch_key(self, layer: LayerSpec) -> Hashable:
        """Layers of one shape with equal keys may be stepped in one batch."""
        return layer.copies

    def forget(self) -> None:
        """The layers' states are new ones: keep nothing of the old."""
        for group in self.layer_groups:
            group.forget()
        if self.recorded is not None:
            self.recorded.forget()

    def local(self, context: StepContext, gradients: dict[str, Tensor], states: dict[str, LayerState]) -> LocalResult:
        """The first half, of this rank's layers. Here one by one: :meth:`layer` steps those that have a basis, the
        others keep their gradients. So does one whose gradient is not finite, for DeepSpeed's check of overflow, or
        whose result is not: its moments are those of before, and it counts as replaced.

        Whoever overrides it hands a result for each layer to the outbox, once; gives ``LocalResult.numbers`` as many
        scalars as ``UpdateRule.numbers`` says; and writes into a gradient through the outbox alone, once it was read.

        Args:
            gradients: layer name -> matrix, with the loss scale, in the dtype in which it is stored. Emptied: a step
                holds a gradient or its result.
            states: layer name -> state, replaced by that of after the step.
        """
        local = LocalResult(self.exchange.outbox(), states)
        scale = self.layout.grad_scale()
        for layer in self.exchange.owned:
            state, gradient = states[layer.name], gradients.pop(layer.name).float()
            if context.clip is not None:
                gradient = gradient * context.clip
            result = gradient
            if state.preconditioner is not None:
                stepped, moments = self.layer(context, layer, gradient / scale, state.preconditioner, state.moments)
                sizes = [torch.linalg.vector_norm(x, ord=torch.inf) for x in (gradient, stepped)]  # no mask in memory
                finite = torch.stack(sizes).isfinite().all()
                result = torch.where(finite, stepped * scale, gradient)
                local.replaced = local.replaced + (~finite).float()
                states[layer.name] = replace(state, moments=chosen(finite, moments, state.moments))
            local.outbox.add([layer], [result])
        return local

    def layer(
        self, context: StepContext, layer: LayerSpec, gradient: Tensor, basis: LayerBasis, moments: Any
    ) -> tuple[Tensor, Moments | None]:
        """The step of one layer that has a basis.

        Of a rule that is not linear in the gradient a result has a size of its own, of which three things are to know:

        - The loss scale is out of the gradient, and out of the moments with it. :meth:`local` puts it back.
        - Where A or G has no range (an input that is always 0, the sum over a softmax's classes) the rotated gradient
          is rounding noise, of which a sign or Adam's quotient makes a whole step:
          :func:`ds_kfac.update.rotation.mask_null_space` makes it 0.
        - With an :attr:`UpdateRule.optimizer_type` DeepSpeed clips results, and reports their norm, in place of
          gradients: it must be that of the gradients. So give each layer's result the norm of its gradient; or scale
          all of them in :meth:`finish` and undo that in the optimizer, as ``kfac_adamw/direction.py`` does. A rule
          without one is given clipped gradients, and its results are not clipped again.

        A layer that the step did not use has a gradient of zeros, and whatever the moments make of it as a step: a rule
        that wants it to stand still multiplies by ``(gradient != 0).any()``. Nothing here may wait for the device.

        Args:
            gradient: fp32 of ``layer.shape``, without the loss scale, clipped as :attr:`StepContext.clip` says.
            basis: rotates into the eigenbasis and restores. Of a method that keeps none, which only a rule meets that
                does not need one, what ``Method.of_layer`` gives.
            moments: those of :meth:`UpdateRule.moments`.

        Returns the result, fp32 of the same shape and without the loss scale, which the optimizer reads in place of the
        gradient; and new moments, not the old ones changed, since a skipped step drops them.
        """
        raise NotImplementedError

    def finish(
        self, step: int, local: LocalResult, totals: Sequence[Tensor], prepared: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The second half: layer name -> what its result is multiplied by, of all ranks' layers; 1 if absent, as here.

        Args:
            step: applied steps so far.
            local: what :meth:`local` gave.
            totals: ``LocalResult.numbers``, summed over ranks.
            prepared: layer name -> bool scalar, whether it has eigenbases; empty unless
                :meth:`UpdateRule.asks_prepared`.
        """
        return {}


def chosen(new_or_old: Tensor, new: Moments | None, old: Moments | None) -> Moments | None:
    """One of two moments, which a bool scalar on the device says."""
    if new is None or old is None:
        return new
    parts = zip(vars(new).values(), vars(old).values(), strict=True)
    return type(new)(*(torch.where(new_or_old, *pair) for pair in parts))


class UpdateRule(ABC):
    """One way of stepping along preconditioned gradients. ``DIRECTIONS`` lists the rules.

    A rule must have :meth:`claims` and :meth:`direction`. Every other member has a default that is right for a rule
    that needs nothing of the kind. Final methods are what the engine works out of the others.

    Attributes:
        facts: what the report and the estimate say about the rule. No step depends on them.
        needs_basis: whether the rule steps in an eigenbasis. A ``preconditioner.method`` that keeps none is refused.
        blocks: blocks of the "kfac" config that only this rule reads.
        fisher: where G comes from if the config does not say.
        numbers: how many scalars of a step are summed over all ranks (``LocalResult.numbers``).
        optimizer_type: name of the rule's own optimizer, as in ``"optimizer": {"type": ...}``. DeepSpeed then clips,
            and checks for overflow, what the rule has made. None: the rule works in front of any optimizer. It clips
            gradients itself where the engine would, and its steps depend on learning rates.
        marks: keys that the rule's own optimizer adds to its parameter groups to tell those of K-FAC from others.
    """

    facts: RuleFacts = RuleFacts()
    needs_basis = True
    blocks: tuple[str, ...] = ()
    fisher = "empirical"
    numbers = 0
    optimizer_type: str | None = None
    marks: tuple[str, ...] = ()

    # what a rule must have

    @abstractmethod
    def claims(self, optimizer: Any) -> bool:
        """Whether an engine with this innermost optimizer follows the rule."""

    @abstractmethod
    def direction(
        self, plan: Plan, layout: ShardLayout, exchange: GradientExchange, optimizer: Any, metrics: Metrics
    ) -> Direction:
        """Make what steps this rank's layers.

        Args:
            optimizer: the engine's innermost optimizer.
        """

    # what its steps need

    def moments(self, config: KFACConfig) -> type[Moments] | None:
        """Return what gradient workers keep of a layer's gradients between steps; None if they keep nothing."""
        return None

    def asks_prepared(self, config: KFACConfig) -> bool:
        """Whether :meth:`Direction.finish` asks which layers have eigenbases. A flag for each layer is then sent to
        all ranks in every step."""
        return False

    def check(self, config: KFACConfig) -> None:  # noqa: B027  a rule may accept every config
        """Raise ValueError for a config that the rule cannot follow."""

    def scanned(self, config: KFACConfig) -> LayerChoice:
        """Return which layers of a model the rule steps, and what is kept of them.

        Args:
            config: resolved.
        """
        return config.choice

    def by_rows(self, config: KFACConfig, layer: LayerSpec) -> bool:
        """Whether the step of each of the layer's outputs is independent of the other outputs if G is the identity. A
        large layer may then be cut into parts of its outputs."""
        return False

    # for a rule with an optimizer of its own, which DeepSpeed steps
    #
    # A config or an argument of deepspeed.initialize can ask for such a rule before there is an engine if the rule has
    # `given`, `optimizer_params` and `install`. Without them `claims` finds the rule, but only at attach, and the
    # estimate takes the last one of DIRECTIONS.

    def given(self, optimizer: Any) -> bool:
        """Whether this argument of ``deepspeed.initialize``, an optimizer object, asks for the rule."""
        return False

    def optimizer_params(self, ds_config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the parameters of the rule's own optimizer from a DeepSpeed config; None if the config does not name
        it. Raises ValueError for a wrong block."""
        return None

    def install(  # noqa: B027
        self, arguments: dict[str, Any], config: KFACConfig, ds_config: Mapping[str, Any]
    ) -> None:
        """Replace arguments of ``deepspeed.initialize``, which does not know the optimizer's name, so that the engine
        takes the rule's own optimizer."""

    def unstepped(self, parameters: Iterable[Any]) -> int:
        """Count those of the parameters that are in one of the rule's own optimizer objects that no engine has taken,
        and that is still referenced."""
        return 0

    def check_groups(  # noqa: B027
        self, model: nn.Module, layers: Sequence[LayerSpec], layout: ShardLayout, other_params: ShardLayout
    ) -> None:
        """Raise ValueError if parameters are in groups where they would not be stepped as they should.

        Args:
            layout: where the gradients of the layers' parameters are.
            other_params: where those of all other parameters are.
        """

    def release(self, optimizer: Any) -> None:  # noqa: B027
        """Take what K-FAC has put there out of the engine's innermost optimizer. K-FAC leaves the engine."""

    # what the engine works out of the rest

    @final
    def resolved(self, config: KFACConfig, optimizer: str = "") -> tuple[KFACConfig, tuple[str, ...]]:
        """Return a config that the rule can follow, with its nulls answered, and the reasons for the answers.

        Args:
            optimizer: class name of the engine's innermost optimizer.
        """
        name = config.preconditioner.method
        if self.needs_basis and not METHODS[name].rotates:
            raise ValueError(
                f'kfac.preconditioner.method "{name}" keeps no eigenbasis, in which '
                f'{self.optimizer_type or type(self).__name__} steps; use "eigen", or another optimizer'
            )
        self.check(config)
        own = "preconditioner" in self.blocks and adaptive(optimizer)
        return resolve(config, fisher=self.fisher, blocks=self.blocks, adaptive=own)

    @final
    def moments_count(self, config: KFACConfig) -> int:
        """Count the fp32 tensors of a gradient's shape that a gradient worker keeps."""
        moments = self.moments(config)
        return 0 if moments is None else sum("_OI" in part.name for part in fields(moments))  # type: ignore[arg-type]

    @final
    def rotates(self, config: KFACConfig) -> bool:
        """Whether moments are kept in the eigenbasis, and turned into each new one."""
        moments = self.moments(config)
        return moments is not None and moments.ROTATES

    @final
    def cut(self, config: KFACConfig, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        """Return the layers that the rule steps, with large ones cut: see ``ds_kfac/model/blocks.py``."""
        return cut(layers, partial(self.by_rows, config)) if config.choice.shares else tuple(layers)
