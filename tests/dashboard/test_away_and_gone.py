"""What a page says of what is no longer so: the service away, a key revoked, a job gone."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from playwright.sync_api import Route, expect

from tests.dashboard.browser import beyond, settled, sign_in

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REQUESTS = "**/v1/**"


def owners_key(service: Any, scopes: list[str]) -> Any:
    """A key of an owner that has no jobs yet: nothing else happens on its pages."""
    return service.client.create_key("a visitor", uuid.uuid4().hex, scopes)


def test_a_service_that_is_away_is_told_on_any_page(service: Any, page: Any) -> None:
    """Also where nothing goes on; and once it is back, all is read anew without being asked."""
    url, key = service.stack.url, owners_key(service, ["jobs:read", "jobs:write"])
    sign_in(page, url, key)
    expect(page.get_by_text("No jobs yet")).to_be_visible()
    banner = page.locator(".banner")
    expect(banner).to_have_count(0)

    def away(route: Route) -> None:
        route.abort("connectionrefused")

    page.route(REQUESTS, away)
    page.get_by_role("link", name="Nodes", exact=True).click()
    expect(banner).to_contain_text("The service cannot be reached.")
    expect(page.get_by_role("alert")).to_contain_text("it is tried again by itself")
    page.unroute(REQUESTS, away)
    expect(banner).to_have_count(0)
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_role("heading", level=1, name="Nodes")).to_be_visible()

    # A database that is away is told too, by the service itself.
    def failing(route: Route) -> None:
        problem = {"title": "Not available", "status": 503, "type": "/problems/unavailable"}
        route.fulfill(status=503, json=problem)

    page.route(REQUESTS, failing)
    expect(banner).to_contain_text("The service cannot answer at present.")
    page.unroute(REQUESTS, failing)
    expect(banner).to_have_count(0)


def test_a_list_says_that_the_service_is_away_and_goes_on_after_it(service: Any, page: Any) -> None:
    """Of ended jobs alone: nothing of them is asked for while the service is there."""
    done = service.submit("ended-before", training={"steps": 2})
    service.end(done)

    def away(route: Route) -> None:
        route.abort("connectionrefused")

    # A stream that is open would not be broken by what is done to later requests.
    page.route("**/v1/events/stream?*", away)
    sign_in(page, service.stack.url, service.stack.api_key, "/jobs?status=succeeded&q=ended-")
    expect(page.get_by_role("link", name="ended-before", exact=True)).to_be_visible()
    banner = page.locator(".banner")
    expect(banner).to_have_count(0)
    page.route(REQUESTS, away)
    expect(banner).to_contain_text("The service cannot be reached.")
    expect(page.get_by_role("link", name="ended-before", exact=True)).to_be_visible()
    later = service.submit("ended-meanwhile", training={"steps": 2})
    service.end(later)
    page.unroute(REQUESTS, away)
    expect(banner).to_have_count(0)
    expect(page.get_by_role("link", name="ended-meanwhile", exact=True)).to_be_visible()


def test_a_key_that_is_revoked_meanwhile(service: Any, page: Any) -> None:
    key = service.client.keys.create("soon revoked", uuid.uuid4().hex, ["jobs:read"])
    sign_in(page, service.stack.url, key.key, "/nodes")
    expect(page.get_by_role("heading", level=1, name="Nodes")).to_be_visible()
    service.client.keys.revoke(key.id)
    expect(page.get_by_label("API key")).to_be_visible()
    expect(page.get_by_label("API key")).to_be_focused()


def test_a_job_that_is_deleted_meanwhile(service: Any, page: Any) -> None:
    job = service.submit("soon-deleted", training={"steps": 2})
    service.end(job)
    sign_in(page, service.stack.url, service.stack.api_key, f"/jobs/{job.id}")
    expect(page.get_by_role("heading", level=1, name="soon-deleted")).to_be_visible()
    assert service.http.delete(f"/v1/jobs/{job.id}").status_code in (200, 204)
    # What is tried with it tells it at once.
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete for good").click()
    expect(page.get_by_role("alert")).to_contain_text(f"There is no job '{job.id}'.")
    expect(page.get_by_role("heading", level=1, name="soon-deleted")).to_have_count(0)


def test_another_job_shows_nothing_of_the_one_before(service: Any, page: Any) -> None:
    job = service.submit("came-first", training={"steps": 3})
    service.end(job)
    sign_in(page, service.stack.url, service.stack.api_key, f"/jobs/{job.id}")
    charts = page.locator(".chart")
    charts.first.wait_for()
    page.locator(".plot").first.focus()
    page.keyboard.press("+")
    expect(page.get_by_role("button", name="Show all steps")).to_be_visible()
    # Answers about the other job never come.
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route(lambda url: "/metrics" in url and job.id not in url, hold)
    page.get_by_role("button", name="Clone and edit").click()
    text = page.get_by_role("dialog").get_by_role("textbox")
    text.fill(text.input_value().replace("came-first", "came-second"))
    page.get_by_role("button", name="Save as a draft").click()
    expect(page.get_by_role("heading", level=1, name="came-second")).to_be_visible()
    expect(page.get_by_text("Reading the curves")).to_be_visible()
    expect(charts).to_have_count(0)
    expect(page.get_by_role("button", name="Show all steps")).to_have_count(0)
    for route in held:
        route.abort()


def test_reports_of_an_attempt_come_by_themselves(service: Any, page: Any) -> None:
    """On a page that was there before the job began."""
    (node,) = [node for node in service.client.nodes() if node.name == "local"]
    assert service.http.post(f"/v1/nodes/{node.id}/drain").status_code == 200
    try:
        job = service.submit("watched-early", training={"steps": 1_000_000})
        sign_in(page, service.stack.url, service.stack.api_key, f"/jobs/{job.id}?tab=fp8")
        expect(page.get_by_text("Not started yet")).to_be_visible()
    finally:
        assert service.http.post(f"/v1/nodes/{node.id}/undrain").status_code == 200
    alarms = page.locator(".card").filter(has=page.get_by_role("heading", name="Alarms"))
    # Nothing was looked at so far, and that is what is said.
    expect(alarms).to_contain_text("The first figures come with step")
    layers = page.get_by_role("region", name="Layers", exact=True)
    expect(layers.locator("tbody tr").first).to_be_visible()
    expect(page.get_by_role("region", name="Formats and bytes")).to_be_visible()
    assert service.http.post(f"/v1/jobs/{job.id}/cancel").status_code == 200
    service.end(job, "cancelled")


def test_an_answer_that_was_lost_makes_no_second_job(service: Any, page: Any) -> None:
    url = service.stack.url
    sign_in(page, url, owners_key(service, ["jobs:read", "jobs:write"]), "/jobs/new")
    lost: list[int] = []

    def lose(route: Route) -> None:
        lost.append(route.fetch().status)
        route.abort("connectionreset")

    page.get_by_text("The service would take this job.").wait_for()
    page.route("**/v1/jobs?*", lose, times=1)
    page.get_by_role("button", name="Keep as a draft").click()
    expect(page.get_by_role("button", name="Close this message")).to_be_visible()
    assert lost == [201]
    page.get_by_role("button", name="Keep as a draft").click()
    expect(page.locator(".job-facts .badge")).to_contain_text("draft")
    page.goto(f"{url}/dashboard/jobs")
    expect(page.get_by_text("1 job · live")).to_be_visible()


@pytest.mark.parametrize("width", [360, 1440])
def test_names_of_any_length_and_direction(service: Any, page: Any, width: int) -> None:
    names = ["a" * 200, "تدريب نموذج 8", "plain"]
    labels = {"team": "x" * 60, "group": "فريق 1"}
    jobs = []
    for name in names:
        spec = service.spec(name, training={"steps": 2})
        jobs.append(service.client.jobs.create({**spec, "labels": labels}, draft=True))
    page.set_viewport_size({"width": width, "height": 800})
    sign_in(page, service.stack.url, service.stack.api_key)
    for path in ["/jobs?status=draft", *(f"/jobs/{job.id}" for job in jobs)]:
        page.goto(f"{service.stack.url}/dashboard{path}")
        settled(page)
        assert beyond(page) is None, path
    heading = page.get_by_role("heading", level=1)
    page.goto(f"{service.stack.url}/dashboard/jobs/{jobs[0].id}")
    settled(page)
    assert heading.bounding_box()["height"] < 120, "a long name takes three lines at most"
    page.goto(f"{service.stack.url}/dashboard/compare?jobs={','.join(job.id for job in jobs)}")
    settled(page)
    assert beyond(page) is None
    figures = page.get_by_role("region", name="Figures of the jobs")
    if width > 1000:
        fits = "(part) => part.scrollWidth <= part.clientWidth"
        assert figures.evaluate(fits), "figures stay in sight beside a long name"
    for job in jobs:
        assert service.http.delete(f"/v1/jobs/{job.id}").status_code in (200, 204, 409)
