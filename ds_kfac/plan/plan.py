"""The plan of a run: who does what, when, and how it travels. Pure, the same on every rank, made before training."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ds_kfac.assignment.assign import Assignment, Contributors, counted
from ds_kfac.assignment.costs import FactorSpec, factor_specs
from ds_kfac.config.keys import KFACConfig
from ds_kfac.curvature.methods import Method
from ds_kfac.curvature.precision import Precision
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import SHARDS
from ds_kfac.schedule.timetable import Schedule, Timetable

Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Known:
    """What the first captured batch shows; None: not yet.

    Attributes:
        groups: layers that share their input.
        rows: layer name -> rows of a rank in a step, in the mean; of a stack's layer those that it takes itself.
    """

    groups: Groups | None = None
    rows: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Plan:
    """See the module's docstring.

    Attributes:
        offsets: factor key -> steps by which its refreshes are displaced, also of factors that layers would have if
            they did not share one; empty: all at once.
        lag: steps after which a refresh takes effect.
        adaptive: two values of a factor are similar if |P - Q|_F / |Q|_F is below it; None: the rule is off.
        contributors: which ranks capture a factor's batch.
        bucket_bytes: most that a rank sends or receives in one message of batch sums.
        wire: dtype of batch sums and eigenvectors on the wire.
        gradient_dtypes: of gradients to their workers and of results back.
        shares: whether layers that see the same input are to share A.
        config: with its nulls answered, see :func:`ds_kfac.plan.make_plan.resolve`.
        precision: of the products of a step.
        stacks: whether small layers of equal shape are preconditioned together.
        clip_lr: the learning rate in kl-clip's bound, "current" or "peak".
        answers, reasons: what was chosen, and why; for the report.
        paired: whether a factor's refresh needs its partner, which is then on the same rank.
        first: which ranks captured a factor's batch before rows were known; None: they are not known.
    """

    layers: tuple[LayerSpec, ...]
    schedule: Schedule
    assignment: Assignment
    offsets: Mapping[str, int]
    lag: int
    adaptive: float | None
    contributors: Contributors
    bucket_bytes: int
    wire: torch.dtype
    gradient_dtypes: tuple[torch.dtype, torch.dtype]
    shares: bool
    config: KFACConfig
    precision: Precision
    stacks: bool
    clip_lr: str
    answers: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    paired: bool = False
    first: Contributors | None = None

    @cached_property
    def method(self) -> Method:
        """What is kept of a factor."""
        return self.assignment.work.method

    @cached_property
    def waits(self) -> torch.dtype:
        """Of a gradient that Adam's moments will take in once its step was applied: bf16 if results travel in that."""
        return torch.bfloat16 if self.gradient_dtypes[1] is torch.bfloat16 else torch.float32

    @cached_property
    def workers(self) -> int:
        """Gradient workers of a layer."""
        return max(len(ranks) for ranks in self.assignment.workers.values())

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that get each other's results: together they are gradient workers of every layer once."""
        world = self.assignment.world
        width = world // self.workers
        return tuple(tuple(range(start, start + width)) for start in range(0, world, width))

    @property
    def sharing_candidates(self) -> Mapping[str, Hashable]:
        """See :func:`sharing_candidates`; none if layers are not to share."""
        return sharing_candidates(self.layers, self.method) if self.shares else {}

    def timetable(self) -> Timetable:
        """Of the factors."""
        keys = tuple(factor.key for factor in self.assignment.factors)
        offsets = {key: self.offsets[key] for key in keys if key in self.offsets}
        return Timetable(self.schedule, keys, offsets=offsets, adaptive=self.adaptive is not None)

    @cached_property
    def measures(self) -> bool:
        """Whether the number of contributors depends on how many rows a rank has."""
        return self.config.factor.rows != "all" and self.assignment.world > 1

    def knowing(self, known: Known) -> "Plan":
        """The plan of a run that knows this."""
        plan = self.sharing(known.groups or ())
        if not self.measures or known.rows is None:
            return plan
        wanted = self.config.factor.rows
        assert not isinstance(wanted, str)
        alone = [factor for factor in factor_specs(self.layers) if factor.layers[0] not in self.copied]
        layers = {layer.name: layer for layer in self.layers}
        rows = {f.key: sum(known.rows.get(name, 0.0) for name in rows_from(f, layers)) for f in alone}
        counts = counted(alone, rows, self.assignment.world, wanted=wanted)
        return replace(plan, contributors=replace(self.contributors, counts=counts), first=self.contributors)

    @cached_property
    def copied(self) -> frozenset[str]:
        """Layers that other tensor-parallel ranks have copies of: their factors must not depend on the assignment."""
        return frozenset(layer.name for layer in self.layers if layer.copies > 1)

    def sharing(self, groups: Sequence[Sequence[str]]) -> "Plan":
        """With one A for each of these groups of layers, and no others. Nothing moves: its eigen worker is that of the
        group's first layer."""
        work = replace(self.assignment.work, factors=factor_specs(self.layers, groups))
        return replace(self, assignment=replace(self.assignment, work=work))


def sharing_candidates(layers: Sequence[LayerSpec], method: Method) -> Mapping[str, Hashable]:
    """Layers that may share A, and what must be equal for it: the side, whether a bias's 1 is in it, and whether G is
    the identity, if its damping is part of what is kept of A."""
    return {
        layer.name: (layer.A, layer.bias is not None, method.damps_identity and layer.G.block == 0)
        for layer in layers
        if layer.part[1] == 1 and SHARDS.get(layer.kind, layer.kind) in ("Linear", "Conv1D") and layer.A.block
    }


def rows_from(factor: FactorSpec, layers: Mapping[str, LayerSpec]) -> tuple[str, ...]:
    """Names of the layers whose rows together are a factor's: of a stack's common A all that are in the stack of its
    first, else its first alone, whose rows are the others', too."""
    first = layers[factor.layers[0]]
    if not factor.is_A or first.part[1] == 1 or not first.product:
        return (first.name,)
    return tuple(name for name in factor.layers if layers[name].weight == first.weight)
