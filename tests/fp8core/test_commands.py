"""``python -m fp8core`` as a person or a service runs it: exit codes and one-line errors."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8core.commands.cli import main

SPEC: dict[str, Any] = {
    "model": {
        "source": "config",
        "config": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        },
    },
    "tokenizer": "bytes",
    "data": {"source": "builtin"},
    "recipe": {"engine": "emulated", "amax_history_len": 4},
    "training": {"steps": 3, "batch_size": 2, "sequence_length": 32},
    "evaluation": {"max_batches": 1},
    "resources": {"device": "cpu"},
}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a spec with parts of it replaced; returns its path."""

    def write_spec(**parts: Any) -> Path:
        path = tmp_path / "spec.json"
        path.write_text(json.dumps({**SPEC, **parts}))
        return path

    return write_spec


def run(*arguments: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fp8core", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        timeout=240,
    )


def errors_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return [line for line in captured.err.splitlines() if line.startswith("error: ")]


def test_train_from_the_command_line(write: Write, tmp_path: Path) -> None:
    workdir = tmp_path / "work"
    done = run("train", write(), "--workdir", workdir)
    assert done.returncode == 0, done.stderr
    assert "step 1/3" in done.stdout
    assert "trained 3 steps" in done.stdout
    assert "\x1b" not in done.stdout  # plain lines where there is no terminal
    assert json.loads((workdir / "result.json").read_bytes())["exit_code"] == 0
    assert (workdir / "model" / "model.safetensors").is_file()


def test_a_spare_trains_what_one_line_names(write: Write, tmp_path: Path) -> None:
    workdir = tmp_path / "work"
    order = {
        "spec_path": str(write()),
        "workdir": str(workdir),
        "roots": [str(tmp_path)],
        "device": "cpu",
        "env": {"CUDA_VISIBLE_DEVICES": ""},
    }
    done = run("spare", stdin=json.dumps(order) + "\n")
    assert done.returncode == 0, done.stderr
    assert json.loads((workdir / "result.json").read_bytes())["outcome"] == "succeeded"


@pytest.mark.parametrize(
    "order", ["", "\n", '{"workdir": 3}\n', "[]\n", "{\n", '{"spec_path": "a"']
)
def test_a_spare_without_an_order_ends_and_a_bad_one_is_an_error(
    order: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(order))
    assert main(["spare"]) == (1 if order.strip() else 0)
    output = capsys.readouterr().err
    assert ("the order on stdin is not valid" in output) == bool(order.strip())
    assert "Traceback" not in output


def test_a_second_sigterm_ends_it_at_once(write: Write, tmp_path: Path) -> None:
    workdir = tmp_path / "work"
    spec = write(training={"steps": 1_000_000, "batch_size": 2, "sequence_length": 32})
    process = subprocess.Popen(
        [sys.executable, "-m", "fp8core", "train", str(spec), "--workdir", str(workdir)],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"step 1/")
    # Both are pending before the loop can look at the first.
    process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    started = time.monotonic()
    assert process.wait(timeout=60) in (128 + signal.SIGTERM, 128 + signal.SIGINT)
    process.stdout.close()
    assert time.monotonic() - started < 60
    assert not (workdir / "result.json").exists()


def test_convert_prints_a_row_for_every_linear_and_norm(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(write())]) == 0
    rows = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in rows]
    layer = "model.layers.0"
    assert names == [
        *(f"{layer}.self_attn.{part}_proj" for part in "qkvo"),
        *(f"{layer}.mlp.{part}_proj" for part in ("gate", "up", "down")),
        f"{layer}.input_layernorm",
        f"{layer}.post_attention_layernorm",
        "model.norm",
        "lm_head",
    ]
    assert [row["name"] for row in rows if row["reason"] is not None] == ["lm_head"]
    assert all((row["to"] is None) == (row["reason"] is not None) for row in rows)


def test_plan_needs_no_weights_and_prints_tables_or_json(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write()
    assert main(["plan", str(path), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["conversion"]["converted"] == 10
    assert plan["memory"]["weights"] == 4 * plan["parameters"]["total"]
    graphs = plan["cuda_graphs"]
    assert main(["plan", str(path)]) == 0
    shown = capsys.readouterr().out
    assert f"{plan['parameters']['total']:,}" in shown
    assert f"CUDA graphs none: {graphs['refusal']}" in " ".join(shown.replace("│", " ").split())
    assert "it is the output head" in shown
    (reason,) = plan["fusion"]["not_because"]
    assert f"none, because {reason}" in " ".join(shown.replace("│", " ").split())


def test_validate_says_ok_or_every_problem(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(write())]) == 0
    assert capsys.readouterr().out == "ok\n"
    bad = write(
        recipe={"engine": "emulated", "amax_hist_len": 4},
        training={"steps": 0, "sequence_length": 32},
        priority=1000,
    )
    assert main(["validate", str(bad)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert any(
        line.startswith("error: /recipe/amax_hist_len: ")
        and 'did you mean "amax_history_len"?' in line
        for line in lines
    )
    assert main(["validate", str(bad), "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["valid"] is False
    assert {problem["pointer"] for problem in answer["problems"]} == {
        "/recipe/amax_hist_len",
        "/training/steps",
        "/priority",
    }
    assert main(["validate", str(write()), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spec"]["training"]["batch_size"] == 2


def test_validate_finds_paths_that_lead_nowhere_or_out(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    path = write(
        model={"source": "path", "path": "../outside"},
        tokenizer="model",
        data={"source": "jsonl", "path": "absent.jsonl"},
    )
    assert main(["validate", str(path), "--root", str(root)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["/model/path", "/data/path"]
    assert "outside the allowed roots" in lines[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the spec"),
        ("{", "error: "),
        ("[]", "error: "),
        ("\x00\xff", "error: "),
        ('{"model": NaN}', "error: "),
    ],
)
def test_what_is_no_spec_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    path = tmp_path / "spec.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    assert main(["plan", str(path)]) == 2
    lines = errors_of(capsys)
    assert lines
    assert message in lines[0]


BAD_JOBS: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown key": ({"recipe": {"engine": "emulated", "amax_hist_len": 4}}, 2, "/recipe/amax_hist"),
    "format": ({"recipe": {"engine": "emulated", "fp8_format": "E5M2"}}, 2, "/recipe/fp8_format"),
    "missing data": ({"data": {"source": "jsonl", "path": "absent.jsonl"}}, 3, "/data/path"),
    "broken line": ({"data": {"source": "jsonl", "path": "broken.jsonl"}}, 3, "broken.jsonl"),
    "no such engine here": ({"recipe": {"engine": "te"}, "resources": {}}, 5, "/recipe"),
    "missing model": (
        {"model": {"source": "path", "path": "absent"}, "tokenizer": "bytes"},
        4,
        "/model/path",
    ),
    "too long a sequence": (
        {"training": {"steps": 1, "sequence_length": 128}},
        2,
        "/training/sequence_length",
    ),
    "no such device": ({"resources": {"device": "cuda"}}, 5, "CUDA"),
}


@pytest.mark.parametrize("case", BAD_JOBS)
def test_bad_input_fails_with_its_code_and_leaves_nothing_half_written(
    write: Write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    case: str,
) -> None:
    import signal as signals

    import torch

    if case.startswith("no such") and torch.cuda.is_available():
        pytest.skip("there is one here")
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"text": "fine"}\n{"text": \n')
    parts, code, told = BAD_JOBS[case]
    workdir = tmp_path / "work"
    handlers = [signals.getsignal(number) for number in (signals.SIGTERM, signals.SIGINT)]
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        assert main(["train", str(write(**parts)), "--workdir", str(workdir)]) == code
    finally:
        torch.use_deterministic_algorithms(deterministic)
        for number, handler in zip((signals.SIGTERM, signals.SIGINT), handlers, strict=True):
            signals.signal(number, handler)
    lines = errors_of(capsys)
    assert any(told in line for line in lines)
    result = json.loads((workdir / "result.json").read_bytes())
    assert (result["outcome"], result["exit_code"], result["step"]) == ("failed", code, 0)
    assert told in result["detail"]
    assert not (workdir / "model").exists()
    assert not list(workdir.glob("checkpoints/*"))


def test_an_internal_error_is_one_line_and_a_log(
    write: Write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fp8core.commands import train as train_command
    from fp8core.training.run import Run

    def crash(self: Run) -> None:
        raise ZeroDivisionError("a fault of the program")

    monkeypatch.setattr(Run, "execute", crash)
    monkeypatch.setattr(train_command.StopRequest, "install", lambda self: None)
    workdir = tmp_path / "work"
    assert main(["train", str(write()), "--workdir", str(workdir)]) == 1
    captured = capsys.readouterr()
    assert "internal error: ZeroDivisionError: a fault of the program" in captured.err
    assert "Traceback" not in captured.err
    assert "ZeroDivisionError" in (workdir / "crash.log").read_text()
    result = json.loads((workdir / "result.json").read_bytes())
    assert result["reason"] == "internal_error"


def test_a_workdir_that_cannot_be_one_is_refused(
    write: Write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fp8core.commands import train as train_command

    monkeypatch.setattr(train_command.StopRequest, "install", lambda self: None)
    (tmp_path / "file").write_text("")
    for workdir in (tmp_path / "file" / "work", tmp_path / "file", tmp_path / ("x" * 300)):
        assert main(["train", str(write()), "--workdir", str(workdir)]) == 2
        lines = errors_of(capsys)
        assert len(lines) == 1
        assert lines[0].startswith(f"error: cannot use {workdir} as workdir: ")
