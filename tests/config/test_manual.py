"""docs/reference/config.md is made from the models, and has every key."""

import inspect
from pathlib import Path

from ds_kfac.__main__ import main
from ds_kfac.config import manual
from ds_kfac.config.keys import DEFAULTS, Block, KFACConfig
from ds_kfac.config.values import paths
from ds_kfac.directions.kfac_adamw.optimizer import checked
from ds_kfac.directions.kfac_adamw.user_optimizer import KFACAdamW

PAGE = Path(__file__).parents[2] / "docs/reference/config.md"


def test_the_page_is_what_the_models_say(capsys):
    assert main(["config"]) == 0
    assert capsys.readouterr().out == manual.manual() + "\n"
    assert PAGE.read_text() == manual.manual() + "\n", (
        "run: DS_ACCELERATOR=cpu python -m ds_kfac config > docs/reference/config.md"
    )


def test_it_has_every_key_and_none_that_the_models_have_not_and_each_has_a_reason():
    rows = [
        line.split("`")[1]
        for line in manual.manual().splitlines()
        if line.startswith("| `") and line.count(" | ") > 2
    ]
    blocks = {
        name for name, field in KFACConfig.model_fields.items() if isinstance(field.default, Block)
    }
    params = [f"{manual.PARAMS}.{name}" for name in DEFAULTS]
    keys = [key for key in paths(KFACConfig) if key not in blocks]
    assert sorted(rows) == sorted([*params, *keys])
    assert sorted(manual.WHY) == sorted(keys)


def test_the_optimizers_parameters_are_those_of_its_block_and_of_its_object():
    given = {
        name: p.default
        for name, p in inspect.signature(KFACAdamW).parameters.items()
        if name in DEFAULTS
    }
    assert given == {**DEFAULTS, "betas": tuple(DEFAULTS["betas"])}
    for name in DEFAULTS:
        assert checked({name: DEFAULTS[name]}, "") is not None
        assert checked({name: "auto"}, "") == checked({name: None}, "") == {}
