"""Whatever is sent, sent again, restarted and compacted: what is read is what was recorded."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from octrain_api.metrics import compaction, rollups

VALUES = st.integers(-3, 3).map(float) | st.sampled_from(
    [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7e308, -1.7e308, 0.1]
)
VALUE_SETS = st.fixed_dictionaries({"a": VALUES}) | st.dictionaries(
    st.sampled_from(["a", "b/c", "b/d"]), VALUES, min_size=1
)
STEPS = st.lists(
    st.tuples(st.integers(-2, 6), VALUE_SETS, st.integers(0, 99)), min_size=1, max_size=30
)
OPERATIONS = st.lists(
    st.tuples(st.just("send"), STEPS, st.sampled_from([0, 0, 1, 5, 100]))
    | st.tuples(st.just("restart"), st.integers(0, 60), st.none())
    | st.tuples(st.just("compact"), st.none(), st.none()),
    min_size=1,
    max_size=12,
)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that a few records make all that large runs do."""
    monkeypatch.setattr(compaction, "FAN_IN", 2)
    monkeypatch.setattr(compaction, "MAX_ROWS", 40)
    monkeypatch.setattr(compaction, "MAX_CELLS", 100)
    monkeypatch.setattr(rollups, "LEVELS", (4, 16, 64))
    monkeypatch.setattr(rollups, "MIN_DENSITY", 2)


class Loop:
    """The service in a loop of its own, for tests that Hypothesis drives."""

    def __init__(self, make_job: Any, service: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.node = self.run(self._client(service, "operations", "node"))
        self.user = self.run(self._client(service, "ada", "jobs:read"))
        self._make, self._service = make_job, service

    async def _client(self, service: Any, owner: str, scope: str) -> Any:
        return service.client(await service.key(owner, scope))

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def job(self) -> Any:
        job = self._make(self._service, self.node, self.user)
        self.run(job.create())
        return job


@pytest.fixture
def world(
    copied_url: str, redis_url: str, tmp_path: Path, make_service: Any, job_class: Any
) -> Iterator[Loop]:
    loop = asyncio.new_event_loop()
    running = make_service(copied_url, redis_url, tmp_path)
    service = loop.run_until_complete(anext(running))
    yield Loop(job_class, service, loop)
    loop.run_until_complete(running.aclose())
    loop.close()


async def play(job: Any, operations: list[Any], metric: Any) -> None:
    step, seconds, tokens = 0, 1000.0, 0
    for kind, value, overlap in operations:
        if kind == "compact":
            await job.compact()
        elif kind == "restart":
            await job.restart()
            step = value
        else:
            records = []
            for forward, values, more in value:
                step = max(step + forward, 0)
                seconds, tokens = seconds + 0.5, tokens + more
                records.append(metric(step, values, seconds, tokens))
            await job.send(*records, overlap=overlap)


def assert_points(found: Any, expected: Any, helpers: Any) -> None:
    read = {(s["name"], s["attempt"]): s["points"] for s in found["series"]}
    assert read.keys() == expected.keys()
    for key, points in read.items():
        assert [x for x, _ in points] == [p[0] for p in expected[key]]
        assert all(
            helpers.same(helpers.number(v), p[1])
            for (_, v), p in zip(points, expected[key], strict=True)
        )


def assert_bucket(buckets: Any, at: int, held: list[Any], helpers: Any) -> None:
    """A bucket of an answer against the points (sorted by step) that it holds."""
    finite = [v for _, v, _, _ in held if math.isfinite(v)]
    assert buckets["count"][at] == len(held)
    assert buckets["non_finite"][at] == len(held) - len(finite)
    assert buckets["last_step"][at] == held[-1][0]
    assert helpers.same(helpers.number(buckets["last"][at]), held[-1][1])
    if not finite:
        assert buckets["min"][at] is buckets["max"][at] is buckets["mean"][at] is None
        return
    steps = {name: buckets[f"{name}_step"][at] for name in ("min", "max")}
    for name, value in (("min", min(finite)), ("max", max(finite))):
        assert buckets[name][at] == value
        assert any(s == steps[name] and v == value for s, v, _, _ in held)
    scale = max(map(abs, finite))
    mean = math.fsum(v / len(finite) for v in finite)
    assert abs(buckets["mean"][at] - mean) <= 1e-12 * scale + 1e-320


PROFILE: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    # An example is a conversation with a real database: it is shown as it was found.
    "phases": [Phase.generate],
}
EXAMPLES = st.fixed_dictionaries(
    {
        "operations": OPERATIONS,
        "asked_after": st.integers(0, 12),
        "limit": st.integers(3, 40),
        "steps": st.tuples(st.integers(0, 90), st.integers(0, 90)),
    }
)


@settings(max_examples=12, **PROFILE)
@given(EXAMPLES)
def test_what_is_read_is_what_was_recorded(
    world: Loop, small_blocks: None, helpers: Any, example: dict[str, Any]
) -> None:
    check(world, helpers, **example)


@pytest.mark.slow
@settings(max_examples=100, **PROFILE)
@given(EXAMPLES)
def test_what_is_read_is_what_was_recorded_many_times(
    world: Loop, small_blocks: None, helpers: Any, example: dict[str, Any]
) -> None:
    check(world, helpers, **example)


def check(
    world: Loop,
    helpers: Any,
    operations: list[Any],
    asked_after: int,
    limit: int,
    steps: tuple[int, int],
) -> None:
    """Play the operations, ask in every way, and compare with what was recorded."""
    job = world.job()
    world.run(play(job, operations[:asked_after], helpers.metric))
    cursor = world.run(job.get())["cursor"]
    before = {key: len(points) for key, points in job.points.items()}
    world.run(play(job, operations[asked_after:], helpers.metric))
    expected = job.joined()
    assert_points(world.run(job.get()), expected, helpers)

    # Only what is new since an earlier answer.
    fresh = {
        key: sorted(points[before.get(key, 0) :], key=lambda p: p[0])
        for key, points in job.points.items()
    }
    for attempt in range(1, job.attempt + 1):
        wanted = {key: points for key, points in fresh.items() if key[1] == attempt and points}
        answer = world.run(job.get(since=cursor, attempt=attempt))
        assert_points(answer, wanted, helpers)

    # What live streams tell of the batches, in two parts.
    batches = world.run(job.batches(0, cursor)) + world.run(job.batches(cursor, 10**6))
    assert [(b.seq, b.name) for b in batches] == sorted((b.seq, b.name) for b in batches)
    for key, points in job.points.items():
        told = [
            point
            for b in batches
            if (b.name, b.attempt) == key
            for point in zip(b.steps, b.values, strict=True)
        ]
        assert [step for step, _ in told] == [p[0] for p in points]
        assert all(helpers.same(v, p[1]) for (_, v), p in zip(told, points, strict=True))

    # A range of steps.
    low, high = min(steps), max(steps)
    ranged = {
        key: kept
        for key, points in expected.items()
        if (kept := [p for p in points if low <= p[0] <= high])
    }
    query = {"from_step": low, "to_step": high}
    assert_points(world.run(job.get(**query)), ranged, helpers)

    # Thinned points are points, and lose no extreme.
    for series in world.run(job.get(**query, max_points=limit))["series"]:
        points = ranged[series["name"], series["attempt"]]
        assert len(series["points"]) <= limit
        assert [x for x, _ in series["points"]] == sorted(x for x, _ in series["points"])
        for x, v in series["points"]:
            value = helpers.number(v)
            assert any(p[0] == x and (helpers.same(p[1], value) or p[1] == value) for p in points)

    # Buckets are what brute force finds.
    answer = world.run(job.get(**query, max_points=limit, form="buckets"))
    found = {(s["name"], s["attempt"]): s for s in answer["series"]}
    assert found.keys() == ranged.keys()
    for key, series in found.items():
        width, buckets = series["width"], series["buckets"]
        assert len(buckets["first_step"]) <= limit
        keys = sorted({p[0] // width for p in ranged[key]})
        assert buckets["first_step"] == [k * width for k in keys]
        for at, k in enumerate(keys):
            held = [p for p in ranged[key] if p[0] // width == k]
            assert_bucket(buckets, at, held, helpers)

    # The newest values.
    latest = {item["name"]: item for item in world.run(job.get("/metrics/latest"))["items"]}
    for name, item in latest.items():
        attempt = max(n for other, n in job.points if other == name)
        points = job.points[name, attempt]
        assert (item["attempt"], item["points"]) == (attempt, len(points))
        assert item["first_step"] == min(p[0] for p in points)
        assert item["step"] == max(p[0] for p in points)
        assert helpers.same(helpers.number(item["value"]), points[-1][1])
    assert latest.keys() == {name for name, _ in job.points}
