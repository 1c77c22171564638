"""Rows of mixture-of-experts layers (deepspeed.moe, AutoEP): what an expert sees is dispatched, and padded: to a
capacity, or to a multiple of some rows.

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


def is_autoep(module: nn.Module) -> bool:
    """Whether it is a mixture that DeepSpeed's AutoEP has put into a model: ``experts`` are stacks w1, w2, w3 [E, O, I]
    of this rank's."""
    return getattr(module, "_is_autoep_layer", False) is True


class ExpertRows:
    """Hooks on experts; gives the :class:`BatchInfo` of any module's calls.

    Attributes:
        experts: names of all experts here, and of AutoEP's stacks of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rows: dict[str, tuple[Tensor, int]] = {}  # expert -> bool rows that are tokens, tokens of this rank
        self._tokens: dict[str, int] = {}  # mixture -> tokens of this rank
        self._stacks: dict[str, tuple[str, int]] = {}  # stack -> its mixture, ranks whose tokens it gets
        self.experts: list[str] = []
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            inner = getattr(getattr(module, "experts", None), "deepspeed_experts", ())
            if not inner and not is_autoep(module):
                continue
            self._handles.append(module.register_forward_pre_hook(own_hook(module, partial(self._mixture, name))))
            if is_autoep(module):
                place = f"{name}.experts".lstrip(".")
                self.experts.append(place)
                self._stacks[place] = name, int(module.ep_size)
                continue
            for index, expert in enumerate(inner or ()):
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
        if place in self._stacks:
            mixture, ranks = self._stacks[place]
            tokens = self._tokens[mixture]
            return replace(batch, rows=None, encoder_rows=None, ranks=ranks, tokens=tokens, places=True)
        rows, tokens = self._rows[place]
        return replace(batch, rows=rows, encoder_rows=None, ranks=len(rows), tokens=tokens)
