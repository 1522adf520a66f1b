"""From records to token sequences with their targets, one for each document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fp8core.data.chat import DEFAULT_TEMPLATE, ChatTemplateError, encode_chat
from fp8core.data.records import DataFormat, Record, invalid
from fp8core.data.tokenizers import Encoded, Tokenizer, TokenizerFailure
from fp8core.errors import SpecRefused

__all__ = ["Example", "ExampleEncoder", "texts_of"]


@dataclass(frozen=True)
class Example:
    """One document as tokens.

    ``ids`` [n] int32. ``targets`` [n] bool: tokens that may be predicted; None for all.
    ``byte_lengths`` [n] int32: bytes of text per token, None unless they were asked for.
    ``label``: the class id, -1 for none. ``truncated``: the document was longer than the limit.
    An example without tokens holds nothing to learn and is left out.
    """

    ids: NDArray[np.int32]
    targets: NDArray[np.bool_] | None = None
    byte_lengths: NDArray[np.int32] | None = None
    label: int = -1
    truncated: bool = False


class ExampleEncoder:
    """Encodes records of one format for one task.

    Texts get the begin tokens of the tokenizer's own template, and at their end the end-of-text
    token if ``append_end_of_text`` (causal models) or the template's end tokens (encoders). Longer
    than ``limit`` tokens they are cut at the end; for encoders the end tokens are kept. A document
    whose targets are all cut off becomes an empty example. Without a limit nothing is cut.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        format: DataFormat,
        *,
        task: str,
        append_end_of_text: bool,
        limit: int | None,
        class_ids: Mapping[str, int] | None = None,
        count_bytes: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._format = format
        self._limit = limit
        self._class_ids = class_ids or {}
        self._count_bytes = count_bytes
        self._begin = list(tokenizer.prefix_ids)
        self._end = _end_tokens(tokenizer, task, append_end_of_text)
        # An encoder's template is part of what it was trained on; a causal model's end may be cut.
        self._kept_end = len(tokenizer.suffix_ids) if task != "causal_lm" else 0
        if limit is not None and limit <= len(self._begin) + self._kept_end:
            raise SpecRefused(
                f"the tokenizer adds {len(self._begin) + self._kept_end} tokens to each text: "
                f"a sequence of {limit} has no room for the text",
                pointer="/training/sequence_length",
            )
        if format == "chat" and tokenizer.chat_template is None:
            tokenizer.chat_template = DEFAULT_TEMPLATE

    def encode(self, records: Sequence[Record], where: Callable[[int], str]) -> list[Example]:
        """One example for each record; ``where`` names the i-th of them for a person.

        Raises ``DataInvalid`` for a chat that the template refuses, for text that the tokenizer
        does, and for a label of no class.
        """
        if self._format == "chat":
            return [self._chat(record, partial(where, i)) for i, record in enumerate(records)]
        if self._format == "prompt_completion":
            return self._prompt_completion(records, where)
        return self._text(records, where)

    def _text(self, records: Sequence[Record], where: Callable[[int], str]) -> list[Example]:
        texts = [record.fields["text"] for record in records]
        encodings = self._encode_batch(texts, where)
        examples: list[Example] = []
        for index, (record, encoded) in enumerate(zip(records, encodings, strict=True)):
            label = -1
            if self._format == "labelled":
                name = str(record.fields["label"])
                if name not in self._class_ids:
                    raise invalid(where(index), f"the label changed to {name!r}, which is no class")
                label = self._class_ids[name]
            begin = self._begin if record.begins else []
            end = self._end if record.ends else []
            examples.append(self._assemble(begin, [encoded], end, label=label))
        return examples

    def _prompt_completion(
        self, records: Sequence[Record], where: Callable[[int], str]
    ) -> list[Example]:
        # Prompt and completion are encoded apart, as the prompt will be when the model is used.
        texts = [record.fields[name] for record in records for name in ("prompt", "completion")]
        encodings = self._encode_batch(texts, lambda index: where(index // 2))
        examples: list[Example] = []
        for prompt, completion in zip(encodings[::2], encodings[1::2], strict=True):
            first = len(self._begin) + len(prompt.ids)
            examples.append(
                self._assemble(self._begin, [prompt, completion], self._end, first_target=first)
            )
        return examples

    def _encode_batch(self, texts: Sequence[str], where: Callable[[int], str]) -> list[Encoded]:
        try:
            return self._tokenizer.encode_batch(texts, offsets=self._count_bytes)
        except TokenizerFailure:
            # It does not say of which text.
            for index, text in enumerate(texts):
                try:
                    self._tokenizer.encode_batch([text], offsets=self._count_bytes)
                except TokenizerFailure as error:
                    raise invalid(where(index), f"the tokenizer refuses it: {error}") from error
            raise

    def _chat(self, record: Record, where: Callable[[], str]) -> Example:
        try:
            encoded, targets = encode_chat(self._tokenizer, record.fields["messages"])
        except ChatTemplateError as error:
            raise invalid(where(), str(error)) from error
        except TokenizerFailure as error:
            raise invalid(where(), f"the tokenizer refuses it: {error}") from error
        return self._cut(encoded.ids, targets, encoded.byte_lengths, -1)

    def _assemble(
        self,
        begin: Sequence[int],
        parts: Sequence[Encoded],
        end: Sequence[int],
        *,
        label: int = -1,
        first_target: int | None = None,
    ) -> Example:
        ids = np.concatenate(
            [_tokens(begin), *(part.ids for part in parts), _tokens(end)], dtype=np.int32
        )
        lengths: NDArray[np.int32] | None = None
        if self._count_bytes:
            known = [part.byte_lengths for part in parts if part.byte_lengths is not None]
            lengths = np.concatenate(
                [np.zeros(len(begin), np.int32), *known, np.zeros(len(end), np.int32)],
                dtype=np.int32,
            )
        targets: NDArray[np.bool_] | None = None
        if first_target is not None:
            targets = np.arange(len(ids)) >= first_target
        return self._cut(ids, targets, lengths, label)

    def _cut(
        self,
        ids: NDArray[np.int32],
        targets: NDArray[np.bool_] | None,
        lengths: NDArray[np.int32] | None,
        label: int,
    ) -> Example:
        if self._limit is None or len(ids) <= self._limit:
            return Example(ids, targets, lengths, label)
        kept = np.arange(self._limit)
        if self._kept_end:
            kept[-self._kept_end :] = np.arange(len(ids) - self._kept_end, len(ids))
        ids = ids[kept]
        targets = None if targets is None else targets[kept]
        lengths = None if lengths is None else lengths[kept]
        # The first token is never a target of a causal model.
        if targets is not None and not targets[1:].any():
            ids = ids[:0]
        return Example(ids, targets, lengths, label, truncated=True)


def texts_of(record: Record) -> list[str]:
    """All text of a record, as a tokenizer is trained on it."""
    fields = record.fields
    if "messages" in fields:
        return [message["content"] for message in fields["messages"]]
    return [fields[name] for name in ("text", "prompt", "completion") if name in fields]


def _end_tokens(tokenizer: Tokenizer, task: str, append_end_of_text: bool) -> list[int]:
    if task != "causal_lm" and (tokenizer.suffix_ids or task == "sequence_classification"):
        return list(tokenizer.suffix_ids)
    if not append_end_of_text:
        return []
    if tokenizer.eos_id is None:
        raise SpecRefused(
            "the tokenizer has no end-of-text token; set this to false",
            pointer="/data/append_end_of_text",
        )
    return [tokenizer.eos_id]


def _tokens(ids: Sequence[int]) -> NDArray[np.int32]:
    return np.array(ids, dtype=np.int32)
