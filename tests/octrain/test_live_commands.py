"""The commands against the real application: what they do, print and end with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.octrain.service import LiveServer, Node

Call = Callable[..., Any]


@pytest.fixture
def run(command: Call, live: LiveServer, owner_key: str) -> Call:
    """`octrain` with the key of this test's owner."""

    def call(*arguments: str, key: str = owner_key, stdin: str = "") -> Any:
        return command(*arguments, url=live.url, key=key, stdin=stdin)

    return call


@pytest.fixture
def spec_file(spec: dict[str, Any], tmp_path: Path) -> str:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    return str(path)


def submitted(run: Call, spec_file: str, *options: str) -> str:
    answer = run("submit", "-f", spec_file, "--json", *options)
    assert answer.returncode == 0, answer.stderr
    return str(answer.json()["id"])


def test_a_job_is_submitted_changed_followed_and_fetched(
    run: Call, node: Node, spec_file: str, tmp_path: Path
) -> None:
    draft = run(
        "submit",
        spec_file,
        "--draft",
        "--json",
        "--set",
        "training.optimizer={name: adamw, lr: 3e-4}",
    ).json()
    assert draft["status"] == "draft"
    assert draft["spec"]["training"]["optimizer"]["lr"] == 3e-4
    job = draft["id"]
    edited = run(
        "edit", job, "--label", "a=b", "--unlabel", "team", "--notes", "-", "--json", stdin="n"
    )
    assert (edited.json()["labels"], edited.json()["notes"]) == ({"a": "b"}, "n")
    assert run("start", job).returncode == 0
    assert job in run("ls", "-q", job, "--since", "1h").stdout
    assert run("ls", "--label", "a=c", "--json").json() == []

    assert run("wait", job, "--timeout", "1s").returncode == 9
    node.take(job)
    told = [{"train/loss": 3.0 / n, "perf/tokens_per_second": 100.0} for n in (1, 2, 3)]
    rows = [{"type": "metrics", "step": n, "values": v} for n, v in enumerate(told, start=1)]
    node.tell(job, *rows)
    node.model(job, {"config.json": b"{}"})
    node.finish(job)

    watched = run("watch", job)
    assert watched.returncode == 0, watched.stderr
    assert "succeeded" in watched.stdout
    assert "loss 1" in watched.stdout
    events = [json.loads(line) for line in run("watch", job, "--json").stdout.splitlines()]
    assert (events[-1]["type"], events[-1]["job_id"]) == ("end", job)
    assert run("wait", job, "--json").json()["status"] == "succeeded"

    estimate = run("validate", spec_file, "--wait", "0").stdout
    assert "at 100 tokens/s, a job like this one" in estimate
    assert run("show", job, "--spec").json()["training"]["optimizer"]["lr"] == 3e-4
    given = run("show", job, "--given").json()
    assert given["training"]["optimizer"] == {"name": "adamw", "lr": 3e-4}
    assert "priority" not in given
    assert [e["kind"] for e in run("events", job, "--json").json()]
    assert run("metrics", job, "train/*", "--json").json()[0]["points"][-1] == [3, 1.0]
    latest = [row["name"] for row in run("metrics", job, "--latest", "--json").json()]
    assert latest == ["perf/tokens_per_second", "train/loss"]
    table = tmp_path / "m.csv"
    assert run("metrics", job, "-o", str(table)).returncode == 0
    assert "train/loss" in table.read_text()
    folder = run("download", job, "-o", str(tmp_path / "model"), "--json").json()["folder"]
    assert (Path(folder) / "config.json").read_bytes() == b"{}"
    assert run("download", job, "--archive", "-o", str(tmp_path / "m.tar")).returncode == 0
    assert run("artifacts", job, "--json").json()[0]["kind"] == "model"
    missing = run("download", job, "report")
    assert missing.returncode == 3
    assert missing.stderr.endswith("has no artifact 'report'. It has: model.\n")

    copy = run(
        "clone", job, "--set", "training.steps=7", "--set", "name=", "--draft", "--json"
    ).json()
    compared = run("diff", job, copy["id"], "--json").json()
    steps = next(row for row in compared["spec"] if row["pointer"] == "/training/steps")
    assert (steps["a"], steps["b"]) == (50, 7)
    loss = next(row for row in compared["figures"] if row["name"] == "train/loss")
    assert (loss["a"], loss["b"]) == (1.0, None)
    assert "/training/steps" in run("diff", job, copy["id"]).stdout
    twin = run("clone", job, "--draft", "--json").json()
    header = run("diff", job, twin["id"]).stdout
    assert f"({job})" in header, "jobs of one name are told apart by their ids"
    assert f"({twin['id']})" in header
    assert f"({job})" not in run("diff", job, copy["id"]).stdout
    assert run("rm", twin["id"], "--yes").returncode == 0

    assert run("rm", job).returncode == 2, "nobody can be asked"
    assert run("rm", job, copy["id"], "--yes", "--json").json() == {"deleted": [job, copy["id"]]}
    assert run("show", job).returncode == 3


def test_each_exit_status(
    run: Call, command: Call, live: LiveServer, node: Node, spec_file: str
) -> None:
    from octrain.cli.exits import Exit

    job = submitted(run, spec_file)
    node.take(job)
    node.finish(job, "failed", "diverged")
    reader = live.key("reader", "jobs:read")
    seen = {
        run("usage").returncode: Exit.OK,
        run("submit", spec_file, "--set", "recipe.typo=1").returncode: Exit.USAGE,
        run("show", "job_none").returncode: Exit.NOT_FOUND,
        run("submit", spec_file, key=reader).returncode: Exit.AUTH,
        command("ls", url="http://127.0.0.1:1").returncode: Exit.UNREACHABLE,
        run("wait", job).returncode: Exit.JOB_NOT_SUCCEEDED,
        run("pause", job).returncode: Exit.CONFLICT,
        run("wait", submitted(run, spec_file), "--timeout", "0s").returncode: Exit.TIMEOUT,
    }
    assert {code: int(code) for code in seen.values()} == {v: k for k, v in seen.items()}
    assert run("ls", key="oct_wrong").returncode == Exit.AUTH
    assert run("validate", spec_file, "--wait", "0").returncode == Exit.OK
    assert run("validate", spec_file, "--set", "x=1", "--wait", "0").returncode == Exit.USAGE
    refused = run("submit", spec_file, "--set", "recipe.typo=1", "--json")
    error = json.loads(refused.stderr)["error"]
    assert (error["exit"], error["errors"][0]["pointer"]) == (2, "/recipe/typo")


def test_a_used_up_quota_has_its_own_status(run: Call, live: LiveServer, spec_file: str) -> None:
    admin = live.key("root", "admin")
    key = live.key("frugal", "jobs:read", "jobs:write")
    assert run("quotas", "set", "frugal", "--queued", "0", key=admin).returncode == 0
    assert run("submit", spec_file, key=key).returncode == 8
    assert run("quotas", "ls", "--json", key=admin).json()["items"][0]["owner"] == "frugal"
    assert run("quotas", "reset", "frugal", key=admin).returncode == 0


def test_many_jobs_are_cancelled_at_once(run: Call, spec_file: str) -> None:
    jobs = [submitted(run, spec_file, "--label", f"n={n}") for n in ("a", "b", "c")]
    partly = run("cancel", jobs[0], "job_none", "--json")
    assert (partly.returncode, [one["id"] for one in partly.json()]) == (3, [jobs[0]])
    error = json.loads(partly.stderr)["error"]
    assert (error["job_id"], error["exit"], error["status"]) == ("job_none", 3, 404)
    assert "job_none: " in run("pause", "job_none", "job_nil").stderr
    assert [r["job_id"] for r in run("cancel", "--label", "n=b", "--json").json()] == [jobs[1]]
    assert [r["job_id"] for r in run("cancel", "--all", "--json").json()] == [jobs[2]]
    assert run("cancel").returncode == 2
    assert run("cancel", jobs[0], "--all").returncode == 2


def test_recipes_keys_webhooks_nodes_and_audit(
    run: Call, live: LiveServer, node: Node, tmp_path: Path
) -> None:
    assert run("recipes", "ls", "--json").json()[0]["preset"] is True
    part = tmp_path / "part.yaml"
    part.write_text("recipe: {engine: amp, dtype: bf16}\n")
    saved = run("recipes", "save", "mine", "-f", str(part), "--description", "try", "--json")
    assert saved.json()["version"] == 1
    assert run("recipes", "show", "mine", "--json").json()["description"] == "try"
    assert "bf16" in run("recipes", "show", "mine").stdout
    assert run("recipes", "rm", "mine").returncode == 0

    admin = live.key("root", "admin")
    made = run(
        "keys", "create", "laptop", "--owner", "ada", "--scope", "jobs:read",
        "--expires-in", "2d", "--json", key=admin,
    ).json()  # fmt: skip
    assert run("keys", "show", "--json", key=made["key"]).json()["id"] == made["id"]
    assert made["id"] in run("keys", "ls", key=admin).stdout
    assert made["expires_at"] is not None
    several = ("--scope", "jobs:read, jobs:write", "--scope", "admin", "--json")
    scopes = run("keys", "create", "all", "--owner", "ada", *several, key=admin).json()["scopes"]
    assert sorted(scopes) == ["admin", "jobs:read", "jobs:write"]
    endless = run("keys", "edit", made["id"], "--never-expires", "--json", key=admin).json()
    assert (endless["expires_at"], endless["name"]) == (None, "laptop")
    both = ("--never-expires", "--expires-in", "1d")
    assert run("keys", "edit", made["id"], *both, key=admin).returncode == 2
    assert run("keys", "rotate", made["id"], "--grace", "0s", "--json", key=admin).json()["key"]
    assert run("ls", key=made["key"]).returncode == 4
    assert run("keys", "revoke", made["id"], key=admin).returncode == 0
    assert made["id"] not in run("keys", "ls", key=admin).stdout
    audit = run("audit", "--target", made["id"], "--json", key=admin).json()
    assert {entry["outcome"] for entry in audit} == {"done"}

    hook = run(
        "webhooks", "create", "https://example.com/x", "--event", "job.failed", "--json"
    ).json()
    assert run("webhooks", "edit", hook["id"], "--disable", "--json").json()["active"] is False
    refused = run("webhooks", "redeliver", hook["id"], "--failed-since", "1h")
    assert refused.returncode == 7, "it is switched off"
    assert run("webhooks", "edit", hook["id"], "--enable", "--json").json()["active"] is True
    assert hook["id"] in run("webhooks", "ls").stdout
    assert run("webhooks", "deliveries", hook["id"], "--json").json() == []
    again = run("webhooks", "redeliver", hook["id"], "--failed-since", "1h", "--json")
    assert again.json() == {"count": 0}
    assert run("webhooks", "rm", hook["id"]).returncode == 0

    assert node.name in run("nodes").stdout
    assert run("nodes", "ls", "--json").json()[0]["id"] == node.id
    assert run("nodes", "metrics", node.name, "--json").json() == []
    assert run("nodes", "drain", "none", key=admin).returncode == 3
    node.beat()
    assert "draining" in run("nodes", "drain", node.name, key=admin).stdout
    assert "live" in run("nodes", "undrain", node.name, key=admin).stdout
    assert run("nodes", "token", "--json", key=admin).json()["token"]
    assert run("usage", "--json").json()["queued"] == 0


def test_every_command_prints_json(run: Call) -> None:
    """`--json` is everywhere but where there is nothing to print."""
    import typer

    from octrain.cli.app import app

    def commands(group: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
        found: list[tuple[tuple[str, ...], Any]] = []
        for name, one in group.commands.items():
            found += (
                commands(one, (*path, name)) if hasattr(one, "commands") else [((*path, name), one)]
            )
        return found

    without = {
        path
        for path, one in commands(typer.main.get_command(app), ())
        if "--json" not in [option for parameter in one.params for option in parameter.opts]
    }
    assert without == {("up",), ("migrate",)}
