"""The `octrain` command as a shell sees it: output, exit status, one-line errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

JobObject = Callable[..., dict[str, Any]]
Run = Callable[..., Any]


@pytest.fixture
def octrain(tmp_path: Path) -> Run:
    def run(*arguments: str, url: str = "", stdin: str = "") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "COLUMNS": "200", "OCTRAIN_API_KEY": "k"}
        if url:
            environment["OCTRAIN_API_URL"] = url
        return subprocess.run(
            [sys.executable, "-m", "octrain", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            env=environment,
            timeout=60,
        )

    return run


def test_no_server_known_and_no_server_answering(octrain: Run) -> None:
    unknown = octrain("ls")
    assert unknown.returncode == 5
    assert unknown.stderr.count("\n") == 1
    assert "octrain up" in unknown.stderr
    silent = octrain("nodes", url="http://127.0.0.1:1")
    assert silent.returncode == 5
    assert silent.stderr.startswith("octrain: No server answers at http://127.0.0.1:1.")
    assert silent.stderr.count("\n") == 1


def test_a_refusal_has_its_own_status_and_no_traceback(octrain: Run, server: Any) -> None:
    answer = octrain("show", "job_9", url=server.url)
    assert (answer.returncode, answer.stdout) == (3, "")
    assert answer.stderr == "octrain: There is no such job.\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "is not JSON"), ("[1]", "must hold a JSON object"), (None, "Cannot read")],
)
def test_a_wrong_spec_file_is_wrong_usage(
    command: Run, tmp_path: Path, content: str | None, said: str
) -> None:
    path = tmp_path / "spec.json"
    if content is not None:
        path.write_text(content)
    answer = command("submit", str(path), url="http://127.0.0.1:1")
    assert answer.returncode == 2
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr


def test_submit_waits_and_tells_by_its_status(
    octrain: Run, server: Any, reply: Any, job_object: JobObject
) -> None:
    ended = job_object(status="failed", is_final=True, reason="diverged", detail="Loss is NaN.")
    server.routes["POST /v1/jobs"] = lambda r: reply(job_object(status="queued"), 201)
    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(ended)
    stream = b'id: 1\nevent: end\ndata: {"status": "failed"}\n\n'
    server.routes["GET /v1/jobs/job_1/stream"] = lambda r: reply(
        stream, content_type="text/event-stream"
    )
    spec = {"model": {"source": "path", "path": "m"}}
    answer = octrain("submit", "-", "--wait", url=server.url, stdin=json.dumps(spec))
    assert answer.returncode == 6
    assert "job_1" in answer.stdout
    assert "Loss is NaN." in answer.stdout
    assert server.requests[0].body == spec
    answer = octrain("submit", "-", "--wait", "--json", url=server.url, stdin=json.dumps(spec))
    assert answer.returncode == 6
    assert json.loads(answer.stdout)["reason"] == "diverged"


def test_one_fault_is_said_once(octrain: Run, server: Any, reply: Any) -> None:
    said = {"pointer": "/data/path", "message": "lies outside the roots", "code": "path"}
    problem = {"type": "/problems/spec-invalid", "title": "t", "status": 422}
    problem |= {"detail": said["message"], "errors": [said]}
    server.routes["POST /v1/jobs"] = lambda r: reply(problem, 422)
    answer = octrain("submit", "-", url=server.url, stdin='{"model": {}}')
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == "octrain: /data/path: lies outside the roots\n"


def test_each_status_has_its_line_where_there_is_no_terminal(
    octrain: Run, server: Any, reply: Any, job_object: JobObject
) -> None:
    shown = iter([job_object(status="queued"), job_object(status="succeeded", is_final=True)])
    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(next(shown))
    told = [("status", {"status": s}) for s in ("starting", "running", "succeeded")]
    told.insert(2, ("progress", {"step": 1, "total_steps": 2}))
    told.append(("end", {"status": "succeeded"}))
    stream = "".join(
        f"id: {n}\nevent: {kind}\ndata: {json.dumps(data)}\n\n"
        for n, (kind, data) in enumerate(told, start=1)
    )
    server.routes["GET /v1/jobs/job_1/stream"] = lambda r: reply(
        stream.encode(), content_type="text/event-stream"
    )
    answer = octrain("watch", "job_1", url=server.url)
    assert answer.returncode == 0, answer.stderr
    lines = [line.split(", ")[1] for line in answer.stdout.splitlines()]
    assert lines == ["queued", "starting", "running", "succeeded"]


def test_every_list_prints_a_table_and_json(
    command: Run, server: Any, reply: Any, job_object: JobObject
) -> None:
    node = {"id": "node_1", "name": "gpu-1", "live": True, "engines": {"te": {"ok": True}}}
    attempt = {"id": "att_1", "number": 1, "node": "gpu-1", "status": "running"}
    job = job_object(name="with [brackets]", attempts=[attempt])
    series = {"name": "train/loss", "attempt": 1, "points": [[1, 3.0], [2, "NaN"], [3, 2.0]]}
    artifact = {"id": "art_1", "kind": "model", "name": "model", "step": 3, "files": []}
    server.routes |= {
        "GET /v1/jobs": lambda r: reply({"items": [job], "next_cursor": None}),
        "GET /v1/jobs/job_1": lambda r: reply(job),
        "GET /v1/jobs/job_1/metrics": lambda r: reply({"series": [series]}),
        "GET /v1/jobs/job_1/artifacts": lambda r: reply({"items": [artifact]}),
        "GET /v1/nodes": lambda r: reply({"items": [node]}),
    }
    commands = {
        ("ls",): ("with [brackets]", "running", "3/10"),
        ("show", "job_1"): ("with [brackets]", "gpu-1", "engine=amp"),
        ("metrics", "job_1"): ("train/loss", "2"),
        ("artifacts", "job_1"): ("art_1", "model"),
        ("nodes",): ("gpu-1", "live", "te"),
    }
    for arguments, words in commands.items():
        text = command(*arguments, url=server.url)
        assert text.returncode == 0, text.stderr
        for word in words:
            assert word in text.stdout, (arguments, text.stdout)
        data = command(*arguments, "--json", url=server.url)
        assert json.loads(data.stdout), arguments
    assert '"NaN"' in command("metrics", "job_1", "--json", url=server.url).stdout


def test_json_holds_no_number_that_json_has_not(
    command: Run, server: Any, reply: Any, job_object: JobObject
) -> None:
    newest = {"train/loss": "NaN", "eval/loss": "-Infinity", "train/lr": 0.5}
    for name in ("job_1", "job_2"):
        job = job_object(id=name, latest_metrics=newest)
        server.routes[f"GET /v1/jobs/{name}"] = lambda r, job=job: reply(job)
    part = {"id": "job_1", "latest_metrics": newest}
    server.routes["GET /v1/jobs"] = lambda r: reply({"items": [part], "next_cursor": None})

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    for arguments in (
        ("ls", "--fields", "latest_metrics"),
        ("diff", "job_1", "job_2"),
        ("show", "job_1"),
    ):
        answer = command(*arguments, "--json", url=server.url)
        assert answer.returncode == 0, answer.stderr
        json.loads(answer.stdout, parse_constant=refuse)
        assert '"NaN"' in answer.stdout
        assert '"-Infinity"' in answer.stdout
        assert command(*arguments, url=server.url).returncode == 0


def test_help_tells_the_exit_statuses(octrain: Run) -> None:
    answer = octrain("--help")
    assert answer.returncode == 0
    assert "Exit status: 0 success" in answer.stdout


def test_the_version_is_that_of_the_package(command: Run) -> None:
    answer = command("--version")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == f"{version('octrain')}\n"


def test_migrate_needs_a_database(command: Run) -> None:
    answer = command("migrate")
    assert answer.returncode == 2
    assert "DATABASE_URL" in answer.stderr


def test_the_command_and_the_client_load_no_server_and_no_torch() -> None:
    code = (
        "import sys, octrain.cli.app, octrain.client; "
        "print([n for n in ('torch', 'octrain_api', 'sqlalchemy', 'celery', 'numpy') "
        "if n in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "[]", answer.stderr


def test_logs_are_followed_narrowed_and_saved(
    command: Run, server: Any, reply: Any, job_object: JobObject, tmp_path: Path
) -> None:
    line = {"seq": 5, "text": "ERROR out of luck", "level": "error"}
    later = {"seq": 6, "text": "ERROR again", "level": "error"}
    stream = f"id: 9\nevent: log\ndata: {json.dumps(later)}\n\nevent: end\ndata: {{}}\n\n"
    server.routes |= {
        "GET /v1/jobs/job_1": lambda r: reply(job_object(last_event=8)),
        "GET /v1/jobs/job_1/logs": lambda r: reply(
            {"lines": [line], "next_after": 5, "next_before": 5}
        ),
        "GET /v1/jobs/job_1/logs/download": lambda r: reply(b"all\n", content_type="text/plain"),
        "GET /v1/jobs/job_1/stream": lambda r: reply(
            stream.encode(), content_type="text/event-stream"
        ),
    }
    followed = command("logs", "job_1", "-f", "-n", "1", "--level", "error", url=server.url)
    assert (followed.returncode, followed.stdout.splitlines()) == (
        0,
        ["ERROR out of luck", "ERROR again"],
    )
    assert {"tail": "1", "level": "error"} in [request.query for request in server.requests]
    target = tmp_path / "job.log"
    saved = command("logs", "job_1", "-o", str(target), url=server.url)
    assert (saved.returncode, target.read_text()) == (0, "all\n")
    told = command("logs", "job_1", "-o", str(target), "--json", url=server.url)
    assert told.json() == {"file": str(target)}
    assert command("logs", "job_1", "-f", "-o", str(target), url=server.url).returncode == 2


def test_completion_and_a_broken_answer(command: Run, server: Any, reply: Any) -> None:
    # The shell to complete for is the one that asks, hence a real one.
    script = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m octrain --show-completion; exit $?"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (script.returncode, "_OCTRAIN_COMPLETE" in script.stdout) == (0, True), script.stderr
    server.routes["GET /v1/jobs/job_1"] = lambda r: reply({"something": "else"})
    odd = command("show", "job_1", url=server.url)
    assert (odd.returncode, odd.stderr.count("\n")) == (1, 1)
    assert "Is it an Octrain server" in odd.stderr
    for url in ("http://[", "ftp://x"):
        assert "URL" in command("ls", url=url).stderr
    limited = {"type": "/problems/rate-limited", "status": 429, "detail": "Slower."}
    server.routes["GET /v1/nodes"] = lambda r: reply(limited, 429, {"Retry-After": "0"})
    assert command("nodes", url=server.url).returncode == 8
