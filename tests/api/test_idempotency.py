"""Idempotency keys: one request at a time, one thing made, told again for 24 hours."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import psycopg
import pytest

from octrain_api.idempotency.repository import IdempotencyRepository
from octrain_api.jobs.schemas import EXAMPLE_SPEC
from octrain_api.settings import DatabaseSettings, Settings

KEY = {"Idempotency-Key": "the-key"}
DATASET = {
    "name": "rows",
    "media": "jsonl",
    "size": 4,
    "sha256": hashlib.sha256(b"rows").hexdigest(),
}
FRAGMENT = {"recipe": {"engine": "emulated", "amax_history_len": 4}}
WEBHOOK = {"url": "https://ci.example.com/hooks"}
API_KEY = {"name": "laptop", "owner": "ada", "scopes": ["jobs:read"]}
# What makes something: path, body, the table that it is stored in, another body.
MAKERS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "dataset": ("/datasets", DATASET, "datasets", DATASET | {"name": "other"}),
    "recipe": (
        "/recipes",
        {"name": "mine", "fragment": FRAGMENT},
        "recipe_versions",
        {"name": "other", "fragment": FRAGMENT},
    ),
    "webhook": ("/webhooks", WEBHOOK, "webhooks", WEBHOOK | {"description": "other"}),
    "key": ("/keys", API_KEY, "api_keys", API_KEY | {"name": "desk"}),
    "token": ("/nodes/tokens", {"node": "n1"}, "enrolment_tokens", {"node": "n2"}),
}
SHOWN_ONCE = ("key", "token")


_HOLD = """
CREATE OR REPLACE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(4711);
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER hold BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION hold();
"""


@contextlib.asynccontextmanager
async def held(url: str, *tables: str) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    """Whoever makes a row of these tables waits with it until the block ends."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        for table in tables:
            await connection.execute(_HOLD.format(table=table))
        # The lock ends with the connection.
        await connection.execute("SELECT pg_advisory_lock(4711)")
        yield connection


async def someone_waits(connection: psycopg.AsyncConnection[Any], waiting: int = 1) -> None:
    """Return once so many are about to make a row."""
    async with asyncio.timeout(30):
        while True:
            found = await connection.execute(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 "
                "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
                "AND NOT granted"
            )
            row = await found.fetchone()
            if row is not None and row[0] == waiting:
                return
            await asyncio.sleep(0.02)


def is_in_flight(answer: httpx.Response) -> bool:
    """Whether this is the refusal of a second request; it says when to come again."""
    if answer.status_code != 409 or "-in-flight" not in answer.json()["type"]:
        return False
    assert answer.json()["type"] == "/problems/idempotency-key-in-flight"
    assert answer.headers["Retry-After"] == "1"
    return True


async def sent_until_done(client: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
    """The answer that is not to come again; asks sooner than it is told to."""
    async with asyncio.timeout(30):
        while True:
            answer = await client.post(path, json=body, headers=KEY)
            if not is_in_flight(answer):
                return answer
            await asyncio.sleep(0.05)


async def test_a_second_request_in_flight_is_refused(
    lone_service: Any, copied_url: str, user: Any, spec: Any
) -> None:
    async with held(copied_url, "jobs") as connection:
        first = asyncio.create_task(user.post("/jobs", json=spec, headers=KEY))
        await someone_waits(connection)
        assert is_in_flight(await user.post("/jobs", json=spec, headers=KEY))
        # Under another key, and for another owner under the same one, it is another request.
        other = await lone_service.user("eve")
        waiting = asyncio.create_task(other.post("/jobs", json=spec, headers=KEY))
        await someone_waits(connection, 2)
    made = await first
    assert made.status_code == 201
    assert (await waiting).status_code == 201
    again = await sent_until_done(user, "/jobs", spec)
    assert (again.status_code, again.headers["Idempotent-Replayed"]) == (200, "true")
    assert again.headers["Location"] == f"/v1/jobs/{made.json()['id']}"
    assert again.json() == made.json()
    assert len((await user.get("/jobs")).json()["items"]) == 1


async def test_a_key_belongs_to_one_request(user: Any, spec: Any) -> None:
    made = (await user.post("/jobs", json=spec, headers=KEY)).json()["id"]
    reordered = json.dumps(dict(reversed(spec.items())), indent=3)
    assert (await user.post("/jobs", content=reordered, headers=KEY)).json()["id"] == made
    for path, body in (
        ("/jobs", spec | {"name": "other"}),
        ("/jobs?draft=true", spec),
        ("/recipes", {"name": "mine", "fragment": FRAGMENT}),
    ):
        refused = await user.post(path, json=body, headers=KEY)
        assert refused.status_code == 422, refused.text
        assert refused.json()["type"] == "/problems/idempotency-key-reused"
        assert refused.json()["target"] == made


async def test_a_request_that_failed_leaves_its_key_free(user: Any, spec: Any) -> None:
    wrong = spec | {"training": {"steps": 0}}
    assert (await user.post("/jobs", json=wrong, headers=KEY)).status_code == 422
    assert (await user.post("/jobs", json=spec, headers=KEY)).status_code == 201


async def test_many_at_once_make_one(lone_service: Any, user: Any, spec: Any) -> None:
    answers = await asyncio.gather(*(sent_until_done(user, "/jobs", spec) for _ in range(12)))
    assert sorted(answer.status_code for answer in answers) == [200] * 11 + [201]
    assert len({answer.json()["id"] for answer in answers}) == 1
    [row] = await lone_service.sql("SELECT count(*) AS jobs FROM jobs")
    assert row.jobs == 1


async def test_keys_are_forgotten_after_24_hours(lone_service: Any, user: Any, spec: Any) -> None:
    first = (await user.post("/jobs", json=spec, headers=KEY)).json()["id"]
    age = "UPDATE idempotency_keys SET created_at = created_at - make_interval(secs => :s)"
    await lone_service.sql(age, s=86_000)
    assert (await user.post("/jobs", json=spec, headers=KEY)).json()["id"] == first
    await lone_service.sql(age, s=500)
    # Not swept yet, and another request: the key is as good as new.
    changed = spec | {"name": "another"}
    second = await user.post("/jobs", json=changed, headers=KEY)
    assert (second.status_code, second.json()["id"] != first) == (201, True)
    assert (await user.post("/jobs", json=changed, headers=KEY)).json()["id"] == second.json()["id"]
    await user.post("/jobs", json=spec, headers={"Idempotency-Key": "young"})
    await lone_service.sql(age + " WHERE key = 'the-key'", s=86_500)
    async with lone_service.database.transaction() as session:
        assert await IdempotencyRepository(session).forget_old(10) == 1
    assert [row.key for row in await lone_service.sql("SELECT key FROM idempotency_keys")] == [
        "young"
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/jobs?draft=true", EXAMPLE_SPEC), ("/datasets", DATASET), ("/webhooks", WEBHOOK)],
)
async def test_what_was_deleted_is_not_made_again(user: Any, path: str, body: Any) -> None:
    listed = path.partition("?")[0]
    made = (await user.post(path, json=body, headers=KEY)).json()["id"]
    assert (await user.delete(f"{listed}/{made}")).status_code == 204
    again = await user.post(path, json=body, headers=KEY)
    assert (again.status_code, made in again.json()["detail"]) == (404, True)
    assert (await user.get(listed)).json()["items"] == []
    document = (await user.get("http://octrain/openapi.json")).json()
    assert "404" in document["paths"]["/v1" + listed]["post"]["responses"]


async def test_a_recipe_that_was_withdrawn_is_still_told(user: Any) -> None:
    """Its versions can be named for ever, so old specs stay valid."""
    body = {"name": "mine", "fragment": FRAGMENT}
    made = await user.post("/recipes", json=body, headers=KEY)
    assert (await user.delete("/recipes/mine")).status_code == 204
    again = await user.post("/recipes", json=body, headers=KEY)
    assert (again.status_code, again.json()["version"]) == (200, made.json()["version"])


async def test_a_clone_is_made_once(user: Any, submit: Any) -> None:
    source = await submit(user)
    path, body = f"/jobs/{source}/clone", {"name": "again"}
    made = await user.post(path, json=body, headers=KEY)
    again = await user.post(path, json=body, headers=KEY)
    assert (made.status_code, again.status_code) == (201, 200)
    assert again.json() == made.json()
    events = (await user.get(f"/jobs/{made.json()['id']}/events")).json()["items"]
    assert [event["kind"] for event in events] == ["status", "cloned"]
    assert (made.json()["last_event"], made.json()["version"]) == (2, 3)
    other = await user.post(path, json={"name": "other"}, headers=KEY)
    assert other.json()["type"] == "/problems/idempotency-key-reused"


@pytest.mark.parametrize("what", MAKERS)
async def test_whatever_is_made_is_made_once(lone_service: Any, copied_url: str, what: str) -> None:
    path, body, table, other = MAKERS[what]
    admin = lone_service.client(await lone_service.key("root", "admin"))
    [before] = await lone_service.sql(f"SELECT count(*) AS rows FROM {table}")
    async with held(copied_url, table) as connection:
        first = asyncio.create_task(admin.post(path, json=body, headers=KEY))
        await someone_waits(connection)
        assert is_in_flight(await admin.post(path, json=body, headers=KEY))
    made = await first
    assert made.status_code == 201, made.text
    again = await sent_until_done(admin, path, body)
    if what in SHOWN_ONCE:
        problem = again.json()
        assert (again.status_code, problem["type"]) == (409, "/problems/secret-shown-once")
        assert problem["target"] == made.json()["id"]
        secret = made.json()["key" if what == "key" else "token"]
        assert secret not in again.text
    else:
        assert (again.status_code, again.json()) == (200, made.json())
        assert again.headers["Idempotent-Replayed"] == "true"
    used = await admin.post(path, json=other, headers=KEY)
    assert used.json()["type"] == "/problems/idempotency-key-reused"
    [after] = await lone_service.sql(f"SELECT count(*) AS rows FROM {table}")
    assert after.rows == before.rows + 1


@contextlib.contextmanager
def api_process(settings: Settings) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process of the API, and its address."""
    environment = {
        **os.environ,
        "DATABASE_URL": settings.database.url,
        "REDIS_URL": settings.broker.url,
        "OCTRAIN_ARTIFACT_URL": settings.storage.artifact_url,
    }
    command = [sys.executable, "-m", "octrain_api", "serve", "--port", "0"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "running on http://" in line:
                yield process, line.split("running on ")[1].split()[0]
                break
        else:
            pytest.fail("the API did not start")
    finally:
        process.kill()
        process.communicate(timeout=30)


async def test_a_process_that_is_killed_in_flight_blocks_no_key(
    lone_service: Any, copied_url: str, spec: Any
) -> None:
    """Across processes too one request at a time; what a killed one had begun is there or is not,
    and its key with it."""
    settings = lone_service.settings.model_copy(
        update={"database": DatabaseSettings(url=copied_url)}
    )
    headers = {"Authorization": f"Bearer {await lone_service.key('ada', 'jobs:write')}"}
    recipe = {"name": "mine", "fragment": FRAGMENT}
    requests = {"/v1/jobs": (spec, "one"), "/v1/recipes": (recipe, "two")}
    with api_process(settings) as (killed, address), api_process(settings) as (_, other_address):
        async with (
            httpx.AsyncClient(base_url=address, headers=headers, timeout=60) as client,
            httpx.AsyncClient(base_url=other_address, headers=headers, timeout=60) as other,
            held(copied_url, "jobs", "recipe_versions") as connection,
        ):

            async def send(to: httpx.AsyncClient, path: str) -> httpx.Response:
                body, key = requests[path]
                return await to.post(path, json=body, headers={"Idempotency-Key": key})

            begun = [asyncio.create_task(send(client, path)) for path in requests]
            await someone_waits(connection, 2)
            for path in requests:
                assert is_in_flight(await send(other, path))
            killed.kill()
            for answer in await asyncio.gather(*begun, return_exceptions=True):
                assert isinstance(answer, httpx.TransportError)
            # The database goes on with what it was told, and then finds that nobody listens.
            for path in requests:
                assert is_in_flight(await send(other, path))
            await connection.execute("SELECT pg_advisory_unlock_all()")
            made = {}
            async with asyncio.timeout(30):
                for path in requests:
                    while is_in_flight(made.setdefault(path, await send(other, path))):
                        del made[path]
                        await asyncio.sleep(0.05)
            # A job is one statement, which needs no process any more; a recipe is several.
            assert made["/v1/jobs"].status_code in (200, 201)
            assert made["/v1/recipes"].status_code == 201
            for path in requests:
                again = await send(other, path)
                assert (again.status_code, again.json()) == (200, made[path].json())
    for table in ("jobs", "recipe_versions"):
        [row] = await lone_service.sql(f"SELECT count(*) AS rows FROM {table}")
        assert row.rows == 1
