"""Traces from the submission of a job to its first step, at a real OTLP receiver."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from octrain_api.app import create_app
from octrain_api.controller.relay import CelerySender, relay
from octrain_api.observability.tracer import make_tracing
from octrain_api.observability.tracing import sane_traceparent
from octrain_api.settings import TracingSettings
from tests.otlp import Collector

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


async def test_a_job_is_traced_to_its_first_step(
    lone_service: Any, worker: Any, spec: Any, collector: Collector, redis_url: str
) -> None:
    tracing = TracingSettings(endpoint=collector.endpoint)
    app = create_app(lone_service.settings.model_copy(update={"tracing": tracing}))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://octrain/v1") as client:
            user = {"Authorization": f"Bearer {await lone_service.key('ada', 'jobs:write')}"}
            made = await client.post("/jobs", json=spec, headers=user | {"traceparent": PARENT})
            job_id = made.json()["id"]
            await worker.schedule()
            sender = CelerySender(lone_service.settings.broker)
            controller = make_tracing(tracing, "octrain-controller")
            await relay(lone_service.database, lone_service.settings.controller, sender, controller)
            sender.close()
            await asyncio.to_thread(controller.close)
            client.headers["Authorization"] = worker.http.headers["Authorization"]
            worker.http = client
            claim = await worker.take(job_id)
            await worker.telemetry(
                1,
                {"seq": 1, "time": 1.0, "type": "phase", "phase": "training"},
                {"seq": 2, "time": 2.0, "type": "metrics", "step": 1, "values": {"x": 1}},
            )
            await worker.telemetry(
                3, {"seq": 3, "time": 3.0, "type": "metrics", "step": 2, "values": {"x": 1}}
            )
    request = collector.spans["POST /jobs"][0]
    assert request.trace_id.hex() == TRACE
    assert request.parent_span_id.hex() == "00f067aa0ba902b7"
    stored = f"00-{TRACE}-{request.span_id.hex()}-01"
    assert claim["traceparent"] == stored
    for name in ("relay", "claim", "first step"):
        assert len(collector.spans[name]) == 1, name
        span = collector.spans[name][0]
        assert span.trace_id.hex() == TRACE
        assert span.parent_span_id == request.span_id
        attributes = {a.key: a.value.string_value for a in span.attributes}
        assert attributes["octrain.job_id"] == job_id
        assert span.end_time_unix_nano >= span.start_time_unix_nano
    rows = await lone_service.sql(
        "SELECT data FROM events WHERE job_id = :job AND message = 'Training began.'", job=job_id
    )
    assert rows[0].data["traceparent"] == stored


async def test_a_collector_that_is_away_costs_no_request(lone_service: Any, spec: Any) -> None:
    tracing = TracingSettings(endpoint="http://127.0.0.1:1/v1/traces")
    app = create_app(lone_service.settings.model_copy(update={"tracing": tracing}))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://octrain/v1") as client:
            user = {"Authorization": f"Bearer {await lone_service.key('ada', 'jobs:write')}"}
            assert (await client.post("/jobs", json=spec, headers=user)).status_code == 201


async def test_nothing_is_traced_or_stored_without_an_endpoint(
    lone_service: Any, user: Any, spec: Any
) -> None:
    made = await user.post("/jobs", json=spec, headers={"traceparent": PARENT})
    rows = await lone_service.sql(
        "SELECT traceparent FROM jobs WHERE id = :id", id=made.json()["id"]
    )
    assert rows[0].traceparent is None


def test_off_imports_nothing_that_traces() -> None:
    """The Redis client imports the SDK's metrics where they are installed; that is its affair."""
    code = (
        "import sys; from octrain_api.app import create_app; import octrain_api.controller.main; "
        "from octrain_api.settings import Settings; create_app(Settings()); "
        "found = [m for m in sys.modules if m.startswith(('opentelemetry.sdk.trace', "
        "'opentelemetry.exporter', 'octrain_api.observability.otel'))]; assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("given", "sane"),
    [
        (PARENT, True),
        (None, False),
        ("", False),
        (PARENT.upper(), False),
        (PARENT.replace(TRACE, "0" * 32), False),
        (PARENT.replace("00f067aa0ba902b7", "0" * 16), False),
        ("01" + PARENT[2:], False),
        (PARENT + "-more", False),
        (PARENT + "\n", False),
    ],
)
def test_trace_contexts_are_taken_when_sane(given: str | None, sane: bool) -> None:
    assert sane_traceparent(given) == (given if sane else None)
