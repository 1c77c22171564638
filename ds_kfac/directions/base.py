"""What an update rule is: a line of ``DIRECTIONS``."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, final

from torch import nn

from ds_kfac.config.keys import KFACConfig
from ds_kfac.config.resolve import adaptive, resolve
from ds_kfac.curvature.methods import METHODS
from ds_kfac.directions.direction import Direction
from ds_kfac.directions.facts import RuleFacts
from ds_kfac.metrics import Metrics
from ds_kfac.model.blocks import cut
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.scan import LayerChoice
from ds_kfac.plan.plan import Plan
from ds_kfac.update.state import Moments
from ds_kfac.zero.exchange import GradientExchange
from ds_kfac.zero.layout import ShardLayout


class UpdateRule(ABC):
    """One way of stepping along preconditioned gradients. ``DIRECTIONS`` lists the rules.

    A rule must have :meth:`claims` and :meth:`direction`. Every other member has a default for a
    rule that does not need it. The engine calls the final methods, which derive their answers from
    the others.

    Attributes:
        facts: what the report and the estimate say about the rule. No step depends on them.
        needs_basis: whether the rule steps in an eigenbasis. A ``preconditioner.method`` that keeps
            none is refused.
        blocks: blocks of the "kfac" config that only this rule reads.
        fisher: where G comes from if the config does not say.
        numbers: how many scalars of a step are summed over all ranks (``Outcome.numbers``).
        optimizer_type: name of the rule's own optimizer, as in ``"optimizer": {"type": ...}``.
            None: the rule works in front of any optimizer, and its steps depend on learning rates.
        marks: keys that the rule's own optimizer adds to its parameter groups to tell those of
            K-FAC from others.
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
        self, plan: Plan, exchange: GradientExchange, optimizer: Any, metrics: Metrics
    ) -> Direction:
        """Return the object that steps this rank's layers.

        Args:
            optimizer: the engine's innermost optimizer.
        """

    # what its steps need

    def moments(self, config: KFACConfig) -> type[Moments] | None:
        """Return what gradient workers keep of a layer's gradients between steps; None if they keep
        nothing."""
        return None

    def flags(self, config: KFACConfig) -> bool:
        """Whether :meth:`Direction.finish` asks for ``Outcome.flags``. A flag for each layer is
        then sent to all ranks in every step."""
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
        """Whether the step of each of the layer's outputs is independent of the other outputs if G
        is the identity. A large layer may then be cut into parts of its outputs."""
        return False

    # for a rule with an optimizer of its own, which DeepSpeed steps
    #
    # A config or an argument of deepspeed.initialize can ask for such a rule before there is an
    # engine if the rule has `given`, `optimizer_params` and `install`. Without them `claims` finds
    # the rule, but only at attach, and the estimate takes the last one of DIRECTIONS.

    def given(self, optimizer: Any) -> bool:
        """Whether this argument of ``deepspeed.initialize``, an optimizer object, asks for the
        rule."""
        return False

    def optimizer_params(self, ds_config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the parameters of the rule's own optimizer from a DeepSpeed config; None if the
        config does not name it. Raises ValueError for a wrong block."""
        return None

    def install(  # noqa: B027
        self, arguments: dict[str, Any], config: KFACConfig, ds_config: Mapping[str, Any]
    ) -> None:
        """Replace arguments of ``deepspeed.initialize``, which does not know the optimizer's name,
        so that the engine takes the rule's own optimizer."""

    def unstepped(self, parameters: Iterable[Any]) -> int:
        """Count the parameters that are in an optimizer object of the rule which no engine has
        taken and which is still referenced."""
        return 0

    def check_groups(  # noqa: B027
        self,
        model: nn.Module,
        layers: Sequence[LayerSpec],
        layout: ShardLayout,
        other_params: Sequence[nn.Parameter],
    ) -> None:
        """Raise ValueError if parameters are in groups where they would not be stepped as they
        should.

        Args:
            layout: where the gradients of the layers' parameters are. It knows the parameter group
                of every parameter.
            other_params: all other trained parameters.
        """

    def release(self, optimizer: Any) -> None:  # noqa: B027
        """Remove what K-FAC has put into the engine's innermost optimizer, because K-FAC is being
        detached from the engine."""

    # what the engine derives from the rest

    @final
    def resolved(
        self, config: KFACConfig, optimizer: str = ""
    ) -> tuple[KFACConfig, tuple[str, ...]]:
        """Return a config in which every null is resolved for this rule, and the reasons for the
        chosen values.

        Args:
            optimizer: class name of the engine's innermost optimizer.
        """
        name = config.preconditioner.method
        if self.needs_basis and not METHODS[name].rotates:
            raise ValueError(
                f'kfac.preconditioner.method "{name}" keeps no eigenbasis, in which '
                f'{self.optimizer_type or type(self).__name__} steps; use "eigen", or another '
                "optimizer"
            )
        self.check(config)
        is_adaptive = "preconditioner" in self.blocks and adaptive(optimizer)
        return resolve(config, fisher=self.fisher, blocks=self.blocks, adaptive=is_adaptive)

    @final
    def moments_count(self, config: KFACConfig) -> int:
        """Count the fp32 tensors of a gradient's shape that a gradient worker keeps."""
        moments = self.moments(config)
        if moments is None:
            return 0
        return sum("_OI" in part.name for part in fields(moments))  # type: ignore[arg-type]

    @final
    def rotates(self, config: KFACConfig) -> bool:
        """Whether moments are kept in the eigenbasis and rotated into each new one."""
        moments = self.moments(config)
        return moments is not None and moments.ROTATES

    @final
    def cut(self, config: KFACConfig, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        """Return the layers that the rule steps, with large ones cut: see
        ``ds_kfac/model/blocks.py``."""
        if not config.choice.shares:
            return tuple(layers)
        return cut(layers, partial(self.by_rows, config))
