"""Jobs of a size that takes days to train, played by a node that trains nothing."""

from __future__ import annotations

import math
from typing import Any

from tests.dashboard.played_node import PlayedJob, PlayedNode, training
from tests.dashboard.replay import Recording

SERIES, STEPS = 50, 100_000
# Of each step of the job with FP8 health.
ALARMS = 16
# What a job on a GPU records, and what its owner adds.
USUAL = (
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "eval/loss",
    "parity/gap",
    "perf/tokens_per_second",
    "memory/peak_bytes",
    "gpu/utilization",
    "gpu/memory_bytes",
    "gpu/power_watts",
)
OWN = tuple(f"probe/layers.{number}/norm" for number in range(SERIES - len(USUAL)))
LAYERS = tuple(
    f"model.layers.{layer}.{part}"
    for layer in range(6)
    for part in (
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    )
)
# 6 layers of 7 linear modules, of each three tensors with four figures: 504.
HEALTH = tuple(
    f"fp8/{layer}/{tensor}/{figure}"
    for layer in LAYERS
    for tensor in ("input", "weight", "grad_output")
    for figure in ("amax", "scale", "saturated", "underflow")
)


def long_job(node: PlayedNode) -> PlayedJob:
    """A finished job of 50 series with 100,000 steps each."""
    job = node.take("long", training={"steps": STEPS})
    for first in range(1, STEPS + 1, 2000):
        node.send(job, list(training([*USUAL, *OWN], range(first, first + 2000), first)))
        node.beat()
    node.finish(job)
    return job


def health_values(step: int) -> dict[str, float]:
    """FP8 health of one step: scales near 2^10, few saturated, some underflow."""
    values = {}
    for number, name in enumerate(HEALTH):
        wave = 1 + 0.5 * math.sin(step / 50 + number)
        figure = name.rpartition("/")[2]
        values[name] = {"amax": 4.0, "scale": 1024.0, "saturated": 0.004, "underflow": 0.05}[
            figure
        ] * wave
    return values


def health_records(step: int) -> list[dict[str, Any]]:
    """What a trainer tells of one bad step with FP8 health: figures, progress, and alarms."""
    (metrics,) = training(USUAL, range(step, step + 1), step)
    metrics["values"] |= health_values(step)
    return [
        metrics,
        {"type": "progress", "step": step, "total_steps": STEPS, "tokens": 4096 * step},
        *(alarm(step, LAYERS[(step + number) % len(LAYERS)]) for number in range(ALARMS)),
    ]


def deep_job(node: PlayedNode, blocks: int, steps: int = 200) -> tuple[PlayedJob, list[str]]:
    """A finished job of a model of so many blocks, with FP8 health of each of its linear layers,
    whose names follow. Each block has seven, and two norms that are kept."""
    parts = (
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    )
    linear = [f"model.layers.{block}.{part}" for block in range(blocks) for part in parts]
    norms = [
        f"model.layers.{block}.{side}_layernorm"
        for block in range(blocks)
        for side in ("input", "post_attention")
    ]
    kept = "norms are not fused by this recipe"
    job = node.take(f"deep-{blocks}", training={"steps": steps})
    node.convert(
        job,
        [
            *(row(name, "Linear", "EmulatedLinear", None) for name in linear),
            *(row(name, "LlamaRMSNorm", None, kept) for name in norms),
        ],
    )
    figures = {"amax": 4.0, "scale": 1024.0, "saturated": 0.004, "underflow": 0.05}
    for step in range(1, steps + 1):
        values = {
            f"fp8/{layer}/{tensor}/{figure}": level * (1 + 0.5 * math.sin(step / 50 + number))
            for number, layer in enumerate(linear)
            for tensor in ("input", "weight", "grad_output")
            for figure, level in figures.items()
        }
        node.send(job, [{"type": "metrics", "step": step, "tokens": step, "values": values}])
        if step % 20 == 0:
            node.beat()
    node.finish(job)
    return job, [*linear, *norms]


def row(name: str, origin: str, target: str | None, reason: str | None) -> dict[str, str | None]:
    """A layer in a conversion report."""
    return {"name": name, "from": origin, "to": target, "group": None, "reason": reason}


def alarm(step: int, layer: str) -> dict[str, Any]:
    """The event of a gradient that is cut off."""
    return {
        "type": "event",
        "kind": "fp8_alarm",
        "message": f"step {step}: {layer} grad_output is saturated",
        "data": {"step": step, "layer": layer, "tensor": "grad_output", "what": "saturation"},
    }


def recorded_job(service: Any, node: PlayedNode, steps: int) -> tuple[PlayedJob, list[bytes]]:
    """A running job with FP8 health of 504 series, and its stream while these steps came."""
    job = node.take("healthy", training={"steps": STEPS})
    with Recording(service, job.id) as recording:
        for step in range(1, steps + 1):
            node.send(job, health_records(step))
            if step % 100 == 0:
                node.beat()
    return job, recording.messages
