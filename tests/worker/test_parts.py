"""The supervisor's parts by themselves: spool, collector, lease, outcome, processes, GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.spec.outcomes import Outcome, Reason
from octrain_worker.capabilities import Gpu, _parse_nvidia_smi, find_gpus
from octrain_worker.settings import WorkerSettings
from octrain_worker.supervisor.collector import Collector, last_lines
from octrain_worker.supervisor.environment import trainer_environment
from octrain_worker.supervisor.gpu_memory import GpuMemory
from octrain_worker.supervisor.lease import Lease
from octrain_worker.supervisor.outcome import Ending, StopCause, classify
from octrain_worker.supervisor.process_tree import (
    descendants,
    end_processes,
    is_alive,
    read_process,
    with_environment,
)
from octrain_worker.supervisor.spool import Entry, Spool
from tests.worker import failure_texts as texts


def record(number: int) -> dict[str, Any]:
    return {"type": "event", "kind": f"e{number}", "message": "", "data": {}}


class TestSpool:
    def test_numbers_survive_and_nothing_is_read_twice(self, tmp_path: Path) -> None:
        spool = Spool(tmp_path, segment_bytes=300)
        for number in range(1, 41):
            spool.append([Entry(record(number), "telemetry", number * 10)])
        assert spool.read(0, limit=3) == (1, [record(1), record(2), record(3)])
        assert spool.read(3, limit=2) == (4, [record(4), record(5)])
        assert spool.read(38) == (39, [record(39), record(40)])
        assert spool.read(40) == (41, [])
        spool.acknowledge(39)
        spool.close()
        assert len(list(tmp_path.glob("*.jsonl"))) <= 2
        again = Spool(tmp_path, segment_bytes=300)
        assert (again.last_seq, again.acknowledged_seq) == (40, 39)
        assert again.position("telemetry") == 400
        again.append([Entry(record(41))])
        assert again.read(39) == (40, [record(40), record(41)])
        again.close()

    def test_torn_last_line_is_cut_off(self, tmp_path: Path) -> None:
        spool = Spool(tmp_path)
        spool.append([Entry(record(1), "stdout", 5), Entry(record(2), "stdout", 9)])
        spool.close()
        (segment,) = tmp_path.glob("*.jsonl")
        segment.write_bytes(segment.read_bytes()[:-3])
        again = Spool(tmp_path)
        assert again.last_seq == 1
        assert again.position("stdout") == 5
        again.append([Entry(record(7))])
        assert again.read(0) == (1, [record(1), record(7)])
        again.close()

    def test_pieces_are_there_together_or_not_at_all(self, tmp_path: Path) -> None:
        spool = Spool(tmp_path)
        spool.append([Entry(record(1), "telemetry", 5)])
        pieces = [Entry(record(n), goes_on=True) for n in (2, 3)]
        spool.append([*pieces, Entry(record(4), "telemetry", 9)])
        spool.close()
        (segment,) = tmp_path.glob("*.jsonl")
        whole = segment.read_bytes()
        again = Spool(tmp_path)
        assert (again.last_seq, again.position("telemetry")) == (4, 9)
        again.close()
        first = whole.index(b'"seq":2')
        for end in range(first, len(whole)):
            segment.write_bytes(whole[:end])
            torn = Spool(tmp_path)
            assert (torn.last_seq, torn.position("telemetry")) == (1, 5)
            torn.append([Entry(record(7))])
            assert torn.read(0) == (1, [record(1), record(7)])
            torn.close()

    def test_acknowledged_segment_under_the_cursor(self, tmp_path: Path) -> None:
        spool = Spool(tmp_path, segment_bytes=1)
        for number in (1, 2, 3):
            spool.append([Entry(record(number))])
        first, records = spool.read(0)
        assert (first, len(records)) == (1, 3)
        spool.acknowledge(3)
        spool.append([Entry(record(4))])
        assert spool.read(3) == (4, [record(4)])
        spool.close()

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.integers(1, 5), max_size=12), st.integers(1, 7), st.integers(80, 900))
    def test_any_batches_come_out_as_they_went_in(
        self, tmp_path_factory: pytest.TempPathFactory, batches: list[int], limit: int, size: int
    ) -> None:
        spool = Spool(tmp_path_factory.mktemp("spool"), segment_bytes=size)
        written = 0
        read: list[dict[str, Any]] = []
        for count in batches:
            spool.append([Entry(record(written + one)) for one in range(count)])
            written += count
            first, records = spool.read(len(read), limit=limit)
            assert first == len(read) + 1
            read += records
            spool.acknowledge(len(read))
        while len(read) < written:
            read += spool.read(len(read), limit=limit)[1]
        assert read == [record(number) for number in range(written)]
        spool.close()


class TestCollector:
    @pytest.fixture
    def collector(self, tmp_path: Path) -> Collector:
        self.spool = Spool(tmp_path / "spool")
        self.telemetry = tmp_path / "telemetry.jsonl"
        self.stdout = tmp_path / "stdout.log"
        return Collector(self.spool, telemetry=self.telemetry, logs={"stdout": self.stdout})

    def log(self) -> list[str]:
        return [
            one["text"]
            for one in self.spool.read(0, limit=10**6, max_bytes=1 << 30)[1]
            if one["type"] == "log"
        ]

    def test_lines_are_taken_when_whole_and_once(self, collector: Collector) -> None:
        with self.stdout.open("ab", buffering=0) as file:
            file.write(b"one\ntw")
            collector.collect()
            assert self.log() == ["one"]
            file.write(b"o\r\nbad \xff\0 bytes\nrest")
            collector.collect()
        collector.drain()
        assert self.log() == ["one", "two", "bad \ufffd\ufffd bytes", "rest"]

    def test_endless_line_is_cut(self, collector: Collector) -> None:
        self.stdout.write_bytes(b"y" * 40_000)
        collector.collect()
        assert self.log() == ["y" * 16_384 + " [... line cut after 16 KiB]"]

    def test_runaway_log_is_skipped_and_says_so(self, collector: Collector) -> None:
        self.stdout.write_bytes(b"spam and more spam\n" * (1 << 19) + b"end\n")
        collector.drain()
        text = self.log()
        assert "bytes) of stdout left out here" in text[0]
        assert text[-1] == "end"

    def test_unknown_telemetry_does_not_stop_the_rest(self, collector: Collector) -> None:
        known = {"seq": 2, "time": 1.0, "type": "phase", "phase": "training"}
        lines = ["not json", json.dumps(known), '{"type":"future"}', '{"torn":']
        self.telemetry.write_text("\n".join(lines))
        found = collector.collect()
        assert [one["type"] for one in found] == ["event", "phase", "event"]
        assert "seq" not in found[1]
        assert collector.collect() == []

    def test_last_lines(self, tmp_path: Path) -> None:
        out, err = tmp_path / "out", tmp_path / "err"
        out.write_text("a\nb\n")
        err.write_text("".join(f"{number}\n" for number in range(3)))
        assert last_lines([out, err, tmp_path / "none"], 4) == "b\n0\n1\n2"


class TestLease:
    def test_margins_and_renewal(self) -> None:
        now = 1000.0
        lease = Lease(clock=lambda: now)
        lease.grant(995.0, 900.0)
        assert (lease.ends_at, lease.stop_at, lease.kill_at) == (1895.0, 1775.0, 1885.0)
        assert not lease.stopping
        now = 1775.0
        assert lease.stopping
        # As the API grants it when a stop has a deadline: it will not wait for longer.
        lease.grant(1774.0, 30.0)
        assert (lease.ends_at, lease.stop_at, lease.kill_at) == (1804.0, 1794.0, 1801.0)
        short = Lease(clock=lambda: now)
        short.grant(now, 30.0)
        assert short.stop_at < short.kill_at < short.ends_at


SAID = {"outcome": "succeeded", "reason": "completed", "detail": "", "step": 9, "exit_code": 0}


class TestOutcome:
    def test_success_wins_over_a_late_cancel(self) -> None:
        verdict = classify(Ending(SAID, 0, StopCause.CANCEL))
        assert (verdict.outcome, verdict.step) == (Outcome.SUCCEEDED, 9)

    def test_kill_for_memory(self) -> None:
        verdict = classify(Ending(None, -9, host_out_of_memory=True, log_tail="x"))
        assert (verdict.reason, verdict.resumable) == (Reason.OUT_OF_MEMORY, True)
        assert classify(Ending(None, -9)).reason is Reason.TRAINER_CRASHED

    def test_nobody_saw_the_end(self) -> None:
        assert classify(Ending(None, None)).reason is Reason.WORKER_LOST
        assert classify(Ending(SAID, None)).outcome is Outcome.SUCCEEDED

    def test_failure_while_pausing_is_a_failure_while_cancelling_a_cancel(self) -> None:
        failed = {**SAID, "outcome": "failed", "reason": "diverged", "detail": "loss is NaN"}
        assert classify(Ending(failed, 7, StopCause.PAUSE)).reason is Reason.DIVERGED
        cancelled = classify(Ending(failed, 7, StopCause.CANCEL))
        assert cancelled.reason is Reason.CANCELLED_BY_USER
        assert "loss is NaN" in cancelled.detail

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            (texts.ILLEGAL_ADDRESS, Reason.CUDA_ERROR),
            (texts.DEVICE_ASSERT, Reason.CUDA_ERROR),
            (texts.CUBLAS_FAILED, Reason.CUDA_ERROR),
            (texts.ECC, Reason.HARDWARE_FAULT),
            (texts.NVLINK, Reason.HARDWARE_FAULT),
            (texts.DEVICE_BUSY, Reason.HARDWARE_FAULT),
            (texts.LOST, Reason.HARDWARE_FAULT),
            (texts.CUDA_OUT_OF_MEMORY, Reason.OUT_OF_MEMORY),
            (texts.CUBLAS_OUT_OF_MEMORY, Reason.OUT_OF_MEMORY),
            (texts.HOST_OUT_OF_MEMORY, Reason.OUT_OF_MEMORY),
            (texts.NCCL_TIMEOUT, Reason.COMMUNICATION_ERROR),
            (texts.NCCL_ERROR, Reason.COMMUNICATION_ERROR),
            (texts.GLOO, Reason.COMMUNICATION_ERROR),
            ("OSError: [Errno 28] No space left on device: 'x'\n", Reason.STORAGE_FULL),
            # The peer that broke down is the cause, whoever spoke last.
            (texts.ECC + texts.NCCL_ERROR, Reason.HARDWARE_FAULT),
            (texts.CUDA_OUT_OF_MEMORY + texts.NCCL_TIMEOUT, Reason.OUT_OF_MEMORY),
            ("ValueError: CUDA is not mentioned here as an error\n", Reason.TRAINER_CRASHED),
        ],
    )
    def test_words_of_a_crash(self, text: str, reason: Reason) -> None:
        verdict = classify(Ending(None, 77, log_tail=f"step 1\n{text}", crash_log=""))
        passing = reason is not Reason.STORAGE_FULL
        assert (verdict.reason, verdict.resumable) == (reason, passing)
        assert "Its last lines:\nstep 1\n" in verdict.detail
        # The same from the exception that the trainer reports, and its traceback.
        said = {"outcome": "failed", "reason": "internal_error", "detail": "it broke", "step": 3}
        reported = classify(Ending(said, 1, crash_log=text))
        if reason is Reason.TRAINER_CRASHED:
            assert (reported.reason, reported.resumable) == (Reason.INTERNAL_ERROR, False)
        else:
            assert (reported.reason, reported.resumable) == (reason, passing)

    def test_a_rank_killed_for_memory(self) -> None:
        killed = Ending(None, 1, host_out_of_memory=True, log_tail=texts.RANK_KILLED)
        assert classify(killed).reason is Reason.OUT_OF_MEMORY
        unproven = Ending(None, 1, log_tail=texts.RANK_KILLED)
        verdict = classify(unproven)
        assert (verdict.reason, verdict.resumable) == (Reason.TRAINER_CRASHED, True)
        assert verdict.detail.startswith("a rank of the trainer was ended by SIGKILL")

    def test_a_rank_that_only_lost_its_peer(self) -> None:
        """Rank 0 reports; what its peer died of stands in the log of both."""
        said = {"outcome": "failed", "reason": "internal_error", "detail": texts.NCCL_ERROR}
        log = texts.ECC + texts.NCCL_ERROR
        assert classify(Ending(said, 1, log_tail=log)).reason is Reason.HARDWARE_FAULT

    def test_a_precise_reason_is_not_explained_away(self) -> None:
        said = {"outcome": "failed", "reason": "data_invalid", "detail": "line 3 is no JSON"}
        verdict = classify(Ending(said, 3, log_tail=texts.ECC))
        assert (verdict.reason, verdict.detail) == (Reason.DATA_INVALID, "line 3 is no JSON")

    def test_result_that_is_none(self) -> None:
        assert classify(Ending({"outcome": "?"}, 1)).reason is Reason.INTERNAL_ERROR


class TestProcesses:
    def test_a_zombie_is_dead(self) -> None:
        child = subprocess.Popen([sys.executable, "-c", ""])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        process = read_process(child.pid)
        assert process is not None
        assert process.state == "Z"
        assert not is_alive(process.pid, process.start_ticks)
        assert child.pid not in [one.pid for one in descendants(os.getpid())]
        child.wait()
        assert read_process(child.pid) is None

    def test_found_by_environment_and_ended(self, until: Callable[..., Any]) -> None:
        deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1); time.sleep(99)"
        child = subprocess.Popen(
            [sys.executable, "-u", "-c", deaf],
            env=trainer_environment("nonce-of-this-test"),
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert child.stdout is not None
        child.stdout.readline()
        name = "OCTRAIN_SUPERVISOR_NONCE"
        assert [one.pid for one in with_environment(name, "nonce-of-this-test")] == [child.pid]
        assert with_environment(name, "nonce-of-this") == []
        assert not end_processes(
            lambda: with_environment(name, "nonce-of-this-test"), grace=99, patience=0.1
        )
        assert end_processes(
            lambda: with_environment(name, "nonce-of-this-test"), grace=0.1, patience=20
        )
        assert child.wait() == -9
        child.stdout.close()

    def test_found_while_its_program_is_still_being_loaded(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Popen returns a moment before the kernel shows the new program's environment, so of
        many that are looked at first of all some show none yet.
        """
        for number in range(800):
            child = subprocess.Popen(["sleep", "60"], env={"OCTRAIN_TEST": str(number)})
            try:
                with monkeypatch.context() as patch:
                    patch.setattr(os, "listdir", lambda _, pid=child.pid: [str(pid)])
                    found = [one.pid for one in with_environment("OCTRAIN_TEST", str(number))]
            finally:
                child.kill()
                child.wait()
            assert found == [child.pid]


class TestGpuMemory:
    """A stand-in for NVML: this machine need not have a GPU."""

    @pytest.fixture
    def nvml(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        class NVMLError(Exception):
            pass

        module = types.SimpleNamespace(used=1 << 30, pids=[7], calls=0, NVMLError=NVMLError)

        def memory(_device: int) -> Any:
            module.calls += 1
            return types.SimpleNamespace(used=module.used)

        def processes(_device: int) -> list[Any]:
            return [types.SimpleNamespace(pid=pid) for pid in module.pids]

        module.nvmlInit = module.nvmlShutdown = lambda: None
        module.nvmlDeviceGetHandleByIndex = lambda index: index
        module.nvmlDeviceGetMemoryInfo = memory
        module.nvmlDeviceGetComputeRunningProcesses = processes
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    def test_it_waits_for_what_came_since(self, nvml: Any) -> None:
        gpus = GpuMemory([0])
        nvml.used, nvml.pids = 41 << 30, [7, 99]
        held = gpus.wait_until_free(0.0)
        assert held is not None
        assert "GPU 0 holds 40960 MiB" in held
        assert "[99]" in held
        asked = nvml.calls

        def gives_back() -> None:
            while nvml.calls < asked + 2:
                time.sleep(0.01)
            nvml.used, nvml.pids = 1 << 30, [7]

        thread = threading.Thread(target=gives_back)
        thread.start()
        assert gpus.wait_until_free(60.0) is None
        thread.join()

    def test_without_gpus_or_nvml_nothing_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert GpuMemory([0]).wait_until_free(60.0) is None
        assert GpuMemory([]).wait_until_free(60.0) is None


def test_environment_is_an_allow_list() -> None:
    base = {
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": "secret",
        "REDIS_URL": "secret",
        "MINE": "yes",
    }
    assert trainer_environment("n", extra_names=["MINE"], base=base) == {
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "MINE": "yes",
        "PYTHONUNBUFFERED": "1",
        "OCTRAIN_SUPERVISOR_NONCE": "n",
    }


def test_nvidia_smi_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "0, NVIDIA H200, 143771, 9.0\n1, NVIDIA H200, 143771, 9.0\nFailed, [N/A], x, y\n"
    expected = [Gpu(index, "NVIDIA H200", 143771 << 20, "9.0") for index in (0, 1)]
    assert _parse_nvidia_smi(text) == expected
    monkeypatch.setattr("octrain_worker.capabilities._gpus_by_nvml", lambda: expected)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert find_gpus() == expected[1:]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_gpus() == []


def test_settings_travel_to_a_supervisor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTRAIN_ROOTS", f"/data{os.pathsep}/models")
    monkeypatch.setenv("OCTRAIN_TRAINER_COMMAND", "python -m 'my trainer'")
    monkeypatch.setenv("OCTRAIN_WORKER_DATA_DIR", str(tmp_path))
    first = WorkerSettings()
    assert first.storage.roots == (Path("/data"), Path("/models"))
    assert first.trainer.command == ("python", "-m", "my trainer")
    assert first.artifact_url == (tmp_path / "artifacts").as_uri()
    assert first.private_storage
    for name, value in first.environment().items():
        monkeypatch.setenv(name, value)
    second = WorkerSettings()
    assert second.trainer == first.trainer
    assert second.storage.roots == first.storage.roots
    assert second.artifact_url == first.artifact_url
