"""How soon a job's page answers, and how long it keeps its main thread: measured in Chromium."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.dashboard.browser import PATIENCE, settled, sign_in
from tests.dashboard.long_jobs import health_records
from tests.dashboard.main_thread import traced
from tests.dashboard.played_node import PlayedJob, PlayedNode
from tests.dashboard.replay import playing

# Milliseconds in which a page does what it does every few seconds.
QUIET = 4000

# Runs before the page's own scripts. Times are milliseconds since the navigation began.
# `answered`: the first frame in which every chart that is in the window has drawn its curve, and a
# readout tells of the place below the pointer and not, as it does by itself, of the newest point.
WATCH = """
(() => {
  const seen = { tasks: [], drawn: null, answered: null, charts: 0 };
  window.octrainSeen = seen;
  // The page's policy lets nobody evaluate text while waiting, so it is asked for a promise.
  window.octrainWait = (what, patience) => new Promise((done, failed) => {
    const end = performance.now() + patience;
    const again = () => {
      if (seen[what] !== null) done(seen[what]);
      else if (performance.now() > end) failed(new Error(`not ${what} within ${patience} ms`));
      else requestAnimationFrame(again);
    };
    again();
  });
  new PerformanceObserver((list) => {
    for (const { startTime, duration } of list.getEntries()) seen.tasks.push([startTime, duration]);
  }).observe({ type: 'longtask', buffered: true });
  const inWindow = (element) => {
    const { top, bottom } = element.getBoundingClientRect();
    return bottom > 0 && top < innerHeight;
  };
  const drawn = (chart) => (chart.querySelector('.readout')?.textContent ?? '') !== '';
  const newest = new Map();
  const look = () => {
    const charts = [...document.querySelectorAll('.chart')];
    const shown = charts.filter(inWindow);
    seen.charts = charts.length;
    const all = shown.length > 0 && shown.every(drawn);
    if (seen.drawn === null && all) seen.drawn = performance.now();
    if (seen.drawn !== null && seen.answered === null) {
      for (const chart of shown) {
        const text = chart.querySelector('.readout')?.textContent ?? '';
        if (!newest.has(chart)) newest.set(chart, text);
        else if (newest.get(chart) !== text) seen.answered = performance.now();
      }
    }
    if (seen.answered === null) requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})();
"""

# Resolves when what was changed is on the screen, and what came of that too.
PAINTED = """
() => new Promise((done) => {
  const after = (frames) => requestAnimationFrame(() => (frames > 0 ? after(frames - 1) : done()));
  after(3);
})
"""

# Tells when the heatmap of a job is there and the table of its layers has its figures.
LAYERS = """
(patience) => new Promise((done, failed) => {
  const end = performance.now() + patience;
  const look = () => {
    const table = document.querySelector('section[aria-label="Layers"]');
    if (table?.textContent.includes(' %') && document.querySelector('.heat-cells')) {
      done(performance.now());
    } else if (performance.now() > end) failed(new Error(`no layers within ${patience} ms`));
    else requestAnimationFrame(look);
  };
  look();
})
"""


@dataclass(frozen=True)
class Opening:
    """Milliseconds from the navigation on; of the main thread's tasks the one that lasted longest,
    and the most processor time of one."""

    drawn: float
    answered: float
    charts: int
    longest: float
    busiest: float
    requests: int
    curve_requests: int


@dataclass(frozen=True)
class Layers:
    """The page with the layers of a job: milliseconds from the navigation until they were shown,
    and the most processor time of a task of the main thread, by the name of what was done."""

    shown: float
    busiest: dict[str, float]


@dataclass(frozen=True)
class Replayed:
    """What a page did while a stream played: how long its tasks over 50 ms lasted, in milliseconds,
    the longest first; the most processor time of a task; how often it read its curves anew."""

    tasks: list[float]
    busiest: float
    readings: int


def watch(context: Any) -> None:
    """Measure every page that is opened in this context from now on."""
    context.add_init_script(WATCH)


def open_job(page: Any, address: str, patience: int) -> Opening:
    """Open a job's page and move the pointer over its first chart until that tells of the place.

    ``patience``: milliseconds after which it is no page that one could use.
    """
    requests: list[str] = []

    def note(request: Any) -> None:
        requests.append(request.url)

    page.on("request", note)
    with traced(page) as done:
        page.goto(address, wait_until="commit")
        page.evaluate("patience => window.octrainWait('drawn', patience)", patience)
        plot = page.locator(".chart .u-over").first.bounding_box()
        for part in range(2, 10):
            page.mouse.move(plot["x"] + plot["width"] * part / 12, plot["y"] + plot["height"] / 2)
        page.evaluate("patience => window.octrainWait('answered', patience)", patience)
    page.remove_listener("request", note)
    seen = page.evaluate("window.octrainSeen")
    return Opening(
        drawn=seen["drawn"],
        answered=seen["answered"],
        charts=seen["charts"],
        longest=max((duration for _, duration in seen["tasks"]), default=0.0),
        busiest=done.longest,
        requests=sum("/v1/" in url for url in requests),
        curve_requests=sum(_reads_curves(url) for url in requests),
    )


def open_layers(page: Any, address: str, patience: int) -> Layers:
    """Open the FP8 health of a job, and turn the table of its layers over and over.

    ``patience``: milliseconds after which it is no page that one could use.
    """
    with traced(page) as opened:
        page.goto(address, wait_until="commit")
        shown = page.evaluate(LAYERS, patience)
        settled(page)
    busiest = {"open": opened.longest}
    layers = page.get_by_role("region", name="Layers", exact=True)
    first = layers.locator("tbody tr").first
    ways: dict[str, Callable[[], None]] = {
        "kept alone": lambda: page.get_by_role("button", name=re.compile("^Kept ")).click(),
        "all again": lambda: page.get_by_role("button", name=re.compile("^All ")).last.click(),
        "sort": lambda: page.get_by_role("button", name="Worst underflow").click(),
        "search": lambda: page.get_by_label("Search by part of a layer's name").fill("layers.1"),
        "pick": lambda: first.get_by_role("button").click(),
        "scroll": lambda: layers.evaluate("(part) => part.scrollTo(0, part.scrollHeight)"),
    }
    for way, use in ways.items():
        with traced(page) as done:
            use()
            page.evaluate(PAINTED)
        busiest[way] = done.longest
    return Layers(shown, busiest)


def _reads_curves(url: str) -> bool:
    return "/metrics?" in url and "form=buckets" in url


def replay(
    page: Any, node: PlayedNode, job: PlayedJob, recorded: Sequence[bytes], tab: str, rate: float
) -> Replayed:
    """Show a tab of the job's page while its recorded stream plays, so many messages a second.

    Meanwhile the job goes on, so that what is read anew is new: twenty steps each half a second.
    The page is signed in to the service, and is that of a ``watch``ed context.
    """
    service = node.service
    readings: list[str] = []
    with playing(service.stack.url, recorded, rate) as player:
        sign_in(page, player.url, service.stack.api_key, f"/jobs/{job.id}{tab}")
        settled(page)
        page.wait_for_timeout(QUIET / 2)
        page.on("request", lambda request: readings.append(request.url))
        moment = page.evaluate("performance.now()")
        with traced(page) as done:
            player.begin.set()
            deadline = time.monotonic() + PATIENCE / 1000 + len(recorded) / rate
            while not player.played.is_set():
                assert time.monotonic() < deadline, "the recording is played"
                first = job.step + 1
                steps = range(first, first + 20)
                node.send(job, [each for step in steps for each in health_records(step)])
                node.beat()
                page.wait_for_timeout(500)
            page.wait_for_timeout(QUIET)
        found = page.evaluate("window.octrainSeen.tasks")
    tasks = sorted((length for begin, length in found if begin > moment), reverse=True)
    return Replayed(tasks, done.longest, sum(map(_reads_curves, readings)))
