"""The factors of a rank: averaged, decomposed, delivered to the gradient workers.

Who knows what: the timetable is the same on every rank. Whether a factor could be decomposed is known to its
eigen worker; if eigenbases travel it sends that to everyone, so that all ranks know what the next message contains.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from deepspeed.utils import logger
from torch import Tensor

from ds_kfac.assignment.costs import FactorSpec, factors_by_layer
from ds_kfac.comm.message import Arrivals, Channel
from ds_kfac.comm.reduce import Reducer
from ds_kfac.curvature.eigen import Refreshed, Request, grouped
from ds_kfac.curvature.factor import History, KroneckerFactor, updated
from ds_kfac.curvature.methods import Decomposition
from ds_kfac.metrics import Metrics
from ds_kfac.model.layers import key_of
from ds_kfac.model.rows import BatchSum
from ds_kfac.plan.plan import Plan
from ds_kfac.schedule.timetable import FactorsDue
from ds_kfac.step.decompose import Refresher
from ds_kfac.step.messages import FAILED, FRESH, UNUSABLE, UNUSUAL, Delivery, counting, scalar_names


@dataclass
class FactorDraft:
    """Of the factors.

    Attributes:
        step: applied steps before this one.
        factors, ready, pending: see :class:`FactorUpdates`.
        decays: of this rank's factors that are captured, weight of the past.
        terms: layer name -> loss terms of the batch that was averaged.
        similar: factor key -> bool [2], see :func:`ds_kfac.curvature.factor.updated`.
        unusual: [3], batches of this rank's factors, see :data:`ds_kfac.step.messages.UNUSUAL`; None if nothing was
            averaged.
        missed: this rank's factors to which not all ranks contributed, and bool [n], whether nobody had a row.
        submitted: keys of the decompositions that were started in the background.
        arriving: keys whose decompositions take effect in this step.
        results: of those that were done here.
        scalars: of all ranks, by name.
        bases: what this rank's decompositions left, by factor key; when it was delivered, that of this rank's layers.
        failed: decompositions that failed, where all ranks know.
        unproven: keys of the factors of layers that did not fit at the last proof: not decomposed, nor waited for.
    """

    step: int
    due: FactorsDue
    factors: dict[str, KroneckerFactor]
    ready: set[str]
    pending: dict[str, int]
    decays: dict[str, float] = field(default_factory=dict)
    terms: dict[str, Tensor] = field(default_factory=dict)
    similar: dict[str, Tensor] = field(default_factory=dict)
    unusual: Tensor | None = None
    missed: tuple[tuple[str, ...], Tensor | None] = (), None
    submitted: list[str] = field(default_factory=list)
    arriving: tuple[str, ...] = ()
    results: dict[str, Refreshed] = field(default_factory=dict)
    scalars: Mapping[Hashable, Tensor] = field(default_factory=dict)
    bases: dict[str, Decomposition] = field(default_factory=dict)
    failed: int = 0
    unproven: frozenset[str] = frozenset()


class FactorUpdates:
    """Updates, decomposes and distributes the factors. What a step changes is in its :class:`FactorDraft`.

    Args:
        plan: who, when and how.
        reducer: takes the batch sums to the eigen workers.

    Attributes:
        factors: factor key -> state, of the factors this rank decomposes.
        ready: keys of the factors that have been decomposed; of all, if eigenbases travel, else of this rank's.
        pending: key -> step at which an asynchronous decomposition takes effect.
        numel, layer_of: key -> packed elements, and the first of its layers.
        home: where factors are kept.
        counted: key -> layers whose loss terms are its factor's count.
    """

    def __init__(self, plan: Plan, channel: Channel, reducer: Reducer, metrics: Metrics, device: torch.device) -> None:
        self.plan, self.config, self.layers = plan, plan.config, plan.layers
        self.channel, self.reducer, self.metrics = channel, reducer, metrics
        self.device, self.rank = device, channel.rank
        self.home = torch.device("cpu") if self.config.offload.device == "cpu" else device
        self.timetable = plan.timetable()
        self.specs: Mapping[str, FactorSpec] = {spec.key: spec for spec in plan.assignment.factors}
        self.numel = {key: spec.side.numel for key, spec in self.specs.items()}
        layers = {layer.name: layer for layer in plan.layers}
        self.layer_of = {key: layers[spec.layers[0]] for key, spec in self.specs.items()}
        self.of_layer = factors_by_layer(plan.assignment.factors)
        self.counted: dict[str, list[str]] = {}
        for name, own in self.of_layer.items():
            self.counted.setdefault(counting(own), []).append(name)
        self.eigen_workers = plan.assignment.eigen_workers
        self.delivery = Delivery(
            plan.assignment.factors, self.eigen_workers, plan.assignment.workers,
            world=channel.world, wire=plan.wire, method=plan.method,
            copied=[layer.name for layer in plan.layers if layer.copies > 1],
        )  # fmt: skip
        self.travels = self.delivery.travels
        self.load_state_dict({})

    @cached_property
    def refresher(self) -> Refresher:
        """Decomposes what takes effect later; made when something does."""
        return Refresher(self.device)

    def close(self) -> None:
        """Drop what is decomposed in the background, and give back its thread."""
        if "refresher" in vars(self):
            self.refresher.close()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, in this process's names. Of a pending decomposition it waits for the result.

        factors: key -> (state, decomposition on its way or None), of the factors decomposed here.
        ready, pending: as the attributes. schedule: see :meth:`Timetable.state`.
        """
        pending = {key: self.refresher.result(key) for key in self.factors if key in self.pending}
        return {
            "factors": {key: (state, pending.get(key)) for key, state in self.factors.items()},
            "ready": set(self.ready),
            "pending": dict(self.pending),
            "schedule": self.timetable.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`; factors that it lacks begin empty, others that it has are dropped."""
        found, pending = state.get("factors", {}), state.get("pending", {})
        own = [spec for spec in self.specs.values() if self.eigen_workers[spec.key] == self.rank]
        self.factors = {}
        for spec in own:
            if spec.key in found:
                self.factors[spec.key] = found[spec.key][0]
                continue
            self.factors[spec.key] = self._empty(spec)
        self.ready = set(state.get("ready", ())) & self.specs.keys()
        self.pending: dict[str, int] = {key: step for key, step in pending.items() if key in self.specs}
        if "refresher" in vars(self):
            self.refresher.clear()
        for key in self.pending.keys() & self.factors.keys():
            if found[key][1] is not None:
                self.refresher.give(key, found[key][1])
        self.timetable.restore(state.get("schedule", {}))

    def _empty(self, spec: FactorSpec) -> KroneckerFactor:
        # the counter stays on the device, as in a loaded factor: kernels of a GPU average there
        empty = KroneckerFactor.empty(spec.side, self.device).to(self.home)
        return replace(empty, history=History(spec.side)) if self.plan.adaptive else empty

    def of_none_but(self, layers: Collection[str]) -> frozenset[str]:
        """Keys of the factors that are of these layers alone."""
        return frozenset(key for key, spec in self.specs.items() if all(name in layers for name in spec.layers))

    def forget(self, draft: FactorDraft, keys: Collection[str]) -> None:
        """These factors begin again: not all of what is in them is proven."""
        draft.factors |= {key: self._empty(self.specs[key]) for key in keys if key in draft.factors}
        draft.ready.difference_update(keys)
        draft.pending = {key: step for key, step in draft.pending.items() if key not in keys}

    def draft(self, step: int, due: FactorsDue) -> FactorDraft | None:
        """Of a step that starts from what the last applied one left; of what is due, factors that there are. None if
        nothing happens to any."""
        if not due.capture and step not in self.pending.values():
            return None
        due = FactorsDue(due.capture & self.specs.keys(), due.refresh & self.specs.keys())
        decay, timetable = self.config.factor.decay.at(step), self.timetable
        # for every ordinary interval that a factor sat out
        decays = {key: decay ** timetable.clocks[key].interval for key in self.factors if key in due.capture}
        return FactorDraft(step, due, dict(self.factors), set(self.ready), dict(self.pending), decays)

    # the stages of a step

    def update(self, draft: FactorDraft, sums: Mapping[str, BatchSum]) -> None:
        """Take batch sums of all ranks into the averages of this one's factors."""
        batches = {key: sums[key] for key in draft.decays if key in sums}
        for key, batch in batches.items():
            # ranks that did not contribute are taken to have as many
            terms = batch.count * (self.channel.world / batch.ranks)
            draft.terms |= dict.fromkeys(self.counted.get(key, ()), terms)
        new, similar, draft.unusual = updated(
            [draft.factors[key] for key in batches],
            [batch.sum_P for batch in batches.values()],
            [batch.count for batch in batches.values()],
            decays=[draft.decays[key] for key in batches],
            device=self.device,
            tolerance=self.plan.adaptive,
        )
        if few := tuple(key for key, batch in batches.items() if batch.ranks < self.channel.world):
            draft.missed = few, torch.stack([batches[key].count for key in few]) <= 0
        missed = draft.unusual.new_zeros(()) if draft.missed[1] is None else draft.missed[1].sum()
        draft.unusual = torch.stack([*draft.unusual, missed])
        keys = list(batches)
        draft.factors |= zip(keys, new, strict=True)
        draft.similar = {keys[index]: flags for index, flags in similar.items()}

    def decompose(self, draft: FactorDraft, last: Callable[[FactorSpec], Any] | None = None) -> None:
        """Decompose what is due here and now; start what takes effect later; collect what takes effect now.

        Args:
            last: what a factor's last decomposition left on this rank, or None; without it nothing is iterated.
        """
        step, ready = draft.step, draft.ready | draft.unproven
        # captured factors of layers that wait for an eigenbasis, because they had no data at the last refresh, need not
        # wait for the next one
        waiting = {
            key
            for key in draft.due.capture
            if (self.travels or key in self.factors)
            and any(other.key not in ready for name in self.specs[key].layers for other in self.of_layer[name].values())
        }
        keys = (draft.due.refresh | waiting) - draft.unproven
        lag = self.plan.lag and min(self.plan.lag, self.plan.schedule.intervals(step)[1] - 1)
        now = {key for key in keys if lag < 1 or key not in ready}
        later = keys - now - set(draft.pending)
        draft.arriving = tuple(key for key in self.specs if key in now or draft.pending.get(key) == step)
        able = self._usable(now | later, draft)
        draft.submitted = [key for key in able if key not in now]
        for part in [draft.submitted] if grouped(self.device) else [[key] for key in draft.submitted]:
            self.refresher.submit(part, self._work(part, draft, last))
        here = [key for key in able if key in now]
        draft.results |= zip(here, self._work(here, draft, last)(), strict=True)
        draft.pending |= dict.fromkeys(later, step + lag)
        for key in draft.arriving:
            if key not in now and key in draft.factors:
                draft.results[key] = self.refresher.result(key)
        draft.bases = {key: result.basis for key, result in draft.results.items() if result.basis is not None}
        counts = self.metrics.step_counts
        for key, result in draft.results.items():
            counts["refreshes"] += result.basis is not None
            counts[f"refreshes_{result.how}"] += 1
            counts["refresh_retries"] += result.retries
            counts["refresh_failures"] += result.basis is None
            if result.basis is None:
                logger.warning(f"ds_kfac: no decomposition of factor {key} succeeded; the last one's result stays")

    def _work(
        self, keys: Sequence[str], draft: FactorDraft, last: Callable[[FactorSpec], Any] | None = None
    ) -> Callable[[], list[Refreshed]]:
        """Decomposes factors, in this order; bound to what holds at this step, as it may be done later, on a side
        thread or stream."""
        method, config, device, asked = self.plan.method, self.config, self.device, list[Request]()
        for key in keys:
            layer, partner, basis = self.layer_of[key], None, None
            if last is not None and method.step_flops and not self.timetable.exact(key, draft.step, method.exact_every):
                basis = last(self.specs[key])
            if method.damps_identity or self.plan.paired:  # the damping is part of what is kept
                side, other = (layer.G, "G") if self.specs[key].is_A else (layer.A, "A")
                if side.block == 0:
                    partner = KroneckerFactor.empty(side, device)
                elif self.plan.paired:
                    partner = draft.factors[key_of(layer.name, other)]
            asked.append(Request(draft.factors[key], partner, basis, layer.copies > 1))
        options: dict[str, Any] = {}
        if method.damps_identity:
            options = {"damping": config.damping.at(draft.step), "damping_kind": config.damping.kind}

        def work() -> list[Refreshed]:
            return method.decompose([request.to(device) for request in asked], **options)

        return work

    def _usable(self, keys: set[str], draft: FactorDraft) -> list[str]:
        """Those of this rank that can be decomposed, and whose layer's other factor can, too, as far as it is here. One
        transfer to the host for all."""
        partners = {
            key: [other.key for other in self.of_layer[spec.layers[0]].values()]
            for key, spec in self.specs.items()
            if key in keys and key in draft.factors
        }
        asked = [key for key in draft.factors if any(key in others for others in partners.values())]
        if not asked:
            return []
        # on the device: an offloaded factor may still be on its way to the host
        flags = torch.stack([draft.factors[key].to(self.device).usable() for key in asked]).tolist()
        known = dict(zip(asked, flags, strict=True))
        return [key for key, others in partners.items() if all(known.get(other, True) for other in others)]

    # what travels with the gradients

    def scalars(self, draft: FactorDraft) -> tuple[list[list[Hashable]], dict[Hashable, Tensor]]:
        """Per rank the names of the scalars that it tells all others in this step, and this rank's by name."""
        names = scalar_names(
            self.plan, captured=draft.due.capture, arriving=draft.arriving, travels=self.travels,
            terms=self.config.preconditioner.eigenvalues == "corrected",
        )  # fmt: skip
        values: dict[Hashable, Tensor] = {("terms", name): terms for name, terms in draft.terms.items()}
        values |= {("similar", key): flags[0] + 2.0 * flags[1] for key, flags in draft.similar.items()}
        if draft.unusual is not None:
            values |= {(kind, self.rank): number for kind, number in zip(UNUSUAL, draft.unusual.unbind(), strict=True)}
        for key in draft.arriving:
            result = draft.results.get(key)
            state = UNUSABLE if result is None else FAILED if result.basis is None else FRESH
            values["fresh", key] = torch.full((), state, device=self.device)
        return names, values

    def receive(self, draft: FactorDraft, arrivals: Sequence[Arrivals], scalars: Mapping[Hashable, Tensor]) -> None:
        """New eigenbases or inverses of the factors of this rank's layers. Synchronises if they travel, in the steps in
        which they do.

        Args:
            arrivals: of each of the delivery's parts.
            scalars: of all ranks, by name.
        """
        draft.scalars = scalars
        draft.terms |= {name[1]: x for name, x in scalars.items() if isinstance(name, tuple) and name[0] == "terms"}
        for key in draft.arriving:
            draft.pending.pop(key, None)
        fresh = set(draft.bases)
        if self.travels and draft.arriving:
            flags = torch.stack([scalars["fresh", key] for key in draft.arriving]).tolist()
            fresh = {key for key, flag in zip(draft.arriving, flags, strict=True) if flag == FRESH}
            draft.failed = flags.count(FAILED)
        draft.ready |= fresh
        arrived = self.delivery.received(draft.bases, *arrivals)
        draft.bases = {key: basis for key, basis in arrived.items() if key in fresh}
        if self.travels:  # all ranks know what came of them; the wire's rounding has made copies
            draft.results = {key: replace(result, basis=None) for key, result in draft.results.items()}

    def commit(self, draft: FactorDraft, *, applied: bool) -> None:
        """Keep what the step changed, or drop it."""
        ended = [key for key in (*self.pending, *draft.submitted) if key not in draft.pending]
        if done := ended if applied else draft.submitted:
            self.refresher.drop(done)
        if applied:
            self.factors, self.ready, self.pending = draft.factors, draft.ready, draft.pending

    def redecomposed(self, step: int) -> FactorDraft:
        """As :meth:`decompose`, exactly, of all factors with data, outside of a step: after loading without bases."""
        nothing = FactorsDue(frozenset(), frozenset())
        draft = FactorDraft(step, nothing, dict(self.factors), set(self.ready), dict(self.pending))
        draft.arriving = tuple(self.specs)
        able = self._usable(set(self.specs), draft)
        draft.results |= zip(able, self._work(able, draft)(), strict=True)
        draft.bases = {key: result.basis for key, result in draft.results.items() if result.basis is not None}
        return draft
