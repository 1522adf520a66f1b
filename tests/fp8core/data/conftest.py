"""Specs and files for the tests of the data package."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core.spec import parse_spec
from tests.fp8core.data.documents import Spec, texts

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


@pytest.fixture
def corpus_spec(make_spec: Spec, write_jsonl: Callable[..., Path]) -> Spec:
    """A spec over 60 documents: corpus_spec("text" | "prompt_completion" | "labelled", ...)."""

    def make(kind: str, *, packing: bool | None = None, **parts: Any) -> Any:
        rows: list[dict[str, Any]] = [{"text": text} for text in texts(60)]
        task = parts.pop("task", "causal_lm")
        if kind == "prompt_completion":
            rows = [{"prompt": t[:4], "completion": t[4:] + "!"} for t in texts(60)]
        if kind == "labelled":
            rows = [{"text": t, "label": "ab"[i % 2]} for i, t in enumerate(texts(60))]
            task = "sequence_classification"
        data = {"source": "jsonl", "path": str(write_jsonl(rows)), "format": kind}
        if packing is not None:
            data["packing"] = packing
        data |= parts.pop("data", {})
        return make_spec(data=data, task=task, **parts)

    return make
