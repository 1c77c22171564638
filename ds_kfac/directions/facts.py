"""Descriptions and costs of an update rule, for the report, ``explain``, the logs and the
estimate."""

from collections.abc import Mapping, Sequence
from typing import Any

from ds_kfac.config.keys import KFACConfig
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.plan import Plan
from ds_kfac.update.groups import in_order
from ds_kfac.update.rotation import AT_ONCE


class RuleFacts:
    """Descriptions and costs of an update rule. No step needs them.

    The defaults are right for a rule that rotates each gradient into the eigenbasis and back, does
    little else that costs time, and treats all layers alike. For any other rule, set
    ``UpdateRule.facts`` to an object of a subclass.

    Attributes:
        without_curvature: clause that says what happens to a layer without curvature. Messages
            contain it.
        passes: number of times that a gradient worker (a rank that preconditions the layer) reads
            or writes a tensor of the gradient's size in a step, not counting the preconditioning.
    """

    without_curvature = "a layer keeps its raw gradient"
    passes = 0

    # in words

    def described(self, plan: Plan, optimizer: str, ratio: float = 1.0) -> str:
        """Describe the K-FAC part of a step.

        Args:
            optimizer: class name of the engine's innermost optimizer.
            ratio: see :meth:`rates`.
        """
        return f"the update rule's direction, applied by {optimizer}"

    def others(self, optimizer: str, ratio: float, matrices: str) -> str:
        """Describe how parameters that belong to no layer are updated.

        Args:
            optimizer: class name of the engine's innermost optimizer.
            ratio: see :meth:`rates`.
            matrices: names and sizes of the largest matrices among these parameters; empty if there
                are none.
        """
        return f"{optimizer}, along their own gradients"

    def choice(self, config: KFACConfig, layer: LayerSpec) -> str | None:
        """Describe how one layer is updated. Return None if the rule treats all layers alike."""
        return None

    def idle(self, config: KFACConfig, layers: Sequence[LayerSpec]) -> list[str]:
        """Return a text for each setting that has no effect. Only the config's blocks that are
        listed in ``UpdateRule.blocks`` are checked."""
        return []

    # learning rates

    def ratio(self, ds_config: Mapping[str, Any]) -> float:
        """Return the argument ``ratio`` of :meth:`rates` for a DeepSpeed config. It equals the
        optimizer's attribute ``adam_ratio``."""
        return 1.0

    def rates(self, plan: Plan, ratio: float) -> dict[str, float]:
        """Return a dict from a kind of parameters, such as "heads", to their learning rate as a
        multiple of the optimizer's ``lr``. The result is empty if all parameters have the same
        learning rate.

        Args:
            ratio: learning rate of parameters that belong to no layer, as a multiple of ``lr``.
        """
        return {}

    # costs

    def flops(self, config: KFACConfig, layer: LayerSpec, *, half: bool = False) -> int:
        """Return the FLOPs of a layer's step on a gradient worker, not counting the
        preconditioning.

        Args:
            half: whether the step uses 16 bits for all products that allow it.
        """
        return 0

    def kept(self, plan: Plan, layers: Sequence[LayerSpec], device: str) -> int:
        """Return the bytes that a gradient worker of these layers keeps between steps, in addition
        to the layers' state and :meth:`workspace`.

        Args:
            device: type of the worker's device.
        """
        return 0

    def workspace(
        self, plan: Plan, groups: Sequence[Sequence[LayerSpec]]
    ) -> list[tuple[Sequence[LayerSpec], int]]:
        """Return one ``(layers, bytes)`` pair for each part of a worker's step, in the order of the
        step. The layers of a pair are processed at the same time. The bytes are the peak memory of
        this part of the step, including the gradients in fp32.

        Args:
            groups: the worker's layers, in groups. The layers of a group have one shape and are
                processed in one batch.
        """
        copies = 4  # gradient; rotated gradient; one side rotated back; both rotated back
        return [
            (group, 4 * copies * sum(layer.numel for layer in group)) for group in in_order(groups)
        ]


def stepped_by_rows(group: Sequence[LayerSpec]) -> bool:
    """Whether the group is one large matrix of a layer whose G has no eigenvectors. Rotation does
    not mix the rows of such a matrix, so a few rows are processed at a time."""
    layer = group[0]
    return (
        len(group) == 1 and layer.groups == 1 and layer.numel > AT_ONCE and layer.G.block in (0, 1)
    )
