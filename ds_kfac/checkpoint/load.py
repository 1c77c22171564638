"""Load the state that ``save`` wrote, even with another world size, ZeRO stage, number of pipeline
stages or placement of experts. All ranks learn of every fault in a file before any rank changes its
state."""

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_kfac.assignment.costs import FactorSpec, factors_by_layer
from ds_kfac.checkpoint import files
from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.checkpoint.moving import load_any, take_adamws
from ds_kfac.checkpoint.order import check_order, order_of
from ds_kfac.checkpoint.records import FactorFile, Header, LayerFile, LayerRecord, checked
from ds_kfac.checkpoint.universal import Values
from ds_kfac.comm.message import failing_together, gathered
from ds_kfac.curvature.factor import KroneckerFactor, Side
from ds_kfac.curvature.methods import METHODS, Method
from ds_kfac.log import logger
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.plan import Observations
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner
from ds_kfac.step.proving import ProofClock
from ds_kfac.update.state import LayerState

Groups = tuple[tuple[str, ...], ...]
"""Groups of layer names. The layers of a group share one A."""


def load(
    job: Job, tag_directory: Path, save_id: str | None = None, origin: str | None = None
) -> None:
    """Restore state written by :func:`save`. Collective.

    Layers that are not in the checkpoint start empty, with a warning. So do factors that were saved
    with another ``fisher`` or ``weight_sharing``.

    Args:
        save_id: id of the save; None: the tag's last finished save.
        origin: folder to which DeepSpeed's checkpoint was saved; None: unknown. If the checkpoint
            was converted, K-FAC's save may still be in that folder.

    Raises:
        CheckpointError: on every rank, if files are missing, damaged or do not fit the model.
            In this case nothing changes.
    """
    group = job.channel.group
    headline = f"ds_kfac: the K-FAC state of {tag_directory} cannot be loaded"
    header: Header | None = None
    with failing_together(headline, group, CheckpointError):
        folder = files.find(tag_directory, save_id, origin)
        header = files.read_header(folder)
    assert header is not None
    ids = gathered(header.save_id, group)
    states: list[dict[str, Any]] = []
    warnings: list[list[str]] = []
    with failing_together(headline, group, CheckpointError) as problems:
        if len(set(ids)) > 1:
            raise ValueError(
                f"the ranks see different saves in this folder ({ids} in rank order), so they do "
                "not see the same file system"
            )
        for kfac in job.preconditioners:
            state, texts = _read(kfac, folder, header, problems)
            states.append(state)
            warnings.append(texts)
    for kfac, state, texts in zip(job.preconditioners, states, warnings, strict=True):
        if kfac.rank == 0:
            for text in texts:
                logger.warning(f"ds_kfac: WARNING: {folder}: {text}")
        other_method = header.method != kfac.config.preconditioner.method
        kfac.load_state_dict(state, decompose=other_method)


def _read(
    kfac: KFACPreconditioner, folder: Path, header: Header, problems: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """Read this rank's part of a domain. A domain is a set of layers and the ranks that share the
    work on them. Experts may have other ranks than the dense layers.

    Args:
        problems: receives a text for each fault in a file.

    Returns the state for ``KFACPreconditioner.load_state_dict``, and a text for each part of the
    state that is not restored.
    """
    groups = _groups_here(kfac, header)
    plan = kfac.plan if groups == kfac.observations.groups else kfac.plan.sharing(groups or ())
    specs = plan.assignment.work.factors
    saved_keys, restarted = _keys_of(kfac, header, specs)
    state = {
        "steps": header.steps,
        "peak_lr": {int(group): lr for group, lr in header.peak_lr.items()},
        "observations": Observations(groups, _rows_here(kfac, header)),
        "proofs": _proofs_here(kfac, header, saved_keys),
        "layers": _read_layers(kfac, folder, header, problems),
        "factors": {
            "factors": _read_factors(kfac, folder, header, specs, saved_keys, problems),
            **_timetable_here(kfac, header, specs, saved_keys, restarted),
        },
    }
    return state, _warnings(kfac, header, restarted)


def _read_factors(
    kfac: KFACPreconditioner,
    folder: Path,
    header: Header,
    specs: Sequence[FactorSpec],
    saved_keys: Mapping[str, str],
    problems: list[str],
) -> dict[str, KroneckerFactor]:
    """Return those of this rank's factors that are in the checkpoint, in a dict by factor key."""
    owners = kfac.plan.assignment.owners
    factors = {}
    for spec in specs:
        if owners[spec.key] == kfac.rank and spec.key in saved_keys:
            try:
                factors[spec.key] = _load_factor(kfac, folder, header, saved_keys[spec.key], spec)
            except (OSError, ValueError) as error:
                problems.append(str(error))
    return factors


def _read_layers(
    kfac: KFACPreconditioner, folder: Path, header: Header, problems: list[str]
) -> dict[str, LayerState]:
    """Return the state of each layer that this rank preconditions and that is in the checkpoint, in
    a dict by layer name."""
    layers = {}
    for layer in kfac.worker_layers:
        saved_name = kfac.names[layer.name]
        if saved_name in header.layers:
            try:
                layers[layer.name] = _load_layer(kfac, folder, header, saved_name, layer)
            except (OSError, ValueError) as error:
                problems.append(str(error))
    return layers


def _rows_here(kfac: KFACPreconditioner, header: Header) -> dict[str, float] | None:
    """Return a dict from layer name to the mean number of rows that a rank has in a step. Return
    None if these numbers are unknown until the next captured step."""
    if header.ranks.get(kfac.engine_view.domain.name) != kfac.channel.world:
        return None  # with another number of ranks, a rank has another number of rows
    rows = {name: header.rows[saved] for name, saved in kfac.names.items() if saved in header.rows}
    return rows or None


def _timetable_here(
    kfac: KFACPreconditioner,
    header: Header,
    specs: Sequence[FactorSpec],
    saved_keys: Mapping[str, str],
    restarted: Sequence[str],
) -> dict[str, Any]:
    """Return the keys of the factors that have been decomposed, and the adaptive rule's state, in
    the form that ``load_state_dict`` takes."""
    # if one factor of a layer starts empty, both are decomposed as soon as that factor has data
    incomplete = set[str]()
    for sides in factors_by_layer(specs).values():
        keys = {spec.key for spec in sides.values()}
        if not keys.isdisjoint(restarted):
            incomplete |= keys
    continuing = {key: saved for key, saved in saved_keys.items() if key not in incomplete}
    saved_clocks = header.timetable.factors
    saved_ready = set(header.ready)
    captures = header.timetable.domains.get(kfac.engine_view.domain.name)
    return {
        "ready": {key for key, saved in continuing.items() if saved in saved_ready},
        "schedule": {
            "captured": 0 if captures is None else captures.captured,
            "skipped": 0 if captures is None else captures.skipped,
            "factors": {
                key: saved_clocks[saved]
                for key, saved in continuing.items()
                if saved in saved_clocks
            },
        },
    }


def _proofs_here(
    kfac: KFACPreconditioner, header: Header, saved_keys: Mapping[str, str]
) -> dict[str, Any]:
    """Return the state of the proofs of this run's layers, in the form that ``Proving.load``
    takes."""
    clock = header.proofs.domains.get(kfac.engine_view.domain.name)
    again = set(header.proofs.again)
    return {
        "clock": ProofClock() if clock is None else ProofClock(*clock),
        "unfit": {
            name: header.proofs.unfit[saved]
            for name, saved in kfac.names.items()
            if saved in header.proofs.unfit
        },
        "again": frozenset(key for key, saved in saved_keys.items() if saved in again),
    }


def _groups_here(kfac: KFACPreconditioner, header: Header) -> Groups | None:
    """Return the groups of layers that share one A after the load.

    These are the saved run's groups, without layers that cannot share an A in this run. If the
    saved run did not know its groups yet, return this run's groups, or None if this run does not
    know its groups yet either.
    """
    if header.shared is None or kfac.curvature.paired:  # paired: each layer has an A of its own
        return kfac.observations.groups
    here = {saved: name for name, saved in kfac.names.items()}
    groups = tuple(tuple(here[name] for name in group if name in here) for group in header.shared)
    if groups == kfac.observations.groups:
        return groups
    candidates = kfac.plan.sharing_candidates  # layer -> key; layers with equal keys may share
    groups = tuple(tuple(name for name in group if name in candidates) for group in groups)
    return tuple(
        group
        for group in groups
        if len(group) > 1 and len({candidates[name] for name in group}) == 1
    )


def _keys_of(
    kfac: KFACPreconditioner, header: Header, specs: Sequence[FactorSpec]
) -> tuple[dict[str, str], list[str]]:
    """Match the factors of this run with those of the save.

    Returns two values. The first is a dict from factor key to key in the save, for the factors that
    are restored. The second is a list with the keys of the factors that start empty although their
    layers are in the save. The result is the same on all ranks that work on these layers.
    """
    leader = {name: group[0] for group in header.shared or () for name in group}
    stacked = {
        layer.shares or layer.name for layer in kfac.layers if layer.product and layer.part[1] > 1
    }
    kinds = files.kinds_of(kfac.config)
    keys: dict[str, str] = {}
    restarted: list[str] = []
    for spec in specs:
        name = kfac.names[spec.layers[0]]
        side = spec.key[-1]
        if name not in header.layers:
            continue
        saved = f"{leader.get(name, name) if side == 'A' else name}/{side}"
        if side == "A" and spec.key[:-2] in stacked:
            saved = _of_stack(saved, header.factors)
        same_kind = getattr(header.kinds, side) == getattr(kinds, side)
        if saved in header.factors and same_kind:
            keys[spec.key] = saved
        else:
            restarted.append(spec.key)
    return keys, restarted


def _of_stack(key: str, saved: Container[str]) -> str:
    """Return the key under which the factor A of an expert in a stack is loaded from the save.

    This is the expert's own key if it is in the save. If not, the saved run had one A for all
    experts, or this rank has other experts now. Then return the key of the nearest preceding expert
    that is in the save, because that expert's inputs are tokens of the same kind. If there is no
    such expert, return ``key``.
    """
    stack, _, number = key[:-2].rpartition(".")
    numbers = range(int(number), -1, -1) if number.isdigit() else ()
    candidates = (f"{stack}.{n}/A" for n in numbers)
    return next((candidate for candidate in candidates if candidate in saved), key)


def _warnings(kfac: KFACPreconditioner, header: Header, restarted: Sequence[str]) -> list[str]:
    """Return a text for each part of the state that is not restored from the save."""
    texts = []
    kinds = files.kinds_of(kfac.config)
    new_layers = [name for name in kfac.names.values() if name not in header.layers]
    if new_layers:
        texts.append(f"has no state for {', '.join(new_layers)}; these layers start empty")
    for side in "AG":
        keys = [key for key in restarted if key[-1] == side]
        if not keys:
            continue
        then = getattr(header.kinds, side)
        now = getattr(kinds, side)
        why = "they were not saved" if then == now else f"saved: {then}; now: {now}"
        texts.append(
            f"the factors {', '.join(keys)} start empty ({why}); the saved eigenbases stay in use "
            "until the factors have their first batch"
        )
    if kfac.moments is not None and header.moments != kfac.moments.NAME:
        texts.append(
            f"has no {kfac.moments.NAME} moments, so they start at zero: the loss may take some "
            "steps to recover"
        )
    method = kfac.config.preconditioner.method
    if header.method != method:
        texts.append(
            f'saved with preconditioner.method "{header.method}", now "{method}"; factors are '
            "decomposed again"
        )
    return texts


def _described(side: Side) -> str:
    return f"{side.kind}, {side.dim} wide"


def _load_factor(
    kfac: KFACPreconditioner, folder: Path, header: Header, key: str, spec: FactorSpec
) -> KroneckerFactor:
    """Read the factor whose key in the save is ``key``. Raises ValueError if the file has changed
    since the save, or does not fit this model and config."""
    path = folder / files.factor_file(key)
    saved = header.factors[key].side
    if saved != spec.side:
        raise ValueError(
            f"{path}: {saved.numel} elements ({_described(saved)}), but factor {spec.key} of this "
            f"model and config ({_described(spec.side)}) needs {spec.side.numel}"
        )
    content = checked(FactorFile, files.read_payload(path, key, header.files.get(path.name)), path)
    if bool((saved.diagonal_of(content.packed) < 0).any()):
        raise ValueError(f"{path}: the average of factor {key} has a negative diagonal")
    last = before = None
    if content.history is not None:
        last = content.history.last
        before = content.history.before
    return kfac.curvature.factor(saved, content.packed, content.updates, last, before)


def _load_layer(
    kfac: KFACPreconditioner, folder: Path, header: Header, name: str, layer: LayerSpec
) -> LayerState:
    """Read the layer whose name in the save is ``name``. A side that is the identity now, or was
    when it was saved, does not keep eigenvectors. Raises ValueError if the file has changed since
    the save, or does not fit this model and config."""
    path = folder / files.layer_file(name)
    saved = header.layers[name]
    _check_sides(saved, layer, path)
    content = checked(LayerFile, files.read_payload(path, name, header.files.get(path.name)), path)
    moments = _load_moments(kfac, header, content, layer, path)
    saved_method = METHODS[header.method]
    method = METHODS[kfac.config.preconditioner.method]
    kept: dict[str, Any] = {}
    # eigenbases that this run does not keep. Saved moments are rotated out of them.
    dropped: dict[str, Any] = {}
    for which, now in (("A", layer.A), ("G", layer.G)):
        then: Side = getattr(saved, which).side
        flat_parts = getattr(content, which)
        decomposition = _joined(saved_method, then, flat_parts, kfac.device)
        if saved_method is method and now.block:
            kept[which] = decomposition
            continue
        kept[which] = None if now.block else method.identity(now, kfac.device)
        if then.block:
            dropped[which] = decomposition
    state = LayerState(content.terms.to(kfac.device), method, kept["A"], kept["G"], moments)
    return state.without(A=dropped.get("A"), G=dropped.get("G")) if dropped else state


def _check_sides(saved: LayerRecord, layer: LayerSpec, path: Path) -> None:
    """Raise ValueError if a saved layer has another shape than this model's."""
    for which, now in (("A", layer.A), ("G", layer.G)):
        then: Side = getattr(saved, which).side
        one_is_identity = then.block == 0 or now.block == 0
        same_blocks = then.block == now.block or one_is_identity
        if then.dim != now.dim or not same_blocks or saved.groups != layer.groups:
            raise ValueError(
                f"{path}: side {which} of {layer.name} was {_described(then)}, but in this model "
                f"and config it is {_described(now)}"
            )


def _load_moments(
    kfac: KFACPreconditioner, header: Header, content: LayerFile, layer: LayerSpec, path: Path
) -> Any:
    """Return a layer's moments: the saved moments, or zeros if another update rule saved them. None
    if this run's rule keeps no moments."""
    if kfac.moments is None:
        return None
    if header.moments != kfac.moments.NAME:
        return kfac.moments.empty(layer.shape, kfac.device)
    if content.moments is None:
        raise ValueError(f"{path}: has no moments, but the header says {header.moments}")
    return kfac.moments(
        **{part: tensor.to(kfac.device) for part, tensor in content.moments.items()}
    )


def _joined(
    method: Method, side: Side, flat_parts: Mapping[str, Tensor] | None, device: torch.device
) -> Any:
    """Return a side's decomposition from its saved tensors; None if none was saved."""
    if flat_parts is None:
        return None
    return method.joined(side, *(flat_parts[part.kind].to(device) for part in method.parts))


# the engine's own load


def load_checkpoint(
    engine: Any,
    job: Job,
    groups: Mapping[str, int],
    original: Callable[..., Any],
    load_dir: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Load DeepSpeed's state and then K-FAC's, in place of an engine's ``load_checkpoint``.

    Args:
        groups: parameter name -> index of its parameter group, from
            :func:`ds_kfac.checkpoint.order.groups_of`.
        original: DeepSpeed's ``load_checkpoint``. It receives all further arguments.

    Raises:
        CheckpointError: on every rank, after DeepSpeed's load. Either ranks have loaded different
            saves, or the state belongs to another optimizer, or ``checkpoint.on_missing`` is
            "error" and K-FAC's state is missing, damaged or from another model.
    """
    arguments = inspect.signature(original).bind(load_dir, *args, **kwargs).arguments
    # This engine, not the checkpoint, decides which parameter groups are K-FAC's, so the groups'
    # marks are restored after the load. At stage 3 DeepSpeed copies the first group of a universal
    # checkpoint, with its marks, over all others. If the others stayed marked, their raw gradients
    # would be used as directions.
    mark_names = job.preconditioners[0].rule.marks
    marks = [
        {name: bool(group.get(name)) for name in mark_names}
        for group in engine.basic_optimizer.param_groups
    ]
    engine.kfac.by_hand = False
    try:
        path, client_state, other_values = load_any(engine, original, load_dir, *args, **kwargs)
    finally:
        engine.kfac.by_hand = True
        if mark_names:
            for group, mark in zip(engine.basic_optimizer.param_groups, marks, strict=True):
                group.update(mark)
    entry = client_state.pop(files.CLIENT_KEY, None) if client_state else None
    # DeepSpeed's files decide which save is loaded, because the folder may hold several saves.
    _check_one_save(job, load_dir, path is not None, entry)
    if path is None:
        return path, client_state
    tag_directory = Path(path).parent
    _check_schedule(engine.lr_scheduler, tag_directory)
    reason = _left_out(arguments, tag_directory)
    if reason is None:
        if other_values is None and not engine.load_universal_checkpoint():
            _check_groups(groups, tag_directory, entry)
            check_order(order_of(engine), (entry or {}).get("order", ()), tag_directory)
        if entry is not None:
            reason = _loaded(engine, job, tag_directory, entry)
        else:
            reason = _without_state(tag_directory, other_values)
    if reason is not None:
        job.reset()
        if other_values is not None and entry is None:
            take_adamws(job, other_values)
        if engine.global_rank == 0:
            logger.warning(f"ds_kfac: {reason}")
    return path, client_state


def _left_out(arguments: Mapping[str, Any], tag_directory: Path) -> str | None:
    """Return a text which says that K-FAC starts afresh because the caller asked for the weights
    alone; None if the caller did not."""
    for argument, default in (("load_module_only", False), ("load_optimizer_states", True)):
        if bool(arguments.get(argument, default)) != default:
            return (
                f"{argument}={not default}: K-FAC starts afresh. To load K-FAC's state of "
                f"{tag_directory} nevertheless, call engine.kfac.load_state"
            )
    return None


def _without_state(tag_directory: Path, other_values: Values | None) -> str:
    """Return a text which says that a checkpoint has no K-FAC state and K-FAC starts afresh."""
    if other_values is not None:
        continuing = "; weights, scheduler, step and AdamW's moments of all parameters continue"
    else:
        continuing = ""
    return (
        f"WARNING: {tag_directory} has no K-FAC state, K-FAC starts afresh{continuing}: the loss "
        "may take some steps to recover"
    )


def _loaded(engine: Any, job: Job, tag_directory: Path, entry: Mapping[str, Any]) -> str | None:
    """Load the save that a client state names. Returns None, or a text which says why K-FAC starts
    afresh instead."""
    kfac = job.preconditioners[0]
    try:
        if entry.get("save_id") is None:  # the entry is the same on every rank
            raise CheckpointError(
                f"ds_kfac: {tag_directory} was saved without its K-FAC state, which could not be "
                f"written:\n{entry.get('problem')}"
            )
        load(job, tag_directory, entry["save_id"], entry.get("origin"))
    except CheckpointError as error:
        lost = "factors, eigenbases" + (" and moments of the K-FAC layers" if kfac.moments else "")
        if kfac.config.checkpoint.on_missing == "fresh":
            text = str(error).removeprefix("ds_kfac: ")
            return (
                f"WARNING: {text}\n"
                f"  K-FAC starts afresh, without {lost}: the loss may take some steps to recover"
            )
        raise CheckpointError(
            f"{error}\nDeepSpeed has loaded weights, optimizer and step. To continue with them "
            f"and without {lost}, set {files.FRESH}"
        ) from error
    _check_files(engine, job, tag_directory, entry["save_id"])
    if engine.global_rank == 0:
        logger.warning(f"ds_kfac: loaded K-FAC state of step {kfac.steps} from {tag_directory}")
    return None


def _check_groups(
    groups: Mapping[str, int], tag_directory: Path, entry: Mapping[str, Any] | None
) -> None:
    """Check that every parameter is in the parameter group in which it was saved. The check is
    needed because DeepSpeed loads weights and moments by their position in a group, unless the
    checkpoint is universal.

    Raises:
        CheckpointError: a parameter is in another group. It is raised on every rank, whatever the
            config's ``on_missing``.
    """
    saved = (entry or {}).get("groups", {})
    moved = [name for name, group in groups.items() if saved.get(name, group) != group]
    if moved:
        named = ", ".join(moved[:3]) + (", .." if len(moved) > 3 else "")
        raise CheckpointError(
            f"ds_kfac: the optimizer state in {tag_directory} has {named} in other parameter "
            "groups: kfac.layers, or the layers that K-FAC found in the model, were different when "
            "the state was saved. DeepSpeed loads the state by position, so this engine's weights "
            "and moments are mixed up now: build a new engine, with the old kfac.layers. "
            f"{files.WEIGHTS_ALONE}"
        )


def _check_schedule(scheduler: Any, tag_directory: Path) -> None:
    """Check that a torch scheduler has one learning rate for each parameter group, because it gives
    the i-th learning rate to the i-th group.

    Raises:
        CheckpointError: the numbers differ. It is raised on every rank, whatever the config's
            ``on_missing``.
    """
    rates = getattr(scheduler, "base_lrs", None)
    optimizer = getattr(scheduler, "optimizer", None)
    if rates is not None and optimizer is not None and len(rates) != len(optimizer.param_groups):
        raise CheckpointError(
            f"ds_kfac: the {type(scheduler).__name__} in {tag_directory} has learning rates of "
            f"{len(rates)} parameter groups, but this optimizer has "
            f"{len(optimizer.param_groups)}. With KFACAdamW a scheduler has one learning rate for "
            "each group that you gave to the optimizer. Load with load_lr_scheduler_states=False, "
            "and step the scheduler as often as it had been stepped before the save"
        )


def _check_files(engine: Any, job: Job, tag_directory: Path, save_id: str) -> None:
    """Check that all of DeepSpeed's files belong to one save, and warn of an interrupted save.

    Raises:
        CheckpointError: on every rank, if some files belong to another save.
    """
    interruption = files.unfinished(tag_directory, save_id) if engine.global_rank == 0 else None
    headline = f"ds_kfac: the checkpoint in {tag_directory} is torn: its files are of several saves"
    own_tag = "and give every save its own tag"
    with failing_together(headline, job.channel.group, CheckpointError) as problems:
        if interruption is not None and interruption.foreign:
            problems.append(
                f"{interruption.sentence}. According to {files.STATES}, "
                f"{', '.join(interruption.foreign)} belong to another save, and this engine has "
                f"loaded a part of them. Load another tag, {own_tag}"
            )
    if interruption is not None:
        logger.warning(
            f"ds_kfac: WARNING: {interruption.sentence}. If DeepSpeed was writing its files at "
            "that moment, the files in this tag belong to two saves. Load another tag if there is "
            f"one, {own_tag}"
        )


def _check_one_save(job: Job, load_dir: str, loaded: bool, entry: Mapping[str, Any] | None) -> None:
    """Check that all ranks have loaded the same save.

    At stage 3 every rank has a client_state of its own. If a save to an existing tag was killed,
    some ranks may have loaded the client_state of the old save, and others that of the new save.

    Raises:
        CheckpointError: ranks have loaded different saves. It is raised on every rank, whatever the
            config's ``on_missing``, because the weights themselves do not fit together.
    """
    if not loaded:
        mine = "nothing to load"
    elif entry:
        mine = f"save {entry.get('save_id')} of step {entry.get('steps')}"
    else:
        mine = "a save without K-FAC"
    everyone = gathered(mine, job.channel.group)
    if len(set(everyone)) > 1:
        lines = []
        for save in dict.fromkeys(everyone):
            ranks = [str(rank) for rank, other in enumerate(everyone) if other == save]
            lines.append(f"{save}: rank {', '.join(ranks)}")
        raise CheckpointError(
            f"ds_kfac: the checkpoint in {load_dir} is torn: the ranks loaded files of different "
            "saves, weights included:\n  "
            + "\n  ".join(lines)
            + "\nEither a save over an existing tag was not finished, or not all ranks see the "
            "same folder. Load another tag"
        )
