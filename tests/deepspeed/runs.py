"""Train a few steps in an engine mode, and the same steps in one process with tests/oracle.py."""

import contextlib
import copy
import gc
import inspect
import io
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from packaging.version import Version
from torch import nn

import ds_kfac
from ds_kfac.config.keys import BurnInConfig
from ds_kfac.directions.kfac_adamw import group_step
from ds_kfac.zero import deepspeed_versions
from tests import spread
from tests.choices import chosen
from tests.deepspeed.modes import BY_NAME, LR, MICRO_ROWS, STEPS, Mode
from tests.models import Net, cross_entropy, make_batch, make_net
from tests.oracle import ReferenceKFAC
from tests.spread import PLAIN, Expected, Variation, difference


def parameter_groups(model: nn.Module, groups: str) -> list[dict]:
    if groups == "one":
        return [{"params": list(model.parameters())}]
    matrices = [
        p for n, p in model.named_parameters() if not n.endswith("bias") and "norm" not in n
    ]
    others = [p for n, p in model.named_parameters() if n.endswith("bias") or "norm" in n]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


@contextmanager
def patched(mode: Mode):
    """fp16 on a CPU, and torch's optimizers in place of compiled ones: this only chooses
    DeepSpeed's classes. KFACAdamW's steps have the mode's size, which an engine reads when it is
    built."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(get_accelerator(), "is_fp16_supported", lambda: True))
        stack.enter_context(patch.multiple(group_step, SIZE=mode.size, BASE=mode.base))
        if mode.fused:
            fused = torch.optim.AdamW if mode.adam else torch.optim.SGD
            cpu_adam = "deepspeed.runtime.zero.stage3.DeepSpeedCPUAdam"
            stack.enter_context(patch("deepspeed.runtime.engine.FusedAdam", fused))
            stack.enter_context(patch(cpu_adam, torch.optim.AdamW))
        yield


_engines: list = []
"""Those of :func:`build` that nobody has destroyed yet."""


def build(mode: Mode, accumulation: int = 1, *, model=None, seed: int = 0, given=None, **overrides):
    """Return an engine with K-FAC attached, silently.

    Args:
        given: further arguments of ``ds_kfac.initialize``.
        overrides: of the DeepSpeed config; None: without that key.
    """
    config = {**mode.config(accumulation), **overrides}
    config = {k: v for k, v in config.items() if v is not None or k not in overrides}
    init = (
        deepspeed.zero.Init(config_dict_or_path=config)
        if mode.zero_init
        else contextlib.nullcontext()
    )
    with patched(mode), init:
        model = make_net(seed=seed) if model is None else model
    groups = parameter_groups(model, mode.groups)
    arguments = {"model_parameters": groups if mode.groups != "one" else groups[0]["params"]}
    arguments |= given or {}
    with patched(mode), contextlib.redirect_stdout(io.StringIO()), chosen(config["kfac"]) as block:
        engine, *_ = ds_kfac.initialize(model=model, config={**config, "kfac": block}, **arguments)
    _engines.append(weakref.ref(engine))
    return engine


def destroy_all() -> None:
    """Destroy the engines that are still there."""
    for engine in (engine() for engine in _engines):
        if engine is not None and getattr(engine, "kfac", None) is not None:
            engine.kfac.detach()
        if engine is not None:
            engine.destroy()
    _engines.clear()


def micro_batches(step: int, accumulation: int):
    """This rank's micro-batches of the global batch."""
    world, rank = dist.get_world_size(), dist.get_rank()
    x, y = make_batch(step, world * accumulation * MICRO_ROWS)
    share = slice(rank * accumulation * MICRO_ROWS, (rank + 1) * accumulation * MICRO_ROWS)
    return zip(x[share].split(MICRO_ROWS), y[share].split(MICRO_ROWS), strict=True)


def train(
    engine, accumulation: int, steps: int = STEPS, first: int = 0, times: float = 1.0
) -> list[float]:
    """Losses of some steps; what is trained is ``times`` as large."""
    dtype = engine.get_data_types()[0]
    losses = []
    for step in range(first, first + steps):
        total = 0.0
        for x, y in micro_batches(step, accumulation):
            loss = engine(x.to(engine.device, dtype), y.to(engine.device))
            engine.backward(loss if times == 1.0 else loss * times)
            engine.step()
            total += float(loss.detach()) / accumulation
        losses.append(total)
    return losses


def weights(engine) -> dict[str, torch.Tensor]:
    """The fp32 weights the optimizer updates, whole, on every rank."""
    optimizer, named = engine.optimizer, dict(engine.module.named_parameters())
    masters: dict[int, torch.Tensor] = {}
    if type(optimizer).__name__ == "FP16_Optimizer":
        for flat, params in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
            pieces = flat.detach().split([p.numel() for p in params])
            masters |= {id(p): piece.view(p.shape) for p, piece in zip(params, pieces, strict=True)}
    elif type(optimizer).__name__ == "FP16_UnfusedOptimizer":
        for fp32, params in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
            masters |= {id(p): q.detach() for p, q in zip(params, fp32, strict=True)}
    elif type(optimizer).__name__ == "DeepSpeedZeroOptimizer":
        # safe_get_* does not survive round_robin_gradients
        for group, partition in enumerate(optimizer.single_partition_of_fp32_groups):
            # offloaded ones too: NCCL sees GPUs only
            partition = partition.detach().to(engine.device)
            partitions = [torch.empty_like(partition) for _ in range(dist.get_world_size())]
            dist.all_gather(partitions, partition)
            flat, offsets = torch.cat(partitions), deepspeed_versions.offsets(optimizer, group)
            for p, offset in zip(optimizer.round_robin_bit16_groups[group], offsets, strict=True):
                masters[id(p)] = flat.narrow(0, offset, p.numel()).view(p.shape)
    elif engine.zero_optimization() or type(optimizer).__name__ == "BF16_Optimizer":
        for p in named.values():
            if p.requires_grad:
                masters[id(p)] = deepspeed.utils.safe_get_full_fp32_param(p)
            else:
                with deepspeed.zero.GatheredParameters([p]):
                    masters[id(p)] = p.detach().clone()
    return {name: masters.get(id(p), p.detach()).float().clone().cpu() for name, p in named.items()}


def used(engine) -> dict[str, torch.Tensor]:
    """The parameters that the model computes with, whole, on every rank."""
    found = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_tensor")):
            found[name] = p.detach().clone()
    return found


@cache
def unscaled() -> bool:
    """Whether stage 0 in fp16 divides by a loss scale it never multiplied by (deepspeed PR 8393):
    it does since it has this attribute."""
    return "loss_scale_config" in inspect.getsource(FP16_UnfusedOptimizer)


Losses = Callable[[nn.Module, ReferenceKFAC, int, Variation], Iterator[torch.Tensor]]
"""(model, oracle, step, variation) -> losses of a step's backward passes, each made when the last
one has run."""


def whole_batch(rows: int, ranks: int, tokens: int = 3) -> Losses:
    """The mean over the batch of all ranks and micro-batches."""
    of_rows = torch.arange(ranks).repeat_interleave(rows // ranks)

    def losses(model, kfac, step, variation):
        # whose example each is, and its place in the batch
        x, y, kfac.ranks, kfac.places = variation.rows(
            *make_batch(step, rows, tokens), of_rows, torch.arange(rows)
        )
        p = next(model.parameters())
        kfac.batch = x.to(p.device, p.dtype), y.to(p.device)
        yield cross_entropy(model(kfac.batch[0]), kfac.batch[1])

    return losses


def reference(
    mode: Mode,
    accumulation: int,
    world: int,
    initial: dict,
    *,
    steps: int = STEPS,
    kfac_config: dict | None = None,
    before_step=None,
    model: Callable[[], nn.Module] = Net,
    losses: Losses | None = None,
    scale: float = 1.0,
    kind: Callable[..., ReferenceKFAC] = ReferenceKFAC,
    variation: Variation = PLAIN,
    **options,
) -> dict[str, torch.Tensor]:
    """Weights after training ``initial`` with tests/oracle.py and the same optimizer.

    In 16 bits the forward and backward run on a rounded copy, the optimizer on fp32 masters, as in
    DeepSpeed. On the device of the engines, whose 16-bit products and autocast rules are those that
    DeepSpeed gets.

    Args:
        kfac_config: in place of the mode's.
        before_step: ``(kfac, step)``: it may change the settings of a step.
        losses: None: of :func:`whole_batch`.
        scale: by how much the engine's gradients are larger than those of the losses.
        options: of the oracle, over those of the config.
    """
    device = torch.device(get_accelerator().current_device_name())
    dtype = variation.dtype(
        {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[mode.dtype]
    )
    model = make_net(model).to(device, torch.get_default_dtype())
    model.load_state_dict(initial, strict=False)
    frozen = [(p, p.detach().clone()) for p in model.parameters() if not p.requires_grad]
    work = model if dtype == torch.get_default_dtype() else copy.deepcopy(model).to(dtype)
    for p in work.parameters():
        p.grad_dtype = torch.get_default_dtype()
    kfac = kind(work, **{**reference_options(kfac_config or mode.kfac_block), **options})
    divisor = 2.0**8 if mode.dtype == "fp16" and mode.stage == 0 and unscaled() else 1.0
    rounding = Rounding16(mode, model, world, accumulation) if variation.rounded else None
    step = ReferenceStep(mode, model, work, kfac, rounding)
    autocast_dtype = mode.extra.get("torch_autocast", {}).get("dtype")
    autocast = {
        "dtype": getattr(torch, autocast_dtype or "bfloat16"),
        "enabled": autocast_dtype is not None,
    }
    losses = losses or whole_batch(world * accumulation * MICRO_ROWS, world)
    for index in range(steps):
        passes = losses(work, kfac, index, variation)
        while True:
            with torch.autocast(device.type, **autocast):
                loss = next(passes, None)
            if loss is None:
                break
            loss.backward()
        if rounding:
            rounding.gradients(work, *kfac.batch)
        if scale != 1.0:
            for p in work.parameters():
                p.grad = None if p.grad is None else p.grad * scale
        if before_step:
            before_step(kfac, index)
        step(divisor)
        with torch.no_grad():
            for p, value in frozen:  # ReferenceStep decays everything
                p.copy_(value)
    return {name: p.detach().clone().cpu() for name, p in model.named_parameters()}


def reference_options(kfac: dict) -> dict:
    """The "kfac" block as arguments of ReferenceKFAC."""
    options = {
        "update_interval": kfac["factor"]["update_interval"],
        "decay": kfac["factor"]["decay"],
        "refresh_interval": kfac["eigenbasis"]["refresh_interval"],
        "damping": kfac["damping"]["value"],
        "damping_kind": kfac["damping"]["kind"],
        "kl_clip": kfac["preconditioner"].get("kl_clip", 0.0),
        "method": kfac["preconditioner"].get("method", "eigen"),
        "burn_in": kfac.get("burn_in", {}).get("steps", BurnInConfig().steps),
        "sharing": kfac["factor"].get("weight_sharing", "expand"),
        "fisher": kfac["factor"].get("fisher", "empirical"),
        "dense_max": kfac["factor"].get("dense_max"),
        "longest": kfac.get("plan", {}).get("LONGEST", 16384),
    }
    if not kfac.get("adam", {}).get("rotate", True):
        options |= {"fisher": "activations_only", "longest": 0}
    if kfac["preconditioner"].get("eigenvalues") == "corrected":
        options["corrected"] = 0.95
    if "types" in kfac.get("layers", {}):
        options["types"] = kfac["layers"]["types"]
    return options


def maps_of_rows(maps: dict, layers: dict) -> dict[str, list[int]]:
    """``adam.blocks`` for the oracle: each row's map."""
    found = {}
    for name, layer in layers.items():
        for pattern, blocks in maps.items():
            if re.fullmatch(pattern, name):
                rows = len(layer.params[0])
                sizes = [rows // blocks] * blocks if isinstance(blocks, int) else blocks
                found[name] = [index for index, size in enumerate(sizes) for _ in range(size)] * (
                    rows // sum(sizes)
                )
    return found


class Rounding16:
    """Where an engine in 16 bits rounds and the reference, whose gradients are those of one batch
    in fp32, does not.

    A twin of the model, without hooks, gives the gradients of micro-batches; they are rounded and
    added up in the format in which DeepSpeed keeps them, at its loss scale.
    """

    def __init__(self, mode: Mode, model: nn.Module, world: int, accumulation: int) -> None:
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[mode.dtype]
        kept_fp32 = mode.extra.get("data_types", {}).get("grad_accum_dtype") == "fp32"
        self.kept = torch.float32 if kept_fp32 else self.dtype
        # stage 0: see reference
        self.scale = 2.0**8 if mode.dtype == "fp16" and mode.stage else 1.0
        self.parts, self.travels = world * accumulation, world > 1
        self.twin = copy.deepcopy(model).to(self.dtype)

    def gradients(self, work: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        """In place of those of ``work``."""
        self.twin.load_state_dict(work.state_dict())
        params, trained = (
            [p for p in net.parameters() if p.requires_grad] for net in (self.twin, work)
        )
        outputs = self.twin(x)
        sums = [torch.zeros_like(p, dtype=self.kept) for p in params]
        for z, labels in zip(outputs.chunk(self.parts), y.chunk(self.parts), strict=True):
            loss = cross_entropy(z, labels) * (self.scale / self.parts)
            gradients = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
            for total, g in zip(sums, gradients, strict=True):
                if g is not None:
                    total += g
        for p, total in zip(trained, sums, strict=True):
            p.grad = None if p.grad is None else total.float() / self.scale

    def result(self, g: torch.Tensor) -> torch.Tensor:
        """As it arrives on another rank: in bf16, whatever the parameters are in."""
        return g.bfloat16().float() if self.travels else g


class ReferenceStep:
    """What follows a backward of ``work``: unscaling, clipping, K-FAC and the optimizer on
    ``model``, the fp32 masters.

    Args:
        rounding: of results.
    """

    def __init__(
        self,
        mode: Mode,
        model: nn.Module,
        work: nn.Module,
        kfac: ReferenceKFAC,
        rounding: Rounding16 | None,
    ) -> None:
        self.mode, self.model, self.work, self.kfac = mode, model, work, kfac
        self.rounding = rounding
        options = {
            key: value
            for key, value in mode.optimizer["params"].items()
            if key not in ("torch_adam", "adam_lr")
        }
        self.options, self.groups = options, parameter_groups(model, mode.groups)
        self.ours: set[int] = set()
        if mode.adam:
            mine = {id(p) for layer in kfac.layers.values() for p in layer.params}
            pairs = zip(model.parameters(), work.parameters(), strict=True)
            self.ours = {id(master) for master, p in pairs if id(p) in mine}
        rest = [
            {**g, "params": [p for p in g["params"] if id(p) not in self.ours]} for g in self.groups
        ]
        kind = torch.optim.AdamW if mode.adam else getattr(torch.optim, mode.optimizer["type"])
        spare = torch.nn.Parameter(torch.zeros(1))  # torch wants at least one parameter
        decay = options.get("weight_decay", 0.0)
        rate = {"lr": options["lr"] * mode.adam_ratio, "weight_decay": decay / mode.adam_ratio}
        self.optimizer = kind([g for g in rest if g["params"]] or [spare], **{**options, **rate})
        # 0.17.0 has BF16_Optimizer there, which has not
        wrapped = mode.dtype == "fp16" or (
            mode.dtype == "bf16" and Version(deepspeed.__version__).release > (0, 17, 0)
        )
        if mode.adam and mode.stage == 0 and wrapped:
            # these wrappers have stepped once with zero gradients; ``initial`` was read after it
            with torch.no_grad():
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)
                before = [p.clone() for p in model.parameters()]
                self.optimizer.step()
                for p, value in zip(model.parameters(), before, strict=True):
                    p.copy_(value)

    def __call__(self, divisor: float) -> None:
        masters, params = list(self.model.parameters()), list(self.work.parameters())
        for master, p in zip(masters, params, strict=True):
            master.grad = torch.zeros_like(master) if p.grad is None else p.grad.float() / divisor
        if self.mode.clip:
            torch.nn.utils.clip_grad_norm_(masters, self.mode.clip)
        for master, p in zip(masters, params, strict=True):
            p.grad = master.grad
        if self.mode.adam:
            whole, layers = not self.mode.orthogonal, self.kfac.layers.items()
            matrices = [name for name, layer in layers if layer.orthogonal]
            heads = [name for name in matrices if whole or name.split(":")[0].endswith("head")]
            self.kfac.adam(
                tuple(self.options["betas"]),
                self.options["eps"],
                whiten=self.mode.whiten,
                size=self.mode.size,
                base=self.mode.base,
                orthogonal=[name for name in matrices if name not in heads],
                heads=heads,
                ratio=self.mode.adam_ratio,
                blocks=maps_of_rows(self.mode.maps, self.kfac.layers),
            )
        else:
            self.kfac.step(LR)
        ours = {id(p) for layer in self.kfac.layers.values() for p in layer.params}
        for master, p in zip(masters, params, strict=True):
            if self.rounding and id(p) in ours and p.grad is not None:
                p.grad = self.rounding.result(p.grad)
            master.grad = p.grad
        self._step()
        if self.work is not self.model:
            with torch.no_grad():
                for master, p in zip(masters, params, strict=True):
                    p.copy_(master)
        for p in params:
            p.grad = None

    @torch.no_grad()
    def _step(self) -> None:
        self.optimizer.step()
        for group in self.groups:
            for p in group["params"]:
                if id(p) in self.ours and p.grad is not None:
                    p.mul_(1 - LR * group.get("weight_decay", self.options["weight_decay"])).sub_(
                        LR * p.grad
                    )


_expected: dict[tuple, tuple[Expected, dict]] = {}
"""With the options, whose addresses are in the key."""


def expected(mode: Mode, accumulation: int, world: int, initial: dict, **options) -> Expected:
    """:func:`reference` with its spread. Modes and strategies that are the same run share it."""
    start = [(n, w.shape, float(w.double().sum()), float(w[-1:].sum())) for n, w in initial.items()]
    block = reference_options(options.get("kfac_config") or mode.kfac_block)
    others = {key: value for key, value in options.items() if key != "kfac_config"}
    same = replace(mode, kfac={}).mathematics, mode.optimizer, block, others, accumulation, world
    key = str((same, start))
    if key not in _expected:
        run = partial(reference, mode, accumulation, world, initial, **options)
        variations = spread.OTHERS if mode.dtype == "fp32" else spread.IN_16_BITS
        found = spread.expected(lambda variation: run(variation=variation), initial, variations)
        _expected[key] = found, options
    return _expected[key][0]


def compare(cases) -> dict:
    """[(mode name, accumulation)] -> {case: what came of it}."""
    return {case: compared(*case) for case in cases}


def compared(name: str, accumulation: int) -> dict:
    """Train in a mode, and say how far the weights are from the reference's on rank 0; every rank
    has the same in the end."""
    mode = BY_NAME[name]
    engine = build(mode, accumulation)
    initial = weights(engine)
    first = dist.get_rank() == 0
    found = expected(mode, accumulation, dist.get_world_size(), initial) if first else None
    with patched(mode):
        train(engine, accumulation)
    kfac, final = engine.kfac.preconditioner, weights(engine)
    result = {
        "difference": difference(final, found.weights, initial) if found else 0.0,
        "bound": found.bound if found else 1.0,
        "wrapper": type(engine.optimizer).__name__,
        "nu": 1.0 if kfac.metrics.nu is None else float(kfac.metrics.nu),
        "counts": dict(kfac.metrics.counts),
        "moved": kfac.exchange.plan.gather.total_numel,
        "replays": getattr(getattr(kfac.direction, "recorded", None), "replays", 0),
    }
    engine.destroy()
    return result


def held(model: nn.Module | None = None) -> dict[str, int]:
    """What this process has open."""
    gc.collect()
    modules = list(model.modules()) if model is not None else []
    return {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "hooks": sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
            for m in modules
        ),
    }
