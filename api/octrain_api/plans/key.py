"""What a plan depends on."""

import hashlib
import json
from typing import Any

# Parts of a spec that change nothing about parameters, conversion, memory or FLOPs.
_IRRELEVANT = (
    "name",
    "labels",
    "notes",
    "priority",
    "limits",
    "telemetry",
    "evaluation",
    "checkpoint",
)
_IRRELEVANT_TRAINING = ("steps", "seed", "schedule", "early_stopping", "max_grad_norm")


def relevant(spec: dict[str, Any]) -> dict[str, Any]:
    """The parts of a resolved spec that a plan, and the speed of a job, depend on."""
    kept = {key: value for key, value in spec.items() if key not in _IRRELEVANT}
    training = kept.get("training")
    if isinstance(training, dict):
        kept["training"] = {k: v for k, v in training.items() if k not in _IRRELEVANT_TRAINING}
    return kept


def plan_key(owner: str, spec: dict[str, Any]) -> str:
    """The SHA-256 that names the question; owners read different files under one path."""
    text = json.dumps([owner, relevant(spec)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
