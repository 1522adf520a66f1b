"""Shapes of the models that are trained beside the peers: Llamas with Llama 3's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["SHAPES", "TINY", "VOCABULARY", "Shape", "llama_config"]

VOCABULARY = 128256
TINY = "tiny"


@dataclass(frozen=True)
class Shape:
    """``mlp``: features within the MLP; ``tied``: one table for embedding and head."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool = True
    vocabulary: int = VOCABULARY

    @property
    def parameters(self) -> int:
        """A tied head counts once."""
        kv_width = self.hidden // self.heads * self.kv_heads
        block = 2 * self.hidden * (self.hidden + kv_width + 1) + 3 * self.hidden * self.mlp
        tables = 1 if self.tied else 2
        return self.layers * block + self.hidden + tables * self.vocabulary * self.hidden


SHAPES: dict[str, Shape] = {
    "60m": Shape(512, 1536, layers=8, heads=8, kv_heads=8),
    "125m": Shape(768, 2048, layers=12, heads=12, kv_heads=12),
    "350m": Shape(1024, 2816, layers=24, heads=16, kv_heads=16),
    "1b": Shape(2048, 8192, layers=16, heads=32, kv_heads=8),
    # As 3b, half as deep.
    "2b": Shape(3072, 8192, layers=14, heads=24, kv_heads=8),
    "3b": Shape(3072, 8192, layers=28, heads=24, kv_heads=8),
    "8b": Shape(4096, 14336, layers=32, heads=32, kv_heads=8, tied=False),
    # Heads of 128 features, for attention in FP8 at a size that trains in minutes.
    "attention": Shape(768, 2560, layers=12, heads=6, kv_heads=6),
    # For a CPU: its times mean nothing.
    TINY: Shape(64, 128, layers=2, heads=4, kv_heads=2, vocabulary=512),
}


def llama_config(shape: Shape, length: int) -> dict[str, Any]:
    """A Llama configuration of transformers, for sequences of ``length`` tokens."""
    return {
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": max(8192, length),
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "rms_norm_eps": 1e-5,
    }
