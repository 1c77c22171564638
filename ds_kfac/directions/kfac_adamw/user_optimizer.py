"""KFACAdamW as the user selects it: in the config's "optimizer" block, or as an object.

DeepSpeed gets another optimizer instead (``optimizer.py``), which is built before the engine. Each
of the user's parameter groups is split into several groups of this optimizer. A scan of the model
decides which parameters are preconditioned. These form a group of their own.
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

import ds_kfac_startup
from ds_kfac.directions.kfac_adamw.matrices import biases_of, other_matrices
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
    """Split every parameter group into three:

    - preconditioned parameters, in the order of the layers, marked by :data:`FLAG`;
    - other kinds of parameters, such as biases, norms and embeddings;
    - matrices that are in no layer, and their biases, marked by :data:`MATRIX`.

    A group is left out if all of its parameters are empty, because DeepSpeed drops empty parameters
    and fails if a group has no other parameters.

    Args:
        model_parameters: parameters or parameter groups, as for ``deepspeed.initialize``; None: all
            parameters of the model.
        frozen: whether to keep groups that have only frozen parameters, because these may be
            trained later.

    Returns parameter groups. Each has the options, such as weight_decay, of the group that it was
    split from.
    """
    groups = list(model.parameters() if model_parameters is None else model_parameters)
    if not groups or not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    named = dict(model.named_parameters())
    names_in_layers = [name for layer in scan.layers for name in layer.parameters]
    order = {named[name]: index for index, name in enumerate(names_in_layers)}
    other_names = other_matrices(model, scan)
    other_names |= biases_of(other_names, named)
    matrices = {named[name] for name in other_names} - order.keys()
    split: list[dict[str, Any]] = []
    for group in groups:
        params = group["params"]
        params = [params] if isinstance(params, nn.Parameter) else list(params)
        preconditioned = sorted((p for p in params if p in order), key=order.__getitem__)
        vectors = [p for p in params if p not in order and p not in matrices]
        unclaimed = [p for p in params if p in matrices]
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
    """Return the parameter groups as DeepSpeed needs them for a model with experts.

    Each expert-parallel group of ranks needs parameter groups of its own, which are named after it.
    If this is already so, the parameter groups are returned unchanged.
    """
    mixed = [p for group in groups if not group.get("moe") for p in group["params"]]
    if not any(is_moe_param(p) for p in mixed):
        return groups
    named = [
        {**group, "name": group.get("name", f"group_{index}")} for index, group in enumerate(groups)
    ]
    separated = split_params_into_different_moe_groups_for_optimizer(named)
    return [group for group in separated if group["params"]]


# Note: The user's optimizer object. ``deepspeed.initialize`` replaces a ``ds_kfac.KFACAdamW``
# object by another optimizer, but the user, or a scheduler that was made with the object, keeps
# using the object. So its parameter groups become views, which read and write the values of the
# groups that were split from them. The scheduler still sees as many groups as when it was made.


ORIGIN = "kfac_origin"
"""Key of a group that was split from a user's group. The value is the index of the user's group."""
HIDDEN = ("params", FLAG, MATRIX)
"""Keys whose values may differ between the groups that were split from one group."""


class Group(dict[str, Any]):
    """A parameter group of the user's optimizer.

    As soon as an engine uses the group, its values are read from, and written to, the groups that
    were split from it. ``__getitem__``, ``__setitem__``, ``__delitem__``, ``__iter__`` and
    ``__len__`` look up these groups, and all other methods of a dict use these five methods.

    The class also makes it possible to recognize the groups in another optimizer. For example,
    Accelerate with offload makes an optimizer from the groups of the user's optimizer.

    Attributes:
        options: options of the :class:`KFACAdamW` that the group was made for.
        taken: pair (the engine's optimizer, indices of the groups in it that were split from this
            group). ``(None, ())`` as long as no engine uses the group.
    """

    def __init__(self, values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        dict.__init__(self, values)
        self.options = options
        self.taken: tuple[Any, tuple[int, ...]] = (None, ())

    def _parts(self) -> list[dict[str, Any]]:
        """Return the groups that contain this group's values. They are looked up by index, because
        loading a state replaces the group objects of an optimizer."""
        optimizer, numbers = self.taken
        return [optimizer.param_groups[number] for number in numbers] or [self]

    def _parts_to_change(self, key: str) -> list[dict[str, Any]]:
        """Return the groups in which the value of a key must be set or deleted.

        Raises:
            ValueError: an engine uses the group, so that this value cannot change any more.
        """
        if self.taken[1] and key in HIDDEN:
            raise ValueError(
                f'{NAME}: "{key}" of a parameter group cannot change any more, because a DeepSpeed '
                "engine already uses the group"
            )
        return self._parts()

    def __getitem__(self, key: str) -> Any:
        return dict.__getitem__(self if key in HIDDEN else self._parts()[0], key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key in OWN:
            checked_group({key: value})  # raises an error that says why the key is not allowed
        for part in self._parts_to_change(key):
            dict.__setitem__(part, key, value)

    def __delitem__(self, key: str) -> None:
        for part in self._parts_to_change(key):
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
        """Copy or pickle only the values, because a copy does not belong to an engine."""
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
    # dict's implementations would not call the five methods that Group defines
    setattr(Group, _name, getattr(MutableMapping, _name))


class KFACAdamW(torch.optim.Optimizer):
    """Updates the layers' matrices by Adam in K-FAC's eigenbasis, and all other parameters by
    AdamW.

    Give this optimizer to DeepSpeed: pass it to ``ds_kfac.initialize`` or
    ``deepspeed.initialize``, return it from Lightning's ``configure_optimizers``, pass it to
    Accelerate's ``prepare``, or pass
    ``optimizer_cls_and_kwargs=(ds_kfac.KFACAdamW, {"lr": 1e-3})`` to the Trainer. The DeepSpeed
    config then needs no "kfac" block. If it has a "kfac" block, the block's settings apply.

    Args:
        params: parameters or parameter groups, as for torch's AdamW.
        lr: learning rate of the layers' matrices. AdamW's learning rate is a good first choice.
            Matrices that are in no K-FAC layer also have this learning rate.
        adam_lr: learning rate of embeddings, norms and biases; None: 8 times lr. The learning rate
            of heads is derived from it (``direction.py``). A schedule multiplies lr and adam_lr by
            the same factor.
        betas: as for torch's AdamW.
        eps: as for torch's AdamW.
        weight_decay: as for torch's AdamW.
        torch_adam: whether torch's AdamW, instead of DeepSpeed's, updates the parameters outside of
            K-FAC layers. Set it on a machine on which DeepSpeed's Adam would have to be compiled.

    Raises:
        ValueError: an argument has a wrong value.
    """

    # A scheduler warns if its optimizer's step() was not called. It is never called here, because
    # DeepSpeed calls step() of another optimizer.
    _opt_called = True

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
        """Add a parameter group. Call this before ``deepspeed.initialize``.

        Raises:
            RuntimeError: an engine already uses the groups, and DeepSpeed's flat groups cannot
                grow.
            ValueError: the group has a wrong value, or a key that can be set only for the whole
                optimizer.
        """
        if any(group.taken[1] for group in given_groups(self) or []):
            raise RuntimeError(GROWS)
        super().add_param_group(Group(checked_group(param_group), self.options))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the values of the parameter groups. A state of this optimizer has no moments,
        because moments are in the engine's checkpoint.

        Raises:
            ValueError: the state has moments, or its groups do not fit this optimizer's groups.
        """
        if state_dict["state"]:
            raise ValueError(
                f"{NAME}: the state dict has moments, which {NAME} never puts into a state dict, "
                f"so another optimizer saved it. engine.load_checkpoint loads {NAME}'s moments"
            )
        groups = self.param_groups
        super().load_state_dict(state_dict)  # checks the state and replaces the groups by new ones
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key not in HIDDEN})
        self.param_groups = groups

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "options": self.options}

    def step(self, closure: Any = None) -> NoReturn:
        raise RuntimeError(
            "KFACAdamW: only a DeepSpeed engine can step this optimizer: pass the optimizer to "
            "ds_kfac.initialize, or let your framework use DeepSpeed (ZeRO stage 0 is enough)"
        )


_MADE: "weakref.WeakSet[KFACAdamW]" = weakref.WeakSet()
"""All :class:`KFACAdamW` objects that still exist."""


def unstepped(parameters: Iterable[Any]) -> int:
    """Return how many of these parameters belong to a :class:`KFACAdamW` object that no engine
    uses. Objects that no longer exist do not count."""
    counted = set(parameters)

    def count() -> int:
        not_taken = [
            group for made in _MADE for group in given_groups(made) or () if not group.taken[1]
        ]
        return len(counted.intersection(p for group in not_taken for p in group["params"]))

    if count():
        gc.collect()  # a scheduler and its optimizer hold each other in a reference cycle
    return count()


def given_groups(optimizer: Any) -> list[Group] | None:
    """Return the groups of a :class:`KFACAdamW`, or of an optimizer that was made from such groups;
    None for any other optimizer."""
    groups = getattr(optimizer, "param_groups", None)
    return groups if groups and all(isinstance(group, Group) for group in groups) else None


def params_in(ds_config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the parameters of KFACAdamW if the config names this optimizer, else None.

    Raises:
        ValueError: the optimizer's name is misspelt (DeepSpeed's error would not suggest the right
            name), a parameter is unknown, or only a part of the optimizer is offloaded.
    """
    block = ds_config.get("optimizer")
    name = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or not isinstance(name, str):
        return None
    if name != NAME:
        if ds_kfac_startup.is_misspelt(name):
            raise ValueError(
                f'DeepSpeed config: optimizer.type "{name}" does not exist; did you mean "{NAME}"?'
            )
        return None
    _offloaded(ds_config)  # raises an error if only a part is offloaded
    params = block.get("params")
    return checked({} if params is None else params, "DeepSpeed config: optimizer.params.")


def _offloaded(ds_config: Mapping[str, Any]) -> bool:
    """Whether the config offloads the optimizer. Raise ValueError if it offloads only a part of the
    optimizer."""
    zero = ds_config.get("zero_optimization") or {}
    offload = zero.get("offload_optimizer") or {}
    ratio = offload.get("ratio", 1.0)
    if ratio < 1:
        raise ValueError(
            f"zero_optimization.offload_optimizer.ratio {ratio}: {NAME} cannot be offloaded in "
            "part, because DeepSpeed would use its own AdamW for the part that is not offloaded; "
            "remove ratio"
        )
    return offload.get("device") in ("cpu", "nvme") or bool(zero.get("cpu_offload"))


def put_into(
    arguments: dict[str, Any],
    choice: LayerChoice,
    params: Mapping[str, Any] | None,
    ds_config: Mapping[str, Any],
) -> None:
    """Replace arguments of ``deepspeed.initialize`` so that the engine uses our optimizer.

    Args:
        arguments: arguments of ``deepspeed.initialize``, which are changed in place.
        choice: decides which layers of the model are preconditioned.
        params: "params" of the config's optimizer block; None: the user has passed the optimizer as
            the argument ``optimizer``.

    Raises:
        ValueError: another argument or setting does not work with this optimizer.
    """
    offload = _offloaded(ds_config)
    stage = (ds_config.get("zero_optimization") or {}).get("stage", 0)
    # DeepSpeed's wrappers for ZeRO and for 16 bits never update a parameter that was frozen when
    # the wrapper was made, and they fail if a group has only frozen parameters
    in_16_bits = [(ds_config.get(key) or {}).get("enabled") for key in ("fp16", "bf16", "bfloat16")]
    keep_frozen = not (stage or any(in_16_bits))
    if params is not None and arguments.get("optimizer") is not None:
        raise ValueError(
            f'the DeepSpeed config has optimizer.type "{NAME}", and there is also an optimizer= '
            "argument: remove one of the two"
        )
    model = arguments["model"]
    parameters = arguments.get("model_parameters")
    is_object = given_groups(arguments.get("optimizer")) is not None
    with_users_groups(arguments, ds_config)

    def from_parameters(parameters: Iterable[Any] | None) -> torch.optim.Optimizer:
        return from_object(
            KFACAdamW(model.parameters() if parameters is None else parameters, **(params or {}))
        )

    def from_object(users: Any) -> torch.optim.Optimizer:
        """Return the optimizer that DeepSpeed uses, and connect the user's groups to it."""
        users_groups = given_groups(users) or []
        marked = [{**group, ORIGIN: index} for index, group in enumerate(users_groups)]
        layers = scan(model, choice, optimized=[p for group in marked for p in group["params"]])
        parts = split_groups(model, layers, marked, frozen=keep_frozen)
        groups = experts_apart([checked_group(group) for group in parts])
        optimizer = build(groups, users_groups[0].options, offload=offload)
        origins = [group.pop(ORIGIN) for group in optimizer.param_groups]
        for index, group in enumerate(users_groups):
            part_numbers = tuple(part for part, origin in enumerate(origins) if origin == index)
            group.taken = optimizer, part_numbers
        optimizer.users = users
        return optimizer

    if (ds_config.get("expert_parallel") or {}).get("enabled"):
        # AutoEP replaces layers, and the groups must be split after that. If the optimizer is a
        # function, DeepSpeed calls the function late enough.
        if is_object:
            raise ValueError(
                f"expert_parallel replaces layers after your {NAME} object was made: pass no "
                "optimizer object, and set "
                f'"optimizer": {{"type": "{NAME}", ..}} in the DeepSpeed config'
            )
        if parameters is None:
            parameters = model.parameters()
        arguments["optimizer"] = from_parameters
        arguments["model_parameters"] = list(parameters)
        return
    if is_object:
        arguments["optimizer"] = from_object(arguments["optimizer"])
    else:
        arguments["optimizer"] = from_parameters(parameters)
    arguments["model_parameters"] = None


def with_users_groups(arguments: dict[str, Any], ds_config: Mapping[str, Any]) -> None:
    """Make DeepSpeed create its scheduler with the user's optimizer, not with ours.

    A scheduler may have a list with a value or a function for each of the user's parameter groups.
    Our optimizer has more groups.

    Args:
        arguments: arguments of ``deepspeed.initialize``, in which ``lr_scheduler`` is replaced.
    """
    scheduler = arguments.get("lr_scheduler")
    block = ds_config.get("scheduler")
    options = (block.get("params") or {}) if isinstance(block, Mapping) else {}
    has_value_per_group = any(isinstance(value, (list, tuple)) for value in options.values())
    if scheduler is None and has_value_per_group:
        name = block["type"]  # type: ignore[index]
        module = lr_schedules if hasattr(lr_schedules, name) else lr_scheduler

        def scheduler(optimizer: Any) -> Any:
            return getattr(module, name)(optimizer, **options)

    if callable(scheduler):
        arguments["lr_scheduler"] = lambda optimizer: scheduler(
            getattr(optimizer, "users", optimizer)
        )
