"""What a node traces of an attempt: real supervisors, a real server, a real receiver of spans."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octrain_worker.settings import TracingSettings
from octrain_worker.tracing import check_tracing, sane_traceparent
from tests.otlp import Collector, attributes

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def test_an_attempt_is_traced_to_its_first_step(
    workplace: Any, collector: Collector, tmp_path: Path
) -> None:
    workplace.environment["OCTRAIN_TRACING_ENDPOINT"] = collector.endpoint
    seen = tmp_path / "environment"
    script = {"steps": 5, "dump_environment": str(seen)}
    attempt = workplace.api.add("att_a", script, traceparent=PARENT)
    child = workplace.supervise("att_a")
    assert child.wait(timeout=60) == 0, workplace.log()
    assert attempt.finished["outcome"] == "succeeded"
    spans = {name: found[0] for name, found in collector.spans.items() if len(found) == 1}
    parts = ("claim request", "prepare", "start trainer", "trainer training")
    assert set(spans) == {"run attempt", *parts}, collector.spans.keys()
    root = spans["run attempt"]
    assert root.trace_id.hex() == TRACE
    assert root.parent_span_id.hex() == "00f067aa0ba902b7"
    assert not root.status.code
    assert attributes(root) == {
        "octrain.job_id": "job_1",
        "octrain.attempt_id": "att_a",
        "octrain.attempt": 1,
        "octrain.node_id": "node_1",
    }
    for name in parts:
        assert spans[name].trace_id == root.trace_id
        assert spans[name].parent_span_id == root.span_id
        assert spans[name].start_time_unix_nano >= root.start_time_unix_nano
        assert spans[name].end_time_unix_nano <= root.end_time_unix_nano
    # One part follows the other without a gap, and the first step ends them all.
    starting, training = spans["start trainer"], spans["trainer training"]
    assert starting.end_time_unix_nano == training.start_time_unix_nano
    assert training.end_time_unix_nano == root.end_time_unix_nano
    environment = json.loads(seen.read_text())
    assert environment["TRACEPARENT"] == f"00-{TRACE}-{root.span_id.hex()}-01"
    assert "OCTRAIN_TRACING_ENDPOINT" not in environment
    sent = b"".join(collector.bodies)
    for secret in (b"node-key", b"postgresql://", b"Bearer"):
        assert secret not in sent


def test_an_attempt_that_ends_before_its_first_step_is_a_failed_span(
    workplace: Any, collector: Collector
) -> None:
    workplace.environment["OCTRAIN_TRACING_ENDPOINT"] = collector.endpoint
    workplace.api.add("att_a", {"steps": 0, "fail_with": ["data_invalid", 13]}, traceparent=PARENT)
    assert workplace.supervise("att_a").wait(timeout=60) == 0, workplace.log()
    assert collector.spans["run attempt"][0].status.code == 2
    assert collector.spans["start trainer"]


@pytest.mark.parametrize("parent", [None, PARENT[:-1] + "0", "not a context"])
def test_what_has_no_trace_or_is_not_sampled_is_not_traced(
    workplace: Any, collector: Collector, parent: str | None
) -> None:
    workplace.environment["OCTRAIN_TRACING_ENDPOINT"] = collector.endpoint
    workplace.api.add("att_a", {"steps": 2}, traceparent=parent)
    assert workplace.supervise("att_a").wait(timeout=60) == 0, workplace.log()
    assert collector.bodies == []


def test_a_collector_that_is_away_costs_no_attempt(workplace: Any) -> None:
    workplace.environment["OCTRAIN_TRACING_ENDPOINT"] = "http://127.0.0.1:1/v1/traces"
    attempt = workplace.api.add("att_a", {"steps": 2}, traceparent=PARENT)
    assert workplace.supervise("att_a").wait(timeout=60) == 0, workplace.log()
    assert attempt.finished["outcome"] == "succeeded"


def test_off_imports_nothing_that_traces() -> None:
    """The Redis client imports the SDK's metrics where they are installed; that is its affair."""
    code = (
        "import sys; import octrain_worker.celery_app; "
        "from octrain_worker.settings import TracingSettings; "
        "from octrain_worker.tracing import attempt_trace; "
        "attempt_trace(TracingSettings(endpoint=None)).begin('x'); "
        "found = [m for m in sys.modules if m.startswith(('opentelemetry.sdk.trace', "
        "'opentelemetry.exporter', 'octrain_worker.otel'))]; assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_node_that_cannot_trace_says_so_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    there = TracingSettings(endpoint="http://collector:4318/v1/traces")
    assert check_tracing(there) is None
    monkeypatch.setattr("octrain_worker.tracing._PACKAGES", ("opentelemetry.is.not.here",))
    told = check_tracing(there)
    assert told is not None
    assert "octrain[tracing]" in told
    assert check_tracing(TracingSettings(endpoint=None)) is None


@pytest.mark.parametrize("given", [None, 7, "", PARENT.upper(), PARENT + "\n", "01" + PARENT[2:]])
def test_trace_contexts_are_taken_when_sane(given: Any) -> None:
    assert sane_traceparent(PARENT) == PARENT
    assert sane_traceparent(given) is None
