"""The dashboard in a real browser against the real stack, with jobs that really train."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.dashboard.browser import (
    AXE,
    PATIENCE,
    SIZES,
    beyond,
    lacking,
    settled,
    sign_in,
    violations,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_sign_in_submit_watch_and_cancel(service: Any, page: Any) -> None:
    url = service.stack.url
    page.goto(f"{url}/dashboard/jobs/new")
    page.get_by_label("API key").fill("oct_wrong")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("This key is unknown, expired or revoked.").wait_for()
    page.get_by_label("API key").fill(service.stack.api_key)
    page.get_by_role("button", name="Sign in").click()

    # The page that was asked for, with the spec of the example; a mistake is told where it is.
    page.get_by_role("heading", name="New job", level=1).wait_for()
    page.get_by_text("The service would take this job.").wait_for()
    steps = page.get_by_role("textbox", name="Steps", exact=True)
    steps.fill("no number")
    page.get_by_text("not right yet").wait_for()
    assert page.get_by_role("button", name="Submit").is_disabled()
    steps.fill("100000")
    page.get_by_role("textbox", name="Name", exact=True).fill("from-the-form")
    page.get_by_role("button", name=re.compile("^emulated-current|^emulated-delayed")).first.click()

    # Form and JSON are the same spec, both ways.
    page.get_by_role("button", name="JSON", exact=True).click()
    text = page.get_by_label("The spec as JSON")
    spec = json.loads(text.input_value())
    assert (spec["name"], spec["training"]["steps"]) == ("from-the-form", 100000)
    assert spec["recipe"]["engine"] == "emulated"
    spec["labels"] = {"from": "browser"}
    text.fill(json.dumps(spec))
    page.get_by_role("button", name="Form", exact=True).click()
    labels = page.get_by_role("textbox", name="Labels", description="Labels to filter jobs by.")
    assert labels.input_value() == "from=browser"
    page.get_by_text("The service would take this job.").wait_for()
    page.get_by_role("button", name="Submit").click()

    # It trains, and the page follows by itself.
    page.wait_for_url(re.compile(r"/dashboard/jobs/job_\w+$"))
    job_id = page.url.rpartition("/")[2]
    page.get_by_text("running", exact=True).first.wait_for()
    service.until(
        lambda: (
            int(page.locator(".tile-value").first.inner_text().split("/")[0].replace(",", "")) > 20
        ),
        "the page shows its steps",
    )
    told = service.object(job_id)
    assert (told["name"], told["labels"], told["owner"]) == (
        "from-the-form",
        {"from": "browser"},
        "local",
    )
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Cancel the job").click()
    page.get_by_text("cancelled", exact=True).first.wait_for()
    assert service.object(job_id)["status"] == "cancelled"

    # Signed out, the cookie is worth nothing, and the page asks for a key again.
    cookies = page.context.cookies()
    assert [cookie["httpOnly"] for cookie in cookies] == [True]
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("API key").wait_for()
    assert page.context.cookies() == []


def test_keys_nodes_and_webhooks(service: Any, page: Any) -> None:
    sign_in(page, service.stack.url, service.stack.api_key, "/keys")
    page.get_by_role("button", name="New key").click()
    page.get_by_label("Name").fill("made-in-the-browser")
    page.get_by_role("button", name="Make the key").click()
    secret = page.locator(".secret").inner_text()
    assert re.fullmatch(r"oct_[\w-]{43}", secret)
    listed = service.http.get("/v1/keys", headers={"Authorization": f"Bearer {secret}"})
    assert listed.status_code == 403, "it may read jobs, not keys"
    page.get_by_role("button", name="I have kept it").click()
    assert secret not in page.content()
    page.get_by_role("button", name="Revoke made-in-the-browser").click()
    page.get_by_role("button", name="Revoke it").click()
    page.get_by_text("made-in-the-browser is revoked").wait_for()
    refused = service.http.get("/v1/jobs", headers={"Authorization": f"Bearer {secret}"})
    assert refused.status_code == 401

    page.get_by_role("link", name="Nodes").click()
    # Other tests leave nodes of theirs.
    card = page.locator(".card").filter(has=page.locator(".node-name", has_text="local"))
    card.get_by_role("button", name="Drain", exact=True).click()
    page.get_by_role("button", name="Drain it").click()
    card.get_by_role("button", name="Stop draining").click()
    card.get_by_role("button", name="Drain", exact=True).wait_for()
    nodes = service.http.get("/v1/nodes").json()["items"]
    assert [node["wanted"] for node in nodes if node["name"] == "local"] == ["run"]

    page.get_by_role("link", name="Webhooks").click()
    page.get_by_role("button", name="New webhook").click()
    page.get_by_label("URL").fill("https://192.0.2.1/hook")
    page.get_by_role("button", name="Make it").click()
    # An address that no one may send to is refused, in the dialog.
    page.get_by_role("alert").wait_for()
    assert service.http.get("/v1/webhooks").json()["items"] == []


PATHS = ("/jobs", "/jobs/new", "/nodes", "/keys", "/webhooks", "/usage", "/compare")


@pytest.mark.parametrize(("scheme", "size"), [("light", "wide"), ("dark", "narrow")])
def test_axe_finds_nothing_serious(service: Any, browser: Any, scheme: str, size: str) -> None:
    if not AXE.is_file():
        lacking("axe-core is not installed: make dashboard")
    job = service.submit("for-axe", training={"steps": 3})
    service.end(job)
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    try:
        page.goto(f"{service.stack.url}/dashboard/jobs")
        page.get_by_label("API key").wait_for()
        found = {"sign in": violations(page)}
        sign_in(page, service.stack.url, service.stack.api_key)
        job_page = f"/jobs/{job.id}"
        tabs = [f"{job_page}?tab={tab}" for tab in ("fp8", "timeline", "logs", "files", "spec")]
        compared = f"/compare?jobs={job.id}"
        for path in (*PATHS, compared, "/jobs/job_of_nobody", job_page, *tabs):
            page.goto(f"{service.stack.url}/dashboard{path}")
            settled(page)
            found[path] = violations(page)
            assert beyond(page) is None, path
    finally:
        context.close()
    assert {path: list_ for path, list_ in found.items() if list_} == {}


def test_fp8_health_and_comparison(service: Any, page: Any) -> None:
    """What the pages show is what the service tells of the same jobs."""
    common = {"training": {"steps": 6}, "telemetry": {"fp8_every_steps": 1}}
    recipes = {
        "seen-fp8": {"engine": "emulated", "amax_history_len": 4},
        "seen-bf16": {"engine": "amp", "dtype": "bf16"},
    }
    jobs = [service.submit(name, recipe=recipe, **common) for name, recipe in recipes.items()]
    for job in jobs:
        service.end(job)
    fp8 = jobs[0]
    sign_in(page, service.stack.url, service.stack.api_key, f"/jobs/{fp8.id}?tab=fp8")

    # Every layer with its fate, as the conversion report has it.
    report = service.http.get(f"/v1/jobs/{fp8.id}/conversion").json()["rows"]
    layers = page.get_by_role("region", name="Layers", exact=True).locator("tbody tr")
    layers.first.wait_for()
    assert layers.count() == len(report)
    kept = [row["name"] for row in report if row["reason"] is not None]
    page.get_by_role("button", name=f"Kept {len(kept)}", exact=True).click()
    shown = [row.locator("td").first.inner_text() for row in layers.all()]
    assert sorted(shown) == sorted(kept)
    page.get_by_role("button", name=f"All {len(report)}", exact=True).click()
    _each_layer_is_told(service, fp8, report, layers)

    # The formats as they were measured, of GEMMs and of what is stored.
    measured = service.http.get(f"/v1/jobs/{fp8.id}/precision").json()["rows"]
    formats = page.get_by_role("region", name="Formats and bytes")
    for kind in measured["gemm_compute"]["layers"]:
        for gemm in kind["gemms"]:
            for operand, told in gemm["operands"].items():
                expect(formats).to_contain_text(f"{operand} {told['format']}")
    for attention in measured["attention_compute"]["passes"]:
        expect(formats).to_contain_text(f"{attention['pass']}: {attention['format']}")
    assert {one["pass"] for one in measured["attention_compute"]["passes"]} == {
        "forward",
        "backward",
    }
    for stored in ("weights", "optimizer_states"):
        assert measured[stored]["formats"], stored
        for name in measured[stored]["formats"]:
            expect(formats).to_contain_text(f"{name}: ")

    # The heatmap is drawn, and the like job in BF16 is found.
    page.locator(".heatmap canvas").first.wait_for()
    _speed_and_memory_are_told(service, jobs, page)
    page.get_by_role("link", name="Compare the two").click()
    page.get_by_role("heading", level=1, name="Compare").wait_for()
    figures = page.get_by_role("region", name="Figures of the jobs").locator("tbody tr")
    figures.first.wait_for()
    assert figures.count() == 2
    for job, row in zip(jobs, figures.all(), strict=True):
        loss = service.object(job.id)["latest_metrics"]["train/loss"]
        expect(row).to_contain_text(f"{loss:.4g}")
    # Both on the same axes.
    chart = page.locator(".chart").first
    chart.locator("canvas").wait_for()
    both = r"^step 6 · seen-fp8 [\d.]+ · seen-bf16 [\d.]+$"
    expect(chart.locator(".readout")).to_have_text(re.compile(both))
    differences = page.get_by_role("region", name="Differences of the specs")
    fields = [row.locator("td").first.inner_text() for row in differences.locator("tbody tr").all()]
    assert {"recipe.engine", "recipe.amax_history_len", "recipe.dtype"} <= set(fields)
    assert not any(field.startswith(("training", "model", "data")) for field in fields)


def _each_layer_is_told(service: Any, job: Any, report: Any, layers: Any) -> None:
    """Where a layer came from, what it became by which recipe or why not, and its worst."""
    told = service.object(job.id)["spec"]["recipe"]
    recipe = f"{told['engine']} {told['scaling']} {told['fp8_format']}"
    worst: dict[str, dict[str, tuple[float, str]]] = {"saturated": {}, "underflow": {}}
    for figure, of in worst.items():
        query = f"name=fp8/*/{figure}&form=points"
        for series in service.http.get(f"/v1/jobs/{job.id}/metrics?{query}").json()["series"]:
            _, *layer, tensor, _ = series["name"].split("/")
            name = "/".join(layer)
            for step, value in series["points"]:
                if name not in of or value > of[name][0]:
                    of[name] = (value, f"{tensor}, step {step}")
    assert any(value > 0 for value, _ in worst["saturated"].values()), "there is something to see"

    shown = {row.locator("td").first.inner_text(): row for row in layers.all()}
    for row in report:
        cells = [each.inner_text() for each in shown[row["name"]].locator("td").all()]
        _, origin, target, by, reason, saturated, underflow, alarms = cells
        assert origin == row["from"], row
        if row["reason"] is not None:
            assert (target, by, reason) == ("kept", "", row["reason"])
        else:
            assert target.startswith(row["to"] or row["from"]), row
            assert (by, reason) == (recipe, "")
        most, where = worst["saturated"].get(row["name"], (None, ""))
        assert saturated.split() == [*_percent(most).split(), *(where.split() if most else [])]
        assert underflow == _percent(worst["underflow"].get(row["name"], (None, ""))[0])
        events = service.events(job.id)
        of_layer = [e for e in events if e["data"].get("layer") == row["name"]]
        assert int(alarms) == sum(e["kind"] == "fp8_alarm" for e in of_layer)


def _percent(share: float | None) -> str:
    """A share as pages write it: three digits, and never zero for what is none."""
    if share is None:
        return "–"
    if share == 0:
        return "0 %"
    return "< 0.001 %" if share * 100 < 0.001 else f"{float(f'{share * 100:.3g}'):g} %"


def _speed_and_memory_are_told(service: Any, jobs: Any, page: Any) -> None:
    """The ratio of the medians of speed and of the peaks of memory, as the service has them."""
    speed, memory = [], []
    for job in jobs:
        values = {}
        for name in ("perf/tokens_per_second", "memory/peak_bytes"):
            query = f"name={name}&form=points"
            answer = service.http.get(f"/v1/jobs/{job.id}/metrics?{query}").json()
            values[name] = [value for _, value in answer["series"][0]["points"]]
        speed.append(statistics.median(values["perf/tokens_per_second"]))
        memory.append(max(values["memory/peak_bytes"]))
    for label, (own, other) in (
        ("Speed against BF16", speed),
        ("Peak memory against BF16", memory),
    ):
        tile = page.locator(".tile").filter(has=page.get_by_text(label, exact=True))
        expect(tile.locator(".tile-value")).to_have_text(f"{own / other:.2f}×")


def test_what_was_set_is_apart_and_its_copies_make_the_same_job(service: Any, page: Any) -> None:
    """The copies of curl, command and Python are run as they were copied."""
    # One that equals its default was set all the same.
    training = {"steps": 2, "gradient_accumulation": 1}
    job = service.submit("copied", training=training, labels={"of": 'it\'s a "label"'})
    told = service.object(job.id)
    url, key = service.stack.url, service.stack.api_key
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
    sign_in(page, url, key, f"/jobs/{job.id}?tab=spec")
    settled(page)

    def fields(section: str) -> set[str]:
        rows = page.get_by_role("region", name=section, exact=True).locator(".spec-row dt")
        return set(rows.all_inner_texts())

    assert {"steps", "gradient_accumulation", "labels"} <= fields("Set")
    assert "priority" in fields("Filled in")
    assert "gradient_accumulation" not in fields("Filled in")
    page.get_by_label("Show them").uncheck()
    assert fields("Filled in") == set()

    copies = {}
    for name in ("curl", "command", "Python"):
        page.get_by_role("button", name=f"Copy as {name}").click()
        copies[name] = page.evaluate("() => navigator.clipboard.readText()")
    assert len(set(copies.values())) == len(copies), "each copy is its own"
    bin_folder = Path(sys.executable).parent
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OCTRAIN_API_KEY": key}
    made: set[str] = set()
    for name, text in copies.items():
        program = [sys.executable, "-c", text] if name == "Python" else ["bash", "-c", text]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (name, text, done.stderr)
        listed = service.http.get("/v1/jobs?name=copied").json()["items"]
        (new,) = {one["id"] for one in listed} - made - {job.id}
        made.add(new)
        assert service.object(new)["spec"] == told["spec"], name


def test_a_browser_without_a_clipboard_shows_what_was_to_be_copied(service: Any, page: Any) -> None:
    job = service.submit("not-copied", training={"steps": 2})
    # As over plain HTTP, from another machine.
    page.context.add_init_script(
        "Object.defineProperty(navigator, 'clipboard', {value: undefined})"
    )
    sign_in(page, service.stack.url, service.stack.api_key, f"/jobs/{job.id}?tab=spec")
    page.get_by_role("button", name="Copy as curl").click()
    dialog = page.get_by_role("dialog", name="Copy as curl")
    assert dialog.get_by_role("textbox").input_value().startswith("curl ")
    dialog.get_by_role("button", name="Close").click()
    dialog.wait_for(state="detached")
