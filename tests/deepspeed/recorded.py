"""Runs whose steps are recorded and replayed."""

import tempfile

import torch

from tests.deepspeed import runs
from tests.deepspeed.modes import BY_NAME
from tests.tape import taped


def compare(cases):
    with taped():
        return runs.compare(cases)


def eventful(_):
    """Weights after a run with events, recorded and launched as it is; and the numbers of replays."""
    recorded, plain = _eventful(steady=1), _eventful(steady=1_000_000)
    weights = {name: (values, plain[0][name]) for name, values in recorded[0].items()}
    return {"weights": weights, "recorded": recorded[1], "plain": plain[1]}


def _eventful(steady: int):
    mode = BY_NAME["adam-z1-fp16"]
    with taped(steady) as replays, tempfile.TemporaryDirectory() as folder:
        engine = runs.build(mode, 1)
        with runs.patched(mode):
            runs.train(engine, 1, steps=12)
            for first in (20, 21):  # a spike: DeepSpeed skips the step
                x, y = next(iter(runs.micro_batches(first, 1)))
                loss = engine(x.to(engine.device, torch.float16), y) * (float("inf") if first == 20 else 1.0)
                engine.backward(loss)
                engine.step()
            assert engine.skipped_steps >= 1
            engine.save_checkpoint(folder)
            runs.train(engine, 1, steps=6, first=30)
            engine.load_checkpoint(folder)
            for group in engine.optimizer.param_groups:
                group["betas"] = (0.8, group["betas"][1])
            runs.train(engine, 1, steps=6, first=40)
        found = {name: values.clone() for name, values in runs.weights(engine).items()}
        engine.destroy()
        return found, replays[0]
