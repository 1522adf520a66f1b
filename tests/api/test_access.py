"""Who may do what: every route, without a key, with a wrong scope, with another owner's job."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fastapi.routing import iter_route_contexts

OPEN = {
    "/healthz",
    "/readyz",
    "/docs",
    "/openapi.json",
    "/docs/assets",
    "/problems",
    "/problems/{name}",
    # Leads to the dashboard.
    "/",
    # Files, the same for everybody.
    "/dashboard",
    "/dashboard/{path}",
    # For administrators unless the operator opened it: test_operations.py.
    "/metrics",
    # Opened by the one-time token in its body.
    "/v1/nodes/enrol",
    # Opened by the key in its body.
    "POST /v1/session",
}
# What each route needs; a new route fails the test until it is named here.
SCOPES = {
    ("POST", "/v1/jobs"): "jobs:write",
    ("GET", "/v1/jobs"): "jobs:read",
    ("GET", "/v1/jobs/{job_id}"): "jobs:read",
    ("POST", "/v1/jobs/{job_id}/cancel"): "jobs:write",
    ("POST", "/v1/jobs/{job_id}/pause"): "jobs:write",
    ("POST", "/v1/jobs/{job_id}/resume"): "jobs:write",
    ("GET", "/v1/jobs/{job_id}/stream"): "jobs:read",
    ("GET", "/v1/jobs/{job_id}/events"): "jobs:read",
    ("GET", "/v1/jobs/{job_id}/metrics"): "jobs:read",
    ("GET", "/v1/jobs/{job_id}/logs"): "jobs:read",
    ("GET", "/v1/jobs/{job_id}/logs/download"): "jobs:read",
    ("GET", "/v1/events/stream"): "jobs:read",
    ("GET", "/v1/jobs/{job_id}/artifacts"): "jobs:read",
    ("GET", "/v1/jobs/{job_id}/artifacts/{artifact_id}/files/{path}"): "jobs:read",
    ("GET", "/v1/jobs/{job_id}/conversion"): "jobs:read",
    ("GET", "/v1/jobs/{job_id}/precision"): "jobs:read",
    ("GET", "/v1/nodes"): "jobs:read",
    ("POST", "/v1/jobs:validate"): "jobs:write",
    ("POST", "/v1/jobs:cancel"): "jobs:write",
    ("PATCH", "/v1/jobs/{job_id}"): "jobs:write",
    ("DELETE", "/v1/jobs/{job_id}"): "jobs:write",
    ("POST", "/v1/jobs/{job_id}/clone"): "jobs:write",
    ("POST", "/v1/jobs/{job_id}/start"): "jobs:write",
    ("GET", "/v1/jobs/{job_id}/model"): "jobs:read",
    ("POST", "/v1/nodes/{node_id}/plans:take"): "node",
    ("POST", "/v1/nodes/{node_id}/plans/{key}"): "node",
    ("GET", "/v1/recipes"): "jobs:read",
    ("POST", "/v1/recipes"): "jobs:write",
    ("GET", "/v1/recipes/{name}"): "jobs:read",
    ("GET", "/v1/recipes/{name}/versions"): "jobs:read",
    ("DELETE", "/v1/recipes/{name}"): "jobs:write",
    ("POST", "/v1/datasets"): "jobs:write",
    ("GET", "/v1/datasets"): "jobs:read",
    ("GET", "/v1/datasets/{dataset_id}"): "jobs:read",
    ("DELETE", "/v1/datasets/{dataset_id}"): "jobs:write",
    ("HEAD", "/v1/datasets/{dataset_id}/content"): "jobs:read",
    ("PATCH", "/v1/datasets/{dataset_id}/content"): "jobs:write",
    ("POST", "/v1/webhooks"): "jobs:write",
    ("GET", "/v1/webhooks"): "jobs:write",
    ("GET", "/v1/webhooks/{webhook_id}"): "jobs:write",
    ("PATCH", "/v1/webhooks/{webhook_id}"): "jobs:write",
    ("DELETE", "/v1/webhooks/{webhook_id}"): "jobs:write",
    ("POST", "/v1/webhooks/{webhook_id}/rotate"): "jobs:write",
    ("POST", "/v1/webhooks/{webhook_id}/test"): "jobs:write",
    ("POST", "/v1/webhooks/{webhook_id}/redeliver"): "jobs:write",
    ("GET", "/v1/webhooks/{webhook_id}/deliveries"): "jobs:write",
    ("GET", "/v1/webhooks/{webhook_id}/deliveries/{delivery_id}"): "jobs:write",
    ("POST", "/v1/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver"): "jobs:write",
    ("POST", "/v1/nodes/register"): "node",
    ("POST", "/v1/nodes/{node_id}/heartbeat"): "node",
    ("POST", "/v1/nodes/{node_id}/drain"): "admin",
    ("POST", "/v1/nodes/{node_id}/undrain"): "admin",
    ("POST", "/v1/nodes/{node_id}/release"): "admin",
    ("POST", "/v1/attempts/{attempt_id}/claim"): "node",
    ("POST", "/v1/attempts/{attempt_id}/heartbeat"): "node",
    ("POST", "/v1/attempts/{attempt_id}/telemetry"): "node",
    ("POST", "/v1/attempts/{attempt_id}/artifacts"): "node",
    ("POST", "/v1/attempts/{attempt_id}/finish"): "node",
    ("POST", "/v1/keys"): "admin",
    ("GET", "/v1/keys"): "admin",
    ("DELETE", "/v1/keys/{key_id}"): "admin",
    ("GET", "/v1/keys/self"): "any",
    ("GET", "/v1/keys/{key_id}"): "admin",
    ("GET", "/v1/session"): "any",
    ("DELETE", "/v1/session"): "any",
    ("PATCH", "/v1/keys/{key_id}"): "admin",
    ("POST", "/v1/keys/{key_id}/rotate"): "admin",
    ("POST", "/v1/nodes/tokens"): "admin",
    ("GET", "/v1/nodes/tokens"): "admin",
    ("DELETE", "/v1/nodes/tokens/{token_id}"): "admin",
    ("GET", "/v1/audit"): "admin",
    ("GET", "/v1/usage"): "jobs:read",
    ("GET", "/v1/usage/{owner}"): "admin",
    ("GET", "/v1/quotas"): "admin",
    ("PUT", "/v1/quotas/{owner}"): "admin",
    ("DELETE", "/v1/quotas/{owner}"): "admin",
    ("GET", "/v1/nodes/{node_id}/metrics"): "jobs:read",
    ("POST", "/v1/nodes/{node_id}/metrics"): "node",
    ("GET", "/v1/jobs/{job_id}/metrics/latest"): "jobs:read",
    ("GET", "/v1/metrics/query"): "jobs:read",
}
BODIES = {
    "/v1/datasets": {"name": "d", "size": 1, "sha256": "0" * 64, "media": "text"},
    "/v1/webhooks": {"url": "https://hooks.example.com/"},
    "/v1/webhooks/{webhook_id}/redeliver": {"since": "2026-01-01T00:00:00Z"},
    "/v1/recipes": {"name": "r", "fragment": {"recipe": {"engine": "amp"}}},
    "/v1/nodes/register": {
        "name": "n",
        "boot_id": "b",
        "hostname": "h",
        "version": "v",
        "device_kinds": ["cpu"],
        "cpu_slots": 1,
    },
    "/v1/attempts/{attempt_id}/claim": {"node_id": "n", "supervisor": "supervisor"},
    "/v1/attempts/{attempt_id}/heartbeat": {"fencing_token": 1},
    "/v1/attempts/{attempt_id}/telemetry": {"fencing_token": 1, "first_seq": 1, "records": []},
    "/v1/attempts/{attempt_id}/artifacts": {
        "fencing_token": 1,
        "kind": "report",
        "name": "r",
        "url": "file:///r",
        "files": [{"path": "r", "size": 1, "sha256": "0" * 64}],
    },
    "/v1/attempts/{attempt_id}/finish": {
        "fencing_token": 1,
        "outcome": "failed",
        "reason": "internal_error",
    },
    "/v1/keys": {"name": "k", "owner": "o", "scopes": ["jobs:read"]},
}


def _path(template: str, job_id: str = "job_x") -> str:
    return re.sub(r"\{[^}]*\}", "x", template.replace("{job_id}", job_id))


def _routes(app: Any) -> set[tuple[str, str]]:
    """(method, path) of every route of the application, described or not, but the open ones."""
    found = set()
    for context in iter_route_contexts(app.routes):
        path = re.sub(r":[a-z]+}", "}", context.path)
        if path in OPEN or "/v1" + path in OPEN:
            continue
        # What has no methods (a mount) would take all of them.
        methods = getattr(context.original_route, "methods", None) or {"ANY"}
        for method in methods:
            if {f"{method} {path}", f"{method} /v1{path}"} & OPEN:
                continue
            if method != "HEAD" or len(methods) == 1:
                found.add((method, path))
    return found


async def test_every_route_is_known_and_refuses(lone_service: Any) -> None:
    service = lone_service
    found = _routes(service.app)
    # Served with and without /v1, and by the same guards.
    assert {route for route in found if route[1].startswith("/v1/")} == set(SCOPES)
    assert {(m, "/v1" + p) for m, p in found if not p.startswith("/v1/")} == set(SCOPES)
    nobody, wrong = service.client(None), service.client("oct_not-a-key")
    names = ("jobs:read", "jobs:write", "admin", "node")
    clients = {scope: await service.key("walker", scope) for scope in names}
    for (method, template), scope in SCOPES.items():
        for prefix in ("", "/v1"):
            url = "http://octrain" + prefix + _path(template).removeprefix("/v1")
            for client in (nobody, wrong):
                answer = await client.request(method, url, json=BODIES.get(template, {}))
                assert answer.status_code == 401, (method, url)
                assert answer.headers["www-authenticate"].startswith("Bearer")
                if method != "HEAD":
                    assert answer.json()["type"] == "/problems/not-authenticated"
        for other, key in clients.items():
            may = scope in (other, "any") or (other == "admin" and scope.startswith("jobs:"))
            answer = await service.client(key).request(
                method,
                "http://octrain" + _path(template),
                json=BODIES.get(template, {}),
                # A stream is read to its end here.
                params={"max_seconds": 0.01} if template.endswith("/stream") else {},
            )
            assert (answer.status_code != 403) == may, (method, template, other)


async def test_another_owners_job_is_not_there(service: Any, submit: Any) -> None:
    user, stranger = await service.user(), await service.user()
    admin = service.client(await service.key("root", "admin"))
    job_id = await submit(user)
    before = (await user.get(f"/jobs/{job_id}")).json()
    for (method, template), scope in SCOPES.items():
        if "{job_id}" in template and scope.startswith("jobs:"):
            answer = await stranger.request(
                method,
                "http://octrain" + _path(template, job_id),
                json=BODIES.get(template, {}),
            )
            assert answer.status_code == 404, (method, template)
    assert (await user.get(f"/jobs/{job_id}")).json() == before
    assert job_id not in (await stranger.get("/jobs")).text
    assert job_id in (await admin.get("/jobs?limit=500")).text
    assert (await admin.post(f"/jobs/{job_id}/cancel")).json()["status"] == "cancelled"


async def test_keys_are_shown_once_and_revoked(service: Any) -> None:
    admin = service.client(await service.key("root", "admin"))
    body = {"name": "laptop", "owner": "ada", "scopes": ["jobs:read"]}
    made = await admin.post("/keys", json=body)
    assert made.status_code == 201
    key = made.json()["key"]
    listed = await admin.get("/keys")
    assert key not in listed.text
    assert made.json()["id"] in listed.text
    rows = await service.sql("SELECT * FROM api_keys")
    assert not any(key in str(row) for row in rows), "only the hash is stored"
    assert (await service.client(key).get("/jobs")).status_code == 200
    for _ in range(2):
        revoked = await admin.delete(f"/keys/{made.json()['id']}")
        assert revoked.json()["revoked_at"]
    assert (await service.client(key).get("/jobs")).status_code == 401
    assert (await admin.delete("/keys/key_x")).status_code == 404
    assert (await admin.post("/keys", json=body | {"scopes": ["root"]})).status_code == 422


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nothing", 404, "not-found"),
        ("GET", "/v1/jobs/job_x", 404, "not-found"),
        ("PUT", "/v1/jobs", 405, "method-not-allowed"),
        ("GET", "/v1/jobs/a%00b", 400, "bad-request"),
        ("GET", "/v1/jobs?name=%00", 400, "bad-request"),
        ("GET", "/v1/jobs?limit=x", 422, "request-invalid"),
        ("GET", "/v1/jobs/job_x?wait=1e9", 422, "request-invalid"),
    ],
)
async def test_errors_are_problem_documents(
    service: Any, method: str, path: str, status: int, kind: str
) -> None:
    user = await service.user()
    answer = await user.request(method, f"http://octrain{path}")
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["type"] == f"/problems/{kind}"
    assert problem["status"] == status
    assert problem["title"]
    assert problem["detail"]


async def test_a_parameter_that_a_route_does_not_know_is_refused(lone_service: Any) -> None:
    service = lone_service
    clients = {
        scope: service.client(await service.key("walker", scope))
        for scope in ("jobs:read", "jobs:write", "admin", "node")
    }
    routes = {**SCOPES, ("GET", "/healthz"): "any", ("GET", "/readyz"): "any"}
    for (method, template), scope in routes.items():
        for query in ("no-such=1", "no-such"):
            url = f"http://octrain{_path(template)}?{query}"
            client = clients["jobs:read" if scope == "any" else scope]
            answer = await client.request(method, url, json=BODIES.get(template, {}))
            assert answer.status_code == 422, (method, template)
            if method != "HEAD":
                [error] = answer.json()["errors"]
                assert error["pointer"] == "/query/no-such"
    reader = clients["jobs:read"]
    misspelt = (await reader.get("/jobs?staus=queued&label.team=a&label.=b")).json()
    assert [e["pointer"] for e in misspelt["errors"]] == ["/query/staus", "/query/label."]
    assert misspelt["errors"][0]["suggestion"] == "status"
    assert "created_after" in misspelt["errors"][0]["message"]
    assert (await reader.get("/jobs?status=queued&label.team=a")).status_code == 200


async def test_large_bodies_are_refused(service: Any, spec: Any) -> None:
    user = await service.user()
    spec["notes"] = "x" * 2**21
    answer = await user.post("/jobs", json=spec)
    assert (answer.status_code, answer.json()["type"]) == (413, "/problems/body-too-large")

    async def endless() -> Any:
        for _ in range(40):
            yield b"x" * 2**20

    for content in (b"x" * (33 * 2**20), endless()):
        answer = await user.post("/jobs", content=content)
        assert (answer.status_code, answer.json()["type"]) == (413, "/problems/body-too-large")


async def test_an_unknown_error_tells_nothing(service: Any, caplog: Any) -> None:
    @service.app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("the password is hunter2")

    answer = await service.client(None).get("http://octrain/broken")
    assert answer.status_code == 500
    assert answer.json()["type"] == "/problems/internal-error"
    assert "hunter2" not in answer.text
    assert "hunter2" in caplog.text, "the log has it"


async def test_health_tests_real_work(service: Any) -> None:
    client = service.client(None)
    assert (await client.get("http://octrain/healthz")).json() == {"status": "ok"}
    ready = await client.get("http://octrain/readyz")
    assert ready.status_code == 200
    assert (ready.json()["checks"]["database"], ready.json()["checks"]["schema"]) == ("ok", "ok")


async def test_readiness_without_a_schema_or_a_database(lone_service: Any) -> None:
    client = lone_service.client(None)
    await lone_service.sql("UPDATE alembic_version SET version_num = 'other'")
    answer = await client.get("http://octrain/readyz")
    assert answer.status_code == 503
    assert "octrain migrate" in answer.json()["checks"]["schema"]


async def test_docs_need_no_other_address(service: Any) -> None:
    client = service.client(None)
    page = await client.get("http://octrain/docs")
    assert page.status_code == 200
    assert not re.findall(r"""(?:src|href)=["']https?:""", page.text)
    assets = re.findall(r"""["'](/docs/assets/[^"']+)["']""", page.text)
    assert len(assets) >= 3
    for asset in assets:
        assert (await client.get(f"http://octrain{asset}")).status_code == 200


async def test_the_example_of_the_docs_works_when_pasted(service: Any) -> None:
    document = (await service.client(None).get("http://octrain/openapi.json")).json()
    body = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]
    user = await service.user()
    for example in body["examples"].values():
        assert (await user.post("/jobs", json=example["value"])).status_code == 201
    references = set(
        re.findall(r'"\$ref": ?"#/components/schemas/([^"]+)"', str(document).replace("'", '"'))
    )
    assert references
    assert references <= set(document["components"]["schemas"])
    ids = [o["operationId"] for p in document["paths"].values() for o in p.values()]
    assert len(ids) == len(set(ids))
