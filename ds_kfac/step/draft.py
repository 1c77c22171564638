"""What a step starts from, and what it computes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ds_kfac.curvature.methods import Decomposition
from ds_kfac.directions.base import LocalResult, UpdateRule
from ds_kfac.model.layers import LayerSpec
from ds_kfac.schedule.timetable import FactorsDue
from ds_kfac.step.factors import FactorDraft
from ds_kfac.step.proving import Verdict
from ds_kfac.update.state import LayerState
from ds_kfac.zero.layout import ShardLayout
from ds_kfac.zero.registry import Domain


@dataclass(frozen=True)
class EngineView:
    """What a preconditioner sees of an engine.

    Attributes:
        layout: where the engine keeps the gradients of the layers' parameters.
        other_params: where it keeps those of all other parameters.
        inner: the innermost optimizer, which DeepSpeed wraps.
        domain: the part of the job that is preconditioned, such as one expert-parallel group's experts.
    """

    model: nn.Module
    layers: tuple[LayerSpec, ...]
    layout: ShardLayout
    other_params: ShardLayout
    inner: Any
    rule: UpdateRule
    domain: Domain


TORN = (
    "ds_kfac: K-FAC's state is that of no step: its last commit raised, after DeepSpeed had stepped. Load a "
    "checkpoint, or attach again, which begins without factors and moments"
)


@dataclass
class StepDraft:
    """What a step computes: kept when DeepSpeed has applied the step, dropped when it has skipped it.

    Attributes:
        factors: the new factors; None in a step that does not change them.
        norm: global norm of all gradients as stored, a device scalar; None unless the engine clips.
        states: layer name -> state of this rank's layers, with the decompositions that this step uses.
        next_bases: layer name -> side -> eigenbasis that is used from the next step on (:meth:`LayerState.rebased`).
        gradients: layer name -> [O, I] of this rank's layers; emptied as they are preconditioned.
        peak_lr: see :class:`ds_kfac.directions.base.StepContext`.
        clip: factor that clips the gradients of a rule without an optimizer of its own; None unless the engine clips.
        unprepared: layers that are stepped as without curvature, since they have no eigenbasis or inverse.
        local: results and new states of this rank's layers.
        verdict: which layers' rows do not make their gradients, in steps that check it.
    """

    due: FactorsDue
    peak_lr: dict[int, Tensor | float]
    factors: FactorDraft | None = None
    norm: Tensor | None = None
    states: dict[str, LayerState] = field(default_factory=dict)
    next_bases: dict[str, dict[str, Decomposition]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    verdict: Verdict | None = None
    clip: Tensor | None = None
    unprepared: list[str] = field(default_factory=list)
    local: LocalResult = field(init=False)

    def give_up(self, empty: Mapping[str, LayerState]) -> None:
        """Leave layers of this rank without a basis; moments leave it, as far as a diagonal can. ``empty``: name -> its
        state before anything was seen."""
        for name, nothing in empty.items():
            self.next_bases.pop(name, None)
            if (state := self.states[name]).preconditioner is not None:
                self.states[name] = replace(nothing, moments=state.without(A=state.A, G=state.G).moments)
