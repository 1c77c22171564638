"""What the proof of a layer's rows costs in the step that it is in: seconds of the process's own
work, in pairs.

    python benchmarks/proof.py [--width 384] [--blocks 4] [--tokens 2048] [--pairs 15]

A GPT on one CPU core whose every step captures and refreshes nothing; every other step proves.
Processor time and not the clock's, so that other processes count little. The mean step at the
shipped intervals proves in one of every 10,000.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
import deepspeed
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ds_kfac
from ds_kfac.step.proving import Proving
from examples.gpt import GPT, GPTConfig

CONTEXT = 256


def seconds(width: int, blocks: int, tokens: int, pairs: int) -> tuple[list[float], list[float]]:
    """Of steps without and with the proof, in their order."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": tokens // CONTEXT,
        "optimizer": {"type": "KFACAdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "kfac": {
            "factor": {"update_interval": 1},
            "eigenbasis": {"refresh_interval": 10**6},
            "burn_in": {"steps": 0},
            "report": "none",
        },
    }
    engine, *_ = ds_kfac.initialize(
        model=GPT(GPTConfig(width, blocks, width // 64, CONTEXT)), config=config
    )
    plain = Proving.begin

    def begin(self: Proving, step: int, key, **how):
        self._wait = step % 2  # 0: this step proves
        return plain(self, step, key, **how)

    Proving.begin = begin  # type: ignore[method-assign]
    found: tuple[list[float], list[float]] = [], []
    for step in range(2 * pairs + 6):
        ids = torch.randint(256, (tokens // CONTEXT, CONTEXT + 1))
        proves = engine.kfac.preconditioner.capture.proof is not None
        start = time.process_time()
        engine.backward(engine(ids[:, :-1], ids[:, 1:]))
        engine.step()
        if step >= 6:
            found[proves].append(time.process_time() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in {"width": 384, "blocks": 4, "tokens": 2048, "pairs": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    without, proving = seconds(**vars(parser.parse_args()))
    ratios = sorted(b / a for a, b in zip(without, proving, strict=True))
    middle, error = statistics.mean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
    print(
        f"a step that captures: {statistics.median(without):.3f} s; one that proves, too: "
        f"{statistics.median(proving):.3f} s; ratio {middle:.4f} (s.e. {error:.4f}, median "
        f"{statistics.median(ratios):.4f}, {len(ratios)} pairs)"
    )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort at exit
