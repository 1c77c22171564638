"""Test at attach time whether the installed DeepSpeed keeps gradients where ds_kfac reads and
writes them. If the test fails, attach raises an error, so that no job trains with wrong gradients.

DeepSpeed's code fills its gradient buffers with known values. Then the outer optimizer takes two
steps, in which the inner optimizer only records the gradients that it is given. The first step runs
without K-FAC. In the second step, the gradients are sent to the layers' gradient workers, which
check them and send each value back with a small constant added. The recorded gradients of K-FAC's
parameters must then be larger by this constant, and all other recorded gradients must be the same
as in the first step.
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
"""Period of the known values, a prime number. If values arrive at a wrong offset, every element is
wrong, unless the offset is wrong by a multiple of 113. All values of the test are exact in bf16:
they are even numbers from 2 to 226, to which at most 3 is added."""
ADDED = 2.0
FRACTION = 2.0**-4
"""Fraction that is also added to the values if gradients are kept in fp32. Rounding to 16 bits
would remove the fraction, so the test notices such rounding."""
TOLERANCE = 1e-4
"""Absolute tolerance for known values that have been multiplied by the loss scale, divided by the
loss scale, and clipped. It is much smaller than the rounding error of bf16."""


def self_test(exchange: GradientExchange, channel: Channel) -> None:
    """Run the test that this module describes. Collective; changes nothing.

    Raises:
        RuntimeError: on every rank, if the test failed on some rank. The message says what failed,
            and on which ranks.
    """
    layout = exchange.layout
    headline = (
        f"ds_kfac's self-test failed for {type(layout).__name__}: this DeepSpeed keeps gradients "
        "elsewhere than ds_kfac expects; training was not started. Use a DeepSpeed version that "
        "docs/reference/supported.md names."
    )
    test = _Test(exchange)
    errors: list[str] = []

    def noting(exchanges: bool) -> list[Tensor]:
        """Let the outer optimizer take a step. Return the gradient of every master that the inner
        optimizer gets."""
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
                problems.append(
                    f"DeepSpeed updated {len(before)} tensors without K-FAC, but {len(after)} with "
                    "K-FAC"
                )
            for group, (noted, with_exchange) in enumerate(zip(before, after, strict=False)):
                plain = noted.cpu() / factor
                # known() returns even numbers for K-FAC's parameters and odd numbers for all other
                # parameters. Padding is 0.
                ours = (plain.round() % 2 == 0) & (plain.round() > 0)
                expected = plain + test.added * ours.float()
                if not torch.allclose(
                    with_exchange.cpu() / factor, expected, rtol=0, atol=TOLERANCE
                ):
                    problems.append(
                        "DeepSpeed would not step with the gradients that K-FAC wrote to parameter "
                        f"group {group}"
                    )
    finally:
        layout.end()
        layout.clear()
        layout.seam.factor = None


class _Test:
    """Known gradients of one self-test, and the check that gradients reach the workers."""

    def __init__(self, exchange: GradientExchange) -> None:
        self.exchange = exchange
        self.layout = exchange.layout
        self.names = {param: name for name, param in self.layout.engine.module.named_parameters()}
        self.ours = set(self.layout.params)
        dtypes = {self.layout.dtype}
        if self.layout.replicated:
            dtypes |= {param.dtype for param in self.layout.params}
        self.added = ADDED if any(dtype.itemsize == 2 for dtype in dtypes) else ADDED + FRACTION

    def known(self, param: nn.Parameter) -> Tensor:
        """Return the known gradient of a parameter, fp32 [numel]. Its values cycle through 2, 4 ..
        226, beginning at a number that depends on the parameter's name. If the parameter is not in
        a K-FAC layer, each value is larger by 1."""
        start = zlib.crc32(self.names[param].encode()) % MODULUS
        device = self.layout.engine.device
        values = torch.arange(self.layout._numel(param), device=device, dtype=torch.int32)
        # in place, because embeddings are large
        values = values.add_(start).remainder_(MODULUS).add_(1).mul_(2)
        return values.add_(param not in self.ours).float()

    def exchanged(self, channel: Channel) -> list[str]:
        """Send gradients to their workers, and results back. Return descriptions of wrong gradients
        at this rank's workers. Collective."""
        exchange = self.exchange
        layout = self.layout
        problems: list[str] = []
        exchange.begin()
        # fp32 in both directions, so that messages do not round values
        (arrived,) = deliver(
            [replace(exchange.gather_part, dtype=torch.float32)], channel, exchange.device
        )
        gradients = exchange.gathered(arrived)
        with replaced(exchange, "scatter_dtype", torch.float32):
            for layer in exchange.worker_layers:
                matrix = gradients.pop(layer.name)
                factor = 1.0 if layout.seam.factor is None else layout.seam.factor
                parts = exchange.plan.of_layer[layer.name]
                for part, flat in zip(parts, exchange.parts(layer, matrix), strict=True):
                    param = layout.param_of(part)
                    expected = self.known(param).narrow(0, *layout.span(part))
                    if not torch.allclose(flat / factor, expected, rtol=0, atol=TOLERANCE):
                        problems.append(
                            f"the gradient of {self.names[param]} did not arrive at its worker"
                        )
                exchange.put([layer], [matrix + self.added * factor])
            (returned,) = deliver(
                [exchange.scatter_part()], channel, exchange.device, exchange.sent_off
            )
            exchange.write(returned)
        return problems


def _zero3_chunks(layout: ShardLayout) -> list[str]:
    """Return descriptions of the differences between our ZeRO-3 chunks and DeepSpeed's partition of
    the weights. Gathers every parameter."""
    mine = {shard.param: shard for shard in layout.of_parameters.on(layout.rank)}
    problems = []
    for index, param in enumerate(layout.params):
        if not hasattr(param, "ds_tensor"):
            break
        local = param.ds_tensor.detach().clone().view(-1)
        with GatheredParameters([param]):
            shard = mine.get(index)
            if shard:
                expected = param.detach().reshape(-1)[shard.start : shard.start + shard.numel]
            else:
                expected = local[:0]
            if not torch.equal(local[: expected.numel()].to(expected.device), expected):
                problems.append(
                    f"ZeRO-3 cut parameter {index} of shape {tuple(param.ds_shape)} into other "
                    "chunks than ds_kfac expects"
                )
    return problems
