"""What charts show beside their lines: attempts, checkpoints, alarms, bands, and a reference."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.dashboard.browser import sign_in
from tests.dashboard.drawn import drawn, marks
from tests.dashboard.long_jobs import alarm
from tests.dashboard.played_node import PlayedNode
from tests.running_service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def node(played_service: Service) -> Iterator[PlayedNode]:
    with PlayedNode(played_service, "played-marks") as node:
        yield node


def chart_of(page: Any, title: str) -> Any:
    """The chart of this title, drawn."""
    heading = page.get_by_role("heading", name=title, exact=True)
    chart = page.locator(".chart").filter(has=heading)
    chart.scroll_into_view_if_needed()
    chart.locator("canvas").wait_for()
    return chart


def test_attempts_and_checkpoints_stand_at_their_steps(service: Any, page: Any) -> None:
    """Of a job that was paused and went on, as the service tells of it."""
    checkpoint = {"every_steps": 0, "keep_last": 5}
    job = service.submit("marked", training={"steps": 1_000_000}, checkpoint=checkpoint)
    service.step(job, 30)
    path = f"/v1/jobs/{job.id}"
    assert service.http.post(f"{path}/pause").status_code == 200
    service.until(lambda: service.object(job.id)["status"] == "paused", "it is paused")
    held = service.object(job.id)["progress"]["step"]
    assert service.http.post(f"{path}/resume").status_code == 200
    service.step(job, held + 30)
    assert service.http.post(f"{path}/cancel").status_code == 200
    service.end(job, "cancelled")

    query = "name=train/loss&form=buckets&max_points=600"
    parts = service.http.get(f"{path}/metrics?{query}").json()["series"]
    parts.sort(key=lambda part: part["attempt"])
    assert [part["attempt"] for part in parts] == [1, 2]
    begins = [part["buckets"]["first_step"] for part in parts]
    first, last = begins[0][0], begins[1][-1]
    kept = service.http.get(f"{path}/artifacts?kind=checkpoint").json()["items"]
    steps = sorted(each["step"] for each in kept)
    assert len(steps) == 2, "one of the pause, one of the end"

    sign_in(page, service.stack.url, service.stack.api_key, f"/jobs/{job.id}")
    loss = chart_of(page, "Loss")
    expect(page.get_by_text("2 checkpoints kept")).to_contain_text("dashed lines: 1 restart")

    def share(step: int) -> float:
        return (min(step, last) - first) / (last - first)

    service.until(lambda: len(marks(loss).checkpoints) == 2, "two checkpoints are drawn")
    seen = marks(loss)
    assert seen.checkpoints == pytest.approx([share(step) for step in steps], abs=0.01)
    assert seen.attempts == pytest.approx([share(begins[1][0])], abs=0.01)
    # FP8 may have set off alarms. Two that are side by side look like one.
    alarms = [
        each["data"]["step"] for each in service.events(job.id) if each["kind"] == "fp8_alarm"
    ]
    for place in seen.alarms:
        assert any(place == pytest.approx(share(step), abs=0.02) for step in alarms), alarms
    # On an axis of tokens they stand where those steps do, on every chart.
    page.get_by_role("button", name="Tokens", exact=True).click()
    rate = chart_of(page, "Learning rate")
    expect(rate.locator(".readout")).to_contain_text("tokens")
    service.until(lambda: len(marks(rate).checkpoints) == 2, "they are on other charts, too")
    # Each step has as many tokens.
    assert marks(rate).attempts == pytest.approx([share(begins[1][0])], abs=0.02)


def test_a_band_spans_the_least_and_the_greatest(
    played_service: Service, node: PlayedNode, page: Any
) -> None:
    """Of values that go up and down each step, a bucket's mean says nothing of either."""
    job = node.take("banded", training={"steps": 2400})
    values = {"train/loss": (5.0, 15.0), "train/grad_norm": (1.0, 1.0)}
    node.send(
        job,
        [
            {
                "type": "metrics",
                "step": step,
                "tokens": 8 * step,
                "values": {name: pair[step % 2] for name, pair in values.items()},
            }
            for step in range(1, 2401)
        ],
    )
    node.send(job, [alarm(600, "layers.0"), alarm(1800, "layers.1")])
    node.beat()
    sign_in(page, played_service.stack.url, played_service.stack.api_key, f"/jobs/{job.id}")
    loss = chart_of(page, "Loss")
    # From 5 to 15, and six in a hundred of that beyond on either side.
    low, high = 5 - 0.6, 15 + 0.6
    of = [(value - low) / (high - low) for value in (10, 15, 5)]

    def is_drawn() -> bool:
        found = drawn(loss, 0.3, 0.7)
        return [found.opaque, found.faint, found.foot] == pytest.approx(of, abs=0.03)

    played_service.until(is_drawn, f"the mean and its band at {of}")
    # Where nothing varies there is nothing to shade.
    norm = chart_of(page, "Gradient norm")
    played_service.until(lambda: drawn(norm, 0.3, 0.7).opaque is not None, "the norm is drawn")
    assert drawn(norm, 0.3, 0.7).faint == pytest.approx(drawn(norm, 0.3, 0.7).opaque, abs=0.03)

    seen = marks(loss)
    assert seen.alarms == pytest.approx([600 / 2400, 1800 / 2400], abs=0.01)
    assert (seen.attempts, seen.checkpoints) == ([], [])
    expect(page.get_by_text("2 alarms")).to_be_visible()
    node.finish(job)


def test_the_reference_and_the_gap_to_it(
    played_service: Service, node: PlayedNode, page: Any
) -> None:
    """A dashed line as long as the comparison went, its distance on a chart, and both in words."""
    parity = {"steps": 60, "dtype": "bf16"}
    job = node.take("compared", training={"steps": 90, "parity": parity})
    compared = {"parity/reference_loss": 8.0, "parity/gap": 0.25}
    node.send(
        job,
        [
            {
                "type": "metrics",
                "step": step,
                "tokens": 8 * step,
                "values": {"train/loss": 10.0, **(compared if step <= 60 else {})},
            }
            for step in range(1, 91)
        ],
    )
    node.beat()
    told = played_service.object(job.id)["latest_metrics"]
    assert (told["parity/gap"], told["parity/reference_loss"]) == (0.25, 8.0)
    sign_in(page, played_service.stack.url, played_service.stack.api_key, f"/jobs/{job.id}")
    tile = page.locator(".tile").filter(has_text="Gap to the reference")
    expect(tile).to_contain_text("25 %")
    expect(tile).to_contain_text("reference 8")
    loss, gap = chart_of(page, "Loss"), chart_of(page, "Gap to the reference")
    # From 8 to 10, and six in a hundred of that beyond on either side.
    own, other = (10 - 7.88) / 2.24, (8 - 7.88) / 2.24
    while_compared, after = (0.1, 0.6), (0.75, 0.95)

    def is_drawn() -> bool:
        found = drawn(loss, *while_compared, line=3).opaque
        return found == pytest.approx(other, abs=0.03)

    played_service.until(is_drawn, f"the reference at {other:.3f}")
    assert drawn(loss, *while_compared).opaque == pytest.approx(own, abs=0.03)
    assert drawn(loss, *while_compared).filled == 1
    assert 0.3 < drawn(loss, *while_compared, line=3).filled < 0.75, "dashed"
    assert drawn(loss, *after, line=3).opaque is None, "no longer compared"
    assert drawn(loss, *after).opaque == pytest.approx(own, abs=0.03)
    assert drawn(gap, *while_compared).opaque == pytest.approx(0.5, abs=0.03)
    assert drawn(gap, *after).opaque is None

    # In words: at the newest step there is no reference, at the first there is.
    readout = loss.locator(".readout")
    expect(readout).to_have_text("step 90 · training 10 · reference –")
    expect(gap.locator(".readout")).to_have_text(re.compile("^step 60 · gap 25 %$"))
    loss.locator(".plot").focus()
    page.keyboard.press("Home")
    expect(readout).to_have_text("step 1 · training 10 · reference 8")
    expect(gap.locator(".readout")).to_have_text("step 1 · gap 25 %")
    node.finish(job)


def test_what_is_not_finite_is_a_gap_and_no_value(
    played_service: Service, node: PlayedNode, page: Any
) -> None:
    """A line across it, or the value before it told in its place, would hide the trouble."""
    job = node.take("went-bad", training={"steps": 100})
    bad = {*range(40, 61), *range(91, 101)}
    node.send(
        job,
        [
            {
                "type": "metrics",
                "step": step,
                "tokens": 8 * step,
                "values": {
                    "train/loss": 5.0 + step / 100,
                    # One good step between bad ones stands alone.
                    "train/grad_norm": "NaN" if step in bad and step != 50 else 2.0 + step / 100,
                },
            }
            for step in range(1, 101)
        ],
    )
    node.beat()
    sign_in(page, played_service.stack.url, played_service.stack.api_key, f"/jobs/{job.id}")
    norm = chart_of(page, "Gradient norm")
    expect(norm).to_contain_text("30 points not finite")
    expect(norm.locator(".readout")).to_contain_text("step 100 · norm not finite")
    expect(page.locator(".tile").filter(has_text="Loss")).to_contain_text("6")
    played_service.until(lambda: drawn(norm, 0.1, 0.3).opaque is not None, "it is drawn")
    for first, last in ((0.42, 0.47), (0.53, 0.58), (0.93, 0.99)):
        assert drawn(norm, first, last).opaque is None, "no line where there was no value"
    assert drawn(norm, 0.48, 0.51).opaque is not None, "the step between is there"
    assert drawn(norm, 0.65, 0.85).filled > 0.85
    # The loss was finite all along.
    loss = chart_of(page, "Loss")
    assert drawn(loss, 0.42, 0.58).filled > 0.85
    expect(loss).not_to_contain_text("not finite")
