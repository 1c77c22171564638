"""Which rows of an expert are tokens, and from which ranks they come.

**Experts** (deepspeed.moe, AutoEP) see what is dispatched to them, padded to a capacity or to a multiple of some rows.
An expert's A is the mean over the tokens routed to it; its G the sum over them for all loss terms of the batch. Their
product is the expert's Fisher, to which tokens routed elsewhere add nothing. Tokens come from all ranks of the
expert-parallel group, which tell each other how many loss terms each has; with AutoEP, where a row does not say from
which rank it is, each is taken to have as many as this one. Found by attributes, not by class.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.model.batch import BatchInfo, Peers, own_hook
from ds_kfac.model.layers import value_of


def is_autoep(module: nn.Module) -> bool:
    """Whether it is a mixture of DeepSpeed's AutoEP: ``experts`` are this rank's stacks w1, w2, w3 [E, O, I]."""
    return getattr(module, "_is_autoep_layer", False) is True


class ExpertRows:
    """Hooks on experts; gives the :class:`BatchInfo` of any module's calls."""

    def __init__(self, model: nn.Module) -> None:
        self._mixtures: dict[str, str] = {}  # expert, or AutoEP's stack of them -> its mixture
        self._tokens: dict[str, int] = {}  # mixture -> tokens of this rank
        self._rows: dict[str, Tensor] = {}  # expert -> bool rows that are tokens
        self._ranks: dict[str, int] = {}  # stack -> ranks whose tokens it gets
        self._groups: dict[str, Any] = {}  # mixture -> expert-parallel group, of several ranks
        self._peers: dict[str, Peers] = {}  # mixture -> those of the newest micro-batch
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            inner = value_of(value_of(module, "experts"), "deepspeed_experts") or ()
            if not inner and not is_autoep(module):
                continue
            self._hook(module, self._tokens, name, partial(self._entered, name))
            if is_autoep(module):
                place = f"{name}.experts".lstrip(".")
                self._mixtures[place], self._ranks[place] = name, int(module.ep_size)
                continue
            if module.ep_size > 1:
                self._groups[name], self._peers[name] = module.ep_group, Peers()
            for index, expert in enumerate(inner):
                place = f"{name}.experts.deepspeed_experts.{index}"
                self._mixtures[place] = name
                # [expert-parallel ranks, 1, capacity, width], zero where there is no token
                self._hook(expert, self._rows, place, lambda dispatched: (dispatched != 0).any(-1))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def begin_backward(
        self, info: BatchInfo, terms: Tensor | int | None, device: torch.device,
        gather: Callable[[Tensor, Any], Tensor],
    ) -> None:  # fmt: skip
        """The ranks of each expert-parallel group tell each other of the newest micro-batch. Collective: all of them
        run the backward of a mixture together, in which its own all-to-alls are.

        Args:
            terms: this rank's loss terms; None: as many as there are tokens.
            device: of what is told.
            gather: (fp32 [2], group) -> [ranks, 2].
        """
        for name, group in self._groups.items():
            if name not in self._tokens:  # it did not run
                continue
            own = self._tokens[name] if terms is None else terms
            divisor = next((x for x in (info.items, info.divisor) if x is not None), own)
            numbers = [torch.as_tensor(x, dtype=torch.float32, device=device) for x in (own, divisor)]
            self._peers[name].terms = gather(torch.stack(numbers), group)

    def _entered(self, mixture: str, x: Tensor) -> int:
        """Its tokens here; in a forward, no recomputation, a micro-batch begins."""
        if mixture in self._peers and torch._C._current_graph_task_id() == -1:
            self._peers[mixture] = Peers()
        return x.shape[:-1].numel()

    def _hook(self, module: nn.Module, known: dict[str, Any], name: str, of: Callable[[Tensor], Any]) -> None:
        def keep(module: nn.Module, inputs: tuple) -> None:
            known[name] = of(inputs[0].detach())

        self._handles.append(module.register_forward_pre_hook(own_hook(module, keep)))

    def __call__(self, module: str, batch: BatchInfo) -> BatchInfo:
        place = next((place for place in self._mixtures if module == place or module.startswith(place + ".")), None)
        if place is None:
            return batch
        mixture = self._mixtures[place]
        rows, tokens, peers = self._rows.get(place), self._tokens[mixture], self._peers.get(mixture)
        ranks, places = self._ranks[place] if rows is None else len(rows), place in self._ranks
        return replace(batch, rows=rows, encoder_rows=None, ranks=ranks, tokens=tokens, places=places, peers=peers)
