"""Job pages that a played node fills: of a size that takes days to train, soon there, and never in
their user's way; and with FP8 health that is known number by number.

The bounds are of liveness, for machines that do much else meanwhile; what an idle one takes is in
docs/dashboard.md, by ``python -m tests.dashboard.measure``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from playwright.sync_api import expect

from tests.dashboard.browser import PATIENCE, sign_in
from tests.dashboard.long_jobs import SERIES, STEPS, alarm, long_job, recorded_job
from tests.dashboard.page_speed import open_job, replay, watch
from tests.dashboard.played_node import PlayedNode
from tests.running_service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Milliseconds of processor time of one task: what else the machine does is not counted.
BUSIEST = 50


@pytest.fixture(scope="module")
def service(played_service: Service) -> Service:
    return played_service


@pytest.fixture(scope="module")
def node(service: Service) -> Iterator[PlayedNode]:
    with PlayedNode(service, "played-long") as node:
        yield node


@pytest.fixture
def watched(browser: Any) -> Iterator[Any]:
    """A page whose tasks are measured."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(PATIENCE)
    watch(context)
    yield context.new_page()
    context.close()


def test_fifty_series_of_a_hundred_thousand_steps(
    service: Service, node: PlayedNode, watched: Any
) -> None:
    job = long_job(node)
    sign_in(watched, service.stack.url, service.stack.api_key)
    address = f"{service.stack.url}/dashboard/jobs/{job.id}?charts=all"
    opening = open_job(watched, address, PATIENCE)
    # Training and evaluation share a chart. All were read in one request.
    assert opening.charts == SERIES - 1
    assert opening.curve_requests == 1
    assert opening.answered < 30_000
    assert opening.busiest < BUSIEST, opening

    # What is zoomed to by dragging is read anew in finer buckets, for all charts.
    loss = watched.locator(".chart").first
    over = loss.locator(".u-over").bounding_box()
    height = over["y"] + over["height"] / 2
    with watched.expect_response(lambda answer: "from_step=" in answer.url) as finer:
        watched.mouse.move(over["x"] + 0.4 * over["width"], height)
        watched.mouse.down()
        watched.mouse.move(over["x"] + 0.5 * over["width"], height, steps=5)
        watched.mouse.up()
    series = finer.value.json()["series"]
    assert len(series) == SERIES
    assert max(each["width"] for each in series) <= STEPS // 1000, "a tenth, in hundreds of points"
    shown = re.search(r"Steps ([\d,]+) to ([\d,]+)", watched.locator(".controls").inner_text())
    assert shown is not None
    first, last = (int(step.replace(",", "")) for step in shown.groups())
    assert (first, last) == pytest.approx((0.4 * STEPS, 0.5 * STEPS), abs=0.02 * STEPS)
    watched.get_by_role("button", name="Show all steps").click()

    # Those below the window are drawn when they are scrolled to, and of all steps.
    last = watched.locator(".chart").last
    assert last.locator("canvas").count() == 0
    last.scroll_into_view_if_needed()
    last.locator("canvas").wait_for()
    label = last.locator(".plot").get_attribute("aria-label")
    assert label.startswith("probe/layers.9/norm by step."), label


def test_a_replayed_stream_leaves_the_page_free(
    service: Service, node: PlayedNode, watched: Any
) -> None:
    """Thousands of messages, of a job with 504 series of FP8 health, on each page that follows."""
    job, messages = recorded_job(service, node, 120)
    assert len(messages) > 2000
    for tab in ("", "?tab=fp8", "?tab=timeline"):
        replayed = replay(watched, node, job, messages, tab, rate=400)
        assert 0 < replayed.busiest < BUSIEST, (tab, replayed)
        assert tab == "?tab=timeline" or replayed.readings > 0, (tab, replayed)
        watched.context.clear_cookies()


def test_the_heatmap_is_read_by_pointer_and_by_keyboard(
    service: Service, node: PlayedNode, page: Any
) -> None:
    """Each cell tells its layer, step and value; an alarm is marked where it happened."""
    layers, steps = [f"layers.{number}" for number in range(6)], range(1, 41)

    def share(layer: int, step: int) -> float:
        return (10 * step + layer) / 1000

    def told(layer: int, step: int) -> str:
        return f"{layers[layer]}, step {step}: {share(layer, step) * 100:.1f}".removesuffix(".0")

    job = node.take("hot", training={"steps": 40})
    for step in steps:
        names = {f"fp8/{layer}/grad_output/saturated": n for n, layer in enumerate(layers)}
        values = {name: share(number, step) for name, number in names.items()}
        node.send(job, [{"type": "metrics", "step": step, "tokens": step, "values": values}])
    node.send(job, [alarm(13, layers[3])])
    node.beat()
    sign_in(page, service.stack.url, service.stack.api_key, f"/jobs/{job.id}?tab=fp8")
    cells, reading = page.locator(".heat-cells"), page.locator(".readout[role=status]")
    cells.focus()
    expect(reading).to_contain_text("Each column is one step")

    # By keyboard: from the newest step to the first, down and across; and no further than there is.
    for key, layer, step in (
        ("ArrowUp", 0, 40),
        ("ArrowRight", 0, 40),
        ("Home", 0, 1),
        ("ArrowDown", 1, 1),
        ("ArrowRight", 1, 2),
    ):
        page.keyboard.press(key)
        expect(reading).to_have_text(f"{told(layer, step)} %")
    # The pointer finds the same cells: where the cursor is, and so many beside it.
    box = page.locator(".heat-cursor").bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.keyboard.press("Escape")
    expect(page.locator(".heat-cursor")).to_have_count(0)
    page.mouse.move(middle[0] + 7 * box["width"], middle[1] + 3 * box["height"])
    expect(reading).to_have_text(f"{told(4, 9)} %")
    page.mouse.move(*middle)
    expect(reading).to_have_text(f"{told(1, 2)} %")
    # A click picks it, and it stays told when the pointer is elsewhere.
    page.mouse.down()
    page.mouse.up()
    page.mouse.move(0, 0)
    expect(page.locator(".heat-cursor")).to_have_count(0)
    expect(reading).to_have_text(f"{told(1, 2)} %")
    assert _middle(page.locator(".heat-mark")) == pytest.approx(middle, abs=1)

    # The alarm leads to its figure and tensor, and to the mark at its layer and step.
    page.get_by_role("button", name="Weights").click()
    page.get_by_text("Nothing recorded of this tensor").wait_for()
    page.get_by_role("button", name="step 13", exact=True).click()
    expect(reading).to_have_text(f"{told(3, 13)} %")
    expect(page.get_by_role("button", name="Gradients")).to_have_attribute("aria-pressed", "true")
    mark = page.locator(".heat-mark")
    expect(mark).to_be_in_viewport()
    # Enter picks by keyboard: from the alarm on, one step on and one layer down.
    cells.focus()
    at = _middle(mark)
    for key in ("ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    expect(reading).to_have_text(f"{told(4, 14)} %")
    box = page.locator(".heat-cursor").bounding_box()
    beside = (at[0] + box["width"], at[1] + box["height"])
    assert _middle(mark) == pytest.approx(beside, abs=1)
    node.finish(job)


def listed(service: Service, label: str, number: int) -> None:
    """So many jobs with a label of theirs: one a minute, the newest a minute ago."""
    with psycopg.connect(service.stack.database_url) as connection:
        connection.execute(
            "INSERT INTO jobs (id, owner, name, labels, notes, priority, spec, status, need,"
            " created_at, ended_at) SELECT 'job_' || %(label)s || '_' || n, 'local',"
            " %(label)s || '-' || n, jsonb_build_object('of', %(label)s::text), '', 0, '{}',"
            " 'cancelled', 'cpu:1:amp', now() - n * interval '1 minute', now()"
            " FROM generate_series(1, %(number)s) AS n",
            {"label": label, "number": number},
        )


def test_a_job_that_ends_in_a_long_list_is_told_whole(
    service: Service, node: PlayedNode, page: Any
) -> None:
    """Its row, when more than one page of the list was read: it is not read anew for each news."""
    listed(service, "more", 300)
    job = node.take("ending", training={"steps": 40}, labels={"of": "more"})
    sign_in(page, service.stack.url, service.stack.api_key, "/jobs?label.of=more")
    grid = page.get_by_role("table", name="Jobs")
    row = grid.get_by_role("row").filter(has_text="ending")
    expect(row).to_contain_text("running")
    row.get_by_role("checkbox").check()
    unfinished = page.get_by_role("button", name=re.compile("^Cancel . unfinished"))
    expect(unfinished).to_have_text("Cancel 1 unfinished")
    grid.evaluate("(element) => element.scrollTo(0, element.scrollHeight)")
    page.get_by_text("301 jobs · live").wait_for()
    grid.evaluate("(element) => element.scrollTo(0, 0)")
    node.send(job, [{"type": "progress", "step": 40, "total_steps": 40, "tokens": 4000}])
    node.finish(job)
    expect(row).to_contain_text("succeeded")
    expect(row).to_contain_text("40 / 40")
    expect(unfinished).to_have_text("Cancel 0 unfinished")


def test_a_job_that_is_deleted_leaves_a_long_list(service: Service, page: Any) -> None:
    """Which is not read anew while it is long, so that its reader stays where they are."""
    listed(service, "fewer", 300)
    sign_in(page, service.stack.url, service.stack.api_key, "/jobs?label.of=fewer")
    grid = page.get_by_role("table", name="Jobs")
    first = grid.get_by_role("rowgroup").get_by_role("row").first
    expect(first).to_contain_text("fewer-1")
    grid.evaluate("(element) => element.scrollTo(0, element.scrollHeight)")
    page.get_by_text("300 jobs · live").wait_for()
    # The end is further down now.
    grid.evaluate("(element) => element.scrollTo(0, element.scrollHeight)")
    last = grid.get_by_role("link", name="fewer-300", exact=True)
    expect(last).to_be_visible()
    readings: list[str] = []
    page.on("request", lambda request: readings.append(request.url))
    for gone in ("job_fewer_300", "job_fewer_1"):
        assert service.http.delete(f"/v1/jobs/{gone}").status_code == 204
    page.get_by_text("298 jobs · live").wait_for()
    expect(last).to_have_count(0)
    expect(grid.get_by_role("link", name="fewer-299", exact=True)).to_be_visible()
    grid.evaluate("(element) => element.scrollTo(0, 0)")
    expect(first).to_contain_text("fewer-2")
    assert grid.get_attribute("aria-rowcount") == "299"
    assert not [url for url in readings if "/v1/jobs?" in url]


def test_ten_thousand_jobs_are_a_few_rows(service: Service, page: Any) -> None:
    listed(service, "many", 10_000)
    sign_in(page, service.stack.url, service.stack.api_key, "/jobs?label.of=many")
    grid = page.get_by_role("table", name="Jobs")
    rows = grid.get_by_role("rowgroup").get_by_role("row")
    expect(rows.first).to_contain_text("many-1")
    most = 0

    last = grid.get_by_role("link", name="many-10000")

    def all_read() -> bool:
        nonlocal most
        # Again when the last page has come, which lies below what was the end.
        grid.evaluate("(element) => element.scrollTo(0, element.scrollHeight)")
        most = max(most, rows.count())
        told = page.locator(".page-actions [role=status]").inner_text()
        return "10,000 jobs" in told and last.is_visible()

    service.until(all_read, "the list has been read to its end")
    assert grid.get_attribute("aria-rowcount") == "10001"
    # As many as the window has room for, and some beyond.
    assert 10 < most < 60


def _middle(part: Any) -> tuple[float, float]:
    box = part.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
