"""The optimizer that a DeepSpeed engine uses for KFACAdamW. It is AdamW, except for parameters
whose directions K-FAC has computed.

DeepSpeed's optimizers see flat slices of parameters, not matrices. So every parameter group is
split before the engine exists. In groups marked by :data:`FLAG`, the gradient is the finished
direction U (``direction.py``). For these groups the optimizer only computes

    W <- W - lr (U + weight_decay W)

and keeps no state. Plain AdamW updates all other groups, with the code of the class that DeepSpeed
would use for AdamW.

A layer that a step did not use must not decay, but a flat slice does not show which layers it
contains. So K-FAC sets two attributes. ``slices``, which is set once, maps parts of parameters to
layers. ``used``, which is set in every step, says which layers the step used.
"""

import difflib
import inspect
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from types import MappingProxyType, MethodType
from typing import Any, NamedTuple, NoReturn

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import Tensor

from ds_kfac.config.keys import DEFAULTS, NAME
from ds_kfac.log import warn

FLAG = "kfac"
"""Key of a parameter group. Its value is true if K-FAC preconditions the group's parameters."""
MATRIX = "kfac_matrix"
"""Key of a parameter group. Its value is true if the group has matrices that are in no K-FAC
layer, or biases of such matrices. AdamW updates these parameters with the learning rate lr."""
OWN = ("adam_lr", "torch_adam")
"""Parameters of the optimizer that AdamW does not have. adam_lr is the learning rate of embeddings,
norms and biases. The learning rate of heads is derived from it (``direction.py``). A schedule
multiplies lr and adam_lr by the same factor. torch_adam says whether torch's AdamW updates the
parameters outside of K-FAC layers."""
ADAM_RATIO = 8.0
"""adam_lr / lr if the user does not set adam_lr."""
PARAMS: dict[str, Any] = {name: value for name, value in DEFAULTS.items() if name not in OWN}
"""Dict from parameter name to default, for the parameters of the optimizer that AdamW also has."""
PARAMS["betas"] = tuple(PARAMS["betas"])

GROWS = (
    f"{NAME}: a DeepSpeed engine already uses this optimizer, so no parameter group can be added; "
    "add parameter groups before deepspeed.initialize"
)
APART = (
    "KFACAdamW has split a parameter group in several: K-FAC layers, other matrices, other "
    "parameters. These groups no longer have the same {key}: the values in optimizer.param_groups "
    "are {values}. If you do not intend this, set {key} in every group, not only in the first "
    "(docs/howto/troubleshoot.md)"
)
DETACHED = (
    "KFACAdamW: K-FAC was detached from this engine, so nothing computes steps for the K-FAC "
    "layers. To continue without K-FAC, build an engine with another optimizer"
)


class LayerSlice(NamedTuple):
    """The part of a parameter that belongs to one layer.

    Attributes:
        start: index of the first element.
        numel: number of elements.
        layer: index of the layer in :attr:`KFACAdamWStep.used`.
    """

    start: int
    numel: int
    layer: int


def no_state(key: str) -> NoReturn:
    """Raise ValueError. Called when DeepSpeed or the user reads or writes an optimizer state of a
    parameter of a K-FAC layer."""
    raise ValueError(
        f"{NAME}: this parameter has no {key!r} in the optimizer, because it belongs to a K-FAC "
        "layer. K-FAC keeps the layer's moments in the layer's eigenbasis, only on the rank that "
        "preconditions the layer, and saves them in checkpoints. Read or write states only of "
        f'parameters in groups whose "{FLAG}" is not true. To restart '
        "the layer with moments of zero, call optimizer.state.pop(parameter). "
        "optimizer.state.clear() does so for all parameters"
    )


class NoStates(dict[str, Any]):
    """Entry of a K-FAC parameter in ``optimizer.state``. AdamW would have moments there.

    If a program removes this entry, for example because a schedule restarts, the layer's moments
    are set to zero.
    """

    def __missing__(self, key: str) -> NoReturn:
        no_state(key)

    def __setitem__(self, key: str, value: Any) -> NoReturn:
        no_state(key)


def without_step_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of an optimizer's bound method ``step`` that does not run step hooks.

    torch adds hooks to the ``step`` of every class that was instantiated. If a class calls the
    ``step`` of its base class and both classes were instantiated, the hooks would run twice.
    """
    bound: Any = step
    defined = inspect.unwrap(bound.__func__, stop=lambda function: not hasattr(function, "hooked"))
    return MethodType(defined, bound.__self__)


def part_of(parameter: Tensor, start: int, numel: int) -> Tensor:
    """Return a view of ``numel`` elements of a parameter, from element ``start`` on.

    If the parameter is not contiguous, such as the weight of a channels_last convolution at stage
    0, the elements must form complete rows.
    """
    if parameter.is_contiguous():
        return parameter.view(-1).narrow(0, start, numel)
    row = parameter[0].numel()
    return parameter.narrow(0, start // row, numel // row)


class KFACAdamWStep:
    """Mixin of the three classes below. Their other base class is an Adam, to which the mixin adds
    the steps of K-FAC's layers.

    Attributes:
        slices: mapping from a parameter to its parts that belong to layers. The parameter may be a
            flat parameter that DeepSpeed made. A parameter without an entry does not decay. The
            mapping is empty until K-FAC is attached. Before that, DeepSpeed takes a step with zero
            gradients to allocate states, and this step must not decay weights. None after K-FAC was
            detached.
        used: fp32 [layers], 1 for each layer that the step uses, else 0. Must be set before each
            step.
        adam_ratio: adam_lr / lr. Parameter groups have no value of their own for adam_lr, because
            many of DeepSpeed's schedulers set a single learning rate for all groups.
        marked: parameters that had a :class:`NoStates` entry in ``state`` after the last step.
            Empty if a state has been loaded since.
        users: the user's optimizer, whose parameter groups are not split; None if there is none.
    """

    slices: Mapping[Tensor, Sequence[LayerSlice]] | None = MappingProxyType({})
    adam_ratio: float = 1.0
    marked: frozenset[Tensor] = frozenset()
    users: Any = None
    param_groups: list[dict[str, Any]]
    _has_warned = False
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
        """Update the parameters of the groups in ``param_groups``. DeepSpeed may put only one group
        at a time into this list."""
        preconditioned = [group for group in self.param_groups if group.get(FLAG)]
        others = [group for group in self.param_groups if not group.get(FLAG)]
        if preconditioned and self.slices is None:
            raise RuntimeError(DETACHED)
        loss = self._step_by_adam(others, *arguments, **keywords) if others else None
        for group in preconditioned:
            self._apply(group)
        return loss

    def _step_by_adam(self, groups: list[dict[str, Any]], *arguments: Any, **keywords: Any) -> Any:
        """Update these groups with the ``step`` of the base class. Matrices have the learning rate
        lr, and all other parameters have adam_lr."""
        presented = self.param_groups
        schedules = [(group["lr"], group["weight_decay"]) for group in groups]
        self.param_groups = groups
        try:
            for group, (rate, decay) in zip(groups, schedules, strict=True):
                ratio = 1.0 if group.get(MATRIX) else self.adam_ratio
                group["lr"] = rate * ratio
                # Adam decays by lr * weight_decay. Dividing the decay by the ratio makes all
                # parameters decay at the same rate. If the ratio is 0, the learning rate is 0, and
                # the parameters must not decay either.
                group["weight_decay"] = decay / ratio if ratio else 0.0
            return without_step_hooks(super().step)(*arguments, **keywords)  # type: ignore[misc]
        finally:
            self.param_groups = presented
            for group, (rate, decay) in zip(groups, schedules, strict=True):
                group["lr"] = rate
                group["weight_decay"] = decay

    def _apply(self, group: dict[str, Any]) -> None:
        """Update a parameter group of K-FAC's layers. Each ``.grad`` already holds the final
        direction, not the gradient."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            # this also replaces zeros that DeepSpeed has read from a universal checkpoint
            self.state[parameter] = NoStates()  # type: ignore[attr-defined]
        self.marked = self._marked_now()
        if not parameters:
            return
        self._decay(group, parameters)
        directions = [parameter.grad for parameter in parameters]
        rate = group["lr"]
        all_fp32 = all(parameter.dtype is torch.float32 for parameter in parameters)
        if all_fp32 and not isinstance(rate, Tensor):
            torch._foreach_add_(parameters, directions, alpha=-rate)
        else:
            # alpha cannot be a tensor, and on CPUs it is rounded to the parameters' dtype
            rates = [_vector(rate, parameters[0].device)] * len(parameters)
            torch._foreach_addcmul_(parameters, directions, rates, value=-1)

    def _marked_now(self) -> frozenset[Tensor]:
        """Return the parameters that have a :class:`NoStates` entry now."""
        states = self.state.items()  # type: ignore[attr-defined]
        return frozenset(parameter for parameter, state in states if type(state) is NoStates)

    def taken_away(self) -> frozenset[Tensor]:
        """Return the parameters whose :class:`NoStates` entry a program has removed since the last
        step."""
        return self.marked - self._marked_now()

    def _decay(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Decay the layers that the step uses: W <- (1 - lr weight_decay) W, as in AdamW."""
        amount = group["lr"] * group["weight_decay"]
        if not isinstance(amount, Tensor) and amount == 0:
            return
        assert self.slices is not None
        parts = []
        layers = []
        for parameter in parameters:
            for part in self.slices.get(parameter, ()):
                parts.append(part_of(parameter, part.start, part.numel))
                layers.append(part.layer)
        if not parts:
            return
        used = self._used_on(parameters[0].device)
        if isinstance(amount, Tensor):
            amount = _vector(amount, used.device)
        factors = torch.where(used > 0, 1 - amount, torch.ones_like(used)).split(1)
        torch._foreach_mul_(parts, [factors[layer] for layer in layers])

    def _used_on(self, device: torch.device) -> Tensor:
        """Return ``used`` on a device. Parameters may be offloaded to another device. The copy is
        made once for all groups of a step."""
        if device not in self._used_by_device:
            self._used_by_device[device] = self._used.to(device)
        return self._used_by_device[device]

    def check_parts(self, *, here: bool, groups: Sequence[Mapping[str, Any]]) -> None:
        """Warn once if groups that were split from one of the user's groups have different learning
        rates or weight decays. This happens if a program changes only ``param_groups[0]``, which
        had all parameters before the split.

        Args:
            here: whether this rank writes the warning.
            groups: all parameter groups. (``param_groups`` has only the group that DeepSpeed
                updates at the moment.)
        """
        if self._has_warned:
            return
        for users_group in getattr(self.users, "param_groups", ()):
            _, numbers = users_group.taken
            parts = [groups[number] for number in numbers]
            for key in ("lr", "weight_decay"):
                numeric = all(not isinstance(part[key], Tensor) for part in parts)
                if numeric and any(part[key] != parts[0][key] for part in parts):
                    self._has_warned = True
                    warn(APART.format(key=key, values=[group[key] for group in groups]), here=here)
                    return

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group that :func:`ds_kfac.directions.kfac_adamw.user_optimizer.split_groups` has
        made.

        Raises:
            RuntimeError: the group was added after the split. Even its matrices would have the
                learning rate adam_lr, and its gradients would not be clipped.
        """
        if FLAG not in param_group:
            raise RuntimeError(GROWS)
        super().add_param_group(param_group)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with zeros as moments of the parameters of K-FAC's layers.

        DeepSpeed's tools, such as ds_to_universal, expect moments of every parameter. Each of these
        moments is a single zero, expanded to the parameter's shape, and takes 4 bytes in a file.
        The files that K-FAC writes contain the real moments.
        """
        saved = super().state_dict()  # type: ignore[misc]
        steps = (state["step"] for state in saved["state"].values() if "step" in state)
        # DeepSpeed may read the step number of one parameter for all groups, so all parameters must
        # have the right number
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
        """Load a state, without the zeros that :meth:`state_dict` has added."""
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
    """Return a number as a tensor, fp32 [1]. CUDA would round a tensor without dimensions to the
    parameter's dtype, and a factor of 0.999 becomes 1 in bf16."""
    if isinstance(number, Tensor):
        return number.to(device, torch.float32).view(1)
    return torch.full((1,), number, dtype=torch.float32, device=device)


class KFACTorchAdamW(KFACAdamWStep, torch.optim.AdamW):
    """KFACAdamW, derived from torch's AdamW."""


class KFACFusedAdamW(KFACAdamWStep, FusedAdam):
    """KFACAdamW, derived from DeepSpeed's fused CUDA Adam."""


class KFACCPUAdamW(KFACAdamWStep, DeepSpeedCPUAdam):
    """KFACAdamW, derived from DeepSpeed's CPU Adam, for an offloaded optimizer."""


for _class in (KFACTorchAdamW, KFACFusedAdamW, KFACCPUAdamW):
    # ZeRO accepts only optimizers whose exact class is in this list. These classes meet its
    # conditions: they have parameter groups, update each element separately, and keep their state
    # by parameter.
    if _class not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(_class)


def build(groups: list[dict[str, Any]], params: Mapping[str, Any], *, offload: bool) -> Any:
    """Make the optimizer of an ``"optimizer": {"type": "KFACAdamW", "params": ...}`` block.

    Args:
        groups: parameter groups. Groups of K-FAC's layers are marked by :data:`FLAG`.
        params: the block's "params".
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
        # For other devices, DeepSpeed would compile its fused Adam at first use. This takes minutes
        # and makes steps no faster.
        optimizer = KFACTorchAdamW(groups, **options)
    optimizer.adam_ratio = ratio_of(params)
    return optimizer


def ratio_of(params: Mapping[str, Any]) -> float:
    """Return adam_lr / lr for the "params" of an optimizer block."""
    if params.get("adam_lr") is None:
        return ADAM_RATIO
    return params["adam_lr"] / params.get("lr", PARAMS["lr"])


def checked(given: Any, where: str) -> dict[str, Any]:
    """Check an optimizer's parameters, and return those whose value is neither null nor "auto".
    Numbers become floats, because torch's AdamW does not accept 0 in place of 0.0.

    Args:
        given: parameters of the optimizer, by name.
        where: text with which errors begin.

    Raises:
        ValueError: ``given`` is not an object, a name is unknown, or a value is wrong.
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
        expected = _expected(key, value)
        if expected is not None:
            raise ValueError(f"{where}{key}: got {reprlib.repr(value)}; must be {expected}")
    if "adam_lr" in params and params.get("lr") == 0:
        raise ValueError(
            f"{where}lr: got 0; must be above 0 if adam_lr is set, because schedules keep the "
            "ratio adam_lr / lr"
        )
    converters: dict[str, Any] = {
        "betas": lambda pair: tuple(map(float, pair)),
        "torch_adam": bool,
    }
    return {key: converters.get(key, float)(value) for key, value in params.items()}


def checked_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group, after :func:`checked` has checked and converted the values of all
    keys in :data:`PARAMS`. All other values are not changed.

    Raises:
        ValueError: a value is wrong, or a key can be set only for the whole optimizer.
    """
    for key in OWN:
        if key in group:
            raise ValueError(
                f"{NAME}: a parameter group cannot set {key}: set {key} for the whole optimizer. A "
                f"group can set only {', '.join(PARAMS)}. The group's adam_lr is scaled in "
                "proportion to the group's lr"
            )
    others = {key: value for key, value in group.items() if key not in PARAMS}
    values = {key: value for key, value in group.items() if key in PARAMS}
    return {**others, **checked(values, f"{NAME}: in a parameter group, ")}


def _expected(key: str, value: Any) -> str | None:
    """Return a text that says which values the parameter ``key`` may have, or None if ``value`` is
    one of them."""
    if key == "torch_adam":
        return None if isinstance(value, bool) else "true or false"
    if key == "betas":
        is_pair = isinstance(value, (list, tuple)) and len(value) == 2
        if is_pair and all(_is_number(x) and x < 1 for x in value):
            return None
        return "two numbers of at least 0 and below 1, such as [0.9, 0.95]"
    if _is_number(value):
        return None
    number = "a finite number of at least 0"
    return f"{number}, not a string" if isinstance(value, str) else number


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number of at least 0."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    return bool(0 <= value <= sys.float_info.max)  # type: ignore[operator]  # int of any size
