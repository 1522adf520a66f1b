"""Which recipe the demo begins with."""

from __future__ import annotations

from typing import Any

import pytest

from octrain.demo import fp8_recipe


@pytest.mark.parametrize(
    ("live", "works", "engine"),
    [(True, True, "te"), (True, False, "emulated"), (False, True, "emulated")],
)
def test_the_first_recipe_is_that_of_a_gpu_where_a_node_has_one_that_can(
    client: Any, server: Any, reply: Any, live: bool, works: bool, engine: str
) -> None:
    node = {"id": "node_1", "name": "gpu-1", "live": live, "engines": {"te": {"ok": works}}}
    server.routes["GET /v1/nodes"] = lambda r: reply({"items": [node]})
    assert fp8_recipe(client) == {
        "engine": engine,
        "fp8_format": "HYBRID",
        "amax_history_len": 16,
        "amax_compute_algo": "max",
    }
