"""Roots per owner, paths that try to leave them, and secrets by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from octrain_api.app import create_app
from octrain_api.jobs.checks import check_files, narrowed
from octrain_api.settings import JobSecretSettings, StorageSettings

ROW = '{"text": "hello"}\n'


def _errors(root: Path, path: str, node_roots: tuple[str, ...] = ()) -> list[str]:
    columns = {n: n for n in ("text", "prompt", "completion", "messages", "label")}
    spec: dict[str, Any] = {
        "model": {"source": "path", "path": path},
        "tokenizer": {"source": "path", "path": path},
        "data": {"source": "jsonl", "path": path, "format": "text", "columns": columns},
    }
    found = check_files(spec, [root.resolve()], node_roots, 2**20)
    assert {error.pointer for error in found} <= {"/model/path", "/tokenizer/path", "/data/path"}
    assert len(found) in (0, 3)
    return [error.message for error in found]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("data/ada", "data/ada-2", "data/eve"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "rows.jsonl").write_text(ROW)
    ada = tmp_path / "data" / "ada"
    (ada / "out").symlink_to(tmp_path / "data" / "eve")
    (ada / "file").symlink_to(tmp_path / "data" / "eve" / "rows.jsonl")
    (ada / "up").symlink_to("..")
    (ada / "loop").symlink_to("loop")
    (ada / "within").symlink_to(ada / "rows.jsonl")
    return ada


@pytest.mark.parametrize(
    "path",
    [
        "../eve/rows.jsonl",
        "../ada-2/rows.jsonl",
        "./x/../../eve/rows.jsonl",
        "out/rows.jsonl",
        "file",
        "up/eve/rows.jsonl",
        "up",
        "/etc/passwd",
        "/",
        "..",
        "rows.jsonl\x00.txt",
        "a" * 5000,
        "a/" * 5000,
        "//etc/passwd",
        "loop",
        "loop/x",
    ],
)
def test_no_path_leaves_its_root(root: Path, path: str) -> None:
    messages = _errors(root, path)
    assert messages, path
    for message in messages:
        assert "hello" not in message


@pytest.mark.parametrize("path", ["rows.jsonl", "within", "./rows.jsonl", "../ada/rows.jsonl"])
def test_what_lies_below_is_found(root: Path, path: str) -> None:
    assert _errors(root, path) == []
    assert _errors(root, str(root / "rows.jsonl")) == []


@pytest.mark.parametrize("path", ["..／eve", "‥/eve", "．．/eve", "..\\eve", "%2e%2e/eve", "~root"])
def test_what_only_looks_like_climbing_is_a_name(root: Path, path: str) -> None:
    """Such names lead nowhere else: they stand for themselves, below the root."""
    resolved = (root / path).resolve()
    assert resolved.is_relative_to(root)
    assert _errors(root, path) == []


def test_a_refusal_does_not_tell_whether_the_file_is_there(root: Path) -> None:
    there, not_there = _errors(root, "../eve/rows.jsonl")[0], _errors(root, "../eve/none.jsonl")[0]
    assert there.replace("rows", "none") == not_there


def test_node_roots_are_narrowed_to_the_owners() -> None:
    nodes = ["/data", "/mnt/x/"]
    assert narrowed(nodes, None) == nodes
    assert narrowed(nodes, ["/data/ada"]) == ["/data/ada"]
    assert narrowed(["/data/ada/sets"], ["/data/ada"]) == ["/data/ada/sets"]
    assert narrowed(nodes, ["/data-2", "/etc"]) == []
    assert narrowed(nodes, ["/data/ada/../eve"]) == ["/data/eve"]
    assert narrowed(nodes, ["/"]) == ["/data", "/mnt/x"]
    assert narrowed(nodes, []) == []


async def test_owners_have_roots_of_their_own(
    lone_service: Any, worker: Any, spec: Any, root: Path
) -> None:
    data = root.parent
    storage = StorageSettings(
        artifact_url=lone_service.settings.storage.artifact_url,
        roots_text=str(data / "eve"),
        owner_roots={"ada": [str(root)], "none": []},
    )
    app = create_app(lone_service.settings.model_copy(update={"storage": storage}))
    await worker.register(roots=[str(data)], cpu_slots=9)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://octrain/v1") as client:

            async def submit(owner: str, path: Path) -> httpx.Response:
                key = await lone_service.key(owner, "jobs:write", "jobs:read")
                body = spec | {"data": {"source": "jsonl", "path": str(path), "format": "text"}}
                headers = {"Authorization": f"Bearer {key}"}
                return await client.post("/jobs", json=body, headers=headers)

            mine = await submit("ada", root / "rows.jsonl")
            assert mine.status_code == 201
            for owner in ("ada", "none"):
                # The node would reach it, and everybody else may.
                refused = await submit(owner, data / "eve" / "rows.jsonl")
                assert refused.status_code == 422
                assert refused.json()["errors"][0]["pointer"] == "/data/path"
            other = await submit("eve", data / "eve" / "rows.jsonl")
            assert other.status_code == 201
            worker.http = client
            client.headers["Authorization"] = f"Bearer {await _key_of(lone_service, 'node-a')}"
            claims = {}
            for job in (mine, other):
                claims[job.json()["owner"]] = (await worker.take(job.json()["id"]))["roots"]
    assert claims == {"ada": [str(root)], "eve": None}


async def _key_of(service: Any, node: str) -> str:
    """A fresh key of a node, as an administrator makes it."""
    admin = service.client(await service.key("root", "admin"))
    body = {"name": "again", "owner": "operations", "scopes": ["node"], "node": node}
    return str((await admin.post("/keys", json=body)).json()["key"])


def test_roots_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTRAIN_ROOTS", f"/a{os.pathsep}/b")
    monkeypatch.setenv("OCTRAIN_OWNER_ROOTS", '{"ada": ["/data/ada"]}')
    storage = StorageSettings()
    assert storage.roots_of("eve") == (Path("/a"), Path("/b"))
    assert storage.roots_of("ada") == (Path("/data/ada"),)
    monkeypatch.setenv("OCTRAIN_OWNER_ROOTS", '{"ada": ["data"]}')
    with pytest.raises(ValueError, match="not an absolute path"):
        StorageSettings()


async def test_secrets_are_named_and_must_be_the_owners(lone_service: Any, spec: Any) -> None:
    secrets = JobSecretSettings(job_secrets={"hub-token": ["ada"], "wandb": ["*"]})
    app = create_app(lone_service.settings.model_copy(update={"secrets": secrets}))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://octrain/v1") as client:
            keys = {
                owner: {"Authorization": f"Bearer {await lone_service.key(owner, 'jobs:write')}"}
                for owner in ("ada", "eve")
            }
            wanted = {"HF_TOKEN": "hub-token", "WANDB_API_KEY": "wandb"}
            body = spec | {"secrets": wanted}
            mine = await client.post("/jobs", json=body, headers=keys["ada"])
            assert mine.status_code == 201
            assert mine.json()["spec"]["secrets"] == wanted
            refused = await client.post("/jobs", json=body, headers=keys["eve"])
            assert [e["pointer"] for e in refused.json()["errors"]] == ["/secrets/HF_TOKEN"]
            unknown = spec | {"secrets": {"HF_TOKEN": "none"}}
            other = await client.post("/jobs", json=unknown, headers=keys["eve"])
            assert refused.json()["errors"][0]["message"] == other.json()["errors"][0][
                "message"
            ].replace("none", "hub-token")
            for secrets_part in ({"PATH": "wandb"}, {"HF_TOKEN": "A value!"}, {"LD_PRELOAD": "w"}):
                answer = await client.post(
                    "/jobs", json=spec | {"secrets": secrets_part}, headers=keys["ada"]
                )
                assert answer.status_code == 422
                assert answer.json()["errors"][0]["pointer"].startswith("/secrets")
                assert "A value!" not in answer.text, "it may be the secret itself"
