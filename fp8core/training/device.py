"""Which device a run takes."""

from __future__ import annotations

import os

import torch

from fp8core import engines
from fp8core.errors import EngineUnsupported, SpecRefused
from fp8core.spec.job import JobSpec

__all__ = ["check_one_rank", "choose_device", "describe_device"]


def choose_device(spec: JobSpec, override: str = "auto") -> torch.device:
    """The device of ``resources.device``; ``auto`` is a GPU where the engine can use one.

    ``override`` is the caller's own choice, for a spec that leaves it open. Raises
    ``EngineUnsupported`` with the engine's reasons, ``SpecRefused`` where the two contradict.
    """
    wanted = spec.resources.device
    if override != "auto":
        if wanted not in ("auto", override):
            raise SpecRefused(
                f"the spec asks for {wanted}, the command for {override}",
                pointer="/resources/device",
            )
        wanted = override  # type: ignore[assignment]
    candidates = ["cuda", "cpu"] if wanted == "auto" else [wanted]
    if wanted == "auto" and not torch.cuda.is_available():
        candidates = ["cpu"]
    reasons: list[str] = []
    for candidate in candidates:
        found = engines.availability(spec.recipe, torch.device(candidate))
        if found.ok:
            return torch.device(candidate, 0) if candidate == "cuda" else torch.device("cpu")
        reasons.extend(reason for reason in found.reasons if reason not in reasons)
    raise EngineUnsupported("; ".join(reasons), pointer="/recipe/engine")


def check_one_rank(spec: JobSpec) -> None:
    """Raises ``SpecRefused`` for a job of several ranks, in the spec or by torchrun's environment.

    A rank that trained by itself would look like a distributed run and be none.
    """
    if spec.resources.gpus > 1:
        raise SpecRefused(
            f"this version trains on one GPU, not on {spec.resources.gpus}; set it to 1",
            pointer="/resources/gpus",
        )
    world = os.environ.get("WORLD_SIZE", "1")
    if world != "1":
        raise SpecRefused(
            f"started with WORLD_SIZE={world}, but this version trains in one process; "
            "start it without torchrun",
            pointer="/resources/gpus",
        )


def describe_device(device: torch.device) -> dict[str, str | int]:
    """The device for a report: its type, its name and what it counts."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"type": "cuda", "name": properties.name, "memory_bytes": properties.total_memory}
    return {"type": "cpu", "name": _processor(), "threads": torch.get_num_threads()}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return os.uname().machine
