"""A rank's factors: averaged, decomposed, delivered to the gradient workers.

The timetable is the same on every rank. Whether a factor could be decomposed only its eigen worker
knows; if eigenbases travel it tells everyone, so that all ranks agree on what the next message
contains.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ds_kfac.assignment.costs import FactorSpec, factors_by_layer
from ds_kfac.comm.message import Channel, Scalars, deliver
from ds_kfac.comm.reduce import Layout, Reducer
from ds_kfac.curvature.eigen import Refreshed, Request
from ds_kfac.curvature.factor import History, KroneckerFactor, Side, update_, usable
from ds_kfac.curvature.methods import Decomposition
from ds_kfac.log import logger
from ds_kfac.metrics import Metrics
from ds_kfac.model.layers import key_of
from ds_kfac.model.registry import LAYERS
from ds_kfac.model.rows import PASSES, ROWS, TERMS, BatchSum
from ds_kfac.plan.plan import Plan
from ds_kfac.schedule.timetable import NO_BATCH, FactorsDue
from ds_kfac.step.messages import (
    FAILED,
    FRESH,
    NONE_UNUSUAL,
    UNUSABLE,
    UNUSUAL,
    Delivery,
    counting,
    scalar_names,
)
from ds_kfac.step.warner import NAMED


@dataclass
class FactorLog:
    """What became of factors since this rank started or loaded: for people
    (``ds_kfac/diagnostics/explain.py``), in no checkpoint. No step decides by it.

    Attributes:
        updates: key -> its last update here: the step, its column, and fp32 [4, n] on the device, a
            column for each batch of that step: whether it was scaled down, whether it left the
            factor as it was, its rows (of G loss terms), the last step whose batch changed the
            factor (-1: none).
        tried: key -> step of its last refresh, and how it ended: FAILED, UNUSABLE or FRESH.
        fresh: key -> step of the last refresh that gave a decomposition.
    """

    updates: dict[str, tuple[int, int, Tensor]] = field(default_factory=dict)
    tried: dict[str, tuple[int, float]] = field(default_factory=dict)
    fresh: dict[str, int] = field(default_factory=dict)


@dataclass
class FactorStep:
    """What a step has done to the factors, until the ranks have told each other.

    Attributes:
        due: of the factors that exist.
        travels: whether eigenbases ever travel.
        terms: layer name -> number of loss terms in the batch that was averaged.
        similar: factor key -> fp32 scalar on the device, 1 and 2 added up where it is similar to
            its last value and to the one before (:func:`ds_kfac.curvature.factor.update_`);
            :data:`NO_BATCH` if it stays as it was.
        unusual: how many of this rank's batches were of each of
            :data:`ds_kfac.step.messages.UNUSUAL`.
        missed: keys of this rank's n factors to which not all ranks contributed, and bool [n]: they
            had no row.
        arriving: keys of the factors that are decomposed in this step.
        outcomes: key -> FAILED, UNUSABLE or FRESH, of ``arriving``: of this rank's; after
            :meth:`FactorUpdates.deliver` of all, if eigenbases travel.
        bases: key -> decomposition. Before :meth:`FactorUpdates.deliver` those made here, then
            those needed here.
        scalars: name -> scalar, as exchanged by all ranks.
    """

    due: FactorsDue
    travels: bool
    terms: dict[str, Tensor] = field(default_factory=dict)
    similar: dict[str, Tensor] = field(default_factory=dict)
    unusual: Sequence[Tensor | float] = NONE_UNUSUAL
    missed: tuple[tuple[str, ...], Tensor | None] = (), None
    arriving: tuple[str, ...] = ()
    outcomes: dict[str, float] = field(default_factory=dict)
    bases: dict[str, Decomposition] = field(default_factory=dict)
    scalars: Mapping[Hashable, Tensor] = field(default_factory=dict)


class FactorUpdates:
    """Averages, decomposes and delivers the factors, which change in place.

    Args:
        plan: which rank does what, when and how.
        averaged_over: ranks whose backward passes a gradient is averaged over, also those of other
            domains; None: those of the channel.

    Attributes:
        reducer: sends batch sums to the eigen workers.
        factors: key -> factor, for the factors that this rank averages and decomposes.
        ready: keys of the factors that have been decomposed: of all factors if eigenbases travel,
            else of this rank's.
        log: what became of factors.
        layer_of: key -> first of the layers that have this factor.
        home: device on which averages lie between steps.
        paired: whether decomposing a factor needs its partner, which is then on the same rank.
        counted: key -> layers whose number of loss terms is this factor's count of rows.
    """

    def __init__(
        self,
        plan: Plan,
        channel: Channel,
        metrics: Metrics,
        device: torch.device,
        *,
        averaged_over: int | None = None,
    ) -> None:
        self.averaged_over = channel.world if averaged_over is None else averaged_over
        self.plan, self.config, self.channel, self.metrics = plan, plan.config, channel, metrics
        self.device, self.rank = device, channel.rank
        roles = plan.assignment
        layout = Layout(
            roles.factors, roles.eigen_workers, plan.contributors, plan.wire, plan.bucket_bytes
        )
        self.reducer = Reducer(layout, channel, device)
        self.home = torch.device("cpu") if self.config.offload.device == "cpu" else device
        self.timetable = plan.timetable()
        self.paired = plan.method.paired(self.config.damping.kind)
        self.specs: Mapping[str, FactorSpec] = {spec.key: spec for spec in roles.factors}
        layers = {layer.name: layer for layer in plan.layers}
        self.layer_of = {key: layers[spec.layers[0]] for key, spec in self.specs.items()}
        self.of_layer = factors_by_layer(roles.factors)
        self.counted: dict[str, list[str]] = {}
        for name, sides in self.of_layer.items():
            self.counted.setdefault(counting(sides), []).append(name)
        self.eigen_workers = roles.eigen_workers
        self.delivery = Delivery(
            roles.factors,
            self.eigen_workers,
            roles.workers,
            world=channel.world,
            wire=plan.wire,
            nbytes=plan.bucket_bytes,
            method=plan.method,
            copied=[layer.name for layer in plan.layers if layer.copies > 1],
        )
        self.travels = self.delivery.travels
        self._never = torch.full((4, 1), -1.0, device=device, dtype=torch.float32)
        self.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; keys have this process's layer names.

        factors: key -> factor, for this rank's factors.
        ready, log: the attributes. schedule: see :meth:`Timetable.state`.
        """
        return {
            "factors": dict(self.factors),
            "ready": set(self.ready),
            "schedule": self.timetable.state(),
            "log": self.log,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`. Factors missing from it begin empty; those of no layer
        here are dropped."""
        saved = state.get("factors", {})
        self.factors = {
            key: saved[key] if key in saved else self._empty(spec)
            for key, spec in self.specs.items()
            if self.eigen_workers[key] == self.rank
        }
        self.ready = set(state.get("ready", ())) & self.specs.keys()
        self.timetable.restore(state.get("schedule", {}))
        self.log: FactorLog = state.get("log", FactorLog())

    def _empty(self, spec: FactorSpec) -> KroneckerFactor:
        empty = KroneckerFactor.empty(spec.side, self.device).to(self.home)
        return (
            replace(empty, history=History.of(spec.side).to(self.home))
            if self.plan.adaptive
            else empty
        )

    def factor(
        self, side: Side, packed_P: Tensor, updates: Tensor, *values: Tensor | None
    ) -> KroneckerFactor:
        """A factor of these tensors, with a history of ``values`` where factors have one."""
        # the counter `updates` stays on the device even if averages are offloaded: GPU kernels read
        # it at every update
        history = History.of(side, *values).to(self.home) if self.plan.adaptive else None
        # from the device to the host by moved(), which pins the memory: updates copy into it for
        # the rest of the run
        return KroneckerFactor(side, packed_P.to(self.device), updates.to(self.device), history).to(
            self.home
        )

    def of_none_but(self, layers: Collection[str]) -> frozenset[str]:
        """Keys of the factors that no layer but these has."""
        return frozenset(
            key for key, spec in self.specs.items() if all(name in layers for name in spec.layers)
        )

    def layers_of(self, keys: Collection[str]) -> set[str]:
        """Names of the layers that have any of these factors."""
        return {name for key in keys for name in self.specs[key].layers}

    def forget(self, keys: Collection[str]) -> None:
        """Restart these factors from zero: rows that failed the proof are in their averages. Once
        their layers fit again they are decomposed at their next update, without waiting for a
        refresh."""
        for key in keys & self.factors.keys():
            self.factors[key] = self._empty(self.specs[key])
        self.ready.difference_update(keys)

    # the stages of a step

    def update(self, step: int, due: FactorsDue, sums: Mapping[str, BatchSum]) -> FactorStep:
        """Average batch sums, already reduced over ranks, into this rank's factors.

        Args:
            step: number of applied steps before this one.
            due: may name factors that do not exist, as layers share one; these are left out.
        """
        update = FactorStep(
            FactorsDue(due.capture & self.specs.keys(), due.refresh & self.specs.keys()),
            self.travels,
        )
        batches = {
            key: sums[key] for key in self.factors if key in update.due.capture and key in sums
        }
        for key, batch in batches.items() if self.plan.counts_terms else ():
            # ranks that did not contribute are assumed to have had as many rows
            terms = (
                batch.counts[TERMS] * (batch.counts[ROWS] > 0) * (self.averaged_over / batch.ranks)
            )
            update.terms |= dict.fromkeys(self.counted.get(key, ()), terms)
        keys = tuple(batches)
        if not keys:
            return update
        rows = torch.stack([batch.counts[ROWS] for batch in batches.values()])
        counts = rows.clone()
        for index, (key, batch) in enumerate(batches.items()):
            if self.of_gradients(key):
                self._scale(batch)
                counts[index] = (rows[index] > 0).float()
        decay = self.config.factor.decay.at(step)
        similar, flags = update_(
            [self.factors[key] for key in keys],
            [batch.sum_P for batch in batches.values()],
            counts,
            # the adaptive rule may have skipped ordinary updates: the past decays once for each of
            # them
            decays=[decay ** self.timetable.clocks[key].interval for key in keys],
            device=self.device,
            tolerance=self.plan.adaptive,
        )
        update.similar = {
            keys[at]: torch.where(flags[1, at], NO_BATCH, last + 2.0 * before)
            for at, (last, before) in similar.items()
        }
        partial = tuple(key for key, batch in batches.items() if batch.ranks < self.channel.world)
        missed: Tensor | float = 0.0
        if partial:
            update.missed = (
                partial,
                torch.stack([batches[key].counts[ROWS] for key in partial]) <= 0,
            )
            missed = update.missed[1].sum()
        update.unusual = *flags.sum(dim=1), missed
        self._note(step, keys, flags, rows)
        return update

    def _note(self, step: int, keys: Sequence[str], flags: Tensor, rows: Tensor) -> None:
        """Enter this rank's updates in :attr:`log`."""
        last = [self.log.updates.get(key, (0, 0, self._never)) for key in keys]
        changed = torch.stack([numbers[-1, column] for _, column, numbers in last])
        numbers = torch.stack([*flags, rows, torch.where(flags[1], changed, step)])
        self.log.updates |= {key: (step, column, numbers) for column, key in enumerate(keys)}

    def of_gradients(self, key: str) -> bool:
        """Whether a factor is made of gradients: G, and a norm's A."""
        return not self.specs[key].is_A or LAYERS[self.layer_of[key].kind].needs_gradients

    def _scale(self, batch: BatchSum) -> None:
        """Make the sum over ranks of R_p g g^T, g as it was on its rank, the mean over loss terms:
        times K, the number of passes on all ranks, for gradients that are averaged over ranks.
        Those ranks that did not contribute are assumed to have had the same."""
        others = self.channel.world / batch.ranks
        passes = batch.counts[PASSES] * (self.averaged_over / batch.ranks)
        batch.sum_P.mul_(passes * (others / self.averaged_over**2))

    def decompose(
        self,
        step: int,
        update: FactorStep,
        last: Callable[[FactorSpec], Any] | None = None,
        unproven: Collection[str] = (),
    ) -> None:
        """Decompose the factors that are due.

        Args:
            last: a factor's last decomposition on this rank, or None, for methods that iterate from
                it; without this function every factor is decomposed from scratch.
            unproven: keys whose layers failed the last proof of their rows. Not decomposed, nor
                waited for.
        """
        # a factor that had no data at the last refresh is decomposed at its next capture: waiting
        # for the next refresh would leave its layers unpreconditioned for a whole interval
        waiting = {
            key for key in update.due.capture - self.ready if self.travels or key in self.factors
        }
        due = (update.due.refresh | waiting) - set(unproven)
        update.arriving = tuple(key for key in self.specs if key in due)
        able = self._usable(due)
        results = dict(zip(able, self._decomposed(able, step, last), strict=True))
        update.outcomes = {key: UNUSABLE for key in update.arriving if key in self.factors}
        update.outcomes |= {
            key: FAILED if result.basis is None else FRESH for key, result in results.items()
        }
        update.bases = {
            key: result.basis for key, result in results.items() if result.basis is not None
        }
        counts = self.metrics.counts
        for result in results.values():
            counts["refreshes"] += result.basis is not None
            counts[f"refreshes_{result.how}"] += 1
            counts["refresh_retries"] += result.retries
        # what is not ready may have no data yet
        bad = {FAILED: update.outcomes.keys(), UNUSABLE: self.ready}
        if stale := [
            key for key, outcome in update.outcomes.items() if key in bad.get(outcome, ())
        ]:
            logger.warning(
                f"ds_kfac: no decomposition of factor {', '.join(stale[:NAMED])} succeeded "
                f"({len(stale)} in step "
                f"{step}); the last one's result stays"
            )

    def _decomposed(
        self, keys: Sequence[str], step: int, last: Callable[[FactorSpec], Any] | None
    ) -> list[Refreshed]:
        """Decompositions of these factors, in this order."""
        method, config, device, requests = (
            self.plan.method,
            self.config,
            self.device,
            list[Request](),
        )
        for key in keys:
            layer, partner, basis = self.layer_of[key], None, None
            if (
                last is not None
                and method.step_flops
                and not self.timetable.exact(key, step, method.exact_every)
            ):
                basis = last(self.specs[key])
            # the inverse has the damping in it, which depends on both
            if method.damps_identity or self.paired:
                side, other = (layer.G, "G") if self.specs[key].is_A else (layer.A, "A")
                if side.block == 0:
                    partner = KroneckerFactor.empty(side, device)
                elif self.paired:
                    partner = self.factors[key_of(layer.name, other)]
            requests.append(Request(self.factors[key], partner, basis, layer.copies > 1))
        options: dict[str, Any] = {}
        if method.damps_identity:
            options = {"damping": config.damping.at(step), "damping_kind": config.damping.kind}
        return method.decompose([request.to(device) for request in requests], **options)

    def _usable(self, keys: Collection[str]) -> list[str]:
        """Keys of this rank's factors that can be decomposed, and of some layer that has them so
        can the other one, if that is on this rank: of a common A one layer may have no data. One
        transfer to the host for all."""
        layers = {
            key: [[side.key for side in self.of_layer[name].values()] for name in spec.layers]
            for key, spec in self.specs.items()
            if key in keys and key in self.factors
        }
        needed = {key for of_factor in layers.values() for sides in of_factor for key in sides}
        checked = [key for key in self.factors if key in needed]
        if not checked:
            return []
        # on the device: an offloaded factor may still be on its way to the host
        flags = usable([self.factors[key].to(self.device) for key in checked]).tolist()
        can = dict(zip(checked, flags, strict=True))
        return [
            key
            for key, of_factor in layers.items()
            if any(all(can.get(side, True) for side in sides) for sides in of_factor)
        ]

    # what ranks tell each other

    def deliver(self, step: int, update: FactorStep) -> None:
        """Send new eigenbases or inverses to the gradient workers, in as many messages as these
        need, and scalars with the first. Collective. Synchronises if eigenbases travel."""
        names = scalar_names(
            self.plan, captured=update.due.capture, arriving=update.arriving, travels=self.travels
        )
        table = Scalars(names, self.rank)
        first, *others = self.delivery.parts(update.arriving, update.bases, self.device) or [()]
        arrivals = deliver(
            (*first, table.part(self._own_scalars(update), self.device)), self.channel, self.device
        )
        update.scalars = table.read(arrivals.pop())
        bases = self.delivery.received(arrivals)
        for parts in others:
            del arrivals  # which keep the last message
            arrivals = deliver(parts, self.channel, self.device)
            bases |= self.delivery.received(arrivals)
        self._receive(step, update, bases)

    def _own_scalars(self, update: FactorStep) -> dict[Hashable, Tensor | float]:
        """Name -> scalar, of those that this rank sends."""
        values: dict[Hashable, Tensor | float] = {
            ("terms", name): terms for name, terms in update.terms.items()
        }
        values |= {("similar", key): code for key, code in update.similar.items()}
        values |= {
            (kind, self.rank): number for kind, number in zip(UNUSUAL, update.unusual, strict=True)
        }
        values |= {("fresh", key): outcome for key, outcome in update.outcomes.items()}
        return values

    def _receive(self, step: int, update: FactorStep, bases: Mapping[str, Decomposition]) -> None:
        """Take in the scalars of all ranks, and the decompositions that have arrived."""
        scalars = update.scalars
        update.terms |= {
            name[1]: x
            for name, x in scalars.items()
            if isinstance(name, tuple) and name[0] == "terms"
        }
        if self.travels and update.arriving:
            flags = torch.stack([scalars["fresh", key] for key in update.arriving]).tolist()
            update.outcomes = dict(zip(update.arriving, flags, strict=True))
        fresh = {key for key, outcome in update.outcomes.items() if outcome == FRESH}
        self.ready |= fresh
        self.log.tried |= {key: (step, outcome) for key, outcome in update.outcomes.items()}
        self.log.fresh |= dict.fromkeys(fresh, step)
        # as they were sent: replicas stay bit-identical
        for key in update.bases.keys() & self.delivery.rounded:
            update.bases[key] = update.bases[key].rounded(self.delivery.wire)
        update.bases |= {key: basis for key, basis in bases.items() if key in fresh}
