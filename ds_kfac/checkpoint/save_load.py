"""K-FAC state next to DeepSpeed's checkpoint: ``<tag>/kfac/<save id>/``, each factor and each layer once.

``<layer>.A.factor.pt`` is written by the factor's decomposer, ``<layer>.layer.pt`` (eigenbases, moments) by the layer's
first gradient worker, under names that are the same in all domains of a job. They do not depend on world size, ZeRO
stage or gradient worker fraction, nor on pipeline stages or the ranks of experts: after loading, the rank that has the
part reads the file. They are written before DeepSpeed writes, and DeepSpeed's own files name the save id: a save that
is killed half way, also one that overwrites a tag, leaves every model state with the K-FAC state that belongs to it.

Whatever is wrong with a file is found on all ranks before anything is changed.
"""

import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from ds_kfac.assignment.factor_spec import key_of
from ds_kfac.checkpoint.disk import CheckpointError, check_token, put_token, remove_token, sync_folder, write_text
from ds_kfac.checkpoint.files import (
    Entries,
    factor_payload,
    layer_payload,
    load_factor,
    load_layer,
    save_factor,
    save_layer,
)
from ds_kfac.checkpoint.header import HEADER, read_header, write_header
from ds_kfac.checkpoint.match import Match, groups_here, kinds_of, match, saved_names
from ds_kfac.checkpoint.names import SAVE_ID
from ds_kfac.checkpoint.parts import merged, part_of
from ds_kfac.comm.message import failing_together, gathered
from ds_kfac.curvature.eigen import Refreshed
from ds_kfac.plan.plan import Known
from ds_kfac.step.factor_state import FactorState
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner
from ds_kfac.update.layer_state import LayerState

FOLDER, LATEST = "kfac", "latest"

Factors = dict[str, tuple[FactorState, Refreshed | None]]


def save(job: Job, tag_directory: Path) -> dict[str, Any]:
    """Write this rank's layers, and on rank 0 the header. Returns the header.

    Collective.

    Raises:
        CheckpointError: on every rank if it fails on one; what was written is removed.
    """
    group, headline = job.channel.group, f"ds_kfac: could not save to {tag_directory / FOLDER}"
    mine: tuple[str, list[dict[str, Any]]] = ("", [])
    with failing_together(headline, group, CheckpointError):
        get_accelerator().synchronize()  # offloaded factors may still be on their way to the host
        mine = uuid.uuid4().hex[:12], [part_of(kfac) for kfac in job.preconditioners]
    parts = gathered(mine, group)
    kfac = job.preconditioners[0]
    header = {
        "save_id": parts[0][0],
        "steps": job.steps,
        "method": kfac.plan.method,
        "eigenbases": kfac.config.checkpoint.eigenbasis or kfac.moments is not None,
        "moments": None if kfac.moments is None else kfac.moments.NAME,
        "kinds": kinds_of(kfac.config),
        **merged([part for _, own in parts for part in own]),
    }
    folder = tag_directory / FOLDER / header["save_id"]
    try:
        with failing_together(headline, group, CheckpointError):
            if job.channel.rank == 0:
                put_token(folder)
        with failing_together(headline, group, CheckpointError):
            check_token(folder)
        entries: Entries = {}
        with failing_together(headline, group, CheckpointError):
            for kfac in job.preconditioners:
                entries |= _write(kfac, folder)
        written = gathered(entries, group)
        with failing_together(headline, group, CheckpointError):
            if job.channel.rank == 0:
                header["files"] = _united(written)
                sync_folder(folder)
                write_header(folder, header)
                remove_token(folder)
    except CheckpointError:
        if job.channel.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # the error says what is wrong with the place
        raise
    return header


def _united(written: Sequence[Entries]) -> Entries:
    """The files of all ranks.

    Raises:
        ValueError: two ranks have written one.
    """
    twice = {file for index, own in enumerate(written) for other in written[:index] for file in own.keys() & other}
    if twice:
        raise ValueError(f"several ranks have layers of the same name: {', '.join(sorted(twice)[:5])}")
    return {file: entry for own in written for file, entry in sorted(own.items())}


def _write(kfac: KFACPreconditioner, folder: Path) -> Entries:
    """The files of a domain that are this rank's to write."""
    names, domain, method = saved_names(kfac), kfac.target.domain, kfac.plan.method
    saved = {layer.name for layer in kfac.layers if domain.saves(layer)}
    state, entries = kfac.state_dict(), Entries()
    for key, (factor, pending) in state["factors"]["factors"].items():
        if key[:-2] in saved:
            payload, side = factor_payload(factor, pending, kfac.plan.form), factor.factor.side
            entries |= save_factor(folder, key_of(names[key[:-2]], key[-1]), side, payload, method)
    for layer in kfac.owned:
        if layer.name in saved and kfac.plan.assignment.workers[layer.name][0] == kfac.rank:
            payload = layer_payload(state["layers"][layer.name], eigenbasis=kfac.config.checkpoint.eigenbasis)
            entries |= save_layer(folder, names[layer.name], layer, payload, method)
    return entries


def finish(job: Job, tag_directory: Path, header: Mapping[str, Any]) -> None:
    """After DeepSpeed's save: point to the new state and remove what an overwritten tag had. Collective.

    Raises:
        CheckpointError: on every rank if that fails.
    """
    folder = tag_directory / FOLDER
    with failing_together(f"ds_kfac: could not complete the save in {folder}", job.channel.group, CheckpointError):
        if job.channel.rank == 0:
            write_text(folder / LATEST, header["save_id"])
            for old in folder.iterdir():
                if old.is_dir() and old.name != header["save_id"]:
                    shutil.rmtree(old, ignore_errors=True)  # only disk space is at stake


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
    found: list[tuple[Match, Factors, dict[str, LayerState]]] = []
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
    for kfac, (own, factors, states) in zip(job.preconditioners, found, strict=True):
        if kfac.rank == 0:
            for text in own.warnings(header):
                logger.warning(f"ds_kfac: WARNING: {folder}: {text}")
        _restore(kfac, header, own, factors, states)


def _read(
    kfac: KFACPreconditioner, folder: Path, header: Mapping[str, Any], problems: list[str]
) -> tuple[Match, Factors, dict[str, LayerState]]:
    """This rank's factors and layers of a domain. What is wrong is added to ``problems``."""
    factors: Factors = {}
    states: dict[str, LayerState] = {}
    own = match(kfac, header)
    for spec in own.specs:
        if kfac.plan.assignment.decomposers[spec.key] == kfac.rank and spec.key in own.keys:
            try:
                factors[spec.key] = load_factor(kfac, folder, header, own.keys[spec.key], spec)
            except (OSError, ValueError) as error:
                problems.append(str(error))
    for layer in kfac.owned:
        if own.names[layer.name] in header["layers"]:
            try:
                states[layer.name] = load_layer(kfac, folder, header, own.names[layer.name], layer)
            except (OSError, ValueError) as error:
                problems.append(str(error))
    return own, factors, states


def _restore(
    kfac: KFACPreconditioner, header: Mapping[str, Any], own: Match, factors: Factors, states: Mapping[str, LayerState]
) -> None:
    """Continue from what was read, in this run's names. Collective in the domain."""
    groups, names, timetable = groups_here(kfac, header), own.names, header["timetable"]
    rows = {name: header["rows"][saved] for name, saved in names.items() if saved in header["rows"]}
    # a save without them, or of another method, is decomposed again; what was then on its way is too
    continues = header["eigenbases"] and header["method"] == kfac.plan.method
    specs = kfac.plan.sharing(groups or ()).assignment.factors
    keys = {spec.key: own.keys[spec.key] for spec in specs if spec.key in own.keys and spec.key not in own.incomplete}

    def here(saved: Mapping[str, Any]) -> dict[str, Any]:
        return {key: saved[name] for key, name in keys.items() if name in saved}

    # "model" agrees on it anew
    scale = header["damping_scale"] if kfac.config.damping.kind == "adaptive" else None
    captured, skipped = timetable["domains"].get(kfac.target.domain.name, (0, 0))
    if header["eigenbases"] and not continues and kfac.rank == 0:
        logger.warning(
            f'ds_kfac: saved with preconditioner.method "{header["method"]}", now "{kfac.plan.method}"; factors are '
            "decomposed again"
        )
    state = {
        "steps": header["steps"],
        "peak_lr": {int(group): lr for group, lr in header["peak_lr"].items()},
        "damping_scale": None if scale is None else torch.tensor(scale, device=kfac.device),
        "known": Known(groups, rows or None),
        "layers": states,
        "factors": {
            "factors": factors,
            "ready": here(dict.fromkeys(header["ready"])) if continues else (),
            "pending": here(header["pending"]) if continues else {},
            "schedule": {"captured": captured, "skipped": skipped, "factors": here(timetable["factors"])},
        },
    }
    kfac.load_state_dict(state, decompose=not continues)


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
