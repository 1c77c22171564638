"""What a step starts from, and what it computes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ds_kfac.curvature.methods import Decomposition
from ds_kfac.directions.base import UpdateRule
from ds_kfac.model.batch import BatchInfo
from ds_kfac.model.layers import LayerSpec
from ds_kfac.schedule.timetable import FactorsDue
from ds_kfac.step.factors import FactorDraft
from ds_kfac.step.proving import Verdict
from ds_kfac.update.state import LayerState
from ds_kfac.zero.exchange import LocalResult
from ds_kfac.zero.layout import ShardLayout
from ds_kfac.zero.registry import Domain


@dataclass(frozen=True)
class EngineView:
    """What is preconditioned, and where its gradients are.

    Attributes:
        layout, other_params: where the engine keeps the gradients of ``parameter_names(layers)``, and all others.
        inner: the innermost optimizer, which DeepSpeed wraps.
        domain: what of the job this is.
        info_of: of a module's call, given the micro-batch's.
    """

    model: nn.Module
    layers: tuple[LayerSpec, ...]
    layout: ShardLayout
    other_params: ShardLayout
    inner: Any
    rule: UpdateRule
    domain: Domain
    info_of: Callable[[str, BatchInfo], BatchInfo] | None = None

    @property
    def clips(self) -> bool:
        """Whether the engine clips by a norm that is known before its step: not if there are other domains."""
        return bool(self.layout.engine.gradient_clipping()) and not self.domain.name


@dataclass
class StepDraft:
    """What a step computes: kept when DeepSpeed has applied the step, dropped when it has skipped it.

    Attributes:
        step: applied steps before this one.
        factors: what becomes of the factors; None in a step that leaves them as they are.
        norm: of all gradients as stored, a device scalar; None unless the engine clips.
        states: of this rank's layers, with what has arrived.
        arrived: layer -> eigenbases that are used from the next step on, see :meth:`LayerState.rebased`.
        gradients: of this rank's layers, until they are preconditioned.
        peak_lr: see :class:`ds_kfac.directions.base.StepContext`.
        local: results and new states of this rank's layers.
        verdict: on the layers' rows, in steps that prove them.
    """

    step: int
    due: FactorsDue
    peak_lr: dict[int, Tensor | float]
    factors: FactorDraft | None = None
    norm: Tensor | None = None
    states: dict[str, LayerState] = field(default_factory=dict)
    arrived: dict[str, dict[str, Decomposition]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    verdict: Verdict | None = None
    local: LocalResult = field(init=False)
