"""A test at attach that this DeepSpeed keeps gradients where we read and write them: else that is
an error, not a wrong gradient.

DeepSpeed's code fills its gradient buffers with known values. Then its optimizer takes a step,
whose inner optimizer only notes what it would step with. It is taken twice: as it is, and with the
known gradients sent to the layers' workers, who check them and send back each value plus a little.
What the inner optimizer notes must be larger by that at the preconditioned elements and unchanged
elsewhere, in every group.
"""

import zlib
from dataclasses import replace

import torch
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor, nn

from ds_kfac.comm.message import Channel, deliver, failing_together
from ds_kfac.zero.deepspeed_versions import replaced
from ds_kfac.zero.exchange import GradientExchange
from ds_kfac.zero.layout import ShardLayout

MODULUS = 113
"""A prime. A shifted sequence of 1 .. 113 equals the right one nowhere; twice a value, and 3 more,
is exact in bf16."""
ADDED = 2.0
FRACTION = 2.0**-4
"""Added, too, where results are kept in more than 16 bits: it shows rounding to them."""
TOLERANCE = 1e-4
"""Of values that have been multiplied by the loss scale and divided by it, and clipped. An eighth
of what bf16 rounds."""


def self_test(exchange: GradientExchange, channel: Channel) -> None:
    """See the module. Collective; leaves no trace.

    Raises:
        RuntimeError: on every rank, naming what does not fit on which rank.
    """
    layout = exchange.layout
    headline = (
        f"ds_kfac's self-test failed for {type(layout).__name__}: this DeepSpeed keeps gradients "
        f"elsewhere than "
        "ds_kfac expects; training was not started. Use a DeepSpeed version that "
        "docs/reference/supported.md names."
    )
    test = _Test(exchange)
    errors: list[str] = []

    def noting(exchanges: bool) -> list[Tensor]:
        """What the inner optimizer would step with, of every master in turn."""
        noted: list[Tensor] = []

        def inner_step() -> None:
            if exchanges and not noted:
                layout.seam.complete_factor()
                errors.extend(test.exchanged(channel))
            masters = [
                master for group in layout.seam.inner.param_groups for master in group["params"]
            ]
            noted.extend(
                master.grad.float().clone().view(-1)
                for master in masters
                if master.grad is not None
            )

        with layout.seam.stubbed(inner_step) as step:
            layout.install(test.known)
            layout.begin()
            step()
        layout.clear()
        return noted

    try:
        with failing_together(headline, layout.group) as problems:
            problems += _zero3_chunks(layout)
        before = noting(exchanges=False)
        after = noting(exchanges=True)
        with failing_together(headline, layout.group) as problems:
            problems += errors
            factor = 1.0 if layout.seam.factor is None else layout.seam.factor.cpu()
            if len(before) != len(after):
                problems.append(f"DeepSpeed stepped {len(before)} tensors, then {len(after)}")
            for group, (noted, with_exchange) in enumerate(zip(before, after, strict=False)):
                plain = noted.cpu() / factor
                # known() gives even numbers to K-FAC's parameters, odd ones to others, and padding
                # has 0
                ours = (plain.round() % 2 == 0) & (plain.round() > 0)
                expected = plain + test.added * ours.float()
                if not torch.allclose(
                    with_exchange.cpu() / factor, expected, rtol=0, atol=TOLERANCE
                ):
                    problems.append(
                        f"DeepSpeed would not step with the gradients written to group {group}"
                    )
    finally:
        layout.end()
        layout.clear()
        layout.seam.factor = None


class _Test:
    """The values of one test."""

    def __init__(self, exchange: GradientExchange) -> None:
        self.exchange = exchange
        self.layout = exchange.layout
        self.names = {
            id(param): name for name, param in self.layout.engine.module.named_parameters()
        }
        self.ours = {id(param) for param in self.layout.params}
        dtypes = {self.layout.dtype}
        if self.layout.replicated:
            dtypes |= {param.dtype for param in self.layout.params}
        self.added = ADDED if any(dtype.itemsize == 2 for dtype in dtypes) else ADDED + FRACTION

    def known(self, param: nn.Parameter) -> Tensor:
        """2, 4 .. 226 repeated, starting at a number that depends on the name; 1 more if the
        parameter is in no layer. fp32 [numel]."""
        start = zlib.crc32(self.names[id(param)].encode()) % MODULUS
        device = self.layout.engine.device
        values = torch.arange(self.layout._numel(param), device=device, dtype=torch.int32)
        # in place: a vocabulary's embedding is large
        values = values.add_(start).remainder_(MODULUS).add_(1).mul_(2)
        return values.add_(id(param) not in self.ours).float()

    def exchanged(self, channel: Channel) -> list[str]:
        """Gradients go to their workers and results back. Returns what is wrong. Collective."""
        exchange = self.exchange
        layout = self.layout
        problems: list[str] = []
        exchange.begin()
        # no rounding on the way, here and back
        (arrived,) = deliver(
            [replace(exchange.gather_part, dtype=torch.float32)], channel, exchange.device
        )
        gradients = exchange.gathered(arrived)
        with replaced(exchange, "scatter_dtype", torch.float32):
            for layer in exchange.owned:
                matrix = gradients.pop(layer.name)
                factor = 1.0 if layout.seam.factor is None else layout.seam.factor
                parts = exchange.plan.of_layer[layer.name]
                for part, flat in zip(parts, exchange.parts(layer, matrix), strict=True):
                    param = layout.param_of(part)
                    expected = self.known(param).narrow(0, *layout.span(part))
                    if not torch.allclose(flat / factor, expected, rtol=0, atol=TOLERANCE):
                        problems.append(
                            f"the gradient of {self.names[id(param)]} did not arrive at its worker"
                        )
                exchange.put([layer], [matrix + self.added * factor])
            (returned,) = deliver(
                [exchange.scatter_part()], channel, exchange.device, exchange.sent_off
            )
            exchange.write(returned)
        return problems


def _zero3_chunks(layout: ShardLayout) -> list[str]:
    """Differences between our ZeRO-3 chunks and DeepSpeed's partition of the weights. Gathers every
    parameter."""
    mine = {shard.param: shard for shard in layout.of_parameters.on(layout.rank)}
    problems = []
    for index, param in enumerate(layout.params):
        if not hasattr(param, "ds_tensor"):
            break
        local = param.ds_tensor.detach().clone().view(-1)
        with GatheredParameters([param]):
            shard = mine.get(index)
            expected = (
                param.detach().reshape(-1)[shard.start : shard.start + shard.numel]
                if shard
                else local[:0]
            )
            if not torch.equal(local[: expected.numel()].to(expected.device), expected):
                problems.append(
                    f"ZeRO-3 cut parameter {index} of shape {tuple(param.ds_shape)} into other "
                    f"chunks"
                )
    return problems
