"""Saves as earlier versions wrote them."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from ds_kfac.checkpoint import files, save


@contextmanager
def without_eigenbases() -> Iterator[None]:
    """As with `checkpoint.eigenbasis` false: factors are to be decomposed on loading."""
    payload, header = save.layer_payload, files.write_header
    with (
        patch.object(save, "layer_payload", lambda state: {**payload(state), "A": None, "G": None}),
        patch.object(files, "write_header", lambda folder, fields: header(folder, {**fields, "eigenbases": False})),
    ):
        yield
