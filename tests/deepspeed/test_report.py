"""What is said of a run: the report at attach, which is also that of the command check, and the
numbers in logs, against weights and eigenvalues themselves."""

import contextlib
import copy
import io
import json
import os
import re
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

import ds_kfac
from ds_kfac.__main__ import main
from ds_kfac.estimate.subject import Subject
from ds_kfac.metrics import STAGES, SUMMARY, TIMER, Metrics
from ds_kfac.step import proving
from ds_kfac.step.counters import FAILURES, counters, health
from tests.close import close, near
from tests.deepspeed.expert_runs import Experts
from tests.deepspeed.modes import BY_NAME, KFAC, Mode
from tests.deepspeed.runs import build, train, weights
from tests.deepspeed.said import heard
from tests.models import FEATURES, TokenNet, make_net

WIDTH, BLOCKS = 8, 32


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
    assert lines[0] == f"ds_kfac updates {size} (225 Linear), 100% with curvature"
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
    blocks = {"lm_head": 2, "up_proj|lm_head": 2, "gone": 2}
    idle = "\n".join(reported(damping={"value": 2.0}, adam={"blocks": blocks})[0])
    assert "no effect with KFACAdamW: kfac.damping.value" in idle
    assert "kfac.adam.blocks 'gone': no layer's name ends with it" in idle
    assert "kfac.adam.blocks 'lm_head', whose layers keep Adam's direction" in idle
    assert "'up_proj|lm_head'" not in idle, "which has an effect on some"
    (far,) = [line for line in reported(lr=0.3)[0] if "recipe" in line]
    assert far.startswith("  WARNING: this run is far from every recipe for a language model"), far
    assert "'Masked model'" in far and ": lr 0.3 (0.002 there)" in far, far
    left = "\n".join(reported(Left)[0])
    assert "ds_kfac updates 10% of the trained matrix parameters (64 of 640)" in left
    assert "less than 80% of the matrix parameters; left out: Left 576 (" in left
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


def hook(function):
    return lambda model: model.first.weight.register_hook(function)


def accumulated(model) -> None:
    model.first.weight.register_post_accumulate_grad_hook(clear)


UNROTATED = {"adam": {"rotate": False}, "factor": {"update_interval": 1}}
FIRST, ALL = {"first"}, (0, 2, 3)
HOOKS = {  # what is done before attach and after it, whose gradient is told to be changed, options
    "hook": (hook(masked), None, FIRST, {}, ALL),
    "accumulated": (accumulated, None, FIRST, {}, ALL),
    "looks": (hook(lambda g: g.norm() and None), None, set(), {}, ALL),
    "later": (None, hook(masked), FIRST, {}, ALL),
    "excluded": (hook(masked), None, set(), {"layers": {"exclude": ["first"]}}, ALL),
    "thawed": (trains_middle(False), trains_middle(True), set(), {}, (0, 2)),
    "thawed, not rotated": (trains_middle(False), trains_middle(True), set(), UNROTATED, (0,)),
}
"""At stage 3 a parameter that was not trained at attach is in no optimizer state, which is asked of
all."""


@pytest.mark.ranks(2)
def test_hooks_that_change_gradients_are_told_with_their_layers_which_may_be_excluded():
    """Hooks that only look are not, nor are those of DeepSpeed, which has some in every ZeRO
    stage."""
    proving.RAISES = False
    cases = [(stage, name, *case) for name, (*case, stages) in HOOKS.items() for stage in stages]
    for stage, name, before, after, told, block in cases:
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
        assert set(engine.kfac.preconditioner.proving.unfit) == told, (stage, name)
        said = "or a hook on its parameters changes the gradient" in engine.kfac.report
        assert said == bool(told), (stage, name)
        said = "parameters: middle.weight" in "\n".join(later)
        assert said == ("thawed" in name and dist.get_rank() == 0), (stage, name, later)
        if name == "excluded":
            assert torch.equal(weights(engine)["first.weight"][3], start[3]), stage
        engine.destroy()


@pytest.mark.ranks(1)
def test_several_groups_behind_a_scaler_that_grows_are_a_known_fault():
    fault = "it divides all parameter groups but the first by the new scale"
    for groups in ("one", "decay"):
        engine = build(replace(BY_NAME["z2-autocast_float16"], groups=groups), 1)
        assert (fault in engine.kfac.report) == (groups == "decay")


def ours(**params) -> dict:
    return {"type": "KFACAdamW", "params": {"lr": 1e-3, "torch_adam": True, **params}}


def warmup(rate: float) -> dict:
    return {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": rate}}


SGD = {"type": "SGD", "params": {"lr": 1.0}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
OFFLOAD = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
SAMPLED = {"factor": {"fisher": "monte_carlo", "prediction": "tail"}}
UNROTATED_WITH_G = {"adam": {"rotate": False}, "factor": {"fisher": "empirical"}}
REFUSED = {
    "no module 'tail'": {"optimizer": SGD, "kfac": SAMPLED},
    "cannot be offloaded in part": {"optimizer": ours(), "zero_optimization": OFFLOAD},
    "optimizer.params.betas": {"optimizer": ours(betas=[0.9, 1.5])},
    "no optimizer": {"kfac": {}},
    'did you mean "KFACAdamW"': {"optimizer": {"type": "KfacAdam", "params": {"lr": 0.01}}},
    "rotate false there are no factors": {"optimizer": ours(), "kfac": UNROTATED_WITH_G},
    'needs one; set the method to "eigen"': {
        "optimizer": ours(),
        "kfac": {"preconditioner": {"method": "inverse"}},
    },
}
ZERO_2 = {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
HALVES = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
FITS = {
    "AdamW": {"optimizer": ADAMW, "kfac": {}},
    "SGD": {"optimizer": SGD, "kfac": {}, **ZERO_2},
    "KFACAdamW, bf16": {"optimizer": ours(), **HALVES},
    "a high rate": {"optimizer": ours(lr=0.2)},
    "a high rate of its schedule": {"optimizer": ours(), "scheduler": warmup(0.2)},
    "a low rate of its schedule": {"optimizer": ours(lr=0.2), "scheduler": warmup(2e-3)},
}


def checked(folder: Path, config: dict) -> str:
    path, printed = folder / "ds_config.json", io.StringIO()
    path.write_text(json.dumps(config))
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        main(["check", "--config", str(path), "--model", "tests.models:TokenNet"])
    return printed.getvalue()


def engine_of(config: dict):
    made, config = TokenNet(), copy.deepcopy(config)
    return ds_kfac.initialize(model=made, model_parameters=made.parameters(), config=config)[0]


@pytest.mark.ranks(1)
def test_what_attach_refuses_check_refuses_in_the_same_words(tmp_path):
    for text, config in REFUSED.items():
        config = {"train_micro_batch_size_per_gpu": 2, **config}
        with pytest.raises(ValueError, match=text):
            ds_kfac.attach(engine_of(config))  # an engine without an optimizer has none yet
        said = checked(tmp_path, config)
        assert said.startswith("ds_kfac check: ") and text in said, said


@pytest.mark.ranks(1)
def test_what_fits_is_planned_and_summed_up_as_attach_does(tmp_path):
    for name, config in FITS.items():
        config = {"train_micro_batch_size_per_gpu": 2, **config}
        said, kfac = checked(tmp_path, config), engine_of(config).kfac
        assert said.splitlines()[1:6] == kfac.report.splitlines()[:5], (name, said)
        for text in (said, kfac.report):
            assert ("far from every recipe" in text) == name.startswith("a high rate"), (name, text)
        subject = Subject(TokenNet(), config)
        assert subject.rule is kfac.preconditioner.rule
        assert subject.config == kfac.preconditioner.config


OPTIMIZER = ours(lr=0.01, weight_decay=0.0)


def check_step_to_weight(engine, step, bound: float = 0.05) -> None:
    """What is logged of a step is the distance that it goes, over all layers."""
    before = weights(engine)
    step()
    after = weights(engine)
    layers = [layer for kfac in engine.kfac.job.preconditioners for layer in kfac.layers]
    names = [name for layer in layers for name in layer.parameters]
    moved = sum(float((after[n] - before[n]).double().square().sum()) for n in names)
    ratio = (moved / sum(float(after[n].double().square().sum()) for n in names)) ** 0.5
    logged = engine.kfac.log_line()["kfac/step_to_weight"]
    near(logged, ratio, bound * ratio, "of the weights before or after the step, or of a half")


RATES = {"kfac/updated", "kfac/curved", "kfac/lr_heads", "kfac/lr_others"}
MESSAGES = {"enabled": True, "prof_all": True, "verbose": False, "debug": False}
MEASURED = {"nu", "kl", "step_to_weight", "eigenvalue_spread"}
"""Counters that are not there before a step: all others are zero."""


@pytest.mark.ranks(2)
def test_the_logs_say_how_far_a_step_goes_and_how_spread_curvature_is():
    for name in ("adam-z0", "adam-z2", "adam-z3", "z2"):
        own = {} if name == "z2" else {"optimizer": OPTIMIZER}
        if name == "adam-z2":
            own["comms_logger"] = MESSAGES
        engine = build(BY_NAME[name], 1, **own)
        before = engine.kfac.counters()
        of_self_test = ("calls_", "sent_bytes_", "received_bytes_")
        not_zero = {k for k, value in before.items() if value and not k.startswith(of_self_test)}
        assert {f"kfac/{key}" for key in not_zero} <= RATES, name
        train(engine, 1, steps=2)
        step = partial(train, engine, 1, steps=1, first=2)
        if name == "z2":  # the user's optimizer decides on the step
            step()
        else:  # at stage 3 a rank knows the mean square of its half of the weights
            check_step_to_weight(engine, step, 0.5 if name == "adam-z3" else 0.05)
        after = engine.kfac.counters()
        assert before.keys() == after.keys() - MEASURED and after["steps"] == 3, name
        if name == "adam-z2":
            deepspeed.comm.log_summary(show_straggler=True)  # it takes sizes to be alike
        if name == "z2":  # the KL divergence of a clipped step is half of what the clip allows
            assert after["nu"] < 1
            kl_clip = KFAC["preconditioner"]["kl_clip"]
            close(after["kl"], kl_clip / 2, sums=100, dtype=torch.float32)
        logged = {**engine.kfac.log_line(), **engine.kfac.log_constants()}
        assert {f"kfac/{key}" for key in after} >= {"kfac/steps", *logged}
        assert (logged["kfac/updated"], logged["kfac/curved"]) == (1.0, 1.0)
        states = engine.kfac.preconditioner.state.values()
        values = [state.basis.A.values.tolist() for state in states if state.basis]
        spread = statistics.median_low(max(own) / statistics.fmean(own) for own in values)
        close(logged["kfac/eigenvalue_spread"], spread, sums=20, dtype=torch.float32, what=name)
        assert ("kfac/step_to_weight" in logged) == (name != "z2")
    # of dense layers and experts together
    experts = Experts(ep_size=1)
    engine = experts.make(Mode("moe", 0, adam=True, clip=0.0, extra={"optimizer": OPTIMIZER}))
    experts.train(engine, 2)
    check_step_to_weight(engine, lambda: experts.train(engine, 1))


LINE = {"kfac/nu", "kfac/kl", "kfac/eigenvalue_spread"}
CONSTANTS = {"kfac/updated", "kfac/curved"}
COUNTERS = ("captures", "statistics_fraction", "refreshes", "steps", "not_finite_layers")
WRITTEN = {f"kfac/{name}" for name in (*COUNTERS, "sent_bytes_proof", "calls_proof")}


@pytest.mark.ranks(1)
def test_a_line_has_few_numbers_failures_where_there_are_any_and_the_monitors_names(tmp_path):
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    engine = build(BY_NAME["z2"], 1, kfac={}, csv_monitor=monitor)
    silent = build(BY_NAME["adam-z2"], 1, kfac={"report": "none"})
    for each in (engine, silent):
        train(each, 1, steps=2)
        each.kfac.metrics.summary[list(SUMMARY).index("refresh_failures")] = 2
    line = engine.kfac.log_line()
    assert line.pop("kfac/refresh_failures") == 2 and line.keys() == LINE
    assert engine.kfac.log_constants().keys() == CONSTANTS
    assert silent.kfac.log_line() == silent.kfac.log_constants() == {}
    files = {path.stem: path for path in tmp_path.rglob("*.csv")}
    assert {key.replace("/", "_") for key in LINE | CONSTANTS | WRITTEN} <= files.keys()
    lines = files["kfac_updated"].read_text().splitlines()
    assert len(lines) == 2, "a heading and one value"


@pytest.mark.ranks(1)
def test_stages_are_timers_of_deepspeeds_breakdown_until_detach():
    engine = build(BY_NAME["z2"], 1, wall_clock_breakdown=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train(engine, 1, steps=5)
    ours, timers = {TIMER + stage for stage in STAGES}, engine.engine_timers
    assert ours <= set(timers.global_timers)
    cached = engine.get_wall_clock_timers()
    assert all(cached[TIMER + stage] > 0 for stage in ("relayout", "precondition"))
    assert TIMER + "precondition" in printed.getvalue()
    engine.kfac.detach()
    assert not ours & set(timers.global_timers)


def test_every_counter_has_a_row():
    """Those that a docstring names, too: not each is of every run."""
    page = Path(__file__).parents[2] / "docs/reference/counters.md"
    table = page.read_text().split("## One layer")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    rows = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    docstrings = f"{Metrics.__doc__} {counters.__doc__} {health.__doc__}"
    told = re.findall(r'"([a-z_]+(?:<\w+>)?)"', docstrings)
    counted = {*SUMMARY, *FAILURES, *told, "nu", "kl", "updated", "curved"}
    counted |= {f"seconds_{stage}" for stage in STAGES}
    patterns = {row: re.compile(re.sub("<.*>", ".+", row) + "$") for row in rows}
    missing = [n for n in counted if not any(p.match(n) for p in patterns.values())]
    assert not missing and len(told) > 10
    for row, pattern in patterns.items():  # nor is there a row of none
        assert row.startswith("lr_") or any(map(pattern.match, counted)), row
