"""Estimates from Python, named as DeepSpeed's: ``_live`` of a model, ``_cold`` of shapes."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.assignment.costs import BUILTIN, CostModel, measured
from ds_kfac.config.kfac import KFACConfig
from ds_kfac.curvature.forms import FACTOR_FORMS
from ds_kfac.estimate.estimates import Estimate, Refused, estimate, estimates, shards_of
from ds_kfac.estimate.machine import Machine
from ds_kfac.estimate.mode import Mode, kfac_config, mode_of, read_config
from ds_kfac.estimate.subject import Subject, subject_of
from ds_kfac.estimate.tables import (
    machine_lines,
    memory_lines,
    strategy_lines,
    subject_lines,
    traffic_lines,
    verdict,
    work_lines,
)
from ds_kfac.estimate.trace import trace
from ds_kfac.text import wrapped

Config = Mapping[str, Any] | str | os.PathLike


def estimate_kfac_mem_needs_all_live(
    model: nn.Module,
    config: Config,
    world: int,
    *,
    example: Sequence[Any] | None = None,
    batch_rows: int | None = None,
    device: str = "cuda",
    node_size: int | None = None,
    stage: int | None = None,
) -> tuple[Estimate | Refused, ...]:
    """Print and return what K-FAC would cost a rank: memory, bytes on the wire, FLOPs and seconds, for every strategy.

    Only the plan that a run would make is computed. The model may be anywhere, also on the meta device.

        with torch.device("meta"):
            model = Net()
        estimate_kfac_mem_needs_all_live(model, "ds_config.json", world=64)

    Args:
        model: what would be given to ``ds_kfac.initialize``, with ``model_parameters=model.parameters()``.
        config: DeepSpeed config, a dict or a file.
        world: data-parallel ranks.
        example: arguments of the model's forward. It is run with them, on the device of the model, to find layers
            that share their input, and rows per token; without, no layer is assumed to share its own.
        batch_rows: tokens (or images) of a rank in a step; None: captures and the model's own time are left out.
        device: "cuda" or "cpu", whose builtin costs count.
        node_size: consecutive ranks of a node.
        stage: of ZeRO, in place of the config's.

    Returns every gradient-worker fraction, or ZeRO's owner scheme, each an :class:`Estimate`, or a :class:`Refused`
    with the reason.

    Raises:
        ValueError: the config is wrong, or the model has no layer to precondition.
    """
    _, kfac, mode = _read(config, stage)
    device_of = next((p.device for p in model.parameters()), torch.device("meta"))
    on_device = [x.to(device_of) if isinstance(x, Tensor) else x for x in example or ()]
    traced = trace(model, on_device) if on_device else None
    subject = subject_of(model, kfac, mode, trace=traced)
    machine = Machine(replace(costs_of(device, kfac), node_size=node_size or 1))
    lines, found = described(subject, mode, kfac, world=world, machine=machine, rows=batch_rows)
    print("\n".join(lines))
    return found


def estimate_kfac_mem_needs_all_cold(
    shapes: Sequence[tuple[int, int, bool]], config: Config, world: int, **options: Any
) -> tuple[Estimate | Refused, ...]:
    """The same without a model, from the shapes of its linear layers alone.

        estimate_kfac_mem_needs_all_cold([(4096, 11008, False), (11008, 4096, False)] * 32, "ds_config.json", world=64)

    Args:
        shapes: (inputs, outputs, whether there is a bias) of every layer, in the model's order.
        options: of :func:`estimate_kfac_mem_needs_all_live`, except ``example``.
    """
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(*shape) for shape in shapes))
    return estimate_kfac_mem_needs_all_live(model, config, world, **options)


def described(
    subject: Subject, mode: Mode, config: KFACConfig, *, world: int, machine: Machine, rows: int | None
) -> tuple[list[str], tuple[Estimate | Refused, ...]]:
    """Text and estimates of every strategy, and details of the config's own.

    Raises:
        ValueError: the world is no number of ranks.
    """
    if world < 1:
        raise ValueError(f"world: got {world}; must be at least 1 rank")
    update, refresh = config.schedule.intervals(config.schedule.settled)
    chosen, refused, shards = None, list[str](), shards_of(subject, mode, world)
    try:
        chosen = estimate(subject, mode, config, world=world, machine=machine, rows=rows, shards=shards)
    except ValueError as problem:
        refused = wrapped(f"this config: refused: {problem}")
    found = estimates(subject, mode, config, world=world, machine=machine, rows=rows, known=chosen, shards=shards)
    method = config.preconditioner.method
    kept = FACTOR_FORMS[method].words
    lines = [
        *subject_lines(subject),
        "",
        f"  {world} ranks, {mode}; factors every {update} steps, {kept} every {refresh}",
        *machine_lines(machine, method),
        "",
        *strategy_lines(found, machine, chosen),
        *refused,
    ]
    if chosen is not None:
        lines += ["", f"  {verdict(chosen)}", f"  {chosen.name}: load max/mean {chosen.plan.assignment.imbalance:.2f}"]
        for reason in chosen.plan.reasons:
            lines += wrapped(f"plan: {reason}")
        for part in (memory_lines, traffic_lines, work_lines):
            lines += ["", *part(chosen)]
    return lines, found


def costs_of(device: str, config: KFACConfig) -> CostModel:
    """What a run on such a device would plan with.

    Raises:
        ValueError: there is no such device, or ``assignment.costs`` is no such file.
    """
    if device not in BUILTIN:
        raise ValueError(f"device: got {device!r}; must be one of {', '.join(BUILTIN)}")
    file = config.assignment.costs
    return BUILTIN[device] if file is None else measured(BUILTIN[device], file)


def _read(source: Config, stage: int | None) -> tuple[Mapping[str, Any], KFACConfig, Mode]:
    ds_config = read_config(source)
    config = kfac_config(ds_config)
    return ds_config, config, mode_of(ds_config, config, stage)
