"""A job's page in use: what can be done with it, finer points, and the service away."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.dashboard.browser import PATIENCE, settled, sign_in

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_paused_resumed_cloned_and_edited(service: Any, page: Any) -> None:
    job = service.submit("held", training={"steps": 1_000_000, "gradient_accumulation": 1})
    service.step(job, 3)
    sign_in(page, service.stack.url, service.stack.api_key, f"/jobs/{job.id}")
    badge = page.locator(".job-facts .badge")
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(badge).to_contain_text("paused")
    paused = service.object(job.id)
    assert (paused["status"], paused["attempts"][-1]["status"]) == ("paused", "ended")
    page.get_by_role("button", name="Resume", exact=True).click()
    expect(badge).to_contain_text("running")
    # Where it went on is marked on the axis, and told below the charts.
    service.until(lambda: service.object(job.id)["attempt"] == 2, "a second attempt")

    # The text holds what was set, and what is removed or changed there is in the new job.
    page.get_by_role("button", name="Clone and edit").click()
    dialog = page.get_by_role("dialog", name="Clone held")
    text = dialog.get_by_role("textbox")
    spec = json.loads(text.input_value())
    assert spec["training"]["gradient_accumulation"] == 1, "as it was written, though a default"
    assert "optimizer" not in spec["training"], "nobody wrote it"
    spec["name"] = "held-too"
    spec["training"]["steps"] = "many"
    text.fill(json.dumps(spec))
    dialog.get_by_role("button", name="Submit").click()
    expect(dialog.get_by_role("alert")).to_contain_text("/training/steps")
    spec["training"]["steps"] = 2
    spec["recipe"] = {**spec["recipe"], "scaling": "delayed", "amax_history_len": 8}
    del spec["training"]["gradient_accumulation"]
    text.fill(json.dumps(spec))
    dialog.get_by_role("button", name="Save as a draft").click()
    expect(page.get_by_role("heading", level=1, name="held-too")).to_be_visible()
    clone = service.object(page.url.rpartition("/")[2])
    assert (clone["status"], clone["spec"]["training"]["steps"]) == ("draft", 2)
    assert clone["spec"]["recipe"]["amax_history_len"] == 8
    assert "gradient_accumulation" not in clone["spec_given"]["training"]
    page.get_by_role("button", name="Start", exact=True).click()
    assert service.http.post(f"/v1/jobs/{job.id}/cancel").status_code == 200
    expect(badge).to_contain_text("succeeded")


def test_nothing_there_says_what_to_do(service: Any, page: Any) -> None:
    """To one who has no jobs yet, at a job that is not there, and at an address of none."""
    url = service.stack.url
    key = service.client.create_key("new here", uuid.uuid4().hex, ["jobs:read"])
    sign_in(page, url, key)
    expect(page.get_by_text("No jobs yet")).to_be_visible()
    expect(page.get_by_role("link", name="Make the first one")).to_have_attribute(
        "href", "/dashboard/jobs/new"
    )
    page.goto(f"{url}/dashboard/compare")
    expect(page.get_by_text("No jobs chosen")).to_be_visible()
    # A job of somebody else is none of theirs.
    others = service.submit("of-another", training={"steps": 2})
    service.end(others)
    for missing in ("job_of_nobody", others.id):
        page.goto(f"{url}/dashboard/jobs/{missing}")
        expect(page.get_by_role("alert")).to_contain_text(f"There is no job '{missing}'.")
        expect(page.get_by_role("button", name="Try again")).to_be_visible()
        expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.goto(f"{url}/dashboard/no/such/page")
    page.get_by_role("link", name="Show the jobs").click()
    expect(page.get_by_text("No jobs yet")).to_be_visible()


def test_the_service_away_and_the_viewers_time(service: Any, browser: Any) -> None:
    job = service.submit("far-away", training={"steps": 2})
    service.end(job)
    # Chatham: no other place has that offset.
    context = browser.new_context(timezone_id="Pacific/Chatham")
    context.set_default_timeout(PATIENCE)
    try:
        page = context.new_page()
        sign_in(page, service.stack.url, service.stack.api_key, f"/jobs/{job.id}?tab=timeline")
        page.get_by_text("Times in Pacific/Chatham").wait_for()
        settled(page)
        shown = page.get_by_role("tabpanel").inner_text()
        minutes = {int(found) for found in re.findall(r"\d\d:(\d\d):\d\d", shown)}
        told = {int(event["time"][14:16]) for event in service.events(job.id)}
        assert minutes
        assert minutes <= {(minute + 45) % 60 for minute in told}

        banner = page.locator(".banner")
        expect(banner).to_have_count(0)
        context.set_offline(True)
        expect(banner).to_contain_text("This computer is offline")
        # What was read stays readable meanwhile.
        expect(page.get_by_role("heading", level=1)).to_have_text("far-away")
        context.set_offline(False)
        expect(banner).to_have_count(0)
    finally:
        context.close()
