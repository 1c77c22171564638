"""Inputs that hooks keep: how long they live, and what checkpointing makes of them."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_kfac.model.scan import LayerChoice
from tests.model.recorder import Recorder, Watched
from tests.model.written import module

CHOICE = LayerChoice(types=("Linear", "Conv1D", "LayerNorm"))
KINDS = ["plain", "reentrant", "non_reentrant"]


class Normed(nn.Module):
    """Blocks of a norm, a linear and a matrix that is no linear, maybe checkpointed."""

    def __init__(self, kind: str = "plain", blocks: int = 4) -> None:
        super().__init__()
        self.kind = kind
        self.norms = nn.ModuleList([nn.LayerNorm(8) for _ in range(blocks)])
        self.linears = nn.ModuleList([nn.Linear(8, 8) for _ in range(blocks)])
        self.raw = module("return x @ self.weight", weight=(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        for norm, linear in zip(self.norms, self.linears, strict=True):
            if self.kind == "plain":
                x = self.block(norm, linear, x)
            else:
                reentrant = self.kind == "reentrant"
                x = checkpoint(self.block, norm, linear, x, use_reentrant=reentrant)
        return x.square().mean()

    def block(self, norm: nn.Module, linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.raw(linear(norm(x))))


def batch() -> torch.Tensor:
    return torch.randn(5, 8, requires_grad=True)


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_activation_outlives_its_graph(kind, sampled, backward):
    """Not even until the garbage collector comes, which does not see cycles through C++."""
    recorder = Recorder(Normed(kind), CHOICE, sampled=sampled)
    watched = Watched(recorder.model)
    gc.disable()
    try:
        loss = recorder.model(batch())
        if backward:
            recorder.backward(loss)
        if sampled:
            recorder.begin()  # the next step
        del loss
        assert len(watched.seen) > 7 and watched.living() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_inputs_live_at_any_time_as_without_capture(kind):
    """The most memory is needed in the middle of a backward pass."""
    seen = []
    for active in (False, True):
        recorder = Recorder(Normed(kind, blocks=6), CHOICE)
        recorder.begin(active=active)
        watched, living = Watched(recorder.model), []
        for linear in recorder.model.linears:
            linear.bias.register_post_accumulate_grad_hook(
                lambda bias, watched=watched, living=living: living.append(watched.living())
            )
        x = batch()
        loss = recorder.model(x)
        recorder.backward(loss)
        assert loss > 0 and watched.living() == 1, "x alone, though the loss is kept"
        seen.append((watched.most, living))
    assert seen[0] == seen[1] and len(seen[0][1]) == 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("captures", [(True, False), (False, True), (True, True)])
def test_a_backward_pass_after_the_steps_boundary_runs_and_counts_nothing(kind, captures):
    """A forward of an earlier step: checkpointing compares what was saved in its two runs."""
    recorder = Recorder(Normed(kind), CHOICE)
    x, plain = batch(), F.linear
    first, second = captures
    recorder.begin(active=first)
    loss = recorder.model(x)
    recorder.begin(1, active=second)
    recorder.backward(loss)
    grads = [p.grad.clone() for p in recorder.model.parameters()]
    assert not any(sums.counts.any() for sums in recorder.capture.sums.values())
    assert not recorder.capture.failed and F.linear is plain
    recorder.model.zero_grad()
    recorder.begin(2, active=False)
    recorder.backward(recorder.model(x))
    assert all(map(torch.equal, (p.grad for p in recorder.model.parameters()), grads))


def test_a_compiled_block_that_a_backward_runs_again_is_captured():
    """Its first run is without gradients, and the backward is under no stance of ours."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.block, self.first(x), use_reentrant=True).square().mean()

    recorder = Recorder(Checkpointed())
    recorder.model.block.compile(backend="eager")
    for active in (False, True, False, True):
        recorder.begin(active=active)
        with torch.compiler.set_stance("force_eager" if active else "default"):
            loss = recorder.model(batch())
        recorder.backward(loss)
    assert recorder.rows() == {"first": 5, "block.0": 5}
