"""A run that goes on as another one: from AdamW to KFACAdamW, or at another ZeRO stage. What DeepSpeed can load of it,
and what to do where it cannot."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ds_kfac.checkpoint import files
from ds_kfac.zero.deepspeed_versions import with_global_state

OTHER_GROUPS = "parameter group", "parameter-alignment", "must match the size of tensor"
"""In what DeepSpeed says of an optimizer state whose groups are cut otherwise, by mistake or by the optimizer."""
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
    if isinstance(error, AssertionError) or not any(text in str(error) for text in OTHER_GROUPS):
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
    return (
        f"{headline}KFACAdamW splits each group into layers, other matrices and all else, so no other optimizer's "
        f"state fits it, nor its own another's, nor that of other kfac.layers. {ways}{files.WEIGHTS_ALONE}"
    )


@contextmanager
def own_groups(
    engine: Any, load_dir: Path, tag: str | None, marks: Sequence[str], *, scheduled: bool
) -> Iterator[bool]:
    """Around the load of a universal checkpoint: whether it is of a run with other parameter groups, such as AdamW's.
    DeepSpeed then loads as many groups as were saved, leaves the weights of the others as they are, without a word, and
    takes settings by place. So all groups are loaded, and this engine's settings stay.

    Args:
        marks: keys by which a rule's groups are told apart.
        scheduled: whether the scheduler goes on: then the rates begin where it was.
    """
    settings = [{k: v for k, v in group.items() if k != "params"} for group in engine.basic_optimizer.param_groups]
    path = tag_of(load_dir, tag, "latest_universal") / "zero" / "optimizer_state.pt"
    saved = torch.load(path, weights_only=False)["param_groups"] if path.is_file() else None
    if saved is None or [_kind(group, marks) for group in saved] == [_kind(group, marks) for group in settings]:
        yield False
        return
    made = [group["lr"] / group["initial_lr"] for group in saved if group.get("initial_lr")]  # by one of torch's
    alike = bool(made) and max(made) - min(made) <= 1e-6 * max(made)  # but for the rounding of quotients
    for group in settings if scheduled and alike else ():
        group["lr"] = group.get("initial_lr", group["lr"]) * made[0]
    try:
        with with_global_state(engine.optimizer, {"param_groups": settings}):
            yield True
    finally:
        for group, own in zip(engine.basic_optimizer.param_groups, settings, strict=True):
            group.update(own)
        place = getattr(engine.lr_scheduler, "last_batch_iteration", -1) if scheduled else -1
        if isinstance(place, int) and place >= 0:  # DeepSpeed's, which has its place now: the rates of it
            engine.lr_scheduler.step(place)


def _kind(group: Mapping[str, Any], marks: Sequence[str]) -> list[bool]:
    return [bool(group.get(mark)) for mark in marks]
