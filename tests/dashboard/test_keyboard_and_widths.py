"""The dashboard without a mouse, and in the narrowest and the widest windows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dashboard.browser import PATIENCE, beyond, settled, sign_in

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# What has the focus, as a person who hears the page is told.
FOCUSED = """() => {
    const { ariaLabel, textContent } = document.activeElement;
    return (ariaLabel ?? textContent ?? '').trim();
}"""


def press_to(page: Any, name: str, key: str = "Tab", most: int = 60) -> None:
    """Press a key until what has this name has the focus."""
    passed = []
    for _ in range(most):
        page.keyboard.press(key)
        passed.append(page.evaluate(FOCUSED))
        if passed[-1] == name:
            return
    pytest.fail(f"{name!r} is not reached by {most} times {key}: {passed}")


def test_from_the_list_to_a_cancelled_job_by_keyboard(service: Any, page: Any) -> None:
    job = service.submit("by-keyboard", training={"steps": 1_000_000})
    service.step(job, 3)
    page.goto(f"{service.stack.url}/dashboard/jobs")
    page.get_by_label("API key").wait_for()
    # The field has the focus; Enter signs in.
    page.keyboard.type(service.stack.api_key)
    page.keyboard.press("Enter")
    page.get_by_role("link", name="by-keyboard").wait_for()

    press_to(page, "by-keyboard", most=120)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="by-keyboard", level=1).wait_for()
    settled(page)

    # A job at work has a pulse, but not for those who asked for little motion.
    pulse = """() => {
        const dot = document.querySelector('.job-facts .badge.active .dot');
        const { animationName, animationDuration, animationIterationCount } = getComputedStyle(dot);
        return [animationName, parseFloat(animationDuration), animationIterationCount];
    }"""
    assert page.evaluate(pulse) == ["pulse", 1.6, "infinite"]
    page.emulate_media(reduced_motion="reduce")
    name, seconds, times = page.evaluate(pulse)
    assert (seconds < 0.001, times) == (True, "1"), name
    transition = "() => getComputedStyle(document.querySelector('.button')).transitionDuration"
    assert float(page.evaluate(transition).split(",")[0].removesuffix("s")) < 0.001
    page.emulate_media(reduced_motion="no-preference")

    # One tab is in the order of the keyboard; arrows lead to the others, and around.
    press_to(page, "Charts")
    for name in ("FP8 health", "Timeline", "Logs", "Files", "Spec", "Charts"):
        page.keyboard.press("ArrowRight")
        assert page.evaluate(FOCUSED) == name
        page.locator(f"[role=tab][aria-selected=true]:text-is('{name}')").wait_for()
        settled(page)
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(FOCUSED) == "Spec"

    # The dialog takes the focus, Escape leaves it, and what opened it has it again.
    press_to(page, "Cancel", key="Shift+Tab")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Cancel this job?")
    dialog.wait_for()
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    assert page.evaluate(FOCUSED) == "Cancel"
    assert not service.object(job.id)["is_final"]
    page.keyboard.press("Enter")
    dialog.wait_for()
    press_to(page, "Cancel the job", most=4)
    page.keyboard.press("Enter")
    page.get_by_text("cancelled", exact=True).first.wait_for()
    assert service.object(job.id)["status"] == "cancelled"


def test_the_place_of_the_keyboard_is_kept(service: Any, page: Any) -> None:
    """Where what had the focus is replaced or disabled, the next Tab does not begin at the top."""
    job = service.submit("kept-place", training={"steps": 1_000_000})
    service.step(job, 3)
    sign_in(page, service.stack.url, service.stack.api_key, "/jobs?q=kept-place")
    row = page.get_by_role("link", name="kept-place")
    row.focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="kept-place", level=1).wait_for()
    page.wait_for_function("() => document.activeElement.id === 'content'")
    # What is pressed vanishes as the job's state changes; what stands beside it is near.
    press_to(page, "Pause")
    page.keyboard.press("Enter")
    page.locator(".job-facts .badge", has_text="paused").wait_for()
    beside = "() => document.activeElement.closest('.page-actions') !== null"
    page.wait_for_function(beside)
    # Disabled while its request is on its way, and there again after it.
    press_to(page, "Resume", most=3)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Pause", exact=True).wait_for()
    page.wait_for_function(beside)
    # A press on nothing gives the place up: no change of the page takes it back.
    page.locator("h1").click()
    given_up = "() => document.activeElement.id === 'content'"
    page.wait_for_function(given_up)
    assert service.http.post(f"/v1/jobs/{job.id}/cancel").status_code == 200
    page.locator(".job-facts .badge", has_text="cancelled").wait_for()
    assert page.evaluate(given_up)

    # A dialog with fields is sent by Enter.
    page.goto(f"{service.stack.url}/dashboard/keys")
    page.get_by_role("button", name="New key").click()
    page.get_by_label("Name").fill("made by Enter")
    page.keyboard.press("Enter")
    secret = page.get_by_role("dialog", name="The secret of made by Enter")
    secret.wait_for()
    page.keyboard.press("Escape")
    secret.wait_for(state="detached")
    assert page.evaluate(FOCUSED) == "New key"


def test_the_cursor_of_a_chart_by_keyboard(service: Any, page: Any) -> None:
    job = service.submit("with-a-cursor", training={"steps": 12})
    service.end(job)
    sign_in(page, service.stack.url, service.stack.api_key, f"/jobs/{job.id}")
    chart = page.locator(".chart").first
    chart.locator("canvas").wait_for()
    plot, readout = chart.locator(".plot"), chart.locator(".readout")
    assert readout.inner_text().startswith("step 12 ")
    plot.focus()
    page.keyboard.press("Home")
    assert readout.inner_text().startswith("step 1 ")
    # All charts of the page follow.
    assert page.locator(".readout").nth(1).inner_text().startswith("step 1 ")
    page.keyboard.press("+")
    page.get_by_role("button", name="Show all steps").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Show all steps").wait_for(state="detached")


JOB, NAMED = "/jobs/{job}", "a-name-without-a-place-to-break-it-" * 3
# In the narrowest window those beside the pages that the tests with axe look at.
WIDTHS = {
    360: ("/jobs", "/compare?jobs={job}", f"{JOB}?charts=all", f"{JOB}?tab=files"),
    3840: (
        *("/jobs", "/jobs/new", "/nodes", "/usage", "/compare?jobs={job}"),
        *(f"{JOB}?charts=all", f"{JOB}?tab=fp8", f"{JOB}?tab=timeline", f"{JOB}?tab=spec"),
    ),
}


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_its_window(service: Any, browser: Any, width: int) -> None:
    job = service.submit(NAMED, training={"steps": 3}, labels={"team": "a-long-label-" * 4})
    service.end(job)
    context = browser.new_context(viewport={"width": width, "height": max(740, width * 9 // 16)})
    context.set_default_timeout(PATIENCE)
    try:
        page = context.new_page()
        sign_in(page, service.stack.url, service.stack.api_key)
        for path in WIDTHS[width]:
            page.goto(f"{service.stack.url}/dashboard{path.format(job=job.id)}")
            settled(page)
            if "charts=" in path:
                page.locator(".chart").first.scroll_into_view_if_needed()
                page.locator(".chart canvas").first.wait_for()
            assert beyond(page) is None, path
    finally:
        context.close()
