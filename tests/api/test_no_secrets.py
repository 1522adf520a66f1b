"""One marker in the place of every secret; then everything that comes out is searched for it."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import httpx

from octrain.client.connection import Connection
from octrain.local.state import StackState
from octrain_api.app import create_app
from octrain_api.keys.principal import hash_key
from octrain_api.observability.logs import JsonFormatter, TextFormatter
from octrain_api.settings import BrokerSettings, DatabaseSettings, HttpSettings, Settings
from octrain_worker.settings import ApiSettings

MARKER = "zebra7f3a9c1d5e2b8a4f6c0d9e8b7a6f5c4d3e2b1a"


async def test_no_secret_in_an_answer_an_event_or_a_log(
    lone_service: Any, spec: Any, monkeypatch: Any
) -> None:
    """Keys and tokens with the marker in them, used rightly and wrongly, at every door."""
    stream = io.StringIO()
    handlers = [logging.StreamHandler(stream) for _ in range(2)]
    for handler, formatter in zip(handlers, (TextFormatter(), JsonFormatter()), strict=True):
        handler.setFormatter(formatter)
    root = logging.getLogger()
    level = root.level
    root.handlers += handlers
    root.setLevel(logging.DEBUG)
    numbers = iter(range(1000))
    monkeypatch.setattr("octrain_api.keys.service.new_key", lambda: f"oct_{MARKER}{next(numbers)}")
    monkeypatch.setattr(
        "octrain_api.keys.enrolment.new_token", lambda: f"octn_{MARKER}{next(numbers)}"
    )
    broker = BrokerSettings(url=f"redis://:{MARKER}@127.0.0.1:1/0")
    http = HttpSettings(alive_interval=3600, tls_key_password=MARKER)  # type: ignore[arg-type]
    settings = lone_service.settings.model_copy(update={"broker": broker, "http": http})
    app = create_app(settings)
    texts: list[str] = []
    shown: list[str] = []
    try:
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://octrain") as client:

                async def call(
                    method: str, path: str, key: str | None, shows: bool = False, **more: Any
                ) -> httpx.Response:
                    headers = {"Authorization": f"Bearer {key}"} if key else {}
                    answer = await client.request(method, path, headers=headers, **more)
                    (shown if shows else texts).append(answer.text + str(answer.headers))
                    return answer

                admin = await lone_service.key("root", "admin", "jobs:write")
                assert MARKER in admin
                body = {"name": "k", "owner": "ada", "scopes": ["jobs:read", "jobs:write"]}
                made = (await call("POST", "/v1/keys", admin, True, json=body)).json()
                await call("POST", f"/v1/keys/{made['id']}/rotate", admin, True)
                token = await call("POST", "/v1/nodes/tokens", admin, True, json={"owner": "o"})
                enrol = {"token": token.json()["token"], "node": "n-1"}
                await call("POST", "/v1/nodes/enrol", None, True, json=enrol)
                await call("POST", "/v1/nodes/enrol", None, json=enrol)
                await call("POST", "/v1/nodes/enrol", None, json=enrol | {"more": MARKER})
                for key in (made["key"], f"oct_{MARKER}-wrong", admin, "x" + made["key"]):
                    await call("GET", "/v1/jobs", key)
                    await call("POST", "/v1/jobs", key, json=spec)
                    await call("POST", "/v1/jobs", key, content=b"{")
                    await call("GET", f"/v1/keys/{made['id']}", key)
                    await call("GET", "/v1/keys", key)
                    await call("GET", "/v1/nodes/tokens", key)
                    await call("GET", "/v1/audit", key)
                    await call("GET", "/metrics", key)
                    await call("GET", "/v1/keys/self", key)
                await call("GET", "/readyz", None)

                @app.get("/broken")
                async def broken() -> None:
                    raise RuntimeError(f"connecting to postgresql://octrain:{MARKER}@db/octrain")

                assert (await call("GET", "/broken", admin)).status_code == 500
                # The database itself refuses a value: its message must not repeat it.
                await lone_service.sql("ALTER TABLE api_keys ADD CHECK (name <> 'bad')")
                answer = await call("POST", "/v1/keys", admin, json=body | {"name": "bad"})
                assert answer.status_code == 500
    finally:
        for handler in handlers:
            root.removeHandler(handler)
        root.setLevel(level)
    assert sum(MARKER in text for text in shown) == len(shown) == 4, "each is shown once"
    for text in texts:
        assert MARKER not in text
    logs = stream.getvalue()
    assert "unhandled error" in logs
    assert MARKER not in logs
    for table in ("events", "audit_log", "api_keys", "enrolment_tokens", "jobs", "rate_buckets"):
        assert MARKER not in str(await lone_service.sql(f"SELECT * FROM {table}"))
    assert hash_key(made["key"]) not in "".join(texts) + logs


def test_no_secret_in_a_repr() -> None:
    url = f"postgresql://octrain:{MARKER}@db/octrain"
    settings = Settings(
        database=DatabaseSettings(url=url),
        broker=BrokerSettings(url=f"redis://:{MARKER}@broker/0"),
        http=HttpSettings(tls_key_password=MARKER),  # type: ignore[arg-type]
    )
    state = StackState()
    state.api.key = state.postgres.password = state.valkey.password = MARKER
    state.api.node_keys = {"n": MARKER}
    worker = ApiSettings(node_key=MARKER, node_token=MARKER)  # type: ignore[arg-type]
    connection = Connection("http://x", MARKER, "here")
    for thing in (settings, settings.database, settings.broker, state, worker, connection):
        assert MARKER not in repr(thing)
        assert MARKER not in str(thing)
    assert MARKER not in json.dumps(settings.model_dump(mode="json", include={"http"}))
