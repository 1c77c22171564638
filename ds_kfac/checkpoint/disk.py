"""Files that are on disk when they are said to be, and that are read only if they are what was written.

Every file is synchronised to disk before something refers to it, and its size and CRC-32 are kept with what refers to
it. A CRC finds every flipped byte and every other file; it is no signature.
"""

import errno
import io
import os
import time
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch

TOKEN = "token"
PATIENCE = 5.0
"""Seconds that a network file system may take to show a new file to another node."""


class CheckpointError(RuntimeError):
    """K-FAC's part of a checkpoint could not be written or cannot be loaded; raised on every rank, with what to do."""


class _Summed:
    """A file that adds up what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.crc32, self.nbytes = file, 0, 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.nbytes += memoryview(data).nbytes
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def write_payload(path: Path, payload: Any) -> dict[str, int]:
    """Write plain tensors to a new file and wait until they are on disk. Returns {"bytes": .., "crc32": ..}."""
    with path.open("wb") as file:
        summed = _Summed(file)
        torch.save(payload, summed)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": summed.nbytes, "crc32": summed.crc32}


def read_payload(path: Path, *, nbytes: int, crc32: int) -> Any:
    """What :func:`write_payload` wrote, on the CPU.

    Raises:
        ValueError: there is no such file, or it is another one; the message begins with its path.
        OSError: it cannot be read.
    """
    if not path.is_file():  # nor a folder, nor a pipe, which would block the read
        raise ValueError(f"{path}: {'is no file' if path.exists() else 'is missing'}")
    data = path.read_bytes()
    if len(data) != nbytes:
        raise ValueError(f"{path}: has {len(data)} bytes, {nbytes} were written; cut off, or of another save")
    if zlib.crc32(data) != crc32:
        raise ValueError(f"{path}: wrong checksum: the file is damaged, or belongs to another layer or save")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # what a foreign pickle makes of the unpickler: reported by every rank, never executed
        raise ValueError(f"{path}: holds more than plain tensors: {str(error).splitlines()[0]}") from error


def write_text(path: Path, text: str) -> None:
    """Put a file there at once, whole and on disk, or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in it are on disk, where the file system knows how."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def put_token(folder: Path) -> None:
    """Make the folder, whose name no other save has, and put something there for the other ranks to find."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / TOKEN, folder.name)
    for parent in (folder.parent, folder.parent.parent):
        sync_folder(parent)


def check_token(folder: Path, patience: float = PATIENCE) -> None:
    """Raise ValueError where the folder that rank 0 made is not to be seen."""
    deadline = time.monotonic() + patience
    while not (folder / TOKEN).is_file() or (folder / TOKEN).read_text() != folder.name:
        if time.monotonic() > deadline:
            raise ValueError(
                f"{folder.absolute()}, which rank 0 has made, is not there. K-FAC's state is spread over all ranks and "
                "is saved to one folder that all of them see: save to a shared file system, under the same path"
            )
        time.sleep(0.05)


def remove_token(folder: Path) -> None:
    (folder / TOKEN).unlink()
