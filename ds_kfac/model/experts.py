"""Rows of mixture-of-experts layers (deepspeed.moe): what an expert sees is dispatched, and padded to a capacity.

An expert's A is the mean over the tokens routed to it; its G the sum over them for all loss terms of the batch. Their
product is the expert's Fisher, to which tokens routed elsewhere add nothing. Tokens come from all ranks of the
expert-parallel group; each is taken to have as many loss terms as this one. Found by attributes, not by class.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ds_kfac.model.batch_info import BatchInfo
from ds_kfac.model.hooks import own_hook


class ExpertRows:
    """Hooks on experts; gives the :class:`BatchInfo` of any module's calls.

    Attributes:
        experts: names of all experts here.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rows: dict[str, tuple[Tensor, int]] = {}  # expert -> bool rows that are tokens, tokens of this rank
        self._tokens: dict[str, int] = {}  # mixture -> tokens of this rank
        self.experts: list[str] = []
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            inner = getattr(getattr(module, "experts", None), "deepspeed_experts", None)
            if inner is None:
                continue
            self._handles.append(module.register_forward_pre_hook(own_hook(module, partial(self._mixture, name))))
            for index, expert in enumerate(inner):
                place = f"{name}.experts.deepspeed_experts.{index}"
                self.experts.append(place)
                hook = own_hook(expert, partial(self._expert, name, place))
                self._handles.append(expert.register_forward_pre_hook(hook))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _mixture(self, name: str, module: nn.Module, inputs: tuple) -> None:
        self._tokens[name] = inputs[0].shape[:-1].numel()

    def _expert(self, mixture: str, place: str, module: nn.Module, inputs: tuple) -> None:
        dispatched = inputs[0].detach()  # [expert-parallel ranks, 1, capacity, width], zero where there is no token
        self._rows[place] = (dispatched != 0).any(-1), self._tokens[mixture]

    def __call__(self, module: str, batch: BatchInfo) -> BatchInfo:
        """Of a call of ``module`` in a micro-batch."""
        place = next((place for place in self.experts if module == place or module.startswith(place + ".")), None)
        if place is None:
            return batch
        rows, tokens = self._rows[place]
        return replace(batch, rows=rows, encoder_rows=None, ranks=len(rows), tokens=tokens)
