"""What the client sends, when it sends it again, and what it makes of refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import octrain
from octrain.client import (
    Conflict,
    IdempotencyKeyInFlight,
    NotFound,
    OctrainError,
    RateLimited,
    SecretShownOnce,
    ServerError,
    WrongStatus,
)

JobObject = Callable[..., dict[str, Any]]


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


def test_a_request_in_flight_is_sent_again(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    in_flight = {"type": "/problems/idempotency-key-in-flight", "status": 409, "detail": "Wait."}
    busy = reply(in_flight, 409, {"Retry-After": "0"})
    makers: dict[str, Callable[[], Any]] = {
        "jobs": lambda: client.jobs.create({}),
        "jobs/job_1/clone": lambda: client.jobs.get("job_1").clone(),
    }
    for path, make in makers.items():
        server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object())
        answers = iter([busy, busy, reply(job_object(), 201)])
        server.routes[f"POST /v1/{path}"] = lambda r, answers=answers: next(answers)
        sent = len(server.requests)
        assert make().id == "job_1"
        posts = [r for r in server.requests[sent:] if "idempotency-key" in r.headers]
        assert (len(posts), len({r.headers["idempotency-key"] for r in posts})) == (3, 1)
    server.routes["POST /v1/jobs"] = lambda r: busy
    with pytest.raises(IdempotencyKeyInFlight):
        client.jobs.create({})
    taken = {"type": "/problems/wrong-status", "status": 409, "detail": "No."}
    server.routes["POST /v1/jobs"] = lambda r: reply(taken, 409)
    sent = len(server.requests)
    with pytest.raises(WrongStatus):
        client.jobs.create({})
    assert len(server.requests) == sent + 1, "another 409 is final"


def test_a_key_whose_answer_was_lost_is_named(client: Any, server: Any, reply: Any) -> None:
    shown = {"type": "/problems/secret-shown-once", "status": 409, "detail": ".", "target": "key_1"}
    answers = iter([reply({}, 201, cut=1), reply(shown, 409)])
    server.routes["POST /v1/keys"] = lambda r: next(answers)
    with pytest.raises(SecretShownOnce) as refused:
        client.keys.create("laptop", "ada", ["jobs:read"])
    assert refused.value.members["target"] == "key_1"
    assert len({r.headers["idempotency-key"] for r in server.requests}) == 1


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
