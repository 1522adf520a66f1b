"""What a supervisor leaves on its node: files that go, and files that must not come back."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octrain_worker.agent import supervisors as supervisors_module
from octrain_worker.agent.supervisors import Supervisors
from octrain_worker.api_client import ApiClient
from octrain_worker.attempt_folder import AttemptFolder, SupervisorRecord, write_private
from octrain_worker.settings import NodeSettings, WorkerSettings
from octrain_worker.supervisor import link as link_module
from octrain_worker.supervisor.lease import Lease
from octrain_worker.supervisor.link import Link
from octrain_worker.supervisor.main import Assignment

LARGE = ("work", "model", "dataset", "uploads", "spool")


@pytest.fixture
def folder(tmp_path: Path) -> AttemptFolder:
    """A folder with all that an attempt can have."""
    found = AttemptFolder.of(tmp_path / "attempts", "att_1")
    found.create()
    found.hold_reserve()
    for name in LARGE:
        (found.path / name / "below").mkdir(parents=True)
        (found.path / name / "below" / "file").write_text("x")
    found.stdout.write_text("printed\n")
    return found


@pytest.fixture
def supervisors(tmp_path: Path) -> Supervisors:
    settings = WorkerSettings(node=NodeSettings(data_dir=tmp_path, spare_trainer=False))
    return Supervisors(settings, "node_1", slots=1)


def test_nothing_is_begun_once_the_node_shuts_down(supervisors: Supervisors) -> None:
    """A message that was taken just before: who would tell its supervisor to save?"""
    supervisors.shut_down(0.1, threading.Event())
    assert supervisors.start(Assignment("att_1", "job_1", 1)) is None
    assert supervisors.active() == []


def test_an_attempt_whose_supervisors_all_crash_is_given_up(
    workplace: Any, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them claims it once more, which renews the lease: it would never be lost."""
    for name, value in workplace.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(supervisors_module, "_MOST_CRASHES", 2)
    monkeypatch.setattr(supervisors_module, "_SUCCESSOR_DELAYS", (0.0,))
    monkeypatch.setenv("OCTRAIN_WORKER_SPARE_TRAINER", "false")
    attempt = workplace.api.add("att_1", {})
    folder = workplace.folder("att_1")
    folder.create()
    folder.write_record(SupervisorRecord("att_1", "job_1", 1, "n", "m", 1, 1, "another boot"))
    folder.started.write_text("{}")
    # Damaged on the disk, whoever opens it.
    folder.spool.write_text("no folder")
    supervisors = Supervisors(WorkerSettings(), "node_1", slots=1)
    supervisors.adopt_all()

    def is_given_up() -> bool:
        supervisors.tick()
        return not supervisors.active()

    until(is_given_up, "the end of the trials", 90)
    assert attempt.claims == 3
    assert attempt.finished is None
    assert folder.started.exists()


def left(folder: AttemptFolder) -> set[str]:
    return {path.name for path in folder.path.iterdir()}


def test_a_closed_attempt_keeps_only_small_files(folder: AttemptFolder) -> None:
    folder.finish("reported")
    assert left(folder) == {"finished.json", "stdout.log"}


def test_the_node_removes_what_a_killed_supervisor_did_not(
    folder: AttemptFolder, supervisors: Supervisors
) -> None:
    """It was killed when it had written that it is done, before it removed what is large."""
    supervisors.remove_finished()
    assert set(LARGE) <= left(folder)
    folder.finished.write_text(json.dumps({"how": "reported", "time": 0.0}))
    supervisors.remove_finished()
    assert left(folder) == {"finished.json", "stdout.log"}


@pytest.mark.parametrize("change", ["more", "less", "other"])
def test_records_of_other_versions(
    folder: AttemptFolder, supervisors: Supervisors, change: str
) -> None:
    """A node that was upgraded, or taken back, starts all the same."""
    record = SupervisorRecord.of_this_process("att_1", "job_1", 1, nonce="n", marker="m")
    folder.write_record(record)
    place = folder.path / "supervisor.json"
    value: Any = json.loads(place.read_text())
    if change == "more":
        value["of_a_later_version"] = True
    elif change == "less":
        del value["marker"]
    else:
        value = ["not", "this"]
    place.write_text(json.dumps(value))
    assert folder.read_record() == (record if change == "more" else None)
    held = folder.lock()
    assert held is not None
    supervisors.adopt_all()
    assert supervisors.active() == (["att_1"] if change == "more" else [])
    assert folder.path.exists()


def test_the_lease_is_not_written_once_more_after_the_end_of_training(
    folder: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent would take the supervisor for frozen while it uploads, and kill it."""
    link = Link(
        ApiClient("http://127.0.0.1:9", "key"),
        folder,
        7,
        lease=Lease(),
        interval=3600.0,
        poke=lambda: None,
    )
    ending = threading.Thread(target=link.end_of_training)

    def write_slowly(target: Path, value: Any) -> None:
        ending.start()
        ending.join(0.2)
        write_private(target, value)

    monkeypatch.setattr(link_module, "write_private", write_slowly)
    link.start()
    ending.join()
    link.close()
    assert not link.training
    assert not folder.lease.exists()
