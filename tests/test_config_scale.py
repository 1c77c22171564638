"""The keys of the "kfac" block about distribution: who, what travels, how often, where it lies."""

import pytest

from ds_kfac.config import parse
from ds_kfac.warm_start import WarmStart


def test_scale_is_left_to_the_plan_unless_it_is_asked_for():
    config = parse({})
    assignment, communication, eigenbasis = config.assignment, config.communication, config.eigenbasis
    assert assignment.gradient_worker_fraction is assignment.memory_budget_gb is assignment.split_factors is None
    assert (assignment.costs, assignment.load_tolerance) == ("builtin", 0.1)
    assert communication.dtype is communication.gradient_dtype is None
    assert (communication.error_feedback, communication.overlap) == (False, True)
    assert (config.adaptive.enabled, config.adaptive.tolerance, config.adaptive.max_interval) == (False, 0.1, None)
    assert (eigenbasis.keep_below, eigenbasis.values_below, eigenbasis.qr_below) == (0, 0, 0)
    assert eigenbasis.stagger is None and eigenbasis.lag == 0
    assert eigenbasis.exact_every is None and eigenbasis.chosen_exact_every == 1
    assert config.offload.device == "none" and config.layers.share_inputs


SCALE = {
    "assignment": {
        "gradient_worker_fraction": 0.25, "memory_budget_gb": 1, "split_factors": True, "costs": {"link_bytes": 1e9},
        "load_tolerance": 0,
    },
    "communication": {"dtype": "bf16", "gradient_dtype": "bf16", "error_feedback": True, "overlap": False},
    "adaptive": {"enabled": True, "tolerance": 0.05, "max_interval": 8},
    "eigenbasis": {"keep_below": 0.02, "values_below": 0.1, "qr_below": 0.3, "stagger": False, "lag": 3},
    "offload": {"device": "cpu"},
    "layers": {"share_inputs": False},
}  # fmt: skip


def test_every_key_of_scale_is_read_and_null_is_its_default():
    config = parse(SCALE)
    for section, keys in SCALE.items():
        for key, value in keys.items():
            assert getattr(getattr(config, section), key) == value, (section, key)
        assert parse({section: dict.fromkeys(keys)}) == parse({section: None}) == parse({})


@pytest.mark.parametrize(
    ("section", "key", "wrong", "message"),
    [
        ("assignment", "gradient_worker_fraction", 0, "input should be greater than 0"),
        ("assignment", "gradient_worker_fraction", 1.5, "input should be less than or equal to 1"),
        ("assignment", "memory_budget_gb", 0, "input should be greater than 0"),
        ("assignment", "memory_budget_gb", "16", "input should be a valid number"),
        ("assignment", "split_factors", 1, "input should be a valid boolean"),
        ("assignment", "load_tolerance", -0.1, "input should be greater than or equal to 0"),
        ("communication", "dtype", "fp8", "input should be 'fp32', 'bf16' or 'fp16'"),
        ("communication", "dtype", "auto", '"auto" is not used in this block'),
        ("communication", "gradient_dtype", "fp16", "input should be 'fp32' or 'bf16'"),
        ("communication", "overlap", "yes", "input should be a valid boolean"),
        ("adaptive", "tolerance", 0, "input should be greater than 0"),
        ("adaptive", "max_interval", 0, "input should be greater than or equal to 1"),
        ("adaptive", "enabled", 1, "input should be a valid boolean"),
        ("eigenbasis", "keep_below", -0.1, "input should be greater than or equal to 0"),
        ("eigenbasis", "values_below", 1, "input should be less than 1"),
        ("eigenbasis", "qr_below", float("nan"), "input should be"),
        ("eigenbasis", "stagger", 3, "input should be a valid boolean"),
        ("eigenbasis", "lag", -1, "input should be greater than or equal to 0"),
        ("eigenbasis", "lag", 1.5, "input should be a valid integer"),
        ("eigenbasis", "exact_every", 0, "input should be greater than or equal to 1"),
        ("eigenbasis", "exact_every", 2.5, "input should be a valid integer"),
        ("offload", "device", "nvme", "input should be 'none' or 'cpu'"),
        ("layers", "share_inputs", 0, "input should be a valid boolean"),
    ],
)
def test_an_error_of_scale_names_its_key(section, key, wrong, message):
    with pytest.raises(ValueError) as error:
        parse({section: {key: wrong}})
    lines = [line for line in str(error.value).splitlines() if f"kfac.{section}.{key}: " in line]
    assert lines and message in lines[0]


@pytest.mark.parametrize(
    ("rungs", "message"),
    [
        ((0.2, 0.1, 0.3), "kfac.eigenbasis.keep_below (0.2) must not be above kfac.eigenbasis.values_below (0.1)"),
        ((0.1, 0.3, 0.2), "kfac.eigenbasis.values_below (0.3) must not be above kfac.eigenbasis.qr_below (0.2)"),
        ((0.2, 0, 0.1), "kfac.eigenbasis.keep_below (0.2) must not be above kfac.eigenbasis.qr_below (0.1)"),
        ((0.2, None, 0.1), "kfac.eigenbasis.keep_below (0.2) must not be above kfac.eigenbasis.qr_below (0.1)"),
    ],
)
def test_the_rungs_of_a_warm_start_ascend(rungs, message):
    keys = ("keep_below", "values_below", "qr_below")
    with pytest.raises(ValueError) as error:
        parse({"eigenbasis": dict(zip(keys, rungs, strict=True))})
    assert message in str(error.value)


def test_qr_steps_without_a_look_and_a_warm_start_exclude_each_other():
    assert parse({"eigenbasis": {"exact_every": 10}}).eigenbasis.chosen_exact_every == 10
    parse({"eigenbasis": {"exact_every": 1, "qr_below": 0.1}})
    with pytest.raises(
        ValueError, match=r"exact_every \(10\) takes QR steps .* kfac.eigenbasis.qr_below \(0.1\) looks"
    ):
        parse({"eigenbasis": {"exact_every": 10, "qr_below": 0.1}})


@pytest.mark.parametrize("rungs", [(0.1, 0.1, 0.1), (0.1, 0, 0), (0, 0.1, 0), (0, 0, 0.1), (0.1, 0, 0.2)])
def test_a_rung_may_be_off(rungs):
    keys = ("keep_below", "values_below", "qr_below")
    options = parse({"eigenbasis": dict(zip(keys, rungs, strict=True))}).eigenbasis
    WarmStart(*(getattr(options, key) for key in keys))  # what is allowed here is allowed there


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ("guess", "got 'guess'; must be builtin, measure or an object such as {\"link_bytes\": 1e9}"),
        (3, 'got 3; must be builtin, measure or an object such as {"link_bytes": 1e9}'),
        ({"link_byts": 1}, "link_byts: unknown key; did you mean link_bytes?"),
        ({"link_bytes": -1}, "link_bytes: got -1; must be a positive number"),
        ({"eigh_seconds": [[64, 0.1], [32, 0.2]]}, "eigh_seconds: got [[64, 0.1], [32, 0.2]]; must be [[n, seconds], "),
    ],
)
def test_wrong_costs_are_found_with_all_other_errors(costs, message):
    with pytest.raises(ValueError) as error:
        parse({"assignment": {"costs": costs, "load_tolerance": -1}})
    lines = str(error.value).splitlines()
    assert any(line.startswith("  kfac.assignment.costs: ") and message in line for line in lines), lines
    assert any("kfac.assignment.load_tolerance: got -1" in line for line in lines)


def test_costs_may_be_given_in_part():
    given = {"link_bytes": 2.5e9, "link_seconds": 0, "eigh_seconds": [[64, 1e-3], [128, 4e-3]]}
    assert parse({"assignment": {"costs": {**given, "gemm_flops": None}}}).assignment.costs == given
    for name in ("builtin", "measure"):
        assert parse({"assignment": {"costs": name}}).assignment.costs == name
