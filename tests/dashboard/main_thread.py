"""What the main thread of a page has to do, in processor time: a machine that does much else
meanwhile makes tasks last longer, but no task bigger."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_THREAD = "CrRendererMain"
_TASK = "ThreadControllerImpl::RunTask"


@dataclass
class Tasks:
    """Milliseconds of processor time of each task, the longest first; known after the block."""

    milliseconds: list[float] = field(default_factory=list)

    @property
    def longest(self) -> float:
        return max(self.milliseconds, default=0.0)


@contextmanager
def traced(page: Any) -> Iterator[Tasks]:
    """The tasks of the page's main thread within the block, by Chromium's own trace."""
    tasks = Tasks()
    browser = page.context.browser
    browser.start_tracing(page=page, categories=["toplevel"])
    try:
        yield tasks
    finally:
        events = json.loads(browser.stop_tracing())["traceEvents"]
    threads = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and event["args"].get("name") == _THREAD
    }
    spent = (
        event["tdur"] / 1000
        for event in events
        if event.get("name") == _TASK
        and "tdur" in event
        and (event["pid"], event["tid"]) in threads
    )
    tasks.milliseconds = sorted(spent, reverse=True)
