"""A tensor's values on the host, asked for long before they are read, so that reading waits for nothing."""

import torch
from torch import Tensor


class HostCopy:
    """Starts copying at once."""

    def __init__(self, tensor: Tensor) -> None:
        self._event = None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = tensor

    @property
    def done(self) -> bool:
        """Whether reading waits for nothing."""
        return self._event is None or self._event.query()

    def tolist(self) -> list:
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
