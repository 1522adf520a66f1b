"""What a job has left: its events and attempts, its files, and the model; and the page's theme."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.dashboard.browser import settled, sign_in

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_events_attempts_and_files_are_those_of_the_service(service: Any, page: Any) -> None:
    job = service.submit("left-behind", training={"steps": 4})
    service.end(job)
    sign_in(page, service.stack.url, service.stack.api_key, f"/jobs/{job.id}?tab=timeline")
    told = service.object(job.id)

    # Each event in the words of the service, the newest first; at first only those that matter.
    rows = page.locator(".timeline li")
    rows.first.wait_for()
    events = service.events(job.id)
    assert 0 < rows.count() < len(events)
    page.get_by_label("Kind of event").select_option("")
    expect(rows).to_have_count(len(events))
    for row, event in zip(rows.all(), reversed(events), strict=True):
        expect(row).to_contain_text(event["message"])
        assert row.locator("time").get_attribute("datetime") == event["time"]
    page.get_by_label("Kind of event").select_option("checkpoint")
    written = [event for event in events if event["kind"] == "checkpoint"]
    expect(rows).to_have_count(len(written))
    (attempt,) = told["attempts"]
    shown = page.get_by_role("region", name="Attempts of the job").locator("tbody tr")
    expect(shown).to_have_count(1)
    for text in (attempt["node"], attempt["outcome"], attempt["detail"], str(attempt["step"])):
        expect(shown).to_contain_text(text)

    # Each file as it is stored, and the model as one archive.
    page.get_by_role("tab", name="Files").click()
    path = f"/v1/jobs/{job.id}/artifacts"
    artifacts = service.http.get(path).json()["items"]
    files = page.get_by_role("region", name="Files of the job").locator("tbody tr")
    expect(files).to_have_count(len(artifacts))
    for row, artifact in zip(files.all(), artifacts, strict=True):
        cells = row.locator("td").all_inner_texts()
        assert cells[0] == artifact["name"]
        assert cells[1].split()[0] == artifact["kind"]
        assert cells[2] == ("–" if artifact["step"] is None else str(artifact["step"]))
        assert row.locator("td").last.locator("a").count() == len(artifact["files"])
    report = next(artifact for artifact in artifacts if artifact["kind"] == "conversion")
    with page.expect_download() as download:
        page.get_by_role("link", name="conversion.json").click()
    stored = service.http.get(f"{path}/{report['id']}/files/conversion.json").content
    assert Path(download.value.path()).read_bytes() == stored
    with page.expect_download() as download:
        page.get_by_role("link", name="Download the model").click()
    assert download.value.suggested_filename == f"{job.id}.tar"
    with tarfile.open(download.value.path()) as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {"config.json", "model.safetensors"} <= names


def test_a_theme_is_chosen_and_kept(service: Any, page: Any) -> None:
    """Light or dark by the system until one is chosen, on the next visit too."""
    colour = "() => getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    sign_in(page, service.stack.url, service.stack.api_key, "/usage")
    settled(page)
    light = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    dark = page.evaluate(colour)
    assert light != dark
    choice = page.get_by_label("Colours")
    choice.select_option("light")
    assert page.evaluate(colour) == light
    page.reload()
    settled(page)
    assert page.evaluate(colour) == light, "though the system is dark"
    expect(choice).to_have_value("light")
    choice.select_option("system")
    assert page.evaluate(colour) == dark
