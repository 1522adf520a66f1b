"""A wish that a job's status does not allow is refused with what can be done instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

Submit = Callable[..., Awaitable[str]]
Asks = list[tuple[str, str]]

AGAIN = "clone it to run it again"


async def _refused(user: httpx.AsyncClient, job_id: str, asks: Asks) -> None:
    before = (await user.get(f"/jobs/{job_id}")).json()
    for action, told in asks:
        answer = await user.post(f"/jobs/{job_id}/{action}")
        assert answer.status_code == 409, (action, answer.text)
        problem = answer.json()
        assert problem["type"] == "/problems/wrong-status"
        assert problem["job_status"] == before["status"]
        assert told in problem["detail"], action
    assert (await user.get(f"/jobs/{job_id}")).json()["version"] == before["version"]


async def test_a_draft_is_to_be_started(user: httpx.AsyncClient, spec: dict[str, Any]) -> None:
    draft = (await user.post("/jobs?draft=true", json=spec)).json()["id"]
    await _refused(user, draft, [("pause", "start it, or delete it"), ("resume", "start it")])


@pytest.mark.parametrize("how", ["user", "service"])
async def test_a_job_that_saves_is_to_be_waited_for(
    worker: Any, lone_service: Any, user: httpx.AsyncClient, running_job: str, how: str
) -> None:
    if how == "user":
        assert (await user.post(f"/jobs/{running_job}/pause")).status_code == 200
        told = "ask again once it is paused"
    else:
        admin = lone_service.client(await lone_service.key("root", "admin"))
        drained = await admin.post(f"/nodes/{worker.node_id}/drain?release=true")
        assert drained.status_code == 200, drained.text
        told = "goes back to the queue by itself"
    await _refused(user, running_job, [("resume", told), ("start", told)])


async def test_a_job_that_ends_or_has_ended_is_to_be_cloned(
    worker: Any, user: httpx.AsyncClient, running_job: str
) -> None:
    asks = [(action, AGAIN) for action in ("pause", "resume", "start")]
    assert (await user.post(f"/jobs/{running_job}/cancel")).json()["status"] == "cancelling"
    await _refused(user, running_job, asks)
    assert (await worker.finish("stopped", "cancelled_by_user")).status_code == 200
    assert (await user.get(f"/jobs/{running_job}")).json()["status"] == "cancelled"
    await _refused(user, running_job, asks)
