"""Save K-FAC's state next to DeepSpeed's checkpoint, in ``<tag>/kfac/<save id>/``. Each factor and
each layer is written once.

A factor's owner writes ``<layer>.A.factor.pt``, and a layer's first gradient worker writes
``<layer>.layer.pt`` (eigenbases, moments). Layers are named as in the whole model, so the files do
not depend on world size, ZeRO stage, gradient worker fraction, pipeline stages or the ranks of
experts. At load, each rank reads the files of its own layers and factors.

DeepSpeed's files contain the save id, and K-FAC's files are written before them. So whenever
DeepSpeed's files are on disk, the K-FAC state that they name is on disk, too, even if a save that
overwrites a tag is killed half-way.
"""

import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_kfac.checkpoint import files
from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.checkpoint.order import order_of
from ds_kfac.checkpoint.records import (
    FORMAT,
    Captures,
    FactorFile,
    FileEntry,
    Header,
    HistoryRecord,
    LayerFile,
    LayerRecord,
    ProofsRecord,
    SavedClock,
    SavedProofClock,
    SavedSide,
    TimetableRecord,
)
from ds_kfac.comm.message import failing_together, gathered
from ds_kfac.curvature.factor import KroneckerFactor, Side
from ds_kfac.curvature.methods import Method
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner
from ds_kfac.update.state import LayerState
from ds_kfac.zero.deepspeed_versions import writes_in_background

Entries = dict[str, FileEntry]
"""File name -> the file's entry in the header."""


@dataclass(frozen=True)
class DomainRecord:
    """What one rank tells the others about one of its domains. Layers are named as in the whole
    model. The attributes are the parts of :class:`Header` for this domain."""

    domain: str
    layers: dict[str, LayerRecord]
    factors: dict[str, SavedSide]
    peak_lr: dict[str, float]
    shared: list[list[str]] | None
    rows: dict[str, float]
    ranks: int
    captures: Captures
    clocks: dict[str, SavedClock]
    proofs: SavedProofClock
    unfit: dict[str, str]
    again: list[str]
    ready: list[str]


def save(job: Job, tag_directory: Path) -> Header:
    """Write this rank's layers and factors, and on rank 0 the header. Collective.

    Returns the header.

    Raises:
        CheckpointError: on every rank, if writing failed on any rank. Files that this call has
            written are removed.
    """
    group = job.channel.group
    headline = f"ds_kfac: could not save to {tag_directory / files.FOLDER}"
    save_id = ""
    records: list[DomainRecord] = []
    for kfac in job.preconditioners:
        kfac.settle()
    with failing_together(headline, group, CheckpointError):
        get_accelerator().synchronize()  # offloaded factors may still be on their way to the host
        save_id = uuid.uuid4().hex[:12]
        records = [_record_of(kfac) for kfac in job.preconditioners]
    of_ranks = gathered((save_id, records), group)
    save_id = of_ranks[0][0]
    all_records = [record for _, rank_records in of_ranks for record in rank_records]
    folder = tag_directory / files.FOLDER / save_id
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
        entries_of_ranks = gathered(entries, group)
        with failing_together(headline, group, CheckpointError):
            header = _header(job, save_id, all_records, _united(entries_of_ranks))
            if job.channel.rank == 0:
                files.write_header(folder, header)
    except CheckpointError:
        if job.channel.rank == 0:
            # the error that is being raised already says what is wrong with the folder
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return header


def _saved_side(side: Side) -> SavedSide:
    return SavedSide(side.dim, side.block)


def _record_of(kfac: KFACPreconditioner) -> DomainRecord:
    """Return what this rank knows of one of its domains."""
    curvature = kfac.curvature
    observations = kfac.observations
    names = kfac.names
    keys = {key: names[key[:-2]] + key[-2:] for key in curvature.specs}
    timetable = curvature.timetable.state()
    proving = kfac.proving.state()
    peak_lr = kfac.direction.state().get("peak_lr", {})
    layers = {
        names[layer.name]: LayerRecord(
            A=_saved_side(layer.A), G=_saved_side(layer.G), groups=layer.groups
        )
        for layer in kfac.layers
    }
    shared = None
    if observations.groups is not None:
        shared = [[names[name] for name in group] for group in observations.groups]
    return DomainRecord(
        domain=kfac.engine_view.domain.name,
        layers=layers,
        factors={keys[key]: _saved_side(spec.side) for key, spec in curvature.specs.items()},
        peak_lr={str(group): float(lr) for group, lr in peak_lr.items()},
        shared=shared,
        rows={names[layer]: rows for layer, rows in (observations.rows or {}).items()},
        ranks=kfac.channel.world,
        captures=Captures(timetable["captured"], timetable["skipped"]),
        clocks={keys[key]: SavedClock(*clock) for key, clock in timetable["factors"].items()},
        proofs=SavedProofClock(**asdict(proving["clock"])),
        unfit={names[layer]: reason for layer, reason in proving["unfit"].items()},
        again=[keys[key] for key in proving["again"] & keys.keys()],
        ready=[keys[key] for key in curvature.ready],
    )


def _header(
    job: Job, save_id: str, records: Sequence[DomainRecord], entries: Mapping[str, FileEntry]
) -> Header:
    """Return the header of a save, made from the records of all ranks and domains."""
    kfac = job.preconditioners[0]
    layers: dict[str, LayerRecord] = {}
    factors: dict[str, SavedSide] = {}
    peak_lr: dict[str, float] = {}
    groups: dict[tuple[str, ...], None] = {}  # each group once, in the order of the records
    rows: dict[str, float] = {}
    clocks: dict[str, SavedClock] = {}
    unfit: dict[str, str] = {}
    for record in records:
        layers |= record.layers
        factors |= record.factors
        rows |= record.rows
        clocks |= record.clocks
        unfit |= record.unfit
        groups |= dict.fromkeys(tuple(group) for group in record.shared or ())
        for group, lr in record.peak_lr.items():
            peak_lr[group] = max(lr, peak_lr.get(group, lr))
    groups_are_known = any(record.shared is not None for record in records)
    return Header(
        format=FORMAT,
        save_id=save_id,
        steps=kfac.steps,
        method=kfac.config.preconditioner.method,
        moments=None if kfac.moments is None else kfac.moments.NAME,
        kinds=files.kinds_of(kfac.config),
        layers=layers,
        factors=factors,
        peak_lr=peak_lr,
        shared=[list(group) for group in groups] if groups_are_known else None,
        rows=rows,
        ranks={record.domain: record.ranks for record in records},
        timetable=TimetableRecord(
            domains={record.domain: record.captures for record in records}, factors=clocks
        ),
        proofs=ProofsRecord(
            domains={record.domain: record.proofs for record in records},
            unfit=unfit,
            again=sorted({key for record in records for key in record.again}),
        ),
        ready=sorted({key for record in records for key in record.ready}),
        files=dict(entries),
    )


def _write(kfac: KFACPreconditioner, folder: Path) -> Entries:
    """Write the files of a domain that this rank has to write, and return their entries."""
    names = kfac.names
    state = kfac.state_dict()
    entries: Entries = {}
    for key, factor in state["factors"]["factors"].items():
        layer = key[:-2]
        side = key[-2:]
        if layer in kfac.saved:
            holds = names[layer] + side
            path = folder / files.factor_file(holds)
            payload = _factor_payload(factor).model_dump()
            entries[path.name] = files.write_payload(path, holds, payload)
    for spec in kfac.worker_layers:
        is_first_worker = kfac.plan.assignment.workers[spec.name][0] == kfac.rank
        if spec.name in kfac.saved and is_first_worker:
            holds = names[spec.name]
            path = folder / files.layer_file(holds)
            payload = layer_payload(state["layers"][spec.name]).model_dump()
            entries[path.name] = files.write_payload(path, holds, payload)
    return entries


def _factor_payload(factor: KroneckerFactor) -> FactorFile:
    """Return the content of a factor's file."""
    history = factor.history
    return FactorFile(
        packed=factor.packed_P,
        updates=factor.updates,
        history=None
        if history is None
        else HistoryRecord(last=history.last, before=history.before),
    )


def layer_payload(state: LayerState) -> LayerFile:
    """Return the content of a layer's file.

    Its tensors are copies, because a layer's tensors may be views of stacks that hold several
    layers, and torch.save would write whole stacks.
    """
    moments = None
    if state.moments is not None:
        moments = {name: tensor.clone() for name, tensor in vars(state.moments).items()}
    return LayerFile(
        terms=state.terms.clone(),
        A=_flat_parts(state.method, state.A),
        G=_flat_parts(state.method, state.G),
        moments=moments,
    )


def _flat_parts(method: Method, decomposition: Any) -> dict[str, Tensor] | None:
    """Return copies of a decomposition's tensors by name; None without a decomposition."""
    if decomposition is None:
        return None
    return {part.kind: part.flat(decomposition).clone() for part in method.parts}


def _united(entries_of_ranks: Sequence[Entries]) -> Entries:
    """Return the entries of all ranks. Raises ValueError if two ranks have written one file."""
    counts = Counter(file for entries in entries_of_ranks for file in entries)
    twice = sorted(file for file, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"several ranks have layers of the same name: {', '.join(twice[:5])}")
    return {file: entry for entries in entries_of_ranks for file, entry in sorted(entries.items())}


def finish(job: Job, tag_directory: Path, header: Header, later: bool = False) -> None:
    """After DeepSpeed's save, make K-FAC's new save the latest one of the tag, and remove the tag's
    older K-FAC saves. Collective.

    Args:
        later: whether DeepSpeed is still writing its files in the background.

    Raises:
        CheckpointError: on every rank, if this failed on any rank.
    """
    folder = tag_directory / files.FOLDER
    headline = f"ds_kfac: could not complete the save in {folder}"
    with failing_together(headline, job.channel.group, CheckpointError):
        if job.channel.rank == 0:
            files.write_states(folder / header.save_id, names=not later)
            files.write_text(folder / files.LATEST, header.save_id)
            for old in folder.iterdir():
                if old.is_dir() and old.name != header.save_id:
                    shutil.rmtree(old, ignore_errors=True)  # a failure only costs disk space


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
    """Save K-FAC's state and then DeepSpeed's, in place of an engine's ``save_checkpoint``.

    K-FAC's state comes first, so that DeepSpeed's files name a complete save. DeepSpeed saves even
    if K-FAC's save fails. DeepSpeed first opens the file ``latest`` and then writes it. A run that
    is killed in between leaves an empty file, with which every later load fails. Therefore
    ``latest`` is written here, atomically.

    Args:
        groups: parameter name -> index of its parameter group, from
            :func:`ds_kfac.checkpoint.order.groups_of`.
        grams: function that writes the factor A of every layer to a folder; None if the config does
            not ask for it.
        original: DeepSpeed's ``save_checkpoint``. It receives all further arguments.

    Raises:
        CheckpointError: on every rank, after DeepSpeed's save, if K-FAC's save failed.
    """
    if not save_dir:  # DeepSpeed's own error says what is wrong
        return original(save_dir, tag, client_state or {}, save_latest, *args, **kwargs)
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    folder = Path(save_dir) / tag
    steps = job.preconditioners[0].steps
    entry: dict[str, Any] = {
        "save_id": None,
        "steps": steps,
        "origin": str(folder.absolute()),
        "groups": groups,
        "order": order_of(engine),
    }
    header = None
    try:
        header = save(job, folder)
        entry["save_id"] = header.save_id
    except CheckpointError as error:
        entry["problem"] = str(error)
    client_state = {**(client_state or {}), files.CLIENT_KEY: entry}
    # an engine that writes in the background writes `latest` itself, after all other files
    in_background = writes_in_background(engine)
    result = original(save_dir, tag, client_state, save_latest and in_background, *args, **kwargs)
    headline = f"ds_kfac: could not write {Path(save_dir) / 'latest'}"
    with failing_together(headline, job.channel.group, CheckpointError):
        if save_latest and not in_background and engine.global_rank == 0:
            files.write_text(Path(save_dir) / "latest", tag)
    if header is None:
        raise CheckpointError(
            f"{entry['problem']}\nDeepSpeed's own checkpoint {folder} is complete. To load it, set "
            f"{files.FRESH}; K-FAC then starts afresh"
        )
    finish(job, folder, header, in_background)
    if grams is not None and steps:
        grams(folder / files.GRAMS)
    return result
