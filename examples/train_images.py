"""Train a network for images with K-FAC under DeepSpeed. The optimizer, its schedule and K-FAC come
from the config.

    deepspeed --num_accelerators 2 examples/train_images.py --deepspeed_config
    configs/images_zero2_kfac.json

Default data are scikit-learn's digits; --data takes CIFAR, npz files, ImageNet-like folders and
archives of folders. Writes runs/<name>/: metrics.csv, accuracy_by_step.png, loss_by_step.png and
others, checkpoints, and what DeepSpeed's monitor writes.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))
import images
import job
import mixing
import networks


class Classes:
    """Classification of images, or of every pixel; the loss is computed outside of the model, as
    usual."""

    unit, figures = "images", ("held_out_loss", "held_out_accuracy")
    plain = {"lr": 3e-3}

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.images = images.load(
            arguments.data, per_pixel=arguments.per_pixel or arguments.model == "unet"
        )
        if arguments.images is not None:
            self.images = self.images.first(min(arguments.images, len(self.images.train)))
        self.data = self.images.name
        self.mixup = (
            mixing.RunningMixup(arguments.mixup, self.images.classes) if arguments.mixup else None
        )

    def loss(self, engine, step: int, part: int) -> tuple[torch.Tensor, int]:
        rows, parts = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
        place = ((step * parts + part) * dist.get_world_size() + dist.get_rank()) * rows
        x, y = self.images.draw(self.arguments.seed, place, rows)
        if self.mixup:
            x, y = self.mixup(x, y)
        if self.arguments.erase:
            x = mixing.erased(x)
        logits = engine(self._for(engine, x)).float()
        return F.cross_entropy(
            logits, y.to(engine.device), label_smoothing=self.arguments.label_smoothing
        ), rows

    @torch.no_grad()
    def evaluate(self, engine) -> dict[str, float]:
        """With the running statistics of BatchNorm, averaged over the ranks."""
        job.synchronize_buffers(engine.module)
        engine.eval()
        sums, rows = torch.zeros(3, device=engine.device), engine.train_micro_batch_size_per_gpu()
        # under ZeRO-3 every rank has to run as many forwards as any other
        world, rank = dist.get_world_size(), dist.get_rank()
        count = math.ceil(math.ceil(len(self.images.held_out) / world) / rows)
        batches = list(self.images.batches(rows, rank, world))
        for index in range(count):
            x, y = batches[min(index, len(batches) - 1)]
            logits = engine(self._for(engine, x)).float()
            if index < len(batches):
                y = y.to(engine.device)
                losses = F.cross_entropy(logits, y, reduction="none")
                sums += torch.stack(
                    [losses.sum(), (logits.argmax(1) == y).sum(), losses.new_tensor(losses.numel())]
                )
        engine.train()
        dist.all_reduce(sums)
        return {
            "held_out_loss": float(sums[0] / sums[2]),
            "held_out_accuracy": float(sums[1] / sums[2]),
        }

    @staticmethod
    def _for(engine, x: torch.Tensor) -> torch.Tensor:
        return x.to(engine.device, engine.get_data_types()[0])


def make(arguments: argparse.Namespace) -> tuple[Classes, torch.nn.Module]:
    task = Classes(arguments)
    data = task.images
    size = images.SIZE if data.train.pixels is None else data.train.pixels.shape[-1]
    return task, networks.build(
        arguments.model, channels=data.channels, classes=data.classes, size=size
    )


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    parser = job.parser(__doc__)
    parser.add_argument(
        "--data",
        help="CIFAR folder, npz file, folder of class folders, or tar archive; default: digits",
    )
    parser.add_argument(
        "--images", type=int, help="at most so many of the training part, of all classes"
    )
    parser.add_argument(
        "--model",
        default="resnet20",
        help=f"{', '.join(networks.NETWORKS)}, module:factory or timm:NAME",
    )
    parser.add_argument(
        "--per-pixel", action="store_true", help="a label for each pixel, as unet has"
    )
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument(
        "--mixup", type=float, default=0.0, help="alpha of SP-NGD's running mixup; 0: none"
    )
    parser.add_argument("--erase", action="store_true", help="SP-NGD's random erasing to zero")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return job.main("train_images.py", "images_zero2_kfac.json", arguments_of(argv), make)


if __name__ == "__main__":
    job.leave(main())
