"""The K-FAC gradient for steps whose size a quadratic model gives: what the model needs of a rank's layers."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ds_kfac.directions.base import LocalResult, StepContext
from ds_kfac.directions.kfac_gradient import KFACGradient
from ds_kfac.update.state import LayerState


class QuadraticGradient(KFACGradient):
    """Its numbers are <gradient, d_1>, <gradient, d_2>, <d_1, d_1>, <d_1, d_2>, <d_2, d_2>: d_1 is the result, d_2 the
    layer's last update."""

    sends = False

    def local(self, context: StepContext, gradients: dict[str, Tensor], states: dict[str, LayerState]) -> LocalResult:
        local = super().local(context, dict(gradients), states)
        sums = torch.zeros(5, device=self.exchange.device)
        for layer in self.exchange.owned:
            g, d_1 = gradients[layer.name], local.results[layer.name]
            d_2 = states[layer.name].moments.update_OI
            products = [(g * d_1).sum(), (g * d_2).sum(), d_1.square().sum(), (d_1 * d_2).sum(), d_2.square().sum()]
            sums += torch.stack(products) / layer.copies
        local.numbers = list(sums.unbind())
        return local

    def finish(
        self, context: StepContext, local: LocalResult, totals: Sequence[Tensor], prepared: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        raise AssertionError("the quadratic model gives the size of the step")
