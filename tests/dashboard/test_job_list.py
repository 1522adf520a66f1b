"""The list of jobs: what is looked for stands in the address, and many are cancelled at once."""

from __future__ import annotations

import re
import uuid
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import expect

from tests.dashboard.browser import sign_in

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_view_is_kept_in_the_address_and_cancelled_at_once(service: Any, page: Any) -> None:
    sweep = uuid.uuid4().hex[:8]
    names = [f"{name}-{sweep}" for name in ("beta", "alpha", "gamma")]
    jobs = {}
    for name in names:
        # There is no GPU here: they wait, and say for what.
        spec = service.spec(name, labels={"sweep": sweep}, resources={"device": "cuda"})
        jobs[name] = service.client.jobs.create(spec, allow_waiting=True)
    sign_in(page, service.stack.url, service.stack.api_key)
    rows = page.get_by_role("rowgroup").get_by_role("row")

    def address() -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(page.url).query).items()}

    def listed() -> list[str]:
        return [row.locator(".job-link").inner_text() for row in rows.all()]

    # A label is a filter, and so is what is written; the order is chosen by a heading.
    page.get_by_role("button", name=f"sweep={sweep}").first.click()
    expect(rows).to_have_count(3)
    assert listed() == names[::-1], "the newest first"
    page.get_by_role("button", name="Job", exact=True).click()
    expect(rows.first).to_contain_text("alpha-")
    assert listed() == sorted(names)
    search = page.get_by_role("searchbox")
    search.fill("a-")
    page.get_by_role("group", name="Status").get_by_role("button", name="Queued").click()
    wanted = {"label.sweep": sweep, "sort": "name", "q": "a-", "status": "queued"}
    page.wait_for_url(re.compile(r"q=a-"))
    assert address() == wanted
    search.fill("beta")
    expect(rows).to_have_count(1)
    # Whoever opens the address sees the same.
    page.reload()
    expect(rows).to_have_count(1)
    assert (listed(), search.input_value()) == ([names[0]], "beta")
    assert address() == wanted | {"q": "beta"}
    search.fill("")
    expect(rows).to_have_count(3)
    assert listed() == sorted(names)

    # The place in the queue, and what is waited for.
    for row in rows.all():
        expect(row).to_contain_text(re.compile(r"#\d+ in the queue, waits for a capable node"))

    page.get_by_label("Select all that are listed").check()
    page.get_by_role("button", name="Cancel 3 unfinished").click()
    page.get_by_role("button", name="Cancel them").click()
    page.get_by_text("3 jobs are being cancelled").wait_for()
    # They are queued no more: the view empties itself, and says what can be done.
    page.get_by_text("No job fits these filters").wait_for()
    assert {service.object(job.id)["status"] for job in jobs.values()} == {"cancelled"}
    page.get_by_role("button", name="Clear the filters").click()
    expect(page.get_by_role("link", name=names[0])).to_be_visible()
    assert address() == {"sort": "name"}
