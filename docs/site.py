"""A hook of mkdocs: README.md is the index, and files of the repository that pages link to are in
the site, too.

A page of the site is below docs/, or README.md, or a file elsewhere that one of them links to,
directly or through others: that one is at files/PATH, as a page if it is Markdown. Links are
rewritten to where their target is; one that leads nowhere is left as it is, and ``mkdocs build
--strict`` fails.

Blocks of ```math and $`inline`$ ones, which GitHub typesets, become MathML, which browsers typeset
by themselves: no script, and nothing is fetched. A picture leads to its file, in a box that
scrolls. Docstrings are written for Sphinx: their roles go.
"""

import os
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\()(?!https?:|#)([^)\s#]+)")
OUTSIDE = "files/"
FIRST = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "examples/README.md",
    "benchmarks/README.md",
)
"""Pages outside docs/ that are in the navigation, whoever links to them."""
MATH = re.compile(r"^```math\n(.*?)^```$", re.M | re.S)
INLINE = re.compile(r"\$`(.+?)`\$")
PICTURE = re.compile(r"<p>(<img [^>]*?src=\"([^\"]+)\"[^>]*>)</p>")
ROLE = re.compile(r":(?:py:)?(?:func|class|meth|mod|attr|data|obj|exc):(?=<code>)")


def on_config(config: Any) -> Any:
    """Of mkdocs: with the version, and the repository's address where pyproject.toml has one."""
    version = re.search(r'^__version__ = "(.*)"', (ROOT / "ds_kfac/__init__.py").read_text(), re.M)
    assert version is not None
    config.site_name += " " + version[1]
    if address := re.search(
        r'^(?:Repository|Source) = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M
    ):
        config.repo_url = address[1]
    return config


def place(path: Path) -> str:
    """Of a file of the repository in the site."""
    if path == ROOT / "README.md":
        return "index.md"
    page = path.is_relative_to(DOCS) and path.suffix in (".md", ".png", ".css")
    return (
        path.relative_to(DOCS).as_posix() if page else OUTSIDE + path.relative_to(ROOT).as_posix()
    )


def target(source: Path, link: str) -> Path | None:
    """The file that a page's link leads to, of a folder the first page; None if there is none."""
    path = (source.parent / link).resolve()
    path = min(path.glob("*.md"), default=path) if path.is_dir() else path
    return path if path.is_file() and path.is_relative_to(ROOT) else None


def linked(source: Path) -> set[Path]:
    """Files of the repository that a page links to."""
    return {
        path
        for found in LINK.finditer(source.read_text())
        if (path := target(source, found[2])) is not None
    }


def on_files(files: Any, config: Any) -> Any:
    """Of mkdocs: with README.md, and what is linked to."""
    waiting, seen = [*(ROOT / name for name in FIRST), *DOCS.rglob("*.md")], set[Path]()
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += linked(path) if path.suffix == ".md" else ()
    for path in sorted(seen):
        if files.get_file_from_path(place(path)) is None:
            files.append(File.generated(config, place(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Of mkdocs: with links to where their targets are in the site."""
    source, here = Path(page.file.abs_src_path).resolve(), Path(page.file.src_uri).parent

    def moved(found: re.Match) -> str:
        path = target(source, found[2])
        return (
            found[0]
            if path is None
            else found[1] + Path(os.path.relpath(place(path), here)).as_posix()
        )

    markdown = MATH.sub(lambda found: formula(found[1]), LINK.sub(moved, markdown))
    return INLINE.sub(lambda found: convert(found[1]), markdown)


def formula(latex: str) -> str:
    """In a box that scrolls."""
    return f'<div class="formula">{convert(latex.strip(), display="block")}</div>'


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Of mkdocs: pictures that lead to their files, and docstrings without roles."""
    return ROLE.sub("", PICTURE.sub(r'<a class="picture" href="\2">\1</a>', html))
