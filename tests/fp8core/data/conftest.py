"""Specs and files for the tests of the data package."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core.spec import parse_spec

torch.set_num_threads(1)


@pytest.fixture
def make_spec() -> Callable[..., Any]:
    """A JobSpec: make_spec(data={...}, training={...}, task=..., ...)."""

    def make(**parts: Any) -> Any:
        spec = {
            "model": {"source": "config", "config": {"model_type": "llama"}},
            "recipe": {"engine": "amp"},
            "data": {"source": "builtin"},
            "tokenizer": "bytes",
        }
        spec.update(parts)
        spec["training"] = {"batch_size": 2, "sequence_length": 64} | spec.get("training", {})
        return parse_spec(spec)

    return make


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: Iterable[Any], name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write
