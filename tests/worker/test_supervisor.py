"""One supervisor and its trainer, as real processes against a real server."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octrain_worker.supervisor.process_tree import read_process
from tests.worker import failure_texts as texts


def alive(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and not process.dead


def memory_cgroup(limit: int) -> Path:
    """A new memory cgroup of so many bytes below this process's own; skips where none may be."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            root, limit_name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        elif not controllers:
            root, limit_name = Path("/sys/fs/cgroup"), "memory.max"
        else:
            continue
        folder = root / path.lstrip("/") / f"octrain-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit_name).write_text(str(limit))
            return folder
        except OSError:
            folder.rmdir()
    pytest.skip("no memory cgroup may be made here")


def numbered(count: int) -> list[int]:
    return list(range(1, count + 1))


class TestARun:
    def test_ships_everything_once_and_finishes(self, workplace: Any, tmp_path: Path) -> None:
        script = {"steps": 20, "checkpoint_every": 10, "print": ["hello", "x" * 20_000]}
        attempt = workplace.api.add("att_a", script)
        child = workplace.supervise("att_a")
        assert child.wait(timeout=30) == 0, workplace.log()
        assert attempt.finished is not None
        assert attempt.finished["outcome"] == "succeeded"
        assert attempt.finished["reason"] == "completed"
        assert attempt.finished["step"] == 20
        assert attempt.steps == numbered(20)
        assert attempt.log[0] == "hello"
        assert attempt.log[1] == "x" * (16 << 10) + " [... line cut after 16 KiB]"
        assert set(attempt.artifacts) == {
            ("checkpoint", "step-00000010"),
            ("checkpoint", "step-00000020"),
            ("model", "model"),
            ("report", "report.json"),
            ("log", "stdout.log"),
        }
        newest = attempt.artifacts["checkpoint", "step-00000020"]
        place = Path(newest["url"].removeprefix("file://"))
        assert place == tmp_path / "store/jobs/job_1/attempts/att_a/checkpoints/step-00000020"
        assert [file["path"] for file in newest["files"]] == ["state.json", "manifest.json"]
        assert (place / "state.json").stat().st_size == newest["files"][0]["size"]
        manifest = json.loads((place.parents[1] / "model.manifest.json").read_text())
        assert manifest["complete"] is True
        assert not workplace.folder("att_a").work.exists()

    def test_trainer_sees_no_credentials(self, workplace: Any, tmp_path: Path) -> None:
        seen = tmp_path / "environment.json"
        workplace.api.add("att_a", {"steps": 1, "dump_environment": str(seen)})
        assert workplace.supervise("att_a").wait(timeout=30) == 0
        names = set(json.loads(seen.read_text()))
        assert {"PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"} <= names
        assert not names & {"DATABASE_URL", "REDIS_URL", "AWS_SECRET_ACCESS_KEY"}
        assert not {name for name in names if name.startswith("OCTRAIN_")} - {
            "OCTRAIN_SUPERVISOR_NONCE"
        }

    def test_answers_lost_on_the_way_change_nothing(self, workplace: Any) -> None:
        attempt = workplace.api.add("att_a", {"steps": 30, "step_seconds": 0.02})
        workplace.api.lose_answers = 6
        assert workplace.supervise("att_a").wait(timeout=30) == 0, workplace.log()
        assert attempt.steps == numbered(30)
        assert attempt.finished["outcome"] == "succeeded"

    def test_api_away_does_not_stop_training(
        self, workplace: Any, until: Callable[..., Any]
    ) -> None:
        attempt = workplace.api.add("att_a", {"steps": 40, "step_seconds": 0.02})
        child = workplace.supervise("att_a")
        until(lambda: len(attempt.steps) > 3, "first steps")
        workplace.api.away = True
        work = workplace.folder("att_a").work
        until(lambda: (work / "result.json").exists(), "the trainer's end while the API is away")
        assert attempt.finished is None
        assert child.poll() is None
        workplace.api.away = False
        assert child.wait(timeout=30) == 0, workplace.log()
        assert attempt.steps == numbered(40)
        assert attempt.finished["outcome"] == "succeeded"

    def test_a_record_the_api_refuses_holds_up_nothing(self, workplace: Any) -> None:
        attempt = workplace.api.add("att_a", {"steps": 9})
        workplace.api.refuse_records = lambda record: (
            record["type"] == "metrics" and record["step"] == 4
        )
        assert workplace.supervise("att_a").wait(timeout=30) == 0, workplace.log()
        assert attempt.steps == [1, 2, 3, 5, 6, 7, 8, 9]
        assert attempt.events == ["record_refused"]

    def test_second_supervisor_of_an_attempt_leaves_it_alone(
        self, workplace: Any, until: Callable[..., Any]
    ) -> None:
        attempt = workplace.api.add("att_a", {"steps": 60, "step_seconds": 0.02})
        first = workplace.supervise("att_a")
        until(lambda: attempt.steps, "first step")
        assert workplace.supervise("att_a").wait(timeout=30) == 3
        assert first.wait(timeout=30) == 0, workplace.log()
        assert attempt.steps == numbered(60)
        assert attempt.claims == 1
        # Delivered once more, after the end.
        assert workplace.supervise("att_a").wait(timeout=30) == 3

    def test_a_slow_store_gets_the_newest_checkpoints(
        self, workplace: Any, tmp_path: Path, until: Callable[..., Any]
    ) -> None:
        store = tmp_path / "store"
        store.write_text("in the way")
        attempt = workplace.api.add("att_a", {"steps": 12, "checkpoint_every": 1})
        attempt.spec["checkpoint"] = {"keep_last": 2}
        child = workplace.supervise("att_a")
        until(workplace.folder("att_a").outcome.exists, "the trainer's end")
        store.unlink()
        assert child.wait(timeout=30) == 0, workplace.log()
        stored = sorted(name for kind, name in attempt.artifacts if kind == "checkpoint")
        assert stored[-2:] == ["step-00000011", "step-00000012"]
        assert len(stored) <= 3  # and the one whose upload had begun
        assert attempt.finished["outcome"] == "succeeded"

    def test_a_flood_of_output_fills_no_disk(
        self, workplace: Any, until: Callable[..., Any]
    ) -> None:
        limit, step = 32 << 20, 4_000_000
        workplace.environment["OCTRAIN_SUPERVISOR_LOG_BYTES"] = str(limit)
        script = {"steps": 25, "step_seconds": 0.1, "flood": step, "print": ["first words"]}
        attempt = workplace.api.add("att_a", script)
        child = workplace.supervise("att_a")
        path = workplace.folder("att_a").stdout
        largest = 0

        def ended() -> bool:
            nonlocal largest
            if path.exists():
                largest = max(largest, path.stat().st_blocks * 512)
            return child.poll() is not None

        until(ended, "the end", 60)
        assert attempt.finished["outcome"] == "succeeded", workplace.log()
        assert path.stat().st_size > 25 * step
        # It is looked after five times a second; on a machine that is busy some times are missed.
        assert largest < limit + 20 * step
        assert path.stat().st_blocks * 512 < largest
        artifact = attempt.artifacts["log", "stdout.log"]
        stored = Path(artifact["url"].removeprefix("file://")) / artifact["files"][0]["path"]
        text = stored.read_text()
        assert len(text) < largest
        assert text.startswith("first words\n")
        assert "\0" not in text
        assert re.search(r"\n\[\.\.\. \d+ bytes were not kept \.\.\.\]\n0", text)
        assert text.endswith(f"{25:07d} {'.' * 91}\n")

    def test_claim_of_another_is_respected(self, workplace: Any) -> None:
        attempt = workplace.api.add("att_a", {})
        attempt.supervisor = "somebody-else"
        assert workplace.supervise("att_a").wait(timeout=30) == 3
        assert not workplace.folder("att_a").path.exists()
        assert attempt.finished is None


class TestOutcomes:
    def test_failures_are_told_apart(self, workplace: Any) -> None:
        cases: list[tuple[dict[str, Any], str, bool, str]] = [
            ({"fail_with": ["data_invalid", 3]}, "data_invalid", False, "as the script says"),
            ({"exit_at": 2, "exit_code": 4}, "model_unavailable", False, "exit code 4"),
            ({"exit_at": 2, "exit_code": 0}, "internal_error", False, "left no result"),
            ({"exit_at": 2, "exit_code": 77}, "trainer_crashed", True, "last words"),
            ({"kill_at": 2}, "trainer_crashed", True, "SIGKILL"),
            ({"kill_at": 2, "kill_with": 11}, "trainer_crashed", True, "SIGSEGV"),
            ({"raise_at": 2, "raise": "no such thing"}, "internal_error", False, "Traceback"),
            ({"raise_at": 2, "raise": texts.ILLEGAL_ADDRESS}, "cuda_error", True, "illegal"),
            ({"raise_at": 2, "raise": texts.ECC}, "hardware_fault", True, "GPU failed"),
            (
                {"kill_at": 2, "kill_with": 6, "print_errors": texts.NCCL_TIMEOUT.splitlines()},
                "communication_error",
                True,
                "Watchdog",
            ),
        ]
        attempts = [
            workplace.api.add(f"att_{index}", {"print_errors": ["last words"], **script})
            for index, (script, *_) in enumerate(cases)
        ]
        children = [workplace.supervise(attempt.id) for attempt in attempts]
        for attempt, child, (_, reason, resumable, detail) in zip(
            attempts, children, cases, strict=True
        ):
            assert child.wait(timeout=60) == 0, workplace.log()
            assert attempt.finished["outcome"] == "failed"
            assert attempt.finished["reason"] == reason
            assert attempt.finished["resumable"] is resumable
            assert detail in attempt.finished["detail"]

    def test_host_out_of_memory(self, workplace: Any, tmp_path: Path) -> None:
        """The kernel kills the trainer, which has a cgroup's memory for itself."""
        cgroup = memory_cgroup(256 << 20)
        try:
            attempt = workplace.api.add("att_a", {"eat_memory_at": 2})
            child = workplace.supervise("att_a", within=cgroup)
            assert child.wait(timeout=60) == 0, workplace.log()
        finally:
            cgroup.rmdir()
        assert attempt.finished["reason"] == "out_of_memory"
        assert attempt.finished["resumable"] is True
        assert "the kernel killed the trainer" in attempt.finished["detail"]

    def test_trainer_that_cannot_start(self, workplace: Any) -> None:
        workplace.environment["OCTRAIN_TRAINER_COMMAND"] = f"{sys.executable} -c import.nothing"
        attempt = workplace.api.add("att_a", {})
        assert workplace.supervise("att_a").wait(timeout=30) == 0
        assert attempt.finished["reason"] == "internal_error"
        assert "SyntaxError" in attempt.finished["detail"]

    def test_results_that_cannot_be_stored_fail_the_run(
        self, workplace: Any, tmp_path: Path
    ) -> None:
        (tmp_path / "store").write_text("a file where the store should be")
        workplace.environment["OCTRAIN_SUPERVISOR_UPLOAD_PATIENCE_SECONDS"] = "0.5"
        attempt = workplace.api.add("att_a", {"steps": 2})
        assert workplace.supervise("att_a").wait(timeout=30) == 0, workplace.log()
        assert attempt.finished["outcome"] == "failed"
        assert attempt.finished["reason"] == "storage_full"
        assert "artifact_delayed" in attempt.events


class TestStopping:
    def test_pause_saves_a_checkpoint(self, workplace: Any, until: Callable[..., Any]) -> None:
        attempt = workplace.api.add("att_a", {"steps": 5000, "step_seconds": 0.02})
        child = workplace.supervise("att_a")
        until(lambda: attempt.steps, "first step")
        attempt.wanted = "pause"
        assert child.wait(timeout=30) == 0, workplace.log()
        assert attempt.finished["outcome"] == "stopped"
        assert attempt.finished["reason"] == "stopped_by_request"
        assert attempt.finished["resumable"] is True
        assert ("checkpoint", f"step-{attempt.finished['step']:08d}") in attempt.artifacts

    def test_a_stop_has_the_time_that_the_service_gives_it(
        self, workplace: Any, until: Callable[..., Any]
    ) -> None:
        """The spec's own deadline is an hour; of the service's a second is left."""
        script = {"steps": 5000, "step_seconds": 0.02, "ignore_sigterm": True}
        attempt = workplace.api.add("att_a", script, limits={"cancel_deadline_seconds": 3600})
        child = workplace.supervise("att_a")
        until(lambda: attempt.steps, "first step")
        with workplace.api.lock:
            attempt.wanted, attempt.wanted_reason = "pause", "preempted"
            attempt.stop_by = time.monotonic() + 1.0
        assert child.wait(timeout=30) == 0, workplace.log()
        assert attempt.finished["outcome"] == "stopped"
        assert "(preempted)" in attempt.finished["detail"]
        assert "was killed" in attempt.finished["detail"]

    def test_a_cancel_is_heard_with_the_telemetry(
        self, workplace: Any, until: Callable[..., Any]
    ) -> None:
        """No heartbeat is due for an hour."""
        workplace.api.heartbeat_interval = 3600.0
        attempt = workplace.api.add("att_a", {"steps": 5000, "step_seconds": 0.02})
        child = workplace.supervise("att_a")
        until(lambda: attempt.steps, "first step")
        attempt.wanted = "cancel"
        assert child.wait(timeout=30) == 0, workplace.log()
        assert attempt.finished["reason"] == "cancelled_by_user"
        assert attempt.heartbeats == 0

    def test_cancel_before_the_trainer_began(self, workplace: Any) -> None:
        attempt = workplace.api.add("att_a", {"steps": 5000, "step_seconds": 0.02})
        attempt.wanted = "cancel"
        assert workplace.supervise("att_a").wait(timeout=30) == 0, workplace.log()
        assert attempt.finished["reason"] == "cancelled_by_user"
        assert attempt.steps == []

    def test_cancel_leaves_no_descendant(
        self, workplace: Any, tmp_path: Path, until: Callable[..., Any]
    ) -> None:
        """A trainer deaf to SIGTERM, its grandchildren deaf too, in sessions of their own."""
        family = tmp_path / "family"
        attempt = workplace.api.add(
            "att_a",
            {
                "steps": 5000,
                "step_seconds": 0.02,
                "ignore_sigterm": True,
                "family": str(family),
            },
        )
        child = workplace.supervise("att_a")
        until(lambda: attempt.steps, "first step")
        pids = [int(pid) for pid in family.read_text().split()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        everyone = workplace.trainer_processes("att_a")
        assert set(pids) < set(everyone)
        finishing: list[list[int]] = []
        finish = workplace.api._finish

        def watched(attempt: Any, body: dict[str, Any]) -> tuple[int, Any]:
            finishing.append([pid for pid in everyone if alive(pid)])
            return finish(attempt, body)

        workplace.api._finish = watched
        attempt.wanted = "cancel"
        assert child.wait(timeout=30) == 0, workplace.log()
        assert attempt.finished["reason"] == "cancelled_by_user"
        assert "killed" in attempt.finished["detail"]
        assert finishing == [[]], "something lived when the attempt was reported as ended"

    def test_processes_left_by_a_good_trainer_are_ended(
        self, workplace: Any, tmp_path: Path
    ) -> None:
        family = tmp_path / "family"
        attempt = workplace.api.add("att_a", {"steps": 2, "family": str(family)})
        assert workplace.supervise("att_a").wait(timeout=30) == 0, workplace.log()
        assert attempt.finished["outcome"] == "succeeded"
        assert not [pid for pid in map(int, family.read_text().split()) if alive(pid)]

    def test_lease_that_runs_out_stops_the_trainer_before_its_end(
        self, workplace: Any, until: Callable[..., Any]
    ) -> None:
        attempt = workplace.api.add("att_a", {"steps": 9999, "step_seconds": 0.02})
        attempt.lease_seconds = 3.0
        child = workplace.supervise("att_a")
        until(lambda: attempt.steps, "first step")
        heard = attempt.heartbeats
        until(lambda: attempt.heartbeats > heard, "a heartbeat")
        workplace.api.away = True
        away_at = time.monotonic()
        everyone = workplace.trainer_processes("att_a")
        assert everyone
        until(lambda: not [pid for pid in everyone if alive(pid)], "the trainer's end", 10)
        # The last heartbeat was answered before the API went away.
        assert time.monotonic() - away_at < 3.0
        assert child.poll() is None
        workplace.api.away = False
        assert child.wait(timeout=30) == 0, workplace.log()
        assert attempt.finished["reason"] == "worker_lost"
        assert attempt.finished["resumable"] is True
        assert ("checkpoint", f"step-{attempt.finished['step']:08d}") in attempt.artifacts
        assert attempt.steps == numbered(attempt.finished["step"])

    def test_disowned_supervisor_writes_nothing_more(
        self, workplace: Any, until: Callable[..., Any]
    ) -> None:
        attempt = workplace.api.add("att_a", {"steps": 9999, "step_seconds": 0.02})
        child = workplace.supervise("att_a")
        until(lambda: attempt.steps, "first step")
        everyone = workplace.trainer_processes("att_a")
        with workplace.api.lock:
            attempt.token = 8
            count = len(attempt.records)
        assert child.wait(timeout=30) == 3
        assert len(attempt.records) == count
        assert attempt.finished is None
        assert not [pid for pid in everyone if alive(pid)]

    def test_first_sigterm_saves_second_leaves_at_once(
        self, workplace: Any, until: Callable[..., Any]
    ) -> None:
        polite = workplace.api.add("att_a", {"steps": 9999, "step_seconds": 0.02})
        deaf = workplace.api.add(
            "att_b", {"steps": 9999, "step_seconds": 0.02, "ignore_sigterm": True}
        )
        first, second = workplace.supervise("att_a"), workplace.supervise("att_b")
        until(lambda: polite.steps and deaf.steps, "first steps")
        first.terminate()
        second.terminate()
        assert first.wait(timeout=30) == 0, workplace.log()
        assert polite.finished["outcome"] == "stopped"
        assert polite.finished["reason"] == "stopped_by_request"
        assert "node shuts down" in polite.finished["detail"]
        everyone = workplace.trainer_processes("att_b")
        assert everyone
        second.terminate()
        second.wait(timeout=5)
        assert not [pid for pid in everyone if alive(pid)]


class TestSuccessor:
    def test_killed_supervisor_takes_its_trainer_along_and_is_succeeded(
        self, workplace: Any, tmp_path: Path, until: Callable[..., Any]
    ) -> None:
        family = tmp_path / "family"
        attempt = workplace.api.add(
            "att_a",
            {"steps": 9999, "step_seconds": 0.02, "checkpoint_every": 5, "family": str(family)},
        )
        child = workplace.supervise("att_a")
        until(lambda: attempt.artifacts, "first checkpoint")
        record = workplace.folder("att_a").read_record()
        everyone = workplace.trainer_processes("att_a")
        child.send_signal(signal.SIGKILL)
        child.wait()
        grandchildren = [int(pid) for pid in family.read_text().split()]
        (trainer,) = set(everyone) - set(grandchildren)
        until(lambda: not alive(trainer), "the trainer's death with its supervisor", 5)
        assert all(alive(pid) for pid in grandchildren)
        telemetry = (workplace.folder("att_a").work / "telemetry.jsonl").read_text()
        written = [json.loads(line) for line in telemetry.splitlines()]

        successor = workplace.supervise("att_a")
        assert successor.wait(timeout=30) == 0, workplace.log()
        assert not [pid for pid in grandchildren if alive(pid)]
        assert attempt.supervisor == record.nonce
        assert attempt.finished["reason"] == "worker_lost"
        assert attempt.finished["resumable"] is True
        steps = [one["step"] for one in written if one["type"] == "metrics"]
        assert attempt.steps == steps == numbered(len(steps))
        newest = max(one["step"] for one in written if one["type"] == "checkpoint")
        assert ("checkpoint", f"step-{newest:08d}") in attempt.artifacts

    def test_result_reported_by_a_successor(
        self, workplace: Any, until: Callable[..., Any]
    ) -> None:
        attempt = workplace.api.add("att_a", {"steps": 10})
        child = workplace.supervise("att_a")
        folder = workplace.folder("att_a")
        until(lambda: attempt.claims, "the claim")
        workplace.api.away = True
        until(folder.outcome.exists, "the outcome")
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        workplace.api.away = False
        assert workplace.supervise("att_a").wait(timeout=30) == 0, workplace.log()
        assert attempt.finished["outcome"] == "succeeded"
        assert attempt.steps == numbered(10)
        assert ("model", "model") in attempt.artifacts


class TestResume:
    def test_torn_checkpoints_are_passed_over(self, workplace: Any) -> None:
        """The newest lost a byte, the next has other bytes, the next lost a file."""
        first = workplace.api.add("att_a", {"steps": 8, "checkpoint_every": 2})
        first.spec["checkpoint"] = {"keep_last": 9}
        assert workplace.supervise("att_a").wait(timeout=30) == 0
        names = [f"step-{step:08d}" for step in (8, 6, 4, 2)]
        places = [Path(first.candidate(name)["url"].removeprefix("file://")) for name in names]
        states = [place / "state.json" for place in places]
        states[0].write_bytes(states[0].read_bytes()[:-1])
        states[1].write_bytes(states[1].read_bytes()[:-1] + b"x")
        states[2].unlink()
        second = workplace.api.add("att_b", {"steps": 5})
        second.resume_candidates = [first.candidate(name) for name in names]
        assert workplace.supervise("att_b").wait(timeout=30) == 0, workplace.log()
        assert second.steps == [3, 4, 5]
        assert second.events == ["checkpoint_torn"] * 3 + ["checkpoint_fetched"]
        assert second.data_of("checkpoint_torn") == [
            {"artifact_id": f"art_checkpoint_{name}", "step": step}
            for name, step in zip(names, (8, 6, 4), strict=False)
        ]

    def test_without_a_whole_one_it_begins_anew_and_says_so(self, workplace: Any) -> None:
        first = workplace.api.add("att_a", {"steps": 2, "checkpoint_every": 2})
        assert workplace.supervise("att_a").wait(timeout=30) == 0
        point = first.candidate("step-00000002")
        (Path(point["url"].removeprefix("file://")) / "manifest.json").unlink()
        second = workplace.api.add("att_b", {"steps": 2}, resume_candidates=[point])
        assert workplace.supervise("att_b").wait(timeout=30) == 0, workplace.log()
        assert second.steps == [1, 2]
        assert second.events == ["checkpoint_torn", "no_checkpoint"]

    def test_a_store_that_is_not_mounted_tears_nothing(
        self, workplace: Any, tmp_path: Path, until: Callable[..., Any]
    ) -> None:
        first = workplace.api.add("att_a", {"steps": 2, "checkpoint_every": 2})
        assert workplace.supervise("att_a").wait(timeout=30) == 0
        store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
        store.rename(elsewhere)
        store.mkdir()  # the empty mount point
        point = first.candidate("step-00000002")
        second = workplace.api.add("att_b", {"steps": 4}, resume_candidates=[point])
        child = workplace.supervise("att_b")
        until(lambda: second.events, "the first try")
        assert second.events == ["store_unreachable"]
        store.rmdir()
        elsewhere.rename(store)
        assert child.wait(timeout=30) == 0, workplace.log()
        assert second.steps == [3, 4]
        assert second.events == ["store_unreachable", "checkpoint_fetched"]

        store.rename(elsewhere)
        workplace.environment["OCTRAIN_SUPERVISOR_FETCH_PATIENCE_SECONDS"] = "0.2"
        third = workplace.api.add("att_c", {"steps": 4}, resume_candidates=[point])
        assert workplace.supervise("att_c").wait(timeout=30) == 0
        assert third.finished["reason"] == "internal_error"
        assert third.finished["resumable"] is True
        assert "could not be read" in third.finished["detail"]
        assert third.steps == []

    def test_too_little_room_is_told_before_anything_begins(self, workplace: Any) -> None:
        first = workplace.api.add("att_a", {"steps": 2, "checkpoint_every": 2})
        assert workplace.supervise("att_a").wait(timeout=30) == 0
        point = first.candidate("step-00000002")
        huge = {"path": "model.safetensors", "size": 1 << 60, "sha256": "0" * 64}
        point["manifest"] = {"complete": True, "files": [huge]}
        second = workplace.api.add("att_b", {"steps": 4}, resume_candidates=[point])
        second.spec["checkpoint"] = {"keep_last": 2, "every_steps": 1}
        assert workplace.supervise("att_b").wait(timeout=30) == 0
        assert second.finished["reason"] == "storage_full"
        assert second.finished["resumable"] is False
        assert f"{1 << 30}.00 GiB at once" in second.finished["detail"]
        assert str(workplace.folder("att_b").work) in second.finished["detail"]
        assert second.events == []
