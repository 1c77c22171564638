"""The subject of an estimate: a model and a DeepSpeed config. No engine is built, and only the
shapes of the model are used."""

import os
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from torch import nn

from ds_kfac.assignment.costs import CostModel
from ds_kfac.config.deepspeed_config import accumulation, block
from ds_kfac.config.keys import parse
from ds_kfac.config.values import AUTO, find_block, read_config
from ds_kfac.curvature.methods import METHODS
from ds_kfac.directions.kfac_adamw.user_optimizer import split_groups
from ds_kfac.directions.table import rule_in
from ds_kfac.engine.refusals import of_config, refused
from ds_kfac.estimate.trace import Trace
from ds_kfac.model.layers import parameter_shape
from ds_kfac.model.scan import scan
from ds_kfac.model.shared import agreed
from ds_kfac.plan.plan import EngineFacts, Observations, Plan, make_plan, sharing_candidates
from ds_kfac.zero.shards import ShardMap, held_by_layer, planned_shards

DTYPES = ("fp16", "bf16")
"""Blocks of a DeepSpeed config that set the dtype of parameters. Without them, the dtype is
fp32."""


def config_of(
    source: Mapping[str, Any] | str | os.PathLike,
    optimizer: str | None = None,
    dtype: str | None = None,
) -> Mapping[str, Any]:
    """Return a DeepSpeed config, see :func:`read_config`.

    Args:
        optimizer: type of the optimizer, if the script sets it and the config does not.
        dtype: "fp32", "bf16" or "fp16", if a framework sets it and the config does not.

    Raises:
        ValueError: the config is wrong, its optimizer is unknown, or an argument contradicts the
            config.
    """
    config = read_config(source)
    if rule_in(config).optimizer_type is None:
        name = block(config, "optimizer").get("type")
    else:
        name = None
    if name is not None and not (
        str(name).lower() in DEEPSPEED_OPTIMIZERS or hasattr(torch.optim, str(name))
    ):
        raise ValueError(
            f"optimizer.type: got {name!r}, which is in neither DeepSpeed, torch.optim nor ds_kfac"
        )
    if optimizer is not None and config.get("optimizer") is not None:
        raise ValueError(
            f"--optimizer {optimizer}: the config has an optimizer, too; leave out one of the two"
        )
    if dtype is not None:
        other = [
            name for name in DTYPES if name != dtype and block(config, name).get("enabled") is True
        ]
        if other:
            raise ValueError(
                f"--dtype {dtype}: the config enables {other[0]}; leave out one of the two"
            )
        config = {**config, **{name: {"enabled": name == dtype} for name in DTYPES}}
    return config if optimizer is None else {**config, "optimizer": {"type": optimizer}}


class Subject:
    """A model, possibly on the meta device, and a DeepSpeed config.

    Args:
        ds_config: the DeepSpeed config. Without a "kfac" block, the defaults are used.
        stage: ZeRO stage that replaces the one in the config; None: the config's stage.

    Attributes:
        user_config: the "kfac" block as the user wrote it.
        config: the "kfac" block with a value in place of each null.
        answers: texts that say how the values that replace nulls were chosen.
        rule: the optimizer's update rule.
        context: the facts of the engine that DeepSpeed would build.
        replicated: whether every rank has every averaged gradient.
        gradients: dtype of the gradients that K-FAC reads.
        scan: the result of scanning the model, with large layers divided into parts.
        layers: the layers in ``scan``.
        groups: parameter groups of the optimizer, in its order. A group is a list of (name, number
            of elements) of its trained parameters.
        shared: groups of layers that have the same input.
        forward: number of multiplications per unit (token or image) in the forward pass; 0 if it is
            unknown, because the trace lacks a stack of matrices.

    Raises ValueError if the config is wrong, if the model has no layers, or if K-FAC or the
    estimator does not support the engine.
    """

    def __init__(
        self,
        model: nn.Module,
        ds_config: Mapping[str, Any],
        stage: int | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.ds_config = ds_config
        self.trace = trace or Trace()
        self.rule = rule_in(ds_config)
        written = find_block(ds_config)
        optimizer = str(block(ds_config, "optimizer").get("type") or "")
        self.user_config = parse({} if written is None else written)
        self.config, self.answers = self.rule.resolved(self.user_config, optimizer)
        context = self.context = of_config(ds_config, self.config, self.rule.optimizer_type, stage)
        problems = refused(context)
        if block(ds_config, "tensor_parallel").get("autotp_size", 0) not in (0, 1):
            problems.append(
                "tensor_parallel.autotp_size: the estimator knows data parallelism only: remove "
                "the key, and pass the number of data-parallel ranks as world"
            )
        if problems:
            raise ValueError("; ".join(problems))
        offloaded = context.offload_device not in ("none", None)
        self.replicated = context.stage == 0
        self.gradients = context.parameters
        if context.stage > 0:
            if offloaded:
                self.gradients = torch.float32
            else:
                self.gradients = accumulation(ds_config) or context.parameters
        scanned = scan(model, self.rule.scanned(self.config))
        self.layers = self.rule.cut(self.config, scanned.layers)
        self.model = model
        self.scan = replace(scanned, layers=self.layers)
        groups = [list(model.parameters())]
        if self.rule.optimizer_type is not None:
            groups = [group["params"] for group in split_groups(model, self.scan, None)]
        name_of = {
            parameter: name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.groups = [
            [(name_of[p], prod(parameter_shape(p))) for p in group if p in name_of]
            for group in groups
        ]
        inputs = {layer.name: self.trace.inputs.get(layer.module, ()) for layer in self.layers}
        self.shared = agreed(
            [inputs], sharing_candidates(self.layers, METHODS[self.config.preconditioner.method])
        )
        stacks = {layer.weight for layer in self.layers if layer.part[1] > 1 and layer.product}
        known = stacks <= self.trace.stacked.keys()
        self.forward = self.trace.multiplications(model) if known else 0.0

    def __str__(self) -> str:
        name = str(self.context.parameters).removeprefix("torch.")
        return (
            f"ZeRO stage {self.context.stage}, {name} parameters{self.assumed}, "
            f"{self.context.optimizer}"
        )

    @property
    def assumed(self) -> str:
        """Text that follows the parameters' dtype in reports if the dtype is only assumed, because
        the config has "auto" instead of a value. Empty otherwise."""
        unknown = [
            f'"{key}"' for key in DTYPES if block(self.ds_config, key).get("enabled") == AUTO
        ]
        if not unknown or self.context.parameters is not torch.float32:
            return ""
        return (
            f' (assumed, because {" and ".join(unknown)} {"are" if unknown[1:] else "is"} "auto": '
            "give --dtype)"
        )

    def strategy(self, workers: int, world: int) -> str:
        """Return KAISA's name of a strategy. If ZeRO partitions gradients, the name is "owners",
        which corresponds to KAISA's MEM-OPT.

        Args:
            workers: number of gradient workers of a layer.
        """
        if not self.replicated:
            return f"ZeRO-{self.context.stage} owners"
        if world == 1:
            return "one rank"
        return {1: "MEM-OPT", world: "COMM-OPT"}.get(workers, f"HYBRID-OPT {workers}/{world}")

    def shards(self, world: int) -> ShardMap:
        """Return where DeepSpeed will put the layers' gradients."""
        dealt = bool(block(self.ds_config, "zero_optimization").get("round_robin_gradients"))
        return planned_shards(
            self.layers, self.groups, world=world, stage=self.context.stage, round_robin=dealt
        )

    def plan(self, shards: ShardMap, costs: CostModel, rows: int | None = None) -> Plan:
        """Return the plan that a run has after its first step, when it is known which layers share
        inputs. Raise ValueError like :func:`make_plan`.

        Args:
            rows: number of tokens (or images) that one rank processes in a step; None: unknown.
        """
        facts = EngineFacts(
            world=shards.world,
            held=None if self.replicated else held_by_layer(self.layers, shards),
            parameters=self.context.parameters,
            gradients=self.gradients,
            moments=self.rule.moments_count(self.config),
            rotates=self.rule.rotates(self.config),
        )
        plan = make_plan(self.layers, facts, self.config, costs)
        rows_of_layers = None
        if rows is not None:
            rows_of_layers = {layer.name: rows * self.trace.rows_of(layer) for layer in self.layers}
        shared = self.shared if plan.config.choice.shares else ()
        return plan.with_observations(Observations(shared, rows_of_layers))
