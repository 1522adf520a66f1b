"""Tokenizers made here: single bytes, and byte-level BPE learned from the training split.

Both are ordinary Hugging Face tokenizers (one tokenizer.json), so the exported model needs nothing
of ours. Text is never unknown to them: each of the 256 bytes has a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

__all__ = ["CLASSIFY", "END_OF_TEXT", "MASK", "PADDING", "byte_tokenizer", "train_tokenizer"]

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
MASK = "<|mask|>"
CLASSIFY = "<|classify|>"

_SPECIAL = (END_OF_TEXT, PADDING, MASK, CLASSIFY)
_BYTES_VOCABULARY = 272


def byte_tokenizer(*, encoder: bool = False) -> PreTrainedTokenizerFast:
    """Token b is byte b of the UTF-8 text; 256 to 259 are the special tokens.

    The vocabulary is filled up with reserved tokens to 272, the next multiple of 16, as FP8 GEMMs
    need of an output layer. ``encoder`` wraps texts in ``<|classify|>`` and ``<|endoftext|>``, for
    models that read the first token.
    """
    vocabulary = {letter: byte for byte, letter in enumerate(_byte_letters())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(list(_SPECIAL))
    return _finish(backend, _BYTES_VOCABULARY, encoder)


def train_tokenizer(
    texts: Iterable[str], vocabulary_size: int, *, encoder: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over ``texts`` with exactly ``vocabulary_size`` tokens.

    Special tokens come first (0 to 3), then the bytes, then what was learned; where the texts are
    too few for so many merges, reserved tokens fill up. The result depends on the texts alone.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return _finish(backend, vocabulary_size, encoder)


def _finish(backend: Tokenizer, vocabulary_size: int, encoder: bool) -> PreTrainedTokenizerFast:
    backend.decoder = decoders.ByteLevel()
    missing = vocabulary_size - backend.get_vocab_size()
    backend.add_special_tokens([f"<|reserved_{index}|>" for index in range(missing)])
    names: dict[str, Any] = {"eos_token": END_OF_TEXT, "pad_token": PADDING, "mask_token": MASK}
    if encoder:
        names |= {"cls_token": CLASSIFY, "sep_token": END_OF_TEXT}
        backend.post_processor = processors.TemplateProcessing(
            single=f"{CLASSIFY} $A {END_OF_TEXT}",
            special_tokens=[
                (token, backend.token_to_id(token)) for token in (CLASSIFY, END_OF_TEXT)
            ],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **names
    )


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary, by byte.

    Printable bytes of Latin-1 stand for themselves, the others are numbered from U+0100 (the
    convention of GPT-2, which the ByteLevel pre-tokenizer implements).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters: list[str] = []
    others = 0
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(0x100 + others))
            others += 1
    return letters
