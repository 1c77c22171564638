"""The pages a reader opens first: the README's length, and links that lead somewhere."""

import re
from pathlib import Path

import pytest

from tests.test_architecture import FLOORS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page):
    """In backticks, from the root or from ds_kfac/: `ds_kfac/step/factors.py`,
    `step/factors.py`."""
    for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|cu|h|json))`", page.read_text()):
        assert (ROOT / name).exists() or (ROOT / "ds_kfac" / name).exists(), f"{page.name}: {name}"


def test_how_it_works_is_one_page():
    assert len((ROOT / "docs/how_it_works.md").read_text().splitlines()) <= 90


def test_the_glossary_has_at_most_25_words_of_our_own():
    _, own = (ROOT / "docs/math.md").read_text().split("Words of this code:")
    assert len(re.findall(r"^\| ", own.split("## Sources")[0], re.MULTILINE)) - 1 <= 25


def test_the_picture_of_the_folders_is_complete_and_in_order():
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    assert tuple(rows[: len(FLOORS)]) == FLOORS
