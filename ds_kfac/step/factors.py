"""Average and decompose the factors of one rank, and deliver the decompositions to the gradient
workers.

A factor's owner is the rank that averages and decomposes the factor. A layer's gradient
workers are the ranks that precondition the layer's gradient. The timetable is the same on every
rank, but only the owner knows whether a factor could be decomposed. If eigenbases are sent
to other ranks, all ranks must agree on the factors that the next step handles. The owner
therefore tells all ranks whether it could decompose the factor.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_kfac.assignment.costs import FactorSpec, factors_by_layer
from ds_kfac.comm.message import Channel, Scalars, deliver
from ds_kfac.comm.reduce import Reducer, ReductionPlan
from ds_kfac.curvature.eigen import Refreshed, Request
from ds_kfac.curvature.factor import History, KroneckerFactor, Side, update_, usable
from ds_kfac.curvature.methods import Decomposition
from ds_kfac.log import logger
from ds_kfac.metrics import Metrics
from ds_kfac.model.layers import key_of
from ds_kfac.model.registry import LAYERS
from ds_kfac.model.rows import PASSES, ROWS, TERMS, BatchSum
from ds_kfac.plan.plan import Plan
from ds_kfac.schedule.timetable import (
    NO_BATCH,
    SIMILAR_TO_BEFORE,
    SIMILAR_TO_LAST,
    FactorsDue,
)
from ds_kfac.step.messages import (
    FAILED,
    FRESH,
    NONE_UNUSUAL,
    UNUSABLE,
    UNUSUAL,
    Delivery,
    MissedBatches,
    counting,
    scalar_names,
)
from ds_kfac.step.warner import NAMED


class LastBatch(NamedTuple):
    """The last batch of a factor on this rank.

    Attributes:
        step: number of the step that the batch belongs to.
        column: the factor's column in ``numbers_4n``.
        numbers_4n: fp32 [4, n] on the device, with a column for each of the step's n batches. Row 0
            is 1 if the batch was scaled down, otherwise 0. Row 1 is 1 if the factor did not use the
            batch, otherwise 0. Row 2 is the number of rows in the batch. Row 3 is the number of
            the last step whose batch changed the factor, or -1 if no batch has changed it.
    """

    step: int
    column: int
    numbers_4n: Tensor

    @property
    def last_change(self) -> Tensor:
        """Number of the last step whose batch changed the factor, as an fp32 scalar on the
        device."""
        return self.numbers_4n[-1, self.column]

    def tolist(self) -> list[float]:
        """Return the factor's four numbers. Synchronises with the device."""
        return self.numbers_4n[:, self.column].tolist()


@dataclass
class FactorLog:
    """Log of what happened to factors since this rank started or loaded a checkpoint.
    ``ds_kfac/diagnostics/explain.py`` shows the log to users. No step depends on the log, and
    checkpoints do not contain it.

    Attributes:
        batches: factor key -> last batch on this rank.
        tried: factor key -> (step of the last refresh, its outcome). The outcome is FAILED,
            UNUSABLE or FRESH.
        fresh: factor key -> step of the last refresh that produced a decomposition.
    """

    batches: dict[str, LastBatch] = field(default_factory=dict)
    tried: dict[str, tuple[int, float]] = field(default_factory=dict)
    fresh: dict[str, int] = field(default_factory=dict)


@dataclass
class FactorStep:
    """Record of what one step does to the factors. :meth:`FactorUpdates.update` creates the record.
    :meth:`FactorUpdates.decompose` and :meth:`FactorUpdates.deliver` add to it.

    Attributes:
        due: keys of the factors for which this step collects statistics, and keys of the factors
            that it decomposes, according to the timetable. Keys of factors that a shared factor has
            replaced are left out.
        travels: whether decompositions are ever sent to other ranks.
        terms: layer name -> number of loss terms in the step's batch.
        similar: factor key -> fp32 scalar on the device. If the factor did not use the batch, the
            scalar is :data:`NO_BATCH`. Otherwise it starts at 0. :data:`SIMILAR_TO_LAST` is added
            if the new average is similar to the factor's previous average, and
            :data:`SIMILAR_TO_BEFORE` if it is similar to the average before that one
            (:func:`ds_kfac.curvature.factor.update_`).
        unusual: for each kind in :data:`ds_kfac.step.messages.UNUSUAL`, the number of this rank's
            batches of that kind.
        missed: this rank's factors to which only some of the ranks contributed.
        arriving: keys of the factors that are decomposed in this step, on any rank.
        outcomes: factor key -> FAILED, UNUSABLE or FRESH, for the factors of this rank. If
            :attr:`travels` is True, :meth:`FactorUpdates.deliver` adds the factors of all other
            ranks.
        bases: factor key -> decomposition, for the factors that this rank has decomposed.
            :meth:`FactorUpdates.deliver` adds the decompositions that this rank needs from other
            ranks.
        scalars: name -> scalar, for the scalars that any rank has sent. Empty before
            :meth:`FactorUpdates.deliver`.
    """

    due: FactorsDue
    travels: bool
    terms: dict[str, Tensor] = field(default_factory=dict)
    similar: dict[str, Tensor] = field(default_factory=dict)
    unusual: Sequence[Tensor | float] = NONE_UNUSUAL
    missed: MissedBatches = field(default_factory=MissedBatches)
    arriving: tuple[str, ...] = ()
    outcomes: dict[str, float] = field(default_factory=dict)
    bases: dict[str, Decomposition] = field(default_factory=dict)
    scalars: Mapping[Hashable, Tensor] = field(default_factory=dict)


class FactorUpdates:
    """Averages the factors of a rank in place, decomposes them, and delivers the decompositions.

    Args:
        plan: assigns tasks to ranks, and defines intervals, methods and dtypes.
        averaged_over: number of ranks over which DeepSpeed averages gradients, including ranks of
            other domains.

    Attributes:
        reducer: sends batch sums to the owners.
        factors: factor key -> factor, for the factors that this rank averages and decomposes.
        ready: keys of the factors that have been decomposed. If decompositions are sent to other
            ranks, these are factors of all ranks, otherwise only factors of this rank.
        log: what happened to factors, see :class:`FactorLog`.
        specs: factor key -> :class:`FactorSpec`, for the factors of all ranks.
        layer_of: factor key -> first of the layers that have this factor.
        of_layer: layer name -> {"A": spec, "G": spec}, see :func:`factors_by_layer`.
        home: device on which averages are kept between steps.
        paired: whether the decomposition of a factor needs the layer's other factor. If so, both
            factors are on the same rank.
        counted: factor key -> names of the layers whose number of loss terms is read from this
            factor's batches.
    """

    def __init__(
        self,
        plan: Plan,
        channel: Channel,
        metrics: Metrics,
        device: torch.device,
        *,
        averaged_over: int,
    ) -> None:
        self.averaged_over = averaged_over
        self.plan = plan
        self.config = plan.config
        self.channel = channel
        self.metrics = metrics
        self.device = device
        self.rank = channel.rank
        roles = plan.assignment
        reduction = ReductionPlan(
            roles.factors, roles.owners, plan.contributors, plan.wire, plan.bucket_bytes
        )
        self.reducer = Reducer(reduction, channel, device)
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
        self.owners = roles.owners
        self.delivery = Delivery(
            roles.factors,
            self.owners,
            roles.workers,
            world=channel.world,
            wire=plan.wire,
            nbytes=plan.bucket_bytes,
            method=plan.method,
            copied=[layer.name for layer in plan.layers if layer.copies > 1],
        )
        self.travels = self.delivery.travels
        never = torch.full((4, 1), -1.0, device=device, dtype=torch.float32)
        self._no_batch = LastBatch(0, 0, never)
        self.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as a dict. Factor keys contain this process's
        layer names. The entries are:

        - factors: dict from factor key to this rank's factor;
        - ready, log: the attributes of the same names;
        - schedule: see :meth:`Timetable.state`.
        """
        return {
            "factors": dict(self.factors),
            "ready": set(self.ready),
            "schedule": self.timetable.state(),
            "log": self.log,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of :meth:`state_dict`. Factors of this rank that are not in
        ``state`` start empty. Factors of layers that this process does not have are dropped."""
        saved = state.get("factors", {})
        self.factors = {
            key: saved[key] if key in saved else self._empty(spec)
            for key, spec in self.specs.items()
            if self.owners[key] == self.rank
        }
        self.ready = set(state.get("ready", ())) & self.specs.keys()
        self.timetable.restore(state.get("schedule", {}))
        self.log: FactorLog = state.get("log", FactorLog())

    def _empty(self, spec: FactorSpec) -> KroneckerFactor:
        empty = KroneckerFactor.empty(spec.side, self.device).to(self.home)
        if self.plan.adaptive:
            return replace(empty, history=History.of(spec.side).to(self.home))
        return empty

    def factor(
        self, side: Side, packed_P: Tensor, updates: Tensor, *values: Tensor | None
    ) -> KroneckerFactor:
        """Return a factor made of these tensors. ``values`` are the last two values in its history.
        They are ignored if factors have no history."""
        history = History.of(side, *values).to(self.home) if self.plan.adaptive else None
        # The counter `updates` stays on the device even if averages are offloaded, because GPU
        # kernels read it at every update. The average is copied from the device to the host, which
        # pins the memory. For the rest of the run, new averages are copied into that memory.
        return KroneckerFactor(side, packed_P.to(self.device), updates.to(self.device), history).to(
            self.home
        )

    def of_none_but(self, layers: Collection[str]) -> frozenset[str]:
        """Return the keys of the factors that belong only to layers in ``layers``."""
        return frozenset(
            key for key, spec in self.specs.items() if all(name in layers for name in spec.layers)
        )

    def layers_of(self, keys: Collection[str]) -> set[str]:
        """Return the names of the layers that have any of these factors."""
        return {name for key in keys for name in self.specs[key].layers}

    def forget(self, keys: Collection[str]) -> None:
        """Restart these factors from zero, because the proof found that their averages contain
        wrong rows. Once the layers pass a proof again, the factors are decomposed at their next
        update, without waiting for a refresh."""
        for key in keys & self.factors.keys():
            self.factors[key] = self._empty(self.specs[key])
        self.ready.difference_update(keys)

    # the stages of a step

    def update(self, step: int, due: FactorsDue, sums: Mapping[str, BatchSum]) -> FactorStep:
        """Add this step's batch sums, which are already reduced over ranks, to the running averages
        of this rank's factors.

        Args:
            step: number of applied steps before this one.
            due: keys of the factors to update, and keys of the factors to refresh. Keys of factors
                that a shared factor has replaced are ignored.
        """
        update = FactorStep(
            FactorsDue(due.capture & self.specs.keys(), due.refresh & self.specs.keys()),
            self.travels,
        )
        batches = {
            key: sums[key] for key in self.factors if key in update.due.capture and key in sums
        }
        if self.plan.counts_terms:
            update.terms = self._terms(batches)
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
            # The average decays once for each scheduled update, including those that the adaptive
            # rule skipped.
            decays=[decay ** self.timetable.clocks[key].interval for key in keys],
            device=self.device,
            tolerance=self.plan.adaptive,
        )
        update.similar = {
            keys[at]: torch.where(
                flags[1, at], NO_BATCH, SIMILAR_TO_LAST * last + SIMILAR_TO_BEFORE * before
            )
            for at, (last, before) in similar.items()
        }
        partial = tuple(key for key, batch in batches.items() if batch.ranks < self.channel.world)
        missed: Tensor | float = 0.0
        if partial:
            without_rows = torch.stack([batches[key].counts[ROWS] for key in partial]) <= 0
            update.missed = MissedBatches(partial, without_rows)
            missed = without_rows.sum()
        update.unusual = *flags.sum(dim=1), missed
        self._log_batches(step, keys, flags, rows)
        return update

    def _terms(self, batches: Mapping[str, BatchSum]) -> dict[str, Tensor]:
        """Return layer name -> number of loss terms, summed over all ranks. It is assumed that a
        rank that did not contribute had as many loss terms as a rank that did."""
        terms: dict[str, Tensor] = {}
        for key, batch in batches.items():
            ratio = self.averaged_over / batch.ranks
            of_factor = batch.counts[TERMS] * (batch.counts[ROWS] > 0) * ratio
            terms |= dict.fromkeys(self.counted.get(key, ()), of_factor)
        return terms

    def _log_batches(self, step: int, keys: Sequence[str], flags: Tensor, rows: Tensor) -> None:
        """Record this rank's batches in :attr:`log`."""
        last_changes = torch.stack(
            [self.log.batches.get(key, self._no_batch).last_change for key in keys]
        )
        numbers = torch.stack([*flags, rows, torch.where(flags[1], last_changes, step)])
        for column, key in enumerate(keys):
            self.log.batches[key] = LastBatch(step, column, numbers)

    def of_gradients(self, key: str) -> bool:
        """Whether a factor's rows depend on gradients. This is true for every G. It is also true
        for the A of a norm layer, whose rows are gradients times inputs."""
        return not self.specs[key].is_A or LAYERS[self.layer_of[key].kind].needs_gradients

    def _scale(self, batch: BatchSum) -> None:
        """Convert a sum of R_p g g^T, or of g g^T, into the Fisher's G, see "Scale of G" in
        ``model/capture.py``. The sum is over the contributors, the ranks whose rows are in it.

        g is a rank's part of an average over ``averaged_over`` ranks. K is the number of backward
        passes on all of these ranks, and M is the number of loss terms on all of them. It is
        assumed that a rank that did not contribute had the same sums as a contributor.
        """
        others = self.channel.world / batch.ranks
        K_or_M = batch.counts[TERMS if self.config.factor.mean_over_step else PASSES]
        on_all = K_or_M * (self.averaged_over / batch.ranks)
        batch.sum_P.mul_(on_all * (others / self.averaged_over**2))

    def decompose(
        self,
        step: int,
        update: FactorStep,
        last: Callable[[FactorSpec], Any] | None = None,
        unproven: Collection[str] = (),
    ) -> None:
        """Decompose the factors that the timetable names for this step, and the factors that wait
        for their first decomposition.

        Args:
            last: function that returns a factor's previous decomposition, or None if this rank does
                not have one. Iterative methods start from that decomposition. If ``last`` is None,
                every factor is decomposed from scratch.
            unproven: keys of factors whose layers failed the last proof of their rows. These
                factors are not decomposed.
        """
        # A factor that had no data at the last refresh is decomposed at its next update. If it
        # waited for the next refresh, its layers would not be preconditioned for a whole refresh
        # interval.
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
        # an unusable factor that was never decomposed may simply have no data yet
        stale = [
            key
            for key, outcome in update.outcomes.items()
            if outcome == FAILED or (outcome == UNUSABLE and key in self.ready)
        ]
        if stale:
            logger.warning(
                f"ds_kfac: no decomposition of factor {', '.join(stale[:NAMED])} succeeded "
                f"({len(stale)} such factors in step {step}); each keeps its last decomposition, "
                "if it has one"
            )

    def _decomposed(
        self, keys: Sequence[str], step: int, last: Callable[[FactorSpec], Any] | None
    ) -> list[Refreshed]:
        """Return the decompositions of these factors, in the order of ``keys``."""
        method = self.plan.method
        requests = []
        for key in keys:
            basis = None
            if (
                last is not None
                and method.step_flops
                and not self.timetable.exact(key, step, method.exact_every)
            ):
                basis = last(self.specs[key])
            request = Request(
                self.factors[key], self._partner(key), basis, self.layer_of[key].copies > 1
            )
            requests.append(request.to(self.device))
        options: dict[str, Any] = {}
        if method.damps_identity:
            damping = self.config.damping
            options = {"damping": damping.at(step), "damping_kind": damping.kind}
        return method.decompose(requests, **options)

    def _partner(self, key: str) -> KroneckerFactor | None:
        """Return the other factor of this factor's layer, or None if the decomposition does not
        need it. A damped inverse needs it if the damping depends on both factors, or if the other
        factor is the identity."""
        layer = self.layer_of[key]
        side = layer.G if self.specs[key].is_A else layer.A
        if side.block == 0 and (self.plan.method.damps_identity or self.paired):
            return KroneckerFactor.empty(side, self.device)
        if self.paired:
            return self.factors[key_of(layer.name, "G" if self.specs[key].is_A else "A")]
        return None

    def _usable(self, keys: Collection[str]) -> list[str]:
        """Return the keys of this rank's factors that can be decomposed.

        A factor is left out if the other factor of its layer is on this rank and cannot be
        decomposed. An A that several layers share is left out only if this applies to all of these
        layers, because some of the layers may have no data. Copies flags to the host once.
        """
        layers = {
            key: [[side.key for side in self.of_layer[name].values()] for name in spec.layers]
            for key, spec in self.specs.items()
            if key in keys and key in self.factors
        }
        needed = {key for of_factor in layers.values() for sides in of_factor for key in sides}
        checked = [key for key in self.factors if key in needed]
        if not checked:
            return []
        # checked on the device, because an offloaded factor may still be on its way to the host
        flags = usable([self.factors[key].to(self.device) for key in checked]).tolist()
        can = dict(zip(checked, flags, strict=True))
        return [
            key
            for key, of_factor in layers.items()
            if any(all(can.get(side, True) for side in sides) for sides in of_factor)
        ]

    # exchange between ranks

    def deliver(self, step: int, update: FactorStep) -> None:
        """Send new eigenbases or inverses to the gradient workers, in one or more messages. The
        first message also contains the scalars. Collective. Waits for the device if eigenbases are
        sent to other ranks."""
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
            del arrivals  # views of the last message, which would keep it in memory
            arrivals = deliver(parts, self.channel, self.device)
            bases |= self.delivery.received(arrivals)
        self._receive(step, update, bases)

    def _own_scalars(self, update: FactorStep) -> dict[Hashable, Tensor | float]:
        """Return a dict from name to scalar. It has at least the scalars that this rank sends."""
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
        """Store the scalars of all ranks, and the decompositions that have arrived."""
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
        # Decompositions of this rank are rounded like those that were sent to other ranks, so that
        # all workers of a layer have the same bits.
        for key in update.bases.keys() & self.delivery.rounded_at_home:
            update.bases[key] = update.bases[key].rounded(self.delivery.wire)
        update.bases |= {key: basis for key, basis in bases.items() if key in fresh}
