"""Health, readiness, the page for Prometheus, request ids and structured logs."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import httpx
import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octrain_api.app import create_app
from octrain_api.controller.figures import Figures
from octrain_api.direct import DirectConnections, TooManyWait
from octrain_api.observability.context import Work, begun, request_id_from
from octrain_api.observability.logs import JsonFormatter, TextFormatter, redact
from octrain_api.settings import BrokerSettings, PrometheusSettings


async def _ready(service: Any) -> tuple[int, dict[str, Any]]:
    answer = await service.client(None).get("http://octrain/readyz")
    return answer.status_code, answer.json()


async def test_connections_that_broke_are_not_used_again(
    lone_service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long this test's machine takes from one line to the next.
    monkeypatch.setattr("octrain_api.direct._SURELY_ALIVE", 3600.0)
    direct = DirectConnections(lambda: lone_service.database.connect("direct"), 2, 0.05)

    async def pid() -> int:
        async with direct.connection() as connection:
            return connection.info.backend_pid

    async with direct.connection(), direct.connection():
        assert direct.used == 2
        with pytest.raises(TooManyWait):
            await pid()
    assert direct.used == 0
    first = await pid()
    assert await pid() == first
    kill = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'direct'"
    )
    await lone_service.sql(kill)
    with pytest.raises(psycopg.OperationalError):
        async with direct.connection() as connection:
            await connection.execute("SELECT pg_sleep(60)")
    # The other one was killed too, and is not tried.
    async with direct.connection() as one, direct.connection() as two:
        for connection in (one, two):
            assert await (await connection.execute("SELECT 1")).fetchone() == (1,)
    await direct.close()


async def test_readiness_tells_of_every_part(lone_service: Any, worker: Any) -> None:
    status, found = await _ready(lone_service)
    assert (status, found["status"]) == (200, "degraded")
    assert found["checks"]["controller"].startswith("has never been heard")
    await worker.reconcile()
    assert await _ready(lone_service) == (
        200,
        {
            "status": "ready",
            "checks": {"database": "ok", "schema": "ok", "controller": "ok", "broker": "ok"},
        },
    )
    await lone_service.sql("UPDATE service_clocks SET alive_at = now() - interval '60 s'")
    status, found = await _ready(lone_service)
    assert (status, found["status"]) == (200, "degraded")
    assert "not heard for 60 s" in found["checks"]["controller"]
    await lone_service.sql("UPDATE alembic_version SET version_num = 'other'")
    status, found = await _ready(lone_service)
    assert (status, found["status"]) == (503, "not ready")
    assert "octrain migrate" in found["checks"]["schema"]


async def test_a_broker_that_is_away_is_told_and_not_fatal(lone_service: Any) -> None:
    broker = BrokerSettings(url="redis://127.0.0.1:1/0")
    app = create_app(lone_service.settings.model_copy(update={"broker": broker}))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://octrain") as client:
            answer = await client.get("/readyz")
    assert answer.status_code == 200
    assert answer.json()["checks"]["broker"].startswith("cannot be reached")


async def test_a_database_that_is_away_is_503(lone_service: Any, spec: Any) -> None:
    user = await lone_service.user("ada")
    name = lone_service.settings.database.url.rpartition("/")[2]
    admin_url = lone_service.settings.database.url.replace(name, "postgres")
    with psycopg.connect(admin_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,)
        )
        try:
            status, found = await _ready(lone_service)
            assert (status, found["checks"]["database"]) == (503, "cannot be reached")
            for answer in (await user.get("/jobs"), await user.post("/jobs", json=spec)):
                assert answer.status_code == 503
                assert answer.json()["type"] == "/problems/database-unavailable"
                assert answer.headers["retry-after"]
            # Nor does a key, of which nothing can be known now, keep the process from answering.
            for client in (lone_service.client(None), user):
                assert (await client.get("http://octrain/healthz")).is_success
                assert "checks" in (await client.get("http://octrain/readyz")).json()
        finally:
            connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    assert (await user.get("/jobs")).status_code == 200


def _samples(page: str) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


async def test_prometheus_reads_the_service(
    lone_service: Any, worker: Any, user: Any, submit: Any, running_job: str
) -> None:
    admin = lone_service.client(await lone_service.key("root", "admin"))
    await submit(user)
    await submit(user, resources={"device": "cpu"}, recipe={"engine": "amp"})
    await user.get("/jobs/nothing")
    await worker.reconcile()
    answer = await admin.get("http://octrain/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    page = _samples(answer.text)
    requests = page["octrain_http_requests_total"]
    assert requests["POST", "/jobs", "2xx"] == 3
    assert requests["GET", "/jobs/{job_id}", "4xx"] == 1
    assert page["octrain_http_request_seconds_count"]["POST", "/jobs"] == 3
    assert page["octrain_jobs"] == {("queued",): 2, ("running",): 1}
    assert page["octrain_queue_depth"] == {("auto", "emulated", "1"): 1, ("cpu", "amp", "1"): 1}
    assert page["octrain_nodes"] == {("live",): 1}
    assert page["octrain_controller_leading"] == {(): 1}
    assert page["octrain_telemetry_records_total"][()] == 2
    assert page["octrain_placement_seconds_count"][()] == 1
    assert page["octrain_placements_total"][()] == 1
    assert page["octrain_database_up"] == {(): 1}
    assert page["octrain_streams"] == {(): 0}
    assert page["octrain_http_requests_open"] == {(): 1}


async def test_labels_are_bounded(lone_service: Any) -> None:
    """Whatever strangers ask for, the page grows by no label of theirs."""
    admin = lone_service.client(await lone_service.key("root", "admin"))
    user = await lone_service.user("ada")
    for number in range(20):
        await user.get(f"/jobs/job_{number}")
        await user.request(f"METHOD{number}", f"/odd/{number}")
        await user.get(f"http://octrain/path-{number}?x={number}")
    page = _samples((await admin.get("http://octrain/metrics")).text)
    labels = {label for key in page["octrain_http_requests_total"] for label in key}
    assert not any(character.isdigit() for label in labels - {"4xx", "2xx"} for character in label)
    assert {"unmatched", "other", "/jobs/{job_id}"} <= labels


async def test_who_may_read_the_figures(lone_service: Any) -> None:
    for client, status in (
        (lone_service.client(None), 401),
        (lone_service.client("oct_wrong"), 401),
        (await lone_service.user("ada"), 403),
        (lone_service.client(await lone_service.key("root", "admin")), 200),
    ):
        assert (await client.get("http://octrain/metrics")).status_code == status
    settings = lone_service.settings.model_copy(
        update={"prometheus": PrometheusSettings(access="open")}
    )
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://octrain") as client:
            assert (await client.get("/metrics")).status_code == 200


async def test_figures_of_the_controller_add_up(lone_service: Any) -> None:
    """Two controllers, one after the other: counters only rise."""
    for _ in range(2):
        figures = Figures(interval=0)
        figures.placed(3, [0.05, 3.0, 1e6])
        await figures.write(lone_service.database)
        await figures.write(lone_service.database)
    rows = await lone_service.sql("SELECT name, label, value FROM service_counters")
    found = {(row.name, row.label): row.value for row in rows}
    assert found.pop(("placement_seconds", "sum")) == pytest.approx(2 * 1_000_003.05)
    assert found == {
        ("placements", ""): 6,
        ("placement_seconds", "0.1"): 2,
        ("placement_seconds", "5.0"): 2,
        ("placement_seconds", "+Inf"): 2,
    }


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("abc-1", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("two words", False),
        ("inj\nected", False),
        ("", False),
        (None, False),
    ],
)
def test_request_ids_are_taken_when_sane(given: str | None, kept: bool) -> None:
    found = request_id_from(given)
    assert (found == given) == kept
    assert found.isascii()
    assert len(found) <= 128


async def test_every_answer_has_a_request_id(lone_service: Any) -> None:
    user = await lone_service.user("ada")
    for path in ("/jobs", "/jobs/none", "http://octrain/healthz", "http://octrain/nowhere"):
        assert (await user.get(path)).headers["x-request-id"].startswith("req_")
    given = await user.get("/jobs/none", headers={"X-Request-ID": "mine"})
    assert given.headers["x-request-id"] == given.json()["request_id"] == "mine"


async def test_log_lines_carry_the_ids(lone_service: Any) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    log = logging.getLogger("octrain_api.requests")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        user = await lone_service.user("ada")
        await user.get("/jobs/job_none", headers={"X-Request-ID": "look-here"})
        await user.get("/jobs")
    finally:
        log.removeHandler(handler)
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(found) == 1, "only what was refused or failed, by default"
    line = found[0]
    assert (line["request_id"], line["job_id"]) == ("look-here", "job_none")
    assert (line["route"], line["status"], line["owner"]) == ("/jobs/{job_id}", 404, "ada")
    assert line["level"] == "INFO"
    assert line["key_id"].startswith("key_")


def test_text_and_json_say_the_same() -> None:
    record = logging.LogRecord("octrain_api.x", logging.WARNING, "f", 1, "it %s", ("is",), None)
    record.job_id = "job_2"
    with begun(Work(request_id="r-1", job_id="job_1")):
        text, line = TextFormatter().format(record), json.loads(JsonFormatter().format(record))
    assert text.endswith("WARNING octrain_api.x: it is [request_id=r-1 job_id=job_2]")
    assert (line["message"], line["request_id"], line["job_id"]) == ("it is", "r-1", "job_2")
    assert "request_id" not in json.loads(JsonFormatter().format(record))


def test_secrets_never_reach_a_line() -> None:
    secret = "s3cr3t-hunter2-s3cr3t"
    texts = [
        f"key oct_{secret} and token octn_{secret}",
        f"Authorization: Bearer {secret}",
        f"cannot reach postgresql://octrain:{secret}@db/octrain?sslmode=require",
        f"redis://:{secret}@127.0.0.1:6379/0",
    ]
    for text in texts:
        assert secret not in redact(text)
        assert "***" in redact(text)
    try:
        raise ValueError(texts[2])
    except ValueError as error:
        record = logging.LogRecord(
            "x", logging.ERROR, "f", 1, texts[0], None, (ValueError, error, error.__traceback__)
        )
    for formatter in (TextFormatter(), JsonFormatter()):
        assert secret not in formatter.format(record)
    assert redact("octrain_api placed job_01 on node octopus") == (
        "octrain_api placed job_01 on node octopus"
    )
