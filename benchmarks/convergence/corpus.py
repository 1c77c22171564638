"""A corpus of tokens: the Python sources of installed packages.

    <folder>/corpus.json           facts, written last: with it the corpus is whole
    <folder>/tokenizer.json        byte-pair encoding, trained on the training part
    <folder>/tokens_<part>.npy     [N] uint16, files one after the other, each after an END

A file counts once, by the hash of its text. Whole packages are held out: no two files of a package
are in different parts. Without the package tokenizers the tokens are bytes.
"""

import hashlib
import json
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

PARTS = ("train", "validation", "test")
HELD_OUT, LARGEST = 0.02, 0.04
"""Parts of the bytes: of each held-out part, and of a package that is always for training."""
LONGEST_FILE = 1 << 20
"""Bytes: longer files are tables that programs wrote."""
BPE_BYTES = 64 << 20
"""Bytes of the training part that the encoding is trained on; a minute on 16 cores."""
END = 0
BYTES = 257
"""Vocabulary where tokens are bytes: END, and each byte plus 1."""


@dataclass(frozen=True)
class Corpus:
    """``sha256``: of all texts in their parts and the tokens; ``tokens``: their number by part."""

    sha256: str
    encoding: str
    tokens: dict[str, int]


def texts(folders: Sequence[Path], most: int | None) -> dict[str, list[bytes]]:
    """Return package -> its sources, each text once, up to ``most`` bytes.

    Packages come in the order of their names' hashes.
    """
    found: dict[str, list[Path]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).parts
            if len(parts) > 1 and path.is_file() and path.stat().st_size <= LONGEST_FILE:
                found.setdefault(parts[0], []).append(path)
    seen: set[bytes] = set()
    packages: dict[str, list[bytes]] = {}
    total = 0
    for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()):
        kept: list[bytes] = []
        for path in found[name]:
            text = path.read_bytes()
            digest = hashlib.sha256(text).digest()
            if len(text) >= 100 and digest not in seen and b"\0" not in text:
                seen.add(digest)
                kept.append(text)
                total += len(text)
            if most is not None and sum(map(len, kept)) > LARGEST * most / 2:
                break  # so that there are packages to hold out
        if kept:
            packages[name] = kept
        if most is not None and total >= most:
            break
    return packages


def parted(packages: dict[str, list[bytes]]) -> dict[str, list[str]]:
    """Return part -> its packages.

    Raises:
        ValueError: there are too few packages.
    """
    sizes = {name: sum(map(len, files)) for name, files in packages.items()}
    total = sum(sizes.values())
    parts: dict[str, list[str]] = {part: [] for part in PARTS}
    filled = dict.fromkeys(PARTS, 0)
    for name, size in sizes.items():
        part = "train"
        if size <= LARGEST * total:
            has_room = [held for held in PARTS[1:] if filled[held] < HELD_OUT * total]
            part = has_room[0] if has_room else "train"
        parts[part].append(name)
        filled[part] += size
    if not all(parts.values()):
        raise ValueError(f"corpus: {len(sizes)} packages are too few to hold some out")
    return parts


def encoder_of(files: Sequence[bytes], vocabulary: int, path: Path) -> Any:
    """Train a byte-pair encoding and write it to ``path``; None without the package tokenizers."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        print("corpus: the package tokenizers is not installed: the tokens are bytes", flush=True)
        return None
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    every = max(1, -(-sum(map(len, files)) // BPE_BYTES))
    found.train_from_iterator((text.decode(errors="replace") for text in files[::every]), trainer)
    found.save(str(path))
    return found


def encoded(files: Sequence[bytes], encoder: Any) -> np.ndarray:
    """Return the tokens of all files, [N] uint16."""
    pieces: list[np.ndarray] = []
    for start in range(0, len(files), 512):
        batch = files[start : start + 512]
        if encoder is None:
            ids = [np.frombuffer(text, np.uint8).astype(np.uint16) + 1 for text in batch]
        else:
            decoded = [text.decode(errors="replace") for text in batch]
            found = encoder.encode_batch_fast(decoded, add_special_tokens=False)
            ids = [np.array(one.ids, np.uint16) for one in found]
        for one in ids:
            pieces += [np.array([END], np.uint16), one]
    return np.concatenate(pieces)


def make(
    folder: Path, *, vocabulary: int, most: int | None = None, folders: Sequence[Path] = ()
) -> Corpus:
    """Return the corpus in ``folder``, which is made if it is not there.

    Args:
        folders: folders of packages; none: those of this Python's installed packages.
    """
    if (folder / "corpus.json").exists():
        return Corpus(**json.loads((folder / "corpus.json").read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    installed = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    packages = texts(folders or [Path(path) for path in installed], most)
    files = {
        part: [text for name in names for text in packages[name]]
        for part, names in parted(packages).items()
    }
    encoder = encoder_of(files["train"], vocabulary, folder / "tokenizer.json")
    tokens = {part: encoded(files[part], encoder) for part in PARTS}
    digest = hashlib.sha256()
    for part in PARTS:
        np.save(folder / f"tokens_{part}.npy", tokens[part])
        digest.update(f"{part} {len(tokens[part])}\n".encode())
        for text in files[part]:
            digest.update(hashlib.sha256(text).digest())
        digest.update(tokens[part].tobytes())
    encoding = "bytes" if encoder is None else f"BPE of {encoder.get_vocab_size()}"
    counts = {part: len(found) for part, found in tokens.items()}
    corpus = Corpus(digest.hexdigest(), encoding, counts)
    partial = folder / "corpus.partial"
    partial.write_text(json.dumps(asdict(corpus), indent=1) + "\n")
    partial.rename(folder / "corpus.json")
    return corpus


def load(folder: Path, part: str) -> np.ndarray:
    return np.load(folder / f"tokens_{part}.npy")
