"""How soon the page of a long job answers, and how free it stays while a stream plays:

    .venv/bin/python -m tests.dashboard.measure

It starts a stack of its own, without a worker. The figures are of this machine as it is now.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from octrain.local.processes import become_subreaper
from octrain.local.stack import LocalStack
from tests.dashboard.browser import PATIENCE, chromium, launched, sign_in
from tests.dashboard.long_jobs import SERIES, STEPS, deep_job, long_job, recorded_job
from tests.dashboard.page_speed import open_job, open_layers, replay, watch
from tests.dashboard.played_node import PlayedNode
from tests.running_service import Service, corpus

TIMES = 7
RECORDED_STEPS = 300
RATE = 400.0


def main() -> int:
    path = chromium()
    if path is None:
        print("There is no Chromium on this machine.", file=sys.stderr)
        return 1
    become_subreaper()
    with tempfile.TemporaryDirectory(prefix="octrain-measure-") as name:
        root = corpus(Path(name) / "root")
        with LocalStack(Path(name) / "data", roots=[root], workers=()) as stack:
            service = Service(stack, root)
            with PlayedNode(service, "played") as node, launched(path) as browser:
                _openings(service, node, browser)
                _layers(service, node, browser)
                _replays(service, node, browser)
            service.close()
    return 0


def _openings(service: Service, node: PlayedNode, browser: object) -> None:
    job = long_job(node)
    for width, height in ((1440, 900), (3840, 2160)):
        context = browser.new_context(viewport={"width": width, "height": height})  # type: ignore[attr-defined]
        watch(context)
        page = context.new_page()
        sign_in(page, service.stack.url, service.stack.api_key)
        address = f"{service.stack.url}/dashboard/jobs/{job.id}?charts=all"
        found = [open_job(page, address, PATIENCE) for _ in range(TIMES)]
        context.close()
        print(
            f"{SERIES} series of {STEPS:,} steps, {width} x {height}: drawn after "
            f"{statistics.median(each.drawn for each in found):.0f} ms, answers the pointer after "
            f"{statistics.median(each.answered for each in found):.0f} ms "
            f"(medians of {TIMES}; slowest {max(each.answered for each in found):.0f} ms); "
            f"longest task {max(each.longest for each in found):.0f} ms, of processor time "
            f"{max(each.busiest for each in found):.0f} ms; "
            f"{found[0].requests} requests"
        )


def _layers(service: Service, node: PlayedNode, browser: object) -> None:
    for blocks in (32, 112):
        job, names = deep_job(node, blocks)
        context = browser.new_context(viewport={"width": 1440, "height": 900})  # type: ignore[attr-defined]
        page = context.new_page()
        sign_in(page, service.stack.url, service.stack.api_key)
        address = f"{service.stack.url}/dashboard/jobs/{job.id}?tab=fp8"
        found = [open_layers(page, address, PATIENCE) for _ in range(TIMES)]
        context.close()
        shown = [each.shown for each in found]
        busiest = {way: max(each.busiest[way] for each in found) for way in found[0].busiest}
        print(
            f"{len(names):,} layers of {blocks} blocks: shown after "
            f"{statistics.median(shown):.0f} ms (median of {TIMES}; slowest {max(shown):.0f} ms); "
            "processor time of one task at most: "
            + ", ".join(f"{way} {spent:.0f} ms" for way, spent in busiest.items())
        )


def _replays(service: Service, node: PlayedNode, browser: object) -> None:
    job, messages = recorded_job(service, node, RECORDED_STEPS)
    size = sum(map(len, messages))
    print(f"recorded: {len(messages)} messages, {size / 1e6:.0f} MB; played at {RATE:.0f}/s")
    for tab in ("", "?tab=fp8", "?tab=timeline"):
        context = browser.new_context(viewport={"width": 1440, "height": 900})  # type: ignore[attr-defined]
        watch(context)
        found = replay(context.new_page(), node, job, messages, tab, RATE)
        context.close()
        longest = ", ".join(f"{length:.0f}" for length in found.tasks[:8])
        print(
            f"{tab or 'charts':14} {len(found.tasks)} tasks over 50 ms"
            f"{f' ({longest})' if found.tasks else ''}; at most {found.busiest:.0f} ms of "
            f"processor time in one; curves read {found.readings} times"
        )


if __name__ == "__main__":
    sys.exit(main())
