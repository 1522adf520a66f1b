"""The client against a real socket: what it sends, what it makes of answers and of broken ones."""

from __future__ import annotations

import hashlib
import json
import math
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import octrain
from octrain.client import (
    Conflict,
    JobData,
    JobFailed,
    LogFilter,
    Metrics,
    MissingExtra,
    NotFound,
    OctrainError,
    RateLimited,
    Series,
    ServerError,
    ServerUnreachable,
    WaitTimeout,
)
from octrain.client.curves import job_html
from octrain.local.state import ApiState, StackState

JobObject = Callable[..., dict[str, Any]]


@pytest.fixture
def client(server: Any) -> Any:
    with octrain.Client(server.url, "oct_secret") as made:
        yield made


def test_create_sends_the_spec_the_key_and_an_idempotency_key(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    server.routes["POST /v1/jobs"] = lambda r: reply(job_object(status="queued"), 201)
    spec = {"model": {"source": "path", "path": "m"}}
    job = client.jobs.create(spec)
    client.jobs.create(spec)
    first, second = server.requests
    assert (job.id, job.status) == ("job_1", "queued")
    assert first.body == spec
    assert first.headers["authorization"] == "Bearer oct_secret"
    assert first.headers["idempotency-key"] != second.headers["idempotency-key"]


def test_a_refused_spec_tells_every_pointer(client: Any, server: Any, reply: Any) -> None:
    problem = {
        "type": "/problems/spec-invalid",
        "title": "Spec not valid",
        "status": 422,
        "detail": "2 values are not valid.",
        "errors": [
            {
                "pointer": "/recipe/amax_hist_len",
                "message": "unknown field",
                "code": "extra",
                "suggestion": "amax_history_len",
            },
            {"pointer": "/training/steps", "message": "must be at least 1", "code": "range"},
        ],
    }
    server.routes["POST /v1/jobs"] = lambda r: reply(problem, 422)
    with pytest.raises(OctrainError) as caught:
        client.jobs.create({})
    error = caught.value
    assert (error.status, error.type) == (422, "/problems/spec-invalid")
    assert error.pointers == ("/recipe/amax_hist_len", "/training/steps")
    assert "Did you mean 'amax_history_len'?" in str(error)
    assert len(server.requests) == 1


def test_a_busy_server_is_asked_again_with_the_same_idempotency_key(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    answers = iter(
        [reply({"detail": "later"}, 503, {"Retry-After": "0"}), reply(job_object(), 201)]
    )
    server.routes["POST /v1/jobs"] = lambda r: next(answers)
    assert client.jobs.create({}).id == "job_1"
    keys = {request.headers["idempotency-key"] for request in server.requests}
    assert (len(server.requests), len(keys)) == (2, 1)


def test_what_was_refused_for_its_rate_is_sent_again(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    limited = {"type": "/problems/rate-limited", "status": 429, "detail": "Slower."}
    answers = iter([reply(limited, 429, {"Retry-After": "0"}), reply(job_object())])
    server.routes["POST /v1/jobs/job_1/cancel"] = lambda r: next(answers)
    assert client.jobs.cancel("job_1").id == "job_1"
    server.routes["GET /v1/nodes"] = lambda r: reply(limited, 429, {"Retry-After": "0"})
    with pytest.raises(RateLimited) as refused:
        client.nodes()
    assert refused.value.retry_after == 0
    assert len(server.requests) == 2 + 4


async def test_the_asynchronous_client_repeats_as_well(
    server: Any, reply: Any, job_object: JobObject
) -> None:
    unwell = reply({"detail": "later"}, 503, {"Retry-After": "0"})
    answers = iter([unwell, reply(job_object(), 201, cut=10), reply(job_object(), 201)])
    server.routes["POST /v1/jobs"] = lambda r: next(answers)
    events = "id: 7\nevent: status\ndata: {}\n\n", "id: 8\nevent: end\ndata: {}\n\n"
    server.routes["GET /v1/jobs/job_1/stream"] = lambda r: reply(
        events["last-event-id" in r.headers].encode(), content_type="text/event-stream"
    )
    async with octrain.AsyncClient(server.url, "k") as client:
        job = await client.jobs.create({})
        keys = {request.headers["idempotency-key"] for request in server.requests}
        assert (len(server.requests), len(keys)) == (3, 1)
        assert [event.type async for event in job.stream()] == ["status", "end"]
    assert server.requests[-1].headers["last-event-id"] == "7"


def test_a_problem_of_an_unknown_type_is_that_of_its_status(
    client: Any, server: Any, reply: Any
) -> None:
    for status, kind in ((404, NotFound), (409, Conflict), (418, OctrainError), (500, ServerError)):
        newer = {"type": "/problems/new", "status": status, "detail": "New.", "request_id": "r"}
        server.routes["GET /v1/nodes"] = lambda r, a=newer, s=status: reply(a, s)
        with pytest.raises(OctrainError) as told:
            client.nodes()
        assert (type(told.value), told.value.request_id) == (kind, "r")


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Metrics([Series(name="a", points=[(1, 2.0)])])
    for module, convert in (
        ("numpy", found.to_numpy),
        ("pandas", found.to_pandas),
        ("pyarrow", found.to_arrow),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(
            MissingExtra, match=rf"needs {module}: pip install 'octrain\[analysis\]'"
        ):
            convert()


def test_a_notebook_shows_a_job_without_trusting_it(job_object: JobObject) -> None:
    evil = job_object(name="<script>", detail="<img onerror=x>", reason="<b>")
    points = [(1, 3.0), (2, 2.5), (3, math.nan), (4, 2.0), (5, 1.0)]
    page = job_html(JobData.model_validate(evil), [Series(name="<i>", points=points)])
    assert page.count("<polyline") == 2, "NaN breaks the line"
    assert not any(tag in page for tag in ("<script", "<img", "<i>", "onerror=x>"))
    assert "nan" not in page
    assert "<svg" not in job_html(JobData.model_validate(evil), [])


def test_an_own_authority_is_trusted_or_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = tmp_path / "ca.pem"
    wrong.write_text("no certificate")
    monkeypatch.setenv("OCTRAIN_CA_FILE", str(wrong))
    with pytest.raises(OctrainError, match="OCTRAIN_CA_FILE"):
        octrain.Client("https://octrain.example", "k")


def test_an_answer_cut_short_is_asked_for_again(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    answers = iter([reply(job_object(), cut=10), reply(job_object())])
    server.routes["GET /v1/jobs/job_1"] = lambda r: next(answers)
    assert client.jobs.get("job_1").id == "job_1"


def test_a_cancel_is_not_repeated_behind_the_callers_back(
    client: Any, server: Any, reply: Any
) -> None:
    server.routes["POST /v1/jobs/job_1/cancel"] = lambda r: reply({"detail": "busy"}, 503)
    with pytest.raises(OctrainError, match="busy"):
        client.jobs.cancel("job_1")
    assert len(server.requests) == 1


def test_no_server_is_said_at_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ServerUnreachable, match=f"No server answers at http://127.0.0.1:{port}"):
        octrain.Client(f"http://127.0.0.1:{port}", "k").nodes()


def test_something_else_than_octrain_is_said(client: Any, server: Any, reply: Any) -> None:
    server.routes["GET /v1/nodes"] = lambda r: reply(b"<html>", content_type="text/html")
    with pytest.raises(OctrainError, match="is it an Octrain server"):
        client.nodes()


def test_list_follows_the_pages_and_stops_at_the_limit(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    def page(request: Any) -> Any:
        start = int(request.query.get("cursor", 0))
        size = int(request.query["limit"])
        items = [job_object(id=f"job_{n}") for n in range(start, min(start + size, 150))]
        more = str(start + size) if start + size < 150 else None
        return reply({"items": items, "next_cursor": more})

    server.routes["GET /v1/jobs"] = page
    assert len([job.id for job in client.jobs.list()]) == 150
    assert len(list(client.jobs.list(limit=120, labels={"team": "nlp"}))) == 120
    assert server.requests[-1].query["label.team"] == "nlp"
    assert len(list(client.jobs.list(limit=7))) == 7


def test_a_newer_server_breaks_nothing(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    newer = job_object(
        status="hibernating",
        reason="full_moon",
        shiny={"new": True},
        latest_metrics={"train/loss": "NaN", "train/grad_norm": "Infinity"},
    )
    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(newer)
    job = client.jobs.get("job_1")
    assert (job.status, job.data.reason) == ("hibernating", "full_moon")
    assert math.isnan(job.data.latest_metrics["train/loss"])
    assert job.data.latest_metrics["train/grad_norm"] == math.inf
    assert job.data.model_extra == {"shiny": {"new": True}}
    again = json.loads(job.data.model_dump_json())
    assert again["latest_metrics"] == {"train/loss": "NaN", "train/grad_norm": "Infinity"}


def test_wait_long_polls_from_the_version_it_knows(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    def answer(request: Any) -> Any:
        if "since_version" not in request.query:
            return reply(job_object(version=4))
        assert request.query["since_version"] == "4"
        return reply(job_object(version=5, status="failed", is_final=True, reason="diverged"))

    server.routes["GET /v1/jobs/job_1"] = answer
    job = client.jobs.get("job_1")
    assert job.wait().status == "failed"
    with pytest.raises(JobFailed, match="diverged"):
        job.wait(check=True)


def test_wait_gives_up_after_its_timeout(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object())
    with pytest.raises(WaitTimeout, match="still running"):
        client.jobs.get("job_1").wait(timeout=0.2)


def test_a_broken_stream_goes_on_after_the_last_event(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    events = [
        (1, "status", {"status": "running"}),
        (2, "metrics", {"step": 1, "values": {"train/loss": 3.0}}),
        (3, "progress", {"step": 2, "total_steps": 2}),
        (4, "end", {"status": "succeeded"}),
    ]

    def stream(request: Any) -> Any:
        last = int(request.headers.get("last-event-id", 0))
        blocks = [
            f"id: {number}\nevent: {kind}\ndata: {json.dumps(data)}\n\n"
            for number, kind, data in events
            if number > last
        ]
        text = ": hello\n\n" + "".join(blocks)
        # The first connection breaks in the middle of event 3.
        cut = text.index("event: progress") + 20 if last == 0 else None
        return reply(text.encode(), content_type="text/event-stream", cut=cut)

    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object())
    server.routes["GET /v1/jobs/job_1/stream"] = stream
    seen = list(client.jobs.get("job_1").stream())
    assert [(event.id, event.type) for event in seen] == [(n, kind) for n, kind, _ in events]
    assert seen[1].data["values"] == {"train/loss": 3.0}
    assert [r.headers.get("last-event-id") for r in server.requests[1:]] == [None, "2"]


def test_metrics_become_numbers_and_arrays(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    np = pytest.importorskip("numpy")
    series = {"name": "train/loss", "attempt": 1, "points": [[1, 3.5], [2, "NaN"], [3, 2.5]]}
    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object())
    server.routes["GET /v1/jobs/job_1/metrics"] = lambda r: reply({"series": [series]})
    (found,) = client.jobs.get("job_1").metrics("train/loss", "eval/loss", max_points=100)
    assert server.requests[-1].query == {"keys": "train/loss,eval/loss", "max_points": "100"}
    assert found.steps == [1, 2, 3]
    np.testing.assert_array_equal(found.to_numpy(), [[1, 3.5], [2, np.nan], [3, 2.5]])


def test_an_aged_connection_is_opened_again_at_its_place(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    parts = {
        None: 'id: 7\nevent: status\ndata: {}\n\nevent: reconnect\ndata: {"after": "9"}\n\n',
        "9": 'event: gap\ndata: {"after": "9", "until": "20"}\n\nevent: end\ndata: {}\n\n',
    }
    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object())
    server.routes["GET /v1/jobs/job_1/stream"] = lambda r: reply(
        parts[r.headers.get("last-event-id")].encode(), content_type="text/event-stream"
    )
    seen = list(client.jobs.get("job_1").stream(include=["status", "metrics"], metrics=["a/*"]))
    assert [event.type for event in seen] == ["status", "gap", "end"]
    assert server.requests[-1].query == {"include": "status,metrics", "metrics": "a/*"}


def test_ids_of_the_stream_of_all_jobs_are_kept_as_they_are(
    client: Any, server: Any, reply: Any
) -> None:
    text = b'id: 12:job_1:3\nevent: status\ndata: {"job_id": "job_1"}\n\n'
    server.routes["GET /v1/events/stream"] = lambda r: reply(text, content_type="text/event-stream")
    events = client.events(after="11")
    assert [next(events).id, next(events).id] == ["12:job_1:3"] * 2
    assert [r.headers["last-event-id"] for r in server.requests] == ["11", "12:job_1:3"]


def test_logs_are_followed_until_the_end_and_each_line_once(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    lines: list[dict[str, Any]] = [
        {"seq": n, "text": f"line {n}", "stream": "stdout", "level": "error" if n % 2 else None}
        for n in range(1, 7)
    ]

    def logs(request: Any) -> Any:
        after = int(request.query["after"])
        found = [line for line in lines[:4] if line["seq"] > after and line["level"]]
        return reply({"lines": found, "next_after": 4})

    def stream(request: Any) -> Any:
        # The stream begins before the lines that were read, and breaks off once.
        first, last = (3, 5) if request.headers["last-event-id"] == "2" else (5, 6)
        blocks = [
            f"id: {line['seq']}\nevent: log\ndata: {json.dumps(line)}\n\n"
            for line in lines[first - 1 : last]
        ]
        end = "event: end\ndata: {}\n\n" if last == 6 else ""
        return reply(("".join(blocks) + end).encode(), content_type="text/event-stream")

    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object(last_event=2))
    server.routes["GET /v1/jobs/job_1/logs"] = logs
    server.routes["GET /v1/jobs/job_1/stream"] = stream
    wanted = LogFilter(levels=["error"], text="LINE")
    seen = [line.seq for line in client.jobs.get("job_1").follow_logs(wanted=wanted)]
    assert seen == [1, 3, 5]
    asked = [r.query for r in server.requests if r.path.endswith("/logs")]
    assert asked[0] == {"level": "error", "text": "LINE", "after": "0", "limit": "1000"}
    assert [r.query for r in server.requests if r.path.endswith("/stream")] == [
        {"include": "logs"}
    ] * 2


def test_the_last_lines_and_a_saved_log(
    client: Any, server: Any, reply: Any, job_object: JobObject, tmp_path: Path
) -> None:
    def logs(request: Any) -> Any:
        page = {"tail": ([9, 10], 8), "before": ([7], None)}
        numbers, before = page["tail" if "tail" in request.query else "before"]
        lines = [{"seq": n, "text": f"{n}"} for n in numbers]
        return reply({"lines": lines, "next_after": 10, "next_before": before})

    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object())
    server.routes["GET /v1/jobs/job_1/logs"] = logs
    server.routes["GET /v1/jobs/job_1/logs/download"] = lambda r: reply(
        b"a\nb\n", content_type="text/plain"
    )
    job = client.jobs.get("job_1")
    assert [line.seq for line in job.logs(tail=3)] == [7, 9, 10]
    saved = job.save_log(tmp_path / "all.log", LogFilter(rank=2))
    assert saved.read_bytes() == b"a\nb\n"
    assert server.requests[-1].query == {"rank": "2"}
    assert list(tmp_path.iterdir()) == [saved]


def artifact_routes(
    server: Any, reply: Any, files: dict[str, bytes], sha: str | None = None
) -> None:
    listed = [
        {"path": path, "size": len(data), "sha256": sha or hashlib.sha256(data).hexdigest()}
        for path, data in files.items()
    ]
    artifact = {"id": "art_1", "kind": "model", "name": "model", "step": 10, "files": listed}
    server.routes["GET /v1/jobs/job_1/artifacts"] = lambda r: reply({"items": [artifact]})
    for path, data in files.items():
        server.routes[f"GET /v1/jobs/job_1/artifacts/art_1/files/{path}"] = lambda r, data=data: (
            reply(data, content_type="application/octet-stream")
        )


def test_download_fetches_checks_and_keeps_what_is_there(
    client: Any, server: Any, reply: Any, job_object: JobObject, tmp_path: Path
) -> None:
    files = {"config.json": b"{}", "shards/one.safetensors": b"x" * 100_000}
    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object())
    artifact_routes(server, reply, files)
    job = client.jobs.get("job_1")
    moved: list[int] = []
    folder = job.download("model", tmp_path / "m", on_progress=lambda p, r, t: moved.append(r))
    assert {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    } == (files)
    assert moved[-1] == 100_002
    before = len(server.requests)
    job.download("model", folder)
    assert len(server.requests) == before + 1, "only the list is asked for again"


def test_a_damaged_download_leaves_no_file(
    client: Any, server: Any, reply: Any, job_object: JobObject, tmp_path: Path
) -> None:
    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object())
    artifact_routes(server, reply, {"model.safetensors": b"wrong"}, sha="0" * 64)
    with pytest.raises(OctrainError, match="damaged"):
        client.jobs.get("job_1").download("model", tmp_path / "m")
    assert list((tmp_path / "m").iterdir()) == []


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../outside", ""])
def test_a_server_cannot_write_outside_the_folder(
    client: Any, server: Any, reply: Any, job_object: JobObject, tmp_path: Path, path: str
) -> None:
    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object())
    artifact_routes(server, reply, {path: b"x"})
    with pytest.raises(OctrainError, match="outside the artifact"):
        client.jobs.get("job_1").download("model", tmp_path / "m")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_url_and_key_are_found_and_the_local_key_stays_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTRAIN_DATA_DIR", str(tmp_path))
    with pytest.raises(OctrainError, match="octrain up"):
        octrain.Client()
    StackState(api=ApiState(url="http://127.0.0.1:9", key="local-key")).save(tmp_path)
    assert (tmp_path / "state.json").stat().st_mode & 0o777 == 0o600

    from octrain.client import find_connection

    local = find_connection()
    assert (local.url, local.key) == ("http://127.0.0.1:9", "local-key")
    assert "local-key" not in repr(local)
    monkeypatch.setenv("OCTRAIN_API_URL", "https://elsewhere.example/")
    assert (find_connection().url, find_connection().key) == ("https://elsewhere.example", "")
    monkeypatch.setenv("OCTRAIN_API_KEY", "env-key")
    assert find_connection().key == "env-key"
    assert find_connection("http://given", "given-key").key == "given-key"


def test_a_missing_key_is_said(server: Any, reply: Any) -> None:
    server.routes["GET /v1/nodes"] = lambda r: reply({"detail": "A key is needed."}, 401)
    with pytest.raises(OctrainError, match="set OCTRAIN_API_KEY"):
        octrain.Client(server.url).nodes()
