"""The optimizer's state in a checkpoint of stage 0, parameter by parameter, for an optimizer with other groups.

    fp32                    torch's state, by the place of a parameter
    FP16_UnfusedOptimizer   the same, of fp32 weights, which are saved beside it in lists, a list for each group
    FP16_Optimizer          the same, of one flat tensor for each group

DeepSpeed takes the first for bf16 and fp16 on CPUs and with torch's AdamW, the last with its own fused one.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
from torch import Tensor

from ds_kfac.checkpoint import files
from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.directions.kfac_adamw.optimizer import FLAG
from ds_kfac.zero.deepspeed_versions import replaced
from ds_kfac.zero.layout import parameter_groups

LISTS, FLAT = "fp32_groups", "fp32_groups_flat"
"""Where the wrappers keep fp32 weights, as attributes and in a checkpoint."""
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter")
"""What goes on of a loss scale, if both runs have a dynamic one, or none of them."""
MASTER = "master"
Values = dict[int, dict[str, Any]]
"""id of a parameter -> its fp32 weight, in 16 bits, and its moments."""


def inner(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The innermost optimizer's part of a state."""
    return state.get(OPTIMIZER_STATE_DICT, state)


def form(state: Mapping[str, Any] | Any) -> str | None:
    """Which of the wrappers a state, or an optimizer, is of; None: the optimizer's own."""
    has = state.__contains__ if isinstance(state, Mapping) else lambda name: hasattr(state, name)
    return next((name for name in (FLAT, LISTS) if has(name)), None)


def handed_over(engine: Any, saved: Mapping[str, Any], entry: Mapping[str, Any] | None) -> Values:
    """What parameters take from the optimizer's state in a checkpoint.

    Args:
        entry: of K-FAC in the client_state; None: AdamW has saved it.

    Raises:
        CheckpointError: the checkpoint is of other parameters or groups.
    """
    optimizer, own = engine.basic_optimizer, parameter_groups(engine.optimizer)
    stepped, users = {id(p) for p in chain(*own)}, getattr(optimizer, "users", None)
    given = own if users is None else [list(group["params"]) for group in users.param_groups]
    placed: dict[int, list[Any]] = {}
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    for index, params in enumerate(given):
        for parameter in (p for p in params if id(p) in stepped):
            # in which group of K-FAC's it was, and where, follows from its name
            number = index if entry is None else entry.get("groups", {}).get(names[id(parameter)], -1)
            placed.setdefault(number, []).append(parameter)
    if entry is not None:
        places = {name: place for place, name in enumerate(entry.get("order", ()))}
        for params in placed.values():
            params.sort(key=lambda parameter: places.get(names[id(parameter)], 0))
    groups, values = inner(saved)["param_groups"], Values()
    for number, group in enumerate(groups):
        params = placed.pop(number, [])
        found = _split(saved, number, params)
        if found is None:
            placed[number] = params
            break
        for parameter, value in zip(params, found, strict=True):
            if group.get(FLAG):  # K-FAC's, which has zeros in their place
                value = {key: part for key, part in value.items() if key == MASTER}
            values[id(parameter)] = value
    if placed:
        raise CheckpointError(
            f"ds_kfac: the checkpoint's optimizer has {[len(group['params']) for group in groups]} parameters in its "
            f"groups, this engine's {[len(params) for params in given]}, so it is not known whose moments are whose. "
            f"Give the optimizer the groups that it was saved with. {files.WEIGHTS_ALONE}"
        )
    return values


def _split(saved: Mapping[str, Any], number: int, params: Sequence[Any]) -> list[dict[str, Any]] | None:
    """The values of a saved group's parameters; None if it has others."""
    places, kind = inner(saved)["param_groups"][number]["params"], form(saved)
    each = [{**inner(saved)["state"].get(place, {})} for place in places]
    for place, master in enumerate([saved[FLAT][number]] if kind == FLAT else saved[LISTS][number] if kind else ()):
        each[place][MASTER] = master
    if kind == FLAT:
        (flat,), ends = each, list(accumulate((p.numel() for p in params), initial=0))
        if flat[MASTER].numel() != ends[-1]:
            return None
        each = [
            {key: value[first:end] if _is_whole(value) else value for key, value in flat.items()}
            for first, end in pairwise(ends)
        ]
    shapes = [{value.numel() for value in values.values() if _is_whole(value)} for values in each]
    if len(each) != len(params) or any(s - {p.numel()} for s, p in zip(shapes, params, strict=True)):
        return None
    pairs = zip(each, params, strict=True)
    return [{key: x.view(p.shape) if _is_whole(x) else x for key, x in values.items()} for values, p in pairs]


def _is_whole(value: Any) -> bool:
    """Whether a value of the state has an entry for each of the parameter's; a step count has not."""
    return isinstance(value, Tensor) and value.ndim > 0


def joined(engine: Any, values: Values) -> dict[str, Any]:
    """A state of this engine's optimizer with these values; what has no moments begins anew, as do K-FAC's."""
    state = dict(engine.optimizer.state_dict())
    own, kind, moments = dict(inner(state)), form(state), dict[int, Any]()
    for index, (group, params) in enumerate(zip(own["param_groups"], parameter_groups(engine.optimizer), strict=True)):
        each = [dict(values.get(id(p), {})) for p in params]
        masters = [value.pop(MASTER, None) for value in each]
        if group.get(FLAG):
            each = [{} for _ in each]
        if kind == FLAT:
            keys = dict.fromkeys(chain(*each))
            each = [{key: _flat([value.get(key) for value in each], params) for key in keys}]
            masters = [torch.cat([master.flatten() for master in masters])]
        if kind is not None:
            state[kind] = [*state[kind]]
            state[kind][index] = masters[0] if kind == FLAT else masters
        moments |= {place: value for place, value in zip(group["params"], each, strict=True) if value}
    own["state"] = moments
    return {**state, OPTIMIZER_STATE_DICT: own} if kind else own


def _flat(parts: Sequence[Any], params: Sequence[Any]) -> Any:
    """One value of a flat group's state, zeros where a parameter has none."""
    some = next(part for part in parts if part is not None)
    if not _is_whole(some):
        return some
    pairs = zip(parts, params, strict=True)
    return torch.cat([some.new_zeros(p.numel()) if part is None else part.flatten() for part, p in pairs])


def with_state(
    engine: Any, entry: Mapping[str, Any] | None, of_adamw: dict[str, Mapping[str, Any]], optimizer: Any,
    new: Mapping[str, Any],
) -> AbstractContextManager[None]:  # fmt: skip
    """In place of what the other optimizer has saved, while a checkpoint is loaded: what parameters take of it.

    Args:
        entry: as of :func:`handed_over`.
        of_adamw: gets what AdamW has saved, by parameter.
        new: this engine's ``param_groups``, without parameters.
    """
    original = optimizer.load_state_dict

    def load(saved: Mapping[str, Any], **options: Any) -> None:
        values = handed_over(engine, saved, entry)
        state = joined(engine, values)
        for group, settings in zip(inner(state)["param_groups"], new["param_groups"], strict=True):
            group.update(settings)
        if saved.get("dynamic_loss_scale") == state.get("dynamic_loss_scale"):
            state |= {key: saved[key] for key in SCALE if key in saved and key in state}
        original(state, **options)
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        of_adamw.update({names[key]: value for key, value in values.items() if "exp_avg_sq" in value})

    return replaced(optimizer, "load_state_dict", load)
