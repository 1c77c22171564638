"""Factors and eigenbases over a run: captured, reduced, averaged, decomposed, delivered to the gradient workers.

Who knows what: the timetable is the same on every rank. Whether a factor could be decomposed is known to its
decomposer; if eigenbases travel it tells everyone, so that all ranks know what the next message contains.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ds_kfac.adaptive import History
from ds_kfac.agenda import Agenda
from ds_kfac.calls import BatchSum, UseSums
from ds_kfac.config import KFACConfig
from ds_kfac.decomposition import Decompositions, count, usable
from ds_kfac.delivery import Delivery
from ds_kfac.eigenbasis import Refreshed
from ds_kfac.eigensolver import grouped
from ds_kfac.factor import KroneckerFactor
from ds_kfac.factor_spec import FactorSpec, factors_by_layer
from ds_kfac.factor_state import FactorState, NextFactors, folded, tied_sums
from ds_kfac.inverse import Kept
from ds_kfac.layers.base import LayerSpec
from ds_kfac.mail import Arrivals, Leg
from ds_kfac.metrics import Metrics
from ds_kfac.notices import counting, notices
from ds_kfac.planning import Plan
from ds_kfac.reducer import Reducer
from ds_kfac.refresher import Refresher
from ds_kfac.side import Side
from ds_kfac.timetable import FactorsDue
from ds_kfac.traffic import Channel

FAILED, UNUSABLE, FRESH = -1.0, 0.0, 1.0
"""What a decomposer tells of a factor."""


class Curvature:
    """The half of K-FAC that is not the gradient's.

    Args:
        plan: who, when and how.
        reducer: takes the batch sums to the decomposers.
        refresher: decomposes what takes effect later.

    Attributes:
        factors: factor key -> state, of the factors this rank decomposes.
        ready: keys of the factors that have been decomposed; of all, if eigenbases travel, else of this rank's.
        pending: key -> step at which an asynchronous decomposition takes effect.
        arriving: keys whose eigenbases take effect in this step.
    """

    def __init__(
        self,
        plan: Plan,
        channel: Channel,
        reducer: Reducer,
        refresher: Refresher,
        config: KFACConfig,
        metrics: Metrics,
        device: torch.device,
    ) -> None:
        self.plan, self.config, self.layers = plan, config, plan.layers
        self.channel, self.reducer, self.refresher, self.metrics = channel, reducer, refresher, metrics
        self.device, self.rank = device, channel.rank
        self.agenda = Agenda(plan)
        self.specs: Mapping[str, FactorSpec] = {spec.key: spec for spec in plan.assignment.factors}
        self.of_layer = factors_by_layer(plan.assignment.factors)
        self.decomposers = plan.assignment.decomposers
        self.delivery = Delivery(
            plan.assignment.factors,
            self.decomposers,
            plan.assignment.workers,
            world=channel.world,
            wire=plan.wire,
            method=plan.method,
        )
        self.travels = self.delivery.travels
        self.reset()

    def reset(self) -> None:
        """Nothing seen yet."""
        own = [spec for spec in self.specs.values() if self.decomposers[spec.key] == self.rank]
        self.factors = {spec.key: self.empty_of(spec.side) for spec in own}
        self.ready: set[str] = set()
        self.pending: dict[str, int] = {}
        self.arriving: tuple[str, ...] = ()
        self.agenda.reset()
        self.refresher.clear()
        self.reducer.forget()
        self.begin()

    def empty_of(self, side: Side) -> FactorState:
        """Of a factor that has seen nothing."""
        history = History(side) if self.plan.adaptive else None
        # the counter stays on the device, as in a loaded factor: kernels of a GPU fold there
        return FactorState(KroneckerFactor.empty(side, self.device).to(self.home), history)

    @property
    def home(self) -> torch.device:
        """Where factors are kept."""
        return torch.device("cpu") if self.config.offload.device == "cpu" else self.device

    def nbytes(self, bases: Mapping[int, int]) -> int:
        """Of factors, their history, and eigenbases.

        Args:
            bases: id -> bytes of the eigenbases that layers hold; those of factors are counted with them, once.
        """
        own = {id(state.basis): state.basis.nbytes for state in self.factors.values() if state.basis is not None}
        return sum(state.nbytes for state in self.factors.values()) + sum({**bases, **own}.values())

    def elements(self, keys: Iterable[str]) -> int:
        """Of packed factors."""
        return sum(self.specs[key].side.numel for key in keys)

    def take_over(self, old: "Curvature") -> None:
        """The state of a curvature with the same decomposers, some of whose layers did not share their A yet."""
        self.factors = {key: state for key, state in old.factors.items() if key in self.specs}
        self.ready = {key for key in old.ready if key in self.specs}
        self.pending = {key: step for key, step in old.pending.items() if key in self.specs}
        self.agenda.restore(old.agenda.state())
        self.begin()

    def begin(self) -> None:
        """Start a step from what the last applied one left."""
        self.next = NextFactors(dict(self.factors), set(self.ready), dict(self.pending))
        self._results: dict[str, Refreshed] = {}

    # the stages of a step

    def fold(self, step: int, due: FactorsDue) -> None:
        """Wait for the batch sums of the factors that are due, and fold this rank's into their averages."""
        sums = self.reducer.finish(due.capture)
        batches: dict[str, BatchSum] = {}
        for layer in self.layers:
            if layer.name in sums:
                batches |= self._batches(layer, sums[layer.name])
        decay = self.config.factor.decay_at(step)
        results, self.next.limited = folded(
            [self.next.factors[key] for key in batches],
            list(batches.values()),
            decays=[self.agenda.weight(key, decay) for key in batches],
            device=self.device,
            tolerance=self.plan.adaptive.tolerance if self.plan.adaptive else None,
        )
        for key, (state, similar) in zip(batches, results, strict=True):
            self.next.factors[key] = state
            if similar is not None:
                self.next.similar[key] = similar

    def _batches(self, layer: LayerSpec, uses: list[UseSums]) -> dict[str, BatchSum]:
        """Factor key -> what is folded into it."""
        parts = {"A": uses[0].A, "G": uses[0].G}
        self._count_terms(layer, parts)
        if len(layer.uses) > 1:
            parts["A"], parts["G"] = tied_sums(uses[0], uses[1], layer.A, layer.G)
        own = self.of_layer[layer.name]
        return {own[which].key: batch for which, batch in parts.items() if batch is not None}

    def _count_terms(self, layer: LayerSpec, parts: Mapping[str, BatchSum | None]) -> None:
        """Of the layer, and of those that have only its A; 0 if no rank had any."""
        for which, batch in parts.items():
            if batch is None:
                continue
            spec = self.of_layer[layer.name][which]
            for name in spec.layers:
                if counting(self.of_layer[name]) == spec.key:
                    self.next.terms[name] = batch.count

    def decompose(self, step: int, due: FactorsDue) -> None:
        """Decompose what is due here and now; start what takes effect later; collect what takes effect now."""
        keys = due.refresh | self._incomplete(due.capture)
        lag = min(self.plan.lag, self.plan.schedule.intervals(step)[1] - 1)
        now = {key for key in keys if lag < 1 or key not in self.next.ready}
        later = keys - now - set(self.next.pending)
        self.arriving = tuple(key for key in self.specs if key in now or self.next.pending.get(key) == step)
        able = usable(self._partners(now | later), self.next.factors, self.device)
        self.next.submitted = [key for key in able if key not in now]
        together = [self.next.submitted] if grouped(self.device) else [[key] for key in self.next.submitted]
        for part in together:
            self.refresher.submit_together(part, self._decompositions(part, step))
        self._decompose([key for key in able if key in now], step)
        self.next.pending |= dict.fromkeys(later, step + lag)
        for key in self.arriving:
            if key not in now and key in self.next.factors:
                self._results[key] = self.refresher.result(key)
        count(self._results, self.metrics.step_counts)

    def _decompositions(self, keys: Sequence[str], step: int) -> Decompositions:
        specs = [self.specs[key] for key in keys]
        return Decompositions.of(specs, self.next.factors, self.plan, self.config, step, self.device)

    def _decompose(self, keys: Sequence[str], step: int) -> None:
        """Here and now."""
        self._results |= zip(keys, self._decompositions(keys, step)(), strict=True)

    def _partners(self, keys: set[str]) -> dict[str, list[str]]:
        """This rank's of the factors in ``keys``, with those of their (first) layer."""
        return {
            key: [other.key for other in self.of_layer[spec.layers[0]].values()]
            for key, spec in self.specs.items()
            if key in keys and key in self.next.factors
        }

    def _incomplete(self, captured: Iterable[str]) -> set[str]:
        """Captured factors of layers that wait for an eigenbasis, because they had no data at the last refresh: they
        need not wait for the next one."""
        return {
            key
            for key in captured
            if (self.travels or key in self.factors)
            and any(
                other.key not in self.next.ready
                for layer in self.specs[key].layers
                for other in self.of_layer[layer].values()
            )
        }

    # what travels with the gradients

    def told(self, due: FactorsDue) -> list[list[Hashable]]:
        """Per rank, the names of the numbers it tells in this step."""
        terms = self.config.preconditioner.eigenvalues == "corrected"
        return notices(self.plan, captured=due.capture, arriving=self.arriving, travels=self.travels, terms=terms)

    def numbers(self) -> dict[Hashable, Tensor]:
        """This rank's, as :meth:`told` names them."""
        values: dict[Hashable, Tensor] = {}
        for key, similar in self.next.similar.items():
            values["similar", key] = similar[0] + 2.0 * similar[1]
        for name, terms in self.next.terms.items():
            values["terms", name] = terms
        if self.next.limited is not None:
            values["limited", self.rank] = self.next.limited
        for key in self.arriving:
            result = self._results.get(key)
            state = UNUSABLE if result is None else FAILED if result.basis is None else FRESH
            values["fresh", key] = torch.full((), state, device=self.device)
        return values

    def legs(self) -> tuple[Leg, ...]:
        """Eigenbases, or inverses, on their way to gradient workers elsewhere."""
        return self.delivery.legs(self.arriving, self._bases, self.device)

    @property
    def _bases(self) -> dict[str, Kept]:
        """Own factors' that take effect in this step."""
        return {key: result.basis for key, result in self._results.items() if result.basis is not None}

    def arrived(self, arrivals: Sequence[Arrivals], told: Mapping[Hashable, Tensor]) -> tuple[dict[str, Kept], int]:
        """New eigenbases or inverses of the factors of this rank's layers, by key; and how many decompositions failed,
        where all ranks know. Synchronises if they travel, in the steps in which they do.

        Args:
            arrivals: of each of :meth:`legs`.
        """
        for key in self.arriving:
            self.next.pending.pop(key, None)
        own, failed = self._bases, 0
        fresh = set(own)
        if self.travels and self.arriving:
            flags = torch.stack([told["fresh", key] for key in self.arriving]).tolist()
            fresh = {key for key, flag in zip(self.arriving, flags, strict=True) if flag == FRESH}
            failed = flags.count(FAILED)
        self.next.ready |= fresh
        if self.plan.warm_start is not None:
            for key in own:
                self.next.factors[key] = self.next.factors[key].refreshed(self._results[key])
        received = self.delivery.received(*arrivals)
        here = {key: self.delivery.kept(key, basis) for key, basis in own.items()}
        return {key: basis for key, basis in (received | here).items() if key in fresh}, failed

    def terms_of(self, layer: LayerSpec, told: Mapping[Hashable, Tensor]) -> Tensor | None:
        """Loss terms of the layer in the batch that was folded; None if it was not captured."""
        return self.next.terms.get(layer.name, told.get(("terms", layer.name)))

    def commit(self, step: int, due: FactorsDue, told: Mapping[Hashable, Tensor], *, applied: bool) -> None:
        """Keep what the step changed, or drop it."""
        if not applied:
            self.refresher.drop(self.next.submitted)
            return
        self.refresher.drop([key for key in self.arriving if key in self.pending])  # those that have been collected
        self.keep()
        self.reducer.commit()
        # alone in the world nothing is told
        self.agenda.record(step, due, self.numbers() if self.channel.world == 1 else told)

    def keep(self) -> None:
        """Take over what the step changed."""
        self.factors, self.ready, self.pending = self.next.factors, self.next.ready, self.next.pending

    def redecompose(self, step: int) -> None:
        """As :meth:`decompose`, exactly, of all factors with data, outside of a step: after loading without bases."""
        self.begin()
        self.arriving = tuple(self.specs)
        self.next.factors = {key: replace(state, basis=None) for key, state in self.next.factors.items()}
        self._decompose(usable(self._partners(set(self.specs)), self.next.factors, self.device), step)
