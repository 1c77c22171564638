"""Which rows a mask leaves out (model/masks.py)."""

import pytest
import torch
from torch import nn

from ds_kfac.model.capture import Capture
from ds_kfac.model.masks import Forward


def test_a_call_that_no_mask_could_fit_looks_at_no_other_call():
    """Else a loop over positions would take a time that grows with the square of their number."""
    forward = Forward([torch.ones(2, 3, dtype=torch.bool)])
    forward.calls = None  # type: ignore[assignment]
    assert forward.mask((2,)) is None
    with pytest.raises(AttributeError):
        forward.mask((6,))


def test_a_mask_is_taken_to_the_device_of_the_rows():
    """A model may get it on the host, and take it to its device by itself."""

    class Model(nn.Module):
        def forward(self, attention_mask):
            return attention_mask

    model = Model()
    capture = Capture(model, [], lambda is_announced: 1.0, device=torch.device("meta"))
    capture.begin_step({}, 0)
    model(torch.ones(2, 3))
    assert [mask.device.type for mask in capture.forward.masks] == ["meta"]
