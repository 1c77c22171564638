"""``ds_kfac.KFACAdamW``, the optimizer as an object, for whoever wants one before there is an engine.

What DeepSpeed steps has each parameter group in two (``optimizer.py``), which only a model's layers can tell. So this
one is replaced when ``deepspeed.initialize`` gets it, and from then on its groups are windows on their halves: a
scheduler that was made with it goes on working, with as many groups as it knows.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import torch

from ds_kfac.directions.kfac_adamw.optimizer import FLAG, MATRIX, NAME, OWN, PARAMS
from ds_kfac.directions.kfac_adamw.params import checked, checked_group

ORIGIN = "kfac_origin"
"""Key of a group that was split: the index of the one it came from."""
HIDDEN = ("params", FLAG, MATRIX)
"""What parts of a group do not have in common."""


class Group(dict[str, Any]):
    """A parameter group. Everything a dict can do goes through its first five methods, which see the groups that
    DeepSpeed steps as soon as there are some. Known by its class in optimizers that were made of another's groups, as
    Accelerate does with offload.

    Attributes:
        options: those of the optimizer that it was made for.
        taken: the optimizer that DeepSpeed steps, and which of its groups are parts of this one.
    """

    def __init__(self, values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        dict.__init__(self, values)
        self.options = options
        self.taken: tuple[Any, tuple[int, ...]] = (None, ())

    def _parts(self) -> list[dict[str, Any]]:
        """Where the values are; by number, as loading puts new groups into an optimizer."""
        optimizer, numbers = self.taken
        return [optimizer.param_groups[number] for number in numbers] or [self]

    def _changed(self, key: str) -> list[dict[str, Any]]:
        if self.taken[1] and key in HIDDEN:
            raise ValueError(f'{NAME}: "{key}" of a parameter group cannot change: a DeepSpeed engine steps it already')
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
    "__contains__", "__eq__", "clear", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values",
):  # fmt: skip
    setattr(Group, _name, getattr(MutableMapping, _name))  # dict's own would pass the five methods by


class KFACAdamW(torch.optim.Optimizer):
    """K-FAC's Adam for the layers' matrices and AdamW for all other parameters, as an optimizer to give to DeepSpeed:
    to ``ds_kfac.initialize`` or ``deepspeed.initialize``, from Lightning's ``configure_optimizers``, to Accelerate's
    ``prepare``, or to the Trainer as ``optimizer_cls_and_kwargs=(ds_kfac.KFACAdamW, {"lr": 1e-3})``. No "kfac" block is
    needed then; one in the DeepSpeed config has its say.

    Args:
        params: parameters or parameter groups, as of torch's AdamW.
        lr: rate of the layers' matrices; an AdamW's is a good first choice.
        adam_lr: rate of embeddings, norms and biases, and of heads as ``size.py`` says; matrices that K-FAC has no
            layer for have lr; None: 8 lr. Schedules change both alike.
        betas: as of torch's AdamW, like eps and weight_decay.
        torch_adam: step all other parameters by torch's AdamW where DeepSpeed's would have to be compiled.

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
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adam_lr": adam_lr}
        self.options = checked({**options, "torch_adam": torch_adam}, "KFACAdamW: ")
        super().__init__(params, {key: value for key, value in self.options.items() if key not in OWN})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Before ``deepspeed.initialize``.

        Raises:
            RuntimeError: after it: DeepSpeed's flat groups cannot grow.
            ValueError: the group has a wrong value, or one that it cannot have of its own.
        """
        if any(group.taken[1] for group in given_groups(self) or []):
            raise RuntimeError(
                f"{NAME}: a DeepSpeed engine steps this optimizer already: add groups before deepspeed.initialize"
            )
        super().add_param_group(Group(checked_group(param_group), self.options))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What its groups say, as the state has nothing else: moments are in an engine's checkpoint.

        Raises:
            ValueError: there are moments in it, or groups other than these.
        """
        if state_dict["state"]:
            raise ValueError(f"{NAME}: a state with moments of another optimizer: load them by engine.load_checkpoint")
        groups = self.param_groups
        super().load_state_dict(state_dict)  # checks, and puts new groups in place of these
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key not in HIDDEN})
        self.param_groups = groups

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "options": self.options}

    def step(self, closure: Any = None) -> NoReturn:
        raise RuntimeError(
            "KFACAdamW: only a DeepSpeed engine can step it: pass it to ds_kfac.initialize, or train with DeepSpeed "
            "(ZeRO stage 0 is enough)"
        )


def given_groups(optimizer: Any) -> list[Group] | None:
    """The groups of a :class:`KFACAdamW`, or of what has been made of them; None of any other optimizer."""
    groups = getattr(optimizer, "param_groups", None)
    return groups if groups and all(isinstance(group, Group) for group in groups) else None


def numbered(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """To be split."""
    return [{**group, ORIGIN: index} for index, group in enumerate(groups)]


def hand_over(groups: Iterable[Group], optimizer: torch.optim.Optimizer) -> None:
    """From now on the groups are those of what DeepSpeed steps, split from :func:`numbered` ones."""
    origins = [group.pop(ORIGIN) for group in optimizer.param_groups]
    for index, group in enumerate(groups):
        group.taken = optimizer, tuple(part for part, origin in enumerate(origins) if origin == index)
