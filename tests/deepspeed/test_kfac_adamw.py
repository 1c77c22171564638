"""The optimizer KFACAdamW as a user meets it: config, norms and clipping, schedules, memory, loss
scales, detaching."""

import copy
from unittest.mock import patch

import deepspeed
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import ds_kfac
from benchmarks.held import nbytes_of
from ds_kfac.directions.kfac_adamw import group_step
from tests.close import close
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, micro_batches, patched, train, weights
from tests.deepspeed.said import error_of, heard
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch, make_net
from tests.ranks import of_ranks

pytestmark = pytest.mark.ranks(1)
PLAIN = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
OURS = {"type": "KFACAdamW", "params": {"lr": 0.01, "torch_adam": True}}


def config(stage: int = 2, optimizer: dict = OURS, params=None, **changes) -> dict:
    optimizer = copy.deepcopy(optimizer)
    optimizer["params"] |= params or {}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": optimizer,
        "steps_per_print": None,
        **changes,
    }


def start(settings: dict, model=None, **given):
    engine, *_ = ds_kfac.initialize(model=model or make_net(), config=settings, **given)
    return engine


def start_plain(settings: dict):
    """Without K-FAC."""
    settings = {key: value for key, value in settings.items() if key != "kfac"}
    return deepspeed.initialize(model=make_net(), config=settings)[0]


PARTLY = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
CONTRADICTIONS = {
    'did you mean "KFACAdamW"?': config(optimizer={"type": "KfacAdam", "params": {"lr": 0.01}}),
    'use "AdamW" to train without it': config(kfac={"enabled": False}),
    "cannot be offloaded in part": config(zero_optimization=PARTLY),
    "kfac.adam.rotate false keeps no factors": config(
        kfac={"adam": {"rotate": False}, "factor": {"fisher": "empirical"}}
    ),
}


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_contradictions_are_said_before_an_engine_is_built(words):
    assert words in error_of(lambda: start(CONTRADICTIONS[words]))


def test_two_optimizers_are_a_contradiction():
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters())
    assert "choose one" in error_of(lambda: start(config(), model, optimizer=optimizer))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_norm_schedule_and_memory_are_those_of_adamw(stage):
    warmup = {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}
    schedule = {"scheduler": {"type": "WarmupLR", "params": warmup}}
    norms, rates, elements = [], [], []
    for optimizer, make in ((PLAIN, start_plain), (OURS, start)):
        engine = make(config(stage, optimizer, gradient_clipping=0.05, **schedule))
        rates.append([])
        for step in range(3):
            for x, y in micro_batches(step, 1):
                engine.backward(engine(x, y))
            engine.step()
            if not step:  # of the same gradient; that it is the raw one's norm holds for all
                norms.append(float(engine.get_global_grad_norm() or 0.0))
            rates[-1].append({group["lr"] for group in engine.optimizer.param_groups})
        states = engine.basic_optimizer.state.values()
        moments = sum(t.numel() for state in states for t in state.values() if t.numel() > 1)
        elements.append(sum(of_ranks(moments)) / (1 if stage else 2))
    numel = sum(p.numel() for p in make_net().parameters())
    close(norms[1], norms[0], sums=numel, dtype=torch.float32)
    assert len(engine.optimizer.param_groups) == 2 and rates[0] == rates[1]
    assert len(set().union(*rates[0])) == 3, "the schedule changes them"
    kfac = engine.kfac.preconditioner
    held = sum(of_ranks(nbytes_of(kfac)[1] / 4 - len(kfac.owned)))
    padding = 2 * 4 * 3  # of flat groups
    assert elements[0] >= 2 * numel >= elements[1] + held - padding
    assert " in eigenbases and " in engine.kfac.report


def test_the_name_alone_attaches_kfac_and_detaching_stops_training():
    engine = start(config())
    assert [layer.name for layer in engine.kfac.preconditioner.layers] == [
        "first",
        "middle",
        "head",
    ]
    assert [bool(group.get("kfac")) for group in engine.optimizer.param_groups] == [True, False]
    engine.kfac.detach()
    assert "K-FAC was detached" in error_of(lambda: train(engine, 1, steps=1))


def test_the_report_says_what_has_no_effect_and_what_steps_a_layer():
    kfac = {"damping": {"value": 2.0}, "adam": {"except_layers": ["head", "fc"]}}
    report = start(config(kfac=kfac)).kfac.report
    assert "without effect with KFACAdamW: kfac.damping.value" in report
    assert "kfac.adam.except_layers 'fc': no layer's name ends with it" in report
    assert "2 layers orthogonalized at lr, 1 along Adam's direction at " in report
    rows = {line.split()[0]: line for line in report.splitlines() if line.startswith("  ")}
    assert rows["first"].endswith("orthogonalized")
    assert rows["head"].endswith("Adam's direction: kfac.adam.except_layers 'head'")
    other = start(config(optimizer=PLAIN, kfac={"adam": {"whiten": 0.2}})).kfac.report
    assert "without effect with AdamW: kfac.adam.whiten" in other


def sizes_and_scales(name: str, clip: float, window: int, parts: list[float]) -> tuple[list, list]:
    """Sizes of a layer's steps, and loss scales, which grow every ``window`` steps.

    Args:
        parts: gets which part of its gradient each step is given; if it has any, they are that of
            the losses.
    """
    fp16 = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": window}
    engine = build(BY_NAME[name], fp16=fp16, gradient_clipping=clip)
    kfac, sizes, scales = engine.kfac.preconditioner, [], [float(engine.optimizer.loss_scale)]
    plain, losses = kfac.direction.step, list(parts)

    def measured(*given):
        factor = kfac.seam.factor
        parts.append(1.0 if factor is None else float(factor) * scales[-1])
        return plain(*given)

    before = weights(engine)["middle.weight"]
    measuring = patch.object(kfac.direction, "step", plain if losses else measured)
    with patched(BY_NAME[name]), measuring:
        for step in range(12):
            times = losses[step] if losses and window > 12 else 1.0
            train(engine, 1, steps=1, first=step, times=times)
            now = weights(engine)["middle.weight"]
            sizes.append(float((now - before).norm()))
            scales.append(float(engine.optimizer.loss_scale))
            before = now
    return sizes, scales


@pytest.mark.parametrize("name", ["adam-z0-fp16", "adam-z2-fp16", "adam-z3-fp16"])
def test_a_step_is_as_long_where_the_loss_scale_grows(name):
    """ZeRO 1 and 2 double the scale before they divide by it, so that the gradients of that step
    are half as large, for every optimizer. Where the scale never grows, that step's loss is half
    as large instead."""
    parts: list[float] = []
    for clip in (0.0, 1e-3):
        sizes, scales = sizes_and_scales(name, clip, 4, parts)
        wanted, same = sizes_and_scales(name, clip, 1000, parts)
        assert scales[-1] >= 4 * scales[1] and same[-1] == same[0], scales
        for size, expected in zip(sizes, wanted, strict=True):
            assert 0.99 < size / expected < 1.01, (sizes, wanted)


@pytest.mark.ranks(2)
def test_without_rotation_it_is_adamw():
    """Nothing rotated, no momentum, every layer along Adam's direction at lr."""
    finals = []
    for optimizer, make in ((PLAIN, start_plain), (OURS, start)):
        params = {"betas": [0.0, 0.9], **({"adam_lr": 0.01} if optimizer is OURS else {})}
        kfac = {"adam": {"rotate": False, "except_layers": [".*"]}}
        with patch.object(group_step, "BASE", 1):
            engine = make(config(2, optimizer, params, gradient_clipping=0.1, kfac=kfac))
        train(engine, 1, steps=5)
        finals.append(weights(engine))
    # five steps of weights of up to 0.3
    close(finals[1], finals[0], sums=5 * 10, scale=0.3, dtype=torch.float32)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("types", [["Linear"], ["Linear", "LayerNorm"]])
@pytest.mark.parametrize("stage", [0, 2])
def test_what_has_no_rate_stands_still_and_does_not_decay(stage, types):
    """Norms at adam_lr 0, stepped by AdamW or as layers of K-FAC's; everything at a rate of
    zero."""
    params = {"adam_lr": 0, "betas": [0, 0.9], "weight_decay": 0.1}
    factor = {"update_interval": 1, "fisher": "empirical"}
    settings = config(stage, params=params, kfac={"layers": {"types": types}, "factor": factor})
    rates = [1.0, 0.0, 1.0, 1.0]
    engine = start(settings, lr_scheduler=lambda made: LambdaLR(made, rates.__getitem__))
    for step in range(3):
        before = weights(engine)
        train(engine, 1, steps=1, first=step)
        moved = {name for name, w in weights(engine).items() if not torch.equal(before[name], w)}
        others = {name for name in before if not name.startswith("norm")}
        assert moved == (others if rates[step] else set()), step
    assert not engine.kfac.counters()["not_finite_layers"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "as_object"), [(0, False), (2, False), (3, False), (2, True)])
def test_matrices_in_no_layer_and_their_biases_have_lr_and_all_else_adam_lr(stage, as_object):
    params = {"lr": 0.01, "weight_decay": 0.0, "eps": 1e-12, "torch_adam": True}
    settings = config(stage, params=params, kfac={"layers": {"exclude": ["^middle", "^first"]}})
    model, given = make_net(), {}
    if as_object:
        del settings["optimizer"]
        given = {"optimizer": ds_kfac.KFACAdamW(model.parameters(), **params)}
    engine = start(settings, model, **given)
    before = weights(engine)
    train(engine, 1, steps=1)
    after = weights(engine)
    moved = {name: float((after[name] - w).abs().median()) / 0.01 for name, w in before.items()}
    names = ("middle.weight", "first.weight", "first.bias", "norm.weight")
    # g / |g|, in ten operations
    close([moved[n] for n in names], [1.0, 1.0, 1.0, 8.0], sums=10, dtype=torch.float32)
    said, step = engine.kfac.report.splitlines()[1:3]
    elements = before["middle.weight"].numel() + before["first.weight"].numel()
    assert said.endswith(
        f": AdamW at 8 lr (adam_lr), {elements:,} of them in matrices, at lr as their biases"
    )
    head = 8 * 128 / 20  # of 19 inputs and a bias
    assert step.endswith(f"orthogonalized at lr, 1 along Adam's direction at {head:.3g} lr")
    logged = engine.kfac.log_constants()
    rates = [logged[f"kfac/lr_{kind}"] for kind in ("heads", "others")]
    close(rates, [head, 8.0], sums=1, dtype=torch.float64)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_without_elements_may_be_all_that_is_in_no_layer(stage):
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, CLASSES))
    model.register_parameter("none", torch.nn.Parameter(torch.zeros(0)))
    engine = start(config(stage), model)
    before, (x, y) = weights(engine)["0.weight"], make_batch(0, 4)
    engine.backward(cross_entropy(engine(x), y))
    engine.step()
    assert not torch.equal(weights(engine)["0.weight"], before)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    ("key", "groups"),
    [("lr", slice(0)), ("lr", slice(2)), ("lr", slice(1)), ("weight_decay", slice(1))],
)
def test_a_rate_that_is_set_for_a_part_of_a_group_alone_is_told_once(stage, key, groups):
    engine = start(config(stage, kfac={"report": "none"}))
    with heard() as said:
        train(engine, 1, steps=1)
        for group in engine.optimizer.param_groups[groups]:
            group[key] = 0.5 * group[key]
        train(engine, 1, steps=3, first=1)
    told = sum(f"Their {key} is not one any more" in text for text in said)
    assert told == (groups == slice(1))


def updates_of(engine) -> dict[str, float]:
    """How many gradients each layer's moments have."""
    states = engine.kfac.preconditioner.state.items()
    return {name: float(state.moments.updates) for name, state in states}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_moments_that_a_program_takes_from_the_optimizers_state_begin_at_zero(stage):
    """Those of the layer, or of all where DeepSpeed's parameters are flat."""
    engine = start(config(stage))
    optimizer, middle = engine.optimizer, engine.module.middle.weight

    def updates(action=lambda: None) -> dict[str, float]:
        train(engine, 1, steps=4)
        action()
        train(engine, 1, steps=1)
        return updates_of(engine)

    assert set(updates().values()) <= {5}
    assert set(updates(optimizer.state.clear).values()) <= {1}
    if stage:
        return
    for action, of_middle, others in (
        (lambda: optimizer.state.pop(middle), 1, 6),
        (lambda: optimizer.load_state_dict(optimizer.state_dict()), 6, 11),
    ):
        for name, count in updates(action).items():
            assert count == (of_middle if name == "middle" else others), name


def test_loaded_moments_of_a_layer_without_a_step_stay_where_anothers_are_taken_away():
    engine = start(config(0))
    train(engine, 1, steps=4)
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    hook = engine.module.first.register_forward_hook(lambda module, inputs, output: output.detach())
    train(engine, 1, steps=1)
    hook.remove()
    engine.optimizer.state.pop(engine.module.middle.weight)
    train(engine, 1, steps=1)
    assert updates_of(engine) == {"first": 5, "middle": 1, "head": 6}
