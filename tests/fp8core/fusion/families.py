"""Small models of the families that are fused, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from fp8core.data.batch import Batch
from fp8core.fusion.sequences import Sequences, document_bounds
from tests.fp8core.fusion.weights import with_random_weights

__all__ = ["FAMILIES", "LENGTH", "ROWS", "batches", "make"]

ROWS, LENGTH = 2, 64
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama, rope scaled": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "Llama, with biases": {"attention_bias": True},
    "Qwen2": {},
    "Qwen2, sliding and full": {
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    "Qwen3": {"head_dim": 32},
    "Mistral": {"sliding_window": 24},
    "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "Gemma": {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "num_key_value_heads": 1},
}


def make(family: str, **more: Any) -> Any:
    """A model of two blocks with weights large enough that every part of them matters."""
    name = family.split(",")[0]
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "attn_implementation": "sdpa",
    }
    if name != "GPT2":
        sizes |= {"intermediate_size": 96, "num_key_value_heads": 2}
    config = getattr(transformers, f"{name}Config")(**sizes | FAMILIES[family] | more)
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{name}{head}")(config).train()
    return with_random_weights(model)


def batches() -> dict[str, Batch]:
    """Packed documents, the last of a row padding; and rows padded at their ends."""
    ids = torch.randint(1, 128, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    documents = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
    documents[0, 20:], documents[0, 50:], documents[1, 33:] = 1, -1, 1
    positions = Sequences(ROWS, LENGTH, document_bounds(documents)).positions(ids.device)
    real = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    real[0, 50:] = False
    places = torch.arange(LENGTH).expand(ROWS, LENGTH)
    return {
        "packed": Batch(ids, ids, None, positions, documents, 114, 114, True),
        "padded": Batch(ids, ids, real, places, documents, 114, 114, True),
    }
