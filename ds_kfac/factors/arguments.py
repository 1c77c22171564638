"""Arguments of ``python -m ds_kfac factors`` and ``convert``, in a file without torch, which help must not wait for."""

import argparse
from pathlib import Path

TOOLS = ("kronfluence", "regmean", "gptq", "eva")
"""Tools for which factors can be written."""


def of_factors(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="hf:PATH, a folder that transformers loads, or module:function, "
                        "which returns a model")  # fmt: skip
    parser.add_argument("--data", required=True, help="text file, .jsonl with a field text, or folder of the package "
                        "datasets, for hf: models; or module:function, (rank, ranks) -> batches")  # fmt: skip
    parser.add_argument("--out", required=True, type=Path, help="folder for the files; an unfinished run goes on")
    parser.add_argument("--config", help='DeepSpeed config: ZeRO stage, bf16, offload, and its "kfac" block')
    parser.add_argument("--length", type=int, metavar="T", help="hf: models: tokens of a sequence, 512; texts are "
                        "joined")  # fmt: skip
    parser.add_argument("--batch", type=int, metavar="N", help="hf: models: sequences of a rank at a time, 8")
    parser.add_argument("--limit", type=int, metavar="N", help="hf: models: sequences at most")
    parser.add_argument("--fisher", choices=("empirical", "monte_carlo", "activations_only"), help="in place of the "
                        "config's; monte_carlo: the true Fisher; activations_only: A alone")  # fmt: skip
    parser.add_argument("--no-corrected", action="store_true", help="no second pass for EKFAC's eigenvalues")


def of_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("factors", type=Path, help="folder that factors, or engine.kfac.export, has written")
    parser.add_argument("--to", required=True, choices=TOOLS)
    parser.add_argument("--out", required=True, type=Path, help="safetensors file; for kronfluence its output_dir")
    parser.add_argument("--name", default="ds_kfac", help="kronfluence: factors_name")
    parser.add_argument("--rank", type=int, default=16, help="eva: r of LoRA, in the mean of the layers")
    parser.add_argument("--rho", type=float, default=2.0, help="eva: how many times that a layer may have")
