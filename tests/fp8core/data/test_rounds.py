"""Which batches a rank gets, in which order: resume, ranks, epochs, the held-out part."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8core.data import open_dataset
from fp8core.data.order import split_documents
from fp8core.errors import DataInvalid
from tests.fp8core.data.documents import (
    BYTES,
    END,
    KINDS,
    Spec,
    documents_of,
    same,
    stream_of,
    texts,
    tokenizer_for,
)


@pytest.mark.parametrize(("kind", "packing", "task"), KINDS)
def test_resume_gives_exactly_the_next_batches(
    corpus_spec: Spec, kind: str, packing: bool | None, task: str
) -> None:
    spec = corpus_spec(kind, packing=packing, task=task)
    tokenizer = tokenizer_for(task)
    train = open_dataset(spec, tokenizer).train
    # 80 batches are several epochs; a state is taken before each.
    states, batches = [], []
    for _ in range(80):
        states.append(json.loads(json.dumps(train.state_dict())))
        batches.append(next(train))
    assert len(json.dumps(states[-1])) < 500
    for start in (0, 1, 7, 30, 79):
        resumed = open_dataset(spec, tokenizer).train
        resumed.load_state_dict(states[start])
        for expected in batches[start : start + 12]:
            assert same(next(resumed), expected)
        if start == 30:
            assert resumed.state_dict() == states[42]
    # The order changes from epoch to epoch.
    assert not any(same(batches[0], later) for later in batches[1:])


def test_a_state_of_other_data_is_refused(corpus_spec: Spec) -> None:
    state = open_dataset(corpus_spec("text"), BYTES).train.state_dict()
    for other in (
        corpus_spec("text", data={"shuffle_seed": 1}),
        corpus_spec("text", training={"sequence_length": 32}),
        corpus_spec("text", data={"append_end_of_text": False}),
    ):
        with pytest.raises(DataInvalid, match="changed since the checkpoint"):
            open_dataset(other, BYTES).train.load_state_dict(state)
    with pytest.raises(DataInvalid, match="version 2"):
        open_dataset(corpus_spec("text"), BYTES).train.load_state_dict({**state, "version": 2})


@pytest.mark.parametrize(("kind", "packing", "task"), KINDS)
def test_ranks_share_the_rows_of_one_order(
    corpus_spec: Spec, kind: str, packing: bool | None, task: str
) -> None:
    spec = corpus_spec(kind, packing=packing, task=task)
    tokenizer = tokenizer_for(task)
    alone = open_dataset(spec, tokenizer).train
    ranks = [open_dataset(spec, tokenizer, rank=rank, world=3).train for rank in range(3)]
    for _ in range(10):
        for rank in ranks:
            assert same(next(rank), next(alone))
        states = [rank.state_dict() for rank in ranks]
        assert states[0] == states[1] == states[2]
    # A checkpoint of three ranks goes on with one.
    again = open_dataset(spec, tokenizer).train
    again.load_state_dict(ranks[0].state_dict())
    assert same(next(again), next(alone))


def test_the_last_round_is_dealt_evenly(make_spec: Spec, write_jsonl: Callable[..., Path]) -> None:
    # 7 rows of one document each, in rounds of 2 ranks times 2.
    path = write_jsonl([{"text": f"{index}"} for index in range(7)])
    data = {"source": "jsonl", "path": str(path), "packing": False, "epochs": 1}
    spec = make_spec(data=data, evaluation={"fraction": 0})
    ranks = [list(open_dataset(spec, BYTES, rank=rank, world=2).train) for rank in range(2)]
    assert [[len(batch.input_ids) for batch in rank] for rank in ranks] == [[2, 2], [2, 1]]
    found = documents_of(itertools.chain(*ranks))
    assert sorted(found) == [[ord(f"{index}"), END] for index in range(7)]
    # With five ranks the second round, of two rows, is too small for all.
    spec = make_spec(data=data, evaluation={"fraction": 0}, training={"batch_size": 1})
    assert len(list(open_dataset(spec, BYTES, rank=0, world=5).train)) == 1


def test_epochs_bound_the_run_and_repeat_every_document(corpus_spec: Spec) -> None:
    spec = corpus_spec("text", packing=False, data={"epochs": 2}, training={"sequence_length": 96})
    data = open_dataset(spec, BYTES)
    found = documents_of(data.train)
    assert sorted(found) == sorted(2 * [list(x) for x in {tuple(d) for d in found}])
    assert len(found) == 2 * len(data.corpus.training) == 118
    assert next(data.train, None) is None


def test_evaluation_is_disjoint_repeatable_and_counts_its_bytes(corpus_spec: Spec) -> None:
    spec = corpus_spec(
        "text",
        data={"epochs": 1},
        evaluation={"fraction": 0.2},
        training={"sequence_length": 96},
    )
    data = open_dataset(spec, BYTES)
    assert data.evaluation is not None
    first, second = list(data.evaluation), list(data.evaluation)
    assert len(first) == len(data.evaluation)
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    training = list(data.corpus.training_texts())
    held_out = list(data.corpus.evaluation_texts())
    assert (len(training), len(held_out)) == (48, 12)
    assert sorted(training + held_out) == texts(60)
    stream = stream_of(first)
    assert stream == [token for text in held_out for token in [*text.encode(), END]]
    # A byte is a token here; the end of text stands for no byte.
    targets = sum(int(((batch.labels != -100) & (batch.labels != END)).sum()) for batch in first)
    assert data.evaluation_bytes == targets


def test_evaluation_bytes_of_ranks_and_of_max_batches(corpus_spec: Spec) -> None:
    def of(**evaluation: Any) -> Any:
        return corpus_spec("text", evaluation={"fraction": 0.3} | evaluation)

    data = open_dataset(of(), BYTES)
    whole = list(data.evaluation or ())
    ranks = [open_dataset(of(), BYTES, rank=rank, world=4) for rank in range(4)]
    shares = [list(rank.evaluation or ()) for rank in ranks]
    assert {len(share) for share in shares} == {len(ranks[0].evaluation or ())}
    assert {rank.evaluation_bytes for rank in ranks} == {data.evaluation_bytes}
    together = [batch for round in zip(*shares, strict=True) for batch in round]
    assert documents_of(together) == documents_of(whole)
    assert sum(b.target_count for b in together) == sum(b.target_count for b in whole)
    # A rank without rows gets padding and no targets.
    assert all(len(batch.input_ids) >= 1 for batch in together)
    limited = open_dataset(of(max_batches=2), BYTES)
    assert len(limited.evaluation or ()) == 2
    assert all(same(a, b) for a, b in zip(limited.evaluation or (), whole[:2], strict=True))
    assert 0 < limited.evaluation_bytes < data.evaluation_bytes


@pytest.mark.parametrize("format", ["text", "prompt_completion"])
def test_data_without_any_batch_is_an_error_and_no_run_of_zero_steps(
    make_spec: Spec, write_jsonl: Callable[..., Path], format: str
) -> None:
    rows = [{"text": "a", "prompt": "a" * 80, "completion": "b"}] * 20
    spec = make_spec(
        data={
            "source": "jsonl",
            "path": str(write_jsonl(rows)),
            "format": format,
            "packing": format != "text",
            "append_end_of_text": False,
            "epochs": 1,
        },
        evaluation={"fraction": 0.0},
    )
    with pytest.raises(DataInvalid, match="anything to learn within 64 tokens"):
        next(open_dataset(spec, BYTES).train)


def test_fewer_rows_than_ranks_are_an_error(
    make_spec: Spec, write_jsonl: Callable[..., Path]
) -> None:
    path = write_jsonl([{"text": "two words"}])
    data = {"source": "jsonl", "path": str(path), "epochs": 1}
    spec = make_spec(data=data, evaluation={"fraction": 0.0})
    for rank in range(3):
        with pytest.raises(DataInvalid, match=r"fills 1 sequence\(s\), and 3 ranks take one each"):
            next(open_dataset(spec, BYTES, rank=rank, world=3).train)


def test_a_held_out_part_with_nothing_to_learn_fails_before_the_first_step(
    make_spec: Spec, write_jsonl: Callable[..., Path]
) -> None:
    held = set(split_documents(20, 0.1, 0)[1].tolist())
    rows = [{"text": "a" if number in held else "many words"} for number in range(20)]
    data = {"source": "jsonl", "path": str(write_jsonl(rows)), "append_end_of_text": False}
    spec = make_spec(data=data, evaluation={"fraction": 0.1})
    with pytest.raises(DataInvalid, match="none of the 2 documents that are held out") as raised:
        open_dataset(spec, BYTES)
    assert raised.value.pointer == "/training/sequence_length"
