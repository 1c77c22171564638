"""``python -m ds_kfac check``: what attach would report of a config and a model, without a run."""

import argparse

from ds_kfac.config.kfac import find_block, parse
from ds_kfac.directions.table import rule_in
from ds_kfac.engine.layer_tables import layer_lines, skipped_lines
from ds_kfac.engine.warnings import without_effect
from ds_kfac.estimate.command import add_model, count
from ds_kfac.estimate.estimates import planned
from ds_kfac.estimate.mem_needs import costs_of
from ds_kfac.estimate.mode import mode_of, read_config
from ds_kfac.estimate.models import build
from ds_kfac.estimate.subject import subject_of
from ds_kfac.estimate.tables import number
from ds_kfac.model.scan import Scan, numel, share


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="DeepSpeed config (JSON)")
    add_model(parser)
    parser.add_argument("--world", type=count, default=1, help="data-parallel ranks that it is planned for")


def run(arguments: argparse.Namespace) -> str:
    """The report.

    Raises:
        ValueError: wrong config or model, or a combination that attach would refuse.
    """
    ds_config = read_config(arguments.config)
    rule, block = rule_in(ds_config), find_block(ds_config)
    if block is None and rule.optimizer_type is None:
        raise ValueError(
            f'{arguments.config} has no "kfac" block and its optimizer is not KFACAdamW: it trains as it is'
        )
    given = parse({} if block is None else block)
    if not given.enabled:
        raise ValueError(f"{arguments.config}: kfac.enabled is false: it trains without K-FAC")
    config, answers = rule.resolved(given)
    mode = mode_of(ds_config, config)
    model, _ = build(arguments.model, arguments.lora)
    subject = subject_of(model, config, mode)
    plan = planned(subject, mode, config, world=arguments.world, costs=costs_of("cuda", config), rows=None)
    every = [sum(map(numel, model.parameters())), sum(numel(p) for p in model.parameters() if p.requires_grad)]
    optimizer = (ds_config.get("optimizer") or {}).get("type", "the optimizer")
    state = max(int(nbytes) for nbytes in plan.assignment.memory)
    found = Scan(subject.layers, subject.skipped)
    return "\n".join(
        [
            f"ds_kfac: {arguments.config} fits {arguments.model}: {mode}, {arguments.world} ranks",
            f"  {share(subject.layers, *every)}",
            *(f"  WARNING: {text}" for text in without_effect(rule, given, subject.layers, optimizer)),
            f"  memory: K-FAC state at most {number(state, 'B')} on a rank (python -m ds_kfac estimate says more)",
            *(["  chosen: " + ", ".join(answers)] if answers else []),
            *(f"  plan: {reason}" for reason in plan.reasons),
            "",
            *layer_lines(found, config, rule),
            *skipped_lines(found),
        ]
    )
