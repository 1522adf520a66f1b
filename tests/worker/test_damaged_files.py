"""The small files that a node keeps for a successor, damaged: each is read, or is as if not there.

Whatever is read must be fit for the API too: a heartbeat or an outcome that it refuses would cost
the attempt.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8core.stored_json import read_object
from octrain_api.attempts.schemas import FinishRequest, HeartbeatRequest
from octrain_worker.agent.supervisors import Handle, Supervisors
from octrain_worker.api_client import ApiClient
from octrain_worker.attempt_folder import AttemptFolder, SupervisorRecord
from octrain_worker.clock import boot_id
from octrain_worker.enrolment import with_node_key
from octrain_worker.settings import ApiSettings, NodeSettings, WorkerSettings
from octrain_worker.supervisor.collector import Collector
from octrain_worker.supervisor.device_metrics import DeviceMetrics
from octrain_worker.supervisor.intake import Intake
from octrain_worker.supervisor.lease import Lease
from octrain_worker.supervisor.link import Link
from octrain_worker.supervisor.main import Assignment
from octrain_worker.supervisor.outcome import Ending, Verdict, classify
from octrain_worker.supervisor.packing import pack
from octrain_worker.supervisor.process_tree import Process
from octrain_worker.supervisor.shipper import Shipper
from octrain_worker.supervisor.spool import Spool
from octrain_worker.supervisor.telemetry_file import TelemetryFile
from octrain_worker.supervisor.uploads import Uploads
from octrain_worker.supervisor.wakeup import Wakeup
from octrain_worker.tracing import AttemptTrace
from tests.damage import read_each_damaged

RESULT = {
    "outcome": "failed",
    "reason": "trainer_crashed",
    "detail": "it broke",
    "step": 7,
    "exit_code": 1,
    "signal": "SIGABRT",
}
TELEMETRY: list[dict[str, Any]] = [
    {"type": "phase", "phase": "training"},
    *({"type": "metrics", "step": n, "values": {"train/loss": 1.5, "lr": "NaN"}} for n in range(9)),
    {"type": "progress", "step": 8, "total_steps": 9, "tokens": 80, "eta_seconds": None},
    {"type": "event", "kind": "told", "message": "it is", "data": {"a": [1]}},
    {"type": "checkpoint", "step": 8, "path": "checkpoints/step-8", "kind": "periodic"},
    {"type": "artifact", "kind": "model", "path": "model", "step": 8},
]


@pytest.fixture
def folder(tmp_path: Path) -> AttemptFolder:
    found = AttemptFolder.of(tmp_path / "attempts", "att_1")
    found.create()
    return found


@pytest.fixture
def link(folder: AttemptFolder) -> Link:
    client = ApiClient("http://127.0.0.1:9", "key")
    return Link(client, folder, 7, lease=Lease(), interval=3600.0, poke=lambda: None)


@pytest.fixture
def each() -> Callable[..., None]:
    return read_each_damaged


def test_who_supervises(folder: AttemptFolder, each: Any) -> None:
    record = SupervisorRecord.of_this_process("att_1", "job_1", 1, nonce="n", marker="m")
    folder.write_record(record)
    file = folder.path / "supervisor.json"

    def read() -> None:
        found = folder.read_record()
        if found is not None:
            assert found.attempt_id == "att_1"
            assert isinstance(found.alive, bool)
            f"{found.job_id}{found.nonce}{found.marker}".encode()

    each(file, json.loads(file.read_text()), read)


def test_how_it_ended(folder: AttemptFolder, link: Link, each: Any) -> None:
    def fits(verdict: Verdict) -> None:
        body = {"fencing_token": 7, **verdict.as_json()}
        FinishRequest.model_validate_json(json.dumps(body, ensure_ascii=False, allow_nan=False))

    def read_result() -> None:
        result = read_object(folder.work / "result.json")
        for status in (None, 1, -9):
            fits(classify(Ending(result=result, status=status, step=3)))

    def read_outcome() -> None:
        verdict = Verdict.from_json(read_object(folder.outcome))
        if verdict is not None:
            fits(verdict)

    each(folder.work / "result.json", RESULT, read_result)
    whole = classify(Ending(result=RESULT, status=1))
    each(folder.outcome, whole.as_json(), read_outcome)
    folder.outcome.write_text(json.dumps(whole.as_json()))
    read = Verdict.from_json(json.loads(folder.outcome.read_text()))
    assert read == whole


def test_what_is_registered_and_announced(folder: AttemptFolder, link: Link, each: Any) -> None:
    def take_up() -> None:
        uploads = Uploads(folder, link, url="file:///nowhere", prefix="p", keep=2)
        for records in TelemetryFile(folder, ["wandb"]).records():
            uploads.add_records(records, lambda: True)

    each(folder.registered, [["checkpoint:step-8", "model:model"]], take_up)
    folder.registered.unlink()
    (folder.work / "checkpoints/step-8").mkdir(parents=True)
    (folder.work / "model").mkdir()
    each(folder.path / "announced.jsonl", TELEMETRY, take_up)
    each(folder.work / "telemetry.jsonl", TELEMETRY, take_up)


def test_the_trainers_telemetry(folder: AttemptFolder, link: Link, each: Any) -> None:
    """What is taken up can be spooled, sent, and told by the heartbeat; damage is told once."""
    file = folder.work / "telemetry.jsonl"
    count = 0

    def take_up() -> None:
        nonlocal count
        count += 1
        spool = Spool(folder.path / f"spool-{count}")
        shipper = Shipper(spool, link)
        uploads = Uploads(folder, link, url="file:///nowhere", prefix="p", keep=2)
        collector = Collector(spool, telemetry=file, logs={"stdout": file})
        intake = Intake(
            *(collector, spool, shipper, uploads, link, Wakeup()),
            DeviceMetrics(folder.path / "none", []),
            AttemptTrace(),
        )
        intake.drain()
        HeartbeatRequest(fencing_token=7, phase=link.phase, step=link.step)
        first, records = spool.read(0, limit=10**6, max_bytes=1 << 30)
        pack(7, first, records)
        strange = [one for one in records if one.get("kind") == "telemetry_unreadable"]
        assert len(strange) <= 1
        assert len(records) > 0 or file.stat().st_size < 60
        spool.close()

    each(file, TELEMETRY, take_up)


def test_the_nodes_figures(tmp_path: Path, each: Any) -> None:
    file = tmp_path / "metrics.json"
    gpus = [{"index": n, "utilization": 50.0, "memory_used_bytes": 9.0} for n in (0, 1)]
    devices = DeviceMetrics(file, [0, 1])
    step = 0

    def read() -> None:
        nonlocal step
        step += 1
        record = devices.due(step)
        if record is not None:
            json.dumps(record, allow_nan=False)

    each(file, {"host": {"cpu_utilization": 5.0, "memory_bytes": 7}, "gpus": gpus}, read)


def test_a_lease(tmp_path: Path, each: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WorkerSettings(node=NodeSettings(data_dir=tmp_path, spare_trainer=False))
    supervisors = Supervisors(settings, "node_1", slots=1)
    folder = AttemptFolder.of(settings.attempts_folder, "att_1")
    killed: list[Handle] = []
    monkeypatch.setattr(supervisors, "_kill", killed.append)
    handle = Handle(Assignment("att_1", "job_1", 1), Process(1, 0, 1, "S", 1))
    each(
        folder.lease,
        {"ends_at": 1e12, "boot": boot_id()},
        lambda: supervisors._end_overdue("att_1", handle),
    )
    folder.lease.write_text(json.dumps({"ends_at": 1.0, "boot": boot_id()}))
    before = len(killed)
    supervisors._end_overdue("att_1", handle)
    assert len(killed) == before + 1


def test_the_nodes_key(tmp_path: Path, each: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings = WorkerSettings(
        api=ApiSettings(api_url="http://127.0.0.1:9"), node=NodeSettings(data_dir=tmp_path)
    )

    def read() -> None:
        caplog.clear()
        key = with_node_key(settings).api.node_key.get_secret_value()
        key.encode("ascii")
        assert key or "is damaged" in caplog.text

    each(tmp_path / "node.key", {"key": "secret", "token_sha256": "x", "node": "n"}, read)
