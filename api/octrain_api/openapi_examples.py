"""Examples of the bodies that nodes send, by operation. What users send has its own beside it."""

from typing import Any

from octrain_api.recipes.schemas import EXAMPLE_FRAGMENT

_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

EXAMPLES: dict[str, dict[str, Any]] = {
    "save_recipe": {
        "name": "llama-hybrid",
        "description": "Short history; first and last layers stay in BF16.",
        "fragment": EXAMPLE_FRAGMENT,
    },
    "enrol_node": {"token": "oct_enrol_...", "node": "gpu-1"},
    "register_node": {
        "name": "gpu-1",
        "boot_id": "6fd3ae0a-8d4b-4d5e-9c52-5d6a3a0f7a11",
        "hostname": "gpu-1.example.com",
        "version": "0.1.0",
        "device_kinds": ["cpu"],
        "cpu_slots": 1,
        "engines": {"emulated": {"ok": True, "reasons": [], "version": None}},
        "roots": ["/srv/data"],
    },
    "heartbeat_node": {"active_attempts": ["att_01jdx4c2m3"]},
    "store_node_metrics": {
        "samples": [
            {
                "id": "0d9c7c52-0001",
                "age_seconds": 0.5,
                "host": {"cpu_utilization": 0.25, "memory_bytes": 8e9},
                "gpus": [{"index": 0, "utilization": 0.97, "memory_bytes": 6.1e10}],
            }
        ]
    },
    "answer_plan": {"problem": "The model's configuration cannot be read."},
    "claim_attempt": {"node_id": "node_01jdx4c2m3", "supervisor": "supervisor-5c1f"},
    "heartbeat_attempt": {"fencing_token": 7, "phase": "training", "step": 120},
    "register_artifact": {
        "fencing_token": 7,
        "kind": "checkpoint",
        "name": "step-000100",
        "step": 100,
        "url": "file:///srv/artifacts/jobs/job_x/attempts/1/step-000100",
        "files": [{"path": "model.safetensors", "size": 0, "sha256": _SHA256}],
    },
    "finish_attempt": {
        "fencing_token": 7,
        "outcome": "succeeded",
        "reason": "completed",
        "step": 1000,
        "exit_code": 0,
    },
}
