"""Train a byte-level GPT with K-FAC under DeepSpeed. The optimizer, its schedule and K-FAC come
from the JSON config.

    deepspeed --num_accelerators 2 examples/train_gpt.py --deepspeed_config
    configs/gpt_zero2_kfac.json

Writes runs/<name>/: metrics.csv, loss_by_step.png, loss_by_seconds.png, step_time.png, checkpoints,
and what DeepSpeed's monitor writes.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import job
import text
from gpt import GPT, GPTConfig


class Bytes:
    """Prediction of the next byte."""

    unit, figures = "tokens", ("held_out_loss",)
    plain = {"lr": 2e-3}

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.corpus = text.load(arguments.data, arguments.context)
        self.data = self.corpus.name

    def loss(self, engine, step: int, part: int) -> tuple[torch.Tensor, int]:
        if part == 0:
            seed = self.arguments.seed * 1_000_003 + step * 1009 + dist.get_rank()
            self._generator = torch.Generator().manual_seed(seed)
        rows = engine.train_micro_batch_size_per_gpu()
        x, y = self.corpus.batch(self._generator, rows, self.arguments.context)
        return engine(x.to(engine.device), y.to(engine.device)), x.numel()

    @torch.no_grad()
    def evaluate(self, engine) -> dict[str, float]:
        engine.eval()
        generator = torch.Generator().manual_seed(10_000 + dist.get_rank())
        total, rows = torch.zeros((), device=engine.device), engine.train_micro_batch_size_per_gpu()
        for _ in range(self.arguments.eval_batches):
            x, y = self.corpus.batch(generator, rows, self.arguments.context, held_out=True)
            total += engine(x.to(engine.device), y.to(engine.device)).float()
        engine.train()
        dist.all_reduce(total)
        return {"held_out_loss": float(total) / self.arguments.eval_batches / dist.get_world_size()}


def make(arguments: argparse.Namespace) -> tuple[Bytes, torch.nn.Module]:
    task = Bytes(arguments)
    config = GPTConfig(
        arguments.width,
        arguments.blocks,
        arguments.heads,
        arguments.context,
        experts=arguments.experts,
    )
    return task, GPT(config)


def main(argv: list[str] | None = None) -> int:
    parser = job.parser(__doc__)
    parser.add_argument(
        "--data", help="text file or folder; default: the Python standard library's sources"
    )
    parser.add_argument("--width", type=int, default=GPTConfig.width)
    parser.add_argument("--blocks", type=int, default=GPTConfig.blocks)
    parser.add_argument("--heads", type=int, default=GPTConfig.heads)
    parser.add_argument("--context", type=int, default=GPTConfig.context)
    parser.add_argument(
        "--experts", type=int, default=0, help="of a mixture in every block, stacked in one tensor"
    )
    parser.add_argument("--eval-batches", type=int, default=8)
    return job.main("train_gpt.py", "gpt_zero2_kfac.json", parser.parse_args(argv), make)


if __name__ == "__main__":
    job.leave(main())
