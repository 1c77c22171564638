"""Write and read files of factors: a safetensors file from every rank, and an index that is written
last.

    index.json                    layers, counts, and which file has which tensor
    factors-00000.safetensors     what rank 0 owns

    <layer>/A, <layer>/G      [P], the mean of a a^T or g g^T: lower triangles of the side's blocks,
                              one after the other, row by row; fp32, or bf16 in a checkpoint
    <layer>/A/vectors.<k>     [n, b, b], eigenvectors of the k-th group of equal blocks, in columns
    <layer>/A/values          [D], eigenvalues, ascending in each block
    <layer>/corrected         [O, I], EKFAC's eigenvalues, see corrected.py

A folder without index.json is not finished, and does not load. ``layer`` is the name of a module,
or of one of its matrices, such as an expert's. O and I are the numbers of rows and columns of a
layer's matrix. The bias, whose input is 1, counts as the last column.
"""

import difflib
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_kfac.checkpoint.files import write_text
from ds_kfac.curvature.eigen import Eigenbasis
from ds_kfac.curvature.factor import Side
from ds_kfac.model.layers import LayerSpec

INDEX = "index.json"
VERSION = 3
"""Number of the layout of the files. Increase this number if older versions of ds_kfac could not
read the new files."""


class FactorsError(ValueError):
    """Factors could not be computed, written or read. The message says what to do."""


def safetensors() -> Any:
    """Return the module safetensors.torch. Raises FactorsError if it is not installed."""
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as problem:
        text = f"factors are stored in safetensors files ({problem}): pip install safetensors"
        raise FactorsError(text) from problem


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file. Raises FactorsError if it could not be written."""
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        safetensors().save_file(copies, str(path), {"format": "pt"})
    except Exception as problem:  # safetensors raises its own class for system errors
        raise FactorsError(f"{path}: could not be written ({problem})") from problem


def write_index(folder: Path, header: Mapping[str, Any]) -> None:
    """Write the index, without which a folder is unfinished. ``header``: see :class:`Factors`."""
    index = {"format": "ds_kfac.factors", "version": VERSION, **header}
    write_text(folder / INDEX, json.dumps(index, indent=1))


def described(layer: LayerSpec, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return a layer's entry in the index.

    Args:
        keys: "A" or "G" -> key of the factor. Sides that are the identity have none.
    """
    return {
        "module": layer.module,
        "kind": layer.kind,
        "weight": layer.weight,
        "bias": layer.bias,
        "A": {**asdict(layer.A), "of": keys.get("A")},
        "G": {**asdict(layer.G), "of": keys.get("G")},
        "groups": layer.groups,
        "part": list(layer.part),
    }


@dataclass(frozen=True)
class Factors:
    """Factors in a finished folder. A tensor is read into CPU memory when it is accessed.

    Attributes:
        folder: where the files are.
        header: the index, a dict with these keys:

            - "layers": layer name -> module, kind, weight, bias, sides, groups and part.
            - "counts": factor key -> number of rows over which the factor is averaged. In a run's
              export it is the number of batches.
            - "fisher": "empirical", "monte_carlo" or "activations_only".
            - "weight_map": tensor name -> file name.
            - only from ``fit``: "batches" and "sequences" (how many of them the data had);
              "left_alone" (module name -> why the module has no factors); "weight_sharing".
            - only from a run's export: "steps".
    """

    folder: Path
    header: Mapping[str, Any]
    _files: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "Factors":
        """Open a folder. Raises FactorsError if the folder is unfinished, damaged, or was not
        written by ds_kfac."""
        path = Path(folder) / INDEX
        try:
            header = json.loads(path.read_text())
            version = header["version"] if header["format"] == "ds_kfac.factors" else None
        except FileNotFoundError:
            text = f"{path}: no such file: the folder holds no factors, or is not finished"
            raise FactorsError(text) from None
        except (ValueError, KeyError, TypeError) as problem:
            raise FactorsError(f"{path}: not written by ds_kfac ({problem!r})") from problem
        if version != VERSION:
            raise FactorsError(
                f"{path}: has version {version}, but this ds_kfac reads version {VERSION}"
            )
        return cls(Path(folder), header)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    @property
    def layers(self) -> Mapping[str, Mapping[str, Any]]:
        """Layer name -> its entry in the index."""
        return self.header["layers"]

    def side(self, layer: str, side: str) -> Side:
        """Return width and blocks of a layer's side, "A" or "G"."""
        entry = self._layer(layer)[side]
        return Side(entry["dim"], entry["block"])

    def count(self, layer: str, side: str) -> float:
        """Return the number of rows (in a run's export, of batches) over which a factor is
        averaged."""
        key = self._layer(layer)[side]["of"]
        if key not in self.header["counts"]:
            raise FactorsError(f"{self.folder}: {layer} has no {side}; it was not computed")
        return self.header["counts"][key]

    def factor(self, layer: str, side: str) -> Tensor:
        """Return a factor as one matrix, fp32 [D, D], zero outside of the blocks. A side that is
        the identity gives the unit matrix."""
        shape = self.side(layer, side)
        if shape.block == 0:
            return torch.eye(shape.dim, dtype=torch.float32, device="cpu")
        blocks = shape.blocks(self.packed(layer, side))
        return torch.block_diag(*(matrix for group in blocks for matrix in group))

    def packed(self, layer: str, side: str) -> Tensor:
        """Return a factor's packed lower triangles, fp32 [P], in the form that training uses."""
        return self._tensor(self._layer(layer)[side]["of"]).float()

    def eigenbasis(self, layer: str, side: str) -> Eigenbasis:
        """Return a factor's eigenbasis. Raises FactorsError if the factor has none, for example
        because it is zero."""
        shape = self.side(layer, side)
        if shape.block == 0:
            return Eigenbasis((), torch.ones(shape.dim, dtype=torch.float32, device="cpu"))
        key = self._layer(layer)[side]["of"]
        groups = shape.groups if shape.block > 1 else ()  # a diagonal has no eigenvectors
        vectors = tuple(self._tensor(f"{key}/vectors.{k}") for k in range(len(groups)))
        return Eigenbasis(vectors, self._tensor(f"{key}/values"))

    def corrected(self, layer: str) -> Tensor:
        """Return EKFAC's eigenvalues, fp32 [O, I]. Raises FactorsError if there are none."""
        self._layer(layer)
        return self._tensor(f"{layer}/corrected")

    def has(self, layer: str, what: str) -> bool:
        """Return whether the files have a tensor of a layer. ``what``: the tensor's name in the
        files without the layer's name, such as "A", "G/values" or "corrected"."""
        entry = self._layer(layer)
        side, slash, rest = what.partition("/")
        name = f"{layer}/{what}"
        if side in ("A", "G"):
            name = f"{entry[side]['of']}{slash}{rest}"  # layers may share a factor
        return name in self.header["weight_map"]

    def _layer(self, name: str) -> Mapping[str, Any]:
        if name not in self.layers:
            names = difflib.get_close_matches(name, self.layers, n=1) or list(self.layers)[:4]
            raise FactorsError(
                f"{self.folder}: no layer {name!r}; there are layers such as {', '.join(names)}"
            )
        return self.layers[name]

    def _tensor(self, name: str) -> Tensor:
        file = self.header["weight_map"].get(name)
        if file is None:
            raise FactorsError(
                f"{self.folder}: has no {name}: it was not computed, or the factor is zero"
            )
        try:
            if file not in self._files:
                self._files[file] = safetensors().safe_open(self.folder / file, "pt")
            return self._files[file].get_tensor(name)
        except Exception as problem:  # safetensors' own errors
            text = f"{self.folder / file}: {name} cannot be read ({problem})"
            raise FactorsError(text) from problem
