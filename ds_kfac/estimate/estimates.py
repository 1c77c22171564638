"""Estimate what K-FAC costs each rank of a run: bytes that it sends and keeps, FLOPs and seconds.

Bytes are exact, because they come from the layouts that the run itself uses. Seconds are
predictions. An array [W] has one number for each rank. In an array [W, W], row i and column j
contain the bytes that rank i sends to rank j.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from ds_kfac.assignment import costs as rates
from ds_kfac.comm.message import ALIGNMENT, RelayoutPlan
from ds_kfac.comm.reduce import IN_FLIGHT, ReductionPlan, payloads
from ds_kfac.curvature.eigen import Precision
from ds_kfac.curvature.methods import METHODS
from ds_kfac.estimate.subject import Subject
from ds_kfac.metrics import STAGES, SUMMARY
from ds_kfac.model.convolutions import Convolution, grid_step
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import LAYERS
from ds_kfac.plan import plan as planning
from ds_kfac.schedule.timetable import FactorsDue
from ds_kfac.step.messages import Delivery, scalar_names
from ds_kfac.update.groups import basis_bytes, group_by_shape
from ds_kfac.update.rotation import AT_ONCE
from ds_kfac.zero.exchange import ExchangePlan

Keys = frozenset[str]
Message = Sequence[tuple[str, np.ndarray]]
"""A collective, as a pair (kind of data, bytes [W, W]) for each of its parts. A collective that
reduces batch sums has two parts, the counts and the sums."""

PARTS = tuple(dict.fromkeys(part.kind for method in METHODS.values() for part in method.parts))
KINDS = ("factors", "gradients", *PARTS, "results", "numbers")
"""Kinds of traffic, as counted by :class:`ds_kfac.comm.message.Channel`."""
STATE = ("factors", "history", "eigenbases", "moments")
"""Kinds of memory that are kept between steps. Inverses are counted as eigenbases."""
TRANSIENT = ("sums", "messages", "gradients", "workspace", "results")
"""Kinds of memory that a step needs in addition if it captures all factors. They are not all needed
at the same time.

- sums: batch sums that this rank makes or averages.
- messages: buffers of messages in flight.
- gradients: gathered gradients, and the message that brings them.
- workspace: memory while layers are preconditioned one batch after the other. It has the gradients
  of later layers, the results of earlier layers, and the temporaries of the current layers.
- results: results that wait to be sent, and the message that sends them.
"""
BESIDE = "beside"
"""Kind of memory: the peak of temporary memory over all steps, including the first one. The
gradients and results of this rank's layers are part of it."""
FP32 = 4
"""Bytes of an fp32 number."""


def steps_of(plan: planning.Plan) -> tuple[list[FactorsDue], list[FactorsDue]]:
    """Return the factors that are due in each step, as one list for each of two ranges of steps.

    The first range is in the burn-in. It begins with step 1 and ends when all factors have been
    refreshed twice, or when the burn-in ends, if that is earlier. Without a burn-in, the first list
    is empty. The second range begins after the intervals have changed for the last time. It is one
    period, after which the pattern of updates and refreshes repeats.

    The adaptive rule is ignored, because it can only skip work.
    """
    schedule = plan.schedule
    timetable = replace(plan, adaptive=None).timetable()
    settled = schedule.displaced(max(plan.offsets.values(), default=0)).settled
    burn_in = schedule.burn_in
    update, refresh = schedule.intervals(settled)
    early = schedule.intervals(0)[1]
    period = update * -(-refresh // update)
    first = range(1, min(burn_in.steps, 2 * early + 1) if burn_in else 1)
    last = range(settled + 2 * period, settled + 3 * period)
    return [*map(timetable.due, first)], [*map(timetable.due, last)]


def turned_bytes(layer: LayerSpec) -> int:
    """Return the bytes needed to rotate one of a layer's moments into a new eigenbasis, see
    ``ds_kfac/update/rotation.py``."""
    sides = [side.basis_numel for side in (layer.G, layer.A) if side.basis_numel]
    copies = len(sides) * layer.numel
    if layer.groups == 1 and layer.numel > AT_ONCE:  # in row chunks, except for G
        copies = max(layer.numel if layer.G.basis_numel else 0, AT_ONCE)
    return FP32 * (sum(sides) + copies)


def same_block(world: int, width: int) -> np.ndarray:
    """Return bool [W, W]: whether two ranks are in the same block of ``width`` consecutive ranks.
    For example, the ranks of a node are a block."""
    block = np.arange(world) // width
    return block[:, None] == block[None, :]


def travel(costs: rates.CostModel, payload: np.ndarray, collectives: float) -> np.ndarray:
    """Return the seconds [W] to send and receive ``payload``, bytes [W, W]. A rank sends and
    receives at the same time, so the longer time counts, plus a latency for each collective."""
    near = same_block(len(payload), costs.node_size)
    seconds = np.full(len(payload), collectives * costs.link_seconds)
    for where, rate in ((~near, costs.link_bytes), (near, costs.node_bytes or costs.link_bytes)):
        seconds += np.maximum((payload * where).sum(axis=0), (payload * where).sum(axis=1)) / rate
    return seconds


@dataclass(frozen=True)
class StepTraffic:
    """Traffic of one step, or the mean traffic of several steps.

    Attributes:
        payload: bytes [kinds, W, W], in the order of :data:`KINDS`.
        calls: number of collectives [kinds]. A collective that carries several kinds counts for the
            first of them.
    """

    payload: np.ndarray
    calls: np.ndarray

    def sent(self, kind: str | None = None, *, axis: int = 1) -> np.ndarray:
        """Return the bytes [W] that each rank sends, or receives if ``axis`` is 0. If ``kind`` is
        None, all kinds are summed."""
        return (self.payload.sum(axis=0) if kind is None else self.payload[KINDS.index(kind)]).sum(
            axis=axis
        )


class Estimate:
    """The costs of one strategy. Raises ValueError if K-FAC cannot make a plan for it.

    In the *steady state*, all intervals have changed for the last time. These are the steps in the
    second range of :func:`steps_of`.

    Args:
        rows: number of tokens (or images) that one rank processes in a step. If None, the estimate
            leaves out captures and the model's time.

    Attributes:
        plan: the plan that the run would make.
        plain: traffic of a step that only preconditions.
        update: traffic of a step that also captures every factor.
        refresh: traffic of a step that captures every factor and refreshes every eigenbasis.
        mean: mean traffic of a step in the steady state.
        stages: name of a stage -> mean seconds that the stage's slowest rank needs for it in the
            steady state. Ranks wait for each other in a collective between any two stages, so the
            time of a step is the sum over all stages.
        seconds: mean seconds of a step in the steady state.
        worst: seconds of the longest step in the steady state.
        model: seconds of the model's forward and backward passes; None if unknown.
        overhead: ``seconds`` divided by ``model``; None if unknown.
    """

    def __init__(
        self, subject: Subject, costs: rates.CostModel, world: int, rows: int | None = None
    ) -> None:
        self.subject = subject
        self.costs = costs
        self.world = world
        self.rows = rows
        self.shards = subject.shards(world)
        self.rule = subject.rule
        plan = subject.plan(self.shards, costs, rows)
        # make_plan has chosen the precision for this process's device, which may be a CPU
        if costs.gpu:
            exact = plan.config.preconditioner.precision == "highest"
            precision = plan.precision if exact else Precision("tf32", "tf32")
            plan = replace(
                plan,
                precision=precision,
                batched=planning.batched(torch.device("cuda"), plan.method),
            )
        self.plan = plan
        self.name = subject.strategy(plan.workers, world)
        roles = plan.assignment
        self.factors = roles.factors
        self.owners = roles.owners
        self.workers = roles.workers
        self.exchange = ExchangePlan(self.shards, plan.layers, self.workers)
        wire = plan.wire
        method = plan.method
        self.delivery = Delivery(
            self.factors,
            self.owners,
            self.workers,
            world=world,
            nbytes=plan.bucket_bytes,
            wire=wire,
            method=method,
        )
        # always the reductions of step 0, because all updates cost the same
        self.reduction = ReductionPlan(
            self.factors, self.owners, plan.contributors, wire, plan.bucket_bytes
        )
        self._gradients = self._moved(self.exchange.gather, plan.gradient_dtypes[0])
        self.every = frozenset(factor.key for factor in self.factors)
        none = frozenset[str]()
        self.plain = self._traffic(none, none)
        self.update = self._traffic(self.every, none)
        self.refresh = self._traffic(self.every, self.every)
        self._mean_step()

    @property
    def state(self) -> np.ndarray:
        """Bytes [W] that are kept between steps."""
        return np.sum([self.memory[kind] for kind in STATE], axis=0)

    # bytes on the wire

    def _traffic(self, captured: Keys, arriving: Keys) -> StepTraffic:
        """Return the traffic of a step that captures the factors in ``captured`` and delivers new
        eigenbases of the factors in ``arriving``."""
        payload = np.zeros((len(KINDS), self.world, self.world), np.int64)
        calls = np.zeros(len(KINDS), np.int64)
        delivered = (message for message, _ in self._delivered(captured, arriving))
        for message in (
            *self._sums(captured, self.reduction),
            *delivered,
            self._gather,
            self._scatter,
        ):
            moving = [(KINDS.index(kind), matrix) for kind, matrix in message if matrix.any()]
            calls[[kind for kind, _ in moving[:1]]] += 1
            for kind, matrix in moving:
                payload[kind] += matrix
        return StepTraffic(payload, calls)

    def _sums(self, captured: Keys, reduction: ReductionPlan) -> list[Message]:
        counts_and_sums = (
            payloads(bucket, reduction.dtype.itemsize) for bucket in reduction.of(captured, 0)[1]
        )
        return [[("factors", self._matrix(part)) for part in parts] for parts in counts_and_sums]

    @property
    def _gather(self) -> Message:
        """The message that brings gradients to gradient workers."""
        return [("gradients", self._gradients)]

    def _delivered(self, captured: Keys, arriving: Keys) -> list[tuple[Message, np.ndarray]]:
        """Return the messages that bring new eigenbases or inverses to gradient workers. The first
        message also contains the scalars that ranks exchange.

        Each message is paired with the bytes [W] that each rank needs for what it has unpacked from
        the message.
        """
        delivery = self.delivery
        messages: list[tuple[Message, np.ndarray]] = []
        names = scalar_names(
            self.plan, captured=captured, arriving=arriving, travels=delivery.travels
        )
        numbers = ("numbers", self._numbers([len(of_rank) for of_rank in names], self.world))
        for pairs in delivery.messages(arriving) or [[]]:
            moves = zip(delivery.kinds, delivery.plans(pairs), delivery.dtypes, strict=True)
            message = [(kind, self._moved(plan, dtype)) for kind, plan, dtype in moves]
            brought = (([rank], self._basis[self.factors[place].key]) for place, rank in pairs)
            if not messages:
                message.append(numbers)
            messages.append((message, self._at(brought)))
        return messages

    @cached_property
    def _basis(self) -> Mapping[str, int]:
        """Factor key -> bytes of its decomposition."""
        return {
            factor.key: rates.basis_bytes(factor.side, self.plan.method) for factor in self.factors
        }

    @cached_property
    def _scatter(self) -> Message:
        """The message from gradient workers. It contains the results, and the scalars that are
        summed over a row of ranks. These are the scalars of the update rule and of the metrics, and
        a flag per layer if the update rule needs flags."""
        flags = len(self.plan.layers) if self.rule.flags(self.plan.config) else 0
        count = self.rule.numbers + len(SUMMARY) + flags
        results = self.exchange.scatter
        numbers = self._numbers([count] * self.world, len(self.plan.rows[0]))
        return [
            ("results", self._moved(results, self.plan.gradient_dtypes[1])),
            ("numbers", numbers),
        ]

    def _moved(self, plan: RelayoutPlan, dtype: torch.dtype) -> np.ndarray:
        return self._matrix(
            {pair: sum(sizes) * dtype.itemsize for pair, sizes in plan.sizes.items()}
        )

    def _matrix(self, of_pairs: Mapping[tuple[int, int], int]) -> np.ndarray:
        """Return the mapping (sending rank, receiving rank) -> bytes as an array [W, W]."""
        matrix = np.zeros((self.world, self.world), dtype=np.int64)
        for pair, nbytes in of_pairs.items():
            matrix[pair] = nbytes
        return matrix

    def _numbers(self, counts: Sequence[int], width: int) -> np.ndarray:
        """Return the bytes [W, W] of scalars that each rank sends to the other ranks of its row.

        Args:
            counts: number of scalars of each rank.
            width: number of ranks in a row.
        """
        return (
            FP32
            * np.array(counts)[:, None]
            * (same_block(self.world, width) & ~np.eye(self.world, dtype=bool))
        )

    # bytes in memory

    @cached_property
    def memory(self) -> Mapping[str, np.ndarray]:
        """Kind of memory -> bytes [W], once all factors and eigenbases exist."""
        plan = self.plan
        groups = self._layer_groups
        nbytes_of = plan.assignment.work.bytes_of(self.workers, self.owners)
        memory = {kind: np.array(nbytes_of[kind]) for kind in STATE if kind in nbytes_of}
        # Layers that are preconditioned in one batch have copies of their eigenvectors in stacks. A
        # shared A has a copy for each layer.
        stacked = [[group for group in of_rank if len(group) > 1] for of_rank in groups]
        inside = [{layer.name for group in of_rank for layer in group} for of_rank in stacked]
        copied = self._in_stacks(self.every, inside)
        memory["eigenbases"] = (
            memory["eigenbases"] + [sum(map(basis_bytes, of_rank)) for of_rank in stacked] - copied
        )
        memory["history"] = (
            2 * bool(plan.adaptive) * self._on_owners(lambda factor: FP32 * factor.side.numel)
        )
        device = "cuda" if self.costs.gpu else "cpu"
        layers = [[layer for group in of_rank for layer in group] for of_rank in groups]
        recorded = np.array([self.rule.facts.kept(plan, of_rank, device) for of_rank in layers])

        gathered, working, results = self._preconditioned()
        if plan.first is None:
            first = self.reduction
        else:
            first = replace(self.reduction, contributors=plan.first)
        steps = {step for steps in steps_of(plan) for step in steps}
        captures = [(self.every, first), *((step.capture, self.reduction) for step in steps)]
        # the first step decomposes all factors while no eigenbases exist yet
        missing = memory["eigenbases"] - copied
        peaks = [self._refreshed(FactorsDue(self.every, self.every)) - missing]
        peaks += [self._refreshed(step) for step in steps]
        peaks += [sum(self._reduced(keys, reduction)) for keys, reduction in captures]
        memory["sums"], under_way = self._reduced(self.every, self.reduction)
        delivers = [
            self._buffers(message)[1] for message, _ in self._delivered(self.every, self.every)
        ]
        (sent, gathers), (_, scatters) = self._buffers(self._gather), self._buffers(self._scatter)
        gathered = np.maximum(gathers, gathers - sent + gathered)
        results = np.maximum(results, scatters)
        peaks += [gathered, working, results]
        memory["messages"] = np.max([under_way, gathers, scatters, *delivers], axis=0)
        memory["gradients"] = gathered
        memory["results"] = results
        memory["workspace"] = working
        memory[BESIDE] = np.max(peaks, axis=0) + recorded
        return {kind: nbytes.astype(np.int64) for kind, nbytes in memory.items()}

    def _in_stacks(self, keys: Keys, inside: Sequence[Set[str]]) -> np.ndarray:
        """Return the bytes [W] of the eigenbases that each rank keeps only in stacks. The rank uses
        these eigenbases only for layers that are preconditioned in batches.

        Args:
            keys: keys of the factors whose eigenbases count.
            inside: for each rank, names of the layers that are preconditioned in batches.
        """
        total = np.zeros(self.world)
        for factor in (factor for factor in self.factors if factor.key in keys):
            for rank in rates.Work.users(factor, self.workers):
                layers_of_rank = {name for name in factor.layers if rank in self.workers[name]}
                if layers_of_rank <= inside[rank]:
                    total[rank] += rates.basis_bytes(factor.side, self.plan.method)
        return total

    def _refreshed(self, due: FactorsDue) -> np.ndarray:
        """Return the peak of the bytes [W] that a step needs from its first decomposition until the
        new eigenbases are in use."""
        plan = self.plan
        keys = due.refresh
        held = self._on_owners(lambda factor: self._basis[factor.key], keys)
        peaks = [held]
        for message, brought in self._delivered(due.capture, keys):
            sent, both = self._buffers(message)
            peaks += [held + both, held + both - sent + brought]
            held = held + brought
        # a rank rounds its own decompositions to the dtype of the messages, one after the other
        rounded_at_home = keys & self.delivery.rounded_at_home
        rounded = [(self.owners[key], self._basis[key]) for key in rounded_at_home]
        copied, turning = np.zeros((2, self.world))
        for rank, nbytes in rounded if plan.wire is not torch.float32 else ():
            copied[rank] = max(copied[rank], nbytes)
        for rank, groups in enumerate(self._layer_groups):
            turned = (x for group in groups for x in group if keys & set(x.keys))
            turning[rank] = max(map(turned_bytes, turned), default=0) * self.rule.rotates(
                plan.config
            )
        return np.max([*peaks, held + copied, held + turning], axis=0)

    def _reduced(self, keys: Keys, reduction: ReductionPlan) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays of bytes [W]. The first is for the factors' batch sums, on the ranks
        that make or average them. The second is the peak size of the buffers of the messages with
        these sums, of which several may be in flight at once."""
        sums = (
            ({slot.owner, *slot.contributors}, FP32 * slot.numel)
            for slot in reduction.of(keys, 0)[0]
        )
        each = [self._buffers(message)[1] for message in self._sums(keys, reduction)]
        return self._at(sums), np.max(
            [self._at([]), *(sum(each[i : i + IN_FLIGHT]) for i in range(len(each)))], axis=0
        )

    def _buffers(self, message: Message) -> np.ndarray:
        """Return the bytes [2, W] of a message's buffers on each rank, with alignment. The first
        row is for the send buffer, the second row for the send and receive buffers together."""
        padded = sum(
            (-(-matrix // ALIGNMENT) * ALIGNMENT for _, matrix in message),
            np.zeros((self.world, self.world)),
        )
        return np.stack([padded.sum(axis=1), padded.sum(axis=1) + padded.sum(axis=0)])

    @cached_property
    def _layer_groups(self) -> list[tuple[tuple[LayerSpec, ...], ...]]:
        """The layers of each rank, in the groups in which they are preconditioned."""
        key = (lambda layer: layer.copies) if self.plan.batched else None
        layers_by_rank = [
            [x for x in self.plan.layers if rank in self.workers[x.name]]
            for rank in range(self.world)
        ]
        return [group_by_shape(layers, key=key) for layers in layers_by_rank]

    def _preconditioned(self) -> np.ndarray:
        """Return bytes [3, W] in three rows:

        1. gathered gradients;
        2. the peak while layers are preconditioned. It includes the remaining gradients, the
           results that wait to be sent, and the workspace of a chunk of layers;
        3. all results that wait to be sent, and the send buffer of their message.
        """
        plan = self.plan
        arriving, leaving = plan.gradient_dtypes
        params = self.exchange.of_layer
        sent = {
            (move.source, move.param, move.start, move.numel)
            for move in self.exchange.scatter.moves
        }
        waiting = Counter[tuple[int, int]]()
        for rank, param, _, numel in sent:
            waiting[rank, param] += leaving.itemsize * numel
        # (rank, parameter) pairs for which the rank holds the parameter's complete gradient
        complete = {
            (s.rank, s.param) for s in self.shards.shards if s.numel == self.shards.numels[s.param]
        }
        memory = np.zeros((3, self.world))
        for rank, groups in enumerate(self._layer_groups):
            layers = [layer for group in groups for layer in group]
            # If the layer consists of one parameter, and this rank has its complete gradient, the
            # gradient is read in place and not gathered.
            held = {
                name
                for name, (param, *more) in params.items()
                if not more and (rank, param) in complete
            }
            missing = {
                layer.name: arriving.itemsize * layer.numel
                for layer in layers
                if layer.name not in held
            }
            memory[0, rank] = left = sum(missing.values())
            # If DeepSpeed keeps averaged gradients in fp32 at stage 0, the gradient of a layer that
            # is preconditioned alone is not copied.
            finished = self.subject.replicated and self.subject.gradients is torch.float32
            if finished:
                alone = {group[0].name for group in groups if len(group) == 1} & held
            else:
                alone = set()
            done = 0
            most = 0
            for chunk, nbytes in self.rule.facts.workspace(plan, groups):
                nbytes -= sum(FP32 * layer.numel for layer in chunk if layer.name in alone)
                before = left
                left -= sum(missing.get(layer.name, 0) for layer in chunk)
                of_results = [
                    sum(waiting[rank, param] for param in params[layer.name]) for layer in chunk
                ]
                # A gradient is freed as soon as it has been copied in fp32. A group's directions
                # are freed as soon as they have been copied.
                taken = before + max(FP32 * layer.numel for layer in chunk)
                put = left + sum(FP32 * layer.numel for layer in chunk) + max(of_results)
                most = max(most, done + max(taken, left + nbytes, put))
                done += sum(of_results)
            memory[1:, rank] = most, done
        memory[2] += self._buffers(self._scatter)[0]
        # ZeRO with fp16 gradients keeps the results in fp32
        if self.subject.gradients is torch.float16 and not self.subject.replicated:
            memory[1:] += self._at(([shard.rank], 2 * shard.numel) for shard in self.shards.shards)
        return memory

    # FLOPs and seconds

    def _mean_step(self) -> None:
        """Compute the traffic and seconds of the mean step, and the seconds of the longest step.
        Only steps in the steady state count."""
        (_, steps), seconds = steps_of(self.plan), dict[FactorsDue, dict[str, float]]()
        costs = self.costs
        method = self.plan.method
        # gradients are copied once when they are gathered, and results once when they are written
        copies = self._on_workers(lambda layer: 4 * FP32 * layer.numel / costs.copy_bytes)
        precondition = self._on_workers(self._precondition)
        payload = np.zeros_like(self.plain.payload)
        calls = np.zeros_like(self.plain.calls)
        for step, times in Counter(steps).items():
            traffic = self._traffic(step.capture, step.refresh)
            payload = payload + times * traffic.payload
            calls = calls + times * traffic.calls
            # KINDS begins with the factors
            reduce = travel(costs, traffic.payload[0], traffic.calls[0])
            moved = travel(costs, traffic.payload[1:].sum(axis=0), traffic.calls[1:].sum())
            stages = (
                self._captures(step.capture) / costs.syrk_flops,
                reduce + self._on_owners(lambda factor: costs.fold(factor.side), step.capture),
                self._on_owners(lambda factor: costs.decompose(factor.side, method), step.refresh),
                moved + copies,
                precondition,
            )
            seconds[step] = {
                stage: float(each.max()) for stage, each in zip(STAGES, stages, strict=True)
            }
        self.mean = StepTraffic(payload / len(steps), calls / len(steps))
        of_steps = [seconds[step] for step in steps]
        self.stages = {
            stage: sum(each[stage] for each in of_steps) / len(of_steps) for stage in STAGES
        }
        self.seconds = sum(self.stages.values())
        self.worst = max(sum(each.values()) for each in of_steps)
        # 2 FLOPs per multiplication in the forward pass, 4 in the backward pass
        flops = 6.0 * self.subject.forward * (self.rows or 0)
        self.model = flops / (costs.model_flops or costs.gemm_flops) if flops else None
        self.overhead = self.seconds / self.model if self.model else None

    def _precondition(self, layer: LayerSpec) -> float:
        """Return the seconds to precondition one layer in a step. On a GPU the update rule's own
        matrix products run in 16 bits at the model's rate, unless
        ``kfac.preconditioner.precision`` is "highest"."""
        costs = self.costs
        rate = max(costs.rate(rates.mean_width(layer)), costs.model_flops if self._half else 0.0)
        passes = costs.elementwise(FP32 * self.rule.facts.passes * layer.numel)
        rule_flops = self.rule.facts.flops(self.plan.config, layer, half=self._half)
        return costs.precondition(layer, self.plan.method) + rule_flops / rate + passes

    @property
    def _half(self) -> bool:
        return self.costs.gpu and self.plan.config.preconditioner.precision != "highest"

    @property
    def flops(self) -> Mapping[str, np.ndarray]:
        """Name of a stage -> FLOPs [W] to run the stage once for all factors ("capture" and
        "refresh"), or once for all layers ("precondition")."""
        method = self.plan.method
        config = self.plan.config
        facts = self.rule.facts
        half = self._half
        return {
            "capture": self._captures(self.every),
            "refresh": self._on_owners(lambda factor: rates.decompose_flops(factor.side, method)),
            "precondition": self._on_workers(
                lambda x: rates.precondition_flops(x, method) + facts.flops(config, x, half=half)
            ),
        }

    def _captures(self, keys: Keys) -> np.ndarray:
        """Return the FLOPs [W] to capture the factors in ``keys`` in one step."""
        plan = self.plan
        layers = {layer.name: layer for layer in self.plan.layers}

        def flops(factor: rates.FactorSpec) -> int:
            layer = layers[factor.layers[0]]
            members = len(planning.rows_from(factor, layers))
            rows = round((self.rows or 0) * self.subject.trace.rows_of(layer) * members)
            if isinstance(LAYERS[layer.kind], Convolution) and plan.config.factor.rows != "all":
                dims = int(layer.kind[-2])
                rows //= grid_step(rows, dims, max(layer.shape[-2:])) ** dims
            elif not LAYERS[layer.kind].needs_gradients:
                rows //= plan.contributors.strides.get(factor.key, 1)
            return rates.capture_flops(factor.side, rows)

        contributors = (
            (f, plan.contributors.of(f.key, self.owners[f.key], 0))
            for f in self.factors
            if f.key in keys
        )
        return self._at((ranks, flops(factor)) for factor, ranks in contributors)

    def _at(self, amounts: Iterable[tuple[Iterable[int], float]]) -> np.ndarray:
        """Return an array [W] with the sum of each rank's amounts. ``amounts`` has (ranks, amount)
        pairs. An amount counts in full for each of its ranks."""
        total = np.zeros(self.world)
        for ranks, amount in amounts:
            total[list(ranks)] += amount
        return total

    def _on_owners(
        self, amount: Callable[[rates.FactorSpec], float], keys: Keys | set[str] | None = None
    ) -> np.ndarray:
        """Return an array [W] with the sum of ``amount`` over the factors of each owner. Only
        factors in ``keys`` count. If ``keys`` is None, all factors count."""
        return self._at(
            ([self.owners[f.key]], amount(f)) for f in self.factors if keys is None or f.key in keys
        )

    def _on_workers(self, amount: Callable[[LayerSpec], float]) -> np.ndarray:
        """Return an array [W] with the sum of ``amount`` over the layers of each gradient
        worker."""
        return self._at((self.workers[layer.name], amount(layer)) for layer in self.plan.layers)
