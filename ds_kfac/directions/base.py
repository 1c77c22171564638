"""Base class of the update rules."""

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

DISABLED = (
    'the optimizer {optimizer} needs K-FAC, but the "kfac" block has "enabled": false; to train '
    'without K-FAC, use "AdamW"'
)
"""Error message for a config that names a rule's own optimizer but disables K-FAC."""


class UpdateRule(ABC):
    """A way of computing steps from preconditioned gradients. ``DIRECTIONS`` lists the rules.

    A rule must define :meth:`claims` and :meth:`direction`. All other members have defaults. The
    engine calls the methods marked ``@final``, which use the other members.

    Attributes:
        facts: descriptions and costs of the rule, for the report and the estimate. They do not
            affect training.
        needs_basis: whether the rule needs eigenbases. If True, attaching K-FAC raises an error if
            ``preconditioner.method`` computes no eigenbases.
        blocks: names of the blocks in the "kfac" config that only this rule reads.
        fisher: default of ``factor.fisher`` in the config.
        numbers: number of scalars that the rule sums over all ranks in each step, see
            ``Outcome.numbers``.
        optimizer_type: name of the rule's own optimizer, as in ``"optimizer": {"type": ...}``.
            None: the rule only replaces gradients, so that any optimizer can be used.
        marks: keys that the rule's own optimizer adds to its parameter groups, to distinguish the
            groups of K-FAC's layers from all other groups.
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
        """Whether the rule is used by an engine whose innermost optimizer is ``optimizer``."""

    @abstractmethod
    def direction(
        self, plan: Plan, exchange: GradientExchange, optimizer: Any, metrics: Metrics
    ) -> Direction:
        """Return the object that computes results (new gradients or weight updates) for the layers
        that this rank preconditions.

        Args:
            optimizer: the engine's innermost optimizer.
        """

    # what the rule's steps need

    def moments(self, config: KFACConfig) -> type[Moments] | None:
        """Return the class of the moments that gradient workers (the ranks that precondition a
        layer) keep for the layer between steps, or None if they do not keep moments."""
        return None

    def flags(self, config: KFACConfig) -> bool:
        """Whether :meth:`Direction.finish` needs ``Outcome.flags``. If so, a flag for each layer is
        sent to all ranks in every step."""
        return False

    def check(self, config: KFACConfig) -> None:  # noqa: B027  a rule may accept every config
        """Raise ValueError if the rule does not support the config."""

    def scanned(self, config: KFACConfig) -> LayerChoice:
        """Return the options of the model scan. They decide which of a model's layers the rule
        updates.

        Args:
            config: config in which nulls have been replaced by values, see :meth:`resolved`.
        """
        return config.choice

    def by_rows(self, config: KFACConfig, layer: LayerSpec) -> bool:
        """Whether, if G is the identity, the rule computes the step of each output (row) of the
        layer independently of all other outputs. If so, a large layer may be cut into parts, each
        with some of the outputs."""
        return False

    # members for a rule that has an optimizer of its own
    #
    # If the rule defines `given`, `optimizer_params` and `install`, the config or an argument of
    # deepspeed.initialize selects the rule before an engine exists. Otherwise `claims` selects the
    # rule when K-FAC is attached. The estimate has no engine, so it cannot call `claims`, and
    # assumes the last rule of DIRECTIONS.

    def given(self, optimizer: Any) -> bool:
        """Whether the rule is selected by this ``optimizer`` argument of
        ``deepspeed.initialize``."""
        return False

    def optimizer_params(self, ds_config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the parameters of the rule's own optimizer from a DeepSpeed config, or None if the
        config does not name this optimizer. Raise ValueError for a wrong "optimizer" block."""
        return None

    def install(  # noqa: B027
        self, arguments: dict[str, Any], config: KFACConfig, ds_config: Mapping[str, Any]
    ) -> None:
        """Replace arguments of ``deepspeed.initialize`` so that the engine uses the rule's own
        optimizer, whose name DeepSpeed does not know."""

    def unstepped(self, parameters: Iterable[Any]) -> int:
        """Return how many of the parameters belong to an optimizer object of this rule that no
        engine uses. Objects that no longer exist do not count."""
        return 0

    def check_groups(  # noqa: B027
        self,
        model: nn.Module,
        layers: Sequence[LayerSpec],
        layout: ShardLayout,
        other_params: Sequence[nn.Parameter],
    ) -> None:
        """Raise ValueError if a parameter is in a parameter group that would cause a wrong update.

        Args:
            layout: ``layout.group_index`` returns the index of a parameter's group.
            other_params: trained parameters that belong to none of ``layers``.
        """

    def release(self, optimizer: Any) -> None:  # noqa: B027
        """Remove the data that K-FAC has stored in the engine's innermost optimizer. Called when
        K-FAC is detached from the engine."""

    # methods that are derived from the others

    @final
    def resolved(
        self, config: KFACConfig, optimizer: str = ""
    ) -> tuple[KFACConfig, tuple[str, ...]]:
        """Replace every null of a config by a value for this rule. Return the new config, and texts
        that say why these values were chosen.

        Args:
            optimizer: class name of the engine's innermost optimizer.
        """
        name = config.preconditioner.method
        if self.needs_basis and not METHODS[name].rotates:
            raise ValueError(
                f'kfac.preconditioner.method "{name}" computes no eigenbasis, but '
                f"{self.optimizer_type or type(self).__name__} needs one; set the method to "
                '"eigen", or use another optimizer'
            )
        self.check(config)
        is_adaptive = "preconditioner" in self.blocks and adaptive(optimizer)
        return resolve(config, fisher=self.fisher, blocks=self.blocks, adaptive=is_adaptive)

    @final
    def moments_count(self, config: KFACConfig) -> int:
        """Return the number of fp32 tensors of a gradient's shape that a gradient worker keeps for
        each layer."""
        moments = self.moments(config)
        if moments is None:
            return 0
        return sum("_OI" in part.name for part in fields(moments))

    @final
    def rotates(self, config: KFACConfig) -> bool:
        """Whether moments are kept in the eigenbasis and rotated into each new eigenbasis."""
        moments = self.moments(config)
        return moments is not None and moments.ROTATES

    @final
    def cut(self, config: KFACConfig, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        """Return the layers that the rule updates. Large layers are cut into parts, see
        ``ds_kfac/model/blocks.py``."""
        if not config.choice.shares:
            return tuple(layers)
        return cut(layers, partial(self.by_rows, config))
