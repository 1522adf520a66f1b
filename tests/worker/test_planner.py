"""The planner of a node: its process sees no GPU, and is told which one the node has."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from octrain_worker.agent.planner import Planner
from octrain_worker.api_client import PlanQuestion
from octrain_worker.capabilities import Gpu
from octrain_worker.settings import WorkerSettings

SPEC: dict[str, Any] = {
    "model": {
        "source": "config",
        "config": {
            "model_type": "llama",
            "vocab_size": 272,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        },
    },
    "data": {"source": "builtin"},
    "recipe": {"engine": "te"},
    "training": {"sequence_length": 64},
}


@pytest.mark.parametrize("names", [["NVIDIA Abacus"], []])
def test_figures_of_the_nodes_gpu_are_looked_up_by_its_name(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Gpu(index, name, 1 << 30, "9.0") for index, name in enumerate(names)]
    monkeypatch.setattr("octrain_worker.agent.planner.find_gpus", lambda: gpus)
    planner = Planner(WorkerSettings(), "node", threading.Event())
    result, problem = planner.plan(PlanQuestion(key="k", spec=SPEC))
    assert problem is None
    assert result is not None
    said = result["small_gemm"]["says"]
    expected = f"no times were measured on {names[0]} " if names else "on which GPU the job runs"
    assert expected in said
    assert result["small_gemm"]["kept"] == 0


def test_what_was_measured_of_models_of_that_size_is_quoted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the tables that come with the package, fused and layer by layer."""
    gpus = [Gpu(0, "NVIDIA H200", 1 << 37, "9.0")]
    monkeypatch.setattr("octrain_worker.agent.planner.find_gpus", lambda: gpus)
    planner = Planner(WorkerSettings(), "node", threading.Event())
    config = {**SPEC["model"]["config"], "vocab_size": 128256, "hidden_size": 256}
    for fuse, row in (("auto", "fused_head"), ("none", "plain")):
        spec = {**SPEC, "model": {**SPEC["model"], "config": config}, "conversion": {"fuse": fuse}}
        result, problem = planner.plan(PlanQuestion(key=fuse, spec=spec))
        assert problem is None
        assert result is not None
        [quoted] = result["measured"]
        assert (quoted["card"], quoted["size"], quoted["row"]) == ("NVIDIA H200", "60m", row)
        assert (quoted["speed_up"] > 1) is (fuse == "auto"), quoted["says"]
        assert str(quoted["says"]).startswith("measured on NVIDIA H200: a model of 0.093 billion")
