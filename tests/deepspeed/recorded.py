"""Runs whose steps are recorded and replayed."""

import tempfile

import torch

from benchmarks.held import bytes_in
from tests.deepspeed import runs
from tests.deepspeed.modes import BY_NAME
from tests.models import Net
from tests.tape import taped

NEVER = 1_000_000
"""Steps after which a run is steady that is launched as it is."""


def compare(cases):
    with taped():
        return runs.compare(cases)


def eventful(name: str):
    """Weights after a run with events, recorded and launched as it is; and the numbers of
    replays."""
    (recorded, replays), (plain, launched) = (_eventful(name, steady) for steady in (1, NEVER))
    weights = {name: (values, plain[name]) for name, values in recorded.items()}
    return {"weights": weights, "recorded": replays, "plain": launched}


def _eventful(name: str, steady: int):
    mode = BY_NAME[name]
    with taped(steady) as replays, tempfile.TemporaryDirectory() as folder, runs.patched(mode):
        engine = runs.build(mode)
        runs.train(engine, 1, steps=12)
        infinite = float("inf") if "fp16" in name else 1.0
        for first, times in ((20, infinite), (21, 1.0)):  # a spike: DeepSpeed skips the step
            runs.train(engine, 1, steps=1, first=first, times=times)
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
        found = {name: values.clone() for name, values in runs.weights(engine).items()}
        if mode.adam:  # SGD's momentum goes on
            assert torch.equal(found["first.bias"], before)
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
    for steady in (1, NEVER):
        with taped(steady) as replays:
            torch.manual_seed(0)
            engine = runs.build(BY_NAME["adam-z0-noclip"], model=Mixed())
            if steady > 1:
                engine.kfac.preconditioner.direction.recorded = None
            runs.train(engine, 1, steps=6)
            found.append((runs.weights(engine), replays[0]))
    (recorded, count), (plain, _) = found
    return {name: (values, plain[name]) for name, values in recorded.items()}, count


def loaded(_):
    """Whether each moment is in the same memory after a load, and steps go on to be repeated."""
    with taped() as replays, tempfile.TemporaryDirectory() as folder:
        engine = runs.build(BY_NAME["adam-z1"])
        runs.train(engine, 1, steps=4)
        engine.save_checkpoint(folder)
        groups = engine.kfac.preconditioner.direction.layer_groups

        def places() -> list[int]:
            return [x.data_ptr() for group in groups for x in vars(group.moments).values()]

        before = places()
        engine.load_checkpoint(folder)
        runs.train(engine, 1, steps=2)
        return [replays[0] == 5, before == places()]


def kept(names: list[str]) -> dict[str, tuple[int, int]]:
    """Bytes of the fixed places of a step after it was recorded, and what the report says of
    them."""
    found = {}
    for name in names:
        with taped():
            engine = runs.build(BY_NAME[name])
            runs.train(engine, 1, steps=4)
            kfac = engine.kfac.preconditioner
            places = [*kfac.direction.recorded.tensors.matrices.values()]
            found[name] = (
                bytes_in(places),
                kfac.rule.facts.kept(kfac.plan, kfac.worker_layers, "cpu"),
            )
    return found
