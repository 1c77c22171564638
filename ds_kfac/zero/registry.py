"""The table of engine modes: exact class of ``engine.optimizer`` -> layout. An unknown wrapper raises.

At attach known values go through the shard map and back: a changed layout is an error, not a wrong gradient.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from ds_kfac.comm.message import Channel, Part, deliver, failing_together
from ds_kfac.zero.layout import ShardLayout
from ds_kfac.zero.replicated import BF16, Replicated, ReplicatedHalf
from ds_kfac.zero.shards import Piece, plan_gather, plan_scatter, source
from ds_kfac.zero.stages import Stage3, Stage12

SHARD_LAYOUTS: dict[type, type[ShardLayout]] = {
    DeepSpeedZeroOptimizer: Stage12,
    DeepSpeedZeroOptimizer_Stage3: Stage3,
    BF16_Optimizer: BF16,
    FP16_Optimizer: ReplicatedHalf,
    FP16_UnfusedOptimizer: ReplicatedHalf,
}


def optimized_parameters(engine: Any) -> list[nn.Parameter]:
    """Every parameter the engine's optimizer steps; ZeRO's own param_groups hold flat slices instead."""
    for attribute in ("bit16_groups", "bf16_groups", "fp16_groups"):
        groups = getattr(engine.optimizer, attribute, None)
        if groups is not None:
            return [param for group in groups for param in group]
    return [param for group in engine.optimizer.param_groups for param in group["params"]]


def shard_layout(
    engine: Any, params: Sequence[nn.Parameter], group: Any = None, pieces: Sequence[Piece] | None = None
) -> ShardLayout:
    """The layout of the engine's mode.

    Raises:
        ValueError: a wrapper that is not in the table; where it keeps gradients is not known, so nothing is guessed.
    """
    wrapper = type(engine.optimizer)
    layout = SHARD_LAYOUTS.get(wrapper)
    is_bare = isinstance(engine.optimizer, torch.optim.Optimizer) and not isinstance(
        engine.optimizer, DeepSpeedOptimizer
    )
    if layout is None and is_bare and not engine.zero_optimization():
        layout = Replicated
    if layout is None:
        raise ValueError(
            f"ds_kfac: DeepSpeed wrapped the optimizer in {wrapper.__module__}.{wrapper.__name__}, which ds_kfac does "
            f"not know; known: {', '.join(known.__name__ for known in SHARD_LAYOUTS)} and bare torch optimizers at "
            "ZeRO stage 0"
        )
    return layout(engine, params, group, pieces)


MODULUS = 251
"""A prime below 256: every known value, and no shifted one, is exact in bf16, with 1 added, too; + 0.5 is exact in fp32
only."""


def known_gradient(name: str, numel: int, device: Any) -> Tensor:
    """1 .. 251, running through the elements from a place that depends on the name; fp32 [numel]."""
    start = zlib.crc32(name.encode()) % MODULUS
    values = torch.arange(numel, device=device, dtype=torch.int32)  # in place: a vocabulary's embedding is large
    return values.add_(start).remainder_(MODULUS).add_(1).float()


def self_test(layout: ShardLayout, workers: Mapping[int, tuple[int, ...]], channel: Channel) -> None:
    """Check reading, both relayouts and writing against DeepSpeed's own functions. Collective; leaves no trace.

    DeepSpeed's code fills its gradient buffers with known values; workers must receive exactly them. They send back
    the values + 0.5, and what DeepSpeed would then feed its optimizer must differ from before by 0.5 at the
    preconditioned elements and by nothing elsewhere: 16-bit rounding on the way back shows. Where results are kept in
    16 bits, it is 1.

    Raises:
        RuntimeError: on every rank, naming what does not fit on which rank.
    """
    engine, rank = layout.engine, layout.rank
    names = {id(param): name for name, param in engine.module.named_parameters()}
    ours = {id(param) for param in layout.params}

    def known(param: nn.Parameter) -> Tensor:
        return known_gradient(names[id(param)], layout._numel(param), engine.device)

    def is_ours(param: nn.Parameter) -> Tensor:
        return torch.full((layout._numel(param),), float(id(param) in ours), device=engine.device)

    headline = (
        f"ds_kfac's self-test failed for {type(layout).__name__}: this DeepSpeed keeps gradients elsewhere than "
        "ds_kfac expects; training was not started. Use a DeepSpeed version named in the README."
    )
    mine = {(shard.param, shard.start): shard for shard in layout.shards.on(rank)}
    added = 1.0 if layout.in_place and layout.dtype is not torch.float32 else 0.5
    try:
        with failing_together(headline, layout.group) as problems:
            problems += _zero3_chunks(layout)
            layout.install(is_ours)
            mask = layout.consume()
            layout.install(known)
            before = layout.consume()
            pieces = {key: layout.read(shard).clone() for key, shard in mine.items()}

        gather = plan_gather(layout.shards, {param: ranks[0] for param, ranks in workers.items()})
        part = Part("self-test", gather, lambda move: pieces[move.param, move.start], layout.dtype)
        (received,) = deliver([part], channel, engine.device)
        own = [param for param, ranks in workers.items() if rank in ranks]
        full = {param: torch.zeros(layout.shards.numels[param], device=engine.device) for param in own}
        arrived = [(move.param, move.start, piece) for move, piece in received]
        for param, start, piece in [(*key, piece) for key, piece in pieces.items()] + arrived:
            if param in full:
                full[param][start : start + piece.numel()] = piece
        scatter = plan_scatter(layout.shards, lambda param, at: source(workers[param], at, layout.world))
        part = Part(
            "self-test",
            scatter,
            lambda move: full[move.param][move.start : move.start + move.numel] + added,
            torch.float32,
        )
        (returned,) = deliver([part], channel, engine.device)

        with failing_together(headline, layout.group) as problems:
            for param, values in full.items():
                if not torch.equal(values, known(layout.param_of(param)).narrow(0, *layout.span(param))):
                    problems.append(f"the gradient of {names[id(layout.param_of(param))]} did not arrive at its worker")
            for (param, start), shard in mine.items():
                if param in full:
                    layout.write(shard, full[param][start : start + shard.numel] + added)
            for move, piece in returned:
                layout.write(mine[move.param, move.start], piece)
            for group, (flat, was, touched) in enumerate(zip(layout.consume(), before, mask, strict=True)):
                if not torch.equal(flat, was + added * touched):
                    problems.append(f"DeepSpeed would not step with the gradients written to group {group}")
    finally:
        layout.clear()


def _zero3_chunks(layout: ShardLayout) -> list[str]:
    """ZeRO-3: our chunks against DeepSpeed's own partition of the weights. Gathers every parameter on every rank."""
    mine = {shard.param: shard for shard in layout.whole.on(layout.rank)}
    problems = []
    for index, param in enumerate(layout.params):
        if not hasattr(param, "ds_tensor"):
            break
        local = param.ds_tensor.detach().clone().view(-1)
        with GatheredParameters([param]):
            shard = mine.get(index)
            expected = param.detach().reshape(-1)[shard.start : shard.start + shard.numel] if shard else local[:0]
            if not torch.equal(local[: expected.numel()].to(expected.device), expected):
                problems.append(f"ZeRO-3 cut parameter {index} of shape {tuple(param.ds_shape)} into other chunks")
    return problems
