"""What a run continues from: the state that ``save`` wrote, whatever world size, ZeRO stage, pipeline stages or
expert-parallel ranks wrote it. Whatever is wrong with a file is found on all ranks before anything is changed."""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger

from ds_kfac.assignment.work import FactorSpec, factors_by_layer
from ds_kfac.checkpoint.files import (
    FOLDER,
    HEADER,
    LATEST,
    SAVE_ID,
    CheckpointError,
    factor_file,
    kinds_of,
    layer_file,
    read_header,
    read_payload,
)
from ds_kfac.comm.message import failing_together, gathered
from ds_kfac.curvature.eigen import Refreshed
from ds_kfac.curvature.factor import KroneckerFactor, Side
from ds_kfac.curvature.forms import FACTOR_FORMS
from ds_kfac.curvature.history import FactorState, History
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.plan import Known
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner
from ds_kfac.update.state import LayerState


def unfinished(tag_directory: Path, save_id: str) -> str | None:
    """What speaks for a save of this tag that was interrupted, after which DeepSpeed's files may be of two saves: a
    sentence, or None. For one rank."""
    folder = tag_directory / FOLDER
    if not folder.is_dir():
        return None
    latest = folder / LATEST
    if not latest.is_file() or latest.read_text().strip() != save_id:
        return f"save {save_id} of {tag_directory} was interrupted before its end"
    others = [path.name for path in folder.iterdir() if path.is_dir() and path.name != save_id]
    return f"save {', '.join(others)}, later than that of {tag_directory}, was interrupted" if others else None


def older_files(tag_directory: Path, save_id: str) -> list[str]:
    """Names of DeepSpeed's files in a tag that were there before this save of it: K-FAC's header is written first."""
    header = tag_directory / FOLDER / save_id / HEADER
    if not header.is_file():
        return []
    begun = header.stat().st_mtime_ns
    return sorted(path.name for path in tag_directory.glob("*_states.pt") if path.stat().st_mtime_ns < begun)


def load(job: Job, tag_directory: Path, save_id: str | None = None, origin: str | None = None) -> None:
    """Restore state written by :func:`save`, whatever world size, ZeRO stage, pipeline stages or expert-parallel ranks
    wrote it. Collective.

    Layers the checkpoint does not have start empty, and so do factors of another kind (``factor.fisher``,
    ``factor.weight_sharing``), with a warning.

    Args:
        save_id: of the save to load; None takes the tag's last finished one.
        origin: the tag's folder when it was saved, if it may have been converted since.

    Raises:
        CheckpointError: on every rank, if files are missing, damaged or do not fit the model. Nothing is changed then.
    """
    found: list[tuple[dict[str, Any], list[str]]] = []
    folder, header = tag_directory, {"save_id": ""}
    headline = f"ds_kfac: the K-FAC state of {tag_directory} cannot be loaded"
    with failing_together(headline, job.channel.group, CheckpointError):
        folder = _find(tag_directory, save_id, origin)
        header = read_header(folder)
    ids = gathered(header["save_id"], job.channel.group)
    with failing_together(headline, job.channel.group, CheckpointError) as problems:
        if len(set(ids)) > 1:
            raise ValueError(f"the ranks see different saves ({ids} in rank order): they do not see the same folder")
        for kfac in job.preconditioners:
            found.append(_read(kfac, folder, header, problems))
    for kfac, (state, warnings) in zip(job.preconditioners, found, strict=True):
        for text in warnings if kfac.rank == 0 else ():
            logger.warning(f"ds_kfac: WARNING: {folder}: {text}")
        # a save without eigenbases, or of another method, is decomposed again; what was then on its way is too
        kfac.load_state_dict(state, decompose=not _continues(kfac, header))


def _find(tag_directory: Path, save_id: str | None, origin: str | None) -> Path:
    """The folder of a save in the tag, or in the tag it was converted from by ds_to_universal, which does not copy it.

    Raises:
        ValueError: none has it.
    """
    tags = [tag_directory, tag_directory.with_name(tag_directory.name.removesuffix("_universal"))]
    if origin is not None:
        tags.append(Path(origin))
    for tag in tags:
        latest = tag / FOLDER / LATEST
        name = save_id or (latest.read_text(errors="replace").strip() if latest.is_file() else "")
        if SAVE_ID.fullmatch(name) and (tag / FOLDER / name / HEADER).is_file():
            return tag / FOLDER / name
    looked = ", ".join(str(tag / FOLDER) for tag in dict.fromkeys(tags))
    raise ValueError(
        f"no K-FAC state {save_id or ''} in {looked}; it must be there for every rank. If it was converted or moved, "
        f"copy the folder {FOLDER} of the tag that was saved into {tag_directory}"
    )


def _continues(kfac: KFACPreconditioner, header: Mapping[str, Any]) -> bool:
    return header["eigenbases"] and header["method"] == kfac.config.preconditioner.method


def _read(
    kfac: KFACPreconditioner, folder: Path, header: Mapping[str, Any], problems: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """What this rank's part of a domain continues from, for ``KFACPreconditioner.load_state_dict``; and what does not
    continue, in words. What is wrong with a file is added to ``problems``."""
    groups, names, timetable = _groups_here(kfac, header), kfac.names, header["timetable"]
    plan = kfac.plan if groups == kfac.known.groups else kfac.plan.sharing(groups or ())
    specs = plan.assignment.work.factors
    saved_keys, restarted = _keys_of(kfac, header, specs)
    factors: dict[str, tuple[FactorState, Refreshed | None]] = {}
    states: dict[str, LayerState] = {}
    for spec in specs:
        if kfac.plan.assignment.eigen_workers[spec.key] == kfac.rank and spec.key in saved_keys:
            try:
                factors[spec.key] = _load_factor(kfac, folder, header, saved_keys[spec.key], spec)
            except (OSError, ValueError) as error:
                problems.append(str(error))
    for layer in kfac.owned:
        if names[layer.name] in header["layers"]:
            try:
                states[layer.name] = _load_layer(kfac, folder, header, names[layer.name], layer)
            except (OSError, ValueError) as error:
                problems.append(str(error))
    # partners of a factor that begins empty are decomposed with it, as soon as it has data
    of_layer = factors_by_layer(specs) if restarted else {}
    incomplete = {
        partner.key
        for spec in specs
        if spec.key in restarted
        for name in spec.layers
        for partner in of_layer[name].values()
    }

    def here(saved: Mapping[str, Any]) -> dict[str, Any]:
        return {key: saved[name] for key, name in saved_keys.items() if key not in incomplete and name in saved}

    continues, scale = _continues(kfac, header), header["damping_scale"]
    captured, skipped = timetable["domains"].get(kfac.target.domain.name, (0, 0))
    rows = {name: header["rows"][saved] for name, saved in names.items() if saved in header["rows"]}
    state = {
        "steps": header["steps"],
        "peak_lr": {int(group): lr for group, lr in header["peak_lr"].items()},
        # "model" agrees on it anew
        "damping_scale": torch.tensor(scale, device=kfac.device)
        if scale is not None and kfac.config.damping.kind == "adaptive"
        else None,
        "known": Known(groups, rows or None),
        "layers": states,
        "factors": {
            "factors": factors,
            "ready": here(dict.fromkeys(header["ready"])) if continues else (),
            "pending": here(header["pending"]) if continues else {},
            "schedule": {"captured": captured, "skipped": skipped, "factors": here(timetable["factors"])},
        },
    }
    return state, _warnings(kfac, header, restarted)


def _groups_here(kfac: KFACPreconditioner, header: Mapping[str, Any]) -> tuple[tuple[str, ...], ...] | None:
    """Groups of the saved run that this one may have too; those of this run, which go on being checked, if the saved
    one did not know any yet; None if they are still to be found."""
    if header["shared"] is None or not kfac.plan.shares:
        return kfac.known.groups
    here = {saved: name for name, saved in kfac.names.items()}
    groups = tuple(tuple(here[name] for name in group if name in here) for group in header["shared"])
    if groups == kfac.known.groups:
        return groups
    alike = kfac.plan.sharing_candidates
    groups = tuple(tuple(name for name in group if name in alike) for group in groups)
    return tuple(group for group in groups if len(group) > 1 and len({alike[name] for name in group}) == 1)


def _keys_of(
    kfac: KFACPreconditioner, header: Mapping[str, Any], specs: Sequence[FactorSpec]
) -> tuple[dict[str, str], list[str]]:
    """Factor -> what it is called in the save, of those that continue; and those of layers in the save that start
    empty. The same on all ranks of the domain."""
    leader = {name: group[0] for group in header["shared"] or () for name in group}
    stacked, kinds = {layer.shares for layer in kfac.layers}, kinds_of(kfac.config)
    keys, restarted = {}, []
    for spec in specs:
        name, side = kfac.names[spec.layers[0]], spec.key[-1]
        if name not in header["layers"]:
            continue
        saved = f"{leader.get(name, name) if side == 'A' else name}/{side}"
        if side == "A" and spec.key[:-2] in stacked:
            saved = _of_stack(saved, header["factors"])
        if saved in header["factors"] and header["kinds"][side] == kinds[side]:
            keys[spec.key] = saved
        else:
            restarted.append(spec.key)
    return keys, restarted


def _of_stack(key: str, saved: Container[str]) -> str:
    """The saved A of a stack of experts, where this run's are another part of the mixture's: the tokens that enter are
    of one kind, so that of the nearest expert before these is theirs. ``key``: where there is none."""
    stack, _, number = key[:-2].rpartition(".")
    numbers = range(int(number), -1, -1) if number.isdigit() else ()
    return next((other for n in numbers if (other := f"{stack}.{n}/A") in saved), key)


def _warnings(kfac: KFACPreconditioner, header: Mapping[str, Any], restarted: Sequence[str]) -> list[str]:
    """What is not continued."""
    texts, kinds = [], kinds_of(kfac.config)
    if unknown := [name for name in kfac.names.values() if name not in header["layers"]]:
        texts.append(f"has no state for {', '.join(unknown)}; these layers start empty")
    for side in "AG":
        if keys := [key for key in restarted if key[-1] == side]:
            why = f"saved: {header['kinds'][side]}; now: {kinds[side]}"
            if header["kinds"][side] == kinds[side]:
                why = "the saved run kept none"
            texts.append(
                f"{', '.join(keys)} start empty ({why}); until their first batch arrives the saved eigenbases stay in "
                "use"
            )
    if kfac.moments is not None and header["moments"] != kfac.moments.NAME:
        texts.append(f"has no {kfac.moments.NAME} moments; they start at zero: expect some steps to recover")
    if header["method"] != kfac.config.preconditioner.method:
        texts.append(
            f'saved with preconditioner.method "{header["method"]}", now "{kfac.config.preconditioner.method}"; '
            "factors are decomposed again"
        )
    return texts


def _described(side: Side) -> str:
    return f"{side.kind}, {side.dim} wide"


def _load_factor(
    kfac: KFACPreconditioner, folder: Path, header: Mapping[str, Any], key: str, spec: FactorSpec
) -> tuple[FactorState, Refreshed | None]:
    """A factor that the save has, and what a refresh on its way came to.

    Args:
        key: what it is called there.

    Raises:
        ValueError: it is not what was saved, or not a factor of this model and config.
    """
    path, saved = folder / factor_file(key), Side(*header["factors"][key])
    if saved != spec.side:
        raise ValueError(
            f"{path}: {saved.numel} elements ({_described(saved)}), factor {spec.key} of this model and config "
            f"({_described(spec.side)}) needs {spec.side.numel}"
        )
    payload = read_payload(path, key, header["files"].get(path.name))
    diagonal = saved.diagonal_of(payload["packed"])
    if bool((diagonal < 0).any()):
        raise ValueError(f"{path}: the average of factor {key} has a negative diagonal")
    if (payload["pending_how"] is not None) != (key in header["pending"]):
        raise ValueError(f"{path}: disagrees with the header on whether a refresh was in progress")
    curvature, device, form = kfac.curvature, kfac.device, FACTOR_FORMS[header["method"]]
    factor = KroneckerFactor(saved, payload["packed"].to(curvature.home), payload["updates"].to(device))
    history = History(saved) if kfac.plan.adaptive else None
    if history is not None and payload["history"] is not None:
        last, before, norms = (payload["history"][name] for name in ("last", "before", "norms"))
        last, before = (None if value is None else value.to(curvature.home) for value in (last, before))
        history = History(saved, last, before, None if norms is None else norms.to(device))
    state = FactorState(factor, history)
    if payload["pending_how"] is None:
        return state, None
    result = None if payload["pending"] is None else form.load(saved, payload["pending"], device)
    return state, Refreshed(result, payload["pending_how"])


def _load_layer(
    kfac: KFACPreconditioner, folder: Path, header: Mapping[str, Any], name: str, layer: LayerSpec
) -> LayerState:
    """A layer that the save has. A side that is the identity now, or was it then, keeps no eigenvectors.

    Args:
        name: what it is called there.

    Raises:
        ValueError: it is not what was saved, or not a layer of this model and config.
    """
    path, then, device = folder / layer_file(name), header["layers"][name], kfac.device
    saved, form = FACTOR_FORMS[header["method"]], FACTOR_FORMS[kfac.config.preconditioner.method]
    sides, here = {which: Side(*then[which]) for which in "AG"}, {"A": layer.A, "G": layer.G}
    for which, now in here.items():
        was = sides[which]
        if was.dim != now.dim or (was.block != now.block and was.block and now.block) or then["groups"] != layer.groups:
            raise ValueError(
                f"{path}: side {which} of {layer.name} was {_described(was)}, of this model and config it is "
                f"{_described(now)}"
            )
    payload = read_payload(path, name, header["files"].get(path.name))
    kept = {
        which: saved.load(side, payload[which], device) if payload[which] else None for which, side in sides.items()
    }
    moments = None
    if kfac.moments is not None:
        has = header["moments"] == kfac.moments.NAME
        tensors = {part: tensor.to(device) for part, tensor in payload["moments"].items()} if has else {}
        moments = kfac.moments(**tensors) if has else kfac.moments.empty(layer.shape, device)
    continued = {which for which, now in here.items() if saved is form and now.block}
    identities = {which: form.identity(now, device) for which, now in here.items() if not now.block}
    now_kept = {which: kept[which] if which in continued else identities.get(which) for which in "AG"}
    state = LayerState(payload["terms"].to(device), form, now_kept["A"], now_kept["G"], moments)
    left = {which: kept[which] for which in "AG" if which not in continued and sides[which].block}
    # moments leave the eigenbases that are not kept
    return state.without(A=left.get("A"), G=left.get("G")) if left else state
