"""The audit log: every change by a key, with its refusal too, and nothing rewrites it."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError


@pytest.fixture
async def admin(lone_service: Any) -> Any:
    return lone_service.client(await lone_service.key("root", "admin"))


async def _entries(admin: Any, **filters: Any) -> list[dict[str, Any]]:
    answer = await admin.get("/audit", params=filters)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["items"])


async def test_changes_are_recorded_with_who_when_and_where(
    lone_service: Any, admin: Any, submit: Any, spec: Any
) -> None:
    user = await lone_service.user("ada")
    me = (await user.get("/keys/self")).json()["id"]
    answer = await user.post("/jobs", json=spec, headers={"X-Request-ID": "trace-7"})
    job_id = answer.json()["id"]
    assert answer.headers["x-request-id"] == "trace-7"
    await user.post(f"/jobs/{job_id}/cancel")
    await user.get(f"/jobs/{job_id}")
    entries = await _entries(admin, owner="ada")
    assert [(e["method"], e["route"], e["target"], e["status"], e["outcome"]) for e in entries] == [
        ("POST", "/jobs/{job_id}/cancel", job_id, 200, "done"),
        ("POST", "/jobs", job_id, 201, "done"),
    ]
    assert entries[1]["request_id"] == "trace-7"
    assert {entry["key_id"] for entry in entries} == {me}
    assert all(entry["address"] == "127.0.0.1" and entry["time"] for entry in entries)


async def test_refusals_are_recorded_and_changed_nothing(lone_service: Any, admin: Any) -> None:
    user = await lone_service.user("eve")
    await user.post("/keys", json={"name": "k", "owner": "eve", "scopes": ["admin"]})
    await user.post("/jobs/job_of_ada/cancel")
    await user.post("/jobs", json={"model": 1})
    await user.patch("/v1/nowhere")
    found = await _entries(admin, owner="eve", outcome="refused")
    assert [(e["route"], e["target"], e["status"]) for e in found] == [
        ("unmatched", None, 404),
        ("/jobs", None, 422),
        ("/jobs/{job_id}/cancel", "job_of_ada", 404),
        ("/keys", None, 403),
    ]


async def test_no_entry_without_its_change(lone_service: Any, admin: Any, spec: Any) -> None:
    """Both are one transaction: what fails at the commit leaves only the refusal."""
    await lone_service.sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'not now'; END $$"
    )
    await lone_service.sql(
        "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON jobs DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    user = await lone_service.user("ada")
    assert (await user.post("/jobs", json=spec)).status_code == 500
    entries = await _entries(admin, owner="ada")
    assert [(e["status"], e["outcome"]) for e in entries] == [(500, "failed")]


async def test_secrets_and_reads_are_not_recorded(lone_service: Any, admin: Any) -> None:
    made = (await admin.post("/keys", json={"name": "k", "owner": "o", "scopes": ["node"]})).json()
    rotated = (await admin.post(f"/keys/{made['id']}/rotate")).json()
    token = (await admin.post("/nodes/tokens", json={"owner": "o"})).json()
    enrolled = await lone_service.client(None).post(
        "/nodes/enrol", json={"token": token["token"], "node": "n-1"}
    )
    node = lone_service.client(enrolled.json()["key"])
    assert (await node.post("/nodes/x/heartbeat", json={})).status_code == 404
    await lone_service.client("oct_wrong").post("/jobs", json={})
    rows = str(await lone_service.sql("SELECT * FROM audit_log"))
    for secret in (made["key"], rotated["key"], token["token"], enrolled.json()["key"]):
        assert secret not in rows
    entries = await _entries(admin)
    assert [(e["route"], e["target"]) for e in entries] == [
        ("/nodes/enrol", "n-1"),
        ("/nodes/tokens", token["id"]),
        ("/keys/{key_id}/rotate", made["id"]),
        ("/keys", made["id"]),
    ]
    assert entries[0]["key_id"] == enrolled.json()["key_id"]
    assert entries[0]["owner"] == "o"


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit_log SET owner = 'nobody'",
        "DELETE FROM audit_log",
        "TRUNCATE audit_log",
    ],
)
async def test_nothing_rewrites_it(lone_service: Any, admin: Any, statement: str) -> None:
    await admin.post("/nodes/tokens", json={})
    with pytest.raises(DBAPIError, match="append-only"):
        await lone_service.sql(statement)
    assert len(await _entries(admin)) == 1


async def test_pages_and_filters(lone_service: Any, admin: Any) -> None:
    for _ in range(7):
        await admin.post("/nodes/tokens", json={})
    everything = await _entries(admin)
    assert len(everything) == 7
    found, cursor = [], ""
    while True:
        query = {"limit": 3} | ({"cursor": cursor} if cursor else {})
        page = (await admin.get("/audit", params=query)).json()
        found += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
        await admin.post("/nodes/tokens", json={})
    assert found == everything
    middle = everything[3]
    at = {"since": middle["time"], "until": everything[2]["time"]}
    assert [entry["id"] for entry in await _entries(admin, **at)] == [middle["id"]]
    assert await _entries(admin, target=middle["target"]) == [middle]
    assert await _entries(admin, owner="nobody") == []
    assert (await admin.get("/audit?since=yesterday")).status_code == 422
