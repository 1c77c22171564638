"""What is left of a step, a backward or a forward that raises; and what goes on where a layer's
rows are not known."""

from contextlib import nullcontext, suppress
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import ds_kfac
from ds_kfac.engine.attachment import BROKEN
from ds_kfac.model.rows import RowSums
from ds_kfac.step import proving
from tests.close import close, near
from tests.deepspeed.modes import BY_NAME, Mode
from tests.deepspeed.runs import build, train, weights
from tests.deepspeed.said import error_of, heard
from tests.deepspeed.test_no_rows import FusedHead, Hidden
from tests.models import CLASSES, FEATURES, Net, cross_entropy
from tests.ranks import run_ranks
from tests.tape import taped

pytestmark = pytest.mark.distributed


class Fragile(Net):
    """Its backward, or its forward, raises on demand."""

    error: BaseException | None = None
    backward = False

    def forward(self, x, y=None):
        z = self.norm(self.silu(self.first(x)))
        if self.error is not None and not self.backward:
            raise self.error
        if self.error is not None:
            z.register_hook(self.raises)
        # for which torch is watched
        z = F.linear(torch.tanh(self.middle(z)), self.head.weight, self.head.bias)
        return z if y is None else cross_entropy(z, y)

    def raises(self, gradient):
        raise self.error


def raising_worker(names: list[str]) -> dict:
    """Weights and unfit layers where a backward raised in each step before its own; and what a
    Ctrl-C in a forward leaves of torch."""
    found = {}
    for name in names:
        for backward in (None, False, True):
            options = {"factor": {"update_interval": 1}, "eigenbasis": {"refresh_interval": 1}}
            torch.manual_seed(0)
            engine = build(
                BY_NAME[name], 1, kfac={**BY_NAME[name].kfac_block, **options}, model=Fragile()
            )
            plain, model = F.linear, engine.module
            for step in range(4):
                raises = step > 0 and backward is not None
                model.error, model.backward = (
                    (KeyboardInterrupt(), backward) if raises else (None, False)
                )
                with suppress(KeyboardInterrupt):
                    if raises:
                        engine.backward(
                            engine(
                                torch.randn(3, 4, FEATURES), torch.zeros(3, 4, dtype=torch.int64)
                            )
                        )
                assert F.linear is plain and not _get_current_function_mode_stack()
                model.error = None
                engine.optimizer.zero_grad()
                train(engine, 1, steps=1, first=step)
            found[name, backward] = weights(engine), dict(engine.kfac.preconditioner.proving.unfit)
            engine.destroy()
    return found


def test_a_forward_or_backward_that_raises_leaves_nothing_behind():
    names = ["z0", "adam-z0"]
    (found,) = run_ranks(
        "tests.deepspeed.test_interruptions:raising_worker", world=1, payload=names
    )
    for (name, backward), (actual, unfit) in found.items():
        assert not unfit, (name, backward)
        for key, weight in found[name, None][0].items():
            assert torch.equal(actual[key], weight), (name, backward, key)


def no_memory(*_) -> None:
    raise torch.OutOfMemoryError("no memory")


def left_worker(names: list[str]) -> dict:
    """After a micro-batch whose backward raises behind a whole one; and after steps of K-FAC that
    raise half-way."""
    found = {}
    for name in names:
        mode = replace(BY_NAME[name], kfac={**BY_NAME[name].kfac_block, **EVERY})
        engine = build(mode, 2)
        kfac = engine.kfac.preconditioner
        x = torch.randn(3, 4, FEATURES, dtype=next(engine.module.parameters()).dtype)
        batch = x, torch.zeros(3, 4, dtype=torch.int64)
        for _step in range(4):
            engine.backward(engine(*batch))
            engine.step()
            loss = engine(*batch)
            # before DeepSpeed gets any gradient: of more it would raise itself
            loss.register_hook(no_memory)
            with suppress(torch.OutOfMemoryError):
                engine.backward(loss)
            engine.optimizer.zero_grad()
            engine.backward(engine(*batch))
            engine.step()
        updates = [float(factor.updates) for factor in kfac.curvature.factors.values()]
        found[name] = dict(kfac.proving.unfit), kfac.steps, min(updates)
        engine.destroy()

        found[name, "unbroken"] = broken_steps(mode, attempts=0)[0]
        found[name, "broken"] = broken_steps(mode, attempts=2)
    return found


def broken_steps(mode: Mode, attempts: int) -> tuple[list[float], int, int, list[str]]:
    """Norms of the gradients of four steps, of which the third one is first attempted so often that
    K-FAC's part raises half-way; the number of layers that K-FAC stepped in these attempts; the
    applied steps; and what was said."""
    engine = build(replace(mode, kfac={**EVERY, "report": "none"}), 1)
    kfac, norms, calls = engine.kfac.preconditioner, [], []
    finish, parameters = kfac.direction._finish, parameters_of(engine)

    def fails(*args):
        calls.append(args)
        if len(calls) % 2 == 0:
            no_memory()
        return finish(*args)

    with heard() as said:
        for step in range(4):
            for _ in range(attempts if step == 2 else 0):
                kfac.direction._finish = fails
                with suppress(torch.OutOfMemoryError):
                    train(engine, 1, steps=1, first=step)
                kfac.direction._finish = finish
                assert parameters_of(engine) == parameters, "DeepSpeed has its groups again"
                engine.optimizer.zero_grad()
            train(engine, 1, steps=1, first=step)
            norms.append(float(engine.get_global_grad_norm()))
    engine.destroy()
    return norms, len(calls), kfac.steps, said


def parameters_of(engine) -> list[list[int]]:
    """Of each parameter group of the user's optimizer."""
    return [[id(p) for p in group["params"]] for group in engine.basic_optimizer.param_groups]


def test_a_step_that_raised_is_said_once_and_training_goes_on():
    names = ["adam-z2", "adam-z2-bf16-accum32", "adam-z1", "adam-z3", "adam-z2-offload"]
    (found,) = run_ranks("tests.deepspeed.test_interruptions:left_worker", world=1, payload=names)
    for name in names:
        unfit, steps, updates = found[name]
        assert not unfit and steps == updates == 4, (name, unfit, steps, updates)
        norms, calls, steps, said = found[name, "broken"]
        assert calls == 4 and steps == 4 and max(norms) < 2 * min(norms), (name, norms)
        unbroken = found[name, "unbroken"]
        near(
            norms[:3],
            unbroken[:3],
            0.01,
            "16 bits; with what a step has left of gradients it is 0.05",
            what=name,
        )
        assert [BROKEN in message for message in said] == [True], (name, said)


class Lost(FusedHead):
    """Its head is called for six steps, and then by a kernel."""

    steps = 0

    def forward(self, x, y=None):
        self.fused = self.steps >= 6
        self.steps += y is not None
        return super().forward(x, y)


class Alike(nn.Module):
    """Three layers of one shape, of which the rows of one are not seen."""

    def __init__(self, hidden: str) -> None:
        super().__init__()
        self.hidden = hidden
        for name in "abc":
            setattr(self, name, nn.Linear(8, 8, bias=False))

    def forward(self, x):
        for name in "abc":
            layer = getattr(self, name)
            x = torch.tanh(Hidden.apply(x, layer.weight) if name == self.hidden else layer(x))
        return x.square().mean()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.attention(x, x, x)[0]).square().mean()


CONFIG = {"train_micro_batch_size_per_gpu": 4, "steps_per_print": 10**9}
ADAM = {"type": "KFACAdamW", "params": {"lr": 1e-3, "torch_adam": True}}
EVERY = {
    "factor": {"update_interval": 1},
    "eigenbasis": {"refresh_interval": 1},
    "burn_in": {"steps": 0},
}


def made(model, *given, **config):
    parameters = [*model.parameters(), *given]
    return ds_kfac.initialize(
        model=model, model_parameters=parameters, config={**CONFIG, **config}
    )[0]


def odd_worker(_) -> dict:
    proving.RAISES, found = False, {}
    engine = build(
        BY_NAME["adam-z2"], 1, model=Lost(), kfac={**BY_NAME["adam-z2"].kfac_block, **EVERY}
    )
    train(engine, 1, steps=10)
    kfac = engine.kfac.preconditioner
    found["steps of moments"] = (
        {name: float(state.moments.updates) for name, state in kfac.state.items()},
        kfac.steps,
    )
    found["unfit"] = [*kfac.proving.unfit]
    engine.destroy()

    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    block = {
        **EVERY,
        "eigenbasis": {"refresh_interval": 4},
        "preconditioner": {"kl_clip": 1e-5},
        "report": "none",
    }
    for hidden in "ab":
        for recorded in (False, True):
            with taped(1) if recorded else nullcontext():
                torch.manual_seed(0)
                engine = made(
                    Alike(hidden),
                    optimizer=sgd,
                    kfac=block,
                    zero_optimization={"stage": 1},
                    zero_allow_untested_optimizer=True,
                )
                for step in range(8):
                    engine.backward(
                        engine(torch.randn(16, 8, generator=torch.Generator().manual_seed(step)))
                    )
                    engine.step()
                found["scales", hidden, recorded] = weights(engine), float(engine.kfac.metrics.nu)
                engine.destroy()

    profiler = {"enabled": True, "profile_step": 2, "output_file": "/dev/null"}
    engine = made(
        Attends(), optimizer=ADAM, kfac={**EVERY, "report": "none"}, flops_profiler=profiler
    )
    for _step in range(4):
        engine.backward(engine(torch.randn(4, 5, 8)))
        engine.step()
    found["profiled"] = engine.kfac.preconditioner.steps
    engine.destroy()

    given = nn.Parameter(torch.ones(1))
    found["given"] = error_of(lambda: made(Alike("a"), given, optimizer=ADAM, kfac={}))
    # as of a head that is replaced after the optimizer was made
    stale = {"optimizer": torch.optim.AdamW([given]), "config": {**CONFIG, "kfac": {}}}
    found["of an object"] = error_of(lambda: ds_kfac.initialize(model=Alike("a"), **stale))

    engine = build(BY_NAME["z2"], 1)
    kfac = engine.kfac.preconditioner  # the hooks of step 0 are prepared
    kfac.observe(
        replace(kfac.observations, rows=dict.fromkeys((layer.name for layer in kfac.layers), 10**6))
    )
    found["slots"] = len(kfac.curvature.reducer._slots), len(kfac.due.capture)
    engine.destroy()
    return found


def test_layers_without_known_rows_programs_and_plans_that_change():
    (found,) = run_ranks("tests.deepspeed.test_interruptions:odd_worker", world=1, payload=None)
    moments, steps = found["steps of moments"]
    assert found["unfit"] == ["head"] and set(moments.values()) == {float(steps)}, (
        "a layer keeps its moments"
    )
    for hidden in "ab":
        (plain, nu), (recorded, _) = found["scales", hidden, False], found["scales", hidden, True]
        assert nu < 0.5, "kl-clip has something to scale"
        for name, weight in plain.items():
            # steps, products, rows, sides
            close(recorded[name], weight, sums=8 * 3 * 16 * 8, what=f"{hidden} {name}")
    assert found["profiled"] == 4
    for given in ("given", "of an object"):
        assert "parameter of shape [1] that the model has not got" in found[given]
    assert found["slots"][0] == found["slots"][1] > 0


class Repeated(nn.Module):
    """A layer that two recomputed parts of the model call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x, y):
        for _ in range(2):
            x = checkpoint(lambda x: torch.tanh(self.inner(torch.tanh(x))), x, use_reentrant=False)
        return cross_entropy(self.head(x), y)


def recomputing_worker(_) -> dict[str, str]:
    """Layers of which a hook failed, between the recomputations of two of their calls."""
    proving.RAISES = False
    engine = build(BY_NAME["z2"], 1, model=Repeated())

    def raises(self, call, *given, **options):
        if call.layer.name == "inner":
            raise TypeError("no matrix")
        return plain(self, call, *given, **options)

    plain = RowSums.add_gradients
    with patch.object(RowSums, "add_gradients", raises):
        train(engine, 1, steps=1)
    failed = engine.kfac.preconditioner.capture.failed
    engine.destroy()
    return failed


def test_a_hook_that_fails_between_recomputations_leaves_them_as_they_are():
    """A recomputation has to save as many tensors as the first run."""
    (failed,) = run_ranks("tests.deepspeed.test_interruptions:recomputing_worker", world=1)
    assert failed == {"inner": "TypeError: no matrix"}
