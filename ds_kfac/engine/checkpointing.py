"""What becomes of K-FAC when an engine saves and loads its checkpoints.

DeepSpeed's own save and load always happen. What goes wrong with K-FAC's part is said after them, on every rank.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepspeed.utils import logger

from ds_kfac.checkpoint import load as loading
from ds_kfac.checkpoint import save as saving
from ds_kfac.checkpoint.files import CheckpointError, check_names, write_text
from ds_kfac.comm.message import failing_together, gathered
from ds_kfac.step.job import Job

CLIENT_KEY = "ds_kfac"
"""Key in DeepSpeed's client_state that names the save; survives ds_to_universal, which does not copy the folder."""
OTHER_GROUPS = "parameter group", "parameter-alignment", "must match the size of tensor"
"""In what DeepSpeed says of an optimizer state whose groups are cut otherwise, by mistake or by the optimizer."""
WEIGHTS_ALONE = (
    "Pass load_module_only=True, load_optimizer_states=False (at stage 3 DeepSpeed needs both) to start from the "
    "weights alone"
)
FRESH = '"checkpoint": {"on_missing": "fresh"} in the "kfac" block'


class Checkpointing:
    """The wrappers of an engine's ``save_checkpoint`` and ``load_checkpoint``.

    Args:
        job: whose state is saved and loaded.

    Raises:
        ValueError: the layers cannot be saved under their names.
    """

    def __init__(self, engine: Any, job: Job) -> None:
        self.engine, self.job = engine, job
        check_names(name for kfac in job.preconditioners for name in kfac.names.values())
        self.groups = self._groups()

    def save(
        self,
        original: Callable[..., Any],
        save_dir: str,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Ours first, so that what DeepSpeed writes names a complete save; its own in any case.

        ``latest`` is put there at once: DeepSpeed opens it, then writes it, and a run that is killed between the two
        leaves an empty file, of which every later load fails.

        Raises:
            CheckpointError: on every rank, after DeepSpeed's save, if ours failed.
        """
        if not save_dir:
            # DeepSpeed says what is wrong
            return original(save_dir, tag, client_state or {}, save_latest, *args, **kwargs)
        tag = f"global_step{self.engine.global_steps}" if tag is None else str(tag)
        folder, problem = Path(save_dir) / tag, None
        steps, origin = self.job.preconditioners[0].steps, str(folder.absolute())
        entry: dict[str, Any] = {"save_id": None, "steps": steps, "origin": origin, "groups": self.groups}
        header: dict[str, Any] = {}
        try:
            header = saving.save(self.job, folder)
            entry["save_id"] = header["save_id"]
        except CheckpointError as error:
            problem = entry["problem"] = str(error)
        later = self.engine.checkpoint_engine.is_decoupled()  # written in the background; then DeepSpeed writes latest
        client_state = {**(client_state or {}), CLIENT_KEY: entry}
        result = original(save_dir, tag, client_state, save_latest and later, *args, **kwargs)
        headline = f"ds_kfac: could not write {Path(save_dir) / 'latest'}"
        with failing_together(headline, self.job.channel.group, CheckpointError):
            if save_latest and not later and self.engine.global_rank == 0:
                write_text(Path(save_dir) / "latest", tag)
        if problem is not None:
            raise CheckpointError(
                f"{problem}\nDeepSpeed's own checkpoint {folder} is complete; it loads with {FRESH}, K-FAC then starts "
                "afresh"
            )
        saving.finish(self.job, folder, header)
        return result

    def load(self, original: Callable[..., Any], load_dir: str, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's load, then ours.

        Raises:
            CheckpointError: on every rank, after DeepSpeed's load: ranks have loaded different saves, or the K-FAC
                state is missing, damaged or of another model (with ``checkpoint.on_missing`` "error"); or the
                optimizer's state is another optimizer's.
        """
        arguments = inspect.signature(original).bind(load_dir, *args, **kwargs).arguments
        # which groups are K-FAC's is this engine's matter: a universal checkpoint's first one is copied over all others
        # at stage 3, and their raw gradients would be stepped along as if they were directions
        names = self.job.preconditioners[0].rule.marks
        groups = self.engine.basic_optimizer.param_groups
        marks = [{name: bool(group.get(name)) for name in names} for group in groups]
        try:
            path, client_state = original(load_dir, *args, **kwargs)
        except (ValueError, RuntimeError) as error:  # on every rank
            if not any(text in str(error) for text in OTHER_GROUPS):
                raise
            raise CheckpointError(
                f"ds_kfac: the optimizer state in {load_dir} has other parameter groups than this engine's "
                f"{type(self.engine.basic_optimizer).__name__}; KFACAdamW splits each group into "
                "layers, other matrices and all else, so no other optimizer's state fits it, nor its own another's, "
                f"nor that of other kfac.layers. {WEIGHTS_ALONE}"
            ) from error
        finally:
            for group, own in zip(self.engine.basic_optimizer.param_groups, marks, strict=True):
                group.update(own)
        entry = client_state.pop(CLIENT_KEY, None) if client_state else None
        # DeepSpeed's files decide; what lies in the folder may be of another save.
        self._check_one_save(load_dir, path is not None, entry)
        if path is None:
            return path, client_state
        tag_directory = Path(path).parent
        for argument, default in (("load_module_only", False), ("load_optimizer_states", True)):
            if bool(arguments.get(argument, default)) != default:
                self.job.reset()
                self._say(
                    f"{argument}={not default}: K-FAC starts afresh; engine.kfac.load_state loads the state of "
                    f"{tag_directory}"
                )
                return path, client_state
        self._check_groups(tag_directory, entry)
        if entry is None:
            self.job.reset()
            self._say(f"WARNING: {tag_directory} has no K-FAC state, K-FAC starts afresh: expect some steps to recover")
        else:
            self._load(tag_directory, entry)
        return path, client_state

    def _load(self, tag_directory: Path, entry: Mapping[str, Any]) -> None:
        try:
            if entry.get("save_id") is None:  # the same on every rank
                raise CheckpointError(
                    f"ds_kfac: {tag_directory} was saved without its K-FAC state, which could not be written:\n"
                    f"{entry.get('problem')}"
                )
            loading.load(self.job, tag_directory, entry["save_id"], entry.get("origin"))
        except CheckpointError as error:
            lost = "factors, eigenbases" + (
                " and moments of the K-FAC layers" if self.job.preconditioners[0].moments else ""
            )
            if self.job.preconditioners[0].config.checkpoint.on_missing == "fresh":
                self.job.reset()
                self._say(f"WARNING: {error}\nK-FAC starts afresh, without {lost}: expect some steps to recover")
                return
            raise CheckpointError(
                f"{error}\nDeepSpeed has loaded weights, optimizer and step. To continue with them and without {lost}, "
                f"set {FRESH}"
            ) from error
        self._check_files(tag_directory, entry["save_id"])
        self._say(f"loaded K-FAC state of step {self.job.preconditioners[0].steps} from {tag_directory}")

    def _groups(self) -> dict[str, int]:
        """Parameter -> the number of its group, where K-FAC's layers decide it; of pipeline stages, which have other
        parameters and one client_state, nothing."""
        if self.job.preconditioners[0].rule.optimizer_type is None or getattr(self.engine, "num_stages", 1) > 1:
            return {}
        names = {id(parameter): name for name, parameter in self.engine.module.named_parameters()}
        targets = [kfac.target for kfac in self.job.preconditioners]
        held = [layout for target in targets for layout in (target.layout, target.rest)]
        return {names[id(p)]: layout.group_index(p) for layout in held for p in layout.params}

    def _check_groups(self, tag_directory: Path, entry: Mapping[str, Any] | None) -> None:
        """DeepSpeed takes weights and moments by their place in a group, but for a universal checkpoint's.

        Raises:
            CheckpointError: on every rank, whatever ``on_missing``: they are another parameter's.
        """
        if self.engine.load_universal_checkpoint():
            return
        own, saved = self.groups, (entry or {}).get("groups", {})
        if moved := [name for name, group in own.items() if saved.get(name, group) != group]:
            named = ", ".join(moved[:3]) + (", .." if len(moved) > 3 else "")
            raise CheckpointError(
                f"ds_kfac: the optimizer state in {tag_directory} has {named} "
                "in other parameter groups: kfac.layers, or what K-FAC knows of the model, was another when it was "
                "saved. DeepSpeed takes it by place, so this engine's weights and moments are mixed up now: build "
                f"another one, with kfac.layers as they were. {WEIGHTS_ALONE}"
            )

    def _check_files(self, tag_directory: Path, save_id: str) -> None:
        """Of a save that did not reach its end, or another one over it.

        Raises:
            CheckpointError: on every rank: some of DeepSpeed's files are of an older save.
        """
        interrupted = loading.unfinished(tag_directory, save_id) if self.engine.global_rank == 0 else None
        headline = f"ds_kfac: the checkpoint in {tag_directory} is torn"
        with failing_together(headline, self.job.channel.group, CheckpointError) as problems:
            if interrupted and (older := loading.older_files(tag_directory, save_id)):
                problems.append(
                    f"{interrupted}: {', '.join(older)} belong to an earlier save, and were partly loaded. "
                    "Load another tag, and give every save its own tag"
                )
        if interrupted:
            self._say(
                f"WARNING: {interrupted}: if DeepSpeed was writing then, its files of this tag belong to two saves. "
                "Load another tag if there is one, and give every save its own tag"
            )

    def _check_one_save(self, load_dir: str, loaded: bool, entry: Mapping[str, Any] | None) -> None:
        """At stage 3 every rank has a client_state of its own: a save over an old one that was killed leaves both.

        Raises:
            CheckpointError: on every rank, whatever ``on_missing``: the weights themselves are of several saves.
        """
        if not loaded:
            mine = "nothing to load"
        elif entry is None:
            mine = "a save without K-FAC"
        else:
            mine = f"save {entry.get('save_id')} of step {entry.get('steps')}"
        everyone = gathered(mine, self.job.channel.group)
        if len(set(everyone)) > 1:
            whose = [
                f"{what}: rank {', '.join(str(rank) for rank, other in enumerate(everyone) if other == what)}"
                for what in dict.fromkeys(everyone)
            ]
            raise CheckpointError(
                f"ds_kfac: the checkpoint in {load_dir} is torn: the ranks loaded files of different "
                "saves, weights included:\n  " + "\n  ".join(whose) + "\nEither a save over "
                "an existing tag was not finished, or not all ranks see the same folder. Load another tag"
            )

    def _say(self, text: str) -> None:
        if self.engine.global_rank == 0:
            logger.warning(f"ds_kfac: {text}")
