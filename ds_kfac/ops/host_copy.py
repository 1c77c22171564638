"""An asynchronous copy of a tensor to the host. The device copies while it does other work."""

import torch
from torch import Tensor


class HostCopy:
    """A copy that starts when the object is made. :meth:`tolist` waits for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._values = tensor
        self._event = None
        if tensor.is_cuda:
            self._values = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(
                tensor, non_blocking=True
            )
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def done(self) -> bool:
        """Whether the copy is complete, so that :meth:`tolist` would not wait."""
        return self._event is None or self._event.query()

    def tolist(self) -> list:
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
