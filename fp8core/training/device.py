"""Which device a run takes."""

from __future__ import annotations

import os

import torch

from fp8core import engines
from fp8core.errors import EngineUnsupported, SpecRefused
from fp8core.spec.job import JobSpec
from fp8core.training.ranks.place import RankPlace

__all__ = ["card_of", "check_ranks", "choose_device", "describe_device", "ranks_pointer"]


def choose_device(spec: JobSpec, override: str = "auto", rank: int = 0) -> torch.device:
    """The device of ``resources.device``; ``auto`` is a GPU where the engine can use one.

    Each rank has the GPU of its own number. ``override`` is the caller's own choice, for a spec
    that leaves it open. Raises
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
    several = spec.resources.gpus > 1
    if several and wanted == "cpu":
        raise SpecRefused(
            f"the spec asks for {spec.resources.gpus} GPUs, the command for cpu",
            pointer="/resources/gpus",
        )
    if several and torch.cuda.device_count() < spec.resources.gpus:
        raise EngineUnsupported(
            f"{spec.resources.gpus} GPUs are asked for, and {torch.cuda.device_count()} are "
            "visible here",
            pointer="/resources/gpus",
        )
    if several:
        wanted = "cuda"
    candidates = ["cuda", "cpu"] if wanted == "auto" else [wanted]
    if wanted == "auto" and not torch.cuda.is_available():
        candidates = ["cpu"]
    reasons: list[str] = []
    for candidate in candidates:
        found = engines.availability(spec.recipe, torch.device(candidate))
        if found.ok:
            return torch.device(candidate, rank) if candidate == "cuda" else torch.device("cpu")
        reasons.extend(reason for reason in found.reasons if reason not in reasons)
    raise EngineUnsupported("; ".join(reasons), pointer="/recipe/engine")


def check_ranks(spec: JobSpec, place: RankPlace | None) -> None:
    """Raises ``SpecRefused`` where the processes started are not the ranks that the spec asks for.

    A rank that trained by itself would look like a distributed run and be none.
    """
    wanted = spec.resources.ranks
    if place is None:
        world = os.environ.get("WORLD_SIZE", "1")
        if world != "1":
            raise SpecRefused(
                f"started with WORLD_SIZE={world}; start it without torchrun: "
                "python -m fp8core train starts the ranks of the spec by itself",
                pointer=ranks_pointer(spec.resources.device),
            )
    started = 1 if place is None else place.count
    if started != wanted:
        raise SpecRefused(
            f"the spec asks for {wanted} rank(s), and {started} started; python -m fp8core train "
            "starts as many as the spec asks for",
            pointer=ranks_pointer(spec.resources.device),
        )


def ranks_pointer(device: str) -> str:
    """The field that says how many ranks a job on such a device has."""
    return "/resources/cpu_ranks" if device == "cpu" else "/resources/gpus"


def describe_device(device: torch.device) -> dict[str, str | int]:
    """The device for a report: its type, its name and what it counts."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"type": "cuda", "name": properties.name, "memory_bytes": properties.total_memory}
    return {"type": "cpu", "name": _processor(), "threads": torch.get_num_threads()}


def card_of(device: torch.device) -> str | None:
    """The GPU's name, by which figures measured on it are found; None on a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return os.uname().machine
