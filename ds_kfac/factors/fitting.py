"""``ds_kfac.fit``: exact factors of any model, without training; each factor has one owner.

Batch sums of a few layers at a time are sent to their owners, which add them up in fp64: means over all rows, without
decay. Then come eigenbases, and in a second pass over the data EKFAC's eigenvalues. A rank's transient memory, beside
the model's: inputs and output gradients of all layers for one batch, sums of :data:`ROUND_BYTES` at most or of one
layer, and their messages.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from typing import Any as ReadBatch

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ds_kfac.assignment.assign import Contributors
from ds_kfac.assignment.costs import BUILTIN, FactorSpec, factors_by_layer
from ds_kfac.comm.message import Channel, failing_together, gathered, merged
from ds_kfac.comm.reduce import Layout, Reducer
from ds_kfac.config.keys import KFACConfig, parse
from ds_kfac.config.resolve import resolve
from ds_kfac.curvature.eigen import Eigenbasis, Request, refresh_all
from ds_kfac.curvature.factor import KroneckerFactor
from ds_kfac.factors.corrected import Corrected
from ds_kfac.factors.files import INDEX, Factors, FactorsError, Shard, described, safetensors, write_index, write_shard
from ds_kfac.factors.passes import Loss, Passes
from ds_kfac.factors.progress import Progress, check_same, fingerprint, named
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import LAYERS
from ds_kfac.model.sampled_loss import SAMPLERS
from ds_kfac.model.scan import scan
from ds_kfac.plan.plan import BUCKET_BYTES, EngineFacts, Plan, make_plan

TERMS = "terms"
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
    read_batch: ReadBatch | None = None,
    corrected: bool = True,
    progress: bool = True,
    source: Mapping[str, Any] | None = None,
) -> Factors:
    """Factors, eigenbases and EKFAC's eigenvalues of a model over some data. Collective if torch.distributed runs.

    A killed call continues from its last save, at most five minutes earlier: call it again with the same arguments. The
    model runs in evaluation mode, and is left in the mode it was in.

    Args:
        model: an nn.Module, whole on every rank, or a DeepSpeedEngine of any ZeRO stage, with or without an optimizer;
            its state does not change.
        data: batches of this rank, the same at every iteration: a dict (the forward's keywords), a tuple or list (its
            arguments) or a tensor. Ranks may have different numbers of batches.
        loss: (model, batch) -> scalar; None: the first scalar that the model returns.
        out: folder for the files (:mod:`ds_kfac.factors.files`).
        config: a "kfac" block, of which ``layers``, ``padding``, ``factor.dense_max``, ``weight_sharing``, ``sampler``
            and ``fisher`` are read: "empirical" (the default), "monte_carlo" (the true Fisher) or "activations_only"
            (A alone, without a backward pass).
        reduction: "mean" if the loss is a mean over its terms, "sum" if it is their sum. The number of terms of a mean
            is read from ``labels`` among the forward's arguments, else it is the number of the model's predictions: if
            your own loss leaves some out, make it a sum or give ``read_batch``.
        read_batch: (arguments, keywords) of the forward -> :class:`ds_kfac.BatchInfo`: which rows count, and how many
            terms the loss has; None: by Hugging Face's names, ``attention_mask`` and ``labels``.
        corrected: whether to make the second pass.
        source: JSON values for the index, such as the data's name; a run with other values is another run.

    Returns the factors in ``out``; without a pass if they are there, once the data was found to be the same.

    Raises:
        FactorsError: on every rank; no data, no row that counts, a layer that is never called, a loss or a sum that is
            not finite, a full disk, a damaged file, a folder of other settings or data. Nothing unfinished loads.
        ValueError: a wrong config.
    """
    if not isinstance(model, nn.Module):
        raise FactorsError(f"ds_kfac.fit: model: got {type(model).__name__}; must be an nn.Module or an engine")
    if not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise FactorsError(f"ds_kfac.fit: data: got {type(data).__name__}; must be something to iterate, of batches")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"ds_kfac.fit: reduction: got {reduction!r}; must be mean or sum")
    safetensors()
    try:
        source = json.loads(json.dumps(dict(source or {})))  # as it will be read back from the index
    except TypeError as problem:
        raise ValueError(f"ds_kfac.fit: source: {problem}; must be plain values, as those of JSON") from problem
    resolved, _ = resolve(config if isinstance(config, KFACConfig) else parse(config or {}), fisher="empirical")
    fisher: Any = resolved.factor.fisher
    if corrected and fisher != "activations_only" and isinstance(data, Iterator):
        raise FactorsError(
            "ds_kfac.fit: data can be iterated once, but there are two passes; give a list, a DataLoader or "
            "corrected=False"
        )
    with joined():
        channel = Channel(torch.distributed.group.WORLD)
        try:
            passes = Passes(
                model, data, loss, reduction=reduction, fisher=fisher, sampler=SAMPLERS[resolved.factor.sampler],
                read_batch=read_batch, padding=resolved.padding.count, channel=channel, shows=progress,
            )  # fmt: skip
            what = f"{reduction} of {named(loss)}, rows by {named(read_batch)}"
            return _Fitting(passes, Path(out), resolved, corrected=corrected, source=source, what=what).run()
        finally:
            channel.close()


@contextmanager
def joined() -> Iterator[None]:
    """Run in the process's job, or the launcher's; without one, in a job of a single rank, which then ends."""
    outside = not torch.distributed.is_initialized()
    alone = outside and int(os.environ.get("WORLD_SIZE", "1")) == 1
    if outside:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling takes minutes, traffic is small
    if alone:
        backend = get_accelerator().communication_backend_name()
        backend = "gloo" if get_accelerator().device_name() == "cpu" else backend
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        yield
    finally:
        if alone:
            torch.distributed.destroy_process_group()


class _Fitting:
    """One call of :func:`fit`.

    Attributes:
        rounds: (names of layers whose batch sums are in memory together, keys of their factors), the last layers first.
        keys: layer name -> side -> factor key.
    """

    def __init__(
        self, passes: Passes, out: Path, config: KFACConfig, *, corrected: bool, source: Mapping[str, Any], what: str
    ) -> None:
        self.passes, self.out, self.channel, self.device = passes, out, passes.channel, passes.device
        self.config, self.corrected = config, corrected and passes.fisher != "activations_only"
        if cut := [name for name, p in passes.model.named_parameters() if getattr(p, "allreduce", True) is False]:
            raise FactorsError(
                f"ds_kfac.fit: {cut[0]} is a parameter of DeepSpeed's experts, whose tokens come from several ranks; "
                "train a step and use engine.kfac.export"
            )
        if passes.fisher == "monte_carlo" and config.factor.prediction:
            raise FactorsError("ds_kfac.fit: factor.prediction is for training; give a loss that draws labels itself")
        scanned = scan(passes.model, config.choice)
        if cut := [layer.name for layer in scanned.layers if layer.cut != (1, 1) or layer.copies > 1]:
            raise FactorsError(
                f"ds_kfac.fit: {cut[0]} is a shard of a tensor-parallel layer; train a step and use engine.kfac.export"
            )
        self.plan = plan_of(scanned.layers, config, self.channel.world, self.device)
        self.skipped, roles = scanned.skipped, self.plan.assignment
        self.specs, self.homes = {spec.key: spec for spec in roles.factors}, roles.eigen_workers
        self.keys = {
            name: {side: spec.key for side, spec in sides.items()}
            for name, sides in factors_by_layer(roles.factors).items()
        }
        self.rounds = list(rounds(self.plan.layers, self.specs))
        self.settings = {
            "layers": fingerprint({layer.name: self._described(layer) for layer in self.plan.layers}),
            "world": self.channel.world, "fisher": passes.fisher, "sampler": config.factor.sampler, "loss": what,
            "corrected": self.corrected,
            "padding": config.padding.count, "weight_sharing": config.factor.weight_sharing, "source": source,
            "weights": passes.weights(),
        }  # fmt: skip
        self.finite = torch.ones((), dtype=torch.bool, device=self.device)

    def _described(self, layer: LayerSpec) -> dict[str, Any]:
        return described(layer, self.keys.get(layer.name, {}))

    def shard(self, kind: str) -> str:
        return f"{kind}-{self.channel.rank:05d}.safetensors"

    def run(self) -> Factors:
        """Collective."""
        if len(set(gathered(self.settings["layers"], self.channel.group))) > 1:
            raise FactorsError("ds_kfac.fit: ranks have different layers (pipelines, tensor-parallel or other shards)")
        with failing_together(f"ds_kfac: {self.out}", self.channel.group, FactorsError):
            self.out.mkdir(parents=True, exist_ok=True)
        if any(gathered((self.out / INDEX).exists(), self.channel.group)):
            factors = Factors.load(self.out)
            now = {"settings": self.settings, "data": self.passes.marks()}
            with failing_together(f"ds_kfac: {self.out}", self.channel.group, FactorsError):
                check_same(factors.header, now)
            return factors
        self.progress = Progress(self.out, self.settings, self.channel)
        self.capture = self.passes.capture(self.plan.layers, self.config.factor.weight_sharing)
        modes = {module: module.training for module in self.passes.model.modules()}
        self.passes.model.eval()
        try:
            if self.progress.phase == "factors":
                self._write_factors(self._summed())
                self.progress.begin("corrected")
            self.counts = self._read(lambda name: name.endswith("/count"))
            if self.corrected:
                self._correct()
            self._write_index()
        finally:
            self.capture.remove()
            for module, mode in modes.items():
                module.training = mode
        self.progress.finished()
        return Factors.load(self.out)

    @torch.no_grad()
    def _summed(self) -> dict[str, Tensor]:
        """The first pass. Returns "<key>" -> fp64 packed sum and "<key>/count" for the factors that this rank owns, and
        the number of loss terms of its batches."""
        sums = self.progress.load(self.device)
        if any(gathered(bool(sums) and TERMS not in sums, self.channel.group)):
            raise FactorsError(f"{self.out}: holds an unfinished run of an earlier version; remove it and start again")
        sums.setdefault(TERMS, torch.zeros((), dtype=torch.float64, device=self.device))
        for key, spec in self.specs.items():
            if self.homes[key] == self.channel.rank and key not in sums:
                sums[key] = torch.zeros(spec.side.numel, dtype=torch.float64, device=self.device)
                sums[f"{key}/count"] = torch.zeros((), dtype=torch.float64, device=self.device)
        roles, capture = self.plan.assignment, self.capture
        layout = Layout(roles.factors, self.homes, Contributors(self.channel.world), torch.float32, BUCKET_BYTES)
        reducer = Reducer(layout, self.channel, self.device)
        keys = frozenset(self.specs)
        for batch in self.passes.over("factors", capture, keys, self.progress, lambda: sums, self._wrong):
            for names, factors in self.rounds:
                pairs = [pair for pair in batch.calls if pair[0].layer.name in names]
                capture.add_sampled([call for call, _ in pairs], [gradient for _, gradient in pairs], self.passes.seed)
                del pairs  # they would keep gradients alive while the next batch runs
                for summed in capture.sums.values():
                    self.finite &= summed.sum_P.sum().isfinite()
                reducer.begin(factors, batch.number)
                for key, total in reducer.reduce(capture.sums).items():
                    if key in sums:
                        sums[key] += total.sum_P
                        sums[f"{key}/count"] += total.count
                capture.sums = {}
            forwards = {id(call.forward): call.forward for call, gradient in batch.calls if gradient is not None}
            sums[TERMS] += sum(forward.count for forward in forwards.values())
        return sums

    def _wrong(self) -> str:
        return "" if bool(self.finite) else "a gradient or an input is not finite; leave the batch out"

    def _write_factors(self, sums: dict[str, Tensor]) -> None:
        """Write this rank's shard: means and their eigenbases. Collective."""
        layers = {layer.name: layer for layer in self.plan.layers}
        terms = self.channel.sum(sums.pop(TERMS))
        for key, spec in self.specs.items():  # G is a mean over all loss terms, also of batches without its tokens
            of_gradients = not spec.is_A or LAYERS[layers[spec.layers[0]].kind].needs_gradients
            if of_gradients and key in sums and bool(sums[f"{key}/count"] > 0):
                sums[f"{key}/count"] = terms.clone()
        counts = {key: float(sums[f"{key}/count"]) for key in self.specs if key in sums}
        everyone = merged(counts, self.channel.group)
        if not any(everyone.values()):
            raise FactorsError("ds_kfac.fit: no row counts: all are masked, or have the label -100")
        without = {key[:-2] for key, count in everyone.items() if not count}
        if idle := sorted(name for name in without if layers[name].part[1] == 1):  # an expert may have had no token
            raise FactorsError(
                f"ds_kfac.fit: {len(idle)} layers had no row: {', '.join(idle[:5])}; they are never called, the loss "
                "does not depend on them, or activation checkpointing hides them (it needs use_reentrant=False); leave "
                "them out by layers.exclude in the config"
            )
        with failing_together("ds_kfac.fit: factors", self.channel.group, FactorsError):
            tensors = dict[str, Tensor]()
            for key in counts:
                count = sums[f"{key}/count"]
                packed = (sums.pop(key) / count.clamp(min=1)).float()
                tensors |= {key: packed, f"{key}/count": count}
                if bool(packed.any()):  # G is zero if the layers above pass no gradient
                    factor = KroneckerFactor(
                        self.specs[key].side, packed, torch.ones((), device=self.device, dtype=torch.float32)
                    )
                    request = Request(factor)
                    basis = refresh_all([request])[0].basis
                    if basis is None:
                        raise FactorsError(f"{key}: could not be decomposed, in fp64 either")
                    tensors |= {f"{key}/vectors.{k}": vectors for k, vectors in enumerate(basis.vectors)}
                    tensors[f"{key}/values"] = basis.values
            write_shard(self.out / self.shard("factors"), tensors)

    def _read(self, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        """Tensors from this rank's shard of factors, by name."""
        file = Shard(self.out / self.shard("factors"))
        return {name: file.tensor(name) for name in file.sums if wanted(name)}

    def _correct(self) -> None:
        """The second pass; writes this rank's shard of corrected eigenvalues. Collective."""
        read = self._read(lambda name: "/v" in name)
        bases = {
            key: Eigenbasis(tuple(read[n] for n in sorted(read) if n.startswith(f"{key}/vectors.")), values)
            for key in self.specs
            if (values := read.get(f"{key}/values")) is not None
        }
        everywhere = set().union(*gathered(set(bases), self.channel.group))
        fit = [x for x in self.plan.layers if correctable(x) and set(self.keys[x.name].values()) <= everywhere]
        roles, rows = self.plan.assignment, self.capture.rows
        sums = Corrected(fit, roles, bases, self.keys, rows, self.channel, self.device)
        sums.sums = self.progress.load(self.device)
        if not self.progress.batches:
            self.progress.seen = [0.0] * 3
        keys = frozenset(self.specs)
        for batch in self.passes.over(
            "corrected eigenvalues", self.capture, keys, self.progress, lambda: sums.sums, lambda: ""
        ):
            sums.add(batch.calls, self.passes.seed, batch.sequences, batch.positions)
        terms = {key: float(count) for key, count in merged(self.counts, self.channel.group).items()}
        sequences, tensors = self.progress.seen[1], dict[str, Tensor]()
        for name, total in sums.sums.items():
            layer, kind = name.rsplit("/corrected.", 1)
            if kind == "token":
                tensors[name] = (total / terms[f"{self.keys[layer]['G']}/count"]).float()
            elif not bool(total.isnan().any()):
                tensors[name] = (total / sequences).float()
        with failing_together("ds_kfac.fit: corrected eigenvalues", self.channel.group, FactorsError):
            write_shard(self.out / self.shard("corrected"), tensors)

    def _write_index(self) -> None:
        """Collective."""
        kinds = ["factors", *(["corrected"] if self.corrected else [])]
        files = {self.shard(kind): Shard(self.out / self.shard(kind)) for kind in kinds}
        shard_of = {n: shard for shard, file in files.items() for n in file.sums if not n.endswith("/count")}
        counts = {name.removesuffix("/count"): float(count) for name, count in self.counts.items()}
        header = {
            "settings": self.settings, "fisher": self.passes.fisher, "data": self.passes.marks(),
            "shards": merged({shard: file.crc32 for shard, file in files.items()}, self.channel.group),
            "batches": self.progress.seen[0], "sequences": self.progress.seen[1], "rows": self.progress.seen[2],
            "counts": merged(counts, self.channel.group),
            "layers": {layer.name: self._described(layer) for layer in self.plan.layers},
            "left_alone": {one.name: f"{one.kind}: {one.reason}" for one in self.skipped},
            "weight_map": merged(shard_of, self.channel.group),
        }  # fmt: skip
        with failing_together("ds_kfac.fit: index", self.channel.group, FactorsError):
            if self.channel.rank == 0:
                write_index(self.out, header)


def plan_of(layers: Sequence[LayerSpec], config: KFACConfig, world: int, device: torch.device) -> Plan:
    """The plan: each layer has one owner, by predicted cost, whatever ZeRO does."""
    config = config.having("assignment", gradient_worker_fraction=1 / world).having("preconditioner", method="eigen")
    costs = BUILTIN["cpu" if device.type == "cpu" else "cuda"]
    facts = EngineFacts(world, None, torch.float32, torch.float32, moments=0, device=device)
    return make_plan(layers, facts, config, costs)


def peak_bytes(plan: Plan) -> list[int]:
    """Most bytes that :func:`fit` keeps on each rank: fp64 sums while fp32 bases are made of them, or bases and fp64
    sums of corrected eigenvalues."""
    roles = plan.assignment
    first, second = [0] * roles.world, [0] * roles.world
    for spec in roles.factors:
        home, basis = roles.eigen_workers[spec.key], 4 * (spec.side.basis_numel + spec.side.dim)
        first[home] += 12 * spec.side.numel + basis
        second[home] += basis
    for layer in plan.layers:
        second[roles.workers[layer.name][0]] += 16 * layer.numel if layer.G.block and correctable(layer) else 0
    return [max(pair) for pair in zip(first, second, strict=True)]


def rounds(
    layers: Sequence[LayerSpec], specs: Mapping[str, FactorSpec]
) -> Iterator[tuple[frozenset[str], frozenset[str]]]:
    """See :class:`_Fitting`."""
    names, keys, nbytes = set[str](), set[str](), 0
    for layer in reversed(layers):  # in a backward's order: the first layer's rows give the number of loss terms
        its_keys = {key for key in layer.keys if key in specs}
        more = sum(4 * specs[key].side.numel for key in its_keys)
        if names and nbytes + more > ROUND_BYTES:
            yield frozenset(names), frozenset(keys)
            names, keys, nbytes = set(), set(), 0
        names.add(layer.name)
        keys |= its_keys
        nbytes += more
    yield frozenset(names), frozenset(keys)


def correctable(layer: LayerSpec) -> bool:
    """Whether a layer's gradient is one sum of g a^T, unlike that of grouped maps or norms."""
    return layer.groups == 1 and not LAYERS[layer.kind].needs_gradients
