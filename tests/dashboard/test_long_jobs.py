"""Job pages of a size that takes days to train: soon there, and never in their user's way.

The bounds are of liveness, for machines that do much else meanwhile; what an idle one takes is in
docs/dashboard.md, by ``python -m tests.dashboard.measure``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import StartService
from tests.dashboard.browser import PATIENCE, sign_in
from tests.dashboard.long_jobs import SERIES, long_job, recorded_job
from tests.dashboard.page_speed import open_job, replay, watch
from tests.dashboard.played_node import PlayedNode
from tests.running_service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Milliseconds of one task. With so much data, what blocks the page takes far longer than this.
LONGEST_TASK = 2000


@pytest.fixture(scope="module")
def service(start_service: StartService) -> Service:
    """A stack of its own: the one that others share must not know of a node that is none."""
    return start_service("long-jobs", {})


@pytest.fixture(scope="module")
def node(service: Service) -> Iterator[PlayedNode]:
    with PlayedNode(service, "played-long") as node:
        yield node


@pytest.fixture
def watched(browser: Any) -> Iterator[Any]:
    """A page whose tasks are measured."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(PATIENCE)
    watch(context)
    yield context.new_page()
    context.close()


def test_fifty_series_of_a_hundred_thousand_steps(
    service: Service, node: PlayedNode, watched: Any
) -> None:
    job = long_job(node)
    sign_in(watched, service.stack.url, service.stack.api_key)
    address = f"{service.stack.url}/dashboard/jobs/{job.id}?charts=all"
    opening = open_job(watched, address, PATIENCE)
    # Training and evaluation share a chart. All were read in one request.
    assert opening.charts == SERIES - 1
    assert opening.curve_requests == 1
    assert opening.answered < 30_000
    assert opening.longest < LONGEST_TASK

    # Those below the window are drawn when they are scrolled to, and of all steps.
    last = watched.locator(".chart").last
    assert last.locator("canvas").count() == 0
    last.scroll_into_view_if_needed()
    last.locator("canvas").wait_for()
    label = last.locator(".plot").get_attribute("aria-label")
    assert label.startswith("probe/layers.9/norm by step."), label


def test_a_replayed_stream_leaves_the_page_free(
    service: Service, node: PlayedNode, watched: Any
) -> None:
    """Thousands of messages, of a job with 504 series of FP8 health, on each page that follows."""
    job, messages = recorded_job(service, node, 120)
    assert len(messages) > 2000
    for tab in ("", "?tab=fp8", "?tab=timeline"):
        replayed = replay(watched, node, job, messages, tab, rate=400)
        assert max(replayed.tasks, default=0) < LONGEST_TASK, (tab, replayed)
        assert tab == "?tab=timeline" or replayed.readings > 0, (tab, replayed)
        watched.context.clear_cookies()
