"""Secrets of jobs, roots of owners, the key of a node: what reaches whom on a node."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8core.errors import TrainingError
from octrain_worker.logs import configure
from octrain_worker.roots import allowed_roots
from octrain_worker.supervisor.secrets import JobSecrets, variable_of
from octrain_worker.supervisor.spool import Entry, Spool

SECRET = 'hf_"zebra"\\\u00e9-7f3a9c'
SPEC = {"secrets": {"HF_TOKEN": "hub-token", "WANDB_API_KEY": "wandb"}}
SOURCE = {"OCTRAIN_SECRET_HUB_TOKEN": SECRET, "OCTRAIN_SECRET_WANDB": "abc"}


def test_names_become_variables() -> None:
    assert variable_of("hub-token-2") == "OCTRAIN_SECRET_HUB_TOKEN_2"
    secrets = JobSecrets(SPEC, SOURCE)
    secrets.check()
    assert secrets.environment() == {"HF_TOKEN": SECRET, "WANDB_API_KEY": "abc"}
    assert SECRET not in repr(secrets)
    assert JobSecrets({}, SOURCE).environment() == {}


def test_what_the_node_lacks_is_told_by_name() -> None:
    secrets = JobSecrets(SPEC, {"OCTRAIN_SECRET_WANDB": "abc", "OCTRAIN_SECRET_HUB_TOKEN": ""})
    with pytest.raises(TrainingError, match="'hub-token' \\(OCTRAIN_SECRET_HUB_TOKEN\\)"):
        secrets.check()
    assert secrets.environment() == {"WANDB_API_KEY": "abc"}


def test_values_are_masked_however_json_writes_them(tmp_path: Path) -> None:
    secrets = JobSecrets(SPEC, SOURCE)
    assert secrets.mask(f"token={SECRET}!") == "token=***!"
    assert secrets.mask("abc") == "abc", "too short to be told from chance"
    for ascii_only in (True, False):
        line = json.dumps({"text": f"got {SECRET}", SECRET: 1}, ensure_ascii=ascii_only).encode()
        masked = json.loads(secrets.mask_json(line))
        assert masked == {"text": "got ***", "***": 1}
    spool = Spool(tmp_path / "spool", mask=secrets.mask_json)
    spool.append([Entry({"type": "log", "text": f"{SECRET} twice {SECRET}"})])
    assert spool.read(0)[1] == [{"type": "log", "text": "*** twice ***"}]
    spool.close()
    written = b"".join(path.read_bytes() for path in (tmp_path / "spool").iterdir())
    assert b"zebra" not in written


def test_a_file_is_copied_only_when_it_must_be(tmp_path: Path) -> None:
    secrets = JobSecrets(SPEC, SOURCE)
    clean, dirty = tmp_path / "clean.log", tmp_path / "dirty.log"
    clean.write_bytes(b"nothing\n")
    # Across the border of two reads, and beside bytes that are no UTF-8.
    dirty.write_bytes(b"x" * ((1 << 20) - 4) + SECRET.encode() + b"\n\xff\xfe\n")
    assert secrets.masked_file(clean, tmp_path / "out") == clean
    copy = secrets.masked_file(dirty, tmp_path / "out")
    assert copy == tmp_path / "out" / "dirty.log"
    assert copy.read_bytes() == b"x" * ((1 << 20) - 4) + b"***\n\xff\xfe\n"


def test_a_trainer_gets_its_secret_and_nobody_else_does(workplace: Any, tmp_path: Path) -> None:
    dump = tmp_path / "environment.json"
    attempt = workplace.api.add(
        "att_s",
        {
            "steps": 2,
            "print_variables": ["HF_TOKEN"],
            "dump_environment": str(dump),
            "fail_with": ["diverged", 21],
        },
    )
    attempt.spec["secrets"] = {"HF_TOKEN": "hub-token"}
    workplace.environment |= SOURCE | {"OCTRAIN_NODE_TOKEN": "octn_" + "t" * 40}
    assert workplace.supervise("att_s").wait(timeout=60) == 0, workplace.log()
    seen = json.loads(dump.read_text())
    assert seen["HF_TOKEN"] == SECRET
    assert not [name for name in seen if name.startswith("OCTRAIN_SECRET_")]
    assert "OCTRAIN_NODE_TOKEN" not in seen
    assert "OCTRAIN_NODE_KEY" not in seen
    told = json.dumps([attempt.records, attempt.finished, list(attempt.artifacts.values())])
    assert "HF_TOKEN is ***" in told
    everything = [workplace.log(), told]
    for folder in (workplace.data, tmp_path / "store"):
        for path in folder.rglob("*"):
            # What the trainer itself wrote stays on its node, readable by this user alone.
            if path.is_file() and path.name not in ("stdout.log", "environ"):
                everything.append(path.read_text(errors="replace"))
    assert (tmp_path / "store").exists()
    for text in everything:
        assert "zebra" not in text
    stored = list((tmp_path / "store").rglob("stdout.log"))
    assert "HF_TOKEN is ***" in stored[0].read_text()


def test_a_node_without_the_secret_fails_the_job(workplace: Any) -> None:
    attempt = workplace.api.add("att_m", {"steps": 2})
    attempt.spec["secrets"] = {"HF_TOKEN": "hub-token"}
    assert workplace.supervise("att_m").wait(timeout=60) == 0, workplace.log()
    assert attempt.finished is not None
    assert attempt.finished["reason"] == "spec_invalid"
    assert "OCTRAIN_SECRET_HUB_TOKEN" in attempt.finished["detail"]


def test_roots_are_what_node_and_owner_both_allow(tmp_path: Path) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    for folder in (data / "ada" / "sets", data / "eve", other):
        folder.mkdir(parents=True)
    (data / "ada" / "link").symlink_to(data / "eve")
    node = [data, other]
    assert allowed_roots(node, None) == [str(data), str(other)]
    assert allowed_roots(node, [str(data / "ada")]) == [str(data / "ada")]
    assert allowed_roots([data / "ada" / "sets"], [str(data / "ada")]) == [
        str(data / "ada" / "sets")
    ]
    assert allowed_roots(node, ["/"]) == [str(data), str(other)]
    assert allowed_roots(node, []) == []
    assert allowed_roots(node, ["/elsewhere", str(tmp_path / "data-2")]) == []
    assert allowed_roots(node, [str(data / "ada" / ".." / "eve")]) == [str(data / "eve")]
    # A link within the owner's root is followed before it is judged.
    assert allowed_roots([data / "ada"], [str(data / "ada" / "link")]) == []


def test_the_claims_roots_reach_the_trainer(workplace: Any, tmp_path: Path) -> None:
    """The order that the trainer gets on its standard input names the owner's roots alone."""
    data = tmp_path / "data"
    (data / "ada").mkdir(parents=True)
    order = tmp_path / "order.json"
    script = tmp_path / "trainer.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "line = json.loads(sys.stdin.readline())\n"
        f"pathlib.Path({str(order)!r}).write_text(json.dumps(line))\n"
        "work = pathlib.Path(line['workdir'])\n"
        "result = {'outcome': 'succeeded', 'reason': 'completed', 'detail': '', 'step': 0,"
        " 'exit_code': 0}\n"
        "(work / 'result.json').write_text(json.dumps(result))\n"
    )
    workplace.environment["OCTRAIN_TRAINER_COMMAND"] = f"{sys.executable} {script}"
    workplace.environment["OCTRAIN_ROOTS"] = str(data)
    attempt = workplace.api.add("att_r", {})
    attempt.roots = [str(data / "ada")]
    assert workplace.supervise("att_r").wait(timeout=60) == 0, workplace.log()
    assert json.loads(order.read_text())["roots"] == [str(data / "ada")]


def test_log_lines_are_json_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTRAIN_LOG_FORMAT", "json")
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure()
        key = "oct_" + "k" * 43
        logging.getLogger("octrain_worker.x").warning("no %s at redis://:pass-word@h:1/0", key)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    line = json.loads(capsys.readouterr().err)
    assert line["message"] == "no oct_*** at redis://:***@h:1/0"
    assert (line["level"], line["logger"]) == ("WARNING", "octrain_worker.x")
