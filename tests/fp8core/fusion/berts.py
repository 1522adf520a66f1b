"""Small encoders with blocks as BERT's, and batches for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import transformers

from fp8core.data.batch import Batch
from tests.fp8core.fusion.families import batches
from tests.fp8core.fusion.weights import with_random_weights

__all__ = ["ENCODERS", "bert", "encoder_batches"]

ENCODERS = {
    "Bert": "BertForMaskedLM",
    "Roberta": "RobertaForMaskedLM",
    "XLMRoberta": "XLMRobertaForMaskedLM",
    "Camembert": "CamembertForMaskedLM",
    "Electra": "ElectraForMaskedLM",
}


def bert(family: str = "Bert", *, dropout: float = 0.0, **changes: Any) -> Any:
    """A model of two blocks with weights large enough that every part of them matters."""
    fields = {
        "vocab_size": 128,
        "hidden_size": 64,
        "embedding_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "attn_implementation": "sdpa",
    } | changes
    if family != "Electra":
        del fields["embedding_size"]
    config = getattr(transformers, f"{family}Config")(**fields)
    model = getattr(transformers, ENCODERS[family])(config).train()
    return with_random_weights(model)


def encoder_batches() -> dict[str, Batch]:
    """Those of `batches`, whose documents are looked at both ways."""
    return {kind: replace(batch, causal=False) for kind, batch in batches().items()}
