"""The real application at a real socket, and a node that runs what tests tell it to."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from pathlib import Path
from typing import Any

import httpx

from octrain_api.app import create_app
from octrain_api.controller.scheduler import Scheduler
from octrain_api.database import Database
from octrain_api.keys.schemas import KeyRequest
from octrain_api.keys.service import KeyService
from octrain_api.server import Server, make_server
from octrain_api.settings import Settings


class LiveServer:
    """The API in a thread of its own, until ``close``."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._server: Server | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(60)
        assert self.url, "the server did not start"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        self._server = make_server(create_app(self.settings), self.settings.http, "127.0.0.1", 0)
        serving = asyncio.ensure_future(self._server.serve())
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)
        if self._server.started:
            port = self._server.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
        self._ready.set()
        await serving

    def close(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join()

    def key(self, owner: str, *scopes: str) -> str:
        """A new API key."""

        async def make(database: Database) -> str:
            request = KeyRequest(name="test", owner=owner, scopes=list(scopes))
            async with database.transaction() as session:
                return (await KeyService(session).create(request)).key

        return str(self._with_database(make))

    def schedule(self) -> None:
        """Place what can be placed."""

        async def tick(database: Database) -> None:
            scheduler = Scheduler(database, self.settings.controller, self.settings.scheduler)
            await scheduler.run()

        self._with_database(tick)

    def _with_database(self, function: Any) -> Any:
        async def whole() -> Any:
            database = Database(self.settings.database)
            try:
                return await function(database)
            finally:
                await database.close()

        return asyncio.run(whole())


class Node:
    """A CPU node's agent and supervisor, as far as the API can see them."""

    def __init__(self, server: LiveServer, name: str) -> None:
        self.server = server
        self.name = name
        key = server.key("operations", "node")
        self._http = httpx.Client(
            base_url=f"{server.url}/v1", headers={"Authorization": f"Bearer {key}"}, timeout=30
        )
        engine = {"ok": True, "reasons": [], "version": None}
        answer = self._post(
            "/nodes/register",
            {
                "name": name,
                "boot_id": "boot",
                "hostname": "host",
                "version": "0.1.0",
                "device_kinds": ["cpu"],
                "cpu_slots": 64,
                "gpus": [],
                "engines": {"emulated": engine, "amp": engine},
                "roots": [],
                "private_roots": False,
                "artifact_url": server.settings.storage.artifact_url,
            },
        )
        self.id = answer["node_id"]
        self._sequence: dict[str, int] = {}
        self._attempts: dict[str, dict[str, Any]] = {}

    def close(self) -> None:
        self._http.close()

    def beat(self) -> None:
        """Be heard: a slow test may have taken longer than a node may be silent."""
        self._post(f"/nodes/{self.id}/heartbeat", {"active_attempts": []})

    def take(self, job_id: str) -> None:
        """Begin the job."""
        self.beat()
        self.server.schedule()
        attempt = self._attempt_id(job_id)
        claim = {"node_id": self.id, "supervisor": "supervisor"}
        self._attempts[job_id] = self._post(f"/attempts/{attempt}/claim", claim)
        self._sequence[job_id] = 0
        self.tell(job_id, {"type": "phase", "phase": "training"})

    def tell(self, job_id: str, *records: dict[str, Any]) -> None:
        """Send telemetry records, numbered and timed."""
        first = self._sequence[job_id] + 1
        numbered = [
            {"seq": first + n, "time": float(first + n), **record}
            for n, record in enumerate(records)
        ]
        self._sequence[job_id] += len(records)
        self._write(job_id, "telemetry", first_seq=first, records=numbered)

    def model(self, job_id: str, files: dict[str, bytes]) -> None:
        """Register an exported model of these files."""
        root = Path(self.server.settings.storage.artifact_url.removeprefix("file://"))
        number = self._attempts[job_id]["attempt"]
        folder = root / "jobs" / job_id / "attempts" / str(number) / "model"
        listed = []
        for path, content in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            listed.append({"path": path, "size": len(content), "sha256": digest})
        self._write(
            job_id, "artifacts", kind="model", name="model", url=folder.as_uri(), files=listed
        )

    def finish(self, job_id: str, outcome: str = "succeeded", reason: str = "completed") -> None:
        """End the attempt."""
        self._write(job_id, "finish", outcome=outcome, reason=reason)

    def _attempt_id(self, job_id: str) -> str:
        key = self.server.key("anybody", "admin")
        headers = {"Authorization": f"Bearer {key}"}
        job = self._http.get(f"/jobs/{job_id}", headers=headers).json()
        return str(job["attempts"][-1]["id"])

    def _write(self, job_id: str, action: str, **body: Any) -> None:
        attempt = self._attempts[job_id]
        body["fencing_token"] = attempt["fencing_token"]
        self._post(f"/attempts/{attempt['attempt_id']}/{action}", body)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._http.post(path, json=body)
        assert answer.is_success, answer.text
        return dict(answer.json())
