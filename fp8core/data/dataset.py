"""From a spec to training and evaluation batches."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8core.data.batches import BatchSource, EvaluationBatches, TrainingBatches
from fp8core.data.collate import Collator, MaskedTokens
from fp8core.data.formats import Example, ExampleEncoder, texts_of
from fp8core.data.order import EpochOrder, Numbers, split_documents
from fp8core.data.records import DocumentSource, RecordChecker, invalid
from fp8core.data.rows import DocumentFeed, RowStream, SingleRows, SplitRows, WholeRows
from fp8core.data.sources import open_source
from fp8core.data.tokenizers import Tokenizer
from fp8core.errors import DataInvalid
from fp8core.spec.recipe import token_multiple

__all__ = ["Corpus", "TrainingData", "open_corpus", "open_dataset"]

SAMPLE_BYTES = 32 * 1024 * 1024
_READ_AT_ONCE = 64


@dataclass(frozen=True)
class Corpus:
    """Checked documents and their split, before any tokenizer.

    ``training`` and ``evaluation`` are document numbers, ascending. ``class_labels`` are the
    classes in the order of their ids, None unless the format is ``labelled``.
    """

    source: DocumentSource
    training: Numbers
    evaluation: Numbers
    class_labels: tuple[str, ...] | None

    def training_texts(self) -> Iterator[str]:
        """The text of all training documents, in the order of the data."""
        return self._texts(self.training)

    def sample_texts(self, limit_bytes: int = SAMPLE_BYTES) -> Iterator[str]:
        """Text of training documents for a tokenizer to learn from, in a fixed random order.

        All of them, or as many as reach ``limit_bytes`` of UTF-8: a vocabulary hardly changes
        after that, while learning it from a large corpus would take hours and all memory.
        """
        order = EpochOrder(self.training, seed=0, shuffle=True, epochs=1, groups=self.source.groups)
        size = position = 0
        while size < limit_bytes and (numbers := order.slice(position, _READ_AT_ONCE)):
            position += len(numbers)
            for record in self.source.records(numbers):
                for text in texts_of(record):
                    size += len(text.encode())
                    yield text

    def evaluation_texts(self) -> Iterator[str]:
        """The text of all held-out documents, in the order of the data."""
        return self._texts(self.evaluation)

    def _texts(self, numbers: Numbers) -> Iterator[str]:
        for start in range(0, len(numbers), _READ_AT_ONCE):
            for record in self.source.records(numbers[start : start + _READ_AT_ONCE].tolist()):
                yield from texts_of(record)


@dataclass(frozen=True)
class TrainingData:
    """``evaluation`` is None when nothing is held out."""

    train: TrainingBatches
    evaluation: EvaluationBatches | None
    class_labels: tuple[str, ...] | None
    corpus: Corpus
    causal: bool

    @property
    def evaluation_bytes(self) -> int:
        """UTF-8 bytes of all targets of one evaluation, over all ranks: the divisor of bits per
        byte. 0 for tasks other than ``causal_lm``. Encodes the held-out documents, unless all of
        ``evaluation`` was iterated over before, which counts them.
        """
        if self.evaluation is None or not self.causal:
            return 0
        return self.evaluation.target_bytes


def open_corpus(
    spec: Any,
    *,
    roots: Sequence[str | os.PathLike[str]] = (),
    base_folder: str | os.PathLike[str] | None = None,
    upload_folder: str | os.PathLike[str] | None = None,
) -> Corpus:
    """Open, check and split the data of ``spec`` (a ``JobSpec``).

    Relative paths are looked up below ``roots``, or, without roots, in ``base_folder``. The split
    depends on the number of documents, ``evaluation.fraction`` and ``data.shuffle_seed``.

    Raises ``DataInvalid`` naming file and line, or ``SpecRefused``.
    """
    opened = open_source(
        spec.data, roots=roots, base_folder=base_folder, upload_folder=upload_folder
    )
    source = opened.source
    if spec.evaluation.fraction > 0 and len(source) < 2:
        raise DataInvalid(
            "the data is a single document, of which nothing can be held out; "
            "set evaluation.fraction to 0",
            pointer="/evaluation/fraction",
        )
    training, evaluation = split_documents(
        len(source), spec.evaluation.fraction, spec.data.shuffle_seed
    )
    labels: tuple[str, ...] | None = None
    if spec.data.format == "labelled":
        labels = _classes(opened.checker, spec.data.labels, training, source)
    return Corpus(source, training, evaluation, labels)


def open_dataset(
    spec: Any,
    tokenizer: Tokenizer,
    *,
    roots: Sequence[str | os.PathLike[str]] = (),
    base_folder: str | os.PathLike[str] | None = None,
    upload_folder: str | os.PathLike[str] | None = None,
    corpus: Corpus | None = None,
    rank: int = 0,
    world: int = 1,
) -> TrainingData:
    """The batches of ``spec`` (a ``JobSpec``) for one of ``world`` ranks.

    ``corpus`` is what ``open_corpus`` gave, where it was called before (to train a tokenizer);
    else the data is opened here.

    Raises ``DataInvalid`` or ``SpecRefused``.
    """
    if corpus is None:
        corpus = open_corpus(
            spec, roots=roots, base_folder=base_folder, upload_folder=upload_folder
        )
    training = spec.training
    packed = spec.data.packing and spec.data.format != "labelled"
    split = packed and spec.data.format == "text"
    causal = spec.task == "causal_lm"
    length = training.sequence_length
    class_ids = {label: index for index, label in enumerate(corpus.class_labels or ())}
    # An evaluation reads while batches for training are made ahead: files that are kept open, what
    # was unpacked of them and tokenizers have one user at a time.
    reading = threading.Lock()

    def stream(order: EpochOrder, count_bytes: bool) -> RowStream:
        encoder = ExampleEncoder(
            tokenizer,
            spec.data.format,
            task=spec.task,
            append_end_of_text=spec.data.append_end_of_text,
            limit=None if split else length,
            class_ids=class_ids,
            count_bytes=count_bytes,
        )

        def encode(numbers: Sequence[int]) -> list[Example]:
            with reading:
                records = corpus.source.records(numbers)
                return encoder.encode(records, lambda index: corpus.source.where(numbers[index]))

        kind = SplitRows if split else WholeRows if packed else SingleRows
        return kind(DocumentFeed(order, encode), length, shifted=causal)

    def evaluation_stream(count_bytes: bool) -> RowStream:
        order = EpochOrder(corpus.evaluation, seed=0, shuffle=False, epochs=1)
        return stream(order, count_bytes)

    masking = None
    if spec.task == "masked_lm":
        masking = MaskedTokens(tokenizer, training.mask_probability, training.seed)
    collator = Collator(
        spec.task, length, packed, tokenizer.pad_id, masking, token_multiple(spec.recipe)
    )
    order = EpochOrder(
        corpus.training,
        seed=spec.data.shuffle_seed,
        shuffle=spec.data.shuffle,
        epochs=spec.data.epochs,
        groups=corpus.source.groups,
    )
    train = BatchSource(
        stream(order, False),
        collator,
        batch_size=training.batch_size,
        rank=rank,
        world=world,
        fingerprint=_fingerprint(spec, corpus, tokenizer),
    )
    evaluation = None
    if len(corpus.evaluation):
        evaluation = EvaluationBatches(
            evaluation_stream,
            collator,
            batch_size=training.batch_size,
            max_batches=spec.evaluation.max_batches,
            rank=rank,
            world=world,
            counted=causal,
        )
        evaluation.check()
    return TrainingData(train, evaluation, corpus.class_labels, corpus, causal)


def _classes(
    checker: RecordChecker,
    wanted: Sequence[str] | None,
    training: Numbers,
    source: DocumentSource,
) -> tuple[str, ...]:
    codes = np.frombuffer(checker.label_codes, dtype=np.int32)
    names = checker.label_names
    if wanted is None:
        found = [names[code] for code in np.unique(codes[training])]
        classes = tuple(sorted(found, key=int) if checker.integer_labels else sorted(found))
    else:
        classes = tuple(wanted)
    # There may be as many names as rows.
    among = frozenset(classes)
    known = np.array([name in among for name in names], dtype=bool)
    unknown = np.flatnonzero(~known[codes])
    if len(unknown):
        first = int(unknown[0])
        name = names[codes[first]]
        if wanted is None:
            what = f"the label {name!r} is not in the training split; list all in data.labels"
        else:
            what = f"the label {name!r} is not one of data.labels"
        raise invalid(source.where(first), what, pointer="/data/labels")
    if len(classes) < 2:
        raise DataInvalid(
            f"all labels are {classes[0]!r}: there is nothing to tell apart", pointer="/data/labels"
        )
    return classes


def _fingerprint(spec: Any, corpus: Corpus, tokenizer: Tokenizer) -> str:
    data = spec.data
    parts = (
        corpus.source.fingerprint,
        len(corpus.training),
        spec.evaluation.fraction,
        data.format,
        data.columns.model_dump(),
        data.packing,
        data.append_end_of_text,
        data.shuffle,
        data.shuffle_seed,
        spec.task,
        spec.training.sequence_length,
        corpus.class_labels,
        tokenizer.fingerprint,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
