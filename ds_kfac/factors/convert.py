"""Write factors in the formats of other tools: kronfluence, RegMean, GPTQ and PEFT's EVA.

These tools only take plain linear layers with dense factors. Other layers are left out.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from ds_kfac.factors.files import Factors, FactorsError, write_tensors

TOOLS = ("kronfluence", "regmean", "gptq", "eva")


def convert(
    factors: Factors, tool: str, out: Path, *, name: str = "ds_kfac", rank: int = 16, rho: float = 2
) -> dict[str, str]:
    """Write factors in another tool's format.

    Args:
        tool: one of :data:`TOOLS`.
        out: path of the safetensors file to write. For kronfluence, the ``output_dir`` of its
            Analyzer; the files are written to the folder ``factors_<name>`` in it.
        name: only for kronfluence, name of the factors.
        rank: only for eva, mean rank of the adapters of all layers.
        rho: only for eva, largest rank of a single adapter, as a multiple of ``rank``.

    Returns the layers that were left out, in a dict from layer name to reason.

    Raises:
        FactorsError: an argument is wrong, or no layer can be converted.
    """
    if tool not in TOOLS:
        raise FactorsError(f"convert: got {tool!r}; must be one of {', '.join(TOOLS)}")
    reasons = {layer: _unfit(factors, layer, tool) for layer in factors}
    left_out = {layer: why for layer, why in reasons.items() if why}
    layers = [layer for layer in factors if layer not in left_out]
    if not layers:
        raise FactorsError(f"convert: no layer has what {tool} needs: {left_out}")
    if tool == "kronfluence":
        kronfluence(factors, layers, out / f"factors_{name}")
        return left_out
    if out.is_dir():
        raise FactorsError(f"convert: out: {out} is a folder; {tool} needs the name of a file")
    if tool == "eva":
        write_tensors(out, eva(factors, layers, rank, rho))
    else:
        tensors = {}
        for layer in layers:
            is_of_a_run = "steps" in factors.header  # a run's export counts batches, not rows
            if tool == "gptq":
                gain = 2.0  # its H is 2 E[x x^T]
            elif is_of_a_run:
                gain = 1.0  # RegMean with the mean of x x^T
            else:
                gain = factors.count(layer, "A")  # RegMean with the sum of x x^T
            tensors[factors.layers[layer]["weight"]] = gain * inputs(factors, layer)
        write_tensors(out, tensors)
    return left_out


def _unfit(factors: Factors, layer: str, tool: str) -> str:
    """Return why a tool cannot take a layer; "" if it can."""
    entry = factors.layers[layer]
    if entry["part"] != [0, 1]:
        return "one of several parts of a parameter"
    if entry["kind"] not in ("Linear", "Conv1D"):
        return f"a {entry['kind']}, which {tool} does not know"
    if tool == "kronfluence" and entry["kind"] != "Linear":
        return "a Conv1D, which kronfluence does not track: replace it by an nn.Linear first"
    for side in "AG" if tool == "kronfluence" else "A":
        shape = factors.side(layer, side)
        if shape.block != shape.dim or not factors.has(layer, side):
            return f"its {side} is not a dense matrix ({shape.kind}); raise factor.dense_max"
        if tool == "kronfluence" and not factors.has(layer, f"{side}/values"):
            return f"its {side} is zero, or has no eigenvectors"
    return ""


def inputs(factors: Factors, layer: str) -> Tensor:
    """Return E[x x^T] of a layer's inputs, fp32 [I, I]: A without the row and column of the
    bias."""
    A = factors.factor(layer, "A")
    return A if factors.layers[layer]["bias"] is None else A[:-1, :-1]


def kronfluence(factors: Factors, layers: list[str], folder: Path) -> None:
    """Write the files of ``Analyzer.fit_all_factors``, which ``compute_pairwise_scores`` reads.

    The files hold eigenvectors, eigenvalues, covariances as sums over rows, and lambda as a sum
    over sequences. They also hold the counts of these rows and sequences.
    """
    tables: dict[str, dict[str, Tensor]] = {}  # file name -> module name -> tensor

    def put(file: str, layer: str, tensor: Tensor | float) -> None:
        if not isinstance(tensor, Tensor):
            tensor = torch.tensor([round(tensor)], device="cpu")
        tables.setdefault(file, {})[factors.layers[layer]["module"]] = tensor

    for layer in layers:
        for side, word in (("A", "activation"), ("G", "gradient")):
            count = factors.count(layer, side)
            basis = factors.eigenbasis(layer, side)
            put(f"{word}_covariance", layer, factors.factor(layer, side) * count)
            put(f"num_{word}_covariance_processed", layer, count)
            put(f"{word}_eigenvectors", layer, basis.vectors[0][0])
            put(f"{word}_eigenvalues", layer, basis.values)
        if factors.has(layer, "corrected"):
            sequences = factors.header["sequences"]
            put("lambda_matrix", layer, factors.corrected(layer) * sequences)
            put("num_lambda_processed", layer, sequences)
    has_lambda = "lambda_matrix" in tables
    if has_lambda and len(tables["lambda_matrix"]) < len(layers):
        raise FactorsError(
            "convert: kronfluence needs corrected eigenvalues for all layers, or for none"
        )
    for file, table in tables.items():
        write_tensors(folder / f"{file}.safetensors", table)
    arguments = {
        "strategy": "ekfac" if has_lambda else "kfac",
        "use_empirical_fisher": factors.header["fisher"] == "empirical",
    }
    (folder / "factor_arguments.json").write_text(json.dumps(arguments, indent=4))


def eva(factors: Factors, layers: list[str], rank: int, rho: float) -> dict[str, Tensor]:
    """Return an ``eva_state_dict`` for ``peft.initialize_lora_eva_weights``.

    For each layer it has a tensor [r, I] with the r directions in which the layer's inputs vary
    most. To choose r, the directions of all layers are sorted by the fraction of their layer's
    variance that they explain. The first ``rank`` times (number of layers) directions are kept, and
    at least one per layer (Paischer et al. 2024, arXiv:2410.07170).
    """
    if rank < 1 or rho < 1:
        raise FactorsError(f"convert: rank {rank}, rho {rho}; both must be at least 1")
    most = int(rank * rho)
    directions = {}
    shares = []  # (part of the layer's variance, layer) of each direction
    for layer in layers:
        values, vectors = torch.linalg.eigh(inputs(factors, layer).double())
        directions[layer] = vectors.mT.flip(0)[:most].float()
        parts = values.flip(0)[:most] / values.clamp(min=0).sum().clamp(min=1e-300)
        shares += [(part, layer) for part in parts.tolist()]
    counts = dict.fromkeys(layers, 0)
    for _, layer in sorted(shares, reverse=True)[: rank * len(layers)]:
        counts[layer] += 1
    return {
        f"base_model.model.{factors.layers[layer]['module']}": rows[: max(1, counts[layer])]
        for layer, rows in directions.items()
    }
