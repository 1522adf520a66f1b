"""How a new job is stored: what its one statement judges, and what it leaves to be judged."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import text

from fp8core.spec import parse_spec
from octrain_api.controller.placement import Need, need_of, never_fits
from octrain_api.database import psycopg_of
from octrain_api.ids import new_id
from octrain_api.jobs.repository import FARTHEST_POSITION
from octrain_api.jobs.submission import FirstEvent, NewJob, Submission, Unless, store
from octrain_api.jobs.transitions import Status

_NODE = """
INSERT INTO nodes (id, name, owner, boot_id, hostname, version, device_kinds, cpu_slots, gpus,
                   engines, roots, private_roots, last_heartbeat_at)
SELECT 'node_' || n, 'node-' || n, 'o', 'b', 'h', '1', CAST(:kinds AS text[]), :slots,
       CAST(:gpus AS jsonb), CAST(:engines AS jsonb), '{}', false, now()
FROM generate_series(1, :copies) AS n
"""


@dataclass
class _Node:
    device_kinds: list[str]
    cpu_slots: int
    gpus: list[dict[str, Any]]
    engines: dict[str, Any] = field(
        default_factory=lambda: {"emulated": {"ok": True}, "te": {"ok": False, "reasons": ["no"]}}
    )
    id: str = "node_1"
    name: str = "node-1"


NODES = [
    _Node(kinds, slots, [{"index": n} for n in range(gpus)])
    for kinds, slots, gpus in (
        (["cpu"], 0, 0),
        (["cpu"], 1, 0),
        (["cpu"], 2, 0),
        (["cuda"], 2, 1),
        (["cuda"], 0, 2),
        (["cpu", "cuda"], 1, 2),
        ([], 2, 2),
    )
]
NEEDS = [
    Need(device, ranks, engine)
    for device, ranks, engine in itertools.product(
        ("cpu", "cuda", "auto"), (1, 2), ("emulated", "te", "unheard_of")
    )
]


def _job(spec: dict[str, Any], need: Need) -> NewJob:
    return NewJob(
        id=new_id("job"),
        owner="o",
        spec=parse_spec(spec).resolved(),
        given=spec,
        recipe_from=None,
        status=Status.QUEUED,
        need=need,
        traceparent=None,
    )


def _spec_of(need: Need) -> dict[str, Any]:
    """As much of a spec as placement reads."""
    ranks = {"cpu_ranks": need.ranks, "gpus": need.ranks}
    return {"resources": {"device": need.device, **ranks}, "recipe": {"engine": need.engine}}


async def test_the_statement_and_the_placement_agree_on_who_fits(
    lone_service: Any, spec: dict[str, Any]
) -> None:
    events = [FirstEvent("status", "Submitted.", {})]
    seen = set()
    for node in NODES:
        async with lone_service.database.session() as session:
            values = {
                "kinds": node.device_kinds,
                "slots": node.cpu_slots,
                "gpus": json.dumps(node.gpus),
                "engines": json.dumps(node.engines),
                "copies": 2,
            }
            await session.execute(text(_NODE), values)
            for need in NEEDS:
                if need_of(_spec_of(need)) != need:
                    continue  # several GPUs are no wish for as many CPU slots
                unless = Unless(no_node_fits=True)
                connection, job = await psycopg_of(session), _job(spec, need)
                asked = Submission(job, events, "user:o", None, None, unless)
                [stored] = await store(connection, [asked])
                fits = never_fits(_spec_of(need), [node, node]) is None
                assert (stored.row is not None, stored.is_refused) == (fits, not fits), (node, need)
                seen.add(fits)
            await session.rollback()
    assert seen == {True, False}


async def test_places_are_counted_to_the_thousandth(
    lone_service: Any, user: Any, spec: dict[str, Any]
) -> None:
    await lone_service.sql(
        "INSERT INTO jobs (id, owner, labels, notes, priority, spec, status, need, created_at) "
        "SELECT 'job_' || n, 'o', '{}', '', 5, '{}', 'queued', 'cpu:1:amp', "
        "now() - interval '1 hour' FROM generate_series(1, :jobs) AS n",
        jobs=FARTHEST_POSITION - 1,
    )
    last = (await user.post("/jobs", json=spec)).json()
    beyond = (await user.post("/jobs", json=spec)).json()
    first = (await user.post("/jobs", json=spec | {"priority": 6})).json()
    told = (last["queue_position"], beyond["queue_position"], first["queue_position"])
    assert told == (FARTHEST_POSITION, None, 1)
    assert beyond["waiting_for"] == "the scheduler"
    listed = {j["id"]: j["queue_position"] for j in (await user.get("/jobs")).json()["items"]}
    # The one that was let in before them has moved everybody on by one place.
    assert listed == {first["id"]: 1, last["id"]: None, beyond["id"]: None}


async def test_what_is_told_of_a_new_job_is_what_is_read_of_it(
    lone_service: Any, user: Any, spec: dict[str, Any]
) -> None:
    for query in ("", "?draft=true"):
        made = (await user.post(f"/jobs{query}", json=spec)).json()
        read = (await user.get(f"/jobs/{made['id']}")).json()
        assert made == read
    assert made["queue_position"] is None


async def test_a_quota_of_ones_own_is_judged(lone_service: Any, user: Any, spec: Any) -> None:
    admin = lone_service.client(await lone_service.key("root", "admin"))
    await admin.put("/quotas/ada", json={"queued": 1})
    assert (await user.post("/jobs", json=spec)).status_code == 201
    assert (await user.post("/jobs?draft=true", json=spec)).status_code == 201
    refused = await user.post("/jobs", json=spec)
    assert (refused.status_code, refused.json()["type"]) == (403, "/problems/quota-exceeded")
    await admin.put("/quotas/ada", json={"running": 1})
    assert (await user.post("/jobs", json=spec)).status_code == 201
