"""What a newcomer copies: recipes are whole configs that their rule can follow, and README,
configs/ and the page about switching say the same."""

import json
import re
from pathlib import Path

import pytest

from ds_kfac.config.keys import parse
from ds_kfac.config.values import find_block
from ds_kfac.diagnostics.recipes import ADAPTERS, BETA2, EXPERTS, IMAGES, WORDS, recipe_warnings
from ds_kfac.diagnostics.recipes import RECIPES as TABLE
from ds_kfac.directions.table import rule_in

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/howto/recipes.md").read_text()
RECIPES = {
    title: json.loads(block)
    for title, block in re.findall(
        r"^## (.*?)\n.*?^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
    )
}
DECODER = RECIPES["Pretraining a decoder"]["optimizer"]["params"]


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_is_a_config_that_its_rule_can_follow(title):
    config = RECIPES[title]
    (part,) = (part for part in PAGE.split("\n## ") if part.startswith(f"{title}\n"))
    assert re.search(r"Gave|[Nn]ot measured", part), "what it gave, or that it was not measured"
    rule_in(config).resolved(parse(find_block(config)), config["optimizer"]["type"])
    needed = {"train_micro_batch_size_per_gpu", "gradient_clipping", "zero_optimization"}
    assert needed <= config.keys() and len(RECIPES) >= 8


@pytest.mark.parametrize("page", ["README.md", "docs/howto/switch.md"])
def test_the_switch_from_adamw_shows_the_recipes_rate_and_keeps_a_weight_decay_of_adamws(page):
    (shown,) = re.findall(r'"KFACAdamW",\n\s+"params": (\{.*?\})', (ROOT / page).read_text())
    assert json.loads(shown) == {
        "lr": DECODER["lr"],
        "betas": DECODER["betas"],
        "weight_decay": 0.1,
    }


def settings(config: dict) -> tuple[str, float, float, float | None]:
    params = {"lr": 1e-3, "weight_decay": 0.0, **config["optimizer"]["params"]}
    beta2 = params.get("betas", (0.9, 0.999))[1] if config["optimizer"]["type"] != "SGD" else None
    return config["optimizer"]["type"], params["lr"], params["weight_decay"], beta2


def test_the_attach_reports_table_is_the_pages():
    table = {(r.title, r.optimizer): (r.lr, r.weight_decay) for r in TABLE}
    for title, config in RECIPES.items():
        optimizer, lr, decay, beta2 = settings(config)
        assert table.pop((title, optimizer)) == (lr, decay)
        assert beta2 is None or BETA2[0] <= beta2 <= BETA2[1]
    assert list(table) == [("A ResNet", "KFACAdamW")]
    assert "the learning rate 2.5e-3" in PAGE and table["A ResNet", "KFACAdamW"][0] == 2.5e-3


def test_our_own_settings_are_near_a_recipe():
    """configs/, and what the frameworks' examples have."""
    for path in (ROOT / "configs").glob("*.json"):
        optimizer, lr, decay, beta2 = settings(json.loads(path.read_text()))
        for kind in (WORDS, EXPERTS) if path.name.startswith("gpt") else (IMAGES,):
            assert not recipe_warnings(kind, optimizer, lr, decay, beta2), path.name
    examples = "\n".join(path.read_text() for path in (ROOT / "examples/integrations").glob("*.py"))
    rates = re.findall(r"(?:learning_rate=|lr=|KFACADAMW = .*?\"lr\": )([\d.e-]+)", examples)
    assert len(set(rates)) >= 3, rates
    for rate in rates:
        assert not recipe_warnings(WORDS, "KFACAdamW", float(rate), 0.01, 0.999), rate
    assert not recipe_warnings(ADAPTERS, "KFACAdamW", 1e-3, 0.0, 0.999)


@pytest.mark.parametrize(
    ("kind", "given", "title", "values"),
    [
        (WORDS, ("KFACAdamW", 2e-2, 0.1, 0.95), "Pretraining a decoder", ["lr 0.02 (0.002 there)"]),
        (WORDS, ("KFACAdamW", 2e-5, 1.0, 0.95), "Supervised fine-tuning", ["weight_decay 1 (0.01"]),
        (WORDS, ("KFACAdamW", 2e-3, 1.0, 0.9999), "Pretraining a decoder", ["betas[1] 0.9999 (0."]),
        (ADAPTERS, ("KFACAdamW", 5e-3, 1.0, 0.95), "GRPO", ["lr 0.005 (0.0002", "weight_decay 1"]),
        (IMAGES, ("SGD", 1e-3, 5e-4, None), "A ResNet", ["lr 0.001 (0.3 there)"]),
    ],
)
def test_what_is_far_from_every_recipe_is_said(kind, given, title, values):
    (text,) = recipe_warnings(kind, *given)
    assert repr(title) in text and f" a {kind}." in text, text
    assert all(value in text for value in values), text
    assert recipe_warnings(WORDS, "AdamW", 10.0, 0.0) == [], "there is no recipe"
    assert recipe_warnings(None, "KFACAdamW", 10.0, 0.0) == [], "nor of what"
    assert recipe_warnings(WORDS, "KFACAdamW", 0.0, 0.0) == [], "nor a rate"
