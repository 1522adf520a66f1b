"""Benchmarks of the service, at the smallest sizes that they take: real servers, real clients."""

from __future__ import annotations

import pytest

from tests.benchmarks.programs import run


def test_placements() -> None:
    ended = run("scheduler.py", "--jobs", "40", "--nodes", "10", "--peer", "5")
    assert ended.values(r"placements +(\d+) +in") == [40]
    ended.values(r"placements committed +([\d,]+) /s\n[\s\S]*?ratio +([\d.]+)")


@pytest.mark.slow
def test_posts_and_pages() -> None:
    words = ("--clients", "1", "--seconds", "0.3", "--rounds", "1")
    ended = run("api.py", *words, "--jobs", "1000")
    ended.values(r"POST /jobs +([\d,]+) +([\d.]+)")
    ended.values(r"page of 100 of 1000 jobs +p50 ([\d.]+) ms")
    assert "a multiple of 500" in run("api.py", "--jobs", "700", code=2).errors


@pytest.mark.slow
def test_polls() -> None:
    words = ("--clients", "1", "--seconds", "0.3", "--rounds", "1", "--jobs", "10")
    ended = run("polling.py", *words)
    ended.values(r"304, key checked +([\d,]+) /s +ratio ([\d.]+)")


@pytest.mark.slow
def test_streams() -> None:
    ended = run("streams.py", "--clients", "5", "--events", "3", "--interval", "0.1")
    assert "5 subscribers, 3 events, each delivered to all" in ended.said
    ended.values(r"service +p50 +([\d.]+) ms[\s\S]*ratio ([\d.]+)")


@pytest.mark.slow
def test_metrics() -> None:
    words = ("--seconds", "1", "--writers", "1", "--read-steps", "4000", "--delete-points", "10000")
    ended = run("metrics.py", *words)
    ended.values(r"read as buckets +([\d.]+) ms p50")
    assert ended.values(r"deletion +\d+ ms for a job of (\d+) points") == [10000]


@pytest.mark.slow
def test_metrics_of_many_series() -> None:
    ended = run("metrics.py", "--parts", "sparse", "--looks", "3", "--every", "5")
    assert ended.values(r"sparse +(\d+) points") == [12300]
    refused = run("metrics.py", "--parts", "store", "sparse", code=2)
    assert "sparse is measured alone" in refused.errors


@pytest.mark.slow
def test_limits() -> None:
    ended = run("request_guards.py")
    assert len(ended.values(r"limits on +(\d+) /s +off +(\d+) /s +ratio ([\d.]+)")) == 6


@pytest.mark.slow
def test_starts() -> None:
    ended = run("startup.py", "--starts", "1", "--jobs", "1")
    ended.values(r"first start +([\d.]+) s")
    ended.values(r"POST to step 1 told +([\d.]+) s")


@pytest.mark.slow
def test_jobs_beside_the_bare_loop() -> None:
    ended = run("service_overhead.py", "--steps", "24", "--repeats", "1")
    ended.values(r"through the service: ([\d.]+) of the bare loop's tokens a second")
    assert len(ended.values(r": (\d+)% of the floor")) == 2
