"""Rows of the list: each cell tells what the service tells of the job, and they are live."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from playwright.sync_api import expect

from tests.dashboard.browser import sign_in
from tests.dashboard.played_node import PlayedNode
from tests.running_service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# The box that a sparkline is drawn in, and what it leaves free on each side.
WIDTH, HEIGHT, FREE = 72, 26, 2


@pytest.fixture(scope="module")
def node(played_service: Service) -> Iterator[PlayedNode]:
    with PlayedNode(played_service, "played-rows") as node:
        yield node


def records(steps: range, speed: float) -> list[dict[str, Any]]:
    """Metrics of these steps, whose loss falls in waves, and how far the job is."""
    values = {"perf/tokens_per_second": speed, "gpu/utilization": 0.87}
    metrics = [
        {
            "type": "metrics",
            "step": step,
            "tokens": 8 * step,
            "values": {"train/loss": 100 / step + step % 7, **values},
        }
        for step in steps
    ]
    progress = {"type": "progress", "step": steps.stop - 1, "total_steps": 1000, "tokens": 99}
    return [*metrics, progress]


def test_each_cell_tells_what_the_service_tells(
    played_service: Service, node: PlayedNode, page: Any
) -> None:
    service, label = played_service, uuid.uuid4().hex[:8]
    job = node.take("has-cells", training={"steps": 1000}, labels={"rows": label})
    node.send(job, records(range(1, 401), speed=12_345.0))
    # Of more than two hours, no test can take long enough to see another age.
    with psycopg.connect(service.stack.database_url) as connection:
        connection.execute(
            "UPDATE jobs SET created_at = now() - interval '2 h 5 min' WHERE id = %s", (job.id,)
        )
    sign_in(page, service.stack.url, service.stack.api_key, f"/jobs?label.rows={label}")
    row = page.get_by_role("table", name="Jobs").get_by_role("row").filter(has_text="has-cells")

    def cell(name: str) -> Any:
        return row.locator(f"[data-cell={name}]")

    told = service.object(job.id)
    latest = told["latest_metrics"]
    expect(cell("status")).to_contain_text(told["status"])
    expect(cell("progress")).to_contain_text("400 / 1,000")
    expect(cell("loss")).to_have_text(f"{latest['train/loss']:.4g}")
    expect(cell("speed")).to_have_text(f"{latest['perf/tokens_per_second'] / 1000:.3g}k")
    expect(cell("device")).to_contain_text(f"GPU {latest['gpu/utilization']:.0%}"[:-1] + " %")
    expect(cell("device")).to_contain_text(told["attempts"][-1]["node"])
    expect(cell("owner")).to_have_text(told["owner"])
    expect(cell("age")).to_have_text("2 h")
    assert cell("age").locator("time").get_attribute("datetime") == told["created_at"]

    # The little curve is that of the buckets that the service has of the loss.
    query = f"job={job.id}&name=train/loss&form=buckets&max_points=80"
    (series,) = service.http.get(f"/v1/metrics/query?{query}").json()["series"]
    means = series["buckets"]["mean"]
    assert len(means) > 40
    low, high = min(means), max(means)
    expected = [
        (
            FREE + index / (len(means) - 1) * (WIDTH - 2 * FREE),
            HEIGHT - FREE - (mean - low) / (high - low) * (HEIGHT - 2 * FREE),
        )
        for index, mean in enumerate(means)
    ]
    line = row.locator(".sparkline path")
    points = re.findall(r"[ML]([\d.]+) ([\d.]+)", line.get_attribute("d"))
    assert [float(x) for x, _ in points] == pytest.approx([x for x, _ in expected], abs=0.06)
    assert [float(y) for _, y in points] == pytest.approx([y for _, y in expected], abs=0.06)
    assert line.bounding_box()["width"] > 50, "it is seen"

    # It goes on, and so does its row.
    node.send(job, records(range(401, 501), speed=6_789.0))
    node.beat()
    expect(cell("speed")).to_have_text("6.79k")
    expect(cell("progress")).to_contain_text("500 / 1,000")
    expect(cell("loss")).to_have_text(f"{100 / 500 + 500 % 7:.4g}")
    node.finish(job)
    expect(cell("status")).to_contain_text("succeeded")
    # What a GPU is doing is told of a job that runs.
    expect(cell("device")).not_to_contain_text("%")


def test_a_new_job_appears_by_itself(played_service: Service, node: PlayedNode, page: Any) -> None:
    service, label = played_service, uuid.uuid4().hex[:8]
    older = node.take("was-there", training={"steps": 10}, labels={"rows": label})
    sign_in(page, service.stack.url, service.stack.api_key, f"/jobs?label.rows={label}")
    rows = page.get_by_role("table", name="Jobs").get_by_role("rowgroup").get_by_role("row")
    expect(rows).to_have_count(1)
    expect(page.get_by_text("1 job · live")).to_be_visible()
    page.evaluate("() => { window.isTheSamePage = true; }")
    newer = node.take("comes-later", training={"steps": 10}, labels={"rows": label})
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("comes-later")
    expect(rows.first).to_contain_text("running")
    assert page.evaluate("window.isTheSamePage") is True
    for job in (older, newer):
        node.finish(job)
    expect(page.get_by_text("succeeded", exact=True)).to_have_count(2)


def test_a_job_that_is_deleted_elsewhere_leaves_the_list(
    played_service: Service, node: PlayedNode, page: Any
) -> None:
    """By the API and in another tab; it is selected no more either."""
    service, label = played_service, uuid.uuid4().hex[:8]
    names = ("by-the-api", "in-a-tab", "stays")
    jobs = {name: node.take(name, labels={"rows": label}) for name in names}
    for job in jobs.values():
        node.finish(job)
    sign_in(page, service.stack.url, service.stack.api_key, f"/jobs?label.rows={label}")
    rows = page.get_by_role("table", name="Jobs").get_by_role("rowgroup").get_by_role("row")
    expect(rows).to_have_count(3)
    expect(page.get_by_text("3 jobs · live")).to_be_visible()
    page.evaluate("() => { window.isTheSamePage = true; }")
    for name in names:
        page.get_by_label(f"Select {name}").check()
    expect(page.get_by_text("3 selected")).to_be_visible()

    assert service.http.delete(f"/v1/jobs/{jobs['by-the-api'].id}").status_code == 204
    expect(rows).to_have_count(2)
    expect(rows.filter(has_text="by-the-api")).to_have_count(0)
    # What is no more cannot be compared.
    expect(page.get_by_text("2 selected")).to_be_visible()

    tab = page.context.new_page()
    tab.goto(f"{service.stack.url}/dashboard/jobs/{jobs['in-a-tab'].id}")
    tab.get_by_role("button", name="Delete", exact=True).click()
    tab.get_by_role("button", name="Delete for good").click()
    tab.get_by_text("The job was deleted").wait_for()
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("stays")
    expect(page.get_by_text("1 job · live")).to_be_visible()
    expect(page.get_by_text("1 selected")).to_be_visible()
    assert page.evaluate("window.isTheSamePage") is True
