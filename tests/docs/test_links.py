"""Every link of the README and the docs leads to a file that is there, and to a heading of it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [target for target in links(page.read_text()) if not leads_somewhere(page, target)]
    assert broken == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    page.write_text("# `A` page, and more\n\n[a](other.md#it) [b](#a-page-and-more) [c](other.md)")
    other.write_text("# It\n\n```\n# no heading\n```\n\n## It\n")
    assert all(leads_somewhere(page, target) for target in links(page.read_text()))
    assert leads_somewhere(page, "other.md#it-1")
    for broken in ("missing.md", "#other", "other.md#no-heading", "other.md#it-2"):
        assert not leads_somewhere(page, broken)


def links(text: str) -> list[str]:
    """Targets within the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def leads_somewhere(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    file = page.parent / name if name else page
    return file.exists() and (not anchor or anchor in anchors(file.read_text()))


def anchors(text: str) -> set[str]:
    """Those that GitHub gives to the headings: a second one of the same text ends in ``-1``."""
    found: set[str] = set()
    times: Counter[str] = Counter()
    in_code = False
    for line in text.splitlines():
        in_code ^= line.lstrip().startswith("```")
        heading = None if in_code else re.match(r"#+ +(.*)", line)
        if heading is None:
            continue
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(f"{anchor}-{times[anchor]}" if times[anchor] else anchor)
        times[anchor] += 1
    return found
