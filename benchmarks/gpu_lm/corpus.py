"""The corpus: Python sources of the packages that are installed, as token ids in files.

<folder>/corpus.json           facts, written last: with it the corpus is whole
<folder>/tokenizer.json        byte-pair encoding, trained on the training part; absent with bytes
<folder>/tokens_<part>.npy     [N] uint16, files one after the other, each after an END

A file counts once, by the hash of its text. Whole packages are held out: no two files of one are in
different parts.
"""

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

PARTS = ("train", "validation", "test")
HELD_OUT, LARGEST = 0.02, 0.04
"""Share of the bytes of each held-out part; a package with a larger share than LARGEST is for
training."""
LONGEST_FILE = 1 << 20
"""Bytes: longer ones are tables that programs wrote."""
BPE_BYTES = 64 << 20
"""Of the training part, for the encoding; a minute on 16 cores."""
END = 0
BYTES = 257
"""Vocabulary without the package tokenizers: END and the bytes, each plus 1."""


@dataclass(frozen=True)
class Corpus:
    """``sha256``: of all texts in their parts and the encoding; ``bytes`` and ``tokens`` by
    part."""

    sha256: str
    encoding: str
    vocabulary: int
    packages: dict[str, int]
    files: dict[str, int]
    bytes: dict[str, int]
    tokens: dict[str, int]

    def bytes_per_token(self, part: str) -> float:
        return self.bytes[part] / self.tokens[part]


def roots() -> list[Path]:
    """Folders of installed packages."""
    return [
        Path(path)
        for path in dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    ]


def texts(folders: Sequence[Path], most: int | None) -> dict[str, list[bytes]]:
    """Package -> its sources, each text once; in the order of the names' hashes, up to ``most``
    bytes."""
    found: dict[str, list[Path]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).parts
            if len(parts) > 1 and path.is_file() and path.stat().st_size <= LONGEST_FILE:
                found.setdefault(parts[0], []).append(path)
    seen: set[bytes] = set()
    packages: dict[str, list[bytes]] = {}
    total = 0
    for name in sorted(found, key=_order):
        kept = []
        for path in found[name]:
            text = path.read_bytes()
            digest = hashlib.sha256(text).digest()
            if len(text) < 100 or digest in seen or b"\0" in text:
                continue
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


def _order(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def parted(packages: dict[str, list[bytes]]) -> dict[str, list[str]]:
    """Part -> packages.

    Raises:
        ValueError: too few packages.
    """
    sizes = {name: sum(map(len, files)) for name, files in packages.items()}
    total = sum(sizes.values())
    parts: dict[str, list[str]] = {part: [] for part in PARTS}
    for name, size in sizes.items():
        part = "train"
        if size <= LARGEST * total:
            for held_out in PARTS[1:]:
                if sum(sizes[other] for other in parts[held_out]) < HELD_OUT * total:
                    part = held_out
                    break
        parts[part].append(name)
    if not all(parts.values()):
        raise ValueError(
            f"corpus: {len(sizes)} packages of {total} bytes; too few to hold some out: name more "
            f"folders"
        )
    return parts


def encoding(files: Sequence[bytes], vocabulary: int, path: Path):
    """A byte-pair encoding of ``files``, also written to ``path``; None where tokenizers is not
    installed."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        print("corpus: the package tokenizers is not installed: the tokens are bytes", flush=True)
        return None
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<end>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    found.train_from_iterator(_first(files, BPE_BYTES), trainer)
    found.save(str(path))
    return found


def _first(files: Sequence[bytes], most: int) -> Iterator[str]:
    """Texts spread over all files, ``most`` bytes at most."""
    every = max(1, -(-sum(map(len, files)) // most))
    for text in files[::every]:
        yield text.decode(errors="replace")


def encoded(files: Sequence[bytes], encoder) -> np.ndarray:
    """[N] uint16."""
    pieces: list[np.ndarray] = []
    end = np.array([END], np.uint16)
    if encoder is None:
        for text in files:
            pieces += [end, np.frombuffer(text, np.uint8).astype(np.uint16) + 1]
    else:
        for start in range(0, len(files), 512):
            batch = [text.decode(errors="replace") for text in files[start : start + 512]]
            for one in encoder.encode_batch_fast(batch, add_special_tokens=False):
                pieces += [end, np.array(one.ids, np.uint16)]
    return np.concatenate(pieces)


def make(
    folder: Path, *, vocabulary: int, most: int | None = None, folders: Sequence[Path] = ()
) -> Corpus:
    """The corpus in ``folder``; made if it is not there."""
    if (folder / "corpus.json").exists():
        return Corpus(**json.loads((folder / "corpus.json").read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    packages = texts(folders or roots(), most)
    parts = parted(packages)
    files = {
        part: [text for name in names for text in packages[name]] for part, names in parts.items()
    }
    encoder = encoding(files["train"], vocabulary, folder / "tokenizer.json")
    tokens = {part: encoded(files[part], encoder) for part in PARTS}
    digest = hashlib.sha256()
    for part in PARTS:
        np.save(folder / f"tokens_{part}.npy", tokens[part])
        digest.update(f"{part} {len(tokens[part])}\n".encode())
        for text in files[part]:
            digest.update(hashlib.sha256(text).digest())
        digest.update(tokens[part].tobytes())
    corpus = Corpus(
        sha256=digest.hexdigest(),
        encoding="bytes" if encoder is None else f"BPE of {encoder.get_vocab_size()}",
        vocabulary=BYTES if encoder is None else encoder.get_vocab_size(),
        packages={part: len(names) for part, names in parts.items()},
        files={part: len(found) for part, found in files.items()},
        bytes={part: sum(map(len, found)) for part, found in files.items()},
        tokens={part: len(found) for part, found in tokens.items()},
    )
    partial = folder / "corpus.partial"
    partial.write_text(json.dumps(asdict(corpus), indent=1) + "\n")
    partial.rename(folder / "corpus.json")
    return corpus


def load(folder: Path, part: str) -> np.ndarray:
    return np.load(folder / f"tokens_{part}.npy")
