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
