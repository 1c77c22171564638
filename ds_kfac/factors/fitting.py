"""``ds_kfac.fit``: exact factors of any model, without training; each factor has one owner.

Batch sums of a few layers at a time are sent to their owners, which add them up in fp64: means over
all rows, without decay. Then come eigenbases, and in a second pass EKFAC's eigenvalues. A rank's
transient memory, beside the model's: inputs and output gradients of all layers for one batch, sums
of :data:`ROUND_BYTES` at most or of one layer, and their messages.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_kfac.assignment.assign import Contributors
from ds_kfac.assignment.costs import BUILTIN, FactorSpec, factors_by_layer
from ds_kfac.comm.message import Channel, failing_together, gathered, merged
from ds_kfac.comm.reduce import Reducer, ReductionPlan
from ds_kfac.config.keys import KFACConfig, parse
from ds_kfac.config.resolve import resolve
from ds_kfac.curvature.eigen import Request, refresh_all
from ds_kfac.curvature.factor import KroneckerFactor
from ds_kfac.factors import files
from ds_kfac.factors.corrected import correctable, corrected
from ds_kfac.factors.files import Factors, FactorsError
from ds_kfac.factors.passes import Batch, Loss, Passes
from ds_kfac.model.capture import Capture
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.masks import ReadMask
from ds_kfac.model.rows import ROWS, BatchSum, RowSums
from ds_kfac.model.scan import scan
from ds_kfac.plan.plan import BUCKET_BYTES, EngineFacts, Plan, make_plan

ROUND_BYTES = 1 << 30
"""Most bytes of batch sums on a rank at a time, unless one layer has more."""


def fit(
    model: Any,
    data: Iterable[Any],
    loss: Loss | None = None,
    *,
    out: str | os.PathLike,
    config: KFACConfig | Mapping[str, Any] | None = None,
    reduction: str = "mean",
    mask: ReadMask | None = None,
    corrected: bool = True,
    progress: bool = True,
) -> Factors:
    """Compute A, G, their eigenbases and EKFAC's eigenvalues over some data, into files.

    Collective if torch.distributed runs. The model runs in evaluation mode, and is left as it was.
    Factors that ``out`` already holds are replaced.

    A is the mean of a a^T, and G that of g g^T, over all rows but padding. g is the gradient of a
    term's own loss: with ``reduction="mean"`` what arrives at the layer, times the batch's number
    of rows. Labels are not looked at. Where a mean leaves rows without a label out, G is therefore
    the mean over labelled rows times (rows / labelled rows): return the sum of the terms then, with
    ``reduction="sum"``.

    Args:
        model: an nn.Module, whole on every rank, or a DeepSpeedEngine of any ZeRO stage.
        data: batches of this rank: a mapping (the forward's keywords), a tuple or list (its
            arguments) or a tensor. Ranks may have different numbers of batches.
        loss: (model, batch) -> scalar; None: the loss that the model returns, which is ``loss`` of
            its output, the first scalar of a tuple, or a scalar itself.
        out: folder for the files (:mod:`ds_kfac.factors.files`).
        config: a "kfac" block, of which ``layers`` and from ``factor`` ``dense_max``, ``fisher``,
            ``weight_sharing``, ``sampler`` and ``prediction`` are read. ``fisher`` is "empirical"
            (the default), "monte_carlo" (the true Fisher) or "activations_only" (A alone).
        reduction: "mean" if the loss is a mean over its terms, "sum" if it is their sum.
        mask: (arguments, keywords) of the model's forward -> its attention masks [N, T]: one,
            several or None; None: the arguments whose names end in ``attention_mask``.
        corrected: whether to make a second pass over the data, for EKFAC's eigenvalues. These take
            the first dimension of a layer's input for the sequences.

    Raises:
        FactorsError: on every rank; no data, a layer without a row, a loss or a gradient that is
            not finite, a full disk. Nothing unfinished loads.
        ValueError: a wrong config.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"ds_kfac.fit: reduction: got {reduction!r}; must be mean or sum")
    files.safetensors()
    given = config if isinstance(config, KFACConfig) else parse(config or {})
    resolved, _ = resolve(given, fisher="empirical")
    corrects = corrected and resolved.factor.fisher != "activations_only"
    if corrects and isinstance(data, Iterator):
        raise FactorsError(
            "ds_kfac.fit: data can be iterated once, but there are two passes; give a list, a "
            "DataLoader or corrected=False"
        )
    with joined():
        channel = Channel(dist.group.WORLD)
        try:
            passes = Passes(model, data, loss, reduction, resolved.factor, channel, shows=progress)
            _Fitting(passes, Path(out), resolved).run(mask, corrects)
        finally:
            channel.close()
    return Factors.load(out)


@contextmanager
def joined() -> Iterator[None]:
    """Run in the process's job, or the launcher's; without one, in a job of a single rank."""
    outside = not dist.is_initialized()
    alone = outside and int(os.environ.get("WORLD_SIZE", "1")) == 1
    if outside:  # compiling it takes minutes, traffic is small
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if alone:
        is_cpu = get_accelerator().device_name() == "cpu"
        backend = "gloo" if is_cpu else get_accelerator().communication_backend_name()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        yield
    finally:
        if alone:
            dist.destroy_process_group()


class _Fitting:
    """One call of :func:`fit`.

    Attributes:
        specs: factor key -> its spec.
        tensors: name in the files -> tensor that this rank writes.
        counts: factor key -> number of rows, of all factors.
    """

    def __init__(self, passes: Passes, out: Path, config: KFACConfig) -> None:
        self.passes, self.out, self.config = passes, out, config
        self.channel, self.device = passes.channel, passes.device
        self.scanned = scan(passes.model, config.choice)
        layers = self.scanned.layers
        cut = [layer.name for layer in layers if layer.cut != (1, 1) or layer.copies > 1]
        for name, parameter in passes.model.named_parameters():
            if getattr(parameter, "allreduce", True) is False:  # one of DeepSpeed's experts
                cut.append(name)
        if cut:
            raise FactorsError(
                f"ds_kfac.fit: {cut[0]} is a tensor-parallel shard, or of DeepSpeed's experts; "
                "train a step and use engine.kfac.export"
            )
        self.plan = plan_of(layers, config, self.channel.world, self.device)
        self.specs = {spec.key: spec for spec in self.plan.assignment.factors}
        self.tensors: dict[str, Tensor] = {}
        self.counts: dict[str, float] = {}

    def run(self, mask: ReadMask | None, corrects: bool) -> None:
        """Make the passes and write the files. Collective."""
        group, rank, factor = self.channel.group, self.channel.rank, self.config.factor
        keys = factors_by_layer(self.plan.assignment.factors)
        layers = {}
        for layer in self.plan.layers:
            of_sides = {side: spec.key for side, spec in keys.get(layer.name, {}).items()}
            layers[layer.name] = files.described(layer, of_sides)
        if len(set(gathered(zlib.crc32(json.dumps(layers).encode()), group))) > 1:
            raise FactorsError("ds_kfac.fit: ranks have different layers (pipelines, or shards)")
        file = f"factors-{rank:05d}.safetensors"
        with failing_together(f"ds_kfac.fit: {self.out}", group, FactorsError):
            (self.out / files.INDEX).unlink(missing_ok=True)
            files.write_tensors(self.out / file, {})  # a folder that is read-only is an error now
        model, rows = self.passes.model, RowSums(factor.weight_sharing, positions=False)
        capture = Capture(
            model, self.plan.layers, lambda _: 1.0, device=self.device, rows=rows, sampled=True
        )
        capture.read_mask = mask or capture.read_mask
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            batches, sequences = self._add_factors(capture)
            if corrects:
                self.tensors |= corrected(self.passes, capture, self.plan, self.tensors)
        finally:
            capture.remove()
            for module, mode in modes.items():
                module.training = mode
        with failing_together("ds_kfac.fit", group, FactorsError):
            files.write_tensors(self.out / file, self.tensors)
        header = {
            "fisher": factor.fisher,
            "weight_sharing": factor.weight_sharing,
            "batches": batches,
            "sequences": sequences,
            "counts": self.counts,
            "layers": layers,
            "left_alone": {one.name: f"{one.kind}: {one.reason}" for one in self.scanned.skipped},
            "weight_map": merged(dict.fromkeys(self.tensors, file), group),
        }
        with failing_together("ds_kfac.fit", group, FactorsError):
            if rank == 0:
                files.write_index(self.out, header)

    @torch.no_grad()
    def _add_factors(self, capture: Capture) -> tuple[int, int]:
        """Make the first pass, and fill ``tensors`` and ``counts``. Returns the numbers of batches
        and sequences. Collective."""
        roles, world, float64 = self.plan.assignment, self.channel.world, torch.float64
        sums, counts = dict[str, Tensor](), dict[str, Tensor]()
        for key, spec in self.specs.items():
            if roles.eigen_workers[key] == self.channel.rank:
                sums[key] = torch.zeros(spec.side.numel, dtype=float64, device=self.device)
                counts[key] = torch.zeros((), dtype=float64, device=self.device)
        totals = torch.zeros(3, dtype=float64, device=self.device)  # batches, sequences, rows
        reduction = ReductionPlan(
            roles.factors, roles.eigen_workers, Contributors(world), torch.float32, BUCKET_BYTES
        )
        reducer = Reducer(reduction, self.channel, self.device)
        for batch in self.passes.over("factors", capture, frozenset(self.specs)):
            totals[0] += bool(batch.calls)
            totals[1] += batch.sequences
            totals[2] += batch.rows
            for layers in rounds(self.plan.layers, self.specs):
                keys = frozenset(key for layer in layers for key in layer.keys)
                reducer.begin(keys, batch.number)
                for key, total in reducer.reduce(_sums_of(batch, layers, capture)).items():
                    if key in sums:
                        sums[key] += total.sum_P
                        counts[key] += total.counts[ROWS]
        batches, sequences, rows = self.channel.sum(totals).tolist()
        for key in counts:  # G is a mean over all rows, also of batches that do not use an expert
            if key in capture.of_gradients and counts[key] > 0:
                counts[key].fill_(rows)
        known = {key: float(count) for key, count in counts.items()}
        self.counts = merged(known, self.channel.group)
        with failing_together("ds_kfac.fit", self.channel.group, FactorsError):
            self._check_rows(capture)
            for key, count in counts.items():
                packed = (sums.pop(key) / count.clamp(min=1)).float()
                self.tensors |= {key: packed, **self._decomposed(key, packed)}
        return round(batches), round(sequences)

    def _check_rows(self, capture: Capture) -> None:
        """Raise FactorsError if the rows of a layer are not known, or there are none."""
        for name, error in capture.failed.items():
            raise FactorsError(f"{name}: {error}")
        without = {key[:-2] for key, count in self.counts.items() if not count}
        # an expert may have had no token
        idle = [x.name for x in self.plan.layers if x.name in without and x.part[1] == 1]
        if idle:
            raise FactorsError(
                f"{len(idle)} layers had no row: {', '.join(idle[:5])}; they are never called, "
                "their gradient is zero, all is masked, or activation checkpointing hides them (it "
                "needs use_reentrant=False); leave them out by layers.exclude in the config"
            )

    def _decomposed(self, key: str, packed: Tensor) -> dict[str, Tensor]:
        """Name in the files -> tensor of a factor's eigenbasis; none if the factor is zero."""
        if not packed.any():
            return {}
        one = torch.ones((), device=self.device, dtype=torch.float32)
        factor = KroneckerFactor(self.specs[key].side, packed, one)
        basis = refresh_all([Request(factor)])[0].basis
        if basis is None:
            raise FactorsError(f"{key}: could not be decomposed: an entry is not finite")
        vectors = {f"{key}/vectors.{k}": vectors for k, vectors in enumerate(basis.vectors)}
        return {**vectors, f"{key}/values": basis.values}


def _sums_of(batch: Batch, layers: Sequence[LayerSpec], capture: Capture) -> dict[str, BatchSum]:
    """This rank's batch sums of some layers, by factor key."""
    names = {layer.name for layer in layers}
    places = [place for place, call in enumerate(batch.calls) if call.layer.name in names]
    calls, gradients = [batch.calls[place] for place in places], batch.gradients
    asked = None if gradients is None else [gradients[place] for place in places]
    capture.add_asked(calls, asked, 1.0 / batch.gain)
    sums = {**capture.sums, **capture.current.sums}
    capture.sums, capture.current.sums = {}, {}
    return sums


def plan_of(
    layers: Sequence[LayerSpec], config: KFACConfig, world: int, device: torch.device
) -> Plan:
    """The plan: each layer has one owner, by predicted cost, whatever ZeRO does."""
    config = config.having("assignment", gradient_worker_fraction=1 / world)
    config = config.having("preconditioner", method="eigen")
    costs = BUILTIN["cpu" if device.type == "cpu" else "cuda"]
    facts = EngineFacts(world, None, torch.float32, torch.float32, moments=0, device=device)
    return make_plan(layers, facts, config, costs)


def peak_bytes(plan: Plan) -> list[int]:
    """Most bytes that :func:`fit` keeps on each rank: fp32 factors and bases, and fp64 sums of the
    factors while these are made, or of corrected eigenvalues."""
    roles = plan.assignment
    kept, first, second = ([0] * roles.world for _ in range(3))
    for spec in roles.factors:
        owner = roles.eigen_workers[spec.key]
        kept[owner] += 4 * (spec.side.numel + spec.side.basis_numel + spec.side.dim)
        first[owner] += 8 * spec.side.numel
    for layer in plan.layers:
        if layer.G.block and correctable(layer):
            second[roles.workers[layer.name][0]] += 8 * layer.numel
    return [x + max(sums) for x, *sums in zip(kept, first, second, strict=True)]


def rounds(
    layers: Sequence[LayerSpec], specs: Mapping[str, FactorSpec]
) -> Iterator[list[LayerSpec]]:
    """Layers whose batch sums are in memory together."""
    together, nbytes = list[LayerSpec](), 0
    for layer in layers:
        more = sum(4 * specs[key].side.numel for key in layer.keys if key in specs)
        if together and nbytes + more > ROUND_BYTES:
            yield together
            together, nbytes = [], 0
        together.append(layer)
        nbytes += more
    yield together
