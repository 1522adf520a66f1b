"""The table of a model's layers: of any number a few rows, searched, sorted and walked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.dashboard.browser import PATIENCE, settled, sign_in, violations
from tests.dashboard.long_jobs import deep_job
from tests.dashboard.page_speed import open_layers
from tests.dashboard.played_node import PlayedNode
from tests.running_service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Blocks of nine layers each.
BLOCKS = 112
# Milliseconds of processor time of one task: what else the machine does is not counted.
BUSIEST = 50


@pytest.fixture(scope="module")
def deep(played_service: Service) -> Iterator[tuple[str, list[str]]]:
    """The page of a job of a deep model, and the names of its layers."""
    with PlayedNode(played_service, "played-layers") as node:
        job, names = deep_job(node, BLOCKS, steps=20)
        yield f"/jobs/{job.id}?tab=fp8", names


@pytest.fixture
def layers(played_service: Service, deep: tuple[str, list[str]], page: Any) -> Any:
    """The table on its page, with all its figures."""
    sign_in(page, played_service.stack.url, played_service.stack.api_key, deep[0])
    settled(page)
    layers = page.get_by_role("region", name="Layers", exact=True)
    expect(layers.locator("tbody tr").first).to_contain_text("grad_output")
    return layers


def rows_of(layers: Any) -> Any:
    return layers.locator("tbody tr[aria-rowindex]")


def test_a_thousand_layers_leave_the_page_free(
    played_service: Service, deep: tuple[str, list[str]], page: Any
) -> None:
    address, names = deep
    assert len(names) > 1000
    sign_in(page, played_service.stack.url, played_service.stack.api_key)
    found = open_layers(page, f"{played_service.stack.url}/dashboard{address}", PATIENCE)
    assert max(found.busiest.values()) < BUSIEST, found


def test_a_thousand_layers_are_a_few_rows(
    deep: tuple[str, list[str]], layers: Any, page: Any
) -> None:
    names, rows = deep[1], rows_of(layers)
    table = layers.get_by_role("table")
    assert table.get_attribute("aria-rowcount") == str(len(names) + 1)
    assert 10 < rows.count() < 50
    expect(rows.first).to_have_attribute("aria-rowindex", "2")
    expect(rows.first.get_by_role("button")).to_have_text(names[0])
    assert violations(page) == []

    # Rows that come have no other widths than those that go; the last one is at the end.
    def widths() -> list[float]:
        return [head.bounding_box()["width"] for head in layers.locator("thead th").all()]

    before = widths()
    last = rows.filter(has=page.get_by_role("button", name=names[-1], exact=True))
    layers.evaluate("(part) => part.scrollTo(0, part.scrollHeight)")
    expect(last).to_have_attribute("aria-rowindex", str(len(names) + 1))
    expect(last).to_contain_text("norms are not fused by this recipe")
    bottom = layers.bounding_box()["y"] + layers.bounding_box()["height"]
    box = last.bounding_box()
    assert box["y"] + box["height"] == pytest.approx(bottom, abs=2)
    heights = {row.bounding_box()["height"] for row in rows.all()}
    assert heights == {54}, "places of rows are known without them"
    assert rows.count() < 50
    assert widths() == pytest.approx(before, abs=1)

    # Each is found by a part of its name, though it is no element of the page before.
    search = page.get_by_label("Search by part of a layer's name")
    search.fill("ayers.77.SELF")
    found = [name for name in names if "layers.77.self" in name]
    expect(rows.get_by_role("button")).to_have_text(found)
    expect(page.get_by_text("4 layers", exact=True)).to_be_visible()
    assert table.get_attribute("aria-rowcount") == "5"
    page.get_by_role("button", name="Kept 224").click()
    expect(page.get_by_text("No such layer")).to_be_visible()
    search.fill("")
    expect(rows.first.get_by_role("button")).to_have_text("model.layers.0.input_layernorm")
    layers.scroll_into_view_if_needed()
    layers.evaluate("(part) => part.scrollTo(0, part.scrollHeight)")
    expect(last).to_be_in_viewport()
    page.get_by_role("button", name="All 1008").click()
    head = page.get_by_role("columnheader", name="Layer", exact=True)
    for order in ("ascending", "descending"):
        head.get_by_role("button").click()
        expect(head).to_have_attribute("aria-sort", order)
    expect(rows.first.get_by_role("button")).to_have_text("model.layers.111.self_attn.v_proj")


def test_layers_are_walked_by_keyboard(deep: tuple[str, list[str]], layers: Any, page: Any) -> None:
    """From one to the next, whether it was an element of the page before or not."""
    names = deep[1]
    focused = page.locator("tbody button:focus")
    rows_of(layers).first.get_by_role("button").focus()
    for name in names[:60]:
        expect(focused).to_have_text(name)
        expect(focused).to_be_in_viewport()
        page.keyboard.press("Tab")
    # What has the focus keeps it while others are looked at, and its neighbours stay beside it.
    expect(focused).to_have_text(names[60])
    layers.evaluate("(part) => part.scrollTo(0, part.scrollHeight)")
    expect(layers.get_by_role("button", name=names[-1], exact=True)).to_have_count(1)
    expect(focused).to_have_text(names[60])
    expect(focused).not_to_be_in_viewport()
    page.keyboard.press("Shift+Tab")
    expect(focused).to_have_text(names[59])
    expect(focused).to_be_in_viewport()
    page.keyboard.press("Enter")
    chosen = layers.locator("tr.chosen")
    expect(chosen).to_contain_text(names[59])
    # The table itself is scrolled by keyboard too.
    layers.focus()
    page.keyboard.press("End")
    expect(layers.get_by_role("button", name=names[-1], exact=True)).to_be_in_viewport()
