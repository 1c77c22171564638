"""``python -m ds_kfac estimate``."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ds_kfac.assignment.costs import CostModel
from ds_kfac.estimate.machine import Machine
from ds_kfac.estimate.mem_needs import costs_of, described
from ds_kfac.estimate.mode import DEFAULT, kfac_config, mode_of, read_config, rows_of, with_optimizer
from ds_kfac.estimate.models import build
from ds_kfac.estimate.subject import subject_of
from ds_kfac.estimate.trace import Trace, trace


def count(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; must be an integer of at least 1")
    return value


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"got {text!r}; must be a positive number such as 25 or 1.5e14")
    return value


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="module:factory, a function that returns a model, or (model, "
                        "example inputs), called on the meta device; or hf:PATH, a config.json of transformers, or its "
                        "folder")  # fmt: skip
    parser.add_argument("--optimizer", metavar="TYPE", help="the one that the script passes, such as AdamW, if the "
                        "config has none")  # fmt: skip
    parser.add_argument("--lora", type=count, metavar="R", help="train adapters of this rank only, put in by peft")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--config", help='DeepSpeed config (JSON); default: KFACAdamW, stage 0, an empty "kfac" block')
    parser.add_argument("--world", type=count, required=True, help="data-parallel ranks")
    parser.add_argument("--stage", type=int, choices=range(4), help="ZeRO stage, in place of the config's")
    parser.add_argument("--batch-rows", type=count, metavar="N", help="tokens (or images) of a rank in a step; "
                        "default: the config's batch times the model's context")  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="whose builtin costs count")
    parser.add_argument("--device-flops", type=_rate, metavar="F", help="FLOP/s of K-FAC's products, fp32 or TF32")
    parser.add_argument("--model-flops", type=_rate, metavar="F", help="FLOP/s that the model's forward and backward "
                        "reach; default: those of the products")  # fmt: skip
    parser.add_argument("--link-gbps", type=_rate, metavar="G", help="Gbit/s of a rank, each way")
    parser.add_argument("--node-size", type=count, metavar="N", help="ranks of a node; default: one")
    parser.add_argument("--node-gbps", type=_rate, metavar="G", help="Gbit/s of a rank within its node; default: the "
                        "same as between nodes")  # fmt: skip


def run(arguments: argparse.Namespace) -> str:
    """Text of the estimate.

    Raises:
        ValueError: wrong config, model or numbers.
    """
    if arguments.node_gbps is not None and arguments.node_size is None:
        raise ValueError("--node-gbps: give --node-size too")
    ds_config = with_optimizer(read_config(arguments.config) if arguments.config else DEFAULT, arguments.optimizer)
    config = kfac_config(ds_config)
    if not config.enabled:
        raise ValueError("kfac.enabled is false: such a run costs nothing more; leave the key out to estimate")
    mode = mode_of(ds_config, config, arguments.stage)
    model, example = build(arguments.model, arguments.lora)
    traced = _traced(model, example, own=not arguments.model.startswith("hf:")) if example is not None else None
    subject = subject_of(model, config, mode, trace=traced)
    costs = _costs(costs_of(arguments.device, config), arguments)
    if arguments.node_size is not None:
        costs = replace(costs, node_size=arguments.node_size)
    if arguments.node_gbps is not None:
        costs = replace(costs, node_bytes=arguments.node_gbps * 1e9 / 8)
    machine = Machine(costs, arguments.model_flops)
    rows, origin = arguments.batch_rows, "--batch-rows"
    if rows is None and traced is not None:
        rows, origin = rows_of(ds_config, arguments.world, traced.units)
    lines, _ = described(subject, mode, config, world=arguments.world, machine=machine, rows=rows)
    batch = f"batch of a rank: {origin}" if rows else "batch of a rank not known: give --batch-rows"
    lora = f" with LoRA of rank {arguments.lora}" if arguments.lora else ""
    title = f"ds_kfac estimate: {arguments.model}{lora}, config {arguments.config or 'default'}; {batch}"
    return "\n".join([title, *lines])


def _traced(model: nn.Module, example: Sequence[Any], *, own: bool) -> Trace | None:
    """None if a model of transformers does not run on the meta device, as some mixtures of experts; an example of the
    user's (``own``) has to."""
    try:
        return trace(model, example)
    except ValueError:
        if own:
            raise
        return None


def _costs(costs: CostModel, arguments: argparse.Namespace) -> CostModel:
    if arguments.device_flops:
        costs = replace(costs, gemm_flops=arguments.device_flops, syrk_flops=arguments.device_flops, product_flops=())
    if arguments.link_gbps:
        costs = replace(costs, link_bytes=arguments.link_gbps * 1e9 / 8)
    return costs
