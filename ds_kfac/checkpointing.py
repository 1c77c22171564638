"""What becomes of K-FAC when an engine saves and loads its checkpoints.

DeepSpeed's own save and load always happen. What goes wrong with K-FAC's part is said after them, on every rank.
"""

import inspect
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger

from ds_kfac import checkpoint
from ds_kfac.adamw import FLAG, KFACAdamWStep
from ds_kfac.agreement import failing_together
from ds_kfac.checkpoint_disk import CheckpointError
from ds_kfac.checkpoint_match import saved_names
from ds_kfac.checkpoint_names import check_names
from ds_kfac.job import Job

CLIENT_KEY = "ds_kfac"
"""Key in DeepSpeed's client_state that names the save; survives ds_to_universal, which does not copy the folder."""
FRESH = '"checkpoint": {"on_missing": "fresh"} in the "kfac" block'


def check_storage(engine: Any) -> None:
    """Refuse checkpoints in storage that each node has for itself. Collective.

    Raises:
        ValueError: the config asks for it, and there are several nodes.
    """
    if not engine.use_node_local_storage():
        return
    hosts = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(hosts, socket.gethostname())
    if len(set(hosts)) > 1:
        raise ValueError(
            'ds_kfac cannot attach to this engine:\n  "use_node_local_storage" on several nodes: K-FAC\'s state is '
            "spread over all ranks and is saved to one folder that all of them see; set it to false and save to a "
            "shared file system"
        )


class Checkpointing:
    """The wrappers of an engine's ``save_checkpoint`` and ``load_checkpoint``.

    Args:
        job: whose state is saved and loaded.

    Raises:
        ValueError: the layers cannot be saved under their names.
    """

    def __init__(self, engine: Any, job: Job) -> None:
        self.engine, self.job = engine, job
        check_names(name for kfac in job.optimizers for name in saved_names(kfac).values())

    def save(
        self, original: Callable[..., Any], save_dir: str, tag: Any = None, client_state: Any = None, *args, **kwargs
    ) -> Any:
        """Ours first, so that what DeepSpeed writes names a complete save; its own in any case.

        Raises:
            CheckpointError: on every rank, after DeepSpeed's save, if ours failed.
        """
        if not save_dir:
            return original(save_dir, tag, client_state or {}, *args, **kwargs)  # DeepSpeed says what is wrong
        tag = f"global_step{self.engine.global_steps}" if tag is None else str(tag)
        folder, problem = Path(save_dir) / tag, None
        told: dict[str, Any] = {"save_id": None, "steps": self.job.steps, "origin": str(folder.absolute())}
        header: dict[str, Any] = {}
        try:
            header = checkpoint.save(self.job, folder)
            told["save_id"] = header["save_id"]
        except CheckpointError as error:
            problem = told["problem"] = str(error)
        result = original(save_dir, tag, {**(client_state or {}), CLIENT_KEY: told}, *args, **kwargs)
        if problem is not None:
            raise CheckpointError(
                f"{problem}\nDeepSpeed's own checkpoint {folder} is complete; it loads with {FRESH}, K-FAC then starts "
                "afresh"
            )
        checkpoint.finish(self.job, folder, header)
        return result

    def load(self, original: Callable[..., Any], load_dir: str, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's load, then ours.

        Raises:
            CheckpointError: on every rank, after DeepSpeed's load: ranks have loaded different saves, or the K-FAC
                state is missing, damaged or of another model (with ``checkpoint.on_missing`` "error").
        """
        arguments = inspect.signature(original).bind(load_dir, *args, **kwargs).arguments
        with _own_flags(self.engine.basic_optimizer):
            path, client_state = original(load_dir, *args, **kwargs)
        told = client_state.pop(CLIENT_KEY, None) if client_state else None
        # DeepSpeed's files decide; what lies in the folder may be of another save.
        self._check_one_save(load_dir, path is not None, told)
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
        if told is None:
            self.job.reset()
            self._say(f"WARNING: {tag_directory} has no K-FAC state, K-FAC starts afresh: expect some steps to recover")
        else:
            self._load(tag_directory, told)
        return path, client_state

    def load_state(self, tag_directory: Path) -> None:
        """K-FAC's alone. Collective."""
        checkpoint.load(self.job, tag_directory)

    def _load(self, tag_directory: Path, told: Mapping[str, Any]) -> None:
        try:
            if told.get("save_id") is None:  # the same on every rank
                raise CheckpointError(
                    f"ds_kfac: {tag_directory} was saved without its K-FAC state, which could not be written:\n"
                    f"{told.get('problem')}"
                )
            checkpoint.load(self.job, tag_directory, told["save_id"], told.get("origin"))
        except CheckpointError as error:
            adam = isinstance(self.engine.basic_optimizer, KFACAdamWStep)
            lost = "factors, eigenbases" + (" and Adam's moments of the K-FAC layers" if adam else "")
            if self.job.optimizers[0].config.checkpoint.on_missing == "fresh":
                self.job.reset()
                self._say(f"WARNING: {error}\nK-FAC starts afresh, without {lost}: expect some steps to recover")
                return
            raise CheckpointError(
                f"{error}\nDeepSpeed has loaded weights, optimizer and step. To continue with them and without {lost}, "
                f"set {FRESH}"
            ) from error
        self._check_files(tag_directory, told["save_id"])
        self._say(f"loaded K-FAC state of step {self.job.steps} from {tag_directory}")

    def _check_files(self, tag_directory: Path, save_id: str) -> None:
        """Of a save that did not reach its end, or another one over it.

        Raises:
            CheckpointError: on every rank: some of DeepSpeed's files are of an older save.
        """
        interrupted = checkpoint.unfinished(tag_directory, save_id) if self.engine.global_rank == 0 else None
        headline = f"ds_kfac: the checkpoint in {tag_directory} is torn"
        with failing_together(headline, self.job.channel.group, CheckpointError) as problems:
            if interrupted and (older := checkpoint.older_files(tag_directory, save_id)):
                problems.append(
                    f"{interrupted}: {', '.join(older)} are of a save before it, and so is some of what was loaded. "
                    "Load another tag, and give every save a tag of its own"
                )
        if interrupted:
            self._say(
                f"WARNING: {interrupted}: if that was while DeepSpeed wrote, its files of this tag are of two saves. "
                "Load another tag if there is one, and do not save to one tag again and again"
            )

    def _check_one_save(self, load_dir: str, loaded: bool, told: Mapping[str, Any] | None) -> None:
        """At stage 3 every rank has a client_state of its own: a save over an old one that was killed leaves both.

        Raises:
            CheckpointError: on every rank, whatever ``on_missing``: the weights themselves are of several saves.
        """
        if not loaded:
            mine = "nothing to load"
        elif told is None:
            mine = "a save without K-FAC"
        else:
            mine = f"save {told.get('save_id')} of step {told.get('steps')}"
        everyone = [mine] * self.job.channel.world
        torch.distributed.all_gather_object(everyone, mine, group=self.job.channel.group)
        if len(set(everyone)) > 1:
            whose = [
                f"{what}: rank {', '.join(str(rank) for rank, other in enumerate(everyone) if other == what)}"
                for what in dict.fromkeys(everyone)
            ]
            raise CheckpointError(
                f"ds_kfac: the checkpoint in {load_dir} is torn: DeepSpeed's files of different ranks are of different "
                "saves, and so are the weights that were loaded:\n  " + "\n  ".join(whose) + "\nA save to a tag that "
                "was there already has not been finished, or not all ranks see the same folder. Load another tag"
            )

    def _say(self, text: str) -> None:
        if self.engine.global_rank == 0:
            logger.warning(f"ds_kfac: {text}")


class _own_flags:
    """Around a load: which parameter groups are K-FAC's is this engine's matter. A universal checkpoint's first group
    is copied over all others at stage 3, and their raw gradients would be stepped along as if they were directions."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer if isinstance(optimizer, KFACAdamWStep) else None

    def __enter__(self) -> None:
        if self.optimizer is not None:
            self.flags = [bool(group.get(FLAG)) for group in self.optimizer.param_groups]

    def __exit__(self, *_: Any) -> None:
        if self.optimizer is not None:
            for group, flag in zip(self.optimizer.param_groups, self.flags, strict=True):
                group[FLAG] = flag
