"""Tensor-parallel linears: this rank's shard of a weight is a layer of its own.

    column parallel   weight [O / t, I]    A is the whole layer's, G the diagonal block of the own outputs
    row parallel      weight [O, I / t]    A is the diagonal block of the own inputs, G the whole layer's

Together the shards are the whole layer with one side block-diagonal. A row-parallel bias is added to the sum over
ranks, as input of no block in particular: it is left to the optimizer. DeepSpeed's AutoTP layers and Megatron's are
found by name and attributes; neither is imported.
"""

from typing import Any

from torch import Tensor, nn

from ds_kfac.model.layers.base import computed_parameter
from ds_kfac.model.layers.linear import Linear

AUTOTP = "deepspeed.module_inject.layers"
AUTOTP_KINDS = {"LinearLayer": "ColumnParallelLinear", "LinearAllreduce": "RowParallelLinear"}
MEGATRON_SHAPES = {"ColumnParallelLinear": "output_size_per_partition", "RowParallelLinear": "input_size_per_partition"}


class _Shard(Linear):
    name: str

    def refusal(self, module: nn.Module) -> str | None:
        kind = type(module)
        if kind.__module__ == AUTOTP:
            if AUTOTP_KINDS.get(kind.__name__) == self.name:
                return computed_parameter(module)
            known = kind.__name__ in AUTOTP_KINDS or self.name != "ColumnParallelLinear"  # one of the two reports it
            return "" if known else f"AutoTP's {kind.__name__}: how it cuts the weight's rows or columns is not known"
        if kind.__name__ != self.name or isinstance(module, nn.Linear):
            return ""
        shape = MEGATRON_SHAPES[self.name]
        if not hasattr(module, shape) or getattr(module, "weight", None) is None:
            return f"named {self.name}, but without {shape} and a weight of its own, as Megatron's have"
        config = getattr(module, "config", None)
        for owner in (module, config):
            for flag in ("sequence_parallel", "sequence_parallel_enabled"):
                if getattr(owner, flag, False):
                    return f"{flag}: its rows are spread over the tensor-parallel ranks"
        return self.unfit(module) or computed_parameter(module)

    def unfit(self, module: Any) -> str | None:
        """Why a Megatron layer's tensors are not its shard's rows, or None."""
        raise NotImplementedError


class ColumnParallelLinear(_Shard):
    """A shard of outputs: rows of W, with their part of the bias."""

    name = "ColumnParallelLinear"

    def unfit(self, module: Any) -> str | None:
        return "gather_output: its output is not its shard's" if getattr(module, "gather_output", False) else None

    def gradient_rows(self, module: Any, x: Tensor | None, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if getattr(module, "gather_output", False):  # AutoTP's, whose output is the whole layer's
            sizes = module._partition_sizes
            gradient = gradient.narrow(-1, sum(sizes[: module.tp_index]), sizes[module.tp_index])
        return None, gradient


class RowParallelLinear(_Shard):
    """A shard of inputs: columns of W. The bias is added after the sum over ranks and left to the optimizer."""

    name = "RowParallelLinear"
    without_bias: str | None = "is added to the sum over tensor-parallel ranks, it belongs to no shard"

    def unfit(self, module: Any) -> str | None:
        parallel = getattr(module, "input_is_parallel", False)
        return None if parallel else "its input is not its shard's: input_is_parallel is false"
