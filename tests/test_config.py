"""The "kfac" block: defaults, and errors that say all that is wrong and what to write instead."""

import pytest

from ds_kfac.config import find_block, parse


def test_the_shortest_block_is_enough():
    config = parse({"enabled": True})
    assert config.enabled and config.factor.update_interval == 10 and config.refresh_interval == 100
    assert parse({}).enabled


def test_null_means_choose_for_me():
    nothing = {"factor": {"update_interval": None}, "eigenbasis": None, "damping": {"value": None}, "layers": None}
    assert parse(nothing) == parse({})


def test_the_refresh_interval_follows_the_update_interval():
    assert parse({"factor": {"update_interval": 7}}).refresh_interval == 70


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"dampening": {}}, "kfac.dampening: unknown key; did you mean kfac.damping?"),
        ({"damping": {"valeu": 1}}, "kfac.damping.valeu: unknown key; did you mean kfac.damping.value?"),
        ({"kl_clip": 1}, "kfac.kl_clip: unknown key; did you mean kfac.preconditioner.kl_clip?"),
        ({"xyzzy": 1}, "kfac.xyzzy: unknown key; valid keys: kfac.enabled, kfac.factor"),
        ({"xyzzy": None}, "kfac.xyzzy: unknown key"),
        ({"factor": {"update_interval": 0}}, "kfac.factor.update_interval: got 0; input should be greater"),
        (
            {"factor": {"update_interval": "10"}},
            "kfac.factor.update_interval: got '10'; input should be a valid integer",
        ),
        ({"factor": {"decay": 1.0}}, "kfac.factor.decay: got 1.0; input should be less than 1"),
        ({"factor": 3}, "kfac.factor: got 3; must be an object"),
        ({"damping": {"kind": "auto"}}, '"auto" is not used in this block, leave the key out or write null'),
        ({"eigenbasis": {"method": "svd"}}, "kfac.eigenbasis.method: got 'svd'"),
        ({"layers": {"exclude": "head"}}, "kfac.layers.exclude: got 'head'; input should be a valid list"),
        (
            {"eigenbasis": {"refresh_interval": 15}},
            "kfac.eigenbasis.refresh_interval (15) must be a multiple of kfac.factor.update_interval (10)",
        ),
        (True, '"kfac" must be an object such as {"enabled": true}, got True'),
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
        "damping": {"vlaue": 1},
        "bogus": 1,
    }
    with pytest.raises(ValueError) as error:
        parse(block)
    for part in ("factor.decay", "refresh_interval (10)", "damping.vlaue", "kfac.bogus"):
        assert part in str(error.value)


@pytest.mark.parametrize("key", ["KFAC", "k-fac", "k_fac", "ds_kfac"])
def test_a_misspelt_block_is_not_ignored(key):
    with pytest.raises(ValueError, match='did you mean "kfac"'):
        find_block({key: {"enabled": True}})


def test_other_blocks_are_none_of_our_business():
    assert find_block({"fp16": {}, "zero_optimization": {}}) is None
    assert find_block({"kfac": {"enabled": False}}) == {"enabled": False}
