"""The attach report: seen, what matters first, equal layers in one row, short for a large model."""

import contextlib
import functools
import io
import os
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

import ds_kfac
from ds_kfac.step import proving
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, train, weights
from tests.deepspeed.said import heard
from tests.models import FEATURES, make_net

WIDTH, BLOCKS = 8, 32
pytestmark = pytest.mark.distributed


class Block(nn.Module):
    """As many layers as a Llama's, with its names."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = (
            nn.ModuleDict({f"{n}_proj": nn.Linear(WIDTH, WIDTH, bias=False) for n in names})
            for names in ("qkvo", ("gate", "up", "down"))
        )
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 16, bias=False)


class Left(nn.Module):
    """Most of it in a matrix that nothing multiplies with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.ones(9 * WIDTH, WIDTH))


def reported(model: type[nn.Module] = Model, lr: float = 0.01, **kfac) -> tuple[list[str], str]:
    """Lines that this rank prints at attach, and the report."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "KFACAdamW", "params": {"lr": lr, "torch_adam": True}},
        "kfac": kfac,
    }
    os.environ["COLUMNS"] = "1000"  # no line is broken
    with contextlib.redirect_stderr(io.StringIO()) as seen:
        engine = ds_kfac.initialize(model=model(), config=config)[0]
    report = engine.kfac.report
    engine.destroy()
    return [line for line in seen.getvalue().splitlines() if "[Gloo]" not in line], report


@pytest.mark.ranks(2)
def test_rank_0_prints_a_summary_whatever_the_level_of_loggers_is():
    """Of a Llama of 32 blocks it is short, and so is the report."""
    seen, report = reported()
    lines = report.splitlines()
    if dist.get_rank() == 0:
        assert len(seen) <= 12 and seen == lines[: len(seen)]
    else:
        assert seen == []
    size = "100% of the trained matrix parameters (14,464 of 14,464) in 225 K-FAC layers"
    assert lines[0] == f"ds_kfac steps {size} (225 Linear), 100% with curvature"
    assert len(lines) <= 40 and "WARNING" not in report, lines
    assert "layers.[0-31].mlp.up_proj x 32" in report
    assert "layers.[0-31].input_layernorm x 32" in report
    silent, same = reported(report="none")
    assert silent == [] and same.splitlines()[0] == lines[0]
    seen, full = reported(report="full")
    assert len(full.splitlines()) > 290 and "layers.31.mlp.up_proj " in full
    assert dist.get_rank() > 0 or seen == full.splitlines()


@pytest.mark.ranks(1)
def test_warnings_are_in_the_summary():
    idle, _ = reported(damping={"value": 2.0})
    assert "without effect with KFACAdamW: kfac.damping.value" in "\n".join(idle)
    (far,) = [line for line in reported(lr=0.3)[0] if "recipe" in line]
    assert far.startswith("  WARNING: far from every recipe for a language model"), far
    assert "'Masked model' in docs/howto/recipes.md: lr 0.3 (0.002 there)" in far, far
    left = "\n".join(reported(Left)[0])
    assert "ds_kfac steps 10% of the trained matrix parameters (64 of 640)" in left
    assert "WARNING: below 80% of the matrix parameters; left out: Left 576 (" in left
    with patch.object(type(get_accelerator()), "available_memory", lambda *_: 500_000):
        seen, _ = reported()
    (memory,) = [line for line in seen if "WARNING" in line and "K-FAC needs" in line]
    assert "in a step that updates all factors" in memory
    assert "of the 0.0 GB that are free" in memory


MASK = torch.ones(17, FEATURES)
MASK[3] = 0.0


def masked(gradient):
    return gradient * MASK


def clear(parameter) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(MASK)


def trains_middle(on: bool):
    return lambda model: model.middle.requires_grad_(on)


def hook(function, name: str = "first.weight"):
    return lambda model: model.get_parameter(name).register_hook(function)


UNROTATED = {"adam": {"rotate": False}, "factor": {"update_interval": 1}}
HOOKS = {  # what is done before attach and after it, whose gradient is told to be changed, options
    "none": (None, None, None, {}),
    "hook": (hook(masked), None, "first", {}),
    "accumulated": (
        lambda model: model.first.weight.register_post_accumulate_grad_hook(clear),
        None,
        "first",
        {},
    ),
    "partial": (hook(functools.partial(torch.mul, 2.0), "head.bias"), None, "head", {}),
    "norm": (hook(lambda g: g, "norm.weight"), None, None, {}),
    "looks": (hook(lambda g: g.norm() and None), None, None, {}),
    "later": (None, hook(masked), "first", {}),
    "excluded": (hook(masked), None, None, {"layers": {"exclude": ["first"]}}),
    "thawed": (trains_middle(False), trains_middle(True), None, {}),
    "thawed, not rotated": (trains_middle(False), trains_middle(True), None, UNROTATED),
    "replaced": (None, lambda model: setattr(model, "middle", make_net().middle), None, {}),
}
NEW = {"thawed": (0, 2), "thawed, not rotated": (0, 2), "replaced": (0,)}
"""Case -> stages in which there is a parameter that was not trained at attach: at stage 3 it is in
no optimizer state, which is asked of all."""


@pytest.mark.ranks(2)
def test_hooks_that_change_gradients_are_told_with_their_layers_which_may_be_excluded():
    """Hooks that only look are not, nor are those of DeepSpeed, which has some in every ZeRO
    stage."""
    proving.RAISES = False
    for stage in (0, 2, 3):
        for name, (before, after, told, block) in HOOKS.items():
            if stage not in NEW.get(name, (0, 2, 3)):
                continue
            config, model = BY_NAME[f"adam-z{stage}"].config(1, 2), make_net()
            config["optimizer"]["params"]["weight_decay"] = 0.0
            config["kfac"] |= block
            start = model.first.weight.detach().clone()
            if before:
                before(model)
            parameters = model.parameters()
            engine, *_ = ds_kfac.initialize(model=model, model_parameters=parameters, config=config)
            if after:
                after(engine.module)
            with heard() as later:
                train(engine, 1, steps=2)
            case = (stage, name)
            assert set(engine.kfac.preconditioner.proving.unfit) == ({told} if told else set()), (
                case
            )
            said = "or a hook on its parameters changes the gradient" in engine.kfac.report
            assert said == bool(told), case
            said = "(docs/howto/frameworks.md): middle.weight" in "\n".join(later)
            assert said == (name in NEW and dist.get_rank() == 0), (case, later)
            if name == "excluded":
                assert torch.equal(weights(engine)["first.weight"][3], start[3]), case
            engine.destroy()


@pytest.mark.ranks(1)
def test_several_groups_behind_a_scaler_that_grows_are_a_known_fault():
    fault = "it divides all parameter groups but the first by the new scale"
    for groups in ("one", "decay"):
        engine = build(replace(BY_NAME["z2-autocast_float16"], groups=groups), 1)
        assert (fault in engine.kfac.report) == (groups == "decay")
