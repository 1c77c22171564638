"""What the report, ``explain``, the logs and the estimate want to know about an update rule."""

from collections.abc import Mapping, Sequence
from typing import Any

from ds_kfac.config.keys import KFACConfig
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.plan import Plan
from ds_kfac.update.groups import in_order
from ds_kfac.update.rotation import AT_ONCE


class RuleFacts:
    """Facts about an update rule that no step needs.

    The defaults fit a rule that rotates each gradient into the eigenbasis and back, does little
    else that costs time, and treats all layers alike. A rule for which something else holds names a
    subclass in ``UpdateRule.facts``.

    Attributes:
        without_curvature: what happens to a layer that has no factors yet, in words.
        passes: number of times that a gradient worker reads or writes a whole gradient in a step,
            beyond what preconditioning takes.
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

    def others(self, optimizer: str, ratio: float, matrices: int) -> str:
        """Describe how parameters that belong to no layer are stepped.

        Args:
            optimizer: class name of the engine's innermost optimizer.
            ratio: see :meth:`rates`.
            matrices: number of elements of those parameters that are matrices.
        """
        return f"{optimizer}, along their own gradients"

    def choice(self, config: KFACConfig, layer: LayerSpec) -> str | None:
        """Describe how one layer is stepped; None if the rule treats all layers alike."""
        return None

    def idle(self, config: KFACConfig, layers: Sequence[LayerSpec]) -> list[str]:
        """Return the settings of ``UpdateRule.blocks`` that affect no layer."""
        return []

    # learning rates

    def ratio(self, ds_config: Mapping[str, Any]) -> float:
        """Return the ``ratio`` of :meth:`rates` from a DeepSpeed config. An optimizer has it as
        ``adam_ratio``."""
        return 1.0

    def rates(self, plan: Plan, ratio: float) -> dict[str, float]:
        """Map kinds of parameters to their learning rates, as multiples of the optimizer's ``lr``.
        Empty if all kinds have the same one.

        Args:
            ratio: learning rate of parameters that belong to no layer, as a multiple of ``lr``.
        """
        return {}

    # costs

    def flops(self, config: KFACConfig, layer: LayerSpec, *, half: bool = False) -> int:
        """Return the FLOPs of a step on a gradient worker, beyond those of preconditioning.

        Args:
            half: whether products that may run in 16 bits do.
        """
        return 0

    def kept(self, plan: Plan, layers: Sequence[LayerSpec], device: str) -> int:
        """Return the bytes that a gradient worker of these layers keeps between steps, beyond the
        layers' state and :meth:`workspace`.

        Args:
            device: type of the worker's device.
        """
        return 0

    def workspace(
        self, plan: Plan, groups: Sequence[Sequence[LayerSpec]]
    ) -> list[tuple[Sequence[LayerSpec], int]]:
        """Return one ``(layers, bytes)`` pair for each part of a worker's step, in the order of the
        step. The layers are those whose results are in memory at the same time; the bytes are what
        they need at most, their gradients in fp32 included.

        Args:
            groups: the worker's layers. Layers of one shape that are stepped in one batch form a
                group.
        """
        copies = 4  # the gradient in fp32; rotated; on the way back; and back
        return [
            (group, 4 * copies * sum(layer.numel for layer in group)) for group in in_order(groups)
        ]


def stepped_by_rows(group: Sequence[LayerSpec]) -> bool:
    """Whether the group is one large matrix whose rows no basis mixes, so that it is stepped some
    rows at a time."""
    layer = group[0]
    return (
        len(group) == 1 and layer.groups == 1 and layer.numel > AT_ONCE and layer.G.block in (0, 1)
    )
