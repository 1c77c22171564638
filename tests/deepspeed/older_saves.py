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


@contextmanager
def with_late_refreshes() -> Iterator[None]:
    """As with `eigenbasis.lag`: new decompositions of all factors are on their way."""
    header = files.write_header

    def late(folder, fields):
        return header(folder, {**fields, "pending": dict.fromkeys(fields["ready"], fields["steps"] + 1)})

    with patch.object(files, "write_header", late):
        yield
