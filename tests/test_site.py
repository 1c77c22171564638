"""The site that `make docs` builds: mkdocs finds no dead link, pages have what they are made of,
and in a Chromium nothing is cut at the width of a phone.

`make test-site` installs what the browser needs beside a Chromium of the machine; elsewhere its
test says what is missing.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
PHONE, DESK = 390, 1280


def missing(*names: str) -> list[str]:
    return [name for name in names if not importlib.util.find_spec(name)]


pytestmark = pytest.mark.skipif(
    bool(missing("mkdocs", "material", "mkdocstrings", "latex2mathml")),
    reason="needs docs/requirements.txt, which `make test-site` installs",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # --quiet would keep --strict from seeing its warnings
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


PARAMETERS = ("KFACConfig", "weight_decay", "adam_lr", "torch_adam", "FactorConfig")
TEXTS = {
    # page -> (what it has, what it has not)
    "index.html": (("pip install", "ds_kfac.initialize", "front.png"), ()),
    "explanation/formulas/index.html": (("<mfrac>",), ("\\begin",)),
    "reference/api/index.html": (PARAMETERS, (":func:", ":class:", ":meth:")),
}


@pytest.mark.parametrize("page", TEXTS)
def test_pages_have_what_they_are_made_of(site, page):
    """README.md, formulas that are typeset, and parameters without raw roles."""
    html = (site / page).read_text()
    text = html + re.sub("<[^>]*>", "", html)  # code is coloured word by word
    wanted, unwanted = TEXTS[page]
    assert [word for word in wanted if word not in text] == []
    assert [word for word in unwanted if word in text] == []


CUT = """() => {
    const root = document.documentElement, cut = [];
    if (root.scrollWidth > root.clientWidth) cut.push('the page');
    const alone = (e) => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX);
    const scrolls = (e) => e && (alone(e) || scrolls(e.parentElement));
    for (const e of document.querySelectorAll('article *')) {
        const box = e.getBoundingClientRect();
        const over = box.width && box.right > innerWidth + 1;
        if (over && !scrolls(e)) cut.push(e.tagName + ' ' + e.textContent.slice(0, 40));
    }
    return cut;
}"""
"""What is wider than the window, and in no box that scrolls."""


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_nothing_is_cut(site, width):
    if missing("playwright") or BROWSER is None:
        pytest.skip(f"needs playwright, as `make test-site` installs it, and one of {BROWSERS}")
    from playwright.sync_api import sync_playwright

    pages = sorted(site.rglob("index.html"))
    assert len(pages) > 35
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        window, cut = chromium.new_page(viewport={"width": width, "height": 900}), {}
        for page in pages:
            window.goto(page.as_uri())
            cut[page] = window.evaluate(CUT)
        chromium.close()
    assert not any(cut.values()), cut
