"""One trace of a job: from its submission over placing, broker and node to its first step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octrain.local.processes import become_subreaper
from octrain.local.stack import LocalStack
from tests.otlp import Collector, attributes
from tests.running_service import Service, corpus

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
NAMES = {
    "POST /jobs",
    "relay",
    "run attempt",
    "claim request",
    "POST /attempts/{attempt_id}/claim",
    "claim",
    "prepare",
    "start trainer",
    "trainer loading",
    "trainer converting",
    "trainer training",
    "first step",
}


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def service(tmp_path: Path, collector: Collector) -> Iterator[Service]:
    become_subreaper()
    root = corpus(tmp_path / "root")
    environment = {
        "OCTRAIN_TRACING_ENDPOINT": collector.endpoint,
        "OMP_NUM_THREADS": "1",
        # Sent soon, so that the test need not wait for the usual five seconds.
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    stack = LocalStack(tmp_path / "data", roots=[root], environment=environment)
    stack.start()
    running = Service(stack, root)
    try:
        assert stack.wait_for_nodes(), running.tails()
        yield running
    finally:
        running.close()
        stack.stop()


def test_one_trace_from_the_submission_to_the_first_step(
    service: Service, collector: Collector
) -> None:
    made = service.http.post(
        "/v1/jobs",
        json=service.spec("traced", notes="not-for-traces"),
        headers={"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"},
    )
    assert made.status_code == 201, made.text
    job = service.client.jobs.get(made.json()["id"])
    service.end(job, "succeeded")
    collector.until(lambda spans: set(spans) >= NAMES)
    spans = collector.of_trace(TRACE)
    by_id = {span.span_id: span for span in spans}
    (request,) = [span for span in spans if span.name == "POST /jobs"]
    assert request.parent_span_id.hex() == "00f067aa0ba902b7"
    for span in spans:
        if span is not request:
            assert span.parent_span_id in by_id, f"{span.name} hangs in the air"
    (attempt,) = [span for span in spans if span.name == "run attempt"]
    assert attempt.parent_span_id == request.span_id
    assert attributes(attempt)["octrain.job_id"] == job.id
    (answer,) = [span for span in spans if span.name == "POST /attempts/{attempt_id}/claim"]
    # The request of the claim was made below the node's span: its context came with the message.
    assert answer.parent_span_id == attempt.span_id
    (first,) = [span for span in spans if span.name == "first step"]
    assert first.end_time_unix_nano > request.start_time_unix_nano
    sent = b"".join(collector.bodies)
    keys = [service.stack.api_key, "oct_", "octn_", "postgresql", "redis://", str(service.root)]
    for secret in [*keys, "not-for-traces", "corpus.txt"]:
        assert secret.encode() not in sent, secret
