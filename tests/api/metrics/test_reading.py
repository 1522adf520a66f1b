"""Metrics over HTTP: names, patterns, axes, formats, several jobs, the newest values."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from typing import Any

import httpx
import pytest


async def fill(job: Any, helpers: Any) -> None:
    """Forty steps of three series, and an evaluation every ten."""
    records = []
    for step in range(1, 41):
        values = {
            "train/loss": 10.0 / step,
            "fp8/layers.0/input/amax": float(step),
            "fp8/layers.1/weight/amax": -float(step),
        }
        records.append(helpers.metric(step, values, 1000.0 + step, 64 * step))
        if step % 10 == 0:
            records.append(
                helpers.metric(step, {"eval/loss": 1.0 / step}, 1000.5 + step, 64 * step)
            )
    await job.send(*records)


def names(answer: Any) -> list[str]:
    return [series["name"] for series in answer["series"]]


async def test_names_and_patterns(job: Any, helpers: Any) -> None:
    await fill(job, helpers)
    every = ["eval/loss", "fp8/layers.0/input/amax", "fp8/layers.1/weight/amax", "train/loss"]
    assert names(await job.get()) == every
    assert names(await job.get(name=["train/loss", "eval/loss", "none"])) == every[::3]
    assert names(await job.get(keys="train/loss,eval/loss")) == every[::3]
    assert names(await job.get(name="fp8/*/amax")) == every[1:3]
    assert names(await job.get(name="fp8/layers.[1-9]/*")) == every[2:3]
    assert names(await job.get(name="*/loss", keys="fp8/layers.0*")) == [*every[:2], every[3]]
    assert names(await job.get(name="nothing")) == []
    assert names(await job.get(keys="")) == []


async def test_a_name_that_looks_like_a_pattern_is_itself(job: Any, helpers: Any) -> None:
    await job.send(helpers.metric(1, {"a[0]": 1.0, "a0": 2.0}))
    assert names(await job.get(name="a[0]")) == ["a0", "a[0]"]
    assert names(await job.get(name="a0")) == ["a0"]


async def test_the_axis_may_be_time_or_tokens(job: Any, helpers: Any) -> None:
    await fill(job, helpers)
    (series,) = (await job.get(name="eval/loss", x="time"))["series"]
    assert series["points"] == [[1000.5 + step, 1.0 / step] for step in (10, 20, 30, 40)]
    (series,) = (await job.get(name="eval/loss", x="tokens", from_step=20))["series"]
    assert series["points"] == [[64 * step, 1.0 / step] for step in (20, 30, 40)]
    (series,) = (await job.get(name="train/loss", form="buckets", max_points=3))["series"]
    assert series["width"] == 16
    assert series["buckets"]["time"] == [1015.0, 1031.0, 1040.0]
    assert series["buckets"]["tokens"] == [64 * 15, 64 * 31, 64 * 40]
    # What nobody said is not made up.
    bare = {"type": "metrics", "step": 41, "values": {"eval/loss": 0.5}}
    answer = await job.post(len(job.records) + 1, [bare])
    assert answer.status_code == 200
    (series,) = (await job.get(name="eval/loss", x="tokens", from_step=41))["series"]
    assert series["points"] == [[None, 0.5]]


async def test_what_is_new_since_an_answer(job: Any, helpers: Any) -> None:
    assert await job.get() == {"series": [], "cursor": 0}
    await fill(job, helpers)
    cursor = (await job.get())["cursor"]
    assert names(await job.get(since=cursor)) == []
    await job.compact()
    await job.send(helpers.metric(41, {"train/loss": 0.2}))
    answer = await job.get(since=cursor, max_points=100)
    assert answer["cursor"] > cursor
    assert [(s["name"], s["points"]) for s in answer["series"]] == [("train/loss", [[41, 0.2]])]


async def test_csv_and_arrow_hold_what_json_does(job: Any, helpers: Any) -> None:
    await job.send(
        helpers.metric(1, {"a": 0.1, 'b,"c': math.nan}, 2.5, 7),
        helpers.metric(2, {"a": -math.inf}, 3.5, 9),
    )
    expected = [
        [job.id, "a", 1, 1, 0.1, 2.5, 7],
        [job.id, "a", 1, 2, -math.inf, 3.5, 9],
        [job.id, 'b,"c', 1, 1, math.nan, 2.5, 7],
    ]
    path = f"/jobs/{job.id}/metrics"
    for asked in ({"params": {"format": "csv"}}, {"headers": {"Accept": "text/csv"}}):
        answer = await job.user.get(path, **asked)
        assert answer.headers["content-type"] == "text/csv; charset=utf-8"
        header, *rows = csv.reader(io.StringIO(answer.text))
        assert header == ["job_id", "name", "attempt", "step", "value", "time", "tokens"]
        assert rows == [
            [str(v) for v in row[:4]] + [value, str(row[5]), str(row[6])]
            for row, value in zip(expected, ("0.1", "-Infinity", "NaN"), strict=True)
        ]
    pa = pytest.importorskip("pyarrow")
    answer = await job.user.get(path, params={"format": "arrow"})
    table = pa.ipc.open_stream(answer.content).read_all()
    assert table.column_names == header
    rows = [list(row.values()) for row in table.to_pylist()]
    assert str(rows) == str(expected)
    answer = await job.user.get(path, params={"format": "arrow", "form": "buckets", "name": "a"})
    (row,) = pa.ipc.open_stream(answer.content).read_all().slice(1).to_pylist()
    assert (row["first_step"], row["count"], row["non_finite"], row["min"]) == (2, 1, 1, None)
    answer = await job.user.get(path, params={"format": "arrow", "name": "none"})
    assert pa.ipc.open_stream(answer.content).read_all().num_rows == 0


@pytest.mark.parametrize("form", ["points", "buckets"])
async def test_a_table_without_rows_has_the_columns_of_one_with_rows(
    job: Any, helpers: Any, form: str
) -> None:
    await fill(job, helpers)
    pa = pytest.importorskip("pyarrow")
    path = f"/jobs/{job.id}/metrics"
    headers, schemas = set(), []
    for name in ("train/loss", "none"):
        query = {"name": name, "form": form}
        answer = await job.user.get(path, params=query | {"format": "csv"})
        headers.add(answer.text.splitlines()[0])
        answer = await job.user.get(path, params=query | {"format": "arrow"})
        schemas.append(pa.ipc.open_stream(answer.content).read_all().schema)
    (header,) = headers
    assert schemas[0].names == header.split(",")
    assert schemas[0] == schemas[1]


async def test_without_pyarrow_arrow_is_refused(
    job: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    answer = await job.user.get(f"/jobs/{job.id}/metrics", params={"format": "arrow"})
    assert answer.status_code == 406
    assert "octrain[arrow]" in answer.json()["detail"]


async def test_several_jobs_in_one_call(job: Any, job_class: Any, helpers: Any) -> None:
    other = job_class(job.service, job.node, job.user)
    await other.create()
    await job.send(*(helpers.metric(step, {"a": float(step)}) for step in range(1, 100)))
    await other.send(*(helpers.metric(step, {"a": -1.0}) for step in range(500, 1000)))
    first, second = sorted([job.id, other.id])
    query: dict[str, Any] = {"job": [job.id, other.id], "form": "buckets", "max_points": 10}
    answer = await job.user.get("/metrics/query", params=query)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert [s["job_id"] for s in found["series"]] == [first, second]
    # One width and the same edges, so that curves can be laid over each other.
    assert {s["width"] for s in found["series"]} == {128}
    assert sum(sum(s["buckets"]["count"]) for s in found["series"]) == 99 + 500
    await other.send(helpers.metric(1000, {"a": 5.0}))
    since = [f"{key}:{number}" for key, number in found["cursors"].items()]
    fresh = await job.user.get("/metrics/query", params={"job": query["job"], "since": since})
    assert [(s["job_id"], s["points"]) for s in fresh.json()["series"]] == [
        (other.id, [[1000, 5.0]])
    ]
    wrong = await job.user.get("/metrics/query", params={"job": job.id, "since": "12"})
    assert (wrong.status_code, wrong.json()["errors"][0]["pointer"]) == (422, "/query/since")
    stranger = await job.service.user("eve")
    for client, jobs in ((stranger, [job.id]), (job.user, [job.id, "job_none"])):
        answer = await client.get("/metrics/query", params={"job": jobs})
        assert answer.status_code == 404


async def test_thinned_points_keep_the_spikes_of_single_steps(job: Any, helpers: Any) -> None:
    values = {step: math.sin(step) for step in range(1, 1001)}
    values |= {437: 1e9, 700: -1e9, 801: math.nan}
    await job.send(*(helpers.metric(step, {"a": value}) for step, value in values.items()))
    for compacted in (False, True):
        if compacted:
            await job.restart()
            await job.compact()
        (series,) = (await job.get(max_points=30))["series"]
        points = series["points"]
        assert len(points) <= 30
        assert all(spike in points for spike in ([437, 1e9], [700, -1e9], [801, "NaN"]))
        assert points[-1] == [1000, values[1000]]
        assert all(value == "NaN" or values[step] == value for step, value in points)


async def test_the_newest_values_page_by_name(job: Any, helpers: Any) -> None:
    values = {f"fp8/layers.{n}/amax": float(n) for n in range(7)}
    await job.send(helpers.metric(3, values), helpers.metric(5, {"train/loss": math.nan}))
    seen: list[Any] = []
    cursor = None
    while True:
        query = {"limit": 3} | ({"cursor": cursor} if cursor else {})
        page = await job.get("/metrics/latest", **query)
        assert len(page["items"]) <= 3
        seen += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert [item["name"] for item in seen] == sorted([*values, "train/loss"])
    assert seen[-1] == {
        "name": "train/loss",
        "attempt": 1,
        "step": 5,
        "value": "NaN",
        "first_step": 5,
        "points": 1,
    }
    page = await job.get("/metrics/latest", name="fp8/layers.[5-9]/*")
    assert [item["value"] for item in page["items"]] == [5.0, 6.0]
    bad = await job.user.get(f"/jobs/{job.id}/metrics/latest", params={"cursor": "!"})
    assert bad.status_code == 422
    # The job itself carries the few that lists show, without those of single layers.
    shown = (await job.user.get(f"/jobs/{job.id}")).json()["latest_metrics"]
    assert shown == {"train/loss": "NaN"}


async def test_the_job_carries_a_bounded_number_of_newest_values(job: Any, helpers: Any) -> None:
    await job.send(helpers.metric(1, {f"m{n:03}": 1.0 for n in range(300)}))
    await job.send(helpers.metric(2, {f"m{n:03}": 2.0 for n in range(300)}))
    shown = (await job.user.get(f"/jobs/{job.id}")).json()["latest_metrics"]
    assert shown == {f"m{n:03}": 2.0 for n in range(200)}


async def test_json_records_and_packed_ones_are_stored_alike(job: Any, helpers: Any) -> None:
    """Whoever has no supervisor may send plain JSON; the numbering is one."""
    await job.send(helpers.metric(1, {"a": 1.5}, 10.0, 3))
    record = {"type": "metrics", "step": 2, "time": 11.0, "tokens": 4, "values": {"a": "NaN"}}
    answer = await job.node.post(
        f"/attempts/{job.attempt_id}/telemetry",
        json={"fencing_token": 7, "first_seq": 1, "records": [record, record]},
    )
    assert answer.json()["acknowledged_seq"] == 2
    (series,) = (await job.get(x="time"))["series"]
    assert series["points"] == [[10.0, 1.5], [11.0, "NaN"]]


async def test_packed_bodies_keep_the_contract_of_the_others(job: Any, helpers: Any) -> None:
    gap = await job.post(3, [helpers.metric(1, {"a": 1.0})])
    assert (gap.status_code, gap.json()["expected_seq"]) == (409, 1)
    path = f"/attempts/{job.attempt_id}/telemetry"
    headers = {"Content-Type": "application/vnd.octrain.telemetry.v1"}
    bad = await job.node.post(path, content=b"OCT1 and no more", headers=headers)
    assert bad.status_code == 422
    assert bad.headers["content-type"] == "application/problem+json"
    broken = await job.node.post(path, content=b"{", headers={"Content-Type": "application/json"})
    assert broken.status_code == 422
    mixed = [
        {"type": "phase", "phase": "training"},
        helpers.metric(4, {"a": 1.0}),
        {"type": "nonsense"},
        {"type": "metrics", "step": 5, "values": {"a": [1]}},
        {"type": "log", "stream": "stdout", "time": 1.0, "text": "hello"},
    ]
    answer = await job.node.post(path, content=helpers.pack(7, 1, mixed), headers=headers)
    assert answer.json()["acknowledged_seq"] == 5
    events = (await job.user.get(f"/jobs/{job.id}/events")).json()
    refused = [e for e in events["items"] if e["kind"] == "record_refused"]
    assert [e["data"]["seq"] for e in refused] == [3, 4]
    stale = await job.node.post(path, content=helpers.pack(6, 6, mixed), headers=headers)
    assert stale.status_code == 409
    (series,) = (await job.get())["series"]
    assert series["points"] == [[4, 1.0]]


async def test_records_that_a_node_has_lost_take_their_numbers_and_nothing_else(
    job: Any, helpers: Any
) -> None:
    told = {"type": "event", "kind": "spool_damaged", "message": "9 bytes", "data": {"bytes": 9}}
    lost = {"type": "lost"}
    before = (await job.user.get(f"/jobs/{job.id}")).json()
    path = f"/attempts/{job.attempt_id}/telemetry"
    headers = {"Content-Type": "application/vnd.octrain.telemetry.v1"}
    packed = helpers.pack(7, 1, [lost, lost, told])
    answer = await job.node.post(path, content=packed, headers=headers)
    assert answer.json()["acknowledged_seq"] == 3
    events = (await job.user.get(f"/jobs/{job.id}/events")).json()["items"]
    assert [e["kind"] for e in events if e["kind"] in ("spool_damaged", "record_refused")] == [
        "spool_damaged"
    ]
    after = (await job.user.get(f"/jobs/{job.id}")).json()
    assert (after["status"], after["progress"]) == (before["status"], before["progress"])


async def test_the_description_tells_both_bodies_and_all_answers(lone_service: Any) -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=lone_service.app), base_url="http://octrain"
    ) as client:
        paths = json.loads((await client.get("/openapi.json")).text)["paths"]
    body = paths["/v1/attempts/{attempt_id}/telemetry"]["post"]["requestBody"]["content"]
    assert set(body) == {"application/json", "application/vnd.octrain.telemetry.v1"}
    answer = paths["/v1/jobs/{job_id}/metrics"]["get"]["responses"]["200"]["content"]
    assert set(answer) == {
        "application/json",
        "text/csv",
        "application/vnd.apache.arrow.stream",
    }
