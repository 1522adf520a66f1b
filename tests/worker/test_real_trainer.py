"""A supervisor with the product's own trainer, from a spare to a stored model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SPEC = {
    "model": {
        "source": "config",
        "config": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": 384,
            "max_position_embeddings": 64,
        },
    },
    "data": {"source": "builtin", "name": "python_topics"},
    "recipe": {"engine": "emulated", "amax_history_len": 4, "amax_compute_algo": "max"},
    "training": {"steps": 6, "batch_size": 2, "sequence_length": 32},
    "checkpoint": {"every_steps": 3},
    "evaluation": {"every_steps": 0, "max_batches": 1},
}


def test_trains_stores_and_resumes(
    workplace: Any, tmp_path: Path, until: Callable[..., Any]
) -> None:
    workplace.environment["OCTRAIN_TRAINER_COMMAND"] = f"{sys.executable} -m fp8core"
    first = workplace.api.add("att_a", {})
    first.spec = SPEC
    child = workplace.supervise("att_a")
    assert child.wait(timeout=120) == 0, workplace.log()
    assert first.finished["outcome"] == "succeeded", first.finished
    assert first.steps[0] == 1
    assert max(first.steps) == 6
    kinds = {kind for kind, _ in first.artifacts}
    assert {"checkpoint", "model", "report", "conversion"} <= kinds
    for (kind, _), artifact in first.artifacts.items():
        folder = Path(artifact["url"].removeprefix("file://"))
        for file in artifact["files"]:
            assert (folder / file["path"]).stat().st_size == file["size"], kind
    model = first.artifacts["model", "model"]
    assert "config.json" in {file["path"] for file in model["files"]}

    (name,) = [
        name
        for (kind, name), one in first.artifacts.items()
        if one["step"] == 3 and kind == "checkpoint"
    ]
    second = workplace.api.add("att_b", {}, resume_candidates=[first.candidate(name)])
    second.spec = json.loads(json.dumps(SPEC))
    assert workplace.supervise("att_b").wait(timeout=120) == 0, workplace.log()
    assert second.finished["outcome"] == "succeeded", second.finished
    assert min(second.steps) == 4
    losses = [
        {
            r["step"]: r["values"]["train/loss"]
            for r in attempt.of_type("metrics")
            if "train/loss" in r["values"]
        }
        for attempt in (first, second)
    ]
    assert losses[1] == {step: losses[0][step] for step in (4, 5, 6)}
