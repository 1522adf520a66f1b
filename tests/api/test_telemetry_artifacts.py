"""What a sink of telemetry wrote is an artifact like any other."""

from __future__ import annotations

from typing import Any


async def test_event_files_are_an_artifact_of_the_job(
    worker: Any, user: Any, running_job: str
) -> None:
    claim = worker.attempt
    store = worker.service.settings.storage.artifact_url
    registered = await worker.post(
        "artifacts",
        kind="telemetry",
        name="tensorboard",
        step=5,
        url=f"{store}/{claim['artifact_prefix']}/tensorboard",
        files=[{"path": "events.out.tfevents.1.host.2.3", "size": 10, "sha256": "0" * 64}],
    )
    assert registered.status_code == 200, registered.text
    items = (await user.get(f"/jobs/{running_job}/artifacts")).json()["items"]
    [found] = [item for item in items if item["kind"] == "telemetry"]
    assert found["name"] == "tensorboard"
