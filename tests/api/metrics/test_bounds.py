"""What one answer of metrics may take: bounds, large answers in threads and in pieces."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest

from octrain_api.metrics import catalogue, endpoints, lines, lookup, reading, render
from octrain_api.metrics.schemas import SeriesList


async def fill(job: Any, helpers: Any) -> None:
    """Forty steps of four series."""
    names = ("eval/loss", "fp8/layers.0/input/amax", "fp8/layers.1/weight/amax", "train/loss")
    await job.send(
        *(
            helpers.metric(step, {name: n - 10.0 / step for n, name in enumerate(names)})
            for step in range(1, 41)
        )
    )


def names(answer: Any) -> list[str]:
    return [series["name"] for series in answer["series"]]


async def test_more_than_one_answer_holds_is_refused(
    job: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(job, helpers)
    monkeypatch.setattr(reading, "MAX_CELLS", 100)
    answer = await job.user.get(f"/jobs/{job.id}/metrics")
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["code"] == "too_many_points"
    assert names(await job.get(name="eval/loss")) == ["eval/loss"]


async def test_more_buckets_than_one_answer_holds_are_refused_before_they_are_read(
    job: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await job.send(*(helpers.metric(n, {"a": 1.0, "b": 2.0}) for n in range(64 * 20)))
    await job.restart()
    await job.compact()
    read: list[int] = []
    buckets = lookup.MetricLookup.buckets

    async def noted(self: Any, level: int, *of: Any) -> Any:
        read.append(level)
        return await buckets(self, level, *of)

    monkeypatch.setattr(lookup.MetricLookup, "buckets", noted)
    query = {"form": "buckets", "max_points": 20}
    monkeypatch.setattr(reading, "MAX_CELLS", 39)
    answer = await job.user.get(f"/jobs/{job.id}/metrics", params=query)
    assert answer.status_code == 422
    assert "40 buckets" in answer.json()["detail"]
    assert answer.json()["errors"][0]["code"] == "too_many_points"
    assert read == []
    monkeypatch.setattr(reading, "MAX_CELLS", 40)
    found = (await job.get(**query))["series"]
    assert [one["buckets"]["count"] for one in found] == [[64] * 20] * 2
    assert read == [64]


async def test_the_last_step_there_is_can_be_read_in_any_form(job: Any) -> None:
    """A bucket of all steps up to it would be wider than 64 bits hold."""
    last = 2**62
    records = [
        {"seq": n, "type": "metrics", "step": step, "values": {"a": float(n)}}
        for n, step in enumerate((5, 6, 7, last), 1)
    ]
    answer = await job.node.post(
        f"/attempts/{job.attempt_id}/telemetry",
        json={"fencing_token": 7, "first_seq": 1, "records": records},
    )
    assert answer.status_code == 200, answer.text
    for end in (False, True):
        if end:
            await job.restart()
            await job.compact()
        (one,) = (await job.get())["series"]
        assert one["points"] == [[5, 1.0], [6, 2.0], [7, 3.0], [last, 4.0]]
        (one,) = (await job.get(max_points=3))["series"]
        assert one["points"] == [[5, 1.0], [7, 3.0], [last, 4.0]]
        (one,) = (await job.get(form="buckets", max_points=3))["series"]
        assert one["buckets"]["last_step"] == [7, last]


async def test_patterns_are_bounded_and_names_are_not(
    job: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pattern is held against every name: thousands of them kept the process for seconds."""
    await fill(job, helpers)
    path = f"/jobs/{job.id}/metrics"
    many = {"keys": ",".join(f"*{n}" for n in range(catalogue.MOST_PATTERNS + 1))}
    several = {"job": job.id, "keys": many["keys"]}
    for asked in (
        await job.user.get(path, params=many),
        await job.user.get("/metrics/query", params=several),
        await job.user.get(f"{path}/latest", params={"name": many["keys"].split(",")}),
    ):
        assert asked.status_code == 422
        (error,) = asked.json()["errors"]
        assert (error["pointer"], error["code"]) == ("/query/name", "too_many_patterns")
    some = ",".join(f"*{n}" for n in range(catalogue.MOST_PATTERNS - 1))
    plain = ",".join(f"none{n}" for n in range(500))
    keys = f"{some},*loss,train/loss,{plain}"
    assert names(await job.get(keys=keys)) == ["eval/loss", "train/loss"]
    # The same where they are compared in a thread.
    matching: list[bool] = []
    match = catalogue._matching

    def noted(*of: Any) -> Any:
        matching.append(threading.current_thread() is threading.main_thread())
        return match(*of)

    monkeypatch.setattr(catalogue, "_matching", noted)
    assert names(await job.get(keys=keys)) == ["eval/loss", "train/loss"]
    monkeypatch.setattr(catalogue, "_COMPARED_AT_ONCE", 100)
    assert names(await job.get(keys=keys)) == ["eval/loss", "train/loss"]
    assert matching == [True, False]


@pytest.mark.parametrize("number", ["9" * 5000, str(2**62 + 1), "\u0663", "+1", "", "1.0"])
async def test_what_is_no_cursor_of_a_job_is_refused(job: Any, number: str) -> None:
    query = {"job": job.id, "since": f"{job.id}:{number}"}
    answer = await job.user.get("/metrics/query", params=query)
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert (error["pointer"], error["code"]) == ("/query/since", "cursor")


async def test_a_large_answer_is_made_while_others_are_served(
    job: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of series of a running job took seconds, in which nobody else was served."""
    names = [f"fp8/layers.{n}/amax" for n in range(300)]
    for step in range(8):
        await job.send(helpers.metric(step, {name: float(step) for name in names}))
    makers: list[bool] = []
    lines = reading.Found.lines

    def noted(self: Any) -> Any:
        makers.append(threading.current_thread() is threading.main_thread())
        return lines(self)

    monkeypatch.setattr(reading.Found, "lines", noted)
    found = (await job.get(form="buckets"))["series"]
    assert [one["name"] for one in found] == sorted(names)
    assert {tuple(one["buckets"]["last"]) for one in found} == {tuple(map(float, range(8)))}
    await job.get(name=names[7])
    assert makers == [False, True]


async def test_many_large_answers_keep_neither_nodes_nor_curves_waiting(
    job: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the threads of all, a dashboard's readers held up what nodes had sent."""
    await fill(job, helpers)
    lock, go_on = threading.Lock(), threading.Event()
    at_work: list[int] = [0, 0]
    lines = reading.Found.lines

    def slow(self: Any) -> Any:
        with lock:
            at_work[0] += 1
            at_work[1] = max(at_work)
        assert go_on.wait(30)
        with lock:
            at_work[0] -= 1
        return lines(self)

    monkeypatch.setattr(reading.Found, "lines", slow)
    monkeypatch.setattr(endpoints, "_EFFORT_AT_ONCE", 0)
    # More than the loop's own pool has threads.
    readers = [asyncio.create_task(job.get()) for _ in range(33)]
    try:
        async with asyncio.timeout(20):
            while at_work[0] < 2:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(len, b"")
            await job.send(helpers.metric(50, {"train/loss": 0.5}))
        assert not any(reader.done() for reader in readers)
    finally:
        go_on.set()
        answers = await asyncio.gather(*readers)
    assert at_work == [0, 2]
    assert {len(answer["series"]) for answer in answers} == {4}


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"x": "time"},
        {"form": "buckets", "max_points": 9},
        {"max_points": 9},
        {"format": "csv"},
        {"format": "arrow"},
        {"name": "none"},
    ],
    ids=str,
)
async def test_an_answer_in_pieces_is_the_same_answer(
    job: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch, query: dict[str, Any]
) -> None:
    await fill(job, helpers)
    await job.send(helpers.metric(50, {"train/loss": math.nan, "eval/loss": -math.inf}))
    path = f"/jobs/{job.id}/metrics"
    whole = await job.user.get(path, params=query)
    monkeypatch.setattr(render, "_PIECE", 3)
    monkeypatch.setattr(endpoints, "_CHUNK", 7)
    pieces = await job.user.get(path, params=query)
    assert pieces.content == whole.content
    assert pieces.headers["content-length"] == str(len(whole.content))
    assert pieces.headers["content-type"] == whole.headers["content-type"]
    if "format" not in query:
        shape = SeriesList.model_validate_json(whole.content)
        assert len(shape.series) == (0 if "name" in query else 4)


async def test_series_are_the_same_however_many_are_read_at_once(
    job: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense ones, sparse ones and odd values; points, buckets and both, over two attempts."""
    names = [f"m{n}" for n in range(12)]

    def values(step: int) -> dict[str, float]:
        odd = {0: math.nan, 1: math.inf, 2: -math.inf}
        return {
            name: odd.get((step + n) % 97, math.sin(step * n))
            for n, name in enumerate(names)
            if step % (n + 1) == 0
        }

    def records(*steps: int) -> list[Any]:
        return [helpers.metric(s, values(s)) for s in range(*steps) if values(s)]

    await job.send(*records(1, 900))
    await job.restart()
    await job.compact()
    await job.send(*records(700, 800), *records(800, 1000))
    queries: list[dict[str, Any]] = [
        {"form": "buckets", "max_points": 6},
        {"form": "buckets", "max_points": 500, "from_step": 333, "to_step": 950},
        {"max_points": 90},
        {"from_step": 650, "to_step": 720},
        {"since": 1},
    ]

    def rounded(answer: Any) -> Any:
        """Sums are not exact to the last bit, whose order depends on what is summed beside them."""
        for one in answer["series"]:
            if "buckets" in one:
                means = one["buckets"]["mean"]
                one["buckets"]["mean"] = [m if m is None else round(m, 12) for m in means]
        return answer["series"]

    for gone in (False, True):
        if gone:
            await job.service.sql("UPDATE metric_blocks SET data = NULL")
        for query in queries:
            together = rounded(await job.get(**query))
            with monkeypatch.context() as patched:
                patched.setattr(lines, "_CELLS", 1)
                assert together == rounded(await job.get(**query))
            assert {one["attempt"] for one in together} == ({2} if "since" in query else {1, 2})
