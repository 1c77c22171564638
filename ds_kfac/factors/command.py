"""Run ``python -m ds_kfac factors`` and ``python -m ds_kfac convert``."""

import argparse
import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ds_kfac.config.values import find_block, read_config
from ds_kfac.diagnostics.text import Row, columns
from ds_kfac.factors.convert import convert
from ds_kfac.factors.files import Factors, FactorsError
from ds_kfac.factors.fitting import fit, joined

SHOWN = 40
"""Largest number of layers in the table that ``factors`` prints."""


def run(arguments: argparse.Namespace) -> str:
    """Compute factors. Returns the text to print, which is empty on all ranks but the first."""
    given = {} if arguments.config is None else read_config(arguments.config)
    block: Any = find_block(given) or {}
    if arguments.fisher and isinstance(block, Mapping):
        block = {**block, "factor": {**(block.get("factor") or {}), "fisher": arguments.fisher}}
    # set the device, because zero.Init uses it
    get_accelerator().set_device(int(os.environ.setdefault("LOCAL_RANK", "0")))
    rank = int(os.environ.get("RANK", 0))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    with joined():
        model = _model(arguments.model, given)
        if arguments.model.startswith("hf:"):
            tokenizer = _package("transformers", "--model hf:").AutoTokenizer.from_pretrained(
                arguments.model[3:]
            )
            data: Any = windows(arguments, tokenizer, rank, ranks)
        else:
            data = _function(arguments.data)(rank, ranks)
        corrected = not arguments.no_corrected
        factors = fit(model, data, out=arguments.out, config=block, corrected=corrected)
    if rank != 0:
        return ""
    title = (
        f"{arguments.out}: {len(factors.layers)} layers, {factors.header['fisher']} Fisher, "
        f"{factors.header['sequences']:,} sequences"
    )
    return "\n".join([title, *table(factors)])


def run_convert(arguments: argparse.Namespace) -> str:
    """Convert factors. Returns the text to print."""
    factors = Factors.load(arguments.factors)
    options = {"name": arguments.name, "rank": arguments.rank, "rho": arguments.rho}
    left_out = convert(factors, arguments.to, arguments.out, **options)
    total = len(factors.layers)
    written = total - len(left_out)
    lines = [f"wrote {written} of {total} layers for {arguments.to}: {arguments.out}"]
    lines += [f"  left out: {layer}: {why}" for layer, why in left_out.items()]
    return "\n".join(lines)


def _package(name: str, option: str) -> Any:
    """Import a package. If that fails, raises FactorsError, which names the option that needs the
    package."""
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise FactorsError(f"{option}: {problem}; pip install {name}") from problem


def _function(name: str) -> Any:
    """Import a function that is named as "module:function"."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as problem:
        text = f"{name}: {problem}; must be module:function, importable from here"
        raise FactorsError(text) from problem


def _model(name: str, given: Mapping[str, Any]) -> nn.Module:
    """Return the model on this rank's device. At ZeRO stage 3 this is an engine, whose weights are
    partitioned while they are read.

    Args:
        name: value of --model, "hf:<model>" or "module:function".
        given: a DeepSpeed config.
    """
    is_sharded = given.get("zero_optimization", {}).get("stage", 0) == 3
    used_keys = ("zero_optimization", "bf16", "fp16", "torch_autocast")
    config = {key: given[key] for key in used_keys if key in given}
    config["train_micro_batch_size_per_gpu"] = 1
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    enabled = [key for key in dtypes if given.get(key, {}).get("enabled") in (True, "auto")]
    dtype = dtypes[enabled[0]] if enabled else torch.float32
    if name.startswith("hf:"):
        transformers = _package("transformers", "--model hf:")
        if is_sharded:  # transformers uses this object, so it must stay alive
            _alive = importlib.import_module("transformers.integrations").HfDeepSpeedConfig(config)
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(name[3:], dtype=dtype)
        except (OSError, ValueError) as problem:
            raise FactorsError(f"--model {name}: {problem}") from problem
    else:
        make = _function(name)
        partitioned: Any = contextlib.nullcontext()
        if is_sharded:
            partitioned = deepspeed.zero.Init(config_dict_or_path=config)
        with partitioned:
            model = make()
        if not isinstance(model, nn.Module):
            got = type(model).__name__
            raise FactorsError(f"--model {name}: returned {got}; must return an nn.Module")
    if is_sharded:
        return deepspeed.initialize(model=model, config=config)[0]
    return model.to(get_accelerator().current_device_name(), dtype)


def windows(
    arguments: argparse.Namespace, tokenizer: Any, rank: int, ranks: int
) -> list[dict[str, Tensor]]:
    """Join the texts of --data, cut them into sequences of --length tokens, and return this rank's
    batches of sequences."""
    length = arguments.length
    end = tokenizer.eos_token_id
    tokens: list[int] = []
    for text in _texts(Path(arguments.data)):
        tokens += text if isinstance(text, list) else tokenizer(text)["input_ids"]
        if end is not None:
            tokens.append(end)
        if arguments.limit and len(tokens) >= arguments.limit * length:
            break
    count = min(len(tokens) // length, arguments.limit or len(tokens))
    if not count:
        raise FactorsError(
            f"--data {arguments.data}: {len(tokens)} tokens, fewer than one sequence of {length}"
        )
    rows = torch.tensor(tokens[: count * length], device="cpu").view(count, length)[rank::ranks]
    batches = rows.split(arguments.batch) if len(rows) else ()
    return [{"input_ids": batch, "labels": batch} for batch in batches]


def _texts(path: Path) -> Iterator[str | list[int]]:
    """Yield the texts, or lists of tokens, of a text file, a .jsonl file or a folder of the package
    datasets."""
    datasets = _package("datasets", f"--data {path}")
    try:
        if path.is_dir():
            rows = datasets.load_from_disk(str(path))
        elif path.suffix == ".jsonl":
            rows = datasets.load_dataset("json", data_files=str(path), split="train")
        else:
            options = {"data_files": str(path), "split": "train", "sample_by": "document"}
            rows = datasets.load_dataset("text", **options)
        for row in rows:
            # "" + raises TypeError if the value is not a string
            yield list(row["input_ids"]) if "input_ids" in row else "" + row["text"]
    except (OSError, ValueError, TypeError, KeyError, datasets.exceptions.DatasetsError) as problem:
        raise FactorsError(f"--data {path}: no text or input_ids ({problem!r})") from problem


def effective_rank(values: Tensor) -> float:
    """Return (sum of the eigenvalues)^2 / sum of their squares. If all nonzero eigenvalues are
    equal, this is their number."""
    values = values.double().clamp(min=0)
    return float(values.sum() ** 2 / values.square().sum().clamp(min=1e-300))


def condition(values: Tensor) -> float:
    """Return the ratio of the largest eigenvalue to the smallest eigenvalue that exceeds fp32
    rounding. Return NaN if no eigenvalue is positive."""
    values = values.double()
    largest = values.max()
    if not largest > 0:
        return float("nan")
    floor = largest * torch.finfo(torch.float32).eps
    return float(largest / values[values > floor].min())


def table(factors: Factors) -> list[str]:
    """Return the lines of a table with a row for each of the first :data:`SHOWN` layers."""
    rows: list[Row] = [("layer", "[O, I]", "rows", "A rank", "A cond", "G rank", "G cond")]
    for layer in list(factors)[:SHOWN]:
        A = factors.side(layer, "A")
        G = factors.side(layer, "G")
        count = f"{factors.count(layer, 'A'):,.0f}" if factors.has(layer, "A") else ""
        cells = [layer, f"{G.dim:,} x {A.dim:,}", count]
        for side, shape in (("A", A), ("G", G)):
            if shape.block and factors.has(layer, f"{side}/values"):
                values = factors.eigenbasis(layer, side).values
                cells += [f"{effective_rank(values):,.1f}", f"{condition(values):.1e}"]
            else:
                cells += ["zero" if shape.block else "identity", ""]
        rows.append(tuple(cells))
    lines = columns(rows, right=True)
    if len(factors.layers) > SHOWN:
        lines.append(f"  and {len(factors.layers) - SHOWN:,} more layers, listed in index.json")
    left_alone = list(factors.header.get("left_alone", {}))
    if left_alone:
        more = ", ..." if len(left_alone) > 4 else ""
        names = ", ".join(left_alone[:4])
        lines.append(f"  left alone: {len(left_alone)} modules, {names}{more}")
    return lines
