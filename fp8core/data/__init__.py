"""Documents of every source as batches of tokens: checked, split, shuffled, packed, resumable.

Names load at first use:

    from fp8core.data import open_corpus, load_tokenizer, open_dataset
    corpus = open_corpus(spec)
    tokenizer = load_tokenizer(spec, texts=corpus.sample_texts())
    data = open_dataset(spec, tokenizer, corpus=corpus)
    for batch in data.train: ...
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8core.data.attention import attention_mask_for as attention_mask_for
    from fp8core.data.attention import model_inputs as model_inputs
    from fp8core.data.batch import Batch as Batch
    from fp8core.data.batches import BatchSource as BatchSource
    from fp8core.data.batches import EvaluationBatches as EvaluationBatches
    from fp8core.data.batches import Statistics as Statistics
    from fp8core.data.dataset import Corpus as Corpus
    from fp8core.data.dataset import TrainingData as TrainingData
    from fp8core.data.dataset import open_corpus as open_corpus
    from fp8core.data.dataset import open_dataset as open_dataset
    from fp8core.data.tokenizers import Tokenizer as Tokenizer
    from fp8core.data.tokenizers import load_tokenizer as load_tokenizer

_MODULES = {
    "attention_mask_for": "attention",
    "model_inputs": "attention",
    "Batch": "batch",
    "BatchSource": "batches",
    "EvaluationBatches": "batches",
    "Statistics": "batches",
    "Corpus": "dataset",
    "TrainingData": "dataset",
    "open_corpus": "dataset",
    "open_dataset": "dataset",
    "Tokenizer": "tokenizers",
    "load_tokenizer": "tokenizers",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
