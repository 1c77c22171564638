"""Which rows a mask leaves out (model/masks.py)."""

import pytest
import torch

from ds_kfac.model.masks import Forward


def test_a_call_that_no_mask_could_fit_looks_at_no_other_call():
    """Else a loop over positions would take a time that grows with the square of their number."""
    forward = Forward([torch.ones(2, 3, dtype=torch.bool)])
    forward.calls = None  # type: ignore[assignment]
    assert forward.mask((2,)) is None
    with pytest.raises(AttributeError):
        forward.mask((6,))
