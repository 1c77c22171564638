"""What the three examples share: texts of Python's own library, training of a tiny byte GPT,
options, figures."""

import argparse
import pydoc_data.topics
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn

matplotlib.use("Agg")
from matplotlib import pyplot

sys.path.insert(0, str(Path(__file__).parents[1]))
from text import Corpus

BATCH = 32
STDLIB = Path(sysconfig.get_paths()["stdlib"])


def options(description: str, argv: Sequence[str] | None, **more: int) -> argparse.Namespace:
    """--out and --seed, and sizes with their defaults."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/factors"), help="folder for the figure and factors"
    )
    parser.add_argument("--seed", type=int, default=0)
    for name, value in more.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    found = parser.parse_args(argv)
    found.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    return found


def texts() -> dict[str, Corpus]:
    """Three kinds: English prose about Python, the same with capitals and small letters exchanged
    (of another half of it), and tables of character sets. A tenth of each is held out, cut from 20
    places."""
    prose = "\n".join(pydoc_data.topics.topics.values())
    half = len(prose) // 2
    tables = b"\n".join(file.read_bytes() for file in sorted((STDLIB / "encodings").glob("*.py")))
    code = b"\n".join(file.read_bytes() for file in sorted(STDLIB.glob("*.py")))
    raw = {
        "prose": prose[:half].encode(),
        "swapped": prose[half:].swapcase().encode(),
        "tables": tables,
        "code": code,
    }
    found = {}
    for name, data in raw.items():
        stretches = torch.frombuffer(bytearray(data), dtype=torch.uint8)[
            : len(data) // 20 * 20
        ].view(20, -1)
        held = stretches.shape[1] // 10
        found[name] = Corpus(name, stretches[:, held:].reshape(-1), stretches[:, :held].reshape(-1))
    return found


def train(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    lr: float,
    *,
    warmup: int = 20,
    decay: bool = True,
    every: int | None = None,
    watch: Callable[[nn.Module], float] | None = None,
) -> list[float]:
    """AdamW over inputs and targets, at a rate that falls to zero or stays.

    Returns what ``watch`` says at the start and after every so many steps.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    seen = [watch(model)] if watch else []
    for step, (x, y) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = (
                lr * min(1, (step + 1) / warmup) * (1 - step / len(batches) if decay else 1)
            )
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if watch and (step + 1) % (every or len(batches)) == 0:
            seen.append(watch(model))
    return seen


@torch.no_grad()
def held_out(model: nn.Module, corpus: Corpus, context: int, windows: int = 256) -> float:
    """Mean loss, nats per byte, over windows that are the same at every call."""
    x, y = corpus.batch(torch.Generator().manual_seed(9), windows, context, held_out=True)
    return float(model(x, y))


def save(figure: pyplot.Figure, path: Path) -> Path:
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path
