"""The files of factors: safetensors, one shard of each kind from every owner, and an index that is written last.

    index.json                    layers, counts, settings, and which shard has which tensor
    factors-00000.safetensors     owner 0's factors, eigenvectors and eigenvalues
    corrected-00000.safetensors   EKFAC's eigenvalues

    <layer>/A, <layer>/G          the mean of a a^T, of g g^T: lower triangles of the side's blocks, one after the
                                  other, row by row; fp32, or bf16 beside checkpoints
    <layer>/A/vectors.<k>         [n, b, b], eigenvectors in columns, of the k-th group of equal blocks
    <layer>/A/values              [D], eigenvalues, ascending in each block
    <layer>/corrected.token       [O, I], the mean over loss terms of (Q_G^T g a^T Q_A)^2, elementwise
    <layer>/corrected.sequence    [O, I], the mean over sequences of the square of the sum over their terms

A shard has a CRC-32 of each of its tensors; the index has one of each shard's checksums, and of itself: damage is an
error. A folder without index.json is not finished, and does not load. ``layer`` is the name of a module, or of one of
its matrices (an expert's). I includes the 1 of a bias, the last column.
"""

import difflib
import errno
import importlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_kfac.checkpoint.files import write_text
from ds_kfac.curvature.eigen import Eigenbasis
from ds_kfac.curvature.factor import Side
from ds_kfac.model.layers import LayerSpec

INDEX, VERSION, SUMS = "index.json", 2, "crc32"
KINDS = ("token", "sequence")
"""Kinds of corrected eigenvalues."""


class FactorsError(ValueError):
    """Factors could not be computed, written or read; says what to do."""


def safetensors() -> Any:
    """The module safetensors.torch."""
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as problem:
        raise FactorsError(f"factors are kept in safetensors files ({problem}): pip install safetensors") from problem


def crc32(tensor: Tensor, before: int = 0) -> int:
    """CRC-32 of a tensor's bytes. ``before``: CRC-32 of preceding bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data, before)


class Shard:
    """An open file, whose tensors are read on access. Raises FactorsError, also on access, if it is truncated, damaged,
    or not written by :func:`write_shard`.

    Attributes:
        sums: tensor's name -> CRC-32.
        crc32: CRC-32 of ``sums``.
    """

    def __init__(self, path: Path) -> None:
        safetensors()
        self.path = path
        try:
            self._file = importlib.import_module("safetensors").safe_open(path, "pt")
            self.sums: dict[str, int] = json.loads(self._file.metadata()[SUMS])
        except Exception as problem:  # safetensors' own errors
            raise self._damaged(f"{type(problem).__name__}: {problem}") from problem
        self.crc32 = _crc32_of(self.sums)

    def tensor(self, name: str) -> Tensor:
        """A tensor, on the CPU."""
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except Exception as problem:
            raise self._damaged(f"{name}: {problem}") from problem
        if crc32(tensor) != self.sums[name]:
            raise self._damaged(f"{name}: wrong checksum")
        return tensor

    def _damaged(self, what: str) -> FactorsError:
        return FactorsError(f"{self.path}: damaged, or not of ds_kfac ({what}); remove the folder and compute it again")


def _crc32_of(values: Any) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write a file, whole or not at all (FactorsError), and return the CRC-32 of its tensors' checksums."""
    save, temporary = safetensors().save_file, path.with_name(path.name + ".tmp")
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    sums = {name: crc32(tensor) for name, tensor in copies.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(copies, str(temporary), {"format": "pt", SUMS: json.dumps(sums)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception as problem:  # safetensors raises its own class for system errors
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        full = getattr(problem, "errno", None) == errno.ENOSPC or "No space left" in str(problem)
        advice = "; free some space and start again: what was saved before is kept" if full else ""
        raise FactorsError(f"{path}: could not be written ({problem}){advice}") from problem
    return _crc32_of(sums)


def write_index(folder: Path, header: Mapping[str, Any]) -> None:
    """Finish a folder. ``header``: see :class:`Factors`."""
    whole = {"format": "ds_kfac.factors", "version": VERSION, **header}
    try:
        write_text(folder / INDEX, json.dumps({**whole, SUMS: _crc32_of(whole)}, indent=1))
    except OSError as problem:
        raise FactorsError(f"{folder / INDEX}: could not be written ({problem})") from problem


def described(layer: LayerSpec, keys: Mapping[str, str]) -> dict[str, Any]:
    """A layer's entry in the index. ``keys``: side -> key of its factor, without identity sides."""
    return {
        "module": layer.module, "kind": layer.kind, "weight": layer.weight, "bias": layer.bias,
        "A": {**asdict(layer.A), "of": keys.get("A")}, "G": {**asdict(layer.G), "of": keys.get("G")},
        "groups": layer.groups, "part": list(layer.part),
    }  # fmt: skip


@dataclass(frozen=True)
class Factors:
    """A finished folder. Tensors are read on access, to the CPU.

    Attributes:
        header: the index. "layers": name -> module, kind, weight, bias, sides and groups. "counts": factor key ->
            number of rows (A) or loss terms (G) that it is the mean of. "batches", "sequences", "rows": of the data.
            "fisher": "empirical", "monte_carlo" or "activations_only". "left_alone": module -> why. "weight_map":
            tensor -> shard. "shards": shard -> CRC-32 of its checksums. "data": CRC-32 of each rank's batches.
    """

    folder: Path
    header: Mapping[str, Any]
    _shards: dict[str, Shard] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "Factors":
        """Open a folder. Raises FactorsError if it is unfinished, damaged, or not ours."""
        path = Path(folder) / INDEX
        try:
            header = json.loads(path.read_text())
        except FileNotFoundError:
            raise FactorsError(
                f"{path}: there is no such file, so the folder holds no factors, or they are not finished; run "
                "`python -m ds_kfac factors` with the same arguments to go on"
            ) from None
        except ValueError as problem:
            raise FactorsError(f"{path}: {problem}") from problem
        if not isinstance(header, dict) or header.get("format") != "ds_kfac.factors":
            raise FactorsError(f'{path}: its "format" is not ds_kfac.factors')
        if header.get("version") != VERSION:
            raise FactorsError(f"{path}: version {header.get('version')}; this ds_kfac reads {VERSION}")
        if header.pop(SUMS, None) != _crc32_of(header):
            raise FactorsError(f"{path}: wrong checksum: damaged, or changed; remove the folder and compute it again")
        if absent := sorted({name for name in header["weight_map"].values() if not (Path(folder) / name).exists()}):
            raise FactorsError(f"{path}: names {', '.join(absent)}, which is not there")
        return cls(Path(folder), header)

    @property
    def layers(self) -> Mapping[str, Mapping[str, Any]]:
        return self.header["layers"]

    def side(self, layer: str, side: str) -> Side:
        """Width and blocks of "A" or "G"."""
        entry = self._layer(layer)[side]
        return Side(entry["dim"], entry["block"])

    def count(self, layer: str, side: str) -> float:
        """Number of rows (A) or loss terms (G) that a factor is the mean of."""
        key = self._key(layer, side)
        if key not in self.header["counts"]:
            raise FactorsError(f"{self.folder}: {layer} has no {side}; it was not computed")
        return self.header["counts"][key]

    def factor(self, layer: str, side: str) -> Tensor:
        """A factor as one matrix, fp32 [D, D], zero between blocks; the identity if the side is that."""
        shape = self.side(layer, side)
        if shape.block == 0:
            return torch.eye(shape.dim, dtype=torch.float32, device="cpu")
        blocks = shape.blocks(self.packed(layer, side))
        return torch.block_diag(*(matrix for group in blocks for matrix in group))

    def packed(self, layer: str, side: str) -> Tensor:
        """A factor's packed lower triangles, fp32 [P], as training has them."""
        return self._tensor(self._key(layer, side)).float()

    def eigenbasis(self, layer: str, side: str) -> Eigenbasis:
        """A factor's eigenbasis. FactorsError if there is none, as for a zero factor."""
        shape = self.side(layer, side)
        if shape.block == 0:
            return Eigenbasis((), torch.ones(shape.dim, dtype=torch.float32, device="cpu"))
        key = self._key(layer, side)
        vectors = tuple(self._tensor(f"{key}/vectors.{k}") for k in range(len(shape.groups) if shape.block > 1 else 0))
        return Eigenbasis(vectors, self._tensor(f"{key}/values"))

    def corrected(self, layer: str, per: str = "token") -> Tensor:
        """EKFAC's eigenvalues [O, I], per "token" or per "sequence". Raises FactorsError if there are none."""
        if per not in KINDS:
            raise FactorsError(f"corrected eigenvalues: got {per!r}; must be one of {', '.join(KINDS)}")
        self._layer(layer)
        return self._tensor(f"{layer}/corrected.{per}")

    def has(self, layer: str, what: str) -> bool:
        """Whether there is a tensor: "A", "G/values", "corrected.token", .. (named as in the files)."""
        about, (side, slash, rest) = self._layer(layer), what.partition("/")
        name = f"{about[side]['of']}{slash}{rest}" if side in ("A", "G") else f"{layer}/{what}"
        return name in self.header["weight_map"]

    def _layer(self, name: str) -> Mapping[str, Any]:
        if name not in self.layers:
            near = difflib.get_close_matches(name, self.layers, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(list(self.layers)[:4])}, ..."
            raise FactorsError(f"{self.folder}: no layer {name!r}; {hint}")
        return self.layers[name]

    def _key(self, layer: str, side: str) -> str:
        return self._layer(layer)[side]["of"]

    def _tensor(self, name: str) -> Tensor:
        shard = self.header["weight_map"].get(name)
        if shard is None:
            raise FactorsError(f"{self.folder}: has no {name}; it was not computed, or its factor is zero")
        return self._open(shard).tensor(name)

    def _open(self, name: str) -> Shard:
        if name not in self._shards:
            shard = Shard(self.folder / name)
            if shard.crc32 != self.header["shards"][name]:
                raise FactorsError(f"{shard.path}: is of other factors than {self.folder / INDEX}")
            self._shards[name] = shard
        return self._shards[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)
