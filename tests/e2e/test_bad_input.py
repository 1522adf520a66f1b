"""What is wrong is refused with its place, nothing of it is stored, and the service lives on."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.e2e

PROBLEM = "application/problem+json"


def emulated(**fields: Any) -> dict[str, Any]:
    return {"recipe": {"engine": "emulated", **fields}}


def training(**fields: Any) -> dict[str, Any]:
    return {"training": fields}


# (what, changes of a good spec, the pointer that the answer must name)
BAD = [
    ("an unknown key", emulated(amax_hist_len=16), "/recipe/amax_hist_len"),
    ("a format that is none", emulated(fp8_format="E5M2"), "/recipe/fp8_format"),
    ("no history", emulated(amax_history_len=0), "/recipe/amax_history_len"),
    ("a negative margin", emulated(margin=-1), "/recipe/margin"),
    ("two overrides", emulated(override_linear_precision=[True, False]),
     "/recipe/override_linear_precision"),
    ("delayed keys on torchao", {"recipe": {"engine": "torchao", "amax_history_len": 16}},
     "/recipe/amax_history_len"),
    ("a path outside", {"data": {"source": "text", "path": "../../etc/passwd"}}, "/data/path"),
    ("an absolute path outside", {"model": {"source": "path", "path": "/etc"}}, "/model/path"),
    ("a link that leads outside", {"data": {"source": "text", "path": "link.txt"}}, "/data/path"),
    ("a broken line", {"data": {"source": "jsonl", "path": "broken.jsonl"}}, "/data/path"),
    ("zero steps", training(steps=0), "/training/steps"),
    ("a learning rate that is no number", training(optimizer={"name": "adamw", "lr": "NaN"}),
     "/training/optimizer/lr"),
    ("a sequence that the model cannot take", training(sequence_length=65_536),
     "/training/sequence_length"),
    ("a vocabulary larger than the embedding",
     {"tokenizer": {"source": "train", "vocab_size": 1024}}, "/model/config/vocab_size"),
    ("a job that is none", {"model": {"source": "job", "job": "job_1"}}, "/model/job"),
    ("a name of NUL", {"name": "a\u0000b"}, "/name"),
    ("half a character", {"labels": {"a": "\ud800"}}, "/labels/a"),
    ("nothing of what it needs", {"model": None}, "/model"),
    ("a huge number", training(steps=10**30), "/training/steps"),
    ("a number too deep for a float", {"evaluation": {"fraction": 1e400}}, "/evaluation/fraction"),
]  # fmt: skip


def stored(service) -> int:
    return sum(1 for _ in service.client.jobs.list())


@pytest.fixture(scope="module")
def files(service) -> None:
    (service.root / "broken.jsonl").write_text('{"text": "good"}\n{"text": "bad"\n')
    (service.root / "link.txt").symlink_to("/etc/passwd")


def test_bad_specs(service, files):
    before = stored(service)
    for what, changes, pointer in BAD:
        spec = service.spec(**{"name": "bad", **changes})
        answer = service.http.post("/v1/jobs", content=json.dumps(spec))
        assert answer.status_code == 422, (what, answer.text)
        assert answer.headers["Content-Type"] == PROBLEM
        problem = answer.json()
        assert problem["status"] == 422
        assert problem["instance"] == "/v1/jobs"
        pointers = [error["pointer"] for error in problem["errors"]]
        assert pointer in pointers, (what, pointers)
        assert all(error["message"] and error["code"] for error in problem["errors"])
    assert stored(service) == before


def test_a_suggestion_and_a_line_number(service, files):
    answer = service.http.post("/v1/jobs", json=service.spec(**emulated(amax_hist_len=16)))
    assert answer.json()["errors"][0]["suggestion"] == "amax_history_len"
    spec = service.spec(data={"source": "jsonl", "path": "broken.jsonl"})
    answer = service.http.post("/v1/jobs", json=spec)
    assert answer.json()["errors"][0]["line"] == 2


def test_what_only_the_node_can_see_fails_the_job(service):
    (service.root / "wrong-label.jsonl").write_text(
        "\n".join(json.dumps({"text": f"line {n}", "label": "abc"[n % 3]}) for n in range(30))
    )
    pq.write_table(pa.table({"text": [1, 2, 3]}), service.root / "numbers.parquet")
    model = service.root / "lying-model"
    model.mkdir()
    config = service.spec()["model"]["config"] | {"architectures": ["LlamaForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    # A header of 2^62 bytes, in a file of ten.
    (model / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    unknown_label = {
        "task": "sequence_classification",
        "data": {
            "source": "jsonl",
            "path": "wrong-label.jsonl",
            "format": "labelled",
            "labels": ["a", "b"],
        },
    }
    cases = [
        ({"data": {"source": "text", "path": "missing.txt"}}, "data_invalid"),
        (unknown_label, "data_invalid"),
        ({"data": {"source": "parquet", "path": "numbers.parquet"}}, "data_invalid"),
        ({"model": {"source": "path", "path": "lying-model"}}, "model_unavailable"),
    ]
    jobs = [service.submit("for-the-node", **changes) for changes, _ in cases]
    for job, (_, reason) in zip(jobs, cases, strict=True):
        service.end(job, "failed")
        assert (job.data.reason, job.data.attempt) == (reason, 1), job.data.detail
        assert not [a for a in job.artifacts() if a.kind in ("model", "checkpoint")]


MALFORMED: list[tuple[str, bytes, dict[str, str], set[int]]] = [
    ("nothing", b"", {}, {422}),
    ("no JSON", b"{", {}, {422}),
    ("a list", b"[]", {}, {422}),
    ("NaN", b'{"training": {"steps": NaN}}', {}, {422}),
    ("not UTF-8", b'{"name": "\xff\xfe"}', {}, {422}),
    ("UTF-16", '{"name": "a"}'.encode("utf-16"), {}, {422}),
    ("deep", b"[" * 100_000 + b"]" * 100_000, {}, {422}),
    ("deep objects", b'{"a":' * 50_000 + b"1" + b"}" * 50_000, {}, {422}),
    ("a long integer", b'{"priority": ' + b"9" * 10_000 + b"}", {}, {422}),
    ("the same key twice", b'{"name": "a", "name": "b"}', {}, {422}),
    ("another type", b"name=a", {"Content-Type": "application/x-www-form-urlencoded"}, {415, 422}),
    ("too large", b'{"notes": "' + b"a" * (2 << 20) + b'"}', {}, {413}),
    ("far too large", b"a" * (33 << 20), {}, {413}),
]


@pytest.mark.parametrize(
    ("body", "headers", "statuses"), [c[1:] for c in MALFORMED], ids=[c[0] for c in MALFORMED]
)
def test_malformed_bodies(service, body, headers, statuses):
    before = stored(service)
    answer = service.http.post("/v1/jobs", content=body, headers=headers)
    assert answer.status_code in statuses, answer.text
    assert answer.headers["Content-Type"] == PROBLEM
    assert answer.json()["title"]
    assert stored(service) == before


def test_a_body_without_a_length_is_counted(service):
    def pieces():
        for _ in range(40):
            yield b"a" * (1 << 20)

    answer = service.http.post("/v1/jobs", content=pieces())
    assert answer.status_code == 413
    assert answer.headers["Content-Type"] == PROBLEM


def test_ids_and_paths_of_every_kind(service):
    odd = [
        "job_x",
        "job_" + "0" * 26,
        "..%2f..%2fetc%2fpasswd",
        "%00",
        "%ff%fe",
        "a" * 5000,
        "%E2%80%AE%F0%9F%92%A3",
        "'; DROP TABLE jobs; --",
        "%25s%25n",
        "\u0130\u0131",
    ]
    parts = ("", "/events", "/metrics", "/logs", "/stream", "/artifacts", "/conversion",
             "/artifacts/art_x/files/..%2f..%2fetc%2fpasswd")  # fmt: skip
    for word in odd:
        for part in parts:
            answer = service.http.get(f"/v1/jobs/{word}{part}")
            assert answer.status_code in {400, 404, 414}, (word, part, answer.text)
            assert answer.headers["Content-Type"] == PROBLEM, (word, part)
        answer = service.http.post(f"/v1/jobs/{word}/cancel")
        assert answer.status_code in {400, 404}, (word, answer.text)
    for query in ("cursor=x", "limit=0", "limit=x", "status=none", "label.a=%00", "cursor=%FF"):
        answer = service.http.get(f"/v1/jobs?{query}")
        assert answer.status_code in {400, 422}, (query, answer.text)
        assert answer.headers["Content-Type"] == PROBLEM
    for method, path in (("PUT", "/v1/jobs"), ("DELETE", "/v1/nodes"), ("GET", "/v1/none")):
        answer = service.http.request(method, path)
        assert answer.status_code in {404, 405}
        assert answer.headers["Content-Type"] == PROBLEM


def test_without_a_key_or_with_a_wrong_one(service):
    for headers in (
        {"Authorization": ""},
        {"Authorization": "Bearer x"},
        {"Authorization": "Basic eDp4"},
        {"Authorization": "Bearer " + "a" * 9000},
    ):
        for path in ("/v1/jobs", "/v1/nodes", "/jobs"):
            answer = service.http.get(path, headers=headers)
            assert answer.status_code == 401, answer.text
            assert answer.headers["Content-Type"] == PROBLEM
    node = {"Authorization": f"Bearer {service.stack.node_key}"}
    assert service.http.post("/v1/jobs", json={}, headers=node).status_code == 403


def test_names_of_every_language_come_back_as_they_went(service):
    name = "naïve 模型 🧪 \u202e עברית"
    job = service.submit(
        name, labels={"team": "ñ/日本"}, notes="é\n\t\x7f", resources={"device": "cpu"}
    )
    assert job.cancel().data.name == name
    assert [j.id for j in service.client.jobs.list(name=name)] == [job.id]
    assert job.data.labels == {"team": "ñ/日本"}
    service.until(lambda: job.refresh().is_final, "it ends")


def asked_until_done(http, spec, key):
    """The job of this key, once no other request with it is in flight."""
    while True:
        answer = http.post(
            "/v1/jobs",
            params={"allow_waiting": True},
            json=spec,
            headers={"Idempotency-Key": key},
        )
        if answer.status_code != 409:
            return answer
        assert answer.json()["type"] == "/problems/idempotency-key-in-flight"


def test_fifty_at_once_post_and_cancel(service):
    """No deadlock, no 5xx, and every job ends cancelled exactly once."""
    spec = service.spec("crowd", resources={"device": "cuda"})
    start = threading.Barrier(50)

    def one(number: int) -> list[int]:
        headers = dict(service.http.headers)
        with httpx.Client(
            base_url=service.stack.url, headers=headers, timeout=60, trust_env=False
        ) as http:
            start.wait()
            # Two of each share a key, and so a job.
            made = asked_until_done(http, spec, f"crowd-{number // 2}")
            job = made.json()["id"]
            answers = [http.post(f"/v1/jobs/{job}/cancel") for _ in range(3)]
            listed = http.get("/v1/jobs", params={"name": "crowd", "limit": 5})
            assert all(a.json()["status"] == "cancelled" for a in answers)
            return [made.status_code, listed.status_code, *(a.status_code for a in answers)]

    with ThreadPoolExecutor(50) as pool:
        seen = list(pool.map(one, range(50)))
    assert {status for row in seen for status in row} == {200, 201}
    jobs = list(service.client.jobs.list(name="crowd"))
    assert len(jobs) == 25
    for job in jobs:
        assert job.status == "cancelled"
        moves = [e for e in service.events(job.id) if e["kind"] == "status"]
        assert [move["data"]["to"] for move in moves] == ["queued", "cancelled"]


def test_bytes_that_are_no_http(service):
    place = urlsplit(service.stack.url)
    for data in (
        b"\x00" * 1000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
        b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    ):
        with socket.create_connection((place.hostname, place.port), timeout=10) as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(65_536)
            except ConnectionError:
                answer = b""
        assert answer == b"" or b" 200 " not in answer.split(b"\r\n")[0]
    assert service.http.get("/readyz").status_code == 200
