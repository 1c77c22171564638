"""``python -m ds_kfac check``: what attach would report of a config and a model, without a run."""

import argparse

from ds_kfac.config.kfac import find_block
from ds_kfac.directions.table import rule_in
from ds_kfac.engine.refusals import check_model
from ds_kfac.engine.report import layer_lines, skipped_lines, summary, without_effect
from ds_kfac.estimate.command import add_model, count
from ds_kfac.estimate.estimates import planned
from ds_kfac.estimate.mem_needs import costs_of
from ds_kfac.estimate.mode import answered, mode_of, read_config, with_optimizer
from ds_kfac.estimate.models import build
from ds_kfac.estimate.subject import subject_of
from ds_kfac.model.scan import Scan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="DeepSpeed config (JSON)")
    add_model(parser)
    parser.add_argument("--world", type=count, default=1, help="data-parallel ranks that it is planned for")


def run(arguments: argparse.Namespace) -> str:
    """The report.

    Raises:
        ValueError: wrong config or model, or a combination that attach would refuse.
    """
    ds_config = with_optimizer(read_config(arguments.config), arguments.optimizer)
    rule, block = rule_in(ds_config), find_block(ds_config)
    if block is None and rule.optimizer_type is None:
        raise ValueError(
            f'{arguments.config} has no "kfac" block and its optimizer is not KFACAdamW: it trains as it is'
        )
    given, config, answers = answered(ds_config)
    if not given.enabled:
        raise ValueError(f"{arguments.config}: kfac.enabled is false: it trains without K-FAC")
    mode = mode_of(ds_config, config)
    model, _ = build(arguments.model, arguments.lora)
    subject = subject_of(model, config, mode)
    plan = planned(subject, mode, config, world=arguments.world, costs=costs_of("cuda", config), rows=None)
    found = Scan(subject.layers, subject.skipped)
    ours = {name for layer in found.layers for name in layer.parameters}
    check_model(model, config, sum(p.requires_grad and name not in ours for name, p in model.named_parameters()))
    warnings = [f"  WARNING: {text}" for text in without_effect(rule, given, subject.layers, mode.optimizer)]
    where = f"{mode}, {arguments.world} ranks"
    return "\n".join(
        [
            f"{arguments.config} fits {arguments.model} (python -m ds_kfac estimate says more of costs)",
            *summary(model, found, [plan], rule, mode.optimizer, where, warnings),
            *(["  chosen: " + ", ".join(answers)] if answers else []),
            *(f"  plan: {reason}" for reason in plan.reasons),
            "",
            *layer_lines(found, config, rule),
            *skipped_lines(found),
        ]
    )
