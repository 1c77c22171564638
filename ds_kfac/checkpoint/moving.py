"""A run that goes on with the other optimizer: from AdamW to KFACAdamW, or back.

KFACAdamW splits every parameter group, and DeepSpeed loads groups by place. So weights and moments
move by parameter name. DeepSpeed loads them from a universal checkpoint, which has a folder for
each parameter. At stage 0 we do. K-FAC layers begin with AdamW's moments, which the first
eigenbasis turns. AdamW begins those of K-FAC layers at zero.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
from torch import Tensor

from ds_kfac.checkpoint import files
from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.checkpoint.order import check_order, marks, of_kfac
from ds_kfac.checkpoint.remedies import explained, model_states, tag_of
from ds_kfac.checkpoint.universal import (
    FIRST,
    SECOND,
    STEP,
    Values,
    adam_values,
    load_untrained,
    optimizer_state,
)
from ds_kfac.comm.message import failing_together
from ds_kfac.directions.kfac_adamw.optimizer import FLAG
from ds_kfac.log import logger
from ds_kfac.model.registry import LAYERS
from ds_kfac.step.job import Job
from ds_kfac.update.state import AdamMoments
from ds_kfac.zero.deepspeed_versions import replaced, with_global_state
from ds_kfac.zero.layout import parameter_groups

WEIGHT = "fp32"
LISTS, FLAT = "fp32_groups", "fp32_groups_flat"
"""Where DeepSpeed's two 16-bit optimizers of stage 0 save fp32 weights: a list for each group, or
one flat tensor."""
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter")
TO_ADAMW = (
    "this engine goes on from a checkpoint of KFACAdamW. Moments of K-FAC layers were in "
    "eigenbases and begin at zero, "
    "all else goes on: warm up again, unless AdamW counts the steps of each parameter, as it does "
    "at stage 0 in fp32 "
    "(docs/howto/resume_and_move.md)"
)


def load_any(
    engine: Any, original: Callable[..., Any], load_dir: str, *args: Any, **kwargs: Any
) -> tuple[Any, Any, Values | None]:
    """Load a checkpoint by ``original``, DeepSpeed's function, whichever of AdamW and KFACAdamW
    wrote it.

    Returns DeepSpeed's two results, and what the other optimizer has saved of each parameter if it
    was the other one.

    Raises:
        CheckpointError: on every rank: DeepSpeed has failed, and this is why, and what to do.
    """
    arguments = signature(original).bind(load_dir, *args, **kwargs).arguments
    tag, scheduled = arguments.get("tag"), bool(arguments.get("load_lr_scheduler_states", True))
    whole = bool(arguments.get("load_optimizer_states", True)) and not arguments.get(
        "load_module_only", False
    )
    universal = engine.load_universal_checkpoint()
    with explained(engine, Path(load_dir), tag):
        folder = tag_of(Path(load_dir), tag, universal=universal)
        with moving(engine, folder, whole=whole, scheduled=scheduled) as values:
            path, client_state = original(load_dir, *args, **kwargs)
        if path is not None and universal:
            load_untrained(engine, Path(path).parent)
        if path is not None and not whole and not engine.zero_optimization():
            # else its fp32 weights stay those of the start, and are the weights again after a step
            getattr(engine.optimizer, "refresh_fp32_params", lambda: None)()
    return path, client_state, values


def watch_loads(engine: Any) -> None:
    """Let an engine without K-FAC go on from a checkpoint of KFACAdamW's."""
    if getattr(engine, "basic_optimizer", None) is None:
        return
    original = engine.load_checkpoint

    @wraps(original)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        if hasattr(engine, "kfac"):  # attached since
            return original(*args, **kwargs)
        path, client_state, values = load_any(engine, original, *args, **kwargs)
        if values is not None and engine.global_rank == 0:
            logger.warning(f"ds_kfac: {TO_ADAMW}")
        if client_state:  # K-FAC's part says nothing of this run's saves
            client_state.pop(files.CLIENT_KEY, None)
        return path, client_state

    engine.load_checkpoint = load_checkpoint


@contextmanager
def moving(engine: Any, folder: Path, *, whole: bool, scheduled: bool) -> Iterator[Values | None]:
    """Around DeepSpeed's load: if the other optimizer wrote the checkpoint, weights and moments go
    by name, and the parameter groups keep this engine's settings. Yields what is saved; None if
    nothing moves.

    Args:
        whole: whether DeepSpeed loads the optimizer's state.
        scheduled: whether DeepSpeed loads the scheduler, whose learning rates the groups then have.
    """
    saved: Any = None
    states: Mapping[str, Any] = {}
    if whole and engine.load_universal_checkpoint():
        saved = optimizer_state(folder)
    elif whole and not engine.zero_optimization():
        states = model_states(folder) or {}
        saved = states.get("optimizer")
    own = engine.basic_optimizer.param_groups
    if not isinstance(saved, Mapping) or not _is_others(
        _inner(saved)["param_groups"], own, at_stage_0=bool(states)
    ):
        yield None
        return
    settings = [{key: value for key, value in group.items() if key != "params"} for group in own]
    by_name: dict[str, Any] = {}

    # of this rank's part of a model in parts
    def give_by_name(saved: Mapping[str, Any], **_: Any) -> None:
        by_name.update(of_stage_0(engine, saved, states, folder))
        give(engine, by_name.get, saved)

    at_universal = with_global_state(engine.optimizer, {"param_groups": settings})
    try:
        with (
            replaced(engine.optimizer, "load_state_dict", give_by_name) if states else at_universal
        ):
            yield by_name.get if states else adam_values(folder)
    finally:
        for group, setting in zip(engine.basic_optimizer.param_groups, settings, strict=True):
            group.update(setting)
        place = getattr(engine.lr_scheduler, "last_batch_iteration", None)
        if scheduled and place is not None and place >= 0:  # one of DeepSpeed's
            engine.lr_scheduler.step(place)
        elif scheduled and hasattr(engine.lr_scheduler, "base_lrs"):  # one of torch's
            scheduler = engine.lr_scheduler
            for group, rate in zip(
                scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=False
            ):
                group["lr"] = rate


def _inner(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of an optimizer's state that is torch's. In 16 bits fp32 weights lie beside it."""
    return state if "param_groups" in state else state[OPTIMIZER_STATE_DICT]


def _is_others(
    then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], *, at_stage_0: bool
) -> bool:
    """Whether one of AdamW and KFACAdamW has saved parameter groups, and the other one has them
    now. Universal checkpoints of KFACAdamW go by name also where K-FAC steps others."""
    one_of_both = of_kfac(then) or of_kfac(now) if not at_stage_0 else of_kfac(then) != of_kfac(now)
    return (
        one_of_both
        and marks(then) != marks(now)
        and all("betas" in group for group in (*then, *now))
    )


def _entries(
    state: Mapping[str, Any], groups: Sequence[Sequence[Any]]
) -> Iterator[tuple[bool, int, Any, Any]]:
    """Walk through an optimizer's state of stage 0. Yields whether K-FAC steps the entry, its
    place, its fp32 weight (None in fp32), and the members of ``groups`` (parameters or names) that
    it is of: one, or those of a flat group."""
    for number, (group, members) in enumerate(
        zip(_inner(state)["param_groups"], groups, strict=True)
    ):
        each: Sequence[Any] = [[member] for member in members]
        weights: Sequence[Any] = [None] * len(members)
        if FLAT in state:
            each, weights = [members], [state[FLAT][number]]
        elif LISTS in state:
            weights = state[LISTS][number]
        for place, weight, of_entry in zip(group["params"], weights, each, strict=True):
            yield bool(group.get(FLAG)), place, weight, of_entry


def of_stage_0(
    engine: Any, saved: Mapping[str, Any], states: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Return parameter name -> fp32 weight, moments and step in a checkpoint of stage 0; K-FAC's
    have no moments. KFACAdamW has saved what its groups have. AdamW's have what the user gives to
    this engine, in its order.

    Raises:
        CheckpointError: the groups are others, so it is not known whose moments are whose.
    """
    parameters = dict(engine.module.named_parameters())
    module = (states.get("module") or {}) if engine.mpu is None else {}  # the whole model's weights
    names = {id(parameter): name for name, parameter in parameters.items()}
    entry, found = states.get(files.CLIENT_KEY) or {}, dict[str, dict[str, Any]]()
    if of_kfac(_inner(saved)["param_groups"]):
        # none with pipeline stages
        places = [(name, entry["groups"].get(name)) for name in entry.get("order", ())]
        numbers = range(len(_inner(saved)["param_groups"]))
        groups = [[name for name, number in places if number == index] for index in numbers]
    else:
        check_order(list(parameters), list(module), folder)
        stepped = {
            id(parameter) for group in parameter_groups(engine.optimizer) for parameter in group
        }
        given = getattr(engine.basic_optimizer, "users", engine.basic_optimizer).param_groups
        groups = [[names[id(p)] for p in group["params"] if id(p) in stepped] for group in given]
    try:
        for of_kfac_layers, place, weight, of_entry in _entries(saved, groups):
            lengths = [parameters[name].numel() for name in of_entry]
            state = {} if of_kfac_layers else _inner(saved)["state"].get(place, {})
            wholes = {
                WEIGHT: weight,
                **({FIRST: state[FIRST], SECOND: state[SECOND]} if state else {}),
            }
            parts = {key: x.flatten().split(lengths) for key, x in wholes.items() if x is not None}
            for index, name in enumerate(of_entry):
                found[name] = {WEIGHT: module.get(name), **({STEP: state[STEP]} if state else {})}
                found[name] |= {key: part[index] for key, part in parts.items()}
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"ds_kfac: the optimizer in {folder} has other parameter groups than "
            f"{[len(group) for group in groups]} "
            "parameters, or other moments than AdamW's, so it is not known whose moments are "
            "whose. Give the optimizer "
            f"the groups that it was saved with. {files.WEIGHTS_ALONE}"
        ) from error
    return found


@torch.no_grad()
def give(engine: Any, values: Values, saved: Mapping[str, Any]) -> None:
    """Load weights and moments into the optimizer at stage 0. What has no moments begins anew, as
    K-FAC layers do. A dynamic loss scale goes on from that of ``saved``."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    state, moments = dict(engine.optimizer.state_dict()), dict[int, dict[str, Any]]()
    for of_kfac_layers, place, weight, params in _entries(
        state, parameter_groups(engine.optimizer)
    ):
        own, target = (
            [values(names[id(p)]) or {} for p in params],
            params[0] if weight is None else weight,
        )

        def joined(key: str) -> Tensor:
            pairs = zip(own, params, strict=True)  # noqa: B023
            # a weight that the optimizer did not have came with the module
            missing = torch.Tensor.detach if key == WEIGHT else torch.zeros_like
            parts = [x[key] if x.get(key) is not None else missing(p) for x, p in pairs]
            return torch.cat([part.flatten().to(target) for part in parts]).view_as(target)  # noqa: B023

        target.data.copy_(joined(WEIGHT))
        steps = [value[STEP] for value in own if STEP in value]
        if steps and not of_kfac_layers:
            moments[place] = {STEP: steps[0], FIRST: joined(FIRST), SECOND: joined(SECOND)}
    if saved.get("dynamic_loss_scale") == state.get("dynamic_loss_scale"):
        state |= {key: saved[key] for key in LOSS_SCALE if key in saved and key in state}
    inner = {**_inner(state), "state": moments}
    whole = {**state, OPTIMIZER_STATE_DICT: inner} if OPTIMIZER_STATE_DICT in state else inner
    type(engine.optimizer).load_state_dict(engine.optimizer, whole)


def take_adamws(job: Job, values: Values) -> None:
    """Let K-FAC layers begin with AdamW's moments, after a reset. Collective. The other way they
    begin at zero: turned back they were no better after 25 steps in any run
    (docs/howto/resume_and_move.md).

    Raises:
        CheckpointError: on every rank; a file cannot be read, or is of another parameter.
    """
    kfac = job.preconditioners[0]  # experts of other domains begin at zero
    with failing_together(
        "ds_kfac: moments of AdamW cannot be read", job.channel.group, CheckpointError
    ):
        for layer in kfac.owned if kfac.moments is AdamMoments else ():
            saved: list[Any] = [values(name) for name in layer.parameters]
            if layer.cut != (1, 1) or any(value is None or SECOND not in value for value in saved):
                continue
            index, count = layer.part

            def matrix(key: str) -> Tensor:
                flats = [value[key].float().flatten().chunk(count)[index] for value in saved]  # noqa: B023
                weight, bias = (*flats, None)[:2]
                kind, shape = LAYERS[layer.kind], layer.shape  # noqa: B023
                return kind.matrix(weight, bias, shape).to(kfac.device, copy=True).contiguous()

            steps = torch.full(
                layer.shape[:-2], float(saved[0][STEP]), dtype=torch.float32, device=kfac.device
            )
            group, place = kfac.places[layer.name]
            group.load(
                place,
                replace(
                    group.state(place), moments=AdamMoments(matrix(FIRST), matrix(SECOND), steps)
                ),
            )
