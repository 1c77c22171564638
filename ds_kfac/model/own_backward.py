"""Whose backward is running: an engine's statistics are of its own loss.

A generator's loss goes through the discriminator, whose layers it leaves as they are: it says nothing of their Fisher.
Own is a backward that the engine announced; or, as long as it never announced any, one outside of all engines'
announced ones through a forward whose inputs came from no other graph: a plain ``loss.backward()``.
"""

from typing import ClassVar

from ds_kfac.model.calls import Forward


class OwnBackward:
    """One engine's."""

    _running: ClassVar[list["OwnBackward"]] = []
    """Of all engines of the process."""

    def __init__(self) -> None:
        self._announced = False  # whether any ever was

    def begin(self) -> None:
        """The engine's backward begins; until :meth:`end`."""
        self._announced = True
        self._running.append(self)

    def end(self) -> None:
        """It has ended, maybe by an exception."""
        self._running.remove(self)

    def covers(self, forward: Forward) -> bool:
        """Whether a gradient that arrives now at a call of ``forward`` is of the engine's own loss."""
        if self._running:
            return self in self._running
        return forward.detached and not self._announced
