"""A job of two ranks through the whole service."""

from __future__ import annotations

import os
import signal

import pytest

from fp8core.training.ranks.place import RankPlace
from octrain.local.processes import is_alive

pytestmark = pytest.mark.e2e

STEPS = 80


def test_a_killed_rank_leads_to_a_restart_from_the_checkpoint(service):
    job = service.submit(
        "two-ranks",
        training={"steps": STEPS},
        checkpoint={"every_steps": 10, "keep_last": 2},
        limits={"max_restarts": 2, "restart_backoff_seconds": 0},
        resources={"device": "cpu", "cpu_ranks": 2},
    )
    service.step(job, 12)
    service.until(lambda: "checkpoint" in {a.kind for a in job.artifacts()}, "a checkpoint")
    (node,) = [node for node in service.client.nodes() if node.name == "local"]
    assert node.cpu_slots_used == 2, "each rank takes a slot"
    (folder,) = (service.attempt_folder(job) / "work").glob(".ranks-*")
    pids = [RankPlace(rank, 2, folder).read_pid() for rank in range(2)]
    os.kill(pids[1], signal.SIGKILL)
    service.until(lambda: not any(map(is_alive, pids)), "no rank is left", 30)
    service.end(job)
    first, second = job.data.attempts
    assert (first.reason, second.reason) == ("trainer_crashed", "completed")
    assert "rank 1 of 2 was ended by SIGKILL" in first.detail
    series = {s.attempt: s.steps for s in job.metrics("train/loss")}
    for steps in series.values():
        assert steps == list(range(steps[0], steps[-1] + 1)), "twice, or left out"
    assert 1 < series[2][0] <= series[1][-1] + 1
    assert series[2][-1] == STEPS
    row = service.http.get(f"/v1/jobs/{job.id}/precision").raise_for_status().json()
    communication = row["rows"]["communication"]
    assert (communication["ranks"], list(communication["formats"])) == (2, ["fp32"])
    lines = service.http.get(f"/v1/jobs/{job.id}/logs").raise_for_status().text
    assert "[rank 0] " in lines
