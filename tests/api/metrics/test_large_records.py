"""More values at one step than the API takes in a record: from the trainer's writer, through the
supervisor's own parts, over HTTP."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from fp8core.telemetry import TelemetryWriter
from octrain_worker.api_client import ApiClient, ApiRefused
from octrain_worker.attempt_folder import AttemptFolder
from octrain_worker.supervisor.collector import Collector
from octrain_worker.supervisor.lease import Lease
from octrain_worker.supervisor.link import Link
from octrain_worker.supervisor.pieces import MOST_VALUES, pieces_of
from octrain_worker.supervisor.shipper import Shipper
from octrain_worker.supervisor.spool import Spool
from tests.api.served import served

NODE = {
    "name": "n",
    "boot_id": "b",
    "hostname": "h",
    "version": "1",
    "device_kinds": ["cpu"],
    "cpu_slots": 1,
    "gpus": [],
    "engines": {},
}
# 3,000 layers of four tensors with four figures each, as the largest models have them.
FIGURES = [
    f"fp8/model.layers.{layer}.mlp.down_proj/{tensor}/{figure}"
    for layer in range(3000)
    for tensor in ("input", "weight", "output", "grad_output")
    for figure in ("amax", "scale", "saturated", "underflow")
]


def make_attempt(url: str, node_id: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO jobs (id, owner, labels, notes, priority, spec, status, need, attempt) "
            "VALUES ('job_1', 'contract', '{}', '', 0, '{}', 'running', 'cpu', 1)"
        )
        connection.execute(
            "INSERT INTO attempts (id, job_id, number, node_id, status, fencing_token, device, "
            "gpu_indices, lease_seconds, claimed_at) "
            "VALUES ('att_1', 'job_1', 1, %s, 'running', 7, 'cpu', '{}', 900, now())",
            [node_id],
        )


def value(place: int, step: int) -> float:
    return math.inf if place == 40_001 else place + step / 8


@pytest.mark.timeout(120)
def test_every_value_arrives_once(copied_url: str, redis_url: str, tmp_path: Path) -> None:
    work = tmp_path / "att_1" / "work"
    work.mkdir(parents=True)
    with TelemetryWriter(work / "telemetry.jsonl") as writer:
        for step in (100, 200, 300):
            writer.record(step, {"train/loss": 1 / step})
            # A figure that comes and goes moves all others to another place.
            more = {"fp8/head/infinities": 1.0} if step == 200 else {}
            health = {name: value(place, step) for place, name in enumerate(FIGURES)}
            writer.record(step, {**more, **health}, health=True)
    with served(copied_url, redis_url, tmp_path) as running:
        headers = {"Authorization": f"Bearer {running.node.key}"}
        answer = httpx.post(f"{running.url}/v1/nodes/register", json=NODE, headers=headers)
        make_attempt(copied_url, answer.raise_for_status().json()["node_id"])
        client = ApiClient(running.url, running.node.key, timeout=60)

        # As it was written the API refuses it: the pieces are needed.
        whole = {"type": "metrics", "step": 1, "values": dict.fromkeys(FIGURES, 1.0)}
        with pytest.raises(ApiRefused):
            client.telemetry("att_1", 7, 1, [whole])

        spool = Spool(tmp_path / "att_1" / "spool")
        folder = AttemptFolder(tmp_path / "att_1")
        link = Link(client, folder, 7, lease=Lease(), interval=60, poke=lambda: None)
        shipper = Shipper(spool, link)
        collector = Collector(spool, telemetry=work / "telemetry.jsonl", logs={})
        told = collector.drain()
        many = len(FIGURES)
        assert [len(one["values"]) for one in told] == [1, many, 1, many + 1, 1, many]
        assert spool.last_seq == 3 * (1 + math.ceil(len(FIGURES) / MOST_VALUES))
        shipper.start()
        shipper.hurry()
        give_up = time.monotonic() + 90
        while not shipper.drained:
            assert time.monotonic() < give_up
            link.closed.wait(0.05)
        link.close()
        spool.close()

        user = httpx.Client(
            base_url=f"{running.url}/v1/jobs/job_1",
            headers={"Authorization": f"Bearer {running.user.key}"},
            timeout=60,
        )
        events = user.get("/events").raise_for_status().json()["items"]
        assert [event["kind"] for event in events if event["kind"] == "record_refused"] == []
        found: dict[str, Any] = {}
        query: dict[str, Any] = {"limit": 10_000}
        while True:
            page = user.get("/metrics/latest", params=query).raise_for_status().json()
            found |= {item["name"]: item for item in page["items"]}
            if page["next_cursor"] is None:
                break
            query["cursor"] = page["next_cursor"]
        assert set(found) == {*FIGURES, "train/loss", "fp8/head/infinities"}
        for place, name in enumerate(FIGURES):
            expected = value(place, 300)
            told_value = "Infinity" if math.isinf(expected) else expected
            assert (found[name]["value"], found[name]["points"]) == (told_value, 3)
        # What lies at the edges of the pieces is read as any other.
        edges = [FIGURES[n] for n in (0, MOST_VALUES - 1, MOST_VALUES, 2 * MOST_VALUES)]
        series = user.get("/metrics", params={"name": edges}).raise_for_status().json()["series"]
        assert {one["name"]: one["points"] for one in series} == {
            name: [[step, value(FIGURES.index(name), step)] for step in (100, 200, 300)]
            for name in edges
        }


def test_pieces() -> None:
    record = {"type": "metrics", "step": 3, "time": 1.5, "tokens": 8}
    values = {f"m{n}": float(n) for n in range(7)}
    (one,) = pieces_of({**record, "values": values}, most=7)
    assert one == {**record, "values": values}
    pieces = pieces_of({**record, "values": values}, most=3)
    assert [list(piece["values"]) for piece in pieces] == [
        ["m0", "m1", "m2"],
        ["m3", "m4", "m5"],
        ["m6"],
    ]
    assert all(piece | {"values": None} == record | {"values": None} for piece in pieces)
    # What is not a record of metrics is for the API to judge.
    odd = [{"type": "event", "values": values}, {"type": "metrics", "values": [1] * 9}, {}]
    assert [pieces_of(other, most=3) for other in odd] == [[other] for other in odd]
