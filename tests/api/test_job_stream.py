"""The live stream of a job: complete, resumable anywhere, chosen, bounded, and never in the way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octrain_api.metrics.compaction import Compactor
from octrain_api.metrics.retention import sweep
from octrain_api.settings import MetricSettings
from octrain_api.streaming.messages import Choice, Kind, Message
from octrain_api.streaming.ring import Ring
from tests.api.live import Listening, Told, listening, parse

TRANSIENT = ("progress", "end")


def metrics(step: int, **values: Any) -> dict[str, Any]:
    return {"type": "metrics", "step": step, "values": values}


def log(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "log", "stream": "stdout", "time": 1.5, "text": text} | more


@pytest.fixture
async def key(lone_service: Any) -> str:
    return str(await lone_service.key("ada", "jobs:read"))


def kinds(told: list[Told]) -> list[str]:
    return [one.event for one in told]


async def test_a_stream_resumes_anywhere_and_repeats_nothing(
    worker: Any, user: Any, running_job: str
) -> None:
    await worker.telemetry(3, *(metrics(s, x=float(s)) for s in (2, 3)), log("a"), log("b"))
    await worker.telemetry(7, metrics(4, x="NaN"), {"type": "progress", "step": 4})
    await worker.finish("succeeded", "completed", step=4)
    whole = parse((await user.get(f"/jobs/{running_job}/stream")).text)
    ids = [int(one.id) for one in whole if one.id is not None]
    assert ids == list(range(1, ids[-1] + 1)), "every number of the job's line is told"
    assert whole[-1].event == "end"
    assert whole[-1].data["status"] == "succeeded"
    statuses = [one.data["status"] for one in whole if one.event == "status"]
    assert statuses == ["queued", "starting", "running", "succeeded"]
    points = [one.data["points"] for one in whole if one.event == "metrics"]
    assert points == [
        {"train/loss": [[1, 5.5]]},
        {"x": [[2, 2.0], [3, 3.0]]},
        {"x": [[4, "NaN"]]},
    ]
    assert [one.data["text"] for one in whole if one.event == "log"] == ["a", "b"]
    numbered = [one for one in whole if one.event not in TRANSIENT]
    for last in ids:
        header = {"Last-Event-ID": str(last)}
        rest = parse((await user.get(f"/jobs/{running_job}/stream", headers=header)).text)
        position = next(i for i, one in enumerate(numbered) if one.id == str(last))
        assert [one for one in rest if one.event not in TRANSIENT] == numbered[position + 1 :]
    bad = await user.get(f"/jobs/{running_job}/stream", headers={"Last-Event-ID": "x"})
    assert bad.status_code == 422


async def test_a_live_stream_follows_keeps_alive_and_ends(
    worker: Any, running_job: str, lone_service: Any, key: str
) -> None:
    async with listening(lone_service.app, f"/v1/jobs/{running_job}/stream", key) as client:
        await client.until_text(": keep-alive")
        await worker.telemetry(3, metrics(2, z=1.0), log("hello"))
        await client.until(lambda told: "log" in kinds(told))
        await worker.finish("succeeded", "completed")
        told = await client.end()
    assert [one.data["values"] for one in told if one.event == "metrics"] == [
        {"train/loss": 5.5},
        {"z": 1.0},
    ]
    assert told[-1].event == "end"
    context = lone_service.app.state.context
    assert context.streams.open_streams == 0
    assert not context.listener._waiting


async def test_what_a_reader_chose(worker: Any, user: Any, running_job: str) -> None:
    await worker.telemetry(
        3,
        metrics(2, **{"fp8/layers.0/weight/amax": 1.0, "train/loss": 2.0, "perf/x": 3.0}),
        log("line"),
        {"type": "event", "kind": "note", "message": "m"},
    )
    await worker.finish("succeeded", "completed")
    base = f"/jobs/{running_job}/stream"

    async def told(query: str) -> list[Told]:
        answer = await user.get(base + query)
        assert answer.status_code == 200, answer.text
        return parse(answer.text)

    assert set(kinds(await told("?include=status"))) == {"status", "progress", "end"}
    assert set(kinds(await told("?include=events"))) == {"event", "end"}
    assert set(kinds(await told("?include=metrics,logs"))) == {"metrics", "log", "end"}
    assert set(kinds(await told("?include=metrics&include=logs"))) == {"metrics", "log", "end"}
    some = await told("?include=metrics&metrics=train/*,fp8/*amax")
    assert [list(one.data["points"]) for one in some if one.event == "metrics"] == [
        ["train/loss"],
        ["fp8/layers.0/weight/amax", "train/loss"],
    ]
    none = await told("?include=metrics&metrics=nothing*")
    assert kinds(none) == ["end"]
    for query in ("?include=everything", "?include=", "?metrics=" + "a," * 101 + "b"):
        assert (await user.get(base + query)).status_code == (
            422 if "metrics=a,a" not in query else 200
        ), query


async def test_a_number_that_cannot_be_followed_resets(
    worker: Any, user: Any, running_job: str, lone_service: Any
) -> None:
    await worker.telemetry(3, *(metrics(s, x=1.0) for s in range(3)))
    await worker.finish("succeeded", "completed")
    base = f"/jobs/{running_job}/stream"
    newest = (await user.get(f"/jobs/{running_job}")).json()["last_event"]
    future = parse((await user.get(f"{base}?after={newest + 5}")).text)
    assert [(one.event, one.id) for one in future if one.event not in TRANSIENT] == [
        ("reset", str(newest))
    ]
    # Retention has taken batches up to number 4.
    await lone_service.sql("UPDATE jobs SET stream_floor = 4 WHERE id = :job", job=running_job)
    old = parse((await user.get(base, headers={"Last-Event-ID": "3"})).text)
    assert [one.event for one in old if one.event not in TRANSIENT] == ["reset"]
    assert old[0].data["last_event"] == newest
    fit = parse((await user.get(base, headers={"Last-Event-ID": "4"})).text)
    assert "reset" not in kinds(fit)
    assert [one.id for one in fit if one.id] == [str(n) for n in range(5, newest + 1)]
    fresh = parse((await user.get(base)).text)
    assert "reset" not in kinds(fresh)


@pytest.mark.parametrize(
    "settings", [{"raw_days": 1}, {"raw_max_bytes": 1}, {"rollup_days": 1}], ids=str
)
async def test_what_retention_takes_resets_who_would_have_needed_it(
    worker: Any, user: Any, running_job: str, lone_service: Any, settings: dict[str, int]
) -> None:
    await worker.telemetry(3, *(metrics(s, x=1.0) for s in range(3)), log("line"))
    database = lone_service.database
    compactor, blocks = Compactor(database), 0
    while await compactor.merge_next(running_job, 1, ended=True):
        blocks += 1
    await lone_service.sql("UPDATE metric_blocks SET created_at = now() - interval '2 days'")
    assert await sweep(database, MetricSettings(**settings)) == blocks > 0
    await worker.finish("succeeded", "completed")
    stored = await lone_service.sql("SELECT stream_floor FROM jobs")
    newest_metrics = stored[0].stream_floor
    base = f"/jobs/{running_job}/stream"
    old = parse((await user.get(base, headers={"Last-Event-ID": str(newest_metrics - 1)})).text)
    assert "reset" in kinds(old)
    fit = parse((await user.get(base, headers={"Last-Event-ID": str(newest_metrics)})).text)
    assert [one.event for one in fit if one.id] == ["log", "status"]
    whole = parse((await user.get(base)).text)
    assert "metrics" not in kinds(whole)
    assert "log" in kinds(whole)


async def test_a_stream_has_an_end_of_its_own(
    running_job: str, lone_service: Any, key: str
) -> None:
    path = f"/v1/jobs/{running_job}/stream?max_seconds=0.2"
    async with listening(lone_service.app, path, key) as client:
        told = await client.end()
    assert told[-1].event == "reconnect"
    last = [one.id for one in told if one.id][-1]
    assert told[-1].data == {"after": last}


async def test_a_reader_that_falls_behind_loses_metrics_alone(
    worker: Any, user: Any, running_job: str, lone_service: Any, key: str, monkeypatch: Any
) -> None:
    """One that takes nothing while more comes than the ring holds."""
    monkeypatch.setattr("octrain_api.streaming.ring.Ring.__init__.__kwdefaults__", _SMALL)
    path = f"/v1/jobs/{running_job}/stream"
    async with (
        listening(lone_service.app, path, key) as slow,
        listening(lone_service.app, path, key) as quick,
    ):
        await slow.until(lambda told: "progress" in kinds(told))
        slow.taking.clear()
        seq = 3
        for step in range(2, 42):
            records = [
                metrics(step, x=float(step)),
                log(f"line {step}"),
                {"type": "event", "kind": "note", "message": f"note {step}"},
            ]
            assert (await worker.telemetry(seq, *records)).status_code == 200
            seq += len(records)
            await quick.until(lambda told, n=step: any(f"line {n}" in str(one) for one in told))
        slow.taking.set()
        await worker.finish("succeeded", "completed")
        told, whole = await slow.end(), await quick.end()
    assert "gap" not in kinds(whole)
    gaps = [one.data for one in told if one.event == "gap"]
    assert gaps
    assert all(gap["kinds"] == ["metrics"] for gap in gaps)

    def of(told: list[Told], *events: str) -> list[Told]:
        return [one for one in told if one.event in events]

    for event in ("status", "event", "log"):
        assert of(told, event) == of(whole, event), "these are never lost"
    ids = [int(one.id) for one in told if one.id]
    assert ids == sorted(set(ids))
    missing = {int(one.id) for one in of(whole, "metrics")} - {
        int(one.id) for one in of(told, "metrics")
    }
    assert missing
    covered = [range(int(gap["after"]) + 1, int(gap["until"]) + 1) for gap in gaps]
    assert all(any(number in part for part in covered) for number in missing)
    # What was left out is got by coming back from before the gap.
    again = parse((await user.get(f"{path[3:]}?after={gaps[0]['after']}")).text)
    assert missing <= {int(one.id) for one in of(again, "metrics")}


_SMALL = {"max_messages": 20, "max_bytes": 1 << 20}


async def test_readers_share_one_feed_and_hold_no_connection(
    worker: Any, running_job: str, lone_service: Any, key: str
) -> None:
    context = lone_service.app.state.context
    path = f"/v1/jobs/{running_job}/stream"
    async with _many(lone_service.app, path, key, 60) as clients:
        for client in clients:
            await client.until(lambda told: "progress" in kinds(told))
        assert len(context.streams._parts) == 1
        assert context.database.engine.pool.checkedout() == 0
        await worker.telemetry(3, log("to all"))
        for client in clients:
            await client.until(lambda told: "log" in kinds(told))
    assert context.streams._parts == {}


class _many:
    """Several open streams."""

    def __init__(self, app: Any, path: str, key: str, count: int) -> None:
        self._all = [listening(app, path, key) for _ in range(count)]

    async def __aenter__(self) -> list[Listening]:
        return list(await asyncio.gather(*(one.__aenter__() for one in self._all)))

    async def __aexit__(self, *error: Any) -> None:
        await asyncio.gather(*(one.__aexit__(*error) for one in self._all))


async def test_a_revoked_key_ends_its_streams(running_job: str, lone_service: Any) -> None:
    admin = lone_service.client(await lone_service.key("root", "admin"))
    body = {"name": "n", "owner": "ada", "scopes": ["jobs:read"]}
    made = (await admin.post("/keys", json=body)).json()
    path = f"/v1/jobs/{running_job}/stream"
    async with listening(lone_service.app, path, made["key"]) as client:
        await client.until(lambda told: "progress" in kinds(told))
        await admin.delete(f"/keys/{made['id']}")
        told = await client.end()
    assert "end" not in kinds(told)


async def test_streams_end_with_the_process(running_job: str, lone_service: Any, key: str) -> None:
    async with (
        listening(lone_service.app, f"/v1/jobs/{running_job}/stream", key) as one,
        listening(lone_service.app, "/v1/events/stream", key) as other,
    ):
        await one.until(lambda told: "progress" in kinds(told))
        await other.until(lambda told: "begin" in kinds(told))
        lone_service.app.state.context.listener.close()
        await one.end()
        await other.end()


async def test_a_stream_goes_on_when_the_database_has_been_away(
    worker: Any, running_job: str, lone_service: Any, key: str
) -> None:
    """Every connection is cut, LISTEN's too, and what came meanwhile is told all the same."""
    async with listening(lone_service.app, f"/v1/jobs/{running_job}/stream", key) as client:
        await client.until(lambda told: "progress" in kinds(told))
        await lone_service.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        async with asyncio.timeout(60):
            # A request may still get one of the connections that were cut: its node sends again.
            while (await worker.telemetry(3, log("after"))).status_code != 200:
                await asyncio.sleep(0.05)
        await client.until(lambda told: "log" in kinds(told))


async def test_no_more_streams_than_allowed(
    running_job: str, lone_service: Any, key: str, user: Any
) -> None:
    context = lone_service.app.state.context
    path = f"/v1/jobs/{running_job}/stream"
    context.settings.http.stream_most = 1
    async with listening(lone_service.app, path, key) as client:
        await client.until(lambda told: "progress" in kinds(told))
        refused = await user.get(f"{path[3:]}?max_seconds=1")
        assert (refused.status_code, refused.json()["type"]) == (503, "/problems/too-many-streams")
        assert refused.headers["retry-after"]


async def test_streams_of_one_key_share_a_look_at_it(lone_service: Any) -> None:
    streams = lone_service.app.state.context.streams
    reads: list[asyncio.Event] = []

    async def read() -> bool:
        reads.append(asyncio.Event())
        await reads[-1].wait()
        return len(reads) == 1

    async def ask() -> bool:
        return bool(await streams.still_holds("key", read))

    first = [asyncio.create_task(ask()) for _ in range(50)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    # A change that is told makes what is being read worthless for those who come after it.
    streams._keys_changed()
    second = [asyncio.create_task(ask()) for _ in range(50)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(reads) == 2
    reads[0].set()
    assert await asyncio.gather(*first) == [False] * 50
    reads[1].set()
    assert await asyncio.gather(*second) == [False] * 50
    assert streams._checks == {}


def test_a_ring_keeps_the_newest_within_its_bounds() -> None:
    everything = Choice(frozenset(Kind))
    ring: Ring[int] = Ring(10, max_messages=8, max_bytes=1000)
    assert (ring.floor, ring.head, ring.next_index) == (10, 10, 0)
    for position in range(11, 41):
        ring.append([Message(position, Kind.EVENTS, b"%d," % position)], position)
        first = ring.index_after(ring.floor)
        kept = ring.take(first, 10**6)
        assert kept is not None
        assert [one.position for one in kept] == list(range(ring.floor + 1, position + 1))
        assert 1 <= len(kept) <= 8
    assert ring.take(0, 10**6) is None, "what has left is not given"
    assert ring.take(ring.next_index, 10**6) == []
    two = ring.take(ring.index_after(38), 1)
    assert two is not None
    assert b"".join(one.encoded(everything) for one in two) == b"39,"
    ring.append([Message(41, Kind.EVENTS, b"x" * 2000)], 41)
    assert (ring.floor, ring.take(ring.next_index, 1)) == (41, []), "one too large is not kept"
