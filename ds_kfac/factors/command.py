"""``python -m ds_kfac factors`` and ``convert``; and the table of rows, effective rank and condition number of every
side with which the first ends."""

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_kfac.config.values import find_block, read_config
from ds_kfac.factors.convert import convert
from ds_kfac.factors.files import Factors, FactorsError
from ds_kfac.factors.fitting import fit, joined
from ds_kfac.log import Row, columns

SIZES = {"length": 512, "batch": 8, "limit": None}
"""Defaults of options about the data of hf: models."""
STOPPED = 130
"""Exit status after Ctrl-C, the shell's."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def run(arguments: argparse.Namespace) -> str:
    """Compute the factors; returns the text to print, empty on all ranks but the first."""
    given = {} if arguments.config is None else read_config(arguments.config)
    for name in SIZES:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise FactorsError(f"--{name}: got {value}; must be at least 1")
        if value is not None and not arguments.model.startswith("hf:"):
            raise FactorsError(
                f"--{name} {value}: has no effect on the batches of --data {arguments.data}, which is a function for "
                "this model; cut them there, and leave it out"
            )
        setattr(arguments, name, SIZES[name] if value is None else value)
    block: Any = find_block(given) or {}
    if arguments.fisher and isinstance(block, Mapping):
        block = {**block, "factor": {**(block.get("factor") or {}), "fisher": arguments.fisher}}
    get_accelerator().set_device(int(os.environ.setdefault("LOCAL_RANK", "0")))  # zero.Init asks for it
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    source = {key: str(getattr(arguments, key)) for key in ("model", "data", "length", "batch", "limit")}
    with joined():  # the model is read inside: at ZeRO stage 3 its weights are partitioned while they are read
        model, tokenizer = _model(arguments.model, given)
        data = _data(arguments, tokenizer, rank, ranks)
        try:
            factors = fit(
                model, data, out=arguments.out, config=block, corrected=not arguments.no_corrected, source=source
            )
        except KeyboardInterrupt:
            if not rank:
                print(
                    "\nds_kfac factors: stopped. The same command goes on from the last save, of every five minutes",
                    file=sys.stderr,
                )
            raise SystemExit(STOPPED) from None
    if rank:
        return ""
    title = (
        f"{arguments.out}: {len(factors.layers)} layers, {factors.header['fisher']} Fisher, "
        f"{factors.header['sequences']:,.0f} sequences, {factors.header['rows']:,.0f} rows"
    )
    return "\n".join([title, *table(factors)])


def run_convert(arguments: argparse.Namespace) -> str:
    factors = Factors.load(arguments.factors)
    left = convert(factors, arguments.to, arguments.out, name=arguments.name, rank=arguments.rank, rho=arguments.rho)
    done, total = len(factors.layers) - len(left), len(factors.layers)
    lines = [f"wrote {done} of {total} layers for {arguments.to}: {arguments.out}"]
    return "\n".join([*lines, *(f"  left out: {layer}: {why}" for layer, why in left.items())])


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as problem:
        raise FactorsError(f"{name}: {problem}; must be module:function, importable from here") from problem


def _model(name: str, given: Mapping[str, Any]) -> tuple[Any, Any]:
    """Model, or engine at stage 3, on this rank's device; and its tokenizer."""
    stage = given.get("zero_optimization", {}).get("stage", 0)
    dtype = next((d for key, d in DTYPES.items() if given.get(key, {}).get("enabled") in (True, "auto")), torch.float32)
    own = {key: given[key] for key in ("zero_optimization", "bf16", "fp16", "torch_autocast") if key in given}
    config = {**own, "train_micro_batch_size_per_gpu": 1}
    tokenizer, keep = None, None
    if name.startswith("hf:"):
        path = name.removeprefix("hf:")
        try:
            transformers = importlib.import_module("transformers")
        except ImportError as problem:
            raise FactorsError(f"--model {name}: {problem}; pip install transformers") from problem
        if stage == 3:  # weights are cut while they are read
            keep = importlib.import_module("transformers.integrations").HfDeepSpeedConfig(config)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        except (OSError, ValueError) as problem:
            raise FactorsError(f"--model {name}: {problem}") from problem
    else:
        make = _function(name)
        with deepspeed.zero.Init(config_dict_or_path=config) if stage == 3 else contextlib.nullcontext():
            model = make()
        if not isinstance(model, torch.nn.Module):
            raise FactorsError(f"--model {name}: returned {type(model).__name__}; must return an nn.Module")
        model = model if stage == 3 else model.to(dtype)
    if stage < 3:
        return model.to(get_accelerator().current_device_name()), tokenizer
    engine = deepspeed.initialize(model=model, config=config)[0]
    del keep
    return engine, tokenizer


def _data(arguments: argparse.Namespace, tokenizer: Any, rank: int, ranks: int) -> Any:
    """This rank's batches."""
    if tokenizer is None:
        batches = _function(arguments.data)(rank, ranks)
        if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
            raise FactorsError(f"--data {arguments.data}: returned {type(batches).__name__}; must return batches")
        return batches
    tokens: list[int] = []
    for text in _texts(Path(arguments.data)):
        tokens += text if isinstance(text, list) else tokenizer(text)["input_ids"]
        tokens += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        if arguments.limit and len(tokens) >= arguments.limit * arguments.length:
            break
    count = min(len(tokens) // arguments.length, arguments.limit or len(tokens))
    if not count:
        raise FactorsError(
            f"--data {arguments.data}: {len(tokens)} tokens, fewer than one sequence of {arguments.length}"
        )
    windows = torch.tensor(tokens[: count * arguments.length], device="cpu").view(count, arguments.length)[rank::ranks]
    return [{"input_ids": part, "labels": part} for part in windows.split(arguments.batch) if len(part)]


def _texts(path: Path) -> Iterator[Any]:
    """Texts, or lists of tokens."""
    try:
        if path.is_dir():
            rows = importlib.import_module("datasets").load_from_disk(str(path))
        elif path.suffix == ".jsonl":  # not splitlines: a text has other ends of lines in it
            rows = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        else:
            yield path.read_text(encoding="utf-8")
            return
    except ImportError as problem:
        raise FactorsError(f"--data {path}: {problem}; pip install datasets") from problem
    except (OSError, ValueError) as problem:
        raise FactorsError(f"--data {path}: {problem}") from problem
    for number, row in enumerate(rows):
        try:
            row = json.loads(row) if isinstance(row, str) else row
            content = list(row["input_ids"]) if "input_ids" in row else row["text"]
        except (ValueError, TypeError, KeyError) as problem:
            got = f"{type(problem).__name__}: {problem}"
            raise FactorsError(f"--data {path}, row {number}: has neither text nor input_ids ({got})") from problem
        if not isinstance(content, (str, list)):
            raise FactorsError(f"--data {path}, row {number}: text is a {type(content).__name__}; must be a string")
        yield content


HEADER = ("layer", "[O, I]", "rows", "A rank", "A cond", "G rank", "G cond")
SHOWN = 40
"""Most layers in a table."""


def effective_rank(values: Tensor) -> float:
    """(sum of the eigenvalues)^2 / sum of their squares: the number of directions if all nonzero ones were equal."""
    values = values.double().clamp(min=0)
    return float(values.sum() ** 2 / values.square().sum().clamp(min=1e-300))


def condition(values: Tensor) -> float:
    """Largest eigenvalue over the smallest that exceeds fp32 rounding."""
    values = values.double()
    floor = values.max() * torch.finfo(torch.float32).eps
    return float(values.max() / values[values > floor].min()) if values.max() > 0 else float("nan")


def spectrum(factors: Factors, layer: str, side: str) -> Tensor | None:
    """Eigenvalues, descending; None for an identity, or a factor without eigenvalues."""
    if factors.side(layer, side).block == 0 or not factors.has(layer, f"{side}/values"):
        return None
    return factors.eigenbasis(layer, side).values.sort(descending=True).values


def table(factors: Factors) -> list[str]:
    """Lines of a table with a row for each layer."""
    rows: list[Row] = [HEADER]
    for layer in factors:
        shape = f"{factors.side(layer, 'G').dim:,} x {factors.side(layer, 'A').dim:,}"
        cells = [layer, shape, f"{factors.count(layer, 'A'):,.0f}" if factors.has(layer, "A") else ""]
        for side in "AG":
            values = spectrum(factors, layer, side)
            kind = factors.side(layer, side).kind
            empty = (kind, "") if kind == "identity" else ("zero", "")
            cells += empty if values is None else (f"{effective_rank(values):,.1f}", f"{condition(values):.1e}")
        rows.append(tuple(cells))
    shown = rows[: SHOWN + 1]
    more = [f"  and {len(rows) - len(shown):,} layers more, which are in index.json"] if len(rows) > len(shown) else []
    left = factors.header.get("left_alone", {})
    names = ", ".join(list(left)[:4]) + ", ..." * (len(left) > 4)
    return [*columns(shown, right=True), *more, *([f"  left alone: {len(left)} modules, {names}"] if left else [])]
