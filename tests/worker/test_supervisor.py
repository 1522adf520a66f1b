"""One supervisor and its trainer, as real processes against a real server."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octrain_worker.supervisor.process_tree import read_process


def alive(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and not process.dead


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
