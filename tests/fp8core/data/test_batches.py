"""Batches: packing, padding, order, resume, ranks, evaluation."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core.data import load_tokenizer, open_corpus, open_dataset
from fp8core.data.tokenizer_build import byte_tokenizer
from fp8core.data.tokenizers import Tokenizer
from fp8core.errors import DataInvalid, SpecRefused
from tests.fp8core.data.documents import (
    BYTES,
    ENCODER,
    END,
    KINDS,
    Spec,
    documents_of,
    stream_of,
    texts,
    tokenizer_for,
)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("scaling", ["delayed", "mxfp8", "nvfp4"])
def test_rows_are_padded_to_what_the_recipe_multiplies(
    make_spec: Spec, scaling: str, packing: bool
) -> None:
    spec = make_spec(
        recipe={"engine": "te", "scaling": scaling},
        data={"source": "builtin", "packing": packing, "epochs": 1},
        training={"sequence_length": 40, "batch_size": 3},
    )
    data = open_dataset(spec, tokenizer_for("causal_lm"), corpus=None)
    seen = [batch.input_ids for _, batch in zip(range(4), data.train, strict=False)]
    assert {ids.shape[1] for ids in seen} == ({48} if scaling == "delayed" else {64})
    held = data.train.statistics
    assert held.tokens + held.padding == sum(ids.numel() for ids in seen)


@pytest.mark.parametrize(("kind", "packing", "task"), KINDS)
def test_shapes_padding_and_positions(
    corpus_spec: Spec, kind: str, packing: bool | None, task: str
) -> None:
    spec = corpus_spec(
        kind, packing=packing, task=task, training={"sequence_length": 40}, data={"epochs": 1}
    )
    data = open_dataset(spec, tokenizer_for(task), corpus=None)
    batches = list(data.train)
    assert data.evaluation is not None
    for batch in [*batches, *data.evaluation]:
        rows, length = batch.input_ids.shape
        # 40 is no multiple of 16: rows hold 40 tokens and are padded to 48.
        assert length % 16 == 0
        assert rows * length % 16 == 0
        assert (batch.document_ids >= 0).sum(1).max() <= 40
        assert batch.packed == (packing is True)
        if batch.packed:
            assert length == 48
        padding = batch.document_ids == -1
        assert (batch.input_ids[padding] == 257).all()
        assert (batch.position_ids[padding] == 0).all()
        assert batch.token_count == int((~padding).sum())
        if batch.attention_mask is not None:
            assert torch.equal(batch.attention_mask, ~padding)
        if task == "sequence_classification":
            assert batch.labels.shape == (rows,)
            assert batch.target_count == rows
        else:
            assert (batch.labels[padding] == -100).all()
            assert batch.target_count == int((batch.labels != -100).sum()) > 0
        for owners, positions, labels in zip(
            batch.document_ids, batch.position_ids, batch.labels, strict=True
        ):
            for document in range(int(owners.max()) + 1):
                mine = owners == document
                assert positions[mine].tolist() == list(range(int(mine.sum())))
                if task == "causal_lm":
                    assert labels[mine][0] == -100
    assert len(batches[-1].input_ids) in (1, 2)


def test_packed_text_loses_no_token_and_fills_every_row(corpus_spec: Spec) -> None:
    spec = corpus_spec("text", data={"epochs": 1, "shuffle": False}, evaluation={"fraction": 0})
    batches = list(open_dataset(spec, BYTES).train)
    stream = stream_of(batches)
    assert stream == [token for text in texts(60) for token in [*text.encode(), END]]
    assert all(batch.token_count == 128 for batch in batches[:-1])
    for batch in batches:
        inside = (batch.position_ids > 0) & (batch.document_ids >= 0)
        assert torch.equal(batch.labels != -100, inside)
        assert torch.equal(batch.labels[inside], batch.input_ids[inside])


def test_prompts_are_no_targets_and_documents_stay_whole(corpus_spec: Spec) -> None:
    spec = corpus_spec(
        "prompt_completion",
        data={"epochs": 1},
        evaluation={"fraction": 0},
        training={"sequence_length": 128},
    )
    data = open_dataset(spec, BYTES)
    batches = list(data.train)
    whole = sorted([*text.encode(), ord("!"), END] for text in texts(60))
    assert sorted(documents_of(batches)) == whole
    assert max(int(batch.document_ids.max()) for batch in batches) > 0
    for batch in batches:
        real = batch.document_ids >= 0
        assert torch.equal(batch.labels != -100, real & (batch.position_ids >= 4))
    # Best fit leaves little room: under a tenth of all but the final rows.
    assert data.train.statistics.padding_share < 0.2
    assert data.train.statistics.documents == 60


def test_long_documents_are_cut_and_counted(corpus_spec: Spec) -> None:
    spec = corpus_spec(
        "prompt_completion",
        data={"epochs": 1},
        evaluation={"fraction": 0},
        training={"sequence_length": 32},
    )
    data = open_dataset(spec, BYTES)
    list(data.train)
    long = [text for text in texts(60) if len(text) + 2 > 32]
    statistics = data.train.statistics
    assert (statistics.documents, statistics.truncated, statistics.dropped) == (60, len(long), 0)
    assert statistics.tokens == sum(min(32, len(text) + 2) for text in texts(60))


def test_what_has_no_target_left_is_dropped(
    make_spec: Spec, write_jsonl: Callable[..., Path]
) -> None:
    rows = [{"prompt": "p" * 40, "completion": "c"}, {"prompt": "p", "completion": "c"}]
    for packing in (True, False):
        path = str(write_jsonl(rows))
        data = {"source": "jsonl", "path": path, "format": "prompt_completion"}
        spec = make_spec(
            data=data | {"epochs": 1, "packing": packing},
            evaluation={"fraction": 0},
            training={"sequence_length": 32},
        )
        train = open_dataset(spec, BYTES).train
        assert documents_of(train) == [[ord("p"), ord("c"), END]]
        assert train.statistics.dropped == 1
        spec = make_spec(
            data=data | {"path": str(write_jsonl(rows[:1], "long.jsonl")), "packing": packing},
            evaluation={"fraction": 0},
            training={"sequence_length": 32},
        )
        with pytest.raises(DataInvalid, match="anything to learn") as raised:
            next(open_dataset(spec, BYTES).train)
        assert raised.value.pointer == "/training/sequence_length"


@pytest.mark.parametrize("packing", [True, False])
def test_data_of_single_tokens_ends_with_an_error(
    make_spec: Spec, write_jsonl: Callable[..., Path], packing: bool
) -> None:
    # Repeated without end, these would be read for ever in search of a target.
    data = {"source": "jsonl", "path": str(write_jsonl([{"text": "x"}] * 40))}
    data |= {"packing": packing, "append_end_of_text": False}
    train = open_dataset(make_spec(data=data, evaluation={"fraction": 0.0}), BYTES).train
    with pytest.raises(DataInvalid, match="anything to learn"):
        next(train)


def test_a_single_huge_document_is_split_in_blocks(make_spec: Spec, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"sentence number {index}.\n" for index in range(20_000)))
    spec = make_spec(
        data={"source": "text", "path": str(path), "epochs": 1},
        training={"sequence_length": 512, "batch_size": 4},
        evaluation={"fraction": 0.05},
    )
    data = open_dataset(spec, BYTES)
    training = "".join(data.corpus.training_texts())
    held_out = "".join(data.corpus.evaluation_texts())
    assert len(training) + len(held_out) == path.stat().st_size
    assert len(held_out) / path.stat().st_size == pytest.approx(0.05, rel=0.2)
    assert not set(held_out.splitlines()) & set(training.splitlines())
    batches = [*data.train, *(data.evaluation or ())]
    assert stream_of(batches).count(END) == 1


def test_one_record_cannot_be_split(make_spec: Spec, write_jsonl: Callable[..., Path]) -> None:
    data = {"source": "jsonl", "path": str(write_jsonl([{"text": "a"}]))}
    with pytest.raises(DataInvalid, match="single document") as raised:
        open_corpus(make_spec(data=data))
    assert raised.value.pointer == "/evaluation/fraction"
    spec = make_spec(data=data, evaluation={"fraction": 0})
    assert open_dataset(spec, BYTES).evaluation is None


def test_classes_are_discovered_sorted_or_given(
    make_spec: Spec, write_jsonl: Callable[..., Path]
) -> None:
    def labelled(values: list[Any], **data: Any) -> Any:
        path = write_jsonl({"text": f"t{i}", "label": label} for i, label in enumerate(values))
        return make_spec(
            data={"source": "jsonl", "path": str(path), "format": "labelled"} | data,
            task="sequence_classification",
        )

    assert open_corpus(labelled(["b", "a", "c"] * 9)).class_labels == ("a", "b", "c")
    assert open_corpus(labelled([10, 9, 2] * 9)).class_labels == ("2", "9", "10")
    given = open_dataset(labelled(["b", "a"] * 9, labels=["b", "x", "a"]), ENCODER)
    assert given.class_labels == ("b", "x", "a")
    batch = next(given.train)
    for ids, label in zip(batch.input_ids, batch.labels.tolist(), strict=True):
        assert ids[0] == 259
        number = int(bytes(token for token in ids.tolist() if token < 256)[1:])
        assert label == (0 if number % 2 == 0 else 2)
    with pytest.raises(DataInvalid, match=r"data\.jsonl, line 2: the label 'a' is not one of"):
        open_corpus(labelled(["b", "a"] * 9, labels=["b", "x"]))
    with pytest.raises(DataInvalid, match="all labels are 'b'"):
        open_corpus(labelled(["b"] * 9))


def test_a_label_of_the_held_out_part_alone_is_refused(
    make_spec: Spec, write_jsonl: Callable[..., Path]
) -> None:
    labels = ["a", "b"] * 20
    path = write_jsonl({"text": "t", "label": label} for label in labels)
    data = {"source": "jsonl", "path": str(path), "format": "labelled"}
    spec = make_spec(data=data, task="sequence_classification")
    held_out = int(open_corpus(spec).evaluation[0])
    labels[held_out] = "rare"
    write_jsonl({"text": "t", "label": label} for label in labels)
    with pytest.raises(DataInvalid, match=f"line {held_out + 1}: the label 'rare' is not in"):
        open_corpus(spec)


def test_a_label_that_changes_under_training_is_noticed(corpus_spec: Spec) -> None:
    spec = corpus_spec("labelled", data={"shuffle": False})
    data = open_dataset(spec, ENCODER)
    path = Path(spec.data.path)
    path.write_text(path.read_text().replace('"label": "b"', '"label": "c"'))
    with pytest.raises(DataInvalid, match=r"line \d+: the label changed to 'c'"):
        list(itertools.islice(data.train, 2))


def test_encoder_templates_survive_truncation(corpus_spec: Spec) -> None:
    spec = corpus_spec("labelled", training={"sequence_length": 32})
    batch = next(open_dataset(spec, ENCODER).train)
    lengths = (batch.document_ids >= 0).sum(1)
    for ids, length in zip(batch.input_ids, lengths.tolist(), strict=True):
        assert (int(ids[0]), int(ids[length - 1])) == (259, END)
        assert END not in ids[: length - 1]


def test_end_of_text_is_appended_or_not_or_missing(corpus_spec: Spec) -> None:
    spec = corpus_spec("text", data={"append_end_of_text": False, "epochs": 1})
    assert not any((b.input_ids == END).any() for b in open_dataset(spec, BYTES).train)
    bare = byte_tokenizer()
    bare.eos_token = None
    with pytest.raises(SpecRefused, match="no end-of-text token") as raised:
        open_dataset(corpus_spec("text"), Tokenizer(bare))
    assert raised.value.pointer == "/data/append_end_of_text"


def test_batches_move_and_keep_their_counts(corpus_spec: Spec) -> None:
    for packing in (True, False):
        batch = next(open_dataset(corpus_spec("text", packing=packing), BYTES).train)
        moved = batch.to("meta")
        assert moved.input_ids.device.type == "meta"
        assert moved.labels.device.type == moved.document_ids.device.type == "meta"
        assert (moved.attention_mask is None) == packing
        assert moved.token_count == batch.token_count


def test_memory_does_not_grow_with_the_file(make_spec: Spec, tmp_path: Path) -> None:
    jsonl, text = tmp_path / "big.jsonl", tmp_path / "big.txt"
    line = "some words of a document " * 40
    with jsonl.open("w") as file:
        for index in range(24_000):
            file.write(json.dumps({"text": f"{index} {line}"}) + "\n")
    with text.open("w") as file:
        for index in range(24_000):
            file.write(f"{index} {line}\n")
    for source, path in (("jsonl", jsonl), ("text", text)):
        assert path.stat().st_size > 24_000_000
        spec = make_spec(data={"source": source, "path": str(path)})
        tracemalloc.start()
        train = open_dataset(spec, BYTES).train
        for _ in range(20):
            next(train)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 8_000_000


def test_a_tokenizer_learns_from_training_documents_alone(
    make_spec: Spec, write_jsonl: Callable[..., Path]
) -> None:
    path = write_jsonl({"text": text} for text in texts(60))
    spec = make_spec(
        data={"source": "jsonl", "path": str(path)},
        evaluation={"fraction": 0.5},
        tokenizer={"source": "train", "vocab_size": 300},
    )
    corpus = open_corpus(spec)
    sample = list(corpus.sample_texts())
    assert sorted(sample) == sorted(corpus.training_texts())
    assert not set(sample) & set(corpus.evaluation_texts())
    assert list(corpus.sample_texts()) == sample
    few = list(corpus.sample_texts(limit_bytes=1))
    assert few == sample[: len(few)]
    tokenizer = load_tokenizer(spec, texts=corpus.sample_texts())
    assert tokenizer.vocab_size == 300
    batch = next(open_dataset(spec, tokenizer, corpus=corpus).train)
    assert int(batch.input_ids.max()) < 300


def test_a_tokenizer_learns_from_all_texts_of_chats(
    make_spec: Spec, write_jsonl: Callable[..., Path]
) -> None:
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    path = write_jsonl([{"messages": turns}] * 4)
    spec = make_spec(data={"source": "jsonl", "path": str(path), "format": "chat"})
    assert list(open_corpus(spec).sample_texts()) == ["question", "answer"] * 3
    batch = next(open_dataset(spec, Tokenizer(byte_tokenizer())).train)
    row = batch.input_ids[0][batch.labels[0] != -100].tolist()
    assert row[:7] == [*b"answer", END]
