"""Factors in the formats of other tools: kronfluence, RegMean, GPTQ, PEFT's EVA.

These only take plain linear layers with dense factors; layers that are left out are returned.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_kfac.factors.files import Factors, FactorsError, write_shard

LINEAR = ("Linear", "Conv1D")


def convert(factors: Factors, kind: str, out: Path, *, name: str = "ds_kfac", rank: int = 16, rho: float = 2.0) -> dict:
    """Write factors in another tool's format.

    Args:
        kind: "kronfluence", "regmean", "gptq" or "eva".
        out: a safetensors file; for kronfluence its Analyzer's ``output_dir``, in which ``factors_<name>`` appears.
        name: kronfluence: name of the factors.
        rank, rho: eva: rows of LoRA's A, the mean over layers; a layer has at most ``rho`` times as many.

    Returns layer that is left out -> why.

    Raises:
        FactorsError: an unknown kind, numbers out of range, a folder for a file, or nothing that could be converted.
    """
    if kind not in CONVERTERS:
        raise FactorsError(f"convert: got {kind!r}; must be one of {', '.join(CONVERTERS)}")
    if kind != "kronfluence" and (out.is_dir() or not out.name):
        raise FactorsError(f"convert: out: {out} is a folder; {kind} needs the name of a safetensors file")
    if kind == "kronfluence" and out.exists() and not out.is_dir():
        raise FactorsError(f"convert: out: {out} is a file; {kind} needs a folder")
    reasons = {layer: _unfit(factors, layer, about, kind) for layer, about in factors.layers.items()}
    left = {layer: why for layer, why in reasons.items() if why is not None}
    fit = [layer for layer in reasons if layer not in left]
    if not fit:
        raise FactorsError(f"convert: no layer has what {kind} needs: {next(iter(left.items()), 'there is none')}")
    if kind == "eva" and (rank < 1 or rho < 1):
        raise FactorsError(f"convert: rank {rank}, rho {rho}; both must be at least 1")
    CONVERTERS[kind](factors, fit, out, {"name": name, "rank": rank, "rho": rho})
    return left


def _unfit(factors: Factors, layer: str, about: Mapping[str, Any], kind: str) -> str | None:
    if about["kind"] not in LINEAR or about["part"] != [0, 1]:
        return f"a {about['kind']}, which {kind} does not know" if about["part"] == [0, 1] else "a part of a stack"
    if kind == "kronfluence" and about["kind"] != "Linear":
        return "a Conv1D, which kronfluence does not track: replace it by an nn.Linear before"
    for side in "AG" if kind == "kronfluence" else "A":
        shape = factors.side(layer, side)
        if shape.block != shape.dim or not factors.has(layer, side):
            return f"its {side} is no dense matrix ({shape.kind}); raise factor.dense_max"
        if kind == "kronfluence" and not factors.has(layer, f"{side}/values"):
            return f"its {side} is zero, or has no eigenvectors"
    return None


def inputs(factors: Factors, layer: str) -> Tensor:
    """A of a layer without the 1 of its bias: E[x x^T], fp32 [I, I]."""
    A = factors.factor(layer, "A")
    return A if factors.layers[layer]["bias"] is None else A[:-1, :-1].contiguous()


def kronfluence(factors: Factors, layers: list[str], out: Path, options: Mapping[str, Any]) -> None:
    """The files of ``Analyzer.fit_all_factors``, which ``compute_pairwise_scores`` reads: sums and counts of
    covariances, eigenvectors, and lambda per sequence."""
    folder = out / f"factors_{options['name']}"
    tables: dict[str, dict[str, Tensor]] = {}

    def put(file: str, layer: str, tensor: Tensor) -> None:
        tables.setdefault(file, {})[factors.layers[layer]["module"]] = tensor.contiguous()

    sequences = float(factors.header.get("sequences", 0))
    for layer in layers:
        rows = factors.count(layer, "A")
        for side, word in (("A", "activation"), ("G", "gradient")):
            put(f"{word}_covariance", layer, factors.factor(layer, side) * factors.count(layer, side))
            put(f"num_{word}_covariance_processed", layer, torch.tensor([round(rows)], device="cpu"))
            basis = factors.eigenbasis(layer, side)
            put(f"{word}_eigenvectors", layer, basis.vectors[0][0])
            put(f"{word}_eigenvalues", layer, basis.values)
        if factors.has(layer, "corrected.sequence"):
            put("lambda_matrix", layer, factors.corrected(layer, "sequence") * sequences)
            put("num_lambda_processed", layer, torch.tensor([round(sequences)], device="cpu"))
    if "lambda_matrix" in tables and len(tables["lambda_matrix"]) < len(layers):
        raise FactorsError("convert: some layers have eigenvalues per sequence, others not; kronfluence needs all")
    for file, table in tables.items():
        write_shard(folder / f"{file}.safetensors", table)
    empirical = factors.header["fisher"] == "empirical"
    arguments = {"strategy": "ekfac" if "lambda_matrix" in tables else "kfac", "use_empirical_fisher": empirical}
    (folder / "factor_arguments.json").write_text(json.dumps(arguments, indent=4))


def _grams(scale: Callable[[Factors, str], float]) -> Callable[..., None]:
    def write(factors: Factors, layers: list[str], out: Path, options: Mapping[str, Any]) -> None:
        write_shard(out, {factors.layers[x]["weight"]: inputs(factors, x) * scale(factors, x) for x in layers})

    return write


def eva(factors: Factors, layers: list[str], out: Path, options: Mapping[str, Any]) -> None:
    """``eva_state_dict`` for ``peft.initialize_lora_eva_weights``: the directions in which a layer's inputs vary most,
    [r, I]. Directions are shared out by the variance that they explain (Paischer et al. 2024, arXiv:2410.07170)."""
    most = int(options["rank"] * options["rho"])
    directions = {}
    for layer in layers:
        values, vectors = torch.linalg.eigh(inputs(factors, layer).double())
        directions[layer] = (
            values.flip(0)[:most] / values.clamp(min=0).sum().clamp(min=1e-300),
            vectors.mT.flip(0)[:most].float(),
        )
    shares = sorted((float(part), layer) for layer, (parts, _) in directions.items() for part in parts)[::-1]
    counts = dict.fromkeys(layers, 0)
    for _, layer in shares[: options["rank"] * len(layers)]:
        counts[layer] += 1
    prefix = "base_model.model."
    write_shard(out, {prefix + factors.layers[x]["module"]: directions[x][1][: max(1, counts[x])] for x in layers})


CONVERTERS: dict[str, Callable[..., None]] = {
    "kronfluence": kronfluence,
    # the sum of x x^T; from a run's export the mean, as its counts are batches
    "regmean": _grams(lambda factors, layer: factors.count(layer, "A") if "rows" in factors.header else 1.0),
    "gptq": _grams(lambda factors, layer: 2.0),  # its H, 2 E[x x^T]
    "eva": eva,
}
"""Format -> function (factors, layers, out, options) that writes it. regmean, gptq: weight's name -> [I, I]."""
