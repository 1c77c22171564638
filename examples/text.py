"""Text as bytes: any file or folder, by default the sources of Python's standard library."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

STRETCHES = 20
"""Places from which the held-out part is cut."""
SUFFIXES = {".py", ".txt", ".md", ".rst", ".c", ".cpp", ".h", ".json", ".tex", ".html"}


@dataclass(frozen=True)
class Corpus:
    """Bytes as uint8; the last part of every stretch is held out."""

    name: str
    train: Tensor
    held_out: Tensor

    def batch(
        self, generator: torch.Generator, rows: int, context: int, *, held_out=False
    ) -> tuple[Tensor, Tensor]:
        """Random windows: inputs and targets, int64 [rows, context]."""
        data = self.held_out if held_out else self.train
        starts = torch.randint(len(data) - context, (rows,), generator=generator)
        windows = torch.stack(
            [data[start : start + context + 1] for start in starts.tolist()]
        ).long()
        return windows[:, :-1], windows[:, 1:]


def load(path: str | None, context: int) -> Corpus:
    """Read a corpus; 5 % is held out, cut from STRETCHES places so that it resembles the rest.

    Raises:
        ValueError: no such path, no text in it, or too little for one window in each part.
    """
    root = Path(sysconfig.get_paths()["stdlib"] if path is None else path)
    if root.is_file():
        files = [root]
    elif root.is_dir():
        files = sorted(
            f
            for f in root.rglob("*")
            if f.suffix in SUFFIXES and f.is_file() and not _is_test(f, root)
        )
    else:
        raise ValueError(f"--data {root}: no such file or folder")
    raw = b"\n".join(f.read_bytes() for f in files)
    stretch = len(raw) // STRETCHES
    held = stretch // 20
    if held <= context + 1:
        raise ValueError(
            f"--data {root}: {len(raw):,} bytes in {len(files)} text files is too little; windows "
            f"of {context} bytes need at least {400 * (context + 2):,}"
        )
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)[: stretch * STRETCHES].view(
        STRETCHES, stretch
    )
    digest = hashlib.sha256(raw).hexdigest()[:12]
    # by default without the path, so that runs on two machines can be checked to use the same data
    source = "Python standard library" if path is None else root
    name = f"{source} ({len(files)} files, {len(raw):,} bytes, sha256 {digest})"
    return Corpus(name, data[:, held:].reshape(-1), data[:, :held].reshape(-1))


def _is_test(file: Path, root: Path) -> bool:
    parts = file.relative_to(root).parts
    return any(
        part in ("test", "tests", "site-packages", "__pycache__", "idle_test") for part in parts
    )
