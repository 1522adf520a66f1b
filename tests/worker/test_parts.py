"""The supervisor's parts by themselves: lease, processes, GPUs, environment, settings."""

from __future__ import annotations

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

from octrain_worker.capabilities import Gpu, _parse_nvidia_smi, find_gpus
from octrain_worker.settings import WorkerSettings
from octrain_worker.supervisor.environment import trainer_environment
from octrain_worker.supervisor.gpu_memory import GpuMemory
from octrain_worker.supervisor.lease import Lease
from octrain_worker.supervisor.process_tree import (
    descendants,
    end_processes,
    is_alive,
    read_process,
    with_environment,
)


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
