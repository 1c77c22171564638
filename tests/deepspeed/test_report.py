"""The attach report: seen, what matters first, equal layers in one row, short for a large model."""

import contextlib
import functools
import io
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ds_kfac
from ds_kfac.diagnostics.text import folded
from ds_kfac.step import proving
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, train, weights
from tests.deepspeed.said import heard
from tests.models import FEATURES, make_net
from tests.ranks import run_ranks

WIDTH, BLOCKS = 8, 32


def test_equal_rows_become_one():
    rows = [(f"blocks.{i}.mlp.up", "Linear", "8") for i in range(32)]
    rows += [
        ("head", "Linear", "9"),
        *((f"blocks.{i}.norm{j}", "Norm", "1") for i in (0, 2) for j in (1, 2)),
    ]
    rows += [("blocks.7.mlp.up", "Linear", "99"), ("", "Conv1D", "9")]
    assert folded(rows) == [
        ("blocks.[0-31].mlp.up x 32", "Linear", "8"),
        ("head", "Linear", "9"),
        ("blocks.[0-2].norm[1-2] x 4", "Norm", "1"),
        ("blocks.7.mlp.up", "Linear", "99"),
        ("(model)", "Conv1D", "9"),
    ]


class Block(nn.Module):
    """As many layers as a Llama's, with its names."""

    def __init__(self) -> None:
        super().__init__()
        attention = {f"{name}_proj": nn.Linear(WIDTH, WIDTH, bias=False) for name in "qkvo"}
        mlp = {
            f"{name}_proj": nn.Linear(WIDTH, WIDTH, bias=False) for name in ("gate", "up", "down")
        }
        self.self_attn, self.mlp = nn.ModuleDict(attention), nn.ModuleDict(mlp)
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
        self.inner, self.table = (
            nn.Linear(WIDTH, WIDTH),
            nn.Parameter(nn.Linear(WIDTH, 9 * WIDTH).weight.detach()),
        )


def worker(_) -> dict:
    import deepspeed.accelerator.cpu_accelerator as accelerator

    found = {}
    os.environ["COLUMNS"] = "1000"  # no line is broken

    def attach(name: str, model: type[nn.Module] = Model, lr: float = 0.01, **kfac: Any) -> None:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "KFACAdamW", "params": {"lr": lr, "torch_adam": True}},
            "kfac": kfac,
        }
        seen = io.StringIO()
        with contextlib.redirect_stderr(seen):
            engine = ds_kfac.initialize(model=model(), config=config)[0]
        found[name] = (
            [line for line in seen.getvalue().splitlines() if "[Gloo]" not in line],
            engine.kfac.report,
        )
        engine.destroy()

    attach("summary")
    attach("full", report="full")
    attach("none", report="none")
    attach("left out", Left)
    attach("idle", damping={"value": 2.0})
    attach("far", lr=0.3)
    accelerator.CPU_Accelerator.available_memory = lambda self, device_index=None: 500_000
    attach("little memory")
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_ranks("tests.deepspeed.test_report:worker", world=2)


@pytest.mark.distributed
def test_rank_0_prints_a_summary_whatever_the_level_of_loggers_is(ranks):
    (seen, report), (other, _) = (rank["summary"] for rank in ranks)
    assert other == []
    assert (
        len(seen) <= 12 and seen == report.splitlines()[: len(seen)] and "WARNING" not in report
    ), seen
    assert seen[0] == (
        "ds_kfac steps 100% of the trained matrix parameters (14,464 of 14,464) in 225 K-FAC "
        "layers (225 Linear), "
        "100% with curvature"
    )
    assert ranks[0]["none"][0] == [] and ranks[0]["none"][1].splitlines()[0] == seen[0]


@pytest.mark.distributed
def test_a_llama_of_32_blocks_has_a_short_report(ranks):
    lines = ranks[0]["summary"][1].splitlines()
    assert len(lines) <= 40, lines
    assert any("layers.[0-31].mlp.up_proj x 32" in line for line in lines)
    assert any("layers.[0-31].input_layernorm x 32" in line for line in lines)
    full, report = ranks[0]["full"]
    assert (
        full == report.splitlines()
        and len(full) > 290
        and any("layers.31.mlp.up_proj " in line for line in full)
    )


@pytest.mark.distributed
def test_warnings_are_in_the_summary(ranks):
    idle, left = ("\n".join(ranks[0][name][0]) for name in ("idle", "left out"))
    assert "without effect with KFACAdamW: kfac.damping.value" in idle
    far = [line for line in ranks[0]["far"][0] if "recipe" in line]
    assert len(far) == 1 and far[0].startswith(
        "  WARNING: far from every recipe for a language model"
    ), far
    assert "'Masked model' in docs/howto/recipes.md: lr 0.3 (0.002 there)" in far[0], far
    warned = ranks[0]["little memory"][0]
    parts = (
        "WARNING",
        "K-FAC needs",
        "in a step that updates all factors",
        "of the 0.0 GB that are free",
    )
    assert any(all(part in line for part in parts) for line in warned), warned
    assert "ds_kfac steps 10% of the trained matrix parameters (64 of 640)" in left
    assert "WARNING: below 80% of the matrix parameters; left out: Left 576 (" in left, left


NEW = "thawed", "thawed, not rotated", "replaced"


def hooks_worker(stages: list[int]) -> dict:
    """What is said of hooks on gradients, which layers have no curvature, and what becomes of
    entries that the hooks mask."""
    proving.RAISES = False
    found = {}
    mask = torch.ones(17, FEATURES)
    mask[3] = 0.0

    def clear(parameter: Any) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(mask)

    for stage in stages:
        mode = BY_NAME[f"adam-z{stage}"]
        config = {**mode.config(1, torch.distributed.get_world_size())}
        config["optimizer"]["params"]["weight_decay"] = 0.0

        def start(
            name: str,
            before: Any,
            after: Any = None,
            exclude: Sequence[str] = (),
            config=config,
            **own,
        ) -> None:
            model = make_net()
            start = model.first.weight.detach().clone()
            before(model)
            kfac = {**config["kfac"], "layers": {"exclude": list(exclude)}, **own}
            with contextlib.redirect_stderr(io.StringIO()):
                engine = ds_kfac.initialize(
                    model=model,
                    model_parameters=model.parameters(),
                    config={**config, "kfac": kfac},
                )[0]
            if after:
                after(engine.module)
            with heard() as later:
                train(engine, 1, steps=2)
            moved = (weights(engine)["first.weight"] - start)[3].abs().max()
            unfit = set(engine.kfac.preconditioner.proving.unfit)
            found[engine.zero_optimization_stage(), name] = (
                engine.kfac.report,
                unfit,
                "\n".join(later),
                float(moved),
            )
            engine.destroy()

        start("none", lambda model: None)
        start("hook", lambda model: model.first.weight.register_hook(lambda g: g * mask))
        start(
            "accumulated",
            lambda model: model.first.weight.register_post_accumulate_grad_hook(clear),
        )
        start(
            "partial",
            lambda model: model.head.bias.register_hook(functools.partial(torch.mul, 2.0)),
        )
        start("norm", lambda model: model.norm.weight.register_hook(lambda g: g))
        start("looks", lambda model: model.first.weight.register_hook(lambda g: g.norm() and None))
        start(
            "later",
            lambda model: None,
            lambda model: model.first.weight.register_hook(lambda g: g * mask),
        )
        thaw = [lambda model, on=on: model.middle.requires_grad_(on) for on in (False, True)]
        if stage < 3:  # there it is in no optimizer state, which is asked of all
            start("thawed", *thaw)
            start(
                "thawed, not rotated", *thaw, adam={"rotate": False}, factor={"update_interval": 1}
            )
        if not stage:
            start(
                "replaced",
                lambda model: None,
                lambda model: setattr(model, "middle", make_net().middle),
            )
        start(
            "excluded",
            lambda model: model.first.weight.register_hook(lambda g: g * mask),
            exclude=["first"],
        )
    return found


@pytest.mark.distributed
def test_hooks_that_change_gradients_are_told_with_their_layers_which_may_be_excluded():
    """Hooks that only look are not, nor are those of DeepSpeed, which has some in every ZeRO
    stage."""
    for rank, found in enumerate(
        run_ranks("tests.deepspeed.test_report:hooks_worker", world=2, payload=[0, 2, 3])
    ):
        for (stage, name), (report, unfit, later, moved) in found.items():
            told = {
                "hook": "first",
                "accumulated": "first",
                "partial": "head",
                "later": "first",
            }.get(name)
            assert unfit == ({told} if told else set()), (stage, name, unfit)
            assert ("or a hook on its parameters changes the gradient" in report) == bool(told), (
                stage,
                name,
                report,
            )
            assert ("(docs/howto/frameworks.md): middle.weight" in later) == (
                name in NEW and rank == 0
            ), later
            if name == "excluded":
                assert moved == 0.0, (stage, name, moved)


def scaler_worker(_) -> dict[str, str]:
    """Reports of engines with a GradScaler, by their parameter groups."""
    reports = {}
    for groups in ("one", "decay"):
        engine = build(replace(BY_NAME["z2-autocast_float16"], groups=groups), 1)
        reports[groups] = engine.kfac.report
        engine.destroy()
    return reports


def test_several_groups_behind_a_scaler_that_grows_are_a_known_fault():
    (reports,) = run_ranks("tests.deepspeed.test_report:scaler_worker", world=1)
    fault = "it divides all parameter groups but the first by the new scale"
    assert fault in reports["decay"] and fault not in reports["one"]
