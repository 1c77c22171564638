"""KFACAdamW, the optimizer that DeepSpeed steps: AdamW, but for groups whose direction K-FAC has computed.

DeepSpeed only knows flat slices of parameters, in which matrices cannot be seen. So the parameter groups are split in
two before the engine exists: in groups marked :data:`FLAG` the gradient that arrives here is Adam's direction in the
eigenbasis (``adam_direction.py``), and only weight decay and learning rate are left to do, without any state. All
others get plain AdamW, by the class DeepSpeed would take for it.

A layer that a step did not use must not decay either, and in a flat slice layers cannot be seen. So it is told entry by
entry: where the direction is zero nothing happens, as it is also zero wherever DeepSpeed fills up what has no gradient.
A zero that is the direction of a layer in use, such as that of an input that was always zero, is a negative zero
(:func:`marked`): IEEE keeps the sign through every scale, cast and copy, and should one lose it, an entry without a
gradient does not decay.
"""

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import Tensor

NAME = "KFACAdamW"
"""In ``"optimizer": {"type": "KFACAdamW"}``."""
FLAG = "kfac"
"""Key of a parameter group whose parameters K-FAC preconditions."""
PARAMS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""Parameters of the optimizer block and what leaving one out means, as in AdamW; and "torch_adam"."""


def marked(direction: Tensor) -> Tensor:
    """A direction of a layer in use, all of whose entries decay."""
    return torch.where(direction == 0, -0.0, direction)


class KFACAdamWStep:
    """What the three classes below add to their Adam.

    Attributes:
        direction_scale: what undoes the scale at which a direction was put into the gradient; None while no K-FAC is
            attached.
    """

    direction_scale: Tensor | float | None = 1.0
    param_groups: list[dict[str, Any]]

    @torch.no_grad()
    def step(self, *arguments: Any, **keywords: Any) -> Any:
        """One step over ``param_groups``, of which DeepSpeed may present one at a time."""
        groups, loss = self.param_groups, None
        others = [group for group in groups if not group.get(FLAG)]
        if others:
            self.param_groups = others
            try:
                loss = super().step(*arguments, **keywords)  # type: ignore[misc]
            finally:
                self.param_groups = groups
        for group in groups:
            if group.get(FLAG):
                self._apply(group)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """With zeros where AdamW would have moments of K-FAC's groups: DeepSpeed's tools, ds_to_universal among them,
        ask for them. They are one zero each, expanded: 4 bytes in a file. The true moments are in K-FAC's own files."""
        saved = super().state_dict()  # type: ignore[misc]
        steps = (state["step"] for state in saved["state"].values() if "step" in state)
        step = next(steps, torch.zeros(()))  # one of several groups' may be asked for in place of all of theirs
        for group, packed in zip(self.param_groups, saved["param_groups"], strict=True):
            if group.get(FLAG):
                for parameter, index in zip(group["params"], packed["params"], strict=True):
                    zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                    saved["state"][index] = {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Without what :meth:`state_dict` has put in."""
        ours = {index for group in state_dict["param_groups"] if group.get(FLAG) for index in group["params"]}
        state = {index: value for index, value in state_dict["state"].items() if index not in ours}
        super().load_state_dict({**state_dict, "state": state})  # type: ignore[misc]

    def _apply(self, group: dict[str, Any]) -> None:
        scale = self.direction_scale
        if scale is None:
            raise RuntimeError(
                "KFACAdamW: K-FAC was detached from this engine, so nothing computes directions for its layers; build "
                "an engine with another optimizer to train on without it"
            )
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            # zeros that DeepSpeed has read from a universal checkpoint
            self.state.pop(parameter, None)  # type: ignore[attr-defined]
            if isinstance(scale, Tensor) and scale.device != parameter.device:  # offloaded
                scale = scale.to(parameter.device)
            direction = parameter.grad
            if group["weight_decay"]:
                in_use = (direction != 0) | torch.signbit(direction)
                parameter.mul_(torch.where(in_use, 1 - group["lr"] * group["weight_decay"], 1.0))
            parameter.sub_(direction.to(parameter.dtype) * (group["lr"] * scale))


class KFACAdamW(KFACAdamWStep, torch.optim.AdamW):
    """On torch's AdamW."""


class KFACFusedAdamW(KFACAdamWStep, FusedAdam):
    """On DeepSpeed's fused CUDA Adam."""


class KFACCPUAdamW(KFACAdamWStep, DeepSpeedCPUAdam):
    """On DeepSpeed's CPU Adam, for an offloaded optimizer."""


for _kind in (KFACAdamW, KFACFusedAdamW, KFACCPUAdamW):
    # ZeRO asks for the exact class; these keep to what it needs of one: groups, elementwise, state by parameter.
    if _kind not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(_kind)


def build(groups: list[dict[str, Any]], params: Mapping[str, Any], *, offload: bool) -> torch.optim.Optimizer:
    """The optimizer of an ``"optimizer": {"type": "KFACAdamW", "params": ...}`` block.

    Args:
        groups: parameter groups, K-FAC's marked by :data:`FLAG`.
        offload: whether DeepSpeed keeps the optimizer on the CPU.
    """
    options = {**PARAMS, **params}
    torch_adam = options.pop("torch_adam", False)
    options["betas"] = tuple(options["betas"])
    if offload and not torch_adam:
        return KFACCPUAdamW(groups, adamw_mode=True, **options)
    if get_accelerator().device_name() == "cuda" and not torch_adam:
        return KFACFusedAdamW(groups, adam_w_mode=True, **options)
    # DeepSpeed's fused Adam for other devices is compiled for minutes at its first use, and no faster
    return KFACAdamW(groups, **options)
