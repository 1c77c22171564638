"""Bytes, collectives and K-FAC state of a case, measured on every rank."""

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.convergence import loop
from benchmarks.distributed.cases import UPDATE, Case, gelu_gpt
from benchmarks.held import nbytes_of
from examples.gpt import VOCABULARY, GPTConfig

STEPS = {"refresh": 0, "plain": 1, "update": UPDATE}
"""Kind of step -> the step that is measured: step 0 does all that a refreshing step does."""
TOKENS = 16
"""Tokens of a rank in a step; bytes do not depend on them."""
COLLECTIVES = tuple(
    """
    all_to_all_single all_reduce all_gather_into_tensor broadcast reduce_scatter_tensor
    all_gather reduce all_to_all
    """.split()
)


def build(case: Case, model: GPTConfig, rows: int) -> Any:
    """Return an engine of the case, with the same weights on every rank."""
    torch.manual_seed(0)
    with case.chosen():
        return loop.build(gelu_gpt(model), case.config(rows))


def train_step(engine: Any, rows: int, tokens: int, step: int) -> None:
    """Train on random bytes [rows, tokens], other ones on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randint(VOCABULARY, (rows, tokens), generator=generator)
    engine.backward(engine(x, x.roll(-1, 1)))
    engine.step()


class Wrapped:
    """Counts what torch.distributed is asked to do in a group.

    Attributes:
        calls: number of calls of each collective.
        bytes: bytes that leave this rank, and that reach it.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.calls: Counter[str] = Counter()
        self.bytes = [0, 0]

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        originals = {name: getattr(dist, name) for name in COLLECTIVES}

        def wrap(name: str):
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                if kwargs.get("group") is self.group:
                    self.calls[name] += 1
                    if name == "all_to_all_single":
                        self._count(*args, **kwargs)
                return originals[name](*args, **kwargs)

            return wrapped

        for name in COLLECTIVES:
            setattr(dist, name, wrap(name))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)

    def _count(
        self, output, input, output_split_sizes=None, input_split_sizes=None, **_: Any
    ) -> None:
        rank = dist.get_rank(self.group)
        both = ((input, input_split_sizes), (output, output_split_sizes))
        for place, (tensor, sizes) in enumerate(both):
            self.bytes[place] += tensor.element_size() * (sum(sizes) - sizes[rank])


def measure_bytes(cases: list[Case], model: GPTConfig) -> list[dict[str, Any]]:
    """Return this rank's row of each case; runs on every rank."""
    return [_measure(case, model) for case in cases]


def _measure(case: Case, model: GPTConfig) -> dict[str, Any]:
    engine = build(case, model, 1)
    kfac = engine.kfac.preconditioner
    sizes = (p.ds_numel if case.stage == 3 else p.numel() for p in engine.parameters())
    row: dict[str, Any] = {"parameters": sum(sizes)}
    row["gradient"] = sum(layer.numel for layer in kfac.layers)
    for step in range(max(STEPS.values()) + 1):
        wrapped, before = Wrapped(kfac.channel.group), snapshot(kfac.channel)
        with wrapped.counting():
            train_step(engine, 1, TOKENS, step)
        for kind, at in STEPS.items():
            if at == step:
                row[kind] = difference(snapshot(kfac.channel), before)
                row[kind]["wire"] = wrapped.bytes
                row[kind]["wrapped_calls"] = dict(wrapped.calls)
    row["state"], row["adam"] = nbytes_of(kfac)
    row["planned_state"] = kfac.plan.assignment.memory[kfac.rank]
    kfac.close()
    engine.destroy()
    gc.collect()
    return row


def snapshot(channel: Any) -> dict[str, Counter]:
    return {name: Counter(getattr(channel, name)) for name in ("sent", "received", "calls")}


def difference(after: dict[str, Counter], before: dict[str, Counter]) -> dict[str, Any]:
    return {
        name: {kind: after[name][kind] - before[name][kind] for kind in after[name]}
        for name in after
    }
