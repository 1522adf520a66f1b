"""API keys through their life, and the machines that speak with them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from octrain_api.keys.last_use import LastUse

BODY = {"name": "laptop", "owner": "ada", "scopes": ["jobs:read"]}


@pytest.fixture
async def admin(lone_service: Any) -> Any:
    return lone_service.client(await lone_service.key("root", "admin"))


async def _works(service: Any, key: str) -> bool:
    return bool((await service.client(key).get("/jobs")).status_code == 200)


async def test_rotation_with_grace(lone_service: Any, admin: Any) -> None:
    made = (await admin.post("/keys", json=BODY)).json()
    rotated = await admin.post(f"/keys/{made['id']}/rotate", json={"grace_seconds": 60})
    assert rotated.status_code == 200
    assert rotated.headers["cache-control"] == "no-store"
    new = rotated.json()
    assert (new["id"], new["key"] != made["key"]) == (made["id"], True)
    assert new["previous_until"] is not None
    assert await _works(lone_service, made["key"])
    assert await _works(lone_service, new["key"])
    await lone_service.sql(
        "UPDATE api_keys SET previous_until = now() WHERE id = :id", id=made["id"]
    )
    # Whoever keeps keys in memory hears of changes through the service, not of SQL.
    await admin.patch(f"/keys/{made['id']}", json={"name": "old laptop"})
    assert not await _works(lone_service, made["key"])
    assert await _works(lone_service, new["key"])


async def test_rotating_twice_ends_the_first_at_once(lone_service: Any, admin: Any) -> None:
    made = (await admin.post("/keys", json=BODY)).json()
    second = (await admin.post(f"/keys/{made['id']}/rotate")).json()["key"]
    third = (await admin.post(f"/keys/{made['id']}/rotate")).json()["key"]
    works = [await _works(lone_service, key) for key in (made["key"], second, third)]
    assert works == [False, True, True]
    none = await admin.post(f"/keys/{made['id']}/rotate", json={"grace_seconds": 0})
    works = [await _works(lone_service, key) for key in (third, none.json()["key"])]
    assert works == [False, True]


async def test_keys_expire(lone_service: Any, admin: Any) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=1.5)
    made = (await admin.post("/keys", json=BODY | {"expires_at": soon.isoformat()})).json()
    assert await _works(lone_service, made["key"])
    async with asyncio.timeout(30):
        while await _works(lone_service, made["key"]):
            await asyncio.sleep(0.1)
    later = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    for value in (later, None):
        changed = await admin.patch(f"/keys/{made['id']}", json={"expires_at": value})
        assert (changed.json()["expires_at"] is None) == (value is None)
        assert await _works(lone_service, made["key"])
    past = {"expires_at": "2020-01-01T00:00:00Z"}
    for answer in (
        await admin.patch(f"/keys/{made['id']}", json=past),
        await admin.post("/keys", json=BODY | past),
    ):
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/expires_at")


async def test_a_revoked_key_stays_revoked(lone_service: Any, admin: Any) -> None:
    made = (await admin.post("/keys", json=BODY)).json()
    await admin.delete(f"/keys/{made['id']}")
    assert not await _works(lone_service, made["key"])
    for answer in (
        await admin.post(f"/keys/{made['id']}/rotate"),
        await admin.patch(f"/keys/{made['id']}", json={"name": "x"}),
    ):
        assert (answer.status_code, answer.json()["type"]) == (409, "/problems/key-revoked")
    assert (await admin.post("/keys/key_x/rotate")).status_code == 404


async def test_pages_and_filters(lone_service: Any, admin: Any) -> None:
    ids = [
        (await admin.post("/keys", json=BODY | {"name": f"k{n}"})).json()["id"] for n in range(7)
    ]
    await admin.delete(f"/keys/{ids[0]}")
    found, cursor = [], None
    for _ in range(20):
        page = (
            await admin.get("/keys", params={"owner": "ada", "limit": 3} | _cursor(cursor))
        ).json()
        found += [item["id"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
        # What is made meanwhile shifts no page.
        await admin.post("/keys", json=BODY | {"owner": "eve"})
    assert found == ids
    live = (await admin.get("/keys", params={"owner": "ada", "revoked": False})).json()["items"]
    assert [item["id"] for item in live] == ids[1:]
    assert (await admin.get("/keys?cursor=x")).status_code == 422


def _cursor(cursor: str | None) -> dict[str, str]:
    return {"cursor": cursor} if cursor is not None else {}


async def test_a_key_knows_itself(lone_service: Any) -> None:
    for scope in ("jobs:read", "node", "admin"):
        own = await lone_service.client(await lone_service.key("ada", scope)).get("/keys/self")
        assert (own.status_code, own.json()["scopes"], own.json()["owner"]) == (200, [scope], "ada")


async def test_last_use_is_written_for_all_at_once(lone_service: Any, admin: Any) -> None:
    made = [(await admin.post("/keys", json=BODY)).json() for _ in range(3)]
    last_use = LastUse(lone_service.database, 60)
    for key in made[:2]:
        for _ in range(50):
            last_use.note(key["id"])
    assert await last_use.write() == 2
    assert await last_use.write() == 0, "nothing was used since"
    shown = [(await admin.get(f"/keys/{key['id']}")).json()["last_used_at"] for key in made]
    assert [value is not None for value in shown] == [True, True, False]


async def test_the_application_notes_the_use_of_keys(lone_service: Any, admin: Any) -> None:
    async with lone_service.app.router.lifespan_context(lone_service.app):
        await admin.get("/jobs")
    rows = await lone_service.sql(
        "SELECT count(*) AS n FROM api_keys WHERE last_used_at > now() - interval '1 minute'"
    )
    assert rows[0].n == 1


@pytest.mark.parametrize(
    "change",
    [
        {"scopes": ["node", "jobs:read"]},
        {"node": "n"},
        {"scopes": ["node"], "node": "a/b"},
        {"scopes": []},
        {"name": ""},
        {"secret": "x"},
    ],
)
async def test_keys_that_make_no_sense_are_refused(admin: Any, change: dict[str, Any]) -> None:
    assert (await admin.post("/keys", json=BODY | change)).status_code == 422


def _node(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "boot_id": "b",
        "hostname": "h",
        "version": "v",
        "device_kinds": ["cpu"],
        "cpu_slots": 1,
    }


async def test_a_node_key_speaks_for_the_first_node_it_registers(
    lone_service: Any, admin: Any
) -> None:
    one = lone_service.client(await lone_service.key("ops", "node"))
    two = lone_service.client(await lone_service.key("ops", "node"))
    assert (await one.post("/nodes/register", json=_node("gpu-1"))).status_code == 200
    assert (await one.post("/nodes/register", json=_node("gpu-1"))).status_code == 200
    other = await one.post("/nodes/register", json=_node("gpu-2"))
    assert (other.status_code, other.json()["type"]) == (403, "/problems/node-key-bound")
    taken = await two.post("/nodes/register", json=_node("gpu-1"))
    assert (taken.status_code, taken.json()["type"]) == (403, "/problems/node-name-taken")
    assert (await two.post("/nodes/register", json=_node("gpu-2"))).status_code == 200
    keys = (await admin.get("/keys")).json()["items"]
    assert {key["node"] for key in keys if key["scopes"] == ["node"]} == {"gpu-1", "gpu-2"}
    bound = next(key for key in keys if key["node"] == "gpu-1")
    # Once its key is revoked, or has expired, the name is free for the owner's next machine.
    await admin.delete(f"/keys/{bound['id']}")
    three = lone_service.client(await lone_service.key("ops", "node"))
    assert (await three.post("/nodes/register", json=_node("gpu-1"))).status_code == 200
    await lone_service.sql("UPDATE api_keys SET expires_at = now() WHERE node_name = 'gpu-1'")
    four = lone_service.client(await lone_service.key("ops", "node"))
    assert (await four.post("/nodes/register", json=_node("gpu-1"))).status_code == 200


async def test_two_keys_at_once_for_one_name(lone_service: Any) -> None:
    clients = [lone_service.client(await lone_service.key("ops", "node")) for _ in range(6)]
    answers = await asyncio.gather(
        *(client.post("/nodes/register", json=_node("race")) for client in clients)
    )
    assert sorted(answer.status_code for answer in answers) == [200, 403, 403, 403, 403, 403]


async def test_a_node_key_touches_nothing_of_another_node(
    worker: Any, user: Any, submit: Any, lone_service: Any, running_job: str
) -> None:
    """Every route of workers, with the key of another node of the same owner."""
    other = lone_service.client(await lone_service.key("operations", "node"))
    assert (await other.post("/nodes/register", json=_node("node-b"))).status_code == 200
    unbound = lone_service.client(await lone_service.key("operations", "node"))
    token = {"fencing_token": worker.attempt["fencing_token"]}
    bodies: dict[str, dict[str, Any]] = {
        "claim": {"node_id": worker.node_id, "supervisor": "supervisor-1"},
        "heartbeat": token,
        "telemetry": token | {"first_seq": 3, "records": []},
        "artifacts": token
        | {
            "kind": "report",
            "name": "r",
            "url": "file:///r",
            "files": [{"path": "r", "size": 1, "sha256": "0" * 64}],
        },
        "finish": token | {"outcome": "failed", "reason": "internal_error"},
    }
    document = (await lone_service.client(None).get("http://octrain/openapi.json")).json()
    routes = {
        path
        for path, operations in document["paths"].items()
        if "workers" in operations.get("post", {}).get("tags", [])
    }
    attempts = {f"/v1/attempts/{{attempt_id}}/{action}" for action in bodies}
    assert routes == attempts | {
        "/v1/nodes/register",
        "/v1/nodes/enrol",
        "/v1/nodes/{node_id}/heartbeat",
        "/v1/nodes/{node_id}/metrics",
        "/v1/nodes/{node_id}/plans:take",
        "/v1/nodes/{node_id}/plans/{key}",
    }, "a new route of workers must be tried here too"
    before = (await user.get(f"/jobs/{running_job}")).json()
    for stranger in (other, unbound):
        for action, body in bodies.items():
            path = f"/attempts/{worker.attempt['attempt_id']}/{action}"
            answer = await stranger.post(path, json=body)
            assert (answer.status_code, answer.json()["type"]) == (404, "/problems/not-found")
        beat = await stranger.post(f"/nodes/{worker.node_id}/heartbeat", json={})
        assert beat.status_code == 404
        sample = {"id": "sample-1", "age_seconds": 1, "host": {}, "gpus": []}
        told = await stranger.post(f"/nodes/{worker.node_id}/metrics", json={"samples": [sample]})
        assert told.status_code == 404, told.text
        taken = await stranger.post(f"/nodes/{worker.node_id}/plans:take?wait=0", json={})
        assert taken.status_code == 404, taken.text
        answered = await stranger.post(
            f"/nodes/{worker.node_id}/plans/{'0' * 64}", json={"problem": "x"}
        )
        assert answered.status_code == 404, answered.text
        assert (await stranger.post("/nodes/register", json=_node("node-a"))).status_code == 403
    assert (await user.get(f"/jobs/{running_job}")).json() == before
    assert (await worker.post("heartbeat")).status_code == 200


async def test_enrolment_gives_a_key_once(lone_service: Any, admin: Any) -> None:
    made = await admin.post("/nodes/tokens", json={"owner": "ops"})
    assert made.status_code == 201
    token = made.json()["token"]
    nobody = lone_service.client(None)
    answers = await asyncio.gather(
        *(nobody.post("/nodes/enrol", json={"token": token, "node": f"n{i}"}) for i in range(5))
    )
    assert sorted(answer.status_code for answer in answers) == [201, 401, 401, 401, 401]
    given = next(answer.json() for answer in answers if answer.status_code == 201)
    node = lone_service.client(given["key"])
    assert (await node.post("/nodes/register", json=_node(given["node"]))).status_code == 200
    other = await node.post("/nodes/register", json=_node("another"))
    assert other.json()["type"] == "/problems/node-key-bound"
    listed = (await admin.get("/nodes/tokens")).json()["items"][0]
    assert (listed["key_id"], listed["used_at"] is not None) == (given["key_id"], True)
    stored = str(await lone_service.sql("SELECT * FROM enrolment_tokens"))
    assert token not in stored
    assert given["key"] not in stored


async def test_a_token_that_names_a_node_replaces_its_key(lone_service: Any, admin: Any) -> None:
    first = lone_service.client(await lone_service.key("ops", "node"))
    registered = await first.post("/nodes/register", json=_node("gpu-1"))
    free = (await admin.post("/nodes/tokens", json={"owner": "ops"})).json()["token"]
    nobody = lone_service.client(None)
    refused = await nobody.post("/nodes/enrol", json={"token": free, "node": "gpu-1"})
    assert (refused.status_code, refused.json()["type"]) == (403, "/problems/node-name-taken")
    assert (await first.post("/nodes/register", json=_node("gpu-1"))).status_code == 200
    named = (await admin.post("/nodes/tokens", json={"owner": "ops", "node": "gpu-1"})).json()
    wrong = await nobody.post("/nodes/enrol", json={"token": named["token"], "node": "gpu-9"})
    assert wrong.status_code == 401
    given = await nobody.post("/nodes/enrol", json={"token": named["token"], "node": "gpu-1"})
    assert given.status_code == 201, "a refusal does not use the token up"
    again = lone_service.client(given.json()["key"])
    same = await again.post("/nodes/register", json=_node("gpu-1"))
    assert same.json()["node_id"] == registered.json()["node_id"]
    assert (await first.post("/nodes/register", json=_node("gpu-1"))).status_code == 401


async def test_tokens_end(lone_service: Any, admin: Any) -> None:
    nobody = lone_service.client(None)
    ended, revoked = [(await admin.post("/nodes/tokens", json={})).json() for _ in range(2)]
    await lone_service.sql(
        "UPDATE enrolment_tokens SET expires_at = now() WHERE id = :id", id=ended["id"]
    )
    assert (await admin.delete(f"/nodes/tokens/{revoked['id']}")).status_code == 200
    for token in (ended["token"], revoked["token"], "octn_nothing"):
        answer = await nobody.post("/nodes/enrol", json={"token": token, "node": "n"})
        assert answer.status_code == 401
        assert token not in answer.text
    assert (await admin.delete("/nodes/tokens/tok_x")).status_code == 404
