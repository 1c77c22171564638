"""A run that goes on as another one: from AdamW to KFACAdamW or back, or at another ZeRO stage. What DeepSpeed can load
of it, and what to do where it cannot."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
from torch import Tensor

from ds_kfac.checkpoint import files, stage_0
from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.comm.message import failing_together
from ds_kfac.directions.table import DIRECTIONS
from ds_kfac.log import logger
from ds_kfac.model.registry import LAYERS
from ds_kfac.step.job import Job
from ds_kfac.update.state import AdamMoments
from ds_kfac.zero.deepspeed_versions import with_global_state
from ds_kfac.zero.layout import parameter_groups

MARKS = tuple(dict.fromkeys(mark for rule in DIRECTIONS for mark in rule.marks))
"""Keys of parameter groups by which the optimizers of update rules know theirs."""
OTHER_GROUPS = "parameter group", "parameter-alignment", "must match the size of tensor"
"""In what DeepSpeed says of an optimizer state whose groups are cut otherwise, by mistake or by the optimizer."""

STAGES = ("stage 0", "stage 1 or 2", "stage 3")
"""Of which DeepSpeed's checkpoints are alike."""
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
"""How AdamW goes on from such moments: at stage 0, from a universal checkpoint or in flat groups."""
UNIVERSAL = (
    "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {folder} --output_folder "
    '{folder}_universal, and load that with "checkpoint": {{"load_universal": true}} in the DeepSpeed config '
    "(docs/checkpoints.md#from-another-optimizer)"
)

FIRST, SECOND, STEP = "exp_avg", "exp_avg_sq", "step"
OfParameter = Callable[[str], Mapping[str, Any] | None]
"""Parameter's name -> what AdamW keeps of it; None: nothing, so it begins at zero."""


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
    if "current world size is" in str(error):
        return f"ds_kfac: {folder} is of another number of ranks. Convert it: {UNIVERSAL.format(folder=folder)}"
    there, saved = saved_at(folder), list(folder.glob("mp_rank_*_model_states.pt"))
    is_3, partitions = int(engine.zero_optimization_stage()) == 3, hasattr(engine.optimizer, "dp_process_group")
    if there not in (None, STAGES[2 if is_3 else int(partitions)]):
        return (
            f"ds_kfac: {folder} was saved at ZeRO {there}, this engine has stage "
            f"{int(engine.zero_optimization_stage())}, and DeepSpeed does not load the one into the other, nor by a "
            "universal checkpoint; K-FAC's own state fits any stage: engine.kfac.load_state. Go on at the stage that "
            "it was saved at, or from the weights alone, before the engine is built and not under deepspeed.zero.Init: "
            + weights_from(load_dir, folder)
        )
    known = not isinstance(error, AssertionError) and any(text in str(error) for text in OTHER_GROUPS)
    then, now = kfac_stepped(folder), of_kfac(engine.basic_optimizer.param_groups)
    here, stages = getattr(engine, "num_stages", 0), len(saved)
    other_stages = bool(here and stages and stages != here)
    if then in (None, now) and not (known and (then or now or other_stages)):
        return None
    headline = (
        f"ds_kfac: the optimizer state in {load_dir} has other parameter groups than this engine's "
        f"{type(engine.basic_optimizer).__name__}; "
    )
    if other_stages:
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


def saved_at(folder: Path) -> str | None:
    """Which of :data:`STAGES` a checkpoint is of; None: of no stage that can be told."""
    if any(folder.glob("zero_pp_rank_*_model_states.pt")):
        return STAGES[2]
    if not any(folder.glob("mp_rank_*_model_states.pt")):
        return None
    return STAGES[any(folder.glob("*zero_pp_rank_*_optim_states.pt")) or (folder / "zero").is_dir()]


def weights_from(load_dir: Path, folder: Path) -> str:
    """Python that loads a checkpoint's weights into ``model``. DeepSpeed's command zero_to_fp32 would do, too, but its
    result is a folder, and it needs huggingface_hub."""
    if saved_at(folder) == STAGES[0]:
        file = str(folder / "mp_rank_00_model_states.pt")
        return f'import torch; model.load_state_dict(torch.load({file!r}, weights_only=False)["module"])'
    return (
        "from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as weights; "
        f"model.load_state_dict(weights({str(load_dir)!r}, tag={folder.name.removesuffix('_universal')!r}))"
    )


def of_any_optimizer(
    engine: Any, original: Any, load_dir: str, *args: Any, **kwargs: Any
) -> tuple[Any, Any, OfParameter | None]:
    """DeepSpeed's load of a checkpoint, ``original``, whichever of AdamW and KFACAdamW wrote it and steps this engine.
    Returns its result, and if it was the other one AdamW's moments, if it was AdamW.

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
        if path is not None and not whole and not engine.zero_optimization():
            # else its fp32 weights stay those of the start, and are the weights again after a step
            getattr(engine.optimizer, "refresh_fp32_params", lambda: None)()
    except Exception as error:  # on every rank
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
        if moved is not None and engine.global_rank == 0:
            one_count = engine.load_universal_checkpoint() or stage_0.form(engine.optimizer) == stage_0.FLAT
            logger.warning(f"ds_kfac: {AFRESH.format(COUNTS[one_count])}")
        if client_state:  # K-FAC's part says nothing of this run's saves
            client_state.pop(files.CLIENT_KEY, None)
        return path, client_state

    engine.load_checkpoint = load_checkpoint


def model_states(folder: Path) -> Mapping[str, Any] | None:
    """What rank 0 has saved beside optimizer states; None: there is no such file."""
    paths = sorted(folder.glob("*mp_rank_00_model_states.pt"))
    return torch.load(paths[0], map_location="cpu", mmap=True, weights_only=False) if paths else None


def kfac_stepped(folder: Path) -> bool | None:
    """Whether KFACAdamW has saved a checkpoint; None: it is not known."""
    saved = model_states(folder)
    return None if saved is None else bool((saved.get(files.CLIENT_KEY) or {}).get("groups"))


@contextmanager
def moving(
    engine: Any, load_dir: Path, tag: str | None, *, scheduled: bool, whole: bool
) -> Iterator[OfParameter | None]:
    """Around DeepSpeed's load: AdamW's moments, after it, if it is of a run with other parameter groups, such as
    AdamW's of KFACAdamW's or the other way; else None. This engine's settings of its groups stay then.

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
        yield None
        return
    assert saved is not None
    folder, of_adamw = tag_of(load_dir, tag, "latest_universal" if universal else "latest"), dict[str, Any]()
    if not of_kfac(saved) and not universal and isinstance(was := (model_states(folder) or {}).get("module"), Mapping):
        check_order([name for name, _ in engine.module.named_parameters()], list(was), folder)
    made = [group["lr"] / group["initial_lr"] for group in saved if group.get("initial_lr")]  # by one of torch's
    alike = bool(made) and max(made) - min(made) <= 1e-6 * max(made)  # but for the rounding of quotients
    for group in settings if scheduled and alike else ():
        group["lr"] = group.get("initial_lr", group["lr"]) * made[0]
    new = {"param_groups": settings}
    here = partial(stage_0.with_state, engine, entry if kinds[0] else None, of_adamw)
    load = with_global_state if universal else here
    try:
        with load(engine.optimizer, new):
            yield of_universal(folder) if universal and not of_kfac(saved) else of_adamw.get
    finally:
        for group, own in zip(engine.basic_optimizer.param_groups, settings, strict=True):
            group.update(own)
        place = getattr(engine.lr_scheduler, "last_batch_iteration", -1) if scheduled else -1
        if isinstance(place, int) and place >= 0:  # DeepSpeed's, which has its place now: the rates of it
            engine.lr_scheduler.step(place)


def order_of(engine: Any) -> list[str]:
    """Names of the parameters as the optimizer has them, group by group. Empty with several pipeline stages, which have
    one client_state."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    groups = parameter_groups(engine.optimizer) if getattr(engine, "num_stages", 1) == 1 else ()
    return [names[id(p)] for group in groups for p in group if id(p) in names]  # layers may have been replaced


def groups_of(engine: Any, job: Job) -> dict[str, int]:
    """Parameter name -> number of its optimizer group, if K-FAC's layers decide the groups. Empty with several pipeline
    stages."""
    if job.preconditioners[0].rule.optimizer_type is None or getattr(engine, "num_stages", 1) > 1:
        return {}
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    layouts = [x for kfac in job.preconditioners for x in (kfac.engine_view.layout, kfac.engine_view.other_params)]
    groups = enumerate(engine.basic_optimizer.param_groups)  # at stage 0 in fp32 the model's, frozen ones among them
    found = {names[id(p)]: index for index, group in groups for p in group["params"] if id(p) in names}
    return found | {names[id(p)]: layout.group_index(p) for layout in layouts for p in layout.params}


def check_order(own: Sequence[str], saved: Sequence[str], folder: Path) -> None:
    """DeepSpeed takes an optimizer's state by place. Raises CheckpointError if one of the names that both have has
    another place among them."""
    both = set(own) & set(saved)
    pairs = zip((name for name in own if name in both), (name for name in saved if name in both), strict=True)
    if other := next((pair for pair in pairs if pair[0] != pair[1]), None):
        raise CheckpointError(
            f"ds_kfac: the optimizer state in {folder} has {other[1]} where this model has {other[0]}: its modules, or "
            "what the optimizer was given, were in another order when it was saved. DeepSpeed takes it by place, "
            "which mixes up weights and moments. Build an engine with the order as it was, or load a universal "
            f"checkpoint, which goes by name. {files.WEIGHTS_ALONE}"
        )


def saved_groups(
    engine: Any, load_dir: Path, tag: str | None
) -> tuple[Sequence[Mapping[str, Any]] | None, Mapping[str, Any]]:
    """The optimizer's groups in a checkpoint that can move: a universal one, or one of stage 0 in as many bits as this
    engine has; else None. And what K-FAC has written to its client_state."""
    if engine.load_universal_checkpoint():
        path = tag_of(load_dir, tag, "latest_universal") / "zero" / "optimizer_state.pt"
        return (torch.load(path, weights_only=False)["param_groups"], {}) if path.is_file() else (None, {})
    wrapped = stage_0.form(engine.optimizer) is not None
    if engine.zero_optimization() or wrapped == (engine.optimizer is engine.basic_optimizer):
        return None, {}
    saved = model_states(tag_of(load_dir, tag)) or {}
    state = saved.get("optimizer")
    if not isinstance(state, Mapping) or (stage_0.form(state) is not None) != wrapped:
        return None, {}
    inner = stage_0.inner(state)
    adams = all("betas" in group for group in (*inner["param_groups"], *engine.basic_optimizer.param_groups))
    adams = adams and all("exp_avg_sq" in values for values in inner["state"].values())
    entry = saved.get(files.CLIENT_KEY) or {}
    placed = "order" in entry or not wrapped or not of_kfac(inner["param_groups"])  # an older save does not say where
    return (inner["param_groups"] if adams and placed else None), entry


def of_kfac(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether K-FAC steps some of them."""
    return any(any(_kind(group)) for group in groups)


def _kind(group: Mapping[str, Any]) -> list[bool]:
    return [bool(group.get(mark)) for mark in MARKS]


def of_universal(tag_directory: Path) -> OfParameter:
    """Of a universal checkpoint; a parameter's files are read when it is asked for."""
    folder = tag_directory / "zero"
    # stage 3 has the step here, and in no file of the parameter's
    saved = _read(folder / "optimizer_state.pt").get(OPTIMIZER_STATE_DICT) or {}
    step = next((state.get(STEP) for state in saved.get("state", {}).values()), None)

    def of(name: str) -> Mapping[str, Any] | None:
        files = {key: folder / name / f"{key}.pt" for key in (FIRST, SECOND, STEP)}
        read = {STEP: step} | {key: _read(path) for key, path in files.items() if path.is_file()}
        if len(read) < len(files) or read[STEP] is None:
            return None
        return {key: value["param"] if isinstance(value, Mapping) else value for key, value in read.items()}

    return of


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)


def take_adamws(job: Job, saved: OfParameter) -> None:
    """Let K-FAC layers begin with AdamW's moments, after a reset; the first eigenbasis turns them. Collective. The
    other way they begin at zero: after 25 steps those turned back were no better in any run (docs/migrate/adamw.md).

    Raises:
        CheckpointError: on every rank; a file cannot be read, or is of another parameter.
    """
    kfac = job.preconditioners[0]  # experts of other domains begin at zero
    with failing_together("ds_kfac: moments of AdamW cannot be read", job.channel.group, CheckpointError):
        for layer in kfac.owned if kfac.moments is AdamMoments else ():
            values: list[Any] = [saved(name) for name in layer.parameters]
            index, count = layer.part
            if layer.cut != (1, 1) or None in values:
                continue

            def matrix(key: str) -> Tensor:
                flats = [x[key].float().flatten().chunk(count)[index] for x in values]  # noqa: B023
                weight, bias = (*flats, None)[:2]
                kind, shape = LAYERS[layer.kind], layer.shape  # noqa: B023
                return kind.matrix(weight, bias, shape).to(kfac.device, copy=True).contiguous()

            steps = torch.full(layer.shape[:-2], float(values[0][STEP]), dtype=torch.float32, device=kfac.device)
            moments = AdamMoments(matrix(FIRST), matrix(SECOND), steps)
            group, place = kfac.places[layer.name]
            group.load(place, replace(group.state(place), moments=moments))
