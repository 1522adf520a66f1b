"""Logs: pages from both ends, filters, whole downloads."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octrain_api.logs import service as log_service
from octrain_api.logs.retention import sweep
from octrain_api.settings import JobLogSettings
from tests.api.holding import held


def log(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "log", "stream": "stdout", "time": 1.5, "text": text} | more


@pytest.fixture
async def ten_lines(worker: Any, running_job: str) -> str:
    """A job with lines 1 to 10 in batches of 3, 4, 2 and 1."""
    number, seq = 1, 3
    for count in (3, 4, 2, 1):
        records = []
        for n in range(number, number + count):
            level = {0: "error", 1: "info"}.get(n % 3)
            stream = "stderr" if n % 2 else "stdout"
            records.append(log(f"Line {n}", level=level, rank=n % 4 or None, stream=stream))
        assert (await worker.telemetry(seq, *records)).status_code == 200
        number, seq = number + count, seq + count
    return running_job


async def page(user: Any, job_id: str, query: str = "") -> Any:
    answer = await user.get(f"/jobs/{job_id}/logs{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def numbers(found: Any) -> list[int]:
    return [line["seq"] for line in found["lines"]]


async def test_a_line_tells_all_that_is_known(user: Any, ten_lines: str) -> None:
    lines = (await page(user, ten_lines))["lines"]
    assert lines[2] == {
        "seq": 3,
        "time": 1.5,
        "stream": "stderr",
        "attempt": 1,
        "rank": 3,
        "level": "error",
        "text": "Line 3",
    }
    assert (lines[1]["level"], lines[3]["rank"]) == (None, None)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 10, 11])
async def test_pages_from_both_ends_hold_each_line_once(
    user: Any, ten_lines: str, limit: int
) -> None:
    forwards: list[int] = []
    after = 0
    while after < 10:
        found = await page(user, ten_lines, f"?after={after}&limit={limit}")
        forwards += numbers(found)
        assert found["total_lines"] == 10
        after = found["next_after"]
    assert forwards == list(range(1, 11))
    end = await page(user, ten_lines, f"?after={after}")
    assert (numbers(end), end["next_after"]) == ([], 10)
    found = await page(user, ten_lines, f"?tail={limit}")
    assert found["next_after"] == 10, "what is printed from now on comes after it"
    backwards = numbers(found)
    while found["next_before"] is not None:
        found = await page(user, ten_lines, f"?before={found['next_before']}&limit={limit}")
        assert numbers(found)
        backwards = numbers(found) + backwards
    assert backwards == list(range(1, 11))
    between = await page(user, ten_lines, f"?after=3&before=8&limit={limit}")
    assert numbers(between) == list(range(4, 8))[:limit]


async def test_filters(user: Any, ten_lines: str, worker: Any, submit: Any) -> None:
    async def found(query: str) -> list[int]:
        return numbers(await page(user, ten_lines, query))

    assert await found("?level=error") == [3, 6, 9]
    assert await found("?level=error,info") == [1, 3, 4, 6, 7, 9, 10]
    assert await found("?level=error&level=info&tail=2") == [9, 10]
    assert await found("?text=LINE 1") == [1, 10]
    assert await found("?text=%25") == []
    assert await found("?text=_") == []
    assert await found("?stream=stderr&rank=1") == [1, 5, 9]
    assert await found("?stream=stderr&rank=1&before=9") == [1, 5]
    assert await found("?attempt=2") == []
    await worker.finish("stopped", "stopped_by_request")
    await worker.take(ten_lines)
    await worker.telemetry(1, log("Line 11"))
    assert await found("?attempt=2") == [11]
    assert (await page(user, ten_lines, "?attempt=2"))["lines"][0]["attempt"] == 2
    for query in ("?level=loud", "?tail=3&after=1", "?tail=0", "?text=", "?before=-1"):
        assert (await user.get(f"/jobs/{ten_lines}/logs{query}")).status_code == 422, query


async def test_a_search_goes_on_where_it_stopped(
    user: Any, ten_lines: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(log_service, "SCANNED", 4)
    first = await page(user, ten_lines, "?text=line 9")
    assert (numbers(first), first["next_after"]) == ([], 4)
    second = await page(user, ten_lines, "?text=line 9&after=4")
    assert (numbers(second), second["next_after"]) == ([], 8)
    third = await page(user, ten_lines, "?text=line 9&after=8")
    assert (numbers(third), third["next_after"]) == ([9], 10)
    last = await page(user, ten_lines, "?text=line 2&tail=5")
    assert (numbers(last), last["next_before"]) == ([], 7)
    earlier = await page(user, ten_lines, "?text=line 2&before=7")
    assert (numbers(earlier), earlier["next_before"]) == ([], 3)
    found = await page(user, ten_lines, "?text=line 2&before=3")
    assert (numbers(found), found["next_before"]) == ([2], None)


async def test_a_whole_log_is_downloaded_piece_by_piece(
    user: Any, ten_lines: str, monkeypatch: Any
) -> None:
    read: list[int] = []
    forwards = log_service.LogService.forwards

    async def counted(self: Any, *arguments: Any) -> Any:
        found = await forwards(self, *arguments)
        read.append(len(found.lines))
        return found

    monkeypatch.setattr(log_service, "_READ", 3)
    monkeypatch.setattr(log_service.LogService, "forwards", counted)
    whole = await user.get(f"/jobs/{ten_lines}/logs/download")
    assert whole.text == "".join(f"Line {n}\n" for n in range(1, 11))
    assert whole.headers["content-disposition"] == f'attachment; filename="{ten_lines}.log"'
    assert read == [3, 3, 3, 1]
    some = await user.get(f"/jobs/{ten_lines}/logs/download?level=error&timestamps=true")
    assert some.text.splitlines() == [
        f"1970-01-01T00:00:01.500+00:00 {'stderr' if n % 2 else 'stdout'} Line {n}"
        for n in (3, 6, 9)
    ]


async def test_a_time_without_a_date_is_told_as_it_is(
    user: Any, worker: Any, running_job: str
) -> None:
    """Nodes tell the times of lines; one of them could end every download in the middle."""
    times = [1.5, 1e300, -1e18, 253402300800.0]
    records = [log(f"Line {n}", time=time) for n, time in enumerate(times, 1)]
    assert (await worker.telemetry(3, *records)).status_code == 200
    whole = await user.get(f"/jobs/{running_job}/logs/download?timestamps=true")
    assert whole.text.splitlines() == [
        "1970-01-01T00:00:01.500+00:00 stdout Line 1",
        "1e+300s stdout Line 2",
        "-1e+18s stdout Line 3",
        "2.53402e+11s stdout Line 4",
    ]


async def test_chunks_of_older_versions_are_read(
    user: Any, ten_lines: str, lone_service: Any
) -> None:
    await lone_service.sql("UPDATE log_chunks SET levels = '{}', ranks = '{}'")
    lines = (await page(user, ten_lines))["lines"]
    assert [line["text"] for line in lines] == [f"Line {n}" for n in range(1, 11)]
    assert {line["level"] for line in lines} == {None}
    await lone_service.sql("UPDATE jobs SET status = 'cancelled'")
    told = (await user.get(f"/jobs/{ten_lines}/stream?include=logs")).text
    assert told.count("event: log") == 10


async def test_events_are_narrowed_and_read_from_both_ends(
    user: Any, worker: Any, running_job: str
) -> None:
    await worker.telemetry(
        3, *({"type": "event", "kind": f"kind{n % 2}", "message": f"{n}"} for n in range(6))
    )

    async def found(query: str) -> Any:
        answer = await user.get(f"/jobs/{running_job}/events{query}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def messages(page: Any) -> list[str]:
        return [item["message"] for item in page["items"]]

    odd = await found("?kind=kind1&limit=2")
    assert messages(odd) == ["1", "3"]
    assert messages(await found(f"?kind=kind1&after={odd['next_after']}")) == ["5"]
    newest = await found("?kind=kind0,kind1&order=desc&limit=4")
    assert messages(newest) == ["5", "4", "3", "2"]
    rest = await found(f"?kind=kind0&kind=kind1&order=desc&before={newest['next_before']}")
    assert messages(rest) == ["1", "0"]
    assert rest["next_before"] is None
    assert (await user.get(f"/jobs/{running_job}/events?order=up")).status_code == 422


async def test_old_lines_go_first_and_what_is_left_has_no_holes(
    user: Any, ten_lines: str, worker: Any, lone_service: Any
) -> None:
    database = lone_service.database
    days = JobLogSettings(keep_days=1)
    assert await sweep(database, JobLogSettings()) == 0
    assert await sweep(database, days) == 0
    # The second chunk is the older one, as its transaction had begun first: the first goes along.
    await lone_service.sql(
        "UPDATE log_chunks SET created_at = now() - interval '2 days' WHERE first_line = 4"
    )
    assert await sweep(database, days) == 2
    assert await sweep(database, days) == 0
    first = await page(user, ten_lines)
    assert (numbers(first), first["first_line"], first["total_lines"]) == ([8, 9, 10], 8, 10)
    assert first["next_before"] is None
    assert numbers(await page(user, ten_lines, "?tail=5")) == [8, 9, 10]
    assert (await page(user, ten_lines, "?before=10&limit=1"))["next_before"] == 9
    assert (await page(user, ten_lines, "?before=9"))["next_before"] is None
    assert numbers(await page(user, ten_lines, "?text=line 9")) == [9]
    whole = (await user.get(f"/jobs/{ten_lines}/logs/download")).text.splitlines()
    assert whole == [
        "[... 7 lines before this one are no longer kept ...]",
        "Line 8",
        "Line 9",
        "Line 10",
    ]
    # Whoever would go on before what went must read anew; numbers go on.
    (row,) = await lone_service.sql("SELECT seq FROM log_chunks WHERE first_line = 8")
    before = {"Last-Event-ID": str(row.seq - 2)}
    await worker.telemetry(13, log("Line 11"))
    await worker.finish("succeeded", "completed")
    told = (await user.get(f"/jobs/{ten_lines}/stream?include=logs", headers=before)).text
    assert "event: reset" in told
    after = {"Last-Event-ID": str(row.seq - 1)}
    told = (await user.get(f"/jobs/{ten_lines}/stream?include=logs", headers=after)).text
    assert "event: reset" not in told
    assert told.count("event: log") == 4
    await lone_service.sql("UPDATE log_chunks SET created_at = now() - interval '2 days'")
    assert await sweep(database, days) == 3
    nothing = await page(user, ten_lines)
    assert (numbers(nothing), nothing["first_line"], nothing["next_after"]) == ([], 12, 11)


async def test_the_oldest_lines_go_when_all_take_too_much(
    user: Any, ten_lines: str, lone_service: Any
) -> None:
    database = lone_service.database
    (row,) = await lone_service.sql("SELECT sum(size) AS size, count(*) AS chunks FROM log_chunks")
    assert (row.size, row.chunks) == (61, 4)
    assert await sweep(database, JobLogSettings(max_bytes=61)) == 0
    assert await sweep(database, JobLogSettings(max_bytes=60)) == 1
    assert numbers(await page(user, ten_lines)) == list(range(4, 11))
    assert await sweep(database, JobLogSettings(max_bytes=15)) == 2
    assert numbers(await page(user, ten_lines)) == [10]
    assert await sweep(database, JobLogSettings(max_bytes=1)) == 1


async def test_a_sweep_makes_no_writer_wait(
    user: Any, ten_lines: str, worker: Any, lone_service: Any
) -> None:
    """It is held where it has deleted and not committed, while the job's writer sends."""
    settings = JobLogSettings(keep_days=1)
    await lone_service.sql("UPDATE log_chunks SET created_at = now() - interval '2 days'")
    async with held(lone_service, "DELETE", "log_chunks") as inside:
        sweeping = asyncio.create_task(sweep(lone_service.database, settings))
        await inside()
        async with asyncio.timeout(60):
            assert (await worker.telemetry(13, log("Line 11"))).status_code == 200
            # What another sweep holds is passed over.
            assert await sweep(lone_service.database, settings) == 0
        assert not sweeping.done()
    assert await sweeping == 4
    assert numbers(await page(user, ten_lines)) == [11]
