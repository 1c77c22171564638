"""What a newcomer copies: recipes are whole configs that their rule can follow, and README, configs/ and the migration
pages say the same."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import moving
from ds_kfac.config.keys import parse
from ds_kfac.config.values import find_block
from ds_kfac.directions.table import rule_in

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/recipes.md").read_text()
RECIPES = {
    title: json.loads(block)
    for title, block in re.findall(r"^## (.*?)\n.*?^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
}
DECODER = RECIPES["Pretraining a decoder"]["optimizer"]["params"]
SHARED = ("lr", "betas", "weight_decay")


def test_every_task_has_a_recipe():
    assert list(RECIPES) == [
        "Pretraining a decoder", "Masked model", "Mixture of experts", "Supervised fine-tuning", "LoRA", "DPO", "GRPO",
        "A ResNet",
    ]  # fmt: skip
    for part in PAGE.split("\n## ")[1:]:
        assert re.search(r"Gave|[Nn]ot measured", part), "what it gave, or that it was not measured"


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_is_a_config_that_its_rule_can_follow(title):
    config = RECIPES[title]
    rule_in(config).resolved(parse(find_block(config)), config["optimizer"]["type"])
    assert {"train_micro_batch_size_per_gpu", "gradient_clipping", "zero_optimization"} <= config.keys()


def blocks(page: Path) -> list[dict]:
    """The optimizer blocks for KFACAdamW that a page shows."""
    found = re.findall(r'"optimizer": (\{"type": "KFACAdamW",\s+"params": \{.*?\}\})', page.read_text())
    return [json.loads(block) for block in found]


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/migrate/adamw.md", *(f"configs/{x.name}" for x in (ROOT / "configs").glob("gpt_*.json"))],
)
def test_other_places_say_what_the_recipe_says(page):
    if page.endswith(".json"):
        optimizer = json.loads((ROOT / page).read_text())["optimizer"]
        shown = [optimizer] if optimizer["type"] == "KFACAdamW" else []
    else:
        shown = blocks(ROOT / page)
        assert shown, "there is one"
    for block in shown:
        assert {key: block["params"][key] for key in SHARED} == {key: DECODER[key] for key in SHARED}, page


def test_the_runs_that_move_have_the_settings_of_the_page_that_shows_them():
    shown = re.findall(
        r'"optimizer": (\{"type": "\w+",\s+"params": \{.*?\}\})', (ROOT / "docs/migrate/adamw.md").read_text()
    )
    own = [moving.config_of(kind, moves=False)["optimizer"] for kind in moving.KINDS]
    assert [{**each, "params": {k: each["params"][k] for k in SHARED}} for each in own] == list(map(json.loads, shown))
