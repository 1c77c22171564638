"""How large KFACAdamW's steps are, in units of the learning rate.

    spectral    singular values of an orthogonalized step are, on average, size sqrt(longer side / shorter side): what a
                step changes in an output is then the same at every width (Yang et al. 2023, arXiv:2310.17813, who have
                sqrt(O / I), which is too little for O < I, as is Muon's sqrt(max(1, O / I)): docs/tuning.md)
    rms         its entries have the size on average, whatever the width

What keeps Adam's direction, embeddings, norms and heads, has the rate adam_lr. Of that a head's is the part BASE / I,
but at least lr, if sizes are spectral: Adam's direction grows with the width, too.
"""

import math

from ds_kfac.config.method import AdamConfig
from ds_kfac.directions.kfac_adamw.choice import is_head, keeps_direction
from ds_kfac.model.layers.base import LayerSpec

BASE = 128
"""Width at which rates were measured (gpt_small in benchmarks/convergence)."""
ADAM_RATIO = {"spectral": 8.0, "rms": 1.0}
"""adam_lr / lr where adam_lr is left out."""


def step_norm(options: AdamConfig, layer: LayerSpec, rows: int | None = None) -> float:
    """Frobenius norm of an orthogonalized step of a layer's matrix, of that of one of its groups, or of a block of so
    many ``rows`` of it. Of a tensor-parallel shard it is the shard's part of the whole layer's."""
    O, I = layer.whole_shape[-2:]  # noqa: E741
    O = O if rows is None else rows * layer.cut[0]  # noqa: E741
    assert options.size is not None  # see ds_kfac.plan.resolve
    return options.size * ((max(O, I) if options.scale == "spectral" else O * I) / math.prod(layer.cut)) ** 0.5


def adam_factor(options: AdamConfig, layer: LayerSpec, ratio: float) -> float:
    """What multiplies the direction of a layer that keeps Adam's.

    Args:
        ratio: adam_lr / lr.
    """
    if keeps_direction(options, layer) is None:
        return 1.0
    return (
        max(ratio * BASE / layer.whole_shape[-1], 1.0)
        if options.scale == "spectral" and is_head(options, layer)
        else ratio
    )
