"""What this node can run: CPU slots, GPUs, precision engines.

GPUs are asked for through NVML, which opens no CUDA context. Whether an engine works is known only
to torch, so that question is put to a subprocess: the worker itself never imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["ENGINES", "EngineProbe", "Gpu", "find_gpus", "print_engines"]

ENGINES = ("te", "torchao", "emulated", "amp")
_MARK = "octrain-engines:"


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML numbers it."""

    index: int
    name: str
    memory_bytes: int
    compute_capability: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def find_gpus() -> list[Gpu]:
    """The GPUs of this machine that ``CUDA_VISIBLE_DEVICES`` leaves; none without a driver."""
    gpus = _gpus_by_nvml()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    wanted = {part.strip() for part in visible.split(",")}
    return [gpu for gpu in gpus if str(gpu.index) in wanted]


def _gpus_by_nvml() -> list[Gpu]:
    try:
        import pynvml
    except ImportError:
        return _gpus_by_command()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            found.append(
                Gpu(
                    index=index,
                    name=name.decode() if isinstance(name, bytes) else str(name),
                    memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    compute_capability=f"{major}.{minor}",
                )
            )
        return found
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _gpus_by_command() -> list[Gpu]:
    """The same from ``nvidia-smi``, where NVML's Python binding is not installed."""
    command = [
        "nvidia-smi",
        "--query-gpu=index,name,memory.total,compute_cap",
        "--format=csv,noheader,nounits",
    ]
    try:
        text = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return _parse_nvidia_smi(text)


def _parse_nvidia_smi(text: str) -> list[Gpu]:
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4 and parts[0].isdigit() and parts[2].isdigit():
            found.append(Gpu(int(parts[0]), parts[1], int(parts[2]) << 20, parts[3]))
    return found


class EngineProbe:
    """The question which engines work here, running in a subprocess from construction on.

    The answer takes as long as importing torch does; the caller does other work meanwhile.
    """

    def __init__(self, device: str, *, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "octrain_worker", "engines", "--device", device],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def result(self, timeout: float = 180.0) -> dict[str, dict[str, Any]]:
        """``{engine: {"ok", "reasons", "version"}}``; an engine that cannot be asked is not ok."""
        try:
            output, errors = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.cancel()
            return _none_works(f"the engines did not answer within {timeout:.0f} s")
        for line in output.splitlines():
            if line.startswith(_MARK):
                answer: dict[str, dict[str, Any]] = json.loads(line.removeprefix(_MARK))
                return answer
        lines = errors.strip().splitlines() or [f"exit code {self._process.returncode}"]
        return _none_works(f"the training library cannot be loaded here: {lines[-1][:500]}")

    def cancel(self) -> None:
        """Ends the subprocess, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def _none_works(reason: str) -> dict[str, dict[str, Any]]:
    return {name: {"ok": False, "reasons": [reason], "version": None} for name in ENGINES}


def print_engines(device: str) -> None:
    """The subprocess's part: asks every engine, prints one marked line of JSON."""
    from fp8core.commands.imports import importing

    with importing():
        import torch

        from fp8core.engines import all_availability

    found = all_availability(torch.device(device))
    answer = {
        name: {
            "ok": availability.ok,
            "reasons": list(availability.reasons),
            "version": availability.version,
        }
        for name, availability in found.items()
    }
    print(_MARK + json.dumps(answer), flush=True)
