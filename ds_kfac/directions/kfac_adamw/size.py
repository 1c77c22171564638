"""Which layers' directions KFACAdamW orthogonalizes, and how large its steps are, in units of the learning rate.

Singular values of an orthogonalized step are, on average, SIZE sqrt(longer side / shorter side): what a step changes in
an output is then the same at every width (Yang et al. 2023, arXiv:2310.17813, who have sqrt(O / I), which is too little
for O < I, as is Muon's sqrt(max(1, O / I)): docs/tuning.md).

What keeps Adam's direction, norms and heads, has the rate adam_lr. Of that a head's is the part BASE / I,
but at least lr: Adam's direction grows with the width, too.
"""

import math

from ds_kfac.config.keys import AdamConfig
from ds_kfac.model.blocks import named
from ds_kfac.model.layers import LayerSpec

SIZE = 27.0
"""Measured with gpt_small (benchmarks/convergence), of width 128, at AdamW's best rate."""
BASE = 128
"""That width."""
ADAM_RATIO = 8.0
"""adam_lr / lr where adam_lr is left out."""


def keeps_direction(options: AdamConfig, layer: LayerSpec) -> str | None:
    """Why a layer keeps Adam's direction; None if it is orthogonalized: of a tensor-parallel layer every shard by
    itself, of one in groups every group, so that a step has the same size per entry as that of a whole layer."""
    if layer.keeps_direction is not None:
        return layer.keeps_direction
    module = layer.module
    pattern = next((pattern for pattern in options.except_layers if named(pattern, module)), None)
    return pattern and f"kfac.adam.except_layers {pattern!r}"


def step_norm(layer: LayerSpec, rows: int | None = None) -> float:
    """Frobenius norm, in SIZE, of an orthogonalized step of a layer's matrix, of that of one of its groups, or of a
    block of so many ``rows`` of it. Of a tensor-parallel shard it is the shard's part of the whole layer's."""
    O, I = layer.whole_shape[-2:]  # noqa: E741
    O = O if rows is None else rows * layer.cut[0]  # noqa: E741
    return (max(O, I) / math.prod(layer.cut)) ** 0.5


def adam_factor(options: AdamConfig, layer: LayerSpec, ratio: float) -> float:
    """What multiplies the direction of a layer that keeps Adam's.

    Args:
        ratio: adam_lr / lr.
    """
    if keeps_direction(options, layer) is None:
        return 1.0
    head = layer.keeps_direction is None  # it makes the model's outputs
    return max(ratio * BASE / layer.whole_shape[-1], 1.0) if head else ratio
