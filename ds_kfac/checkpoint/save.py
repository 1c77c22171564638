"""K-FAC state next to DeepSpeed's checkpoint: ``<tag>/kfac/<save id>/``, each factor and each layer
once.

``<layer>.A.factor.pt`` is written by the factor's eigen worker, ``<layer>.layer.pt`` (eigenbases,
moments) by the layer's first gradient worker, under names that are the same in all domains of a
job. They do not depend on world size, ZeRO stage or gradient worker fraction, nor on pipeline
stages or the ranks of experts: after loading, the rank that has the part reads the file. They are
written before DeepSpeed writes, and DeepSpeed's own files name the save id: a save that is killed
half way, also one that overwrites a tag, leaves every model state with the K-FAC state that belongs
to it.
"""

import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from ds_kfac.checkpoint import files
from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.checkpoint.order import order_of
from ds_kfac.comm.message import failing_together, gathered
from ds_kfac.curvature.factor import KroneckerFactor
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner
from ds_kfac.update.state import LayerState
from ds_kfac.zero.deepspeed_versions import writes_in_background

Entries = dict[str, dict[str, Any]]
"""File name -> what the header says of it."""


def save(job: Job, tag_directory: Path) -> dict[str, Any]:
    """Write this rank's layers, and on rank 0 the header, which is returned. Collective; raises
    CheckpointError on every rank if it fails on one, and what was written is removed."""
    group, headline = (
        job.channel.group,
        f"ds_kfac: could not save to {tag_directory / files.FOLDER}",
    )
    mine: tuple[str, list[dict[str, Any]]] = ("", [])
    for kfac in job.preconditioners:
        kfac.settle()
    with failing_together(headline, group, CheckpointError):
        get_accelerator().synchronize()  # offloaded factors may still be on their way to the host
        mine = uuid.uuid4().hex[:12], [_part_of(kfac) for kfac in job.preconditioners]
    parts = gathered(mine, group)
    kfac = job.preconditioners[0]
    header = {
        "format": files.FORMAT,
        "save_id": parts[0][0],
        "steps": kfac.steps,
        "method": kfac.config.preconditioner.method,
        "moments": None if kfac.moments is None else kfac.moments.NAME,
        "kinds": files.kinds_of(kfac.config),
        **_merged([part for _, own in parts for part in own]),
    }
    folder = tag_directory / files.FOLDER / header["save_id"]
    try:
        with failing_together(headline, group, CheckpointError):
            if job.channel.rank == 0:
                files.put_token(folder)
        with failing_together(headline, group, CheckpointError):
            files.check_token(folder)
        entries: Entries = {}
        with failing_together(headline, group, CheckpointError):
            for kfac in job.preconditioners:
                entries |= _write(kfac, folder)
        written = gathered(entries, group)
        with failing_together(headline, group, CheckpointError):
            if job.channel.rank == 0:
                header["files"] = _united(written)
                files.write_header(folder, header)
    except CheckpointError:
        if job.channel.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # the error says what is wrong with the place
        raise
    return header


def _part_of(kfac: KFACPreconditioner) -> dict[str, Any]:
    """What one rank knows of one of its domains, in global names."""
    curvature, names, seen = kfac.curvature, kfac.names, kfac.observations
    keys, timetable = (
        {key: names[key[:-2]] + key[-2:] for key in curvature.specs},
        curvature.timetable.state(),
    )
    peaks = kfac.direction.state().get("peak_lr", {})
    return {
        "domain": kfac.engine_view.domain.name,
        "layers": {
            names[layer.name]: {
                "A": [layer.A.dim, layer.A.block],
                "G": [layer.G.dim, layer.G.block],
                "groups": layer.groups,
            }
            for layer in kfac.layers
        },
        "factors": {
            keys[key]: [spec.side.dim, spec.side.block] for key, spec in curvature.specs.items()
        },
        "peak_lr": {str(group): float(lr) for group, lr in peaks.items()},
        "shared": None
        if seen.groups is None
        else [[names[name] for name in group] for group in seen.groups],
        "rows": {names[layer]: rows for layer, rows in (seen.rows or {}).items()},
        "ranks": kfac.channel.world,
        "counts": [timetable["captured"], timetable["skipped"]],
        "clocks": {keys[key]: clock for key, clock in timetable["factors"].items()},
        "ready": [keys[key] for key in curvature.ready],
    }


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The header's part that all ranks and domains together know."""
    shared = [part["shared"] for part in parts if part["shared"] is not None]
    groups = dict.fromkeys(tuple(group) for own in shared for group in own)
    peaks = [pair for part in parts for pair in part["peak_lr"].items()]
    return {
        "layers": {name: layer for part in parts for name, layer in part["layers"].items()},
        "factors": {key: side for part in parts for key, side in part["factors"].items()},
        "peak_lr": {group: max(lr for other, lr in peaks if other == group) for group, _ in peaks},
        "shared": list(map(list, groups)) if shared else None,
        "rows": {layer: rows for part in parts for layer, rows in part["rows"].items()},
        "ranks": {part["domain"]: part["ranks"] for part in parts},
        "timetable": {
            "domains": {part["domain"]: part["counts"] for part in parts},
            "factors": {key: clock for part in parts for key, clock in part["clocks"].items()},
        },
        "ready": sorted({key for part in parts for key in part["ready"]}),
    }


def _write(kfac: KFACPreconditioner, folder: Path) -> Entries:
    """The files of a domain that are this rank's to write."""
    names, state, entries = kfac.names, kfac.state_dict(), Entries()
    for key, factor in state["factors"]["factors"].items():
        if key[:-2] in kfac.saved:
            holds, payload = names[key[:-2]] + key[-2:], _factor_payload(factor)
            path = folder / files.factor_file(holds)
            entries[path.name] = files.write_payload(path, holds, payload)
    for layer in kfac.owned:
        if layer.name in kfac.saved and kfac.plan.assignment.workers[layer.name][0] == kfac.rank:
            payload = layer_payload(state["layers"][layer.name])
            path = folder / files.layer_file(names[layer.name])
            entries[path.name] = files.write_payload(path, names[layer.name], payload)
    return entries


def _factor_payload(factor: KroneckerFactor) -> dict[str, Any]:
    """A factor's file: plain tensors."""
    history = factor.history
    return {
        "packed": factor.packed_P,
        "updates": factor.updates,
        "history": None if history is None else {"last": history.last, "before": history.before},
    }


def layer_payload(state: LayerState) -> dict[str, Any]:
    """A layer's file: plain tensors."""
    A, G = (
        None
        if basis is None
        else {part.kind: part.flat(basis).clone() for part in state.method.parts}
        for basis in (state.A, state.G)
    )
    return {
        "terms": state.terms.clone(),  # a view of those of several layers
        "A": A,
        "G": G,
        # copies: a layer's may be views of several layers', all of which would be saved
        "moments": state.moments
        and {name: tensor.clone() for name, tensor in vars(state.moments).items()},
    }


def _united(written: Sequence[Entries]) -> Entries:
    """The files of all ranks. Raises ValueError if two have written one."""
    twice = {
        file
        for index, own in enumerate(written)
        for other in written[:index]
        for file in own.keys() & other
    }
    if twice:
        raise ValueError(
            f"several ranks have layers of the same name: {', '.join(sorted(twice)[:5])}"
        )
    return {file: entry for own in written for file, entry in sorted(own.items())}


def finish(job: Job, tag_directory: Path, header: Mapping[str, Any], later: bool = False) -> None:
    """After DeepSpeed's save: point to the new state and remove what an overwritten tag had.
    Collective; raises CheckpointError on every rank if that fails."""
    folder = tag_directory / files.FOLDER
    with failing_together(
        f"ds_kfac: could not complete the save in {folder}", job.channel.group, CheckpointError
    ):
        if job.channel.rank == 0:
            files.write_states(folder / header["save_id"], names=not later)
            files.write_text(folder / files.LATEST, header["save_id"])
            for old in folder.iterdir():
                if old.is_dir() and old.name != header["save_id"]:
                    shutil.rmtree(old, ignore_errors=True)  # only disk space is at stake


# the engine's own save


def save_checkpoint(
    engine: Any,
    job: Job,
    groups: Mapping[str, int],
    grams: Callable[[Path], Any] | None,
    original: Callable[..., Any],
    save_dir: str,
    tag: Any = None,
    client_state: Any = None,
    save_latest: bool = True,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around an engine's ``save_checkpoint``: ours first, so that what DeepSpeed writes names a
    complete save; its own in any case.

    ``latest`` is put there at once: DeepSpeed opens it, then writes it, and a run that is killed
    between the two leaves an empty file, of which every later load fails.

    Args:
        grams: writes A of every layer to a folder, if the config asks for it.

    Raises:
        CheckpointError: on every rank, after DeepSpeed's save, if ours failed.
    """
    if not save_dir:  # DeepSpeed says what is wrong
        return original(save_dir, tag, client_state or {}, save_latest, *args, **kwargs)
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    folder, header, problem = Path(save_dir) / tag, {}, None
    steps, origin = job.preconditioners[0].steps, str(folder.absolute())
    entry: dict[str, Any] = {"save_id": None, "steps": steps, "origin": origin, "groups": groups}
    entry["order"] = order_of(engine)
    try:
        header = save(job, folder)
        entry["save_id"] = header["save_id"]
    except CheckpointError as error:
        problem = entry["problem"] = str(error)
    later = writes_in_background(engine)  # written in the background; then DeepSpeed writes latest
    client_state = {**(client_state or {}), files.CLIENT_KEY: entry}
    result = original(save_dir, tag, client_state, save_latest and later, *args, **kwargs)
    headline = f"ds_kfac: could not write {Path(save_dir) / 'latest'}"
    with failing_together(headline, job.channel.group, CheckpointError):
        if save_latest and not later and engine.global_rank == 0:
            files.write_text(Path(save_dir) / "latest", tag)
    if problem is not None:
        raise CheckpointError(
            f"{problem}\nDeepSpeed's own checkpoint {folder} is complete; it loads with "
            f"{files.FRESH}, K-FAC then "
            "starts afresh"
        )
    finish(job, folder, header, later)
    if grams is not None and steps:
        grams(folder / files.GRAMS)
    return result
