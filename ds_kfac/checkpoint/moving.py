"""Continue a run with another optimizer: from AdamW to KFACAdamW, or back.

KFACAdamW splits every parameter group. DeepSpeed loads groups by position, so it would load the
wrong weights and moments. Therefore weights and moments are loaded by parameter name. DeepSpeed
itself does this for a universal checkpoint, which has a folder for each parameter. At stage 0
ds_kfac does it.

From AdamW to KFACAdamW, K-FAC layers begin with AdamW's moments, which are rotated into the first
eigenbasis. From KFACAdamW to AdamW, the moments of K-FAC layers begin at zero.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

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
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import LAYERS
from ds_kfac.step.job import Job
from ds_kfac.update.state import AdamMoments
from ds_kfac.zero.deepspeed_versions import replaced, with_global_state
from ds_kfac.zero.layout import parameter_groups

WEIGHT = "fp32"
"""Key of a parameter's fp32 weight, beside the keys of AdamW's moments and step."""
LISTS = "fp32_groups"
"""Key under which FP16_UnfusedOptimizer (stage 0) saves fp32 weights: a list for each group."""
FLAT = "fp32_groups_flat"
"""Key under which FP16_Optimizer (stage 0) saves fp32 weights: a flat tensor for each group."""
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter")
TO_ADAMW = (
    "this engine continues from a checkpoint of KFACAdamW. The checkpoint's moments of K-FAC "
    "layers are in eigenbases, so these layers begin with moments of zero; everything else "
    "continues. Warm up the learning rate again, unless AdamW counts steps for each parameter "
    "separately, as it does at stage 0 in fp32 (docs/howto/resume_and_move.md)"
)


def load_any(
    engine: Any, original: Callable[..., Any], load_dir: str, *args: Any, **kwargs: Any
) -> tuple[Any, Any, Values | None]:
    """Load a checkpoint that AdamW or KFACAdamW wrote.

    Args:
        original: DeepSpeed's ``load_checkpoint``. It receives all further arguments.

    Returns DeepSpeed's two results, and a function from a parameter's name to the parameter's
    values in the checkpoint. The third result is None if values are not loaded by name, for example
    because the same kind of optimizer wrote the checkpoint.

    Raises:
        CheckpointError: on every rank, if DeepSpeed has failed. The message says why, and what to
            do.
    """
    arguments = signature(original).bind(load_dir, *args, **kwargs).arguments
    tag = arguments.get("tag")
    with_scheduler = bool(arguments.get("load_lr_scheduler_states", True))
    module_only = bool(arguments.get("load_module_only", False))
    with_optimizer = bool(arguments.get("load_optimizer_states", True)) and not module_only
    universal = engine.load_universal_checkpoint()
    with explained(engine, Path(load_dir), tag):
        folder = tag_of(Path(load_dir), tag, universal=universal)
        with moving(
            engine, folder, with_optimizer=with_optimizer, with_scheduler=with_scheduler
        ) as values:
            path, client_state = original(load_dir, *args, **kwargs)
        if path is not None and universal:
            load_untrained(engine, Path(path).parent)
        if path is not None and not with_optimizer and not engine.zero_optimization():
            # otherwise the optimizer keeps its initial fp32 weights, and its next step overwrites
            # the loaded weights with them
            getattr(engine.optimizer, "refresh_fp32_params", lambda: None)()
    return path, client_state, values


def watch_loads(engine: Any) -> None:
    """Let an engine without K-FAC continue from checkpoints of KFACAdamW."""
    if getattr(engine, "basic_optimizer", None) is None:
        return
    original = engine.load_checkpoint

    @wraps(original)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        if hasattr(engine, "kfac"):  # K-FAC was attached after this function was installed
            return original(*args, **kwargs)
        path, client_state, values = load_any(engine, original, *args, **kwargs)
        if values is not None and engine.global_rank == 0:
            logger.warning(f"ds_kfac: {TO_ADAMW}")
        if client_state:  # otherwise a save could have K-FAC's entry without K-FAC's state
            client_state.pop(files.CLIENT_KEY, None)
        return path, client_state

    engine.load_checkpoint = load_checkpoint


@contextmanager
def moving(
    engine: Any, folder: Path, *, with_optimizer: bool, with_scheduler: bool
) -> Iterator[Values | None]:
    """If AdamW wrote a checkpoint and this engine has KFACAdamW, or the reverse, load weights and
    moments by name while DeepSpeed loads the checkpoint. The parameter groups keep this engine's
    settings.

    Args:
        folder: the tag's folder.
        with_optimizer: whether DeepSpeed loads the optimizer's state.
        with_scheduler: whether DeepSpeed loads the scheduler. If it does, the groups get the
            scheduler's learning rates.

    Yields a function from a parameter's name to the parameter's values in the checkpoint. Yields
    None if values are not loaded by name, for example because the same kind of optimizer wrote the
    checkpoint.
    """
    saved: Any = None
    states: Mapping[str, Any] = {}  # model states of a checkpoint of stage 0
    if with_optimizer and engine.load_universal_checkpoint():
        saved = optimizer_state(folder)
    elif with_optimizer and not engine.zero_optimization():
        states = model_states(folder) or {}
        saved = states.get("optimizer")
    groups = engine.basic_optimizer.param_groups
    if not isinstance(saved, Mapping) or not _is_others(
        _inner(saved)["param_groups"], groups, at_stage_0=bool(states)
    ):
        yield None
        return
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    by_name: dict[str, Any] = {}

    # This function's ``saved`` is this rank's own state, because the rank may have a shard of the
    # model. The outer ``saved`` is rank 0's state
    def give_by_name(saved: Mapping[str, Any], **_: Any) -> None:
        by_name.update(of_stage_0(engine, saved, states, folder))
        give(engine, by_name.get, saved)

    try:
        if states:
            with replaced(engine.optimizer, "load_state_dict", give_by_name):
                yield by_name.get
        else:
            with with_global_state(engine.optimizer, {"param_groups": settings}):
                yield adam_values(folder)
    finally:
        for group, setting in zip(engine.basic_optimizer.param_groups, settings, strict=True):
            group.update(setting)
        if with_scheduler:
            _set_rates(engine.lr_scheduler)


def _set_rates(scheduler: Any) -> None:
    """Give the parameter groups a loaded scheduler's learning rates."""
    step = getattr(scheduler, "last_batch_iteration", None)
    if step is not None and step >= 0:  # one of DeepSpeed's
        scheduler.step(step)
    elif hasattr(scheduler, "base_lrs"):  # one of torch's
        for group, rate in zip(
            scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=False
        ):
            group["lr"] = rate


def _inner(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return torch's part of an optimizer's state. In 16 bits DeepSpeed adds fp32 weights to the
    state."""
    return state if "param_groups" in state else state[OPTIMIZER_STATE_DICT]


def _is_others(
    then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], *, at_stage_0: bool
) -> bool:
    """Return whether AdamW saved the parameter groups and KFACAdamW loads them, or the reverse. For
    a universal checkpoint, also return True if KFACAdamW saved and loads them, but the K-FAC layers
    have changed. In all these cases values are loaded by name."""
    if at_stage_0:
        kfac_is_involved = of_kfac(then) != of_kfac(now)
    else:
        kfac_is_involved = of_kfac(then) or of_kfac(now)
    all_are_adam = all("betas" in group for group in (*then, *now))
    return kfac_is_involved and marks(then) != marks(now) and all_are_adam


class _Entry(NamedTuple):
    """An entry of an optimizer's state at stage 0: one parameter, or a flat group of parameters.

    Attributes:
        by_kfac: whether K-FAC updates the parameters of the entry.
        place: the entry's key in the state.
        weight: fp32 copy of the entry's weight; None if the model is in fp32.
        members: the parameters of the entry, or their names.
    """

    by_kfac: bool
    place: int
    weight: Tensor | None
    members: Sequence[Any]


def _entries(state: Mapping[str, Any], groups: Sequence[Sequence[Any]]) -> Iterator[_Entry]:
    """Yield the entries of an optimizer's state at stage 0.

    Args:
        groups: parameters of each group, or their names.
    """
    for number, (group, members) in enumerate(
        zip(_inner(state)["param_groups"], groups, strict=True)
    ):
        members_of_entries: Sequence[Any] = [[member] for member in members]
        weights: Sequence[Any] = [None] * len(members)
        if FLAT in state:
            members_of_entries = [members]
            weights = [state[FLAT][number]]
        elif LISTS in state:
            weights = state[LISTS][number]
        for place, weight, of_entry in zip(
            group["params"], weights, members_of_entries, strict=True
        ):
            yield _Entry(bool(group.get(FLAG)), place, weight, of_entry)


def of_stage_0(
    engine: Any, saved: Mapping[str, Any], states: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Return a dict from parameter name to the parameter's fp32 weight, moments and step in a
    checkpoint of stage 0. Moments of K-FAC layers are left out.

    Args:
        saved: the optimizer's state.
        states: rank 0's model states.
        folder: the tag's folder, for the error.

    Raises:
        CheckpointError: the saved groups are not this engine's, so moments cannot be matched with
            parameters.
    """
    parameters = dict(engine.module.named_parameters())
    # with an mpu these would be the weights of one rank's shard
    module_weights = (states.get("module") or {}) if engine.mpu is None else {}
    groups = _names_by_group(engine, saved, states, module_weights, folder)
    values: dict[str, dict[str, Any]] = {}
    try:
        for entry in _entries(saved, groups):
            state = {} if entry.by_kfac else _inner(saved)["state"].get(entry.place, {})
            tensors = {} if entry.weight is None else {WEIGHT: entry.weight}
            if state:
                tensors |= {FIRST: state[FIRST], SECOND: state[SECOND]}
            # a flat group's tensors hold its parameters one after the other
            lengths = [parameters[name].numel() for name in entry.members]
            parts = {key: tensor.flatten().split(lengths) for key, tensor in tensors.items()}
            for index, name in enumerate(entry.members):
                values[name] = {WEIGHT: module_weights.get(name)}
                if state:
                    values[name][STEP] = state[STEP]
                values[name] |= {key: part[index] for key, part in parts.items()}
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"ds_kfac: the saved optimizer in {folder} does not have parameter groups of "
            f"{[len(group) for group in groups]} parameters, as this engine's optimizer has, or "
            "its moments are not AdamW's. So moments cannot be matched with parameters. Give this "
            f"engine's optimizer the groups of the saved one. {files.WEIGHTS_ALONE}"
        ) from error
    return values


def _names_by_group(
    engine: Any,
    saved: Mapping[str, Any],
    states: Mapping[str, Any],
    module_weights: Mapping[str, Any],
    folder: Path,
) -> list[list[str]]:
    """Return the names of the parameters in each group of a saved optimizer of stage 0.

    A checkpoint of KFACAdamW names the parameters in its client state. A checkpoint of AdamW does
    not, so its groups are assumed to be the groups that the user gave to this engine, in the same
    order.
    """
    saved_groups = _inner(saved)["param_groups"]
    if of_kfac(saved_groups):
        client_entry = states.get(files.CLIENT_KEY) or {}
        order = client_entry.get("order", ())  # empty with pipeline stages
        numbers = {name: client_entry["groups"].get(name) for name in order}
        return [
            [name for name in order if numbers[name] == index] for index in range(len(saved_groups))
        ]
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    check_order(list(names.values()), list(module_weights), folder)
    updated = {parameter for group in parameter_groups(engine.optimizer) for parameter in group}
    given = getattr(engine.basic_optimizer, "users", engine.basic_optimizer).param_groups
    return [[names[p] for p in group["params"] if p in updated] for group in given]


@torch.no_grad()
def give(engine: Any, values: Values, saved: Mapping[str, Any]) -> None:
    """Load weights and moments into the optimizer at stage 0.

    Parameters without saved moments, such as those of K-FAC layers, start with new moments. A
    dynamic loss scale is restored.

    Args:
        saved: the saved optimizer's state, from which the loss scale is taken.
    """
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    state = dict(engine.optimizer.state_dict())
    moments: dict[int, dict[str, Any]] = {}
    for entry in _entries(state, parameter_groups(engine.optimizer)):
        saved_values = [values(names[parameter]) or {} for parameter in entry.members]
        target = entry.members[0] if entry.weight is None else entry.weight
        target.data.copy_(_joined(WEIGHT, saved_values, entry.members, target))
        steps = [value[STEP] for value in saved_values if STEP in value]
        if steps and not entry.by_kfac:
            moments[entry.place] = {
                STEP: steps[0],
                FIRST: _joined(FIRST, saved_values, entry.members, target),
                SECOND: _joined(SECOND, saved_values, entry.members, target),
            }
    if saved.get("dynamic_loss_scale") == state.get("dynamic_loss_scale"):
        state |= {key: saved[key] for key in LOSS_SCALE if key in saved and key in state}
    new_state: Mapping[str, Any] = {**_inner(state), "state": moments}
    if OPTIMIZER_STATE_DICT in state:
        new_state = {**state, OPTIMIZER_STATE_DICT: new_state}
    # the instance's function is replaced, see moving()
    type(engine.optimizer).load_state_dict(engine.optimizer, new_state)


def _joined(
    key: str, values: Sequence[Mapping[str, Any]], parameters: Sequence[Tensor], like: Tensor
) -> Tensor:
    """Return the weight or moment of an entry, joined from the values of its parameters, with the
    shape, dtype and device of ``like``. A moment that was not saved is zero. A weight that was not
    saved is taken from the module, which has been loaded before this call."""
    parts = []
    for value, parameter in zip(values, parameters, strict=True):
        part = value.get(key)
        if part is None:
            part = parameter.detach() if key == WEIGHT else torch.zeros_like(parameter)
        parts.append(part.flatten().to(like))
    return torch.cat(parts).view_as(like)


def take_adamws(job: Job, values: Values) -> None:
    """Let K-FAC layers begin with AdamW's moments. K-FAC's state must just have been reset.
    Collective.

    In the other direction, from KFACAdamW to AdamW, moments begin at zero. Rotating them out of the
    eigenbases made no difference after 25 steps (docs/howto/resume_and_move.md).

    Raises:
        CheckpointError: on every rank, if a file cannot be read or belongs to another parameter.
    """
    kfac = job.preconditioners[0]  # the moments of experts, which are in other domains, stay zero
    headline = "ds_kfac: AdamW's moments cannot be read from the checkpoint"
    with failing_together(headline, job.channel.group, CheckpointError):
        if kfac.moments is not AdamMoments:
            return
        for layer in kfac.worker_layers:
            saved: list[Any] = [values(name) for name in layer.parameters]
            is_saved = all(value is not None and SECOND in value for value in saved)
            is_shard = layer.cut != (1, 1)
            if is_shard or not is_saved:
                continue
            steps = torch.full(
                layer.shape[:-2], float(saved[0][STEP]), dtype=torch.float32, device=kfac.device
            )
            moments = AdamMoments(
                _matrix(layer, saved, FIRST, kfac.device),
                _matrix(layer, saved, SECOND, kfac.device),
                steps,
            )
            group, place = kfac.places[layer.name]
            group.load(place, replace(group.state(place), moments=moments))


def _matrix(
    layer: LayerSpec, saved: Sequence[Mapping[str, Any]], key: str, device: torch.device
) -> Tensor:
    """Return a moment of a layer as a matrix [O, I] on a device, made from the moments of its
    weight and bias."""
    index, count = layer.part
    flats = [value[key].float().flatten().chunk(count)[index] for value in saved]
    weight = flats[0]
    bias = flats[1] if len(flats) > 1 else None
    matrix = LAYERS[layer.kind].matrix(weight, bias, layer.shape)
    return matrix.to(device, copy=True).contiguous()
