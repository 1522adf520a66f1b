"""Files with something wrong in them, as the cases of bad input have them made in a folder."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import LlamaConfig, LlamaForCausalLM

from fp8core.data.tokenizer_build import byte_tokenizer

__all__ = [
    "CONFIG",
    "Change",
    "beyond_the_end",
    "larger_shape",
    "length_of_header",
    "lie",
    "lines",
    "link",
    "model",
    "other_shape",
    "pipe",
    "replaced",
    "table",
    "tokenizer",
]

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

Change = Callable[[Path], object]


def lines(text: str) -> Change:
    return lambda folder: (folder / "data.jsonl").write_text(text)


def table(**columns: list[Any]) -> Change:
    return lambda folder: pq.write_table(pa.table(columns), folder / "data.parquet")


def model(**changes: Any) -> Change:
    def save(folder: Path) -> None:
        config = LlamaConfig(**{**CONFIG, "vocab_size": 272, **changes})
        LlamaForCausalLM(config).save_pretrained(folder / "model")

    return save


def lie(change: Callable[[dict[str, Any]], None]) -> Change:
    """Rewrites the header of the model's safetensors file, whose data stays as it is."""

    def rewrite(folder: Path) -> None:
        path = folder / "model/model.safetensors"
        content = path.read_bytes()
        size = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])

    return rewrite


def larger_shape(header: dict[str, Any]) -> None:
    header["lm_head.weight"]["shape"] = [272, 64]


def other_shape(header: dict[str, Any]) -> None:
    header["lm_head.weight"]["shape"] = [32, 272]


def beyond_the_end(header: dict[str, Any]) -> None:
    begin, end = header["lm_head.weight"]["data_offsets"]
    header["lm_head.weight"]["data_offsets"] = [begin + 2**40, end + 2**40]


def length_of_header(length: int) -> Change:
    def rewrite(folder: Path) -> None:
        path = folder / "model/model.safetensors"
        path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])

    return rewrite


def pipe(name: str) -> Change:
    return lambda folder: os.mkfifo(folder / name)


def link(name: str, target: str) -> Change:
    return lambda folder: (folder / name).symlink_to(target)


def tokenizer(change: Change) -> Change:
    def save(folder: Path) -> None:
        byte_tokenizer().save_pretrained(folder / "words")
        change(folder / "words")

    return save


def replaced(name: str, by: Change) -> Change:
    def exchange(folder: Path) -> None:
        (folder / name).unlink()
        by(folder)

    return exchange
