"""What the te engine says of FP8 attention by itself, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8core.engines.te_attention_state import (
    ATTENTION_COLUMNS,
    attention_obstacles,
    attention_states,
    attention_tensors,
)


@pytest.mark.parametrize(
    ("scaling", "capability", "said"),
    [
        ("delayed", (9, 0), None),
        ("delayed", (10, 0), None),
        ("delayed", (8, 9), "9.0 to 11.x, not 8.9"),
        ("delayed", (12, 0), "9.0 to 11.x, not 12.0"),
        ("current", (9, 0), "on which delayed scaling has it"),
        ("current", (10, 3), None),
        ("mxfp8", (10, 0), None),
    ],
)
def test_where_attention_can_compute_in_fp8(
    scaling: str, capability: tuple[int, int], said: str | None
) -> None:
    obstacles = attention_obstacles(scaling, capability, {})
    if said is None:
        assert obstacles == []
    else:
        (obstacle,) = obstacles
        assert said in obstacle


@pytest.mark.parametrize(
    "environment",
    [{"NVTE_FP8_DPA_BWD": "0"}, {"NVTE_DPA_FP8_RECIPE": "F16"}, {"NVTE_FUSED_ATTN": "0"}],
)
def test_variables_that_contradict_the_recipe_are_refused(environment: dict[str, str]) -> None:
    (variable,) = environment
    (obstacle,) = attention_obstacles("delayed", (9, 0), environment)
    assert obstacle.startswith(f"{variable} is set")
    neutral = {"NVTE_FP8_DPA_BWD": "1", "NVTE_DPA_FP8_RECIPE": "", "NVTE_FUSED_ATTN": "1"}
    assert attention_obstacles("delayed", (9, 0), neutral) == []


def test_the_six_tensors_are_read_from_the_columns_they_are_kept_in() -> None:
    def state(columns: int) -> Any:
        return SimpleNamespace(
            scale=torch.arange(columns, dtype=torch.float32),
            amax_history=torch.arange(2 * columns, dtype=torch.float32).view(2, columns),
        )

    begun = SimpleNamespace(fp8_meta={"scaling_fwd": state(9), "scaling_bwd": state(6)})
    modules = {"a": begun, "fresh": SimpleNamespace(fp8_meta={})}
    assert [name for name, _ in attention_states(modules, "forward")] == ["a"]
    scales = {key: float(s.scale[column]) for key, s, column in attention_tensors(modules)}
    assert scales == {
        ("a", tensor): float(column)
        for columns in ATTENTION_COLUMNS.values()
        for tensor, column in columns.items()
    }
    assert len(scales) == 6
