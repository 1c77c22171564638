"""Batch sums on their way to the ranks that average them: one asynchronous all-to-all, in 32 or 16 bits.

An all-to-all followed by a local sum in rank order: the bytes of a reduce-scatter with uneven segments (which neither
gloo nor NCCL has), the same result whatever the order of arrival, and sums in fp32 whatever travels.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ds_kfac.bucket import FactorBucket, Segment
from ds_kfac.traffic import Channel

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

HALF_RANGE = 2.0**14
"""To where the largest number of a slot is scaled in fp16, which has no larger exponents than 2^15."""
LARGEST_SCALE = 126
"""Exponent; a larger power of two has no reciprocal in fp32."""


def segment_bytes(segment: Segment, dtype: torch.dtype) -> int:
    """What one rank sends to the segment's owner: counts, and in fp16 scales, in fp32; sums in ``dtype``."""
    header = (segment.body - segment.start) * 4
    return header * (2 if dtype is torch.float16 else 1) + (segment.stop - segment.body) * dtype.itemsize


class Reduction:
    """Sums over all ranks of one bucket, to be waited for later. Collective: start on every rank, in the same order.

    Args:
        flat: fp32, this rank's sums; not to be changed before :meth:`wait`.
        residuals: error feedback: (layer, use, side) -> what rounding took from earlier sums; None: no feedback.

    Attributes:
        residuals: what rounding took from these; keep them if the step is applied.
    """

    def __init__(
        self,
        bucket: FactorBucket,
        flat: Tensor,
        channel: Channel,
        dtype: torch.dtype,
        residuals: Mapping[tuple[str, int, str], Tensor] | None = None,
    ) -> None:
        self.bucket, self.channel, self.dtype = bucket, channel, dtype
        self.residuals: dict[tuple[str, int, str], Tensor] = {}
        self._handle: Any = None
        if channel.world == 1:
            self._received = flat
            return
        sizes = [segment_bytes(segment, dtype) for segment in bucket.segments]
        own, others = sizes[channel.rank], sum(sizes) - sizes[channel.rank]
        self._sent = flat.view(torch.uint8) if dtype is torch.float32 else self._rounded(flat, residuals)
        self._received, self._handle = channel.all_to_all(
            self._sent,
            sizes,
            [own] * channel.world,
            carries={"factors": (others, own * (channel.world - 1))},
            wait=False,
        )

    def wait(self) -> Tensor:
        """This rank's segment, fp32, summed over ranks."""
        if self.channel.world == 1:
            return self._received
        self._handle.wait()
        segment = self.bucket.segments[self.channel.rank]
        if self.dtype is torch.float32:
            return self._received.view(torch.float32).view(self.channel.world, segment.numel).sum(dim=0)
        total = torch.zeros(segment.numel, device=self._received.device)
        for part in self._received.view(self.channel.world, segment_bytes(segment, self.dtype)):
            total += self._decoded(segment, part)
        return total

    def _rounded(self, flat: Tensor, residuals: Mapping[tuple[str, int, str], Tensor] | None) -> Tensor:
        pieces = []
        for segment in self.bucket.segments:
            sums = [flat.narrow(0, slot.start, slot.numel) for slot in segment.slots]
            if residuals:
                for slot, values in zip(segment.slots, sums, strict=True):
                    if (slot.layer, slot.use, slot.side) in residuals:
                        values += residuals[slot.layer, slot.use, slot.side]
            header, body = flat[segment.start : segment.body], flat[segment.body : segment.stop]
            if self.dtype is torch.float16 and sums:
                largest = torch.stack(torch._foreach_norm(sums, float("inf")))
                scales = torch.exp2(torch.floor(torch.log2(HALF_RANGE / largest)).clamp(max=LARGEST_SCALE))
                scales = torch.where(torch.isfinite(scales) & (scales > 0), scales, torch.ones_like(scales))
                header = torch.cat([header, scales, scales.new_ones(len(header) - len(scales))])
                body = body.clone()
                for slot, scale in zip(segment.slots, scales, strict=True):
                    body[slot.start - segment.body :][: slot.numel] *= scale
            elif self.dtype is torch.float16:
                header = torch.cat([header, header])
            piece = torch.cat([header.view(torch.uint8), body.to(self.dtype).view(torch.uint8)])
            pieces.append(piece)
            if residuals is not None:
                decoded = self._decoded(segment, piece)
                for slot, values in zip(segment.slots, sums, strict=True):
                    lost = values - decoded[slot.start - segment.start :][: slot.numel]
                    # an overflowed batch is dropped by its owner; it must not come back with the next one
                    lost = torch.where(torch.isfinite(lost).all(), lost, torch.zeros_like(lost))
                    # bf16 whatever travels: fp16 has not the range, and residuals have no scale of their own
                    self.residuals[slot.layer, slot.use, slot.side] = lost.to(torch.bfloat16)
        return torch.cat(pieces)

    def _decoded(self, segment: Segment, piece: Tensor) -> Tensor:
        """What one rank sent to the segment's owner, in the layout of the bucket, fp32."""
        counts = segment.body - segment.start
        if not segment.numel:
            return torch.zeros(0, device=piece.device)
        numbers = (2 if self.dtype is torch.float16 else 1) * counts
        header = piece[: 4 * numbers].view(torch.float32)
        body = piece[4 * numbers :].view(self.dtype).float()
        if self.dtype is torch.float16:
            for place, slot in enumerate(segment.slots):
                body[slot.start - segment.body :][: slot.numel] /= header[counts + place]
        return torch.cat([header[:counts], body])
