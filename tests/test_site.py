"""The site that `make docs` builds: every link and picture leads to a file of the site, and
README.md is its index."""

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.ranks import ROOT

NEEDS = ("mkdocs", "material", "mkdocstrings", "latex2mathml")
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NEEDS)),
    reason="needs ds_kfac[docs], as `make docs` installs it",
)


class Links(HTMLParser):
    """What a page points at, and the places in it that can be pointed at."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("href", "src") and value:
                self.found.append(value)
            elif key in ("id", "name") and value:
                self.ids.add(value)


def built(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("site"))


def test_every_link_leads_somewhere(site):
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    dead = []
    for page, links in pages.items():
        for link in links.found:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            path = path / "index.html" if path.is_dir() else path
            known = pages[path].ids if path in pages else {parts.fragment}
            if not path.exists() or (parts.fragment and parts.fragment not in known):
                dead.append(f"{page.relative_to(site)}: {link}")
    assert not dead, "\n".join(dead)
    assert len(pages) > 30


def test_the_index_is_the_readme(site):
    page = (site / "index.html").read_text()
    text = re.sub("<[^>]*>", "", page)  # code is coloured word by word
    assert "pip install" in text and "ds_kfac.initialize" in text and "front.png" in page
