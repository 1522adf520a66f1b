"""Every operation of the OpenAPI document is reached by the client and by the command.

Each is tried for real: the requests that go out are held against the document's paths. A new
operation fails here until it stands in a table, or among the exceptions with its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

import octrain
from octrain.client import OctrainError
from octrain_api.app import create_app
from tests.octrain.service import LiveServer, Node

# Of neither the client nor the command.
EXCEPTIONS = {
    "healthz": "for what restarts a process that hangs, such as an orchestrator",
    "prometheus_metrics": "for Prometheus, which reads it by itself",
    "get_upload_offset": "the data set tells the same as `received`, which uploads go on from",
    "create_session": "for browsers, which hold a cookie in place of a key",
    "get_session": "for browsers",
    "delete_session": "for browsers",
}
# The protocol of nodes: octrain_worker speaks it, with a key that can nothing else.
EXCEPTED_TAG = "workers"

NOTHING = "none_1"
NOW = datetime.now(UTC)


@dataclass
class Known:
    """What the calls are about."""

    job: str
    node: str
    folder: Path


Call = Callable[[Any, Known], Any]

CALLS: dict[str, Call] = {
    "readyz": lambda c, k: c.readiness(),
    "list_audit_entries": lambda c, k: c.audit(limit=1),
    "list_datasets": lambda c, k: c.datasets.list(),
    "create_dataset": lambda c, k: c.datasets.upload(
        k.folder / "rows.txt", name=k.folder.name, wait=False
    ),
    "upload_part": lambda c, k: c.datasets.upload(
        k.folder / "rows.txt", name=f"{k.folder.name}-2", wait=False
    ),
    "get_dataset": lambda c, k: c.datasets.get(NOTHING),
    "delete_dataset": lambda c, k: c.datasets.delete(NOTHING),
    "stream_events": lambda c, k: c.events(after=0),
    "list_jobs": lambda c, k: c.jobs.select("status", limit=1),
    "create_job": lambda c, k: c.jobs.create({}),
    "cancel_jobs": lambda c, k: c.jobs.cancel_many([NOTHING]),
    "validate_job": lambda c, k: c.jobs.validate({}, wait=0),
    "query_metrics": lambda c, k: c.jobs.metrics([k.job], "train/*"),
    "list_keys": lambda c, k: c.keys.list(),
    "create_key": lambda c, k: c.keys.create("spare", "ada", ["jobs:read"]),
    "get_own_key": lambda c, k: c.keys.own(),
    "get_key": lambda c, k: c.keys.get(NOTHING),
    "change_key": lambda c, k: c.keys.edit(NOTHING, name="b"),
    "rotate_key": lambda c, k: c.keys.rotate(NOTHING),
    "revoke_key": lambda c, k: c.keys.revoke(NOTHING),
    "list_nodes": lambda c, k: c.nodes(),
    "read_node_metrics": lambda c, k: c.node_metrics(k.node),
    "drain_node": lambda c, k: c.drain_node(NOTHING),
    "undrain_node": lambda c, k: c.undrain_node(NOTHING),
    "release_node": lambda c, k: c.release_node(NOTHING),
    "list_enrolment_tokens": lambda c, k: c.enrolment_tokens(),
    "create_enrolment_token": lambda c, k: c.create_enrolment_token(),
    "revoke_enrolment_token": lambda c, k: c.revoke_enrolment_token(NOTHING),
    "list_quotas": lambda c, k: c.quotas(),
    "set_quotas": lambda c, k: c.set_quotas("nobody", queued=1),
    "remove_quotas": lambda c, k: c.reset_quotas("nobody"),
    "get_usage": lambda c, k: c.usage(),
    "get_owner_usage": lambda c, k: c.usage("ada"),
    "list_recipes": lambda c, k: c.recipes.list(),
    "save_recipe": lambda c, k: c.recipes.save("ability", {}),
    "get_recipe": lambda c, k: c.recipes.get("none"),
    "list_recipe_versions": lambda c, k: c.recipes.versions("none"),
    "withdraw_recipe": lambda c, k: c.recipes.withdraw("none"),
    "list_webhooks": lambda c, k: c.webhooks.list(),
    "create_webhook": lambda c, k: c.webhooks.create("https://hooks.example.com/x"),
    "get_webhook": lambda c, k: c.webhooks.get(NOTHING),
    "change_webhook": lambda c, k: c.webhooks.edit(NOTHING, active=False),
    "delete_webhook": lambda c, k: c.webhooks.delete(NOTHING),
    "rotate_webhook_secret": lambda c, k: c.webhooks.rotate(NOTHING),
    "test_webhook": lambda c, k: c.webhooks.test(NOTHING),
    "list_webhook_deliveries": lambda c, k: c.webhooks.deliveries(NOTHING),
    "get_webhook_delivery": lambda c, k: c.webhooks.delivery(NOTHING, NOTHING),
    "redeliver_webhook_delivery": lambda c, k: c.webhooks.redeliver(NOTHING, NOTHING),
    "redeliver_failed_deliveries": lambda c, k: c.webhooks.redeliver_failed(NOTHING, NOW),
    "get_job": lambda c, k: c.jobs.get(k.job),
    "list_events": lambda c, k: c.jobs.events(k.job),
    "cancel_job": lambda c, k: c.jobs.cancel(k.job),
}
# Asked of a job; the last is put behind the others, for it ends it.
JOB_CALLS: dict[str, Call] = {
    "change_job": lambda j, k: j.edit(notes="seen"),
    "clone_job": lambda j, k: j.clone({"name": "again"}, draft=True),
    "start_job": lambda j, k: j.start(),
    "pause_job": lambda j, k: j.pause(),
    "resume_job": lambda j, k: j.resume(),
    "list_artifacts": lambda j, k: j.artifacts(),
    "download_file": lambda j, k: j.download("model", k.folder / "model"),
    "download_model": lambda j, k: j.download_model(k.folder / "model.tar"),
    "get_conversion": lambda j, k: j.conversion(),
    "get_precision": lambda j, k: j.precision(),
    "read_logs": lambda j, k: j.logs(),
    "download_logs": lambda j, k: j.save_log(k.folder / "job.log"),
    "read_metrics": lambda j, k: j.metrics(),
    "read_latest_metrics": lambda j, k: j.latest_metrics(),
    "stream_job": lambda j, k: j.stream(),
    "delete_job": lambda j, k: j.delete(),
}

# Words with JOB, NODE and FOLDER in the place of what is known.
COMMANDS: dict[str, str] = {
    "readyz": "status",
    "list_audit_entries": "audit",
    "list_datasets": "datasets ls",
    "create_dataset": "datasets upload FOLDER/rows.txt --name c --no-wait",
    "upload_part": "datasets upload FOLDER/rows.txt --name d --no-wait",
    "get_dataset": "datasets show none_1",
    "delete_dataset": "datasets rm none_1",
    "stream_events": "events",
    "list_jobs": "ls --fields status",
    "create_job": "submit FOLDER/spec.yaml",
    "get_job": "show JOB",
    "change_job": "edit JOB --notes seen",
    "clone_job": "clone JOB --draft",
    "start_job": "start JOB",
    "cancel_job": "cancel JOB",
    "cancel_jobs": "cancel --label nobody=has",
    "pause_job": "pause JOB",
    "resume_job": "resume JOB",
    "validate_job": "validate FOLDER/spec.yaml --wait 0",
    "list_artifacts": "artifacts JOB",
    "download_file": "download JOB -o FOLDER/command-model",
    "download_model": "download JOB --archive -o FOLDER/command.tar",
    "get_conversion": "show JOB --conversion",
    "get_precision": "show JOB --precision",
    "list_events": "events JOB",
    "read_logs": "logs JOB",
    "download_logs": "logs JOB -o FOLDER/command.log",
    "read_metrics": "metrics JOB",
    "read_latest_metrics": "metrics JOB --latest",
    "query_metrics": "compare JOB",
    "stream_job": "watch JOB",
    "list_keys": "keys ls",
    "create_key": "keys create spare --owner ada --scope jobs:read",
    "get_own_key": "keys show",
    "get_key": "keys show none_1",
    "change_key": "keys edit none_1 --name b",
    "rotate_key": "keys rotate none_1",
    "revoke_key": "keys revoke none_1",
    "list_nodes": "nodes ls",
    "read_node_metrics": "nodes metrics NODE",
    "drain_node": "nodes drain NODE",
    "undrain_node": "nodes undrain NODE",
    "release_node": "nodes release NODE",
    "list_enrolment_tokens": "nodes tokens",
    "create_enrolment_token": "nodes token",
    "revoke_enrolment_token": "nodes revoke-token none_1",
    "list_quotas": "quotas ls",
    "set_quotas": "quotas set nobody --queued 1",
    "remove_quotas": "quotas reset nobody",
    "get_usage": "usage",
    "get_owner_usage": "usage ada",
    "list_recipes": "recipes ls",
    "save_recipe": "recipes save ability -f FOLDER/part.yaml",
    "get_recipe": "recipes show none",
    "list_recipe_versions": "recipes show none --versions",
    "withdraw_recipe": "recipes rm none",
    "list_webhooks": "webhooks ls",
    "create_webhook": "webhooks create https://hooks.example.com/x",
    "get_webhook": "webhooks show none_1",
    "change_webhook": "webhooks edit none_1 --disable",
    "delete_webhook": "webhooks rm none_1",
    "rotate_webhook_secret": "webhooks rotate none_1",
    "test_webhook": "webhooks test none_1",
    "list_webhook_deliveries": "webhooks deliveries none_1",
    "get_webhook_delivery": "webhooks deliveries none_1 none_2",
    "redeliver_webhook_delivery": "webhooks redeliver none_1 none_2",
    "redeliver_failed_deliveries": "webhooks redeliver none_1 --failed-since 1h",
    "delete_job": "rm JOB --yes",
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_app().openapi()


@pytest.fixture(scope="module")
def patterns(document: dict[str, Any]) -> list[tuple[str, str, re.Pattern[str]]]:
    """Operation id, method and path, those without parameters first."""
    found = []
    for path, methods in document["paths"].items():
        # Only the path of a file in an artifact has slashes.
        text = re.sub(r"\\\{path\\\}", ".+", re.escape(path))
        pattern = re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", text))
        found += [(one["operationId"], method.upper(), pattern) for method, one in methods.items()]
    return sorted(found, key=lambda one: "[^/]+" in one[2].pattern)


@pytest.fixture
def operations(
    monkeypatch: pytest.MonkeyPatch, patterns: list[tuple[str, str, re.Pattern[str]]]
) -> list[str]:
    """The operations that were asked for, as the requests go out."""
    seen: list[str] = []

    def note(request: httpx.Request) -> None:
        fits = (
            name
            for name, method, pattern in patterns
            if method == request.method and pattern.fullmatch(request.url.path)
        )
        seen.append(next(fits, f"{request.method} {request.url.path}"))

    send, send_async = httpx.Client.send, httpx.AsyncClient.send

    def noted(self: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        note(request)
        return send(self, request, **options)

    async def noted_async(
        self: httpx.AsyncClient, request: httpx.Request, **options: Any
    ) -> httpx.Response:
        note(request)
        return await send_async(self, request, **options)

    monkeypatch.setattr(httpx.Client, "send", noted)
    monkeypatch.setattr(httpx.AsyncClient, "send", noted_async)
    return seen


@pytest.fixture
def admin(live: LiveServer) -> str:
    return live.key("root", "admin", "jobs:read", "jobs:write")


@pytest.fixture
def known(live: LiveServer, node: Node, admin: str, spec: dict[str, Any], tmp_path: Path) -> Known:
    """A job that has ended, with a model; files to send."""
    (tmp_path / "rows.txt").write_text("words\n")
    (tmp_path / "spec.yaml").write_text("{}")
    (tmp_path / "part.yaml").write_text("recipe: {engine: amp, dtype: bf16}\n")
    with octrain.Client(live.url, admin) as client:
        job = client.jobs.create(spec)
        node.take(job.id)
        node.tell(job.id, {"type": "metrics", "step": 1, "values": {"train/loss": 1.0}})
        node.model(job.id, {"config.json": b"{}"})
        node.finish(job.id)
    return Known(job.id, node.id, tmp_path)


def test_each_operation_stands_in_the_tables(document: dict[str, Any]) -> None:
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    users = {one["operationId"] for one in operations if EXCEPTED_TAG not in one["tags"]}
    for table in ({**CALLS, **JOB_CALLS}, COMMANDS):
        assert set(table) | set(EXCEPTIONS) >= users, "operations that nothing reaches"
        assert set(table) <= users, "operations that are gone"
        assert not set(table) & set(EXCEPTIONS)


def test_the_client_reaches_each(
    live: LiveServer, known: Known, admin: str, operations: list[str]
) -> None:
    def reached(name: str, call: Call, about: Any) -> None:
        operations.clear()
        with contextlib.suppress(OctrainError):
            given = call(about, known)
            if isinstance(given, Iterator):
                next(given, None)
        assert name in operations, f"{name}: {operations}"

    with octrain.Client(live.url, admin, retries=0) as client:
        for name, call in CALLS.items():
            reached(name, call, client)
        for name, call in JOB_CALLS.items():
            reached(name, call, client.jobs.get(known.job))


async def test_the_asynchronous_client_reaches_each(
    live: LiveServer, known: Known, admin: str, operations: list[str]
) -> None:
    async def reached(name: str, call: Call, about: Any) -> None:
        operations.clear()
        with contextlib.suppress(OctrainError):
            given = call(about, known)
            if isinstance(given, AsyncIterator):
                await anext(given, None)
                if inspect.isasyncgen(given):
                    await given.aclose()
            else:
                await given
        assert name in operations, f"{name}: {operations}"

    async with octrain.AsyncClient(live.url, admin, retries=0) as client:
        for name, call in CALLS.items():
            await reached(name, call, client)
        for name, call in JOB_CALLS.items():
            await reached(name, call, await client.jobs.get(known.job))
    await asyncio.sleep(0)


def test_the_command_reaches_each(
    live: LiveServer,
    known: Known,
    admin: str,
    operations: list[str],
    command: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(self: Any, *, after: Any = None) -> Iterator[Any]:
        """The stream of all jobs never ends: one event, then Ctrl-C."""
        yield next(follow(self, after=0))
        raise KeyboardInterrupt

    follow = octrain.Client.events
    monkeypatch.setattr(octrain.Client, "events", interrupted)
    places = {"JOB": known.job, "NODE": known.node, "FOLDER": str(known.folder)}
    for name, text in COMMANDS.items():
        operations.clear()
        words = [re.sub("JOB|NODE|FOLDER", lambda m: places[m[0]], word) for word in text.split()]
        ended = command(*words, url=live.url, key=admin)
        assert name in operations, f"{name}: {operations} {ended.stderr}"
        assert "Usage:" not in ended.stderr, ended.stderr
        assert "Traceback" not in ended.stderr, ended.stderr
