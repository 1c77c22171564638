"""Bytes, collectives and state of one case, measured on every rank: of a plain, an update and a
refresh step."""

import contextlib
import gc
import io
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.distributed.cases import MODELS, UPDATE, Case
from benchmarks.distributed.plan import planned_traffic
from benchmarks.held import nbytes_of
from examples.gpt import VOCABULARY, GPTConfig

STEPS = {"refresh": 0, "plain": 1, "update": UPDATE}
"""Which step is measured as what: step 0 does all that a refresh step does."""
TOKENS = 16
"""Of a rank and step; bytes do not depend on them."""
COLLECTIVES = (
    "all_to_all_single",
    "all_reduce",
    "all_gather_into_tensor",
    "broadcast",
    "reduce_scatter_tensor",
    "all_gather",
    "reduce",
    "all_to_all",
)


def build(case: Case, model: GPTConfig, rows: int) -> Any:
    """An engine of the case, silently; the same weights on every rank."""
    import ds_kfac

    torch.manual_seed(0)
    module = MODELS[case.model](model)
    with contextlib.redirect_stdout(io.StringIO()), case.chosen():
        return ds_kfac.initialize(
            model=module, model_parameters=module.parameters(), config=case.config(rows)
        )[0]


def train_step(engine: Any, rows: int, tokens: int, step: int) -> None:
    """On random bytes [rows, tokens], others on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randint(VOCABULARY, (rows, tokens), generator=generator)
    engine.backward(engine(x, x.roll(-1, 1)))
    engine.step()


class Wrapped:
    """What torch.distributed is asked to do in one group: calls, and bytes that leave and reach
    this rank."""

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
        for place, (tensor, sizes) in enumerate(
            ((input, input_split_sizes), (output, output_split_sizes))
        ):
            self.bytes[place] += tensor.element_size() * (sum(sizes) - sizes[rank])


def measure_bytes(cases: list[Case], model: GPTConfig) -> list[dict[str, Any]]:
    """Of each case, this rank's row; runs on every rank."""
    return [_measure(case, model) for case in cases]


def _measure(case: Case, model: GPTConfig) -> dict[str, Any]:
    engine = build(case, model, 1)
    kfac = engine.kfac.preconditioner
    row: dict[str, Any] = {
        "parameters": sum(p.ds_numel if case.stage == 3 else p.numel() for p in engine.parameters())
    }
    row["gradient"] = sum(layer.numel for layer in kfac.layers)
    for step in range(max(STEPS.values()) + 1):
        wrapped, before = Wrapped(kfac.channel.group), snapshot(kfac.channel)
        with wrapped.counting():
            train_step(engine, 1, TOKENS, step)
        for name, at in STEPS.items():
            if at == step:
                row[name] = difference(snapshot(kfac.channel), before)
                row[name]["wire"] = wrapped.bytes
                row[name]["wrapped_calls"] = dict(wrapped.calls)
    row["state"], row["adam"] = nbytes_of(kfac)
    row["planned_state"] = kfac.plan.assignment.memory[kfac.rank]
    flows = planned_traffic(kfac.plan, kfac.layout.shards)
    row["planned"] = {
        kind: (flow.sent[kfac.rank], flow.received[kfac.rank]) for kind, flow in flows.items()
    }
    row["imbalance"] = kfac.plan.assignment.imbalance
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
