"""The "kfac" block: defaults, and errors that say all that is wrong and what to write instead."""

import re

import pytest

from ds_kfac.config.keys import parse
from ds_kfac.config.values import find_block
from ds_kfac.directions.kfac_adamw.rule import KFACAdamWRule
from ds_kfac.directions.table import rule_in
from ds_kfac.schedule.timetable import BurnIn, Schedule, Value
from tests.choices import resolved

RAMP = {"schedule": "linear", "start": 0.1, "end": 0.9, "steps": 200}
PIECES = {"schedule": "piecewise", "values": [1, 2, 5], "steps": [10, 20]}


def test_null_and_auto_mean_choose_for_me():
    keys = (
        ("factor", "update_interval"),
        ("eigenbasis", "refresh_interval"),
        ("damping", "value"),
        ("assignment", "memory_budget_gb"),
        ("communication", "dtype"),
        ("offload", "device"),
    )
    for null in (None, "auto"):
        for section, key in keys:
            assert parse({section: {key: null}}) == parse({section: null}) == parse({}), key
    with pytest.raises(ValueError, match=r"kfac\.dampnig: unknown key; did you mean kfac\.damping"):
        parse({"dampnig": "auto"})


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (0.5, Value.constant(0.5)),
        (RAMP, Value.ramp("linear", 0.1, 0.9, 200)),
        ({**RAMP, "delay": 50}, Value.ramp("linear", 0.1, 0.9, 200, delay=50)),
        ({**PIECES, "values": [0.5, 0.1, 0.2]}, Value.piecewise([0.5, 0.1, 0.2], [10, 20])),
    ],
)
def test_a_number_may_be_a_schedule(given, value):
    block = {"factor": {"decay": given}, "damping": {"value": given}}
    config = parse({**block, "preconditioner": {"kl_clip": given}})
    assert config.factor.decay == config.damping.value == config.preconditioner.kl_clip == value
    for step in (0, 30, 130, 1000):
        expected = value.at(step)
        assert config.factor.decay.at(step) == config.damping.at(step) == expected
        assert config.preconditioner.kl_clip_at(step) == expected


def test_intervals_may_be_schedules_and_refreshes_follow_updates():
    ramp = {**RAMP, "start": 7, "end": 100}
    config = parse(
        {"factor": {"update_interval": PIECES}, "eigenbasis": {"refresh_interval": ramp}}
    )
    assert config.schedule == Schedule(
        Value.piecewise([1, 2, 5], [10, 20]), Value.ramp("linear", 7, 100, 200), BurnIn(50, 1, 2)
    )
    following = resolved({"factor": {"update_interval": PIECES}}).schedule
    assert following.refresh == Value.piecewise([5, 10, 25], [10, 20])
    assert resolved({"burn_in": {"steps": 0}}).schedule.burn_in is None


def damped(value) -> dict:
    return {"damping": {"value": value}}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"damp": {}}, "kfac.damp: unknown key; did you mean kfac.damping?"),
        ({"factor": {"decay": 1}}, "kfac.factor.decay: got 1; input should be less than 1"),
        ({"factor": {"decay": {**RAMP, "end": 1}}}, "decay.end: got 1; input should be less than"),
        ({"factor": {"decay": {**RAMP, "schedule": "exponential", "start": 0}}}, "decay.start: "),
        ({"preconditioner": {"kl_clip": -1}}, "kl_clip: got -1; input should be greater than or"),
        ({"eigenbasis": {"refresh_interval": 0}}, "got 0; input should be greater than or equal"),
        ({"adam_lr": 1}, "KFACAdamW belongs in optimizer.params"),
        ({"kl_clip": 1}, "kfac.kl_clip: unknown key; did you mean kfac.preconditioner.kl_clip?"),
        ({"factor": {"update_interval": "10"}}, "update_interval: got '10'; input should be a val"),
        ({"eigenbasis": {"refresh_interval": 15}}, "(15) must be a multiple of kfac.factor.update"),
        (
            {"preconditioner": {"method": "inverse", "eigenvalues": "corrected"}},
            'keeps no eigenbasis, so kfac.preconditioner.eigenvalues must be "kronecker"; or use '
            'method "eigen"',
        ),
        ({"factor": {"loss_mean": "step"}}, 'the rows of all ranks: set kfac.factor.rows to "all"'),
        (
            {"factor": {"loss_mean": "step", "rows": "all", "fisher": "monte_carlo"}},
            "the sampled loss",
        ),
        (True, '"kfac" must be an object such as {"enabled": true}, got True'),
        ({"layers": {"include": ["b", "a("]}}, "include.1: got 'a('; must be a regular expression"),
        ({"adam": {"except_layers": ["(?i)head"]}}, "write flags as in (?i:head)"),
        ({"assignment": {"gradient_worker_fraction": 0}}, "_fraction: got 0; input should be gre"),
        ({"assignment": {"memory_budget_gb": 0}}, "_gb: got 0; input should be greater than 0"),
        ({"offload": {"device": "nvme"}}, "device: got 'nvme'; input should be 'none' or 'cpu'"),
        # another form is told the right one
        ({"factor.update_interval": 5}, 'write {"factor": {"update_interval": 5}}'),
        ({"damping": 0.001}, 'must be an object such as {"value": 0.001}'),
        ({"damping": {"schedule": "cosine", "start": 3}}, 'write {"value": {"schedule": ..}}'),
        ({"adam": 3}, "must be an object whose keys may be: rotate, "),
        ({"preconditioner": {"graft": "norm"}}, "was removed in 0.2, because corrected"),
        # in a schedule
        (damped({**RAMP, "strat": 1}), "value.strat: unknown key; did you mean kfac.damping.val"),
        (damped({"start": 1}), "value.schedule: got None; must be one of linear, cosine, "),
        (damped({**RAMP, "end": None}), "value.end: must be given"),
        (damped({**PIECES, "values": []}), "value.values: got []; list should have at least 1 it"),
        (damped({**PIECES, "steps": [10]}), "value.steps: got [10]; must have one entry fewer"),
        (damped({**PIECES, "steps": [20, 20]}), "got [20, 20]; steps must be strictly incr"),
        (damped(True), "got True; input should be a valid number or a schedule such as {"),
    ],
)
def test_an_error_says_where_what_and_what_instead(block, message):
    with pytest.raises(ValueError) as error:
        parse(block)
    assert message in str(error.value)


def test_all_errors_come_in_one_message():
    block = {
        "factor": {"update_interval": 7, "decay": 2},
        "eigenbasis": {"refresh_interval": 10},
        "damping": {"vlaue": 1, "value": {"schedule": "linear", "strat": 1, "end": 0, "steps": 0}},
        "bogus": 1,
    }
    with pytest.raises(ValueError) as error:
        parse(block)
    schedule = (f"damping.value.{key}: " for key in ("strat", "start", "end", "steps"))
    for part in ("factor.decay", "refresh_interval (10)", "damping.vlaue", "kfac.bogus", *schedule):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"kfac.damping.value": 3}, r'write \{"kfac": \{"damping": \{"value": 3\}\}\}'),
        *(({key: {}}, 'did you mean "kfac"') for key in ("KFAC", "k-fac", "k_fac", "kfca", "kfc")),
        ({"optimizer": {"kfac": {}}}, '"kfac" is not read inside of "optimizer"'),
    ],
)
def test_a_block_that_is_written_otherwise_is_not_ignored(config, told):
    with pytest.raises(ValueError, match=told):
        find_block(config)


def test_other_blocks_are_none_of_our_business():
    assert find_block({"fp16": {}, "zero_optimization": {}}) is None
    users = {"face": {}, "fact": {}, "kmac": {}, "kfold": {}, "sweep": {"kfac": True}}
    assert find_block(users) is None
    assert find_block({"kfac": {"enabled": False}}) == {"enabled": False}


@pytest.mark.parametrize(
    "params, message",
    [
        ({"lr": "1e-3"}, "optimizer.params.lr: got '1e-3'; must be a finite number"),
        ({"betas": [0.9, 1.0]}, "must be two numbers of at least 0 and below 1"),
        ({"torch_adam": 1}, "optimizer.params.torch_adam: got 1; must be true or false"),
        ({"eps": float("nan")}, "optimizer.params.eps: got nan; must be a finite number"),
        ([0.1], "optimizer.params: got [0.1]; must be an object"),
    ],
)
def test_wrong_parameters_of_the_optimizer_are_named(params, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        rule_in({"optimizer": {"type": "KFACAdamW", "params": params}})
    assert rule_in(
        {"optimizer": {"type": "KFACAdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}}}
    ).optimizer_type


def test_whole_numbers_are_parameters_of_the_optimizer_too():
    """torch's AdamW asks for floats on a CPU: it takes no beta of 0 next to one of 0.9."""

    def params(given) -> dict:
        optimizer = {"type": "KFACAdamW", "params": given}
        return KFACAdamWRule().optimizer_params({"optimizer": optimizer})

    found = params({"lr": 1, "betas": [0, 0.9]})
    assert found == {"lr": 1.0, "betas": (0.0, 0.9)} and params(None) == {}
    assert type(found["betas"][0]) is type(found["lr"]) is float
