"""The pages that people read: links lead somewhere, named files exist, and code that is shown is
code that runs."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from ds_kfac.model import registry
from ds_kfac.model.scan import LayerChoice, scan
from tests.model.recorder import proven
from tests.test_architecture import FLOORS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DEVELOPMENT = ROOT / "docs/development"


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere_and_named_files_exist(page):
    """Files in backticks are named from the root or from ds_kfac/: `step/factors.py`."""
    text = page.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link} has no such heading"
    for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|cu|h|json))`", text):
        assert (ROOT / name).exists() or (ROOT / "ds_kfac" / name).exists(), f"{page.name}: {name}"


def test_the_table_of_the_folders_is_complete_and_in_order():
    rows = re.findall(
        r"^\| `(\w+)` \|", (DEVELOPMENT / "first_change.md").read_text(), re.MULTILINE
    )
    assert tuple(rows[: len(FLOORS)]) == FLOORS


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_update_rule_that_is_shown_is_the_one_that_is_tested():
    tested = (ROOT / "tests/deepspeed/toys.py").read_text()
    *classes, methods = python_blocks(DEVELOPMENT / "update_rule.md")
    assert len(classes) == 4 and all(
        block in tested for block in [*classes, methods.partition("\n\n")[2]]
    )


def test_the_layer_type_that_is_shown_proves_its_rows():
    (block,) = python_blocks(DEVELOPMENT / "layer_type.md")
    names: dict[str, Any] = dict(vars(registry))
    exec(block, names)
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.Conv2d(8, 8, 3), nn.PReLU()]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(128, 10))
    choice, x = LayerChoice(types=("Conv2d", "Linear", "PReLU")), torch.randn(5, 3, 8, 8)
    with patch.dict(registry.LAYERS, PReLU=names["PReLU"]()):
        found = scan(model, choice)
        seen = proven(model, found.layers, [x], loss=lambda model, x: model(x).square().mean())
    reasons = {left.name: left.reason for left in found.skipped}
    assert reasons == {"3": "all channels have one slope"}
    assert list(seen) == ["0", "1", "2", "5"] and all(one.fits for one in seen.values())
