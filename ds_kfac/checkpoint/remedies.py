"""Say what to do if DeepSpeed cannot load a checkpoint. DeepSpeed's own errors do not name a
remedy."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ds_kfac.checkpoint import files
from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.checkpoint.order import of_kfac

OTHER_GROUPS = "parameter group", "parameter-alignment", "must match the size of tensor"
"""Texts that occur in DeepSpeed's errors if an optimizer state has other parameter groups than the
engine."""
STAGES = ("stage 0", "stage 1 or 2", "stage 3")
"""Kinds of checkpoints, by the ZeRO stages that write them."""
CONVERT = (
    "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {folder} "
    '--output_folder {folder}_universal, and load that with "checkpoint": {{"load_universal": '
    "true}} in the DeepSpeed config (docs/howto/resume_and_move.md)"
)
"""Template of a remedy, in which ``folder`` is the tag's folder."""


def tag_of(load_dir: Path, tag: str | None, *, universal: bool = False) -> Path:
    """Return the folder that DeepSpeed loads."""
    latest = load_dir / ("latest_universal" if universal else "latest")
    if tag is None and latest.is_file():
        return load_dir / latest.read_text().strip()
    return load_dir / str(tag)


def model_states(folder: Path) -> Mapping[str, Any] | None:
    """Return rank 0's model states, which have everything but the optimizer states of ZeRO; None
    if there is no such file."""
    paths = sorted(folder.glob("*mp_rank_00_model_states.pt"))
    if not paths:
        return None
    return torch.load(paths[0], map_location="cpu", mmap=True, weights_only=False)


@contextmanager
def explained(engine: Any, load_dir: Path, tag: str | None) -> Iterator[None]:
    """Context in which DeepSpeed loads a checkpoint. It replaces an error of DeepSpeed by a
    CheckpointError with a remedy, if ds_kfac knows one."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # DeepSpeed raises it on every rank
        explanation = _explanation(engine, load_dir, tag, error)
        if explanation is None:
            raise
        raise CheckpointError(f"ds_kfac: {explanation}") from error


def _explanation(engine: Any, load_dir: Path, tag: str | None, error: Exception) -> str | None:
    """Return what is wrong and what to do; None if ds_kfac does not know the cause of the error."""
    universal = engine.load_universal_checkpoint()
    folder = tag_of(load_dir, tag, universal=universal)
    if universal and not (folder / "zero").is_dir() and (load_dir / "latest").is_file():
        convert = CONVERT.format(folder=tag_of(load_dir, None))
        return (
            f'the DeepSpeed config has "checkpoint": {{"load_universal": true}}, but {load_dir} '
            "has no universal checkpoint. Set this key only to move a run to another number of "
            "ranks or another optimizer. To load this run's own checkpoints, remove the key. To "
            f"move the run: {convert}"
        )
    if "current world size is" in str(error):
        convert = CONVERT.format(folder=folder)
        return f"{folder} was saved with another number of ranks. Convert it: {convert}"
    saved_stage = saved_at(folder)
    if saved_stage not in (None, _stage_of(engine)):
        return (
            f"{folder} was saved at ZeRO {saved_stage}, but this engine has stage "
            f"{int(engine.zero_optimization_stage())}. DeepSpeed cannot move a checkpoint between "
            "these stages, not even as a universal one. (K-FAC's own state fits any stage, see "
            "engine.kfac.load_state.) Continue at the stage at which the checkpoint was saved, or "
            "load the weights alone before the engine is built and outside of deepspeed.zero.Init: "
            f"{weights_from(load_dir, folder)}"
        )
    return _other_groups(engine, load_dir, folder, error)


def _stage_of(engine: Any) -> str:
    """Return which of :data:`STAGES` an engine has."""
    if int(engine.zero_optimization_stage()) == 3:
        return STAGES[2]
    is_partitioned = hasattr(engine.optimizer, "dp_process_group")
    return STAGES[1] if is_partitioned else STAGES[0]


def _other_groups(engine: Any, load_dir: Path, folder: Path, error: Exception) -> str | None:
    """Return what to do if a checkpoint has other parameter groups than an engine; None if the
    groups are not the cause of the error."""
    names_groups = not isinstance(error, AssertionError) and any(
        text in str(error) for text in OTHER_GROUPS
    )
    states = model_states(folder)
    kfac_now = of_kfac(engine.basic_optimizer.param_groups)
    kfac_then = None
    if states is not None:
        kfac_then = bool((states.get(files.CLIENT_KEY) or {}).get("groups"))
    stages = getattr(engine, "num_stages", 0)
    saved_stages = len(list(folder.glob("mp_rank_*_model_states.pt")))
    other_stages = bool(stages and saved_stages and saved_stages != stages)
    other_optimizer = kfac_then is not None and kfac_then != kfac_now
    is_explicable = kfac_then or kfac_now or other_stages
    if not other_optimizer and not (names_groups and is_explicable):
        return None
    headline = (
        f"the optimizer state in {load_dir} has other parameter groups than this engine's "
        "optimizer; "
    )
    if other_stages:
        return (
            f"{headline}it was saved with {saved_stages} pipeline stages, this engine has "
            f"{stages}, and DeepSpeed saves the optimizer's state by pipeline stage. Load the "
            f"checkpoint with {saved_stages} pipeline stages. (K-FAC's own state fits any number, "
            f"see engine.kfac.load_state.) {files.WEIGHTS_ALONE}"
        )
    convert = ""
    if any(folder.glob("*zero_pp_rank_*_optim_states.pt")):  # ds_to_universal needs ZeRO's files
        convert = (
            "To move a run to another optimizer, convert the checkpoint: "
            f"{CONVERT.format(folder=folder)}. "
        )
    return (
        f"{headline}KFACAdamW splits each group into K-FAC layers, other matrices and other "
        "parameters. So KFACAdamW and other optimizers cannot load each other's state, and "
        "KFACAdamW cannot load a state that was saved with other kfac.layers. "
        f"{convert}{files.WEIGHTS_ALONE}"
    )


def saved_at(folder: Path) -> str | None:
    """Return which of :data:`STAGES` wrote a checkpoint; None if its files do not show it."""
    if any(folder.glob("zero_pp_rank_*_model_states.pt")):
        return STAGES[2]
    if not any(folder.glob("mp_rank_*_model_states.pt")):
        return None
    has_zero_files = any(folder.glob("*zero_pp_rank_*_optim_states.pt"))
    is_universal = (folder / "zero").is_dir()
    return STAGES[1] if has_zero_files or is_universal else STAGES[0]


def weights_from(load_dir: Path, folder: Path) -> str:
    """Return a line of Python that loads a checkpoint's weights into ``model``. DeepSpeed's command
    zero_to_fp32 could do it too, but it writes a folder and needs huggingface_hub."""
    if saved_at(folder) == STAGES[0]:
        file = str(folder / "mp_rank_00_model_states.pt")
        return (
            f"import torch; model.load_state_dict(torch.load({file!r}, "
            'weights_only=False)["module"])'
        )
    tag = folder.name.removesuffix("_universal")
    return (
        "from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as "
        f"weights; model.load_state_dict(weights({str(load_dir)!r}, tag={tag!r}))"
    )
