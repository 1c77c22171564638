"""Compute exact factors of any model without training: ``ds_kfac.fit``.

Each factor is owned by one rank. In a first pass over the data, the ranks send batch sums of a few
layers at a time to the factors' owners, which add them up in fp64. Factors are means over all rows,
without decay. Then the owners decompose the factors, and a second pass over the data computes
EKFAC's eigenvalues.

In addition to the model, a rank needs memory for the inputs and output gradients of all layers for
one batch, for batch sums (at most :data:`ROUND_BYTES`, unless the sums of a single layer take
more), and for the messages with these sums.
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
"""Limit on the batch sums that a rank holds at once, in bytes. A single layer whose sums are larger
may exceed it."""


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
    """Compute A, G, their eigenbases and EKFAC's eigenvalues over some data, and write them to
    files.

    Collective if the job has several ranks. The model runs in evaluation mode. Afterwards, each of
    its modules is in the same mode as before. Factors that ``out`` already holds are replaced.

    A is the mean of a a^T over all rows except padding, and G is the mean of g g^T, where g is the
    gradient of a single term of the loss. With ``reduction="mean"``, g is the gradient that arrives
    at the layer, times the number of rows in the batch. This number includes rows without a label.
    So if your loss is a mean that leaves out these rows, G is too large by the factor rows /
    labelled rows. In that case, return the sum of the terms and pass ``reduction="sum"``.

    Args:
        model: an nn.Module that is whole on every rank, or a DeepSpeedEngine of any ZeRO stage.
        data: batches of this rank. A batch is a mapping (keyword arguments of the model's forward),
            a tuple or list (its positional arguments) or a tensor. Ranks may have different numbers
            of batches.
        loss: function of model and batch that returns a scalar. None: the loss in the model's
            output, which is the output's ``loss``, the first scalar of a tuple, or the output
            itself.
        out: folder for the files (:mod:`ds_kfac.factors.files`).
        config: a "kfac" block. The only keys that are used are ``layers`` and, in ``factor``,
            ``dense_max``, ``fisher``, ``weight_sharing``, ``sampler`` and ``prediction``.
            ``fisher`` is "empirical" (the default), "monte_carlo" (the true Fisher) or
            "activations_only" (only A).
        reduction: "mean" if the loss is a mean over its terms, "sum" if it is their sum.
        mask: function that gets the positional and the keyword arguments of the model's forward,
            and returns the attention masks [N, T]: one mask, several masks or None. If ``mask`` is
            None, the masks are the arguments whose names end in ``attention_mask``.
        corrected: whether to make a second pass over the data, for EKFAC's eigenvalues. The second
            pass assumes that each entry of the first dimension of a layer's input is a sequence.
        progress: whether rank 0 shows a progress bar.

    Raises:
        FactorsError: on every rank, for example if there is no data, a layer has no row, a loss or
            gradient is not finite, or the disk is full. A folder that is not finished cannot be
            loaded.
        ValueError: the config or ``reduction`` is wrong.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"ds_kfac.fit: reduction: got {reduction!r}; must be mean or sum")
    files.safetensors()
    given = config if isinstance(config, KFACConfig) else parse(config or {})
    resolved, _ = resolve(given, fisher="empirical")
    corrects = corrected and resolved.factor.fisher != "activations_only"
    if corrects and isinstance(data, Iterator):
        raise FactorsError(
            "ds_kfac.fit: data can be iterated once, but two passes over it are needed; pass a "
            "list or a DataLoader, or corrected=False"
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
    """Join a torch.distributed job for the ``with`` block: the job that the process is in, else the
    launcher's job, else a new job with a single rank."""
    is_new = not dist.is_initialized()
    is_alone = is_new and int(os.environ.get("WORLD_SIZE", "1")) == 1
    if is_new:
        # do not use this extension, because compiling it takes minutes, and there is little
        # communication
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if is_alone:
        is_cpu = get_accelerator().device_name() == "cpu"
        backend = "gloo" if is_cpu else get_accelerator().communication_backend_name()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        yield
    finally:
        if is_alone:
            dist.destroy_process_group()


class _Fitting:
    """One call of :func:`fit`.

    Attributes:
        scanned: the layers of the model, and the modules that are left alone.
        plan: which rank owns which factor.
        specs: factor key -> its spec.
        tensors: name in the files -> tensor that this rank writes.
        counts: factor key -> number of the factor's rows, for the factors of all ranks.
    """

    def __init__(self, passes: Passes, out: Path, config: KFACConfig) -> None:
        self.passes = passes
        self.out = out
        self.config = config
        self.channel = passes.channel
        self.device = passes.device
        self.scanned = scan(passes.model, config.choice)
        layers = self.scanned.layers
        not_whole = [layer.name for layer in layers if layer.cut != (1, 1) or layer.copies > 1]
        for name, parameter in passes.model.named_parameters():
            if getattr(parameter, "allreduce", True) is False:  # one of DeepSpeed's experts
                not_whole.append(name)
        if not_whole:
            raise FactorsError(
                f"ds_kfac.fit: {not_whole[0]} is a tensor-parallel shard or belongs to DeepSpeed's "
                "experts. fit supports neither; train a step and use engine.kfac.export"
            )
        self.plan = plan_of(layers, config, self.channel.world, self.device)
        self.specs = {spec.key: spec for spec in self.plan.assignment.factors}
        self.tensors: dict[str, Tensor] = {}
        self.counts: dict[str, float] = {}

    def run(self, mask: ReadMask | None, corrects: bool) -> None:
        """Make the passes and write the files. Collective."""
        group = self.channel.group
        rank = self.channel.rank
        factor = self.config.factor
        specs = factors_by_layer(self.plan.assignment.factors)
        layers = {}
        for layer in self.plan.layers:
            keys = {side: spec.key for side, spec in specs.get(layer.name, {}).items()}
            layers[layer.name] = files.described(layer, keys)
        if len(set(gathered(zlib.crc32(json.dumps(layers).encode()), group))) > 1:
            raise FactorsError(
                "ds_kfac.fit: the ranks have different layers, as with pipeline stages or shards "
                "of a layer; fit needs the whole model on every rank"
            )
        file = f"factors-{rank:05d}.safetensors"
        with failing_together(f"ds_kfac.fit: {self.out}", group, FactorsError):
            (self.out / files.INDEX).unlink(missing_ok=True)
            files.write_tensors(self.out / file, {})  # fail now if the folder is read-only
        model = self.passes.model
        rows = RowSums(factor.weight_sharing, positions=False)
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
        """Make the first pass, and fill ``tensors`` and ``counts``. Collective.

        Returns the total number of batches and the total number of sequences, summed over all
        ranks.
        """
        roles = self.plan.assignment
        fp64: dict[str, Any] = {"dtype": torch.float64, "device": self.device}
        sums: dict[str, Tensor] = {}  # of the factors that this rank owns
        counts: dict[str, Tensor] = {}
        for key, spec in self.specs.items():
            if roles.owners[key] == self.channel.rank:
                sums[key] = torch.zeros(spec.side.numel, **fp64)
                counts[key] = torch.zeros((), **fp64)
        totals = torch.zeros(3, **fp64)  # batches, sequences, rows
        reduction = ReductionPlan(
            roles.factors,
            roles.owners,
            Contributors(self.channel.world),
            torch.float32,
            BUCKET_BYTES,
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
        # G is a mean over all rows, including those of batches in which an expert is unused
        for key in counts:
            if key in capture.of_gradients and counts[key] > 0:
                counts[key].fill_(rows)
        owned_counts = {key: float(count) for key, count in counts.items()}
        self.counts = merged(owned_counts, self.channel.group)
        with failing_together("ds_kfac.fit", self.channel.group, FactorsError):
            self._check_rows(capture)
            for key, count in counts.items():
                packed = (sums.pop(key) / count.clamp(min=1)).float()
                self.tensors |= {key: packed, **self._decomposed(key, packed)}
        return round(batches), round(sequences)

    def _check_rows(self, capture: Capture) -> None:
        """Raise FactorsError if it is not known which rows of a layer count, or if a layer had no
        row."""
        for name, error in capture.failed.items():
            raise FactorsError(f"{name}: {error}")
        without_rows = {key[:-2] for key, count in self.counts.items() if not count}
        idle = [
            layer.name
            for layer in self.plan.layers
            # an expert of a stack may have had no token
            if layer.name in without_rows and layer.part[1] == 1
        ]
        if idle:
            raise FactorsError(
                f"{len(idle)} layers had no row: {', '.join(idle[:5])}. Either they are never "
                "called, their gradient is zero, all their rows are masked, or activation "
                "checkpointing hides them (it needs use_reentrant=False). Exclude such layers by "
                "layers.exclude in the config"
            )

    def _decomposed(self, key: str, packed: Tensor) -> dict[str, Tensor]:
        """Return a factor's eigenbasis, as a dict from name in the files to tensor. The dict is
        empty if the factor is zero."""
        if not packed.any():
            return {}
        updates = torch.ones((), device=self.device, dtype=torch.float32)
        factor = KroneckerFactor(self.specs[key].side, packed, updates)
        basis = refresh_all([Request(factor)])[0].basis
        if basis is None:
            raise FactorsError(f"{key}: could not be decomposed: an entry is not finite")
        vectors = {f"{key}/vectors.{k}": vectors for k, vectors in enumerate(basis.vectors)}
        return {**vectors, f"{key}/values": basis.values}


def _sums_of(batch: Batch, layers: Sequence[LayerSpec], capture: Capture) -> dict[str, BatchSum]:
    """Return this rank's batch sums for the factors of some layers, in a dict by factor key."""
    names = {layer.name for layer in layers}
    indices = [index for index, call in enumerate(batch.calls) if call.layer.name in names]
    calls = [batch.calls[index] for index in indices]
    gradients = None
    if batch.gradients is not None:
        gradients = [batch.gradients[index] for index in indices]
    capture.add_asked(calls, gradients, 1.0 / batch.gain)
    sums = {**capture.sums, **capture.current.sums}
    capture.sums = {}
    capture.current.sums = {}
    return sums


def plan_of(
    layers: Sequence[LayerSpec], config: KFACConfig, world: int, device: torch.device
) -> Plan:
    """Return a plan in which each layer has one owner, chosen by predicted cost. The plan ignores
    where ZeRO keeps gradients."""
    config = config.having("assignment", gradient_worker_fraction=1 / world)
    config = config.having("preconditioner", method="eigen")
    costs = BUILTIN["cpu" if device.type == "cpu" else "cuda"]
    facts = EngineFacts(world, None, torch.float32, torch.float32, moments=0, device=device)
    return make_plan(layers, facts, config, costs)


def peak_bytes(plan: Plan) -> list[int]:
    """Return for each rank the peak number of bytes that :func:`fit` holds at once.

    This includes factors and eigenbases in fp32, and the fp64 sums of the pass that needs more
    memory. The first pass sums factors, and the second pass sums corrected eigenvalues.
    """
    roles = plan.assignment
    results = [0] * roles.world
    first_sums = [0] * roles.world
    second_sums = [0] * roles.world
    for spec in roles.factors:
        owner = roles.owners[spec.key]
        results[owner] += 4 * (spec.side.numel + spec.side.basis_numel + spec.side.dim)
        first_sums[owner] += 8 * spec.side.numel
    for layer in plan.layers:
        if layer.G.block and correctable(layer):
            owner = roles.workers[layer.name][0]
            second_sums[owner] += 8 * layer.numel
    return [
        result + max(first, second)
        for result, first, second in zip(results, first_sums, second_sums, strict=True)
    ]


def rounds(
    layers: Sequence[LayerSpec], specs: Mapping[str, FactorSpec]
) -> Iterator[list[LayerSpec]]:
    """Yield lists of layers whose batch sums are in memory at the same time."""
    layers_of_round: list[LayerSpec] = []
    nbytes = 0
    for layer in layers:
        layer_bytes = sum(4 * specs[key].side.numel for key in layer.keys if key in specs)
        if layers_of_round and nbytes + layer_bytes > ROUND_BYTES:
            yield layers_of_round
            layers_of_round = []
            nbytes = 0
        layers_of_round.append(layer)
        nbytes += layer_bytes
    yield layers_of_round
