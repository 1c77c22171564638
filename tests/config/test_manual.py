"""docs/reference/config.md is made from the models, and has every key."""

import inspect
from pathlib import Path

import pytest
from pydantic import BaseModel, Field

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


def test_it_has_every_key_and_none_that_the_models_have_not():
    rows = [
        line.split("`")[1]
        for line in manual.manual().splitlines()
        if line.startswith("| `") and line.count(" | ") > 2
    ]
    blocks = {
        name for name, field in KFACConfig.model_fields.items() if isinstance(field.default, Block)
    }
    params = [f"{manual.PARAMS}.{name}" for name in DEFAULTS]
    assert sorted(rows) == sorted(
        [*params, *(key for key in paths(KFACConfig) if key not in blocks)]
    )


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


def test_every_key_has_a_reason():
    blocks = {
        name for name, field in KFACConfig.model_fields.items() if isinstance(field.default, Block)
    }
    assert sorted(manual.WHY) == sorted(key for key in paths(KFACConfig) if key not in blocks)


def test_a_cell_has_at_most_25_words():
    """What is longer goes below the table: a docstring's second paragraph."""
    cells = [
        cell
        for line in manual.manual().splitlines()
        if line.startswith("| ")
        for cell in line.split(" | ")
    ]
    assert len(cells) > 100
    assert not [cell for cell in cells if len(cell.split()) > 25]


def test_types_bounds_and_defaults_are_in_the_words_of_json():
    class Words(Block):
        """Of a test."""

        number: float | None = Field(None, gt=0, le=1)
        """Some part | of it.

        More about
        it.

        And the end."""
        names: list[str] = ["a"]
        """``names``."""

    keys = manual.json_of(Words)["properties"]
    first, second = list(manual.table("words.", keys))[2:]
    assert first == "| `words.number` | number, > 0, <= 1 | `null` | Some part \\| of it. |  |"
    assert second == '| `words.names` | list of string | `["a"]` | `names`. |  |'
    assert list(manual.details("words.", keys)) == [
        "",
        "- `words.number`: More about it. And the end.",
    ]


def test_a_key_without_docstring_is_an_error():
    class Silent(BaseModel):
        key: int = 1

    with pytest.raises(ValueError, match=r"kfac\.silent\.key has no docstring"):
        list(manual.table("silent.", manual.json_of(Silent)["properties"]))
