"""KFACAdamW, the optimizer that DeepSpeed steps: AdamW, but for parameters whose direction K-FAC
has computed.

DeepSpeed's optimizers see flat slices of parameters, no matrices. So every parameter group is split
before the engine exists. In groups marked :data:`FLAG` the gradient that arrives here is the
finished direction U (``direction.py``), and

    W <- W - lr (U + weight_decay W)

is left to do, without any state. All others get plain AdamW, by the class that DeepSpeed would take
for it.

A layer that a step did not use must not decay, and a flat slice does not show layers. So K-FAC says
once which part of a parameter belongs to which layer (``slices``), and in every step which layers
were used (``used``).
"""

import difflib
import inspect
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from types import MappingProxyType, MethodType
from typing import Any, NoReturn

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import Tensor

from ds_kfac.config.keys import DEFAULTS, NAME
from ds_kfac.log import warn

FLAG = "kfac"
"""Key of a parameter group whose parameters K-FAC preconditions."""
MATRIX = "kfac_matrix"
"""Key of a parameter group of matrices that K-FAC has no layer for, and of their biases: AdamW
steps them at lr."""
OWN = ("adam_lr", "torch_adam")
"""adam_lr: the rate of embeddings, norms and biases, and of heads as ``direction.py`` says, which
also says what it is when left out; schedules change both alike. torch_adam: whether torch's AdamW
steps what K-FAC does not."""
ADAM_RATIO = 8.0
"""adam_lr / lr where adam_lr is left out."""
PARAMS: dict[str, Any] = {name: value for name, value in DEFAULTS.items() if name not in OWN}
"""The other parameters of the optimizer block and what leaving one out means, as in AdamW."""
PARAMS["betas"] = tuple(PARAMS["betas"])

GROWS = (
    f"{NAME}: a DeepSpeed engine steps this optimizer already: add groups before "
    f"deepspeed.initialize"
)
APART = (
    "KFACAdamW has split a parameter group in several: layers, other matrices, other parameters. "
    "Their {key} is not one any more, by optimizer.param_groups it is {values}. If that is not "
    "meant, set it for every "
    "group, not only for the first (docs/howto/troubleshoot.md)"
)
DETACHED = (
    "KFACAdamW: K-FAC was detached from this engine, so nothing computes directions for its "
    "layers; build "
    "an engine with another optimizer to train on without it"
)


def no_state(key: str) -> NoReturn:
    """Raise ValueError where DeepSpeed looks for a state of K-FAC's parameters."""
    raise ValueError(
        f"{NAME}: there is no {key!r} of this parameter as DeepSpeed would have it: a K-FAC "
        f"layer's moments are in its "
        f"eigenbasis, on the layer's gradient worker alone. Checkpoints have them. Ask for states "
        f"of other parameters "
        f'only: those of parameter groups whose "{FLAG}" is not true. To begin anew with moments '
        f"of zero, as after a "
        "restart, take the state away: optimizer.state.clear(), or optimizer.state.pop(parameter)"
    )


class NoStates(dict[str, Any]):
    """In ``optimizer.state``, where AdamW would have moments. Where a program takes one away, as to
    begin anew after a restart of a schedule, the layer's moments begin at zero."""

    def __missing__(self, key: str) -> NoReturn:
        no_state(key)

    def __setitem__(self, key: str, value: Any) -> NoReturn:
        no_state(key)


def without_step_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer's bound ``step`` as its class defines it, without running step hooks.

    torch puts the hooks into the ``step`` of each class of which an instance was made. Where a
    class calls the ``step`` of the class that it is derived from, they would run twice as soon as
    the process has made one of those, too.
    """
    bound: Any = step
    defined = inspect.unwrap(bound.__func__, stop=lambda function: not hasattr(function, "hooked"))
    return MethodType(defined, bound.__self__)


def part_of(parameter: Tensor, start: int, numel: int) -> Tensor:
    """Return a view of ``numel`` elements of a parameter, from element ``start`` on.

    Of a parameter that is stored in another order than its shape, such as a channels_last
    convolution's at stage 0, they must be whole rows.
    """
    if parameter.is_contiguous():
        return parameter.view(-1).narrow(0, start, numel)
    row = parameter[0].numel()
    return parameter.narrow(0, start // row, numel // row)


class KFACAdamWStep:
    """What the three classes below add to their Adam.

    Attributes:
        slices: the layers of a parameter that is stepped, which may be flat: id(parameter) ->
            (start, numel, layer) for each part, in elements. A parameter that is not there does not
            decay. Empty before K-FAC is attached, when DeepSpeed steps with zeros to allocate
            states; None once it was detached.
        used: fp32 [layers], 1 where a step uses the layer, else 0. Set it anew before each step.
        adam_ratio: adam_lr / lr. Groups have no adam_lr, since many of DeepSpeed's schedulers set
            one rate for all.
        marked: ids of the parameters that had :class:`NoStates` after the last step; none after a
            load.
        users: the optimizer with the groups as the user knows them.
    """

    slices: Mapping[int, Sequence[tuple[int, int, int]]] | None = MappingProxyType({})
    adam_ratio: float = 1.0
    marked: frozenset[int] = frozenset()
    users: Any = None
    param_groups: list[dict[str, Any]]
    _told = False
    _used = torch.zeros(0, device="cpu", dtype=torch.float32)
    _used_by_device: dict[torch.device, Tensor]

    @property
    def used(self) -> Tensor:
        return self._used

    @used.setter
    def used(self, used: Tensor) -> None:
        self._used = used
        self._used_by_device = {used.device: used}

    @torch.no_grad()
    def step(self, *arguments: Any, **keywords: Any) -> Any:
        """Step ``param_groups``, of which DeepSpeed may present one at a time."""
        preconditioned = [group for group in self.param_groups if group.get(FLAG)]
        others = [group for group in self.param_groups if not group.get(FLAG)]
        if preconditioned and self.slices is None:
            raise RuntimeError(DETACHED)
        loss = self._step_by_adam(others, *arguments, **keywords) if others else None
        for group in preconditioned:
            self._apply(group)
        return loss

    def _step_by_adam(self, groups: list[dict[str, Any]], *arguments: Any, **keywords: Any) -> Any:
        """Step these groups by the class that ours is made of: matrices at lr, all else at
        adam_lr."""
        presented = self.param_groups
        schedules = [(group["lr"], group["weight_decay"]) for group in groups]
        self.param_groups = groups
        try:
            for group, (rate, decay) in zip(groups, schedules, strict=True):
                ratio = 1.0 if group.get(MATRIX) else self.adam_ratio
                group["lr"] = rate * ratio
                # parameters decay alike, by lr and weight_decay, whatever their rate; without a
                # rate they stand still
                group["weight_decay"] = decay / ratio if ratio else 0.0
            return without_step_hooks(super().step)(*arguments, **keywords)  # type: ignore[misc]
        finally:
            self.param_groups = presented
            for group, (rate, decay) in zip(groups, schedules, strict=True):
                group["lr"] = rate
                group["weight_decay"] = decay

    def _apply(self, group: dict[str, Any]) -> None:
        """Step a group of K-FAC's along the directions that its gradients are."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            # also in place of zeros that DeepSpeed has read from a universal checkpoint
            self.state[parameter] = NoStates()  # type: ignore[attr-defined]
        self.marked = self._marked_now()
        if not parameters:
            return
        self._decay(group, parameters)
        directions = [parameter.grad for parameter in parameters]
        rate = group["lr"]
        if not isinstance(rate, Tensor) and all(
            parameter.dtype is torch.float32 for parameter in parameters
        ):
            torch._foreach_add_(parameters, directions, alpha=-rate)
        else:  # alpha is a number, and on CPUs one in the parameters' dtype
            rates = [_vector(rate, parameters[0].device)] * len(parameters)
            torch._foreach_addcmul_(parameters, directions, rates, value=-1)

    def _marked_now(self) -> frozenset[int]:
        states = self.state.items()  # type: ignore[attr-defined]
        return frozenset(id(parameter) for parameter, state in states if type(state) is NoStates)

    def taken_away(self) -> frozenset[int]:
        """Return the ids of the parameters whose :class:`NoStates` a program has taken away since
        the last step."""
        return self.marked - self._marked_now()

    def _decay(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Decay the parts of layers in use as AdamW does, W <- (1 - lr weight_decay) W."""
        amount = group["lr"] * group["weight_decay"]
        if not isinstance(amount, Tensor) and amount == 0:
            return
        assert self.slices is not None
        parts = []
        layers = []
        for parameter in parameters:
            for start, numel, layer in self.slices.get(id(parameter), ()):
                parts.append(part_of(parameter, start, numel))
                layers.append(layer)
        if not parts:
            return
        used = self._used_on(parameters[0].device)
        if isinstance(amount, Tensor):
            amount = _vector(amount, used.device)
        factors = torch.where(used > 0, 1 - amount, torch.ones_like(used)).split(1)
        torch._foreach_mul_(parts, [factors[layer] for layer in layers])

    def _used_on(self, device: torch.device) -> Tensor:
        """Return ``used`` on the device of parameters, which may be offloaded. It is moved once for
        all groups of a step."""
        if device not in self._used_by_device:
            self._used_by_device[device] = self._used.to(device)
        return self._used_by_device[device]

    def check_parts(self, *, here: bool, groups: Sequence[Mapping[str, Any]]) -> None:
        """Warn once if parts of one of the user's groups have come to have different rates, as by a
        program that sets those of ``param_groups[0]``, which were all parameters' before the split.

        Args:
            here: whether this rank is the one that says it.
            groups: all parameter groups; ``param_groups`` are those that DeepSpeed presents, one at
                a time.
        """
        if self._told:
            return
        for users_group in getattr(self.users, "param_groups", ()):
            _, numbers = users_group.taken
            parts = [groups[number] for number in numbers]
            for key in ("lr", "weight_decay"):
                numeric = all(not isinstance(part[key], Tensor) for part in parts)
                if numeric and any(part[key] != parts[0][key] for part in parts):
                    self._told = True
                    warn(APART.format(key=key, values=[group[key] for group in groups]), here=here)
                    return

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Of those that were split alone: another would be stepped at adam_lr, matrices too, and
        not clipped."""
        if FLAG not in param_group:
            raise RuntimeError(GROWS)
        super().add_param_group(param_group)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """With zeros where AdamW would have moments of K-FAC's groups: DeepSpeed's tools,
        ds_to_universal among them, ask for them. They are one zero each, expanded: 4 bytes in a
        file. The true moments are in K-FAC's own files."""
        saved = super().state_dict()  # type: ignore[misc]
        steps = (state["step"] for state in saved["state"].values() if "step" in state)
        # one of several groups' may be asked for in place of all of theirs
        step = next(steps, torch.zeros((), dtype=torch.float32, device="cpu"))
        for group, packed in zip(self.param_groups, saved["param_groups"], strict=True):
            if group.get(FLAG):
                for parameter, index in zip(group["params"], packed["params"], strict=True):
                    zeros = torch.zeros((), dtype=parameter.dtype, device="cpu").expand(
                        parameter.shape
                    )
                    saved["state"][index] = {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Without what :meth:`state_dict` has put in."""
        ours = {
            index
            for group in state_dict["param_groups"]
            if group.get(FLAG)
            for index in group["params"]
        }
        state = {index: value for index, value in state_dict["state"].items() if index not in ours}
        super().load_state_dict({**state_dict, "state": state})  # type: ignore[misc]
        self.marked = frozenset()


def _vector(number: Tensor | float, device: torch.device) -> Tensor:
    """Return a number as fp32 of shape [1]. With a tensor without dimensions CUDA would compute in
    the parameter's dtype: in bf16 a factor of 0.999 is 1."""
    if isinstance(number, Tensor):
        return number.to(device, torch.float32).view(1)
    return torch.full((1,), number, dtype=torch.float32, device=device)


class KFACTorchAdamW(KFACAdamWStep, torch.optim.AdamW):
    """On torch's AdamW."""


class KFACFusedAdamW(KFACAdamWStep, FusedAdam):
    """On DeepSpeed's fused CUDA Adam."""


class KFACCPUAdamW(KFACAdamWStep, DeepSpeedCPUAdam):
    """On DeepSpeed's CPU Adam, for an offloaded optimizer."""


for _kind in (KFACTorchAdamW, KFACFusedAdamW, KFACCPUAdamW):
    # ZeRO asks for the exact class; these keep to what it needs of one: groups, elementwise, state
    # by parameter.
    if _kind not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(_kind)


def build(groups: list[dict[str, Any]], params: Mapping[str, Any], *, offload: bool) -> Any:
    """The optimizer of an ``"optimizer": {"type": "KFACAdamW", "params": ...}`` block.

    Args:
        groups: parameter groups, K-FAC's marked by :data:`FLAG`.
        offload: whether DeepSpeed keeps the optimizer on the CPU.
    """
    options = {**PARAMS, **params}
    torch_adam = options.pop("torch_adam", False)
    options.pop("adam_lr", None)
    options["betas"] = tuple(options["betas"])
    optimizer: KFACAdamWStep
    if offload and not torch_adam:
        optimizer = KFACCPUAdamW(groups, adamw_mode=True, **options)
    elif get_accelerator().device_name() == "cuda" and not torch_adam:
        optimizer = KFACFusedAdamW(groups, adam_w_mode=True, **options)
    else:
        # DeepSpeed's fused Adam for other devices is compiled for minutes at its first use, and no
        # faster
        optimizer = KFACTorchAdamW(groups, **options)
    optimizer.adam_ratio = ratio_of(params)
    return optimizer


def ratio_of(params: Mapping[str, Any]) -> float:
    """adam_lr / lr of an optimizer block's parameters."""
    return (
        params["adam_lr"] / params.get("lr", PARAMS["lr"])
        if params.get("adam_lr") is not None
        else ADAM_RATIO
    )


def checked(given: Any, where: str) -> dict[str, Any]:
    """Those that are not left open by null or "auto"; numbers as float, because torch's AdamW takes
    no 0 for 0.0.

    Args:
        where: what the errors begin with.

    Raises:
        ValueError: not an object, an unknown name, or a wrong value.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{where.rstrip('.')}: got {given!r}; must be an object")
    params = {key: value for key, value in given.items() if value is not None and value != "auto"}
    names = [*PARAMS, *OWN]
    for key, value in params.items():
        if key not in names:
            close = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"valid: {', '.join(names)}"
            raise ValueError(f"{where}{key}: {NAME} has no such parameter; {hint}")
        if wrong := _wrong(key, value):
            raise ValueError(f"{where}{key}: got {reprlib.repr(value)}; must be {wrong}")
    if "adam_lr" in params and params.get("lr") == 0:
        raise ValueError(
            f"{where}lr: got 0; must be above 0 with adam_lr, whose ratio to it schedules keep"
        )
    kinds: dict[str, Any] = {"betas": lambda pair: tuple(map(float, pair)), "torch_adam": bool}
    return {key: kinds.get(key, float)(value) for key, value in params.items()}


def checked_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group, its own values of :data:`PARAMS` as :func:`checked` leaves them, all else
    as it is.

    Raises:
        ValueError: a wrong value, or one that only a whole optimizer has.
    """
    for key in OWN:
        if key in group:
            raise ValueError(
                f"{NAME}: {key} in a parameter group: it is the whole optimizer's, as are all but "
                f"{', '.join(PARAMS)}; "
                "the group's lr scales both of its rates"
            )
    others = {key: value for key, value in group.items() if key not in PARAMS}
    values = {key: value for key, value in group.items() if key in PARAMS}
    return {**others, **checked(values, f"{NAME}: in a parameter group, ")}


def _wrong(key: str, value: Any) -> str | None:
    """What a parameter must be, if it is not."""
    if key == "torch_adam":
        return None if isinstance(value, bool) else "true or false"
    if key == "betas":
        fits = (
            isinstance(value, (list, tuple))
            and len(value) == 2
            and all(_number(x) and x < 1 for x in value)
        )
        return None if fits else "two numbers of at least 0 and below 1, such as [0.9, 0.95]"
    return None if _number(value) else "a number of at least 0, finite, no string"


def _number(value: Any) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    return bool(0 <= value <= sys.float_info.max)  # type: ignore[operator]  # int of any size
