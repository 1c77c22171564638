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
from ds_kfac.directions.step_tensors import RecordedStep
from ds_kfac.metrics import Metrics
from ds_kfac.model.blocks import cut
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.scan import LayerChoice
from ds_kfac.plan.plan import Plan
from ds_kfac.update.groups import LayerGroup, group_by_shape, in_order
from ds_kfac.update.rotation import AT_ONCE
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
    """One way of stepping along preconditioned gradients: a line of ``DIRECTIONS``.

    A rule gives :meth:`claims`, :meth:`direction` and :meth:`described`. All else is a fact about it with a default
    that is right for a rule without it. What is final the engine works out of the facts.

    Attributes:
        needs_basis: whether it steps in an eigenbasis. A ``preconditioner.method`` that keeps none is then refused.
        blocks: blocks of the "kfac" config that no other rule reads.
        fisher: where G comes from unless the config says.
        numbers: how many scalars of a step are summed over all ranks (``LocalResult.numbers``).
        optimizer_type: of an optimizer of its own, in ``"optimizer": {"type": ...}``: DeepSpeed clips, and checks for
            overflow, what the rule has made. A config or an argument can name it, before there is an engine, with
            :meth:`optimizer_params`, :meth:`given` and :meth:`install` alone; without these the rule is known at attach
            only, by :meth:`claims`, and the estimator takes the last of ``DIRECTIONS``. None: it steps in front of any
            other; then it clips gradients itself where the engine would, and its steps depend on learning rates.
        marks: keys of that optimizer's parameter groups by which it knows those of K-FAC.
        passes: over a gradient, per step and gradient worker, in addition to those of preconditioning.
        without_curvature: what becomes of a layer that has no factors yet.
    """

    needs_basis = True
    blocks: tuple[str, ...] = ()
    fisher = "empirical"
    numbers = 0
    optimizer_type: str | None = None
    marks: tuple[str, ...] = ()
    passes = 0
    without_curvature = "a layer keeps its raw gradient"

    # what a rule must give

    @abstractmethod
    def claims(self, optimizer: Any) -> bool:
        """Whether an engine with this innermost optimizer follows this rule."""

    @abstractmethod
    def direction(
        self, plan: Plan, layout: ShardLayout, exchange: GradientExchange, optimizer: Any, metrics: Metrics
    ) -> Direction:
        """``optimizer``: the engine's innermost one."""

    @abstractmethod
    def described(self, plan: Plan, optimizer: str, ratio: float = 1.0) -> str:
        """The K-FAC part of a step, in words.

        Args:
            optimizer: its name.
            ratio: see :meth:`rates`.
        """

    # facts of its steps

    def moments(self, config: KFACConfig) -> type[Moments] | None:
        """What gradient workers keep of a layer's gradients between steps."""
        return None

    def asks_prepared(self, config: KFACConfig) -> bool:
        """Whether :meth:`Direction.finish` asks which layers have eigenbases, for which a flag of each travels."""
        return False

    def check(self, config: KFACConfig) -> None:  # noqa: B027  a rule may have none
        """Raise ValueError for a config that the rule cannot follow."""

    def scanned(self, config: KFACConfig) -> LayerChoice:
        """Which layers a model has for the rule, and what is kept of them, of a resolved config."""
        return config.choice

    def flops(self, config: KFACConfig, layer: LayerSpec, *, half: bool = False) -> int:
        """Per step and gradient worker, in addition to preconditioning. ``half``: where it has products in 16 bits."""
        return 0

    def by_rows(self, config: KFACConfig, layer: LayerSpec) -> bool:
        """Whether its step of an output does not depend on the others, where G is the identity: it multiplies by
        nothing but the factors. A large layer may then be cut into parts of its outputs."""
        return False

    def kept(self, plan: Plan, layers: Sequence[LayerSpec], device: str, *, in_place: bool) -> int:
        """Bytes that a worker of these layers keeps between steps beside its state and :meth:`workspace`.

        Args:
            device: its type.
            in_place: see :attr:`ds_kfac.zero.layout.ShardLayout.in_place`.
        """
        return 0

    def workspace(self, plan: Plan, groups: Sequence[Sequence[LayerSpec]]) -> list[tuple[Sequence[LayerSpec], int]]:
        """A worker's layers in the order in which it steps them, as many as are in memory at a time, and the bytes that
        they take beside the gradients, at most.

        Args:
            groups: its layers, those of one shape that are stepped in one batch.
        """
        corrected = plan.config.preconditioner.eigenvalues == "corrected"

        def copies(group: Sequence[LayerSpec]) -> int:
            """The gradient in fp32, clipped; rotated, on the way back, and back, or divided."""
            return 1 + (1 if corrected and stepped_by_rows(group) else 3 + corrected)

        return [(group, 4 * copies(group) * sum(layer.numel for layer in group)) for group in in_order(groups)]

    # facts for the report

    def others(self, optimizer: str, ratio: float, matrices: int) -> str:
        """How parameters in no layer are stepped, in words.

        Args:
            optimizer: its name.
            ratio: see :meth:`rates`.
            matrices: elements of them in matrices.
        """
        return f"{optimizer}, along their own gradients"

    def ratio(self, ds_config: Mapping[str, Any]) -> float:
        """What :meth:`rates` multiplies, of a config; an optimizer has it as ``adam_ratio``."""
        return 1.0

    def rates(self, plan: Plan, ratio: float) -> dict[str, float]:
        """Kind of parameters -> its rate as a multiple of the optimizer's lr, where kinds differ.

        Args:
            ratio: rate of what is in no layer, over lr.
        """
        return {}

    def choice(self, config: KFACConfig, layer: LayerSpec) -> str | None:
        """What is done to one layer, in words; None if all are treated alike."""
        return None

    def idle(self, config: KFACConfig, layers: Sequence[LayerSpec]) -> list[str]:
        """Settings of ``blocks`` that no layer is touched by."""
        return []

    # an optimizer of its own that DeepSpeed steps

    def given(self, optimizer: Any) -> bool:
        """Whether this argument of ``deepspeed.initialize``, an optimizer object, asks for the rule."""
        return False

    def optimizer_params(self, ds_config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Of its own optimizer, if a DeepSpeed config names it, else None. Raises ValueError for a wrong block."""
        return None

    def install(  # noqa: B027
        self, arguments: dict[str, Any], config: KFACConfig, ds_config: Mapping[str, Any]
    ) -> None:
        """Replace the arguments of ``deepspeed.initialize`` so that it takes the rule's own optimizer: it does not
        know the name."""

    def unstepped(self, parameters: Iterable[Any]) -> int:
        """How many of these are in an optimizer object of the rule's own that no engine has taken, and that somebody
        still holds."""
        return 0

    def check_groups(  # noqa: B027
        self, model: nn.Module, layers: Sequence[LayerSpec], layout: ShardLayout, other_params: ShardLayout
    ) -> None:
        """Raise ValueError if parameters are in groups where they would not be stepped as they should.

        Args:
            layout, other_params: of the parameters of ``layers``, and of all others.
        """

    def release(self, optimizer: Any) -> None:  # noqa: B027
        """K-FAC leaves the engine."""

    # what the engine works out of them

    @final
    def resolved(self, config: KFACConfig, optimizer: str = "") -> tuple[KFACConfig, tuple[str, ...]]:
        """A config that the rule can follow, with its nulls answered, and the reasons. ``optimizer``: its name."""
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
        """fp32 tensors of a gradient's shape that a gradient worker keeps."""
        moments = self.moments(config)
        return 0 if moments is None else sum("_OI" in part.name for part in fields(moments))  # type: ignore[arg-type]

    @final
    def rotates(self, config: KFACConfig) -> bool:
        """Whether they are kept in the eigenbasis, and go with it into the next one."""
        moments = self.moments(config)
        return moments is not None and moments.ROTATES

    @final
    def cut(self, config: KFACConfig, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        """The layers that the rule steps: see ``ds_kfac/model/blocks.py``."""
        return cut(layers, partial(self.by_rows, config)) if config.choice.shares else tuple(layers)


def stepped_by_rows(group: Sequence[LayerSpec]) -> bool:
    """Whether this is a large matrix whose rows no basis mixes, which is stepped some rows at a time."""
    layer = group[0]
    return len(group) == 1 and layer.groups == 1 and layer.numel > AT_ONCE and layer.G.block in (0, 1)
