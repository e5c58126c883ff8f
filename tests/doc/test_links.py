"""Links of the documentation lead somewhere: to files, and to headings of pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "doc").glob("*.md"))]


def text_of(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links_of(page: Path) -> list[str]:
    """Targets of `[text](target)`, those to other sites left out."""
    return [link for link in re.findall(r"\]\(([^()\s]+)\)", text_of(page)) if "://" not in link]


def anchors_of(page: Path) -> set[str]:
    """Names that a heading can be linked by."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}: there is no {target}"
        assert target.is_relative_to(ROOT), f"{page.name} links out of the repository: {link}"
        if anchor:
            assert anchor in anchors_of(target), f"{page.name} links to {link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_are_closed(page: Path) -> None:
    assert len(re.findall(r"^```", page.read_text(), re.MULTILINE)) % 2 == 0


def test_every_page_can_be_found() -> None:
    """From the README, over links, to every page of the documentation."""
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in seen:
            seen.add(page)
            targets = [(page.parent / link.partition("#")[0]).resolve() for link in links_of(page)]
            todo += [target for target in targets if target.suffix == ".md" and target.is_file()]
    assert set(PAGES) <= seen, f"nothing links to {sorted(p.name for p in set(PAGES) - seen)}"


def test_anchors() -> None:
    """The function above knows how names of headings are made."""
    anchors = anchors_of(ROOT / "doc" / "model.md")
    assert {"residual-streams-mhc", "rows-that-nobody-reads"} <= anchors
