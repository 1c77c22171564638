"""The keys of the "kfac" block about distribution: who, what travels, how often, where it lies."""

import pytest

from ds_kfac.config.keys import parse


def test_scale_is_left_to_the_plan_unless_it_is_asked_for():
    config = parse({})
    assignment, communication = config.assignment, config.communication
    assert assignment.gradient_worker_fraction is assignment.memory_budget_gb is None
    assert communication.dtype is config.adaptive is None
    assert config.offload.device == "none"


SCALE = {
    "assignment": {"gradient_worker_fraction": 0.25, "memory_budget_gb": 1},
    "communication": {"dtype": "bf16"},
    "offload": {"device": "cpu"},
}


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
        ("communication", "dtype", "fp8", "input should be 'fp32' or 'bf16'"),
        ("offload", "device", "nvme", "input should be 'none' or 'cpu'"),
    ],
)
def test_an_error_of_scale_names_its_key(section, key, wrong, message):
    with pytest.raises(ValueError) as error:
        parse({section: {key: wrong}})
    lines = [line for line in str(error.value).splitlines() if f"kfac.{section}.{key}: " in line]
    assert lines and message in lines[0]
