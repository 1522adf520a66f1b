"""What the node's GPUs and its host are doing: sampled, told to the API, and left for supervisors.

Utilisation is looked at ten times in an interval and averaged: one look in ten seconds would miss
most of what a GPU does. What cannot be read is left out, never zero.

The newest sample lies in a file, where each supervisor finds what concerns its own GPUs. Samples
that the API did not take wait, an hour of them, and are sent with their age: the clock of this
machine may be wrong.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from octrain_worker.api_client import ApiRefused, ApiUnavailable
from octrain_worker.clock import boot_time

__all__ = ["GpuReader", "GpuUse", "HostReader", "NodeSampler", "NvmlReader", "SampleSender"]

logger = logging.getLogger(__name__)

_LOOKS = 10
_MOST_WAITING = 360
_MOST_SENT = 60


@dataclass(frozen=True)
class GpuUse:
    """One GPU as NVML numbers it. ``utilization`` is 0 to 1; None: cannot be read here."""

    index: int
    utilization: float | None = None
    memory_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None


class GpuReader(Protocol):
    """Reads all GPUs now; an empty list where there are none, or none can be read."""

    def read(self) -> list[GpuUse]: ...


class NvmlReader:
    """Through NVML. ``library`` is the module ``pynvml``, or None for whatever is installed.

    A driver that goes away (an update, a reset) is opened anew at the next look.
    """

    def __init__(self, indices: Sequence[int], library: Any = None) -> None:
        self._indices = list(indices)
        self._library = library if library is not None else _pynvml()
        self._open = False

    def read(self) -> list[GpuUse]:
        nvml = self._library
        if nvml is None or not self._indices:
            return []
        try:
            if not self._open:
                nvml.nvmlInit()
                self._open = True
            return [self._read_one(index) for index in self._indices]
        except nvml.NVMLError as error:
            if self._open:
                logger.warning("the GPUs cannot be read: %s", error)
            self._open = False
            return []

    def _read_one(self, index: int) -> GpuUse:
        nvml = self._library
        handle = nvml.nvmlDeviceGetHandleByIndex(index)

        def known(read: Callable[[], Any]) -> Any:
            try:
                return read()
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission):
                return None  # a part of a GPU has no utilisation, and some have no sensor

        utilization = known(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        milliwatts = known(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        sensor = nvml.NVML_TEMPERATURE_GPU
        celsius = known(lambda: nvml.nvmlDeviceGetTemperature(handle, sensor))
        return GpuUse(
            index=index,
            utilization=utilization,
            memory_bytes=known(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used)),
            power_watts=None if milliwatts is None else milliwatts / 1000,
            temperature_celsius=None if celsius is None else float(celsius),
        )


class HostReader:
    """The whole machine's processors (0 to 1, since the last look) and memory in use."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # the first says nothing: there is no look before it

    def read(self) -> dict[str, float | int]:
        memory = psutil.virtual_memory()
        return {
            "cpu_utilization": psutil.cpu_percent() / 100,
            "memory_bytes": memory.total - memory.available,
        }


class NodeSampler:
    """Gathers looks at the GPUs into samples."""

    def __init__(self, gpus: GpuReader, host: HostReader) -> None:
        self._gpus = gpus
        self._host = host
        self._looks: dict[int, list[float]] = {}
        self._newest: list[GpuUse] = []

    def look(self) -> None:
        self._newest = self._gpus.read()
        for gpu in self._newest:
            if gpu.utilization is not None:
                self._looks.setdefault(gpu.index, []).append(gpu.utilization)

    def sample(self) -> dict[str, Any]:
        """The host, and each GPU that the last look saw, with its mean utilisation since the last
        sample: ``{"host": {...}, "gpus": [{"index", ...}]}``."""
        gpus = []
        for gpu in self._newest:
            looks = self._looks.get(gpu.index)
            figures = {
                "utilization": sum(looks) / len(looks) if looks else None,
                "memory_bytes": gpu.memory_bytes,
                "power_watts": gpu.power_watts,
                "temperature_celsius": gpu.temperature_celsius,
            }
            known = {name: value for name, value in figures.items() if value is not None}
            gpus.append({"index": gpu.index, **known})
        self._looks.clear()
        return {"host": self._host.read(), "gpus": gpus}


class SampleSender:
    """A thread that samples, writes ``file`` and sends, until ``stop`` is set.

    ``send`` takes the samples of one call and raises what ``ApiClient`` raises.
    """

    def __init__(
        self,
        sampler: NodeSampler,
        file: Path,
        send: Callable[[list[dict[str, Any]]], None],
        *,
        interval: float,
        stop: threading.Event,
        clock: Callable[[], float] = boot_time,
    ) -> None:
        self._sampler = sampler
        self._file = file
        self._send = send
        self._interval = interval
        self._stop = stop
        self._clock = clock
        self._origin = uuid.uuid4().hex
        self._count = 0
        self._waiting: deque[tuple[float, dict[str, Any]]] = deque(maxlen=_MOST_WAITING)

    def start(self) -> None:
        threading.Thread(target=self._run, name="node-metrics", daemon=True).start()

    def _run(self) -> None:
        while True:
            for _ in range(_LOOKS):
                if self._stop.wait(self._interval / _LOOKS):
                    return
                self._sampler.look()
            self.take_one()
            self.send_waiting()

    def take_one(self) -> None:
        """Samples now: into the file, and to those that wait to be sent."""
        self._count += 1
        sample = {"id": f"{self._origin}-{self._count}", **self._sampler.sample()}
        self._waiting.append((self._clock(), sample))
        partial = self._file.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(sample))
            partial.replace(self._file)
        except OSError as error:
            logger.warning("the node's metrics cannot be written: %s", error)

    def send_waiting(self) -> None:
        """Sends what waits, oldest first. What the API refuses is given up."""
        while self._waiting:
            part = list(self._waiting)[:_MOST_SENT]
            now = self._clock()
            body = [{**sample, "age_seconds": max(now - at, 0.0)} for at, sample in part]
            try:
                self._send(body)
            except ApiUnavailable as error:
                logger.debug("node metrics wait: %s", error)
                return
            except ApiRefused as error:
                logger.warning("node metrics: %s", error)
            for _ in part:
                self._waiting.popleft()


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml
