"""Curves and logs of a job, as their reader turns them: axes and smoothing, words and levels."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.dashboard.browser import SIZES, settled, sign_in
from tests.dashboard.drawn import drawn
from tests.dashboard.played_node import PlayedNode
from tests.running_service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Its loss goes up in three stairs of thirty steps each. Most of its time it is on the first of
# them, and most of its tokens are of the last. None lies on a line of the grid.
STAIRS = (1.37, 13.7, 137.0)


@pytest.fixture(scope="module")
def service(played_service: Service) -> Service:
    return played_service


@pytest.fixture(scope="module")
def node(service: Service) -> Iterator[PlayedNode]:
    with PlayedNode(service, "played-curves") as node:
        yield node


def stairs() -> list[dict[str, Any]]:
    """Records of the job whose curve has three stairs."""
    now = time.time()
    return [
        {
            "type": "metrics",
            "time": now - 3600 + (100 * step if step <= 30 else 3000 + 10 * (step - 30)),
            "step": step,
            "tokens": 1000 * step if step <= 60 else 60_000 + 10_000 * (step - 60),
            "values": {"train/loss": STAIRS[(step - 1) // 30]},
        }
        for step in range(1, 91)
    ]


def smoothed(values: list[float], weight: float) -> float:
    """The last value of the exponential moving average without the bias of its beginning."""
    shares = [math.pow(weight, age) for age in range(len(values))]
    total = sum(value * share for value, share in zip(reversed(values), shares, strict=True))
    return total / sum(shares)


def test_a_curve_on_each_axis_and_smoothed(service: Service, node: PlayedNode, page: Any) -> None:
    """What is drawn is read from the canvas: by step, time and tokens, on a log axis, smoothed."""
    job = node.take("stairs", training={"steps": 90})
    node.send(job, stairs())
    node.beat()
    sign_in(page, service.stack.url, service.stack.api_key, f"/jobs/{job.id}")
    chart = page.locator(".chart").filter(has=page.get_by_role("heading", name="Loss", exact=True))
    chart.locator("canvas").wait_for()
    plot, readout = chart.locator(".plot"), chart.locator(".readout")

    def is_drawn(where: tuple[float, float], opaque: float, faint: float | None = None) -> None:
        """Waits until the line is so high, and what shines through below it."""

        def fits() -> bool:
            found = drawn(chart, *where)
            return found.opaque == pytest.approx(opaque, abs=0.04) and (
                faint is None or found.faint == pytest.approx(faint, abs=0.04)
            )

        service.until(fits, f"a line of the height {opaque:.3f}, {faint} faint, at {where}")

    # From zero to a little more than the greatest value; on a log axis from 1 to 200.
    top = STAIRS[2] + 0.06 * (STAIRS[2] - STAIRS[0])
    by_log = [math.log(stair, 200) for stair in STAIRS]
    middle, end = (0.42, 0.58), (0.8, 0.95)
    expect(readout).to_have_text(re.compile(r"^step 90 · training 137"))
    is_drawn(middle, STAIRS[1] / top)
    is_drawn(end, STAIRS[2] / top)
    page.get_by_label("Log axis of loss and norm").check()
    is_drawn(middle, by_log[1])

    # In the middle of the steps is the second stair, of the hour the first, of the tokens the last.
    for name, told, stair in (
        ("Time", r"^\d+ \w+ \d{4}, [\d:]+ · training 137", 0),
        ("Tokens", "^tokens 360,000 · training 137", 2),
        ("Step", "^step 90 · training 137", 1),
    ):
        button = page.get_by_role("button", name=name, exact=True)
        button.click()
        expect(button).to_have_attribute("aria-pressed", "true")
        expect(plot).to_have_attribute("aria-label", re.compile(f"^Loss by {name.lower()}"))
        expect(readout).to_have_text(re.compile(told))
        is_drawn(middle, by_log[stair])
    page.get_by_label("Log axis of loss and norm").uncheck()
    is_drawn(middle, STAIRS[1] / top)

    # The smoothed line lags behind; the raw one stays where it was, faint.
    node.beat()
    losses = [record["values"]["train/loss"] for record in stairs()]
    seen = round(1 + end[1] * 89)
    for weight in (0.98, 0.9):
        page.get_by_label("Smoothing").select_option(str(weight))
        is_drawn(end, smoothed(losses[:seen], weight) / top, faint=STAIRS[2] / top)
    page.get_by_label("Smoothing").select_option("none")
    is_drawn(end, STAIRS[2] / top)
    node.finish(job)


def test_metrics_that_come_while_one_watches_can_be_chosen(
    service: Service, node: PlayedNode, page: Any
) -> None:
    """Names that a running job reports for the first time; each gets its chart."""
    job = node.take("reports-more", training={"steps": 40})

    def told(steps: range, **values: float) -> None:
        node.send(
            job,
            [{"type": "metrics", "step": step, "tokens": step, "values": values} for step in steps],
        )
        node.beat()

    def a_while_later() -> None:
        # Names are read every 15 seconds: the page's clock alone goes on so far.
        page.clock.fast_forward(16_000)

    told(range(1, 11), **{"train/loss": 2.0, "probe/known": 1.0})
    page.clock.install()
    sign_in(page, service.stack.url, service.stack.api_key, f"/jobs/{job.id}")
    chooser = page.get_by_label("Add a chart")
    names = chooser.locator("option[value*='/']")
    expect(names).to_have_text(["probe/known"])
    page.evaluate("() => { window.isTheSamePage = true; }")
    told(range(11, 21), **{"train/loss": 1.5, "probe/known": 1.0, "probe/new,too": 7.0})
    a_while_later()
    expect(names).to_have_text(["probe/known", "probe/new,too"])
    chooser.select_option("probe/new,too")
    chart = page.locator(".chart").filter(has=page.get_by_role("heading", name="probe/new,too"))
    expect(chart.locator(".readout")).to_contain_text("7")
    expect(names).to_have_text(["probe/known"])
    # With all of them on the page, the next one comes to them unasked.
    chooser.select_option(label="all 1 others")
    expect(chooser).to_have_count(0)
    told(range(21, 31), **{"train/loss": 1.2, "probe/last": 3.0})
    a_while_later()
    expect(page.get_by_role("heading", name="probe/last")).to_be_visible()
    expect(chooser).to_have_count(0)
    assert page.evaluate("window.isTheSamePage") is True
    node.finish(job)


def log_line(text: str, level: str | None = None) -> dict[str, Any]:
    """A record of a printed line."""
    return {"type": "log", "time": time.time(), "text": text, "level": level}


def test_the_log_is_searched_followed_and_downloaded(
    service: Service, node: PlayedNode, page: Any
) -> None:
    job = node.take("talks", training={"steps": 90})
    node.send(job, [log_line(f"line {number} of 200", "info") for number in range(1, 201)])
    full, worse = "the GPU is nearly FULL", "the disk is full"
    node.send(job, [log_line(full, "warning"), log_line(worse, "error"), log_line("no level")])
    node.beat()
    sign_in(page, service.stack.url, service.stack.api_key, f"/jobs/{job.id}?tab=logs")
    shown, follow = page.locator(".log-text"), page.get_by_label("Follow the end")
    lines = page.get_by_role("region", name="Lines of the log")
    count = page.get_by_role("region", name="Log", exact=True).get_by_text("lines here")
    expect(count).to_contain_text("203 lines here")
    expect(shown.last).to_have_text("no level")
    expect(shown.last).to_be_in_viewport()
    # What is printed meanwhile is followed, till one looks back; then the place stays.
    node.send(job, [log_line("and on it goes")])
    expect(page.get_by_text("and on it goes", exact=True)).to_be_in_viewport()
    lines.focus()
    page.keyboard.press("Home")
    first = page.get_by_text("line 1 of 200", exact=True)
    expect(first).to_be_in_viewport()
    expect(follow).not_to_be_checked()
    node.send(job, [log_line("and on")])
    expect(count).to_contain_text("205 lines here")
    expect(first).to_be_in_viewport()

    # By words in any case, by level, and both; what is printed meanwhile is told by the same rules.
    search, level = (
        page.get_by_role("searchbox", name="Search in the log"),
        page.get_by_label("Level"),
    )
    search.fill("full")
    expect(shown).to_have_text([full, worse])
    level.select_option("error")
    expect(shown).to_have_text([worse])
    node.beat()
    lost = "the model is lost: the disk was full"
    node.send(
        job,
        [
            log_line("no longer full", "info"),
            log_line("no route", "error"),
            log_line(lost, "critical"),
        ],
    )
    expect(shown).to_have_text([worse, lost])

    # What is downloaded is what is looked for, each line with its time.
    with page.expect_download() as download:
        page.get_by_role("link", name="Download", exact=True).click()
    text = Path(download.value.path()).read_text(encoding="utf-8")
    assert [line.split(" ", 2)[2] for line in text.splitlines()] == [worse, lost]
    assert download.value.suggested_filename == f"{job.id}.log"
    search.fill("nobody said this")
    page.get_by_text("No line fits").wait_for()
    search.fill("")
    level.select_option("")
    expect(count).to_contain_text("208 lines here")
    node.finish(job)

    # In the narrowest window the tab that is shown is one that is seen.
    width, height = SIZES["narrow"]
    page.set_viewport_size({"width": width, "height": height})
    for name in ("Spec", "Logs", "Charts"):
        page.goto(f"{service.stack.url}/dashboard/jobs/{job.id}?tab={name.lower()}")
        settled(page)
        expect(page.get_by_role("tab", name=name)).to_be_in_viewport(ratio=0.9)


def test_a_log_that_grows_too_long_has_no_gap(
    service: Service, node: PlayedNode, page: Any
) -> None:
    """The page holds 20,000 lines; what it let go comes back whole, and nothing is left out."""
    kept, number = 20_000, re.compile(r"^number (\d+)$")
    job = node.take("chatty", training={"steps": 90})
    node.send(job, [log_line("number 1")])
    sign_in(page, service.stack.url, service.stack.api_key, f"/jobs/{job.id}?tab=logs")
    shown, follow = page.locator(".log-text"), page.get_by_label("Follow the end")
    count = page.get_by_role("region", name="Log", exact=True).get_by_text("lines here")
    expect(shown.last).to_have_text("number 1")
    node.send(job, [log_line(f"number {each}") for each in range(2, kept + 3001)])
    expect(shown.last).to_have_text(f"number {kept + 3000}")
    expect(count).to_contain_text("20,000 lines here")

    def numbers() -> list[int]:
        found = [number.match(text) for text in shown.all_inner_texts()]
        assert all(found), found
        return [int(one[1]) for one in found if one]

    page.get_by_role("button", name="Older lines").click()
    expect(count).to_contain_text("21,000 lines here")
    expect(follow).not_to_be_checked()
    # What was the first line is where it was; those before it are the ones that it followed.
    expect(page.get_by_text("number 3001", exact=True)).to_be_in_viewport()
    around = numbers()
    assert around[0] < 3000 < around[-1], around
    assert around == list(range(around[0], around[-1] + 1))
    lines = page.get_by_role("region", name="Lines of the log")
    lines.evaluate("(element) => element.scrollTo(0, 0)")
    expect(page.get_by_text("number 2001", exact=True)).to_be_in_viewport()

    # From one who looks back nothing is taken; at the end again, all of it is there.
    node.send(job, [log_line(f"number {each}") for each in range(kept + 3001, kept + 3011)])
    expect(count).to_contain_text("more have come")
    expect(page.get_by_text("number 2001", exact=True)).to_be_in_viewport()
    follow.check()
    expect(shown.last).to_have_text(f"number {kept + 3010}")
    expect(count).not_to_contain_text("more have come")
    tail = numbers()
    assert tail == list(range(tail[0], kept + 3011))
    node.finish(job)
