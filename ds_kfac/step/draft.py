"""What one step computes: kept when DeepSpeed has applied the step, dropped when it has skipped it."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ds_kfac.curvature.eigen import Refreshed
from ds_kfac.curvature.forms import Kept
from ds_kfac.directions.base import LocalResult
from ds_kfac.schedule.timetable import FactorsDue
from ds_kfac.step.factor_state import FactorState
from ds_kfac.update.layer_state import LayerState
from ds_kfac.update.quadratic import QuadraticModel


@dataclass
class FactorDraft:
    """Of the factors.

    Attributes:
        step: applied steps before this one.
        due: what is captured and what is decomposed.
        factors, ready, pending: see :class:`ds_kfac.step.factors.FactorUpdates`.
        terms: layer name -> loss terms of the batch that was averaged.
        similar: factor key -> bool [2], see :func:`ds_kfac.step.factor_state.folded`.
        unusual: [2], batches of this rank's factors that were scaled down, and that had no row; None if nothing was
            averaged.
        submitted: keys of the decompositions that were started in the background.
        arriving: keys whose decompositions take effect in this step.
        results: of those that were done here.
        scalars: of all ranks, by name.
        bases: of this rank's layers, new in this step, by factor key.
        failed: decompositions that failed, where all ranks know.
    """

    step: int
    due: FactorsDue
    factors: dict[str, FactorState]
    ready: set[str]
    pending: dict[str, int]
    terms: dict[str, Tensor] = field(default_factory=dict)
    similar: dict[str, Tensor] = field(default_factory=dict)
    unusual: Tensor | None = None
    submitted: list[str] = field(default_factory=list)
    arriving: tuple[str, ...] = ()
    results: dict[str, Refreshed] = field(default_factory=dict)
    scalars: Mapping[Hashable, Tensor] = field(default_factory=dict)
    bases: dict[str, Kept] = field(default_factory=dict)
    failed: int = 0

    @property
    def decomposed(self) -> dict[str, Kept]:
        """What this rank's decompositions left, by factor key."""
        return {key: result.basis for key, result in self.results.items() if result.basis is not None}


@dataclass
class Draft:
    """Of the whole step.

    Attributes:
        factors: the factors' part.
        peak_lr: parameter group -> largest learning rate so far.
        norm: of all gradients as stored, a device scalar; None unless the update rule asks for it.
        states: of this rank's layers, with the eigenbases that have arrived.
        gradients: of this rank's layers, until they are preconditioned.
        damping_scale: see :class:`ds_kfac.directions.base.StepContext`.
        quadratic: the model that the step follows from and its minimum [2]; None if the learning rate gives it.
        local: results and new states of this rank's layers.
    """

    factors: FactorDraft
    peak_lr: dict[int, Tensor | float]
    norm: Tensor | None
    states: dict[str, LayerState]
    gradients: dict[str, Tensor]
    damping_scale: Tensor | None = None
    quadratic: tuple[QuadraticModel, Tensor] | None = None
    local: LocalResult = field(init=False)
