"""What to do where DeepSpeed cannot load a checkpoint: its own errors name no remedy."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ds_kfac.checkpoint import files
from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.checkpoint.order import of_kfac

OTHER_GROUPS = "parameter group", "parameter-alignment", "must match the size of tensor"
"""In what DeepSpeed says of an optimizer state whose groups are cut otherwise, by mistake or by the
optimizer."""
STAGES = ("stage 0", "stage 1 or 2", "stage 3")
"""Of which DeepSpeed's checkpoints are alike."""
CONVERT = (
    "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder "
    "{folder} --output_folder "
    '{folder}_universal, and load that with "checkpoint": {{"load_universal": true}} in the '
    "DeepSpeed config "
    "(docs/howto/resume_and_move.md)"
)


def tag_of(load_dir: Path, tag: str | None, *, universal: bool = False) -> Path:
    """Return the folder that DeepSpeed loads."""
    latest = load_dir / ("latest_universal" if universal else "latest")
    return load_dir / (latest.read_text().strip() if tag is None and latest.is_file() else str(tag))


def model_states(folder: Path) -> Mapping[str, Any] | None:
    """Return what rank 0 has saved beside the optimizer states of ZeRO; None if there is no such
    file."""
    paths = sorted(folder.glob("*mp_rank_00_model_states.pt"))
    return (
        torch.load(paths[0], map_location="cpu", mmap=True, weights_only=False) if paths else None
    )


@contextmanager
def explained(engine: Any, load_dir: Path, tag: str | None) -> Iterator[None]:
    """Around a load. Raises CheckpointError in place of an error of DeepSpeed's that names no
    remedy."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # on every rank
        if (why := _why_not(engine, load_dir, tag, error)) is None:
            raise
        raise CheckpointError(f"ds_kfac: {why}") from error


def _why_not(engine: Any, load_dir: Path, tag: str | None, error: Exception) -> str | None:
    """Return what is wrong and what to do; None if it is another error."""
    universal = engine.load_universal_checkpoint()
    folder = tag_of(load_dir, tag, universal=universal)
    if universal and not (folder / "zero").is_dir() and (load_dir / "latest").is_file():
        return (
            f'the DeepSpeed config has "checkpoint": {{"load_universal": true}}, and {load_dir} '
            f"has no universal "
            "checkpoint. After a move, when this run's own checkpoints are loaded, take that out. "
            "To move: " + CONVERT.format(folder=tag_of(load_dir, None))
        )
    if "current world size is" in str(error):
        return (
            f"{folder} is of another number of ranks. Convert it: {CONVERT.format(folder=folder)}"
        )
    stage, partitions = (
        int(engine.zero_optimization_stage()),
        hasattr(engine.optimizer, "dp_process_group"),
    )
    if saved_at(folder) not in (None, STAGES[2 if stage == 3 else int(partitions)]):
        return (
            f"{folder} was saved at ZeRO {saved_at(folder)}, this engine has stage {stage}, and "
            f"DeepSpeed does not "
            "load the one into the other, nor by a universal checkpoint; K-FAC's own state fits "
            "any stage: "
            "engine.kfac.load_state. Go on at the stage that it was saved at, or from the weights "
            "alone, before the "
            "engine is built and not under deepspeed.zero.Init: " + weights_from(load_dir, folder)
        )
    known = not isinstance(error, AssertionError) and any(
        text in str(error) for text in OTHER_GROUPS
    )
    saved = model_states(folder)
    now = of_kfac(engine.basic_optimizer.param_groups)
    then = None if saved is None else bool((saved.get(files.CLIENT_KEY) or {}).get("groups"))
    here, stages = (
        getattr(engine, "num_stages", 0),
        len(list(folder.glob("mp_rank_*_model_states.pt"))),
    )
    other_stages = bool(here and stages and stages != here)
    if then in (None, now) and not (known and (then or now or other_stages)):
        return None
    headline = (
        f"the optimizer state in {load_dir} has other parameter groups than this engine's "
        f"{type(engine.basic_optimizer).__name__}; "
    )
    if other_stages:
        return (
            f"{headline}it was saved with {stages} pipeline stages, this engine has {here}, and "
            f"DeepSpeed keeps the "
            f"optimizer's state of each stage. Load it with {stages} stages; K-FAC's own state "
            f"fits any: "
            f"engine.kfac.load_state. {files.WEIGHTS_ALONE}"
        )
    zero = any(folder.glob("*zero_pp_rank_*_optim_states.pt"))
    ways = (
        f"To move a run to another optimizer convert it: {CONVERT.format(folder=folder)}. Or: "
        if zero
        else ""
    )
    return (
        f"{headline}KFACAdamW splits each group into layers, other matrices and all else, so no "
        f"other optimizer's "
        f"state fits it, nor its own another's, nor that of other kfac.layers. "
        f"{ways}{files.WEIGHTS_ALONE}"
    )


def saved_at(folder: Path) -> str | None:
    """Return which of :data:`STAGES` a checkpoint is of; None if it cannot be told."""
    if any(folder.glob("zero_pp_rank_*_model_states.pt")):
        return STAGES[2]
    if not any(folder.glob("mp_rank_*_model_states.pt")):
        return None
    return STAGES[any(folder.glob("*zero_pp_rank_*_optim_states.pt")) or (folder / "zero").is_dir()]


def weights_from(load_dir: Path, folder: Path) -> str:
    """Return a line of Python that loads a checkpoint's weights into ``model``. DeepSpeed's command
    zero_to_fp32 would do, too, but its result is a folder, and it needs huggingface_hub."""
    if saved_at(folder) == STAGES[0]:
        file = str(folder / "mp_rank_00_model_states.pt")
        return (
            f"import torch; model.load_state_dict(torch.load({file!r}, "
            f'weights_only=False)["module"])'
        )
    return (
        "from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as "
        "weights; "
        f"model.load_state_dict(weights({str(load_dir)!r}, "
        f"tag={folder.name.removesuffix('_universal')!r}))"
    )
