"""Metrics of the node: read where they can be, left out where not, sent once, given to its jobs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octrain_worker.agent.node_metrics import (
    GpuUse,
    HostReader,
    NodeSampler,
    NvmlReader,
    SampleSender,
)
from octrain_worker.api_client import ApiRefused, ApiUnavailable
from octrain_worker.supervisor.device_metrics import DeviceMetrics


class RecordedNvml:
    """What NVML answered on machines of three kinds: an H200, a part of one, and an old card."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class NVMLError_NoPermission(NVMLError):
        pass

    NVML_TEMPERATURE_GPU = 0
    utilization: tuple[int | None, ...] = (97, None, 0)
    memory = (75_161_927_680, 1_048_576, 0)
    power = (612_345, None, None)
    temperature = (61, 40, None)

    def __init__(self) -> None:
        self.starts = 0
        self.gone = False

    def nvmlInit(self) -> None:
        self.starts += 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if self.gone:
            raise self.NVMLError("GPU is lost")
        return index

    def _known(self, value: Any) -> Any:
        if value is None:
            raise self.NVMLError_NotSupported("Not Supported")
        return value

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        value = self._known(self.utilization[handle])
        return type("Rates", (), {"gpu": value, "memory": 1})

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return type("Memory", (), {"used": self.memory[handle], "total": 1 << 40})

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return int(self._known(self.power[handle]))

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return int(self._known(self.temperature[handle]))


def test_nvml_is_read_in_our_units_and_unknown_is_not_zero() -> None:
    assert NvmlReader([0, 1, 2], RecordedNvml()).read() == [
        GpuUse(0, 0.97, 75_161_927_680, 612.345, 61.0),
        GpuUse(1, None, 1_048_576, None, 40.0),
        GpuUse(2, 0.0, 0, None, None),
    ]
    assert [gpu.index for gpu in NvmlReader([2], RecordedNvml()).read()] == [2]


def test_a_driver_that_goes_away_is_opened_anew() -> None:
    nvml = RecordedNvml()
    reader = NvmlReader([0], nvml)
    reader.read()
    reader.read()
    assert nvml.starts == 1
    nvml.gone = True
    assert reader.read() == []
    nvml.gone = False
    assert len(reader.read()) == 1
    assert nvml.starts == 2


def test_without_gpus_or_nvml_there_are_no_gpu_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = RecordedNvml()
    assert NvmlReader([], nvml).read() == []
    assert nvml.starts == 0
    monkeypatch.setattr("octrain_worker.agent.node_metrics._pynvml", lambda: None)
    assert NvmlReader([0]).read() == []


@pytest.mark.gpu
def test_a_real_gpu_is_read() -> None:
    torch = pytest.importorskip("torch")
    [before] = NvmlReader([0]).read()
    assert before.memory_bytes is not None
    held = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    work = torch.rand(8192, 8192, device="cuda", dtype=torch.bfloat16)
    sampler = NodeSampler(NvmlReader([0]), HostReader())
    for _ in range(20):
        for _ in range(50):
            work @ work
        torch.cuda.synchronize()
        sampler.look()
    [gpu] = sampler.sample()["gpus"]
    assert gpu["memory_bytes"] >= before.memory_bytes + held.numel()
    assert gpu["utilization"] > 0.2
    assert 30 < gpu["power_watts"] < 1500
    assert 10 < gpu["temperature_celsius"] < 110


class Gpus:
    """Readings, one after the other."""

    def __init__(self, *readings: list[GpuUse]) -> None:
        self.readings = list(readings)

    def read(self) -> list[GpuUse]:
        return self.readings.pop(0)


class Host(HostReader):
    def read(self) -> dict[str, float | int]:
        return {"cpu_utilization": 0.5, "memory_bytes": 100}


def test_utilisation_is_the_mean_since_the_last_sample() -> None:
    gpus = Gpus(
        [GpuUse(0, 0.0, 1), GpuUse(1, None, 5)],
        [GpuUse(0, 1.0, 2), GpuUse(1, None, 5)],
        [GpuUse(0, 0.5, 3), GpuUse(1, None, 5)],
        [],
    )
    sampler = NodeSampler(gpus, Host())
    for _ in range(3):
        sampler.look()
    assert sampler.sample() == {
        "host": {"cpu_utilization": 0.5, "memory_bytes": 100},
        "gpus": [
            {"index": 0, "utilization": 0.5, "memory_bytes": 3},
            {"index": 1, "memory_bytes": 5},
        ],
    }
    sampler.look()
    assert sampler.sample()["gpus"] == []


def test_the_host_is_read() -> None:
    figures = HostReader().read()
    assert 0 <= figures["cpu_utilization"] <= 1
    assert figures["memory_bytes"] > 1 << 20


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


Send = Callable[[list[dict[str, Any]]], None]


def sender(tmp_path: Path, send: Send, clock: Clock) -> SampleSender:
    gpus = Gpus(*[[GpuUse(0, 0.25)]] * 1000)
    stop = threading.Event()
    file = tmp_path / "node_metrics.json"
    return SampleSender(NodeSampler(gpus, Host()), file, send, interval=10, stop=stop, clock=clock)


def test_samples_wait_with_their_age_while_the_api_is_away(tmp_path: Path) -> None:
    clock, away, sent = Clock(), True, list[dict[str, Any]]()

    def send(samples: list[dict[str, Any]]) -> None:
        if away:
            raise ApiUnavailable("away")
        sent.extend(samples)

    node = sender(tmp_path, send, clock)
    for _ in range(400):
        node.take_one()
        node.send_waiting()
        clock.now += 10
    assert sent == []
    away = False
    node.send_waiting()
    assert len(sent) == 360, "an hour of them"
    assert len({sample["id"] for sample in sent}) == 360
    assert [sent[0]["age_seconds"], sent[-1]["age_seconds"]] == [3600.0, 10.0]
    node.send_waiting()
    assert len(sent) == 360


def test_what_the_api_refuses_is_given_up(tmp_path: Path) -> None:
    calls = 0

    def send(samples: list[dict[str, Any]]) -> None:
        nonlocal calls
        calls += 1
        raise ApiRefused(422, "not understood")

    node = sender(tmp_path, send, Clock())
    node.take_one()
    node.send_waiting()
    node.send_waiting()
    assert calls == 1
    assert json.loads((tmp_path / "node_metrics.json").read_text())["host"]["memory_bytes"] == 100


class SampleFile:
    """What the agent writes, with a time of change that always moves."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._count = 0

    def write(self, *gpus: dict[str, Any], cpu: float = 0.5) -> None:
        import os

        self._count += 1
        host = {"cpu_utilization": cpu, "memory_bytes": 1000}
        self.path.write_text(json.dumps({"host": host, "gpus": list(gpus)}))
        os.utime(self.path, ns=(0, self._count * 1_000_000_000))


def gpu(index: int, use: float, memory: int = 10, celsius: float = 50.0) -> dict[str, Any]:
    return {
        "index": index,
        "utilization": use,
        "memory_bytes": memory,
        "temperature_celsius": celsius,
    }


def test_a_job_gets_its_own_gpu_and_one_point_a_step(tmp_path: Path) -> None:
    file = SampleFile(tmp_path / "node_metrics.json")
    file.write(gpu(0, 1.0), gpu(1, 0.9))
    devices = DeviceMetrics(file.path, [1])
    assert devices.due(3) is None, "from before the attempt"
    file.write(gpu(0, 1.0), gpu(1, 0.2))
    assert devices.due(None) is None, "no step yet"
    file.write(gpu(0, 1.0), gpu(1, 0.4), cpu=1.0)
    record = devices.due(5)
    assert record is not None
    assert (record["type"], record["step"]) == ("metrics", 5)
    assert record["values"] == pytest.approx(
        {
            "gpu/utilization": 0.3,
            "gpu/memory_bytes": 10,
            "gpu/temperature_celsius": 50,
            "host/cpu_utilization": 0.75,
            "host/memory_bytes": 1000,
        }
    )
    assert devices.due(6) is None, "nothing new"
    file.write(gpu(1, 0.6))
    assert devices.due(5) is None, "the step has its point"
    file.write(gpu(1, 0.8))
    record = devices.due(6)
    assert record is not None
    assert record["values"]["gpu/utilization"] == pytest.approx(0.7)


def test_several_gpus_are_joined_and_told_apart(tmp_path: Path) -> None:
    file = SampleFile(tmp_path / "node_metrics.json")
    devices = DeviceMetrics(file.path, [2, 0])
    file.write(gpu(0, 0.5, 10, 40.0), gpu(1, 0.0), gpu(2, 1.0, 30, 70.0))
    record = devices.due(1)
    assert record is not None
    values = record["values"]
    assert values["gpu/utilization"] == 0.75
    assert values["gpu/memory_bytes"] == 40
    assert values["gpu/temperature_celsius"] == 70
    assert (values["gpu/0/utilization"], values["gpu/1/utilization"]) == (1.0, 0.5)
    assert "gpu/power_watts" not in values
    file.write(gpu(0, 0.5))
    record = devices.due(2)
    assert record is not None
    assert "gpu/utilization" not in record["values"], "of the other nothing is known"
    assert record["values"]["gpu/1/utilization"] == 0.5


def test_a_job_on_a_cpu_gets_the_host_alone(tmp_path: Path) -> None:
    file = SampleFile(tmp_path / "node_metrics.json")
    devices = DeviceMetrics(file.path, [])
    assert devices.due(1) is None
    file.write(gpu(0, 0.5))
    record = devices.due(1)
    assert record is not None
    assert sorted(record["values"]) == ["host/cpu_utilization", "host/memory_bytes"]
    (tmp_path / "node_metrics.json").write_text("half")
    assert devices.due(2) is None


def test_every_figure_of_the_node_is_on_the_page_of_metrics(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    file = SampleFile(tmp_path / "node_metrics.json")
    devices = DeviceMetrics(file.path, [0])
    file.write(gpu(0, 0.5) | {"power_watts": 300.0})
    record = devices.due(1)
    assert record is not None
    assert len(record["values"]) == 6
    assert [name for name in record["values"] if f"`{name}`" not in page] == []
