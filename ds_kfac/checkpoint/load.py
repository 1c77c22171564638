"""The state that ``save`` wrote, whatever world size, ZeRO stage, pipeline stages or
expert-parallel ranks wrote it. Whatever is wrong with a file is found on all ranks before anything
is changed."""

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_kfac.assignment.costs import FactorSpec, factors_by_layer
from ds_kfac.checkpoint import files
from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.checkpoint.moving import load_any, take_adamws
from ds_kfac.checkpoint.order import check_order, order_of
from ds_kfac.comm.message import failing_together, gathered
from ds_kfac.curvature.factor import KroneckerFactor, Side
from ds_kfac.curvature.methods import METHODS
from ds_kfac.log import logger
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.plan import Observations
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner
from ds_kfac.update.state import LayerState


def load(
    job: Job, tag_directory: Path, save_id: str | None = None, origin: str | None = None
) -> None:
    """Restore state written by :func:`save`. Collective.

    Layers that it lacks start empty, and factors of another kind (``fisher``, ``weight_sharing``),
    with a warning.

    Args:
        save_id: of the save to load; None takes the tag's last finished one.
        origin: the tag's folder when it was saved, if it may have been converted since.

    Raises:
        CheckpointError: on every rank, if files are missing, damaged or do not fit the model.
            Nothing is changed then.
    """
    found, folder, header = [], tag_directory, {"save_id": ""}
    headline = f"ds_kfac: the K-FAC state of {tag_directory} cannot be loaded"
    with failing_together(headline, job.channel.group, CheckpointError):
        folder = files.find(tag_directory, save_id, origin)
        header = files.read_header(folder)
    ids = gathered(header["save_id"], job.channel.group)
    with failing_together(headline, job.channel.group, CheckpointError) as problems:
        if len(set(ids)) > 1:
            raise ValueError(
                f"the ranks see different saves ({ids} in rank order): they do not see the same "
                f"folder"
            )
        for kfac in job.preconditioners:
            found.append(_read(kfac, folder, header, problems))
    for kfac, (state, warnings) in zip(job.preconditioners, found, strict=True):
        for text in warnings if kfac.rank == 0 else ():
            logger.warning(f"ds_kfac: WARNING: {folder}: {text}")
        kfac.load_state_dict(state, decompose=header["method"] != kfac.config.preconditioner.method)


def _read(
    kfac: KFACPreconditioner, folder: Path, header: Mapping[str, Any], problems: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """What this rank's part of a domain continues from, for ``KFACPreconditioner.load_state_dict``,
    and what does not continue, in words. What is wrong with a file is added to ``problems``."""
    groups, names, timetable = _groups_here(kfac, header), kfac.names, header["timetable"]
    plan = kfac.plan if groups == kfac.observations.groups else kfac.plan.sharing(groups or ())
    specs = plan.assignment.work.factors
    saved_keys, restarted = _keys_of(kfac, header, specs)
    factors: dict[str, KroneckerFactor] = {}
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
    incomplete = {
        spec.key
        for sides in (factors_by_layer(specs) if restarted else {}).values()
        if any(spec.key in restarted for spec in sides.values())
        for spec in sides.values()
    }

    def here(saved: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: saved[name]
            for key, name in saved_keys.items()
            if key not in incomplete and name in saved
        }

    captured, skipped = timetable["domains"].get(kfac.engine_view.domain.name, (0, 0))
    rows = {name: header["rows"][saved] for name, saved in names.items() if saved in header["rows"]}
    if header["ranks"].get(kfac.engine_view.domain.name) != kfac.channel.world:
        rows = {}  # another number of ranks has others; the next captured step shows them
    state = {
        "steps": header["steps"],
        "peak_lr": {int(group): lr for group, lr in header["peak_lr"].items()},
        "observations": Observations(groups, rows or None),
        "layers": states,
        "factors": {
            "factors": factors,
            "ready": here(dict.fromkeys(header["ready"])),
            "schedule": {
                "captured": captured,
                "skipped": skipped,
                "factors": here(timetable["factors"]),
            },
        },
    }
    return state, _warnings(kfac, header, restarted)


def _groups_here(
    kfac: KFACPreconditioner, header: Mapping[str, Any]
) -> tuple[tuple[str, ...], ...] | None:
    """Groups of the saved run that this one may have too; those of this run, which go on being
    checked, if the saved one did not know any yet; None if they are still to be found."""
    if header["shared"] is None or kfac.curvature.paired:  # then each has an A of its own
        return kfac.observations.groups
    here = {saved: name for name, saved in kfac.names.items()}
    groups = tuple(
        tuple(here[name] for name in group if name in here) for group in header["shared"]
    )
    if groups == kfac.observations.groups:
        return groups
    alike = kfac.plan.sharing_candidates
    groups = tuple(tuple(name for name in group if name in alike) for group in groups)
    return tuple(
        group for group in groups if len(group) > 1 and len({alike[name] for name in group}) == 1
    )


def _keys_of(
    kfac: KFACPreconditioner, header: Mapping[str, Any], specs: Sequence[FactorSpec]
) -> tuple[dict[str, str], list[str]]:
    """Factor -> what it is called in the save, of those that continue; and those of layers in the
    save that start empty. The same on all ranks of the domain."""
    leader = {name: group[0] for group in header["shared"] or () for name in group}
    stacked = {
        layer.shares or layer.name for layer in kfac.layers if layer.product and layer.part[1] > 1
    }
    kinds = files.kinds_of(kfac.config)
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
    """The saved A for experts of a stack: its own, or that of the nearest expert before it, where
    the saved run had one for all, or this rank has another part of the mixture: the tokens that
    enter are of one kind. ``key``: where there is none."""
    stack, _, number = key[:-2].rpartition(".")
    numbers = range(int(number), -1, -1) if number.isdigit() else ()
    return next((other for n in numbers if (other := f"{stack}.{n}/A") in saved), key)


def _warnings(
    kfac: KFACPreconditioner, header: Mapping[str, Any], restarted: Sequence[str]
) -> list[str]:
    """What is not continued."""
    texts, then, now = [], header["kinds"], files.kinds_of(kfac.config)
    if unknown := [name for name in kfac.names.values() if name not in header["layers"]]:
        texts.append(f"has no state for {', '.join(unknown)}; these layers start empty")
    for side in "AG":
        if keys := [key for key in restarted if key[-1] == side]:
            why = (
                "the saved run kept none"
                if then[side] == now[side]
                else f"saved: {then[side]}; now: {now[side]}"
            )
            stays = "until their first batch arrives the saved eigenbases stay in use"
            texts.append(f"{', '.join(keys)} start empty ({why}); {stays}")
    if kfac.moments is not None and header["moments"] != kfac.moments.NAME:
        texts.append(
            f"has no {kfac.moments.NAME} moments; they start at zero: expect some steps to recover"
        )
    if header["method"] != (method := kfac.config.preconditioner.method):
        was = f'saved with preconditioner.method "{header["method"]}", now "{method}"'
        texts.append(f"{was}; factors are decomposed again")
    return texts


def _described(side: Side) -> str:
    return f"{side.kind}, {side.dim} wide"


def _load_factor(
    kfac: KFACPreconditioner, folder: Path, header: Mapping[str, Any], key: str, spec: FactorSpec
) -> KroneckerFactor:
    """A factor that the save has, as ``key``. Raises ValueError if it is not what was saved, or not
    a factor of this model and config."""
    path, saved = folder / files.factor_file(key), Side(*header["factors"][key])
    if saved != spec.side:
        raise ValueError(
            f"{path}: {saved.numel} elements ({_described(saved)}), factor {spec.key} of this "
            f"model and config "
            f"({_described(spec.side)}) needs {spec.side.numel}"
        )
    payload = files.read_payload(path, key, header["files"].get(path.name))
    diagonal = saved.diagonal_of(payload["packed"])
    if bool((diagonal < 0).any()):
        raise ValueError(f"{path}: the average of factor {key} has a negative diagonal")
    had = payload["history"] or {}
    return kfac.curvature.factor(
        saved, payload["packed"], payload["updates"], had.get("last"), had.get("before")
    )


def _load_layer(
    kfac: KFACPreconditioner, folder: Path, header: Mapping[str, Any], name: str, layer: LayerSpec
) -> LayerState:
    """A layer that the save has, as ``name``. A side that is the identity now, or was it then,
    keeps no eigenvectors. Raises ValueError if it is not what was saved, or not a layer of this
    model and config."""
    path, then, device = folder / files.layer_file(name), header["layers"][name], kfac.device
    saved, method = METHODS[header["method"]], METHODS[kfac.config.preconditioner.method]
    sides, here = {which: Side(*then[which]) for which in "AG"}, {"A": layer.A, "G": layer.G}
    for which, now in here.items():
        was = sides[which]
        if (
            was.dim != now.dim
            or (was.block != now.block and was.block and now.block)
            or then["groups"] != layer.groups
        ):
            raise ValueError(
                f"{path}: side {which} of {layer.name} was {_described(was)}, of this model and "
                f"config it is "
                f"{_described(now)}"
            )
    payload = files.read_payload(path, name, header["files"].get(path.name))
    moments = None
    if kfac.moments is not None and header["moments"] == kfac.moments.NAME:
        moments = kfac.moments(
            **{part: tensor.to(device) for part, tensor in payload["moments"].items()}
        )
    elif kfac.moments is not None:
        moments = kfac.moments.empty(layer.shape, device)
    kept, left = {}, {}  # moments leave the eigenbases that are not kept
    for which, side in sides.items():
        flats = payload[which] and [payload[which][part.kind].to(device) for part in saved.parts]
        then_kept = None if flats is None else saved.joined(side, *flats)
        if saved is method and here[which].block:
            kept[which] = then_kept
            continue
        kept[which] = None if here[which].block else method.identity(here[which], device)
        if side.block:
            left[which] = then_kept
    state = LayerState(payload["terms"].to(device), method, kept["A"], kept["G"], moments)
    return state.without(A=left.get("A"), G=left.get("G")) if left else state


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
    """Around an engine's ``load_checkpoint``: DeepSpeed's load, then ours. What goes wrong with
    ours is said after it. ``groups``: of :func:`ds_kfac.checkpoint.order.groups_of`.

    Raises:
        CheckpointError: on every rank, after DeepSpeed's load: ranks have loaded different saves,
            or the K-FAC state is missing, damaged or of another model (with
            ``checkpoint.on_missing`` "error"); or the optimizer's state is another optimizer's.
    """
    arguments = inspect.signature(original).bind(load_dir, *args, **kwargs).arguments
    # which groups are K-FAC's is this engine's matter: a universal checkpoint's first one is copied
    # over all others at stage 3, and their raw gradients would be stepped along as if they were
    # directions
    names, own_groups = job.preconditioners[0].rule.marks, engine.basic_optimizer.param_groups
    marks = [{name: bool(group.get(name)) for name in names} for group in own_groups]
    engine.kfac.by_hand = False
    try:
        path, client_state, moved = load_any(engine, original, load_dir, *args, **kwargs)
    finally:
        engine.kfac.by_hand = True
        for group, own in zip(
            engine.basic_optimizer.param_groups, marks if names else (), strict=bool(names)
        ):
            group.update(own)
    entry = client_state.pop(files.CLIENT_KEY, None) if client_state else None
    # DeepSpeed's files decide; what lies in the folder may be of another save.
    _check_one_save(job, load_dir, path is not None, entry)
    if path is None:
        return path, client_state
    tag_directory, anew = Path(path).parent, None
    _check_schedule(engine.lr_scheduler, tag_directory)
    for argument, default in (("load_module_only", False), ("load_optimizer_states", True)):
        if anew is None and bool(arguments.get(argument, default)) != default:
            does = "K-FAC starts afresh; engine.kfac.load_state loads the state of"
            anew = f"{argument}={not default}: {does} {tag_directory}"
    if anew is None and moved is None and not engine.load_universal_checkpoint():
        _check_groups(groups, tag_directory, entry)
        check_order(order_of(engine), (entry or {}).get("order", ()), tag_directory)
    if anew is None and entry is not None:
        anew = _loaded(engine, job, tag_directory, entry)
    elif anew is None:
        also = (
            ""
            if moved is None
            else "; weights, scheduler, step and AdamW's moments of all parameters go on"
        )
        anew = (
            f"WARNING: {tag_directory} has no K-FAC state, K-FAC starts afresh{also}: expect "
            f"some steps to recover"
        )
    if anew is not None:
        job.reset()
        if moved is not None and entry is None:
            take_adamws(job, moved)
        if engine.global_rank == 0:
            logger.warning(f"ds_kfac: {anew}")
    return path, client_state


def _loaded(engine: Any, job: Job, tag_directory: Path, entry: Mapping[str, Any]) -> str | None:
    """Load the save of a client state; why K-FAC starts afresh instead."""
    kfac = job.preconditioners[0]
    try:
        if entry.get("save_id") is None:  # the same on every rank
            raise CheckpointError(
                f"ds_kfac: {tag_directory} was saved without its K-FAC state, which could not be "
                f"written:\n"
                f"{entry.get('problem')}"
            )
        load(job, tag_directory, entry["save_id"], entry.get("origin"))
    except CheckpointError as error:
        lost = "factors, eigenbases" + (" and moments of the K-FAC layers" if kfac.moments else "")
        if kfac.config.checkpoint.on_missing == "fresh":
            text = str(error).removeprefix("ds_kfac: ")
            return (
                f"WARNING: {text}\n  K-FAC starts afresh, without {lost}: expect some steps to "
                f"recover"
            )
        raise CheckpointError(
            f"{error}\nDeepSpeed has loaded weights, optimizer and step. To continue with them "
            f"and without {lost}, "
            f"set {files.FRESH}"
        ) from error
    _check_files(engine, job, tag_directory, entry["save_id"])
    if engine.global_rank == 0:
        logger.warning(f"ds_kfac: loaded K-FAC state of step {kfac.steps} from {tag_directory}")
    return None


def _check_groups(
    own: Mapping[str, int], tag_directory: Path, entry: Mapping[str, Any] | None
) -> None:
    """DeepSpeed takes weights and moments by their place in a group, but for a universal
    checkpoint's. Raises CheckpointError on every rank, whatever ``on_missing``, if they are another
    parameter's."""
    saved = (entry or {}).get("groups", {})
    if moved := [name for name, group in own.items() if saved.get(name, group) != group]:
        named = ", ".join(moved[:3]) + (", .." if len(moved) > 3 else "")
        raise CheckpointError(
            f"ds_kfac: the optimizer state in {tag_directory} has {named} in other parameter "
            f"groups: kfac.layers, or "
            "what K-FAC knows of the model, was another when it was saved. DeepSpeed takes it by "
            "place, so this "
            "engine's weights and moments are mixed up now: build another one, with kfac.layers "
            "as they were. "
            f"{files.WEIGHTS_ALONE}"
        )


def _check_schedule(scheduler: Any, tag_directory: Path) -> None:
    """One of torch's takes rates by their place, too. Raises CheckpointError on every rank,
    whatever ``on_missing``, if they are those of other groups."""
    rates, optimizer = getattr(scheduler, "base_lrs", None), getattr(scheduler, "optimizer", None)
    if rates is not None and optimizer is not None and len(rates) != len(optimizer.param_groups):
        raise CheckpointError(
            f"ds_kfac: the {type(scheduler).__name__} in {tag_directory} has rates of "
            f"{len(rates)} parameter groups, "
            f"here it has {len(optimizer.param_groups)}. With KFACAdamW a scheduler has the "
            f"groups that you gave. Load "
            "with load_lr_scheduler_states=False, and step it to where it was"
        )


def _check_files(engine: Any, job: Job, tag_directory: Path, save_id: str) -> None:
    """Of a save that did not reach its end, or another one over it. Raises CheckpointError on every
    rank if some of DeepSpeed's files are of another save."""
    found = files.unfinished(tag_directory, save_id) if engine.global_rank == 0 else None
    interrupted, others = found or ("", [])
    torn, own_tag = (
        f"ds_kfac: the checkpoint in {tag_directory} is torn",
        "and give every save its own tag",
    )
    with failing_together(torn, job.channel.group, CheckpointError) as problems:
        if others:
            whose = (
                f"{', '.join(others)} belong to another save ({files.STATES} says so), and "
                f"were partly loaded"
            )
            problems.append(f"{interrupted}: {whose}. Load another tag, {own_tag}")
    if interrupted:
        whose = "if DeepSpeed was writing then, its files of this tag belong to two saves"
        logger.warning(
            f"ds_kfac: WARNING: {interrupted}: {whose}. Load another tag if there is one, {own_tag}"
        )


def _check_one_save(job: Job, load_dir: str, loaded: bool, entry: Mapping[str, Any] | None) -> None:
    """At stage 3 every rank has a client_state of its own: a save over an old one that was killed
    leaves both. Raises CheckpointError on every rank, whatever ``on_missing``: the weights
    themselves are of several saves."""
    mine = (
        f"save {entry.get('save_id')} of step {entry.get('steps')}"
        if entry
        else "a save without K-FAC"
    )
    everyone = gathered(mine if loaded else "nothing to load", job.channel.group)
    if len(set(everyone)) > 1:
        whose = [
            f"{what}: rank "
            f"{', '.join(str(rank) for rank, other in enumerate(everyone) if other == what)}"
            for what in dict.fromkeys(everyone)
        ]
        raise CheckpointError(
            f"ds_kfac: the checkpoint in {load_dir} is torn: the ranks loaded files of different "
            f"saves, weights "
            "included:\n  "
            + "\n  ".join(whose)
            + "\nEither a save over an existing tag was not finished, or not all "
            "ranks see the same folder. Load another tag"
        )
