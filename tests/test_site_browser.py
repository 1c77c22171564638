"""The site in Chromium: nothing is cut at the width of a phone, search finds, navigation leads,
dark mode is dark.

`make test-site` installs what this needs beside a Chromium of the machine; elsewhere it says what
is missing.
"""

import functools
import http.server
import importlib.util
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_site import NEEDS, built

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
MISSING = [name for name in (*NEEDS, "playwright") if not importlib.util.find_spec(name)]
pytestmark = [
    pytest.mark.skipif(
        bool(MISSING), reason=f"needs {', '.join(MISSING)}, as `make test-site` installs them"
    ),
    pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: one of {', '.join(BROWSERS)}"),
]
PHONE, NARROW, DESK = 390, 690, 1280


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def address(folder) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_) -> None:
            pass

    with http.server.ThreadingHTTPServer(
        ("localhost", 0), functools.partial(Quiet, directory=folder)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, address):
    """At the width of a desk."""
    made = browser.new_page(viewport={"width": DESK, "height": 900})
    made.goto(address)
    yield made
    made.close()


CUT = """() => {
    const root = document.documentElement, cut = root.scrollWidth > root.clientWidth ? ['the page'] : [];
    const alone = (e) => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX);
    const scrolls = (e) => e && (alone(e) || scrolls(e.parentElement));
    for (const e of document.querySelectorAll('article *')) {
        const box = e.getBoundingClientRect();
        const over = box.width && box.right > innerWidth + 1;
        if (over && !scrolls(e)) cut.push(e.tagName + ' ' + e.textContent.slice(0, 40));
    }
    return cut;
}"""  # noqa: E501
"""What is wider than the window, and in no box that scrolls."""


@pytest.mark.parametrize("width", [PHONE, NARROW, DESK])
def test_nothing_is_cut(browser, folder, address, width):
    pages = [path.parent.relative_to(folder).as_posix() for path in folder.rglob("index.html")]
    assert len(pages) > 35
    page, cut = browser.new_page(viewport={"width": width, "height": 800}), {}
    for name in pages:
        page.goto(f"{address}{name}/")
        if found := page.evaluate(CUT):
            cut[name] = found
    page.close()
    assert not cut


def test_pictures_can_be_read_on_a_phone(browser, address):
    page = browser.new_page(viewport={"width": PHONE, "height": 800})
    page.goto(address)
    picture = page.locator("a.picture img").first
    assert picture.bounding_box()["width"] >= 600, "it scrolls in its box"
    page.locator("a.picture").first.click(position={"x": 50, "y": 50})
    page.wait_for_url("**/*.png")
    page.close()


def test_search_finds(page):
    page.locator("input.md-search__input").click()
    page.keyboard.type("adam_lr", delay=20)
    page.locator(".md-search-result__link").first.wait_for()
    titles = " ".join(
        page.locator(".md-search-result__link h1, .md-search-result__link h2").all_inner_texts()
    )
    assert "adam_lr" in titles and "Tune" in titles


def test_navigation_leads_everywhere(page):
    sidebar = page.locator("nav.md-nav--primary")
    for name in (
        "First run",
        "Recipes",
        "Config",
        "How it works",
        "Results",
        "Contributing",
        "Changelog",
    ):
        link = sidebar.get_by_role("link", name=name, exact=True)
        assert link.is_visible(), name
    sidebar.get_by_role("link", name="Recipes", exact=True).click()
    page.wait_for_url("**/howto/recipes/")
    assert page.locator("article h1").is_visible()


def test_the_menu_of_a_phone(browser, address):
    page = browser.new_page(viewport={"width": PHONE, "height": 800})
    page.goto(address)
    page.locator("label.md-header__button[for='__drawer']").click()
    page.locator("nav.md-nav--primary label", has_text="Tutorials").first.click()
    page.get_by_role("link", name="First run").first.click()
    page.wait_for_url("**/tutorial/first_run/")
    page.close()


def test_dark_mode(browser, address):
    def brightness(scheme: str) -> int:
        page = browser.new_page(color_scheme=scheme)
        page.goto(address)
        page.wait_for_timeout(300)
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.close()
        return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))

    assert brightness("dark") < 200 < 600 < brightness("light")


def test_mathematics_is_typeset(page, address):
    page.goto(f"{address}math/")
    formulas = page.locator(".formula mfrac")
    assert formulas.count() >= 3 and formulas.first.bounding_box()["height"] > 20
    assert "\\begin" not in page.locator("article").inner_text()


def test_the_interface_has_no_raw_roles_and_its_parameters(page, address):
    page.goto(f"{address}api/")
    text = page.locator("article").inner_text()
    assert ":func:" not in text and ":class:" not in text and ":meth:" not in text
    assert all(
        name in text
        for name in ("KFACConfig", "weight_decay", "adam_lr", "torch_adam", "FactorConfig")
    )
