"""Runs whose steps are recorded and replayed."""

import tempfile

import torch

from benchmarks.held import bytes_in
from tests.deepspeed import runs
from tests.deepspeed.modes import BY_NAME
from tests.models import Net
from tests.tape import taped


def compare(cases):
    with taped():
        return runs.compare(cases)


def eventful(name: str):
    """Weights after a run with events, recorded and launched as it is; and the numbers of
    replays."""
    recorded, plain = _eventful(name, steady=1), _eventful(name, steady=1_000_000)
    weights = {name: (values, plain[0][name]) for name, values in recorded[0].items()}
    return {"weights": weights, "recorded": recorded[1], "plain": plain[1]}


def _eventful(name: str, steady: int):
    mode = BY_NAME[name]
    with taped(steady) as replays, tempfile.TemporaryDirectory() as folder:
        engine = runs.build(mode, 1)
        with runs.patched(mode):
            runs.train(engine, 1, steps=12)
            for first in (20, 21):  # a spike: DeepSpeed skips the step
                x, y = next(iter(runs.micro_batches(first, 1)))
                loss = engine(x.to(engine.device, engine.get_data_types()[0]), y)
                engine.backward(loss * (float("inf") if first == 20 and "fp16" in name else 1.0))
                engine.step()
            assert engine.skipped_steps == ("fp16" in name)
            engine.save_checkpoint(folder)
            runs.train(engine, 1, steps=6, first=30)
            engine.load_checkpoint(folder)
            for group in engine.optimizer.param_groups:
                if mode.adam:
                    group["betas"] = (0.8, group["betas"][1])
                else:
                    group["lr"] *= 0.5
            runs.train(engine, 1, steps=6, first=40)
            before = runs.weights(engine)["first.bias"].clone()
            # its column of the direction is not zero
            engine.module.first.bias.requires_grad_(False)
            runs.train(engine, 1, steps=4, first=50)
            if mode.adam:  # SGD's momentum goes on
                assert torch.equal(runs.weights(engine)["first.bias"], before)
        found = {name: values.clone() for name, values in runs.weights(engine).items()}
        engine.destroy()
        return found, replays[0]


class Mixed(Net):
    """Its largest matrix, whose gradient comes first, is in bf16."""

    def __init__(self):
        super().__init__()
        self.middle.to(torch.bfloat16)
        self.middle.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
        self.middle.register_forward_hook(lambda module, args, output: output.float())


def mixed(_):
    """Weights of a model of two dtypes, recorded and launched as it is."""
    found = []
    for steady in (1, 1_000_000):
        with taped(steady) as replays:
            torch.manual_seed(0)
            engine = runs.build(BY_NAME["adam-z0-noclip"], 1, model=Mixed())
            if steady > 1:
                engine.kfac.preconditioner.direction.recorded = None
            runs.train(engine, 1, steps=6)
            found.append((runs.weights(engine), replays[0]))
            engine.destroy()
    (recorded, count), (plain, _) = found
    return {name: (values, plain[name]) for name, values in recorded.items()}, count


def loaded(_):
    """Whether each moment is in the same memory after a load, and steps go on to be repeated."""
    with taped() as replays, tempfile.TemporaryDirectory() as folder:
        engine = runs.build(BY_NAME["adam-z1"], 1)
        runs.train(engine, 1, steps=4)
        engine.save_checkpoint(folder)
        groups = engine.kfac.preconditioner.direction.layer_groups
        before = [x.data_ptr() for group in groups for x in vars(group.moments).values()]
        engine.load_checkpoint(folder)
        runs.train(engine, 1, steps=2)
        after = [x.data_ptr() for group in groups for x in vars(group.moments).values()]
        engine.destroy()
        return [replays[0] == 5, before == after]


def kept(names: list[str]) -> dict[str, tuple[int, int]]:
    """Bytes of the fixed places of a step after it was recorded, and what the report says of
    them."""
    found = {}
    for name in names:
        with taped():
            engine = runs.build(BY_NAME[name], 1)
            runs.train(engine, 1, steps=4)
            kfac = engine.kfac.preconditioner
            places = [*kfac.direction.recorded.tensors.matrices.values()]
            found[name] = bytes_in(places), kfac.rule.facts.kept(kfac.plan, kfac.owned, "cpu")
            engine.destroy()
    return found
