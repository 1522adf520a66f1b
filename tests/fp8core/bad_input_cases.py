"""What can be wrong with a spec and with the files that it names: one ``Case`` each."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from fp8core.spec import ExitCode
from tests.fp8core.bad_input_files import (
    CONFIG,
    Change,
    beyond_the_end,
    larger_shape,
    length_of_header,
    lie,
    lines,
    link,
    model,
    other_shape,
    pipe,
    replaced,
    table,
    tokenizer,
)

SPEC: dict[str, Any] = {
    "model": {"source": "config", "config": CONFIG},
    "tokenizer": "bytes",
    "data": {"source": "builtin"},
    "recipe": {"engine": "emulated", "amax_history_len": 4},
    "training": {"steps": 2, "batch_size": 2, "sequence_length": 32},
    "evaluation": {"max_batches": 1},
    "resources": {"device": "cpu"},
}
JSONL = {"source": "jsonl", "path": "data.jsonl"}
LABELLED = {**JSONL, "format": "labelled"}
PARQUET = {"source": "parquet", "path": "data.parquet"}
FOLDER = {"model": {"source": "path", "path": "model"}}
CLASSIFY = {"task": "sequence_classification"}
LINES = "".join(f'{{"text": "some words {n}", "label": "{"ab"[n % 2]}"}}\n' for n in range(20))


@dataclass(frozen=True)
class Case:
    """Parts that replace those of ``SPEC`` (merged two levels deep) and what must come of it.

    ``by_validate``: whether the spec and its paths alone already tell. ``prepare`` makes the files.
    """

    parts: dict[str, Any]
    code: ExitCode
    pointer: str
    words: str
    by_validate: bool = False
    prepare: tuple[Change, ...] = field(default=())
    rooted: bool = False


WORDS = {"tokenizer": {"source": "path", "path": "words"}}
SPEC_INVALID, DATA, MODEL = (
    ExitCode.SPEC_INVALID,
    ExitCode.DATA_INVALID,
    ExitCode.MODEL_UNAVAILABLE,
)

CASES: dict[str, Case] = {
    # The recipe
    "unknown key": Case(
        {"recipe": {"amax_hist_len": 4}},
        SPEC_INVALID,
        "/recipe/amax_hist_len",
        'did you mean "amax_history_len"',
        by_validate=True,
    ),
    "fp8_format E5M2": Case(
        {"recipe": {"fp8_format": "E5M2"}},
        SPEC_INVALID,
        "/recipe/fp8_format",
        'must be "HYBRID" or "E4M3"',
        by_validate=True,
    ),
    "amax_history_len 0": Case(
        {"recipe": {"amax_history_len": 0}},
        SPEC_INVALID,
        "/recipe/amax_history_len",
        "must be at least 1, not 0",
        by_validate=True,
    ),
    "negative margin": Case(
        {"recipe": {"margin": -1}},
        SPEC_INVALID,
        "/recipe/margin",
        "must be at least 0, not -1",
        by_validate=True,
    ),
    "two overrides": Case(
        {"recipe": {"override_linear_precision": [False, True]}},
        SPEC_INVALID,
        "/recipe/override_linear_precision",
        "three",
        by_validate=True,
    ),
    "delayed scaling on torchao": Case(
        {"recipe": {"engine": "torchao", "amax_history_len": 16}},
        SPEC_INVALID,
        "/recipe/amax_history_len",
        "torchao has no delayed scaling",
        by_validate=True,
    ),
    # Training
    "zero steps": Case(
        {"training": {"steps": 0}},
        SPEC_INVALID,
        "/training/steps",
        "must be at least 1, not 0",
        by_validate=True,
    ),
    "learning rate NaN": Case(
        {"training": {"optimizer": {"lr": float("nan")}}},
        SPEC_INVALID,
        "/training/optimizer/lr",
        "must be a finite number",
        by_validate=True,
    ),
    "sequence longer than a configuration allows": Case(
        {"training": {"sequence_length": 65}},
        SPEC_INVALID,
        "/training/sequence_length",
        "65 tokens are more than",
        by_validate=True,
    ),
    "sequence longer than a checkpoint allows": Case(
        {**FOLDER, "training": {"sequence_length": 65}},
        SPEC_INVALID,
        "/training/sequence_length",
        "more than the 64 positions",
        prepare=(model(),),
    ),
    "micro-batch of no machine": Case(
        {"training": {"batch_size": 65536, "sequence_length": 4_194_304}},
        SPEC_INVALID,
        "/training/batch_size",
        "fits no machine",
        by_validate=True,
    ),
    # Vocabularies
    "vocabulary larger than a configuration's embedding": Case(
        {"model": {"config": {**CONFIG, "vocab_size": 256}}},
        SPEC_INVALID,
        "/model/config/vocab_size",
        "has 256 tokens, the tokenizer's has 272",
    ),
    "trained vocabulary larger than the embedding": Case(
        {
            "model": {"config": {**CONFIG, "vocab_size": 256}},
            "tokenizer": {"source": "train", "vocab_size": 512},
        },
        SPEC_INVALID,
        "/model/config/vocab_size",
        "has 256 tokens, the tokenizer's has 512",
        by_validate=True,
    ),
    "vocabulary larger than a checkpoint's embedding": Case(
        FOLDER,
        SPEC_INVALID,
        "/tokenizer",
        "has 96 tokens, the tokenizer's has 272",
        prepare=(model(vocab_size=96),),
    ),
    # Paths
    "data outside its root": Case(
        {"data": {**JSONL, "path": "../data.jsonl"}},
        SPEC_INVALID,
        "/data/path",
        "outside the allowed roots",
        by_validate=True,
        rooted=True,
    ),
    "absolute path outside its root": Case(
        {"data": {"source": "text", "path": "/etc/passwd"}},
        SPEC_INVALID,
        "/data/path",
        "outside the allowed roots",
        by_validate=True,
        rooted=True,
    ),
    "link out of its root": Case(
        {"data": {"source": "text", "path": "words.txt"}},
        SPEC_INVALID,
        "/data/path",
        "outside the allowed roots",
        by_validate=True,
        prepare=(link("words.txt", "/etc/passwd"),),
        rooted=True,
    ),
    "model outside its root": Case(
        {"model": {"source": "path", "path": "../model"}},
        SPEC_INVALID,
        "/model/path",
        "outside the allowed roots",
        by_validate=True,
        rooted=True,
    ),
    "tokenizer file that is a link out of the root": Case(
        WORDS,
        SPEC_INVALID,
        "/tokenizer/path",
        "outside the allowed roots",
        prepare=(tokenizer(replaced("tokenizer.json", link("tokenizer.json", "/etc/passwd"))),),
        rooted=True,
    ),
    "missing data": Case({"data": JSONL}, DATA, "/data/path", "no such file", by_validate=True),
    "missing model": Case(FOLDER, MODEL, "/model/path", "no such file", by_validate=True),
    "missing tokenizer": Case(WORDS, MODEL, "/tokenizer/path", "no such file", by_validate=True),
    "loop of links": Case(
        {"data": JSONL},
        DATA,
        "/data/path",
        "no such file",
        by_validate=True,
        prepare=(link("data.jsonl", "data.jsonl"),),
    ),
    "pipe for data": Case(
        {"data": JSONL}, DATA, "/data/path", "neither a file", prepare=(pipe("data.jsonl"),)
    ),
    "endless device for data": Case(
        {"data": {**JSONL, "path": "/dev/zero"}}, DATA, "/data/path", "neither a file"
    ),
    "pipe within a tokenizer": Case(
        WORDS,
        MODEL,
        "/tokenizer/path",
        "tokenizer_config.json",
        prepare=(tokenizer(replaced("tokenizer_config.json", pipe("tokenizer_config.json"))),),
    ),
    # Data
    "broken JSON line": Case(
        {"data": JSONL},
        DATA,
        "/data",
        "data.jsonl, line 3: not valid JSON",
        prepare=(lines('{"text": "a"}\n{"text": "b"}\n{"text": \n'),),
    ),
    "record without the text": Case(
        {"data": JSONL},
        DATA,
        "/data/columns/text",
        "data.jsonl, line 2: no field 'text'",
        prepare=(lines('{"text": "a"}\n{"body": "b"}\n'),),
    ),
    "wrong type in JSON": Case(
        {"data": JSONL},
        DATA,
        "/data",
        "data.jsonl, line 2: 'text' must be a string, found a number",
        prepare=(lines('{"text": "a"}\n{"text": 2}\n'),),
    ),
    "empty file": Case({"data": JSONL}, DATA, "/data", "is empty", prepare=(lines(""),)),
    "nothing to learn": Case(
        {"data": JSONL},
        DATA,
        "/training/sequence_length",
        "anything to learn",
        prepare=(lines('{"text": ""}\n' * 20),),
    ),
    "wrong dtype in Parquet": Case(
        {"data": PARQUET},
        DATA,
        "/data/columns/text",
        "column 'text' has the type int64, but this field is a string",
        prepare=(table(text=[1, 2, 3]),),
    ),
    "null in Parquet": Case(
        {"data": PARQUET},
        DATA,
        "/data",
        "data.parquet, row 2: 'text' is null",
        prepare=(table(text=["a", None, "c"]),),
    ),
    "no Parquet": Case(
        {"data": PARQUET},
        DATA,
        "/data",
        "not a readable Parquet file",
        prepare=(lambda folder: (folder / "data.parquet").write_text(LINES),),
    ),
    "label unknown": Case(
        {"data": {**LABELLED, "labels": ["a", "c"]}, **CLASSIFY},
        DATA,
        "/data/labels",
        "line 2: the label 'b' is not one of data.labels",
        prepare=(lines(LINES),),
    ),
    "label of another type": Case(
        {"data": LABELLED, **CLASSIFY},
        DATA,
        "/data",
        "line 1: 'label' must be a string or a whole number",
        prepare=(lines('{"text": "a", "label": [1]}\n' * 9),),
    ),
    # Models
    "safetensors header longer than the file": Case(
        FOLDER,
        MODEL,
        "/model",
        "model.safetensors",
        prepare=(model(), length_of_header(2**62)),
    ),
    "safetensors shape larger than its bytes": Case(
        FOLDER, MODEL, "/model", "model.safetensors", prepare=(model(), lie(larger_shape))
    ),
    "safetensors shape of another model": Case(
        FOLDER, MODEL, "/model", "lm_head.weight has shape", prepare=(model(), lie(other_shape))
    ),
    "safetensors offsets beyond the end": Case(
        FOLDER, MODEL, "/model", "model.safetensors", prepare=(model(), lie(beyond_the_end))
    ),
    "truncated safetensors": Case(
        FOLDER,
        MODEL,
        "/model",
        "truncated or damaged",
        prepare=(
            model(),
            lambda folder: os.truncate(folder / "model/model.safetensors", 2000),
        ),
    ),
    "endless layers": Case(
        {"model": {"config": {**CONFIG, "num_hidden_layers": 10**9}}},
        SPEC_INVALID,
        "/model/config/num_hidden_layers",
        "must be from 1 to 10000",
        by_validate=True,
    ),
    "model that mixes packed documents": Case(
        {"model": {"config": {**CONFIG, "model_type": "jamba"}}},
        SPEC_INVALID,
        "/data/packing",
        "does not keep packed documents apart",
    ),
}
