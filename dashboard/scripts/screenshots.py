"""Pictures of every page of the dashboard, light and dark, wide and narrow.

    python dashboard/scripts/screenshots.py --url http://127.0.0.1:8642 --key oct_... docs/images

Needs the system's Chromium (or CHROMIUM), Playwright (`octrain[dev]`), a service with a built
dashboard, and in it a job that recorded FP8 health; the newest one that has ended is shown, and
compared with the next ones.
"""

import argparse
import json
import os
import shutil
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

SIZES = {"wide": (1440, 900), "narrow": (360, 740)}
THEMES = ("light", "dark")
TABS = ("fp8", "timeline", "logs", "files", "spec")


def main() -> None:
    """Read the arguments and take the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", default=os.environ.get("OCTRAIN_API_KEY"))
    parser.add_argument("--job", help="the job to show; without it the newest that has ended")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    if not given.key:
        parser.error("--key or OCTRAIN_API_KEY is needed")
    jobs = ended_jobs(given.url, given.key)
    if given.job:
        jobs = [given.job, *(job for job in jobs if job != given.job)]
    if not jobs:
        parser.error("no job has succeeded yet: there is nothing to show")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        parser.error("no Chromium: apt-get install chromium, or set CHROMIUM")
    given.folder.mkdir(parents=True, exist_ok=True)
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        for theme in THEMES:
            for size, (width, height) in SIZES.items():
                context = browser.new_context(
                    viewport={"width": width, "height": height},
                    color_scheme=theme,  # type: ignore[arg-type]
                    reduced_motion="reduce",
                )
                context.set_default_timeout(120_000)
                take(context.new_page(), given, jobs, f"{theme}-{size}")
                context.close()
        browser.close()


def ended_jobs(url: str, key: str) -> list[str]:
    """Ids of the jobs that have succeeded, the newest first."""
    request = urllib.request.Request(
        f"{url}/v1/jobs?status=succeeded&limit=4&fields=name",
        headers={"Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request) as answer:
        return [job["id"] for job in json.load(answer)["items"]]


def pages(jobs: list[str]) -> dict[str, str]:
    """The path of each page, by the name of its picture."""
    job = f"/jobs/{jobs[0]}"
    return {
        "jobs": "/jobs?sort=created_at",
        "new-job": "/jobs/new",
        "job": job,
        **{f"job-{tab}": f"{job}?tab={tab}" for tab in TABS},
        "compare": f"/compare?jobs={','.join(jobs[:3])}",
        "nodes": "/nodes",
        "usage": "/usage",
        "webhooks": "/webhooks",
        "keys": "/keys",
    }


def take(page: Page, given: Any, jobs: list[str], suffix: str) -> None:
    """All pictures of one theme and size."""
    page.goto(f"{given.url}/dashboard/jobs")
    page.get_by_label("API key").wait_for()
    page.screenshot(path=given.folder / f"sign-in-{suffix}.png")
    page.get_by_label("API key").fill(given.key)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("heading", level=1, name="Jobs").wait_for()
    for name, path in pages(jobs).items():
        page.goto(f"{given.url}/dashboard{path}")
        page.get_by_role("heading", level=1).first.wait_for()
        page.locator(".spinner").first.wait_for(state="detached")
        # Canvases are painted in slices: the picture is taken when two in a row are the same.
        last, now = b"", page.screenshot()
        for _ in range(20):
            if now == last:
                break
            page.wait_for_timeout(700)
            last, now = now, page.screenshot()
        (given.folder / f"{name}-{suffix}.png").write_bytes(now)


if __name__ == "__main__":
    main()
