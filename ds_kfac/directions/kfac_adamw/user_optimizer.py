"""KFACAdamW where a user names it: in the config's "optimizer" block, or as an object.

DeepSpeed gets another optimizer in its place (``optimizer.py``), built before the engine, in which
every parameter group is split: preconditioned parameters, and the others. Only a model's layers
tell which is which.
"""

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import torch
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime import lr_schedules
from torch import nn
from torch.optim import lr_scheduler

from ds_kfac.directions.kfac_adamw.matrices import other_matrices
from ds_kfac.directions.kfac_adamw.optimizer import (
    FLAG,
    GROWS,
    MATRIX,
    NAME,
    OWN,
    PARAMS,
    build,
    checked,
    checked_group,
)
from ds_kfac.model.scan import LayerChoice, Scan, scan


def split_groups(
    model: nn.Module, scan: Scan, model_parameters: Iterable[Any] | None, *, frozen: bool = False
) -> list[dict[str, Any]]:
    """Split every parameter group in three: preconditioned parameters in layer order, with
    :data:`FLAG`; vectors; and matrices that are in no layer, and their biases, with :data:`MATRIX`.

    Args:
        model_parameters: what ``deepspeed.initialize`` takes: parameters or parameter groups; None
            for all.
        frozen: whether to keep groups that have nothing but frozen parameters, which may be trained
            later.

    A group of parameters without elements is left out: DeepSpeed drops them, and fails at a group
    without any. Returns parameter groups; options such as weight_decay are those of the group a
    parameter came from.
    """
    parameters = list(model.parameters() if model_parameters is None else model_parameters)
    groups = (
        parameters if parameters and isinstance(parameters[0], dict) else [{"params": parameters}]
    )
    named = dict(model.named_parameters())
    order = {
        id(named[name]): index
        for index, name in enumerate(name for layer in scan.layers for name in layer.parameters)
    }
    others = other_matrices(model, scan)
    others |= {bias for name in others if (bias := f"{name.removesuffix('weight')}bias") in named}
    matrices = {id(named[name]) for name in others if id(named[name]) not in order}
    split: list[dict[str, Any]] = []
    for group in groups:
        params = (
            [group["params"]]
            if isinstance(group["params"], nn.Parameter)
            else list(group["params"])
        )
        preconditioned = sorted((p for p in params if id(p) in order), key=lambda p: order[id(p)])
        vectors = [p for p in params if id(p) not in order and id(p) not in matrices]
        unclaimed = [p for p in params if id(p) in matrices]  # none of them is in a layer
        for part in (preconditioned, vectors, unclaimed):
            if any((frozen or p.requires_grad) and getattr(p, "ds_numel", p.numel()) for p in part):
                split.append(
                    {
                        **group,
                        "params": part,
                        FLAG: part is preconditioned,
                        MATRIX: part is unclaimed,
                    }
                )
    return split


def experts_apart(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups as DeepSpeed asks for them where a model has experts: the parameters of an
    expert-parallel group of ranks are in parameter groups of their own, which have its name. Where
    they are already, nothing changes."""
    if not any(
        is_moe_param(p) and not group.get("moe") for group in groups for p in group["params"]
    ):
        return groups
    named = [
        {**group, "name": group.get("name", f"group_{index}")} for index, group in enumerate(groups)
    ]
    return [
        group
        for group in split_params_into_different_moe_groups_for_optimizer(named)
        if group["params"]
    ]


# ``ds_kfac.KFACAdamW``, the optimizer as an object. It is replaced when ``deepspeed.initialize``
# gets it. From then on its groups read and write through to the groups that were split from them,
# so that a scheduler that was made with the object works on, and sees as many groups as it knows.


ORIGIN = "kfac_origin"
"""Key of a group that was split: the index of the one it came from."""
HIDDEN = ("params", FLAG, MATRIX)
"""What parts of a group do not have in common."""


class Group(dict[str, Any]):
    """A parameter group of the user's. As soon as an engine steps it, its values are those of the
    groups that were split from it: everything that a dict can do goes through its first five
    methods, which look there. Found by its class also in an optimizer that was made of another
    one's groups, as Accelerate does with offload.

    Attributes:
        options: those of the optimizer that it was made for.
        taken: the optimizer that DeepSpeed steps, and which of its groups were split from this one.
    """

    def __init__(self, values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        dict.__init__(self, values)
        self.options = options
        self.taken: tuple[Any, tuple[int, ...]] = (None, ())

    def _parts(self) -> list[dict[str, Any]]:
        """The groups that have the values. By number, since loading puts new groups into an
        optimizer."""
        optimizer, numbers = self.taken
        return [optimizer.param_groups[number] for number in numbers] or [self]

    def _changed(self, key: str) -> list[dict[str, Any]]:
        if self.taken[1] and key in HIDDEN:
            raise ValueError(
                f'{NAME}: "{key}" of a parameter group cannot change: a DeepSpeed engine steps it '
                f"already"
            )
        return self._parts()

    def __getitem__(self, key: str) -> Any:
        return dict.__getitem__(self if key in HIDDEN else self._parts()[0], key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key in OWN:
            checked_group({key: value})  # says why not
        for part in self._changed(key):
            dict.__setitem__(part, key, value)

    def __delitem__(self, key: str) -> None:
        for part in self._changed(key):
            dict.__delitem__(part, key)

    def __iter__(self) -> Iterator[str]:
        yield "params"
        yield from (key for key in dict.keys(self._parts()[0]) if key not in HIDDEN)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __or__(self, other: Any) -> dict[str, Any]:  # type: ignore[override]
        return {**self, **other}

    def __ior__(self, other: Any) -> "Group":  # type: ignore[override]
        self.update(other)
        return self

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A copy is one of the values: it is no part of an engine."""
        return Group, (dict(self), self.options)


for _name in (
    "__contains__",
    "__eq__",
    "clear",
    "get",
    "items",
    "keys",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "values",
):
    # dict's own would go past the five methods
    setattr(Group, _name, getattr(MutableMapping, _name))


class KFACAdamW(torch.optim.Optimizer):
    """K-FAC's Adam for the layers' matrices and AdamW for all other parameters, as an optimizer to
    give to DeepSpeed: to ``ds_kfac.initialize`` or ``deepspeed.initialize``, from Lightning's
    ``configure_optimizers``, to Accelerate's ``prepare``, or to the Trainer as
    ``optimizer_cls_and_kwargs=(ds_kfac.KFACAdamW, {"lr": 1e-3})``. No "kfac" block is needed then;
    one in the DeepSpeed config has its say.

    Args:
        params: parameters or parameter groups, as of torch's AdamW.
        lr: rate of the layers' matrices; an AdamW's is a good first choice.
        adam_lr: rate of embeddings, norms and biases, and of heads as ``direction.py`` says;
            matrices that K-FAC has no layer for have lr; None: 8 lr. Schedules change both alike.
        betas: as of torch's AdamW, like eps and weight_decay.
        torch_adam: step all other parameters by torch's AdamW where DeepSpeed's would have to be
            compiled.

    Raises:
        ValueError: a wrong value.
    """

    _opt_called = True  # a scheduler asks whether its optimizer has stepped; DeepSpeed's does

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = PARAMS["lr"],
        *,
        adam_lr: float | None = None,
        betas: tuple[float, float] = PARAMS["betas"],
        eps: float = PARAMS["eps"],
        weight_decay: float = PARAMS["weight_decay"],
        torch_adam: bool = False,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_lr": adam_lr,
        }
        self.options = checked({**options, "torch_adam": torch_adam}, "KFACAdamW: ")
        super().__init__(
            params, {key: value for key, value in self.options.items() if key not in OWN}
        )
        _MADE.add(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Before ``deepspeed.initialize``.

        Raises:
            RuntimeError: after it: DeepSpeed's flat groups cannot grow.
            ValueError: the group has a wrong value, or one that it cannot have of its own.
        """
        if any(group.taken[1] for group in given_groups(self) or []):
            raise RuntimeError(GROWS)
        super().add_param_group(Group(checked_group(param_group), self.options))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What its groups say, as the state has nothing else: moments are in an engine's
        checkpoint.

        Raises:
            ValueError: there are moments in it, or groups other than these.
        """
        if state_dict["state"]:
            raise ValueError(
                f"{NAME}: a state with moments of another optimizer: load them by "
                f"engine.load_checkpoint"
            )
        groups = self.param_groups
        super().load_state_dict(state_dict)  # checks, and puts new groups in place of these
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key not in HIDDEN})
        self.param_groups = groups

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "options": self.options}

    def step(self, closure: Any = None) -> NoReturn:
        raise RuntimeError(
            "KFACAdamW: only a DeepSpeed engine can step it: pass it to ds_kfac.initialize, or "
            "train with DeepSpeed "
            "(ZeRO stage 0 is enough)"
        )


_MADE: "weakref.WeakSet[KFACAdamW]" = weakref.WeakSet()


def unstepped(parameters: Iterable[Any]) -> int:
    """How many of these are in a :class:`KFACAdamW` that no engine has taken, if somebody still
    holds that."""
    ids = set(map(id, parameters))

    def count() -> int:
        groups = [
            group for made in _MADE for group in given_groups(made) or () if not group.taken[1]
        ]
        return len(ids & {id(parameter) for group in groups for parameter in group["params"]})

    if count():
        gc.collect()  # a scheduler and its optimizer hold each other
    return count()


def given_groups(optimizer: Any) -> list[Group] | None:
    """The groups of a :class:`KFACAdamW`, or of what has been made of them; None of any other
    optimizer."""
    groups = getattr(optimizer, "param_groups", None)
    return groups if groups and all(isinstance(group, Group) for group in groups) else None


def params_in(ds_config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The optimizer's parameters if the config asks for it, else None.

    Raises:
        ValueError: a misspelt name, which DeepSpeed would refuse without naming ours; an unknown
            parameter; an optimizer that is offloaded in part.
    """
    block = ds_config.get("optimizer")
    name = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or not isinstance(name, str):
        return None
    if name != NAME:
        if "kfac" in name.lower():
            raise ValueError(
                f'DeepSpeed config: optimizer.type "{name}" does not exist; did you mean "{NAME}"?'
            )
        return None
    _offloaded(ds_config)
    params = block.get("params")
    return checked({} if params is None else params, "DeepSpeed config: optimizer.params.")


def _offloaded(ds_config: Mapping[str, Any]) -> bool:
    """Whether the optimizer is offloaded. Raises ValueError if a part of it is."""
    zero = ds_config.get("zero_optimization") or {}
    offload = zero.get("offload_optimizer") or {}
    if (ratio := offload.get("ratio", 1.0)) < 1:
        raise ValueError(
            f"zero_optimization.offload_optimizer.ratio {ratio}: {NAME} cannot be offloaded in "
            f"part, DeepSpeed "
            "steps the rest with an AdamW of its own; leave ratio out"
        )
    return offload.get("device") in ("cpu", "nvme") or bool(zero.get("cpu_offload"))


def put_into(
    arguments: dict[str, Any],
    choice: LayerChoice,
    params: Mapping[str, Any] | None,
    ds_config: Mapping[str, Any],
) -> None:
    """Replace the arguments of ``deepspeed.initialize`` so that it takes our optimizer.

    Args:
        choice: of layers.
        params: of the config's optimizer block; None: the optimizer is an argument.

    Raises:
        ValueError: something else in the arguments or the config contradicts it.
    """
    offload, stage = (
        _offloaded(ds_config),
        (ds_config.get("zero_optimization") or {}).get("stage", 0),
    )
    # DeepSpeed's wrappers drop what was frozen at first for good, and fail at a group that has
    # nothing else
    wrapped = [(ds_config.get(key) or {}).get("enabled") for key in ("fp16", "bf16", "bfloat16")]
    if params is not None and arguments.get("optimizer") is not None:
        raise ValueError(
            f'optimizer.type "{NAME}" in the DeepSpeed config, and an optimizer= argument: '
            "choose one"
        )
    model, parameters = arguments["model"], arguments.get("model_parameters")
    is_object = given_groups(arguments.get("optimizer")) is not None
    with_users_groups(arguments, ds_config)

    def from_parameters(parameters: Iterable[Any] | None) -> torch.optim.Optimizer:
        return from_object(
            KFACAdamW(model.parameters() if parameters is None else parameters, **(params or {}))
        )

    def from_object(users: Any) -> torch.optim.Optimizer:
        """The optimizer that DeepSpeed steps, to which the user's groups write through."""
        theirs = given_groups(users) or []
        marked = [{**group, ORIGIN: index} for index, group in enumerate(theirs)]
        layers = scan(model, choice, optimized=[p for group in marked for p in group["params"]])
        parts = split_groups(model, layers, marked, frozen=not (stage or any(wrapped)))
        groups = experts_apart([checked_group(group) for group in parts])
        optimizer = build(groups, theirs[0].options, offload=offload)
        origins = [group.pop(ORIGIN) for group in optimizer.param_groups]
        for index, group in enumerate(theirs):
            group.taken = (
                optimizer,
                tuple(part for part, origin in enumerate(origins) if origin == index),
            )
        optimizer.users = users
        return optimizer

    # AutoEP replaces layers before DeepSpeed calls the optimizer's function
    if (ds_config.get("expert_parallel") or {}).get("enabled"):
        if is_object:
            raise ValueError(
                f"expert_parallel replaces layers after {NAME} was made: name it in the DeepSpeed "
                f"config instead, "
                f'"optimizer": {{"type": "{NAME}", ..}}'
            )
        arguments["optimizer"] = from_parameters
        arguments["model_parameters"] = list(
            model.parameters() if parameters is None else parameters
        )
        return
    arguments["optimizer"] = (
        from_object(arguments["optimizer"]) if is_object else from_parameters(parameters)
    )
    arguments["model_parameters"] = None


def with_users_groups(arguments: dict[str, Any], ds_config: Mapping[str, Any]) -> None:
    """Have DeepSpeed make its scheduler with the user's optimizer, not with ours: it may have a
    value or a function for each parameter group, as many as the user knows.

    Args:
        arguments: of ``deepspeed.initialize``; their ``lr_scheduler`` is replaced.
    """
    scheduler, block = arguments.get("lr_scheduler"), ds_config.get("scheduler")
    options = (block.get("params") or {}) if isinstance(block, Mapping) else {}
    if scheduler is None and any(isinstance(value, (list, tuple)) for value in options.values()):
        name = block["type"]  # type: ignore[index]

        def scheduler(optimizer: Any) -> Any:
            return getattr(lr_schedules if hasattr(lr_schedules, name) else lr_scheduler, name)(
                optimizer, **options
            )

    if callable(scheduler):
        arguments["lr_scheduler"] = lambda optimizer: scheduler(
            getattr(optimizer, "users", optimizer)
        )
