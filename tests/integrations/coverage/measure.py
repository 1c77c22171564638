"""What is measured of one model, in a process of its own: its share at full size, and eight steps
of a tiny one."""

import contextlib
import io
import math
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ds_kfac.config.keys import parse
from ds_kfac.diagnostics.share import share_of
from ds_kfac.directions.table import rule_in
from ds_kfac.model.scan import scan
from tests.integrations.coverage.architectures import Architecture, at_full_size

STEPS = 8
STAGES = (0, 2)
RATE = 2e-3
NAMED = 4
"""Reasons that are kept."""


def ds_config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {
            "type": "KFACAdamW",
            "params": {"lr": RATE, "weight_decay": 0.0, "torch_adam": True},
        },
        "kfac": {"enabled": True, "report": "none"},
    }


def shares(row: Architecture) -> dict[str, Any]:
    """Of the model at its full size; or an error."""
    try:
        return share_at(at_full_size(row))
    except Exception as problem:
        return failed(problem)


def share_at(model: nn.Module) -> dict[str, Any]:
    config, _ = rule_in(ds_config(0)).resolved(parse(ds_config(0)["kfac"]))
    found = scan(model, config.choice)
    share = share_of(model, found)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "matrices": share.matrices,
        "stepped": share.stepped,
        "curved": share.curved,
        "layers": sum(count for _, count in share.kinds),
        "left": [[kind, reason, numel] for (kind, reason), numel in share.skipped[:NAMED]],
    }


def trained(row: Architecture) -> dict[str, dict[str, Any]]:
    """By ZeRO stage."""
    return {str(stage): trained_at(row, stage) for stage in STAGES}


def trained_at(row: Architecture, stage: int) -> dict[str, Any]:
    """Loss before and after :data:`STEPS` steps of the tiny model, and layers that moved without
    curvature; or an error, with where it happened."""
    from tests.integrations.coverage.batches import batch_of, loss_of
    from tests.integrations.coverage.tiny import tiny

    where = "build"
    try:
        torch.manual_seed(0)
        model = tiny(row)
        for parameter in model.parameters():
            if parameter.dim() == 0:  # DeepSpeed's own broadcast takes no tensor without dimensions
                parameter.data = parameter.data.view(1)
        batch = batch_of(row, model)
        where = "forward"
        model.train()
        loss_of(model(**batch))
        where = "attach"
        import ds_kfac

        with contextlib.redirect_stdout(io.StringIO()):
            engine, *_ = ds_kfac.initialize(
                model=model, model_parameters=model.parameters(), config=ds_config(stage)
            )
        where = "step"
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        losses = []
        for _ in range(STEPS):
            torch.manual_seed(1)
            loss = loss_of(engine(**batch))
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        torch.manual_seed(1)
        losses.append(float(loss_of(engine(**batch)).detach()))
        found = {
            "parameters": sum(map(torch.numel, before.values())),
            "before": losses[0],
            "after": losses[-1],
        }
        found |= of_layers(engine, before)
        engine.destroy()
    except Exception as problem:
        return {**failed(problem), "where": where}
    if not all(map(math.isfinite, losses)):
        found |= {"where": "step", "error": "the loss is not finite"}
    return found


def of_layers(engine: Any, before: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Layers, those that moved, and those of these that are stepped without curvature after all."""
    kfac, now = engine.kfac.preconditioner, dict(engine.module.named_parameters())
    moved, silent = 0, []
    for layer in kfac.layers:
        index, count = layer.part
        change = now[layer.weight].detach() != before[layer.weight]
        if bool(change.reshape(count, -1)[index].any()):
            moved += 1
            curved = (
                kfac.state[layer.name].preconditioner is not None
                and layer.name not in kfac.proving.unfit
            )
            silent += [] if curved else [layer.name]
    return {"layers": len(kfac.layers), "moved": moved, "silent": silent}


def failed(problem: Exception) -> dict[str, Any]:
    """What is kept of an exception: its message, and the last line of code that is known."""
    frames = traceback.extract_tb(problem.__traceback__)
    last = next((f for f in reversed(frames) if "/ds_kfac/" in f.filename), frames[-1])
    place = "/".join(last.filename.split("/")[-3:])
    message = (str(problem).strip() or type(problem).__name__).splitlines()
    return {
        "error": f"{type(problem).__name__}: {' '.join(message)[:300]}",
        "line": f"{place}:{last.lineno}",
    }
