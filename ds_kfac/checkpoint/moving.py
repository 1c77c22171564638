"""A run that goes on as another one: from AdamW to KFACAdamW or back, or at another ZeRO stage. What DeepSpeed can load
of it, and what to do where it cannot."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ds_kfac.checkpoint import files
from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.directions.kfac_adamw.optimizer import FLAG
from ds_kfac.directions.table import DIRECTIONS
from ds_kfac.log import logger
from ds_kfac.zero.deepspeed_versions import with_global_state

MARKS = tuple(dict.fromkeys(mark for rule in DIRECTIONS for mark in rule.marks))
"""Keys of parameter groups by which the optimizers of update rules know theirs."""
OTHER_GROUPS = "parameter group", "parameter-alignment", "must match the size of tensor"
"""In what DeepSpeed says of an optimizer state whose groups are cut otherwise, by mistake or by the optimizer."""
ERRORS = (ValueError, RuntimeError, AssertionError, IndexError, KeyError)
"""What its loads raise then."""
AFRESH = (
    "this engine goes on from a checkpoint of KFACAdamW: weights, step, scheduler and the moments of what both step by "
    "AdamW are the saved ones. Moments of K-FAC layers were in eigenbases and begin at zero, {} "
    "(docs/checkpoints.md#from-another-optimizer)"
)
"""Said when an engine without K-FAC has moved."""
COUNTS = (
    "with step counts of their own: their first steps are those of new parameters",
    "and the saved step count does not correct for that: warm up again, or their first steps are too long",
)
"""How AdamW goes on from such moments: at stage 0, from a universal checkpoint."""
UNIVERSAL = (
    "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {folder} --output_folder "
    '{folder}_universal, and load that with "checkpoint": {{"load_universal": true}} in the DeepSpeed config '
    "(docs/checkpoints.md#from-another-optimizer)"
)


def tag_of(load_dir: Path, tag: str | None, latest: str = "latest") -> Path:
    """The folder that DeepSpeed loads."""
    file = load_dir / latest
    return load_dir / (file.read_text().strip() if tag is None and file.is_file() else str(tag))


def why_not(engine: Any, load_dir: Path, tag: str | None, error: Exception) -> str | None:
    """What is wrong where DeepSpeed has raised an error of its own that names no remedy, and what to do; None: it is
    another error."""
    folder = tag_of(load_dir, tag, "latest_universal" if engine.load_universal_checkpoint() else "latest")
    if engine.load_universal_checkpoint() and not (folder / "zero").is_dir() and (load_dir / "latest").is_file():
        return (
            f'ds_kfac: the DeepSpeed config has "checkpoint": {{"load_universal": true}}, and {load_dir} has no '
            "universal checkpoint. After a move, when this run's own checkpoints are loaded, take that out. To move: "
            + UNIVERSAL.format(folder=tag_of(load_dir, None))
        )
    was_3 = bool(list(folder.glob("zero_pp_rank_*_model_states.pt")))
    is_3, saved = int(engine.zero_optimization_stage()) == 3, list(folder.glob("mp_rank_*_model_states.pt"))
    if isinstance(error, AssertionError) and was_3 != is_3 and (was_3 or saved):
        there = "at ZeRO stage 3" if was_3 else "below ZeRO stage 3"
        return (
            f"ds_kfac: {folder} was saved {there}, this engine has stage {int(engine.zero_optimization_stage())}, and "
            "DeepSpeed loads neither into the other, nor by a universal checkpoint. Go on at the stage that it was "
            f"saved at, or from the weights alone: python -m deepspeed.utils.zero_to_fp32 {load_dir} OUT --tag "
            f"{folder.name.removesuffix('_universal')} writes those of stages 1 to 3, which model.load_state_dict "
            "takes before the engine is built"
        )
    known = not isinstance(error, AssertionError) and any(text in str(error) for text in OTHER_GROUPS)
    if not known and kfac_stepped(folder) in (None, of_kfac(engine.basic_optimizer.param_groups)):
        return None
    headline = (
        f"ds_kfac: the optimizer state in {load_dir} has other parameter groups than this engine's "
        f"{type(engine.basic_optimizer).__name__}; "
    )
    here, stages = getattr(engine, "num_stages", 0), len(saved)
    if here and stages and stages != here:
        return (
            f"{headline}it was saved with {stages} pipeline stages, this engine has {here}, and DeepSpeed keeps the "
            f"optimizer's state of each stage. Load it with {stages} stages; K-FAC's own state fits any: "
            f"engine.kfac.load_state. {files.WEIGHTS_ALONE}"
        )
    zero = any(folder.glob("*zero_pp_rank_*_optim_states.pt"))
    ways = f"To move a run to another optimizer convert it: {UNIVERSAL.format(folder=folder)}. Or: " if zero else ""
    if not zero and engine.optimizer is not engine.basic_optimizer:
        kept = "one tensor a group" if hasattr(engine.optimizer, "fp32_groups_flat") else "lists, by group and place"
        ways = (
            f"At stage 0 in 16 bits DeepSpeed's {type(engine.optimizer).__name__} saves fp32 weights and moments in "
            f"{kept}, which this cannot hand over to other groups, as it can at stage 0 in fp32 and at stages 1 to 3. "
        )
    return (
        f"{headline}KFACAdamW splits each group into layers, other matrices and all else, so no other optimizer's "
        f"state fits it, nor its own another's, nor that of other kfac.layers. {ways}{files.WEIGHTS_ALONE}"
    )


def of_any_optimizer(engine: Any, original: Any, load_dir: str, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
    """DeepSpeed's load of a checkpoint, ``original``, whichever of AdamW and KFACAdamW wrote it and steps this engine.
    Returns its result, and whether it was the other one.

    Raises:
        CheckpointError: on every rank: DeepSpeed has failed, and this is why, and what to do.
    """
    arguments = signature(original).bind(load_dir, *args, **kwargs).arguments
    tag, scheduled = arguments.get("tag"), bool(arguments.get("load_lr_scheduler_states", True))
    whole = arguments.get("load_optimizer_states", True) and not arguments.get("load_module_only", False)
    try:
        with moving(engine, Path(load_dir), tag, scheduled=scheduled, whole=bool(whole)) as moved:
            path, client_state = original(load_dir, *args, **kwargs)
            if path is not None and engine.load_universal_checkpoint():
                load_untrained(engine, Path(path).parent)
    except ERRORS as error:  # on every rank
        if isinstance(error, CheckpointError) or (why := why_not(engine, Path(load_dir), tag, error)) is None:
            raise
        raise CheckpointError(why) from error
    return path, client_state, moved


@torch.no_grad()
def load_untrained(engine: Any, folder: Path) -> None:
    """Frozen weights and buffers, which DeepSpeed leaves as they are when it loads a universal checkpoint."""
    frozen = {name: p for name, p in engine.module.named_parameters() if not p.requires_grad}
    kept = engine.module.state_dict().keys()  # not buffers that no checkpoint has
    buffers = {name: tensor for name, tensor in engine.module.named_buffers() if name in kept}
    if not frozen and not buffers:
        return
    ranks = {int(path.name.split("_")[3]): path for path in folder.glob("zero_pp_rank_*_mp_rank_00_model_states.pt")}
    paths = [ranks[rank] for rank in sorted(ranks)] or [folder / "mp_rank_00_model_states.pt"]
    saved, left = list[Any](), set(frozen) | set(buffers)
    if engine.mpu is None and paths[0].is_file():
        saved = [torch.load(path, map_location="cpu", mmap=True, weights_only=False) for path in paths]
    whole = saved[0]["module"] if saved else {}
    for name, tensor in (buffers | frozen).items():
        parts = [part[name] for x in saved if name in (part := x.get("frozen_param_fragments") or {})]
        if hasattr(tensor, "ds_tensor") and parts:  # of stage 3, flat
            flat, own = torch.cat([part.flatten() for part in parts]), tensor.ds_tensor
            mine = flat[torch.distributed.get_rank(tensor.ds_process_group) * own.numel() :][: own.numel()]
            own.flatten()[: len(mine)].copy_(mine)
            if tensor.numel():  # small ones are whole on every rank
                tensor.copy_(flat[: tensor.numel()].view_as(tensor))
        elif name in whole and whole[name].shape == tensor.shape:
            tensor.copy_(whole[name])
        else:
            continue
        left.discard(name)
    if left:
        logger.warning(
            f"ds_kfac: WARNING: frozen weights and buffers that a universal checkpoint does not load stay as this "
            f"model has them: {', '.join(sorted(left)[:5])}{' ..' if len(left) > 5 else ''}"
        )


def watch_loads(engine: Any) -> None:
    """Let an engine without K-FAC go on from a checkpoint of KFACAdamW's."""
    if getattr(engine, "basic_optimizer", None) is None:
        return
    original = engine.load_checkpoint

    @wraps(original)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        if hasattr(engine, "kfac"):  # attached since
            return original(*args, **kwargs)
        path, client_state, moved = of_any_optimizer(engine, original, *args, **kwargs)
        if moved and engine.global_rank == 0:
            logger.warning(f"ds_kfac: {AFRESH.format(COUNTS[engine.load_universal_checkpoint()])}")
        return path, client_state

    engine.load_checkpoint = load_checkpoint


def kfac_stepped(folder: Path) -> bool | None:
    """Whether KFACAdamW has saved a checkpoint; None: it is not known."""
    for path in sorted(folder.glob("*mp_rank_00_model_states.pt"))[:1]:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        return bool((saved.get(files.CLIENT_KEY) or {}).get("groups"))
    return None


@contextmanager
def moving(engine: Any, load_dir: Path, tag: str | None, *, scheduled: bool, whole: bool) -> Iterator[bool]:
    """Around DeepSpeed's load: whether it is of a run with other parameter groups, such as AdamW's of KFACAdamW's or
    the other way. This engine's settings of its groups stay then.

    Of a universal checkpoint DeepSpeed loads as many groups as were saved, leaves the weights of the others as they
    are, without a word, and takes settings by place: so all groups are loaded. At stage 0 it gives the optimizer what
    the other one has saved: so moments are handed over, parameter by parameter.

    Args:
        scheduled: whether the scheduler goes on: then the rates begin where it was.
        whole: whether DeepSpeed loads the optimizer's state, too.
    """
    groups = engine.basic_optimizer.param_groups
    settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    saved, entry = saved_groups(engine, load_dir, tag) if whole else (None, {})
    universal = engine.load_universal_checkpoint()
    kinds = [[_kind(group) for group in own] if universal else of_kfac(own) for own in (saved or settings, settings)]
    if kinds[0] == kinds[1]:
        yield False
        return
    assert saved is not None
    made = [group["lr"] / group["initial_lr"] for group in saved if group.get("initial_lr")]  # by one of torch's
    alike = bool(made) and max(made) - min(made) <= 1e-6 * max(made)  # but for the rounding of quotients
    for group in settings if scheduled and alike else ():
        group["lr"] = group.get("initial_lr", group["lr"]) * made[0]
    new = {"param_groups": settings}
    load = with_global_state if universal else partial(with_state, engine, entry)
    try:
        with load(engine.optimizer, new):
            yield True
    finally:
        for group, own in zip(engine.basic_optimizer.param_groups, settings, strict=True):
            group.update(own)
        place = getattr(engine.lr_scheduler, "last_batch_iteration", -1) if scheduled else -1
        if isinstance(place, int) and place >= 0:  # DeepSpeed's, which has its place now: the rates of it
            engine.lr_scheduler.step(place)


def saved_groups(
    engine: Any, load_dir: Path, tag: str | None
) -> tuple[Sequence[Mapping[str, Any]] | None, Mapping[str, Any]]:
    """The optimizer's groups in a checkpoint that can move: a universal one, or one of stage 0 in fp32; else None. And
    what K-FAC has written to its client_state."""
    if engine.load_universal_checkpoint():
        path = tag_of(load_dir, tag, "latest_universal") / "zero" / "optimizer_state.pt"
        return (torch.load(path, weights_only=False)["param_groups"], {}) if path.is_file() else (None, {})
    path = tag_of(load_dir, tag) / "mp_rank_00_model_states.pt"
    if engine.zero_optimization() or engine.optimizer is not engine.basic_optimizer or not path.is_file():
        return None, {}
    saved = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    state = saved.get("optimizer")
    plain = isinstance(state, Mapping) and isinstance(state.get("param_groups"), list)  # not in 16 bits
    groups = [*state["param_groups"], *engine.basic_optimizer.param_groups] if plain else []
    adams = all("betas" in group for group in groups) and all("exp_avg_sq" in x for x in state["state"].values())
    return (state["param_groups"] if plain and adams else None), saved.get(files.CLIENT_KEY) or {}


@contextmanager
def with_state(engine: Any, entry: Mapping[str, Any], optimizer: Any, new: Mapping[str, Any]) -> Iterator[None]:
    """In place of what the other optimizer has saved at stage 0: its moments of what both step by AdamW.

    Args:
        entry: of K-FAC in the client_state.
        new: this engine's ``param_groups``, without parameters.
    """
    original = optimizer.load_state_dict

    def load(saved: Mapping[str, Any]) -> None:
        own, numbers = optimizer.state_dict(), iter(range(sum(len(g["params"]) for g in optimizer.param_groups)))
        number_of = {id(p): next(numbers) for group in optimizer.param_groups for p in group["params"]}
        state = {
            number_of[id(parameter)]: saved["state"][number]
            for parameter, number in handed_over(engine, saved["param_groups"], entry)
            if number in saved["state"]
        }
        for group, settings in zip(own["param_groups"], new["param_groups"], strict=True):
            group.update(settings)
        original({**own, "state": state})

    optimizer.load_state_dict = load
    try:
        yield
    finally:
        del optimizer.load_state_dict


def handed_over(engine: Any, saved: Sequence[Mapping[str, Any]], entry: Mapping[str, Any]) -> Iterator[tuple[Any, int]]:
    """Parameters that both optimizers step by AdamW, each with the number of its state in a checkpoint of stage 0.

    Raises:
        CheckpointError: the checkpoint is of other parameters or groups.
    """
    optimizer = engine.basic_optimizer
    users = getattr(optimizer, "users", None) or optimizer
    given, mine = [list(group["params"]) for group in users.param_groups], set()
    if of_kfac(saved):  # in which group, and where, follows from a parameter's name
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        numbers = [[entry.get("groups", {}).get(names[id(p)], -1) for p in params] for params in given]
    else:
        mine = {id(p) for group in optimizer.param_groups if group.get(FLAG) for p in group["params"]}
        numbers = [[index] * len(params) for index, params in enumerate(given)]
    counts = Counter(number for row in numbers for number in row)
    if counts != Counter({index: len(group["params"]) for index, group in enumerate(saved) if group["params"]}):
        raise CheckpointError(
            f"ds_kfac: the checkpoint's optimizer has {[len(group['params']) for group in saved]} parameters in its "
            f"groups, this engine's {[len(params) for params in given]}, so it is not known whose moments are whose. "
            f"Give the optimizer the groups that it was saved with. {files.WEIGHTS_ALONE}"
        )
    left = [iter(group["params"]) for group in saved]
    for parameter, number in zip(chain(*given), chain(*numbers), strict=True):
        place = next(left[number])
        if id(parameter) not in mine and not saved[number].get(FLAG):
            yield parameter, place


def of_kfac(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether K-FAC steps some of them."""
    return any(any(_kind(group)) for group in groups)


def _kind(group: Mapping[str, Any]) -> list[bool]:
    return [bool(group.get(mark)) for mark in MARKS]
