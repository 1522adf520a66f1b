"""Series of one job past the framework: what the endpoint says, and nothing that it would not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from octrain_api.metrics import direct, layouts, lookup

PLAIN: list[dict[str, Any]] = [
    {},
    {"name": "train/loss"},
    {"name": ["train/loss", "fp8/*"], "form": "buckets"},
    {"keys": "train/loss,fp8/a", "max_points": 5, "form": "buckets"},
    {"name": "train/loss", "max_points": 9, "x": "time"},
    {"from_step": 10, "to_step": 20, "x": "tokens", "attempt": 1},
    {"since": 1, "format": "csv"},
    {"name": ""},
    {"format": "arrow"},
    {"from_step": 40, "form": "buckets"},
    {"name": "no%20such/näme"},
]
REFUSED: list[Any] = [
    {"max_points": 2},
    {"max_points": ""},
    {"from_step": "x"},
    {"form": "bars"},
    {"nmae": "train/loss"},
    {"job": "job_other"},
    {"attempt": 0},
    {"since": -1},
    {"format": "xml"},
    {"from_step": 2**63},
]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The queries that were answered past the framework."""
    found: list[str] = []
    series_of = direct.series_of

    async def counted(request: Any, *rest: Any) -> Any:
        answer = await series_of(request, *rest)
        found.append(request.url.query)
        return answer

    monkeypatch.setattr(direct, "series_of", counted)
    return found


async def fill(job: Any, helpers: Any) -> None:
    await job.send(
        *(
            helpers.metric(step, {"train/loss": math.nan if step == 7 else 1 / step, "fp8/a": step})
            for step in range(1, 60)
        )
    )


async def test_both_ways_answer_alike(
    job: Any, helpers: Any, answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(job, helpers)
    for query in PLAIN:
        before = len(answers)
        short = await job.user.get(f"/jobs/{job.id}/metrics", params=query)
        assert len(answers) == before + 1, query
        with monkeypatch.context() as patched:
            patched.setattr(direct, "_asked", lambda _: None)
            long = await job.user.get(f"/jobs/{job.id}/metrics", params=query)
        assert len(answers) == before + 1
        assert short.status_code == long.status_code == 200, (query, short.text)
        assert short.content == long.content
        assert short.headers["content-type"] == long.headers["content-type"]
        assert set(short.headers) == set(long.headers)
    # Without a version, and by what the client accepts.
    plain = await job.user.get(
        f"http://octrain/jobs/{job.id}/metrics", headers={"accept": "text/csv"}
    )
    assert plain.headers["content-type"].startswith("text/csv")
    assert len(answers) == len(PLAIN) + 1


async def test_what_is_wrong_is_said_by_the_endpoint(
    job: Any, helpers: Any, answers: list[str]
) -> None:
    await fill(job, helpers)
    path = f"/jobs/{job.id}/metrics"
    for query in REFUSED:
        answer = await job.user.get(path, params=query)
        assert answer.status_code == 422, (query, answer.text)
        (error,) = answer.json()["errors"]
        assert error["pointer"] == f"/query/{next(iter(query))}"
    # The last one counts, as everywhere; two are in doubt.
    twice = await job.user.get(f"{path}?form=points&form=buckets")
    assert "buckets" in twice.json()["series"][0]
    long = await job.user.get(path, params={"name": "x" * 5000})
    assert long.json()["series"] == []
    assert answers == []


async def test_only_who_may_see_the_job_does(job: Any, helpers: Any, answers: list[str]) -> None:
    await fill(job, helpers)
    path = f"/jobs/{job.id}/metrics"
    stranger = await job.service.user("eve")
    nobody = job.service.client(None)
    answer = await stranger.get(path)
    assert answer.status_code == 404
    assert answer.json()["type"].endswith("not-found")
    assert (await job.user.get("/jobs/job_none/metrics")).status_code == 404
    assert (await job.node.get(path)).status_code == 403
    assert (await nobody.get(path)).status_code == 401
    assert answers == []
    # Neither of several jobs is shown where one is another's.
    query = {"job": [job.id, "job_none"]}
    assert (await job.user.get("/metrics/query", params=query)).status_code == 404


async def test_an_answer_is_counted_to_its_route(
    job: Any, helpers: Any, answers: list[str]
) -> None:
    await fill(job, helpers)
    await job.get(name="train/loss")
    assert len(answers) == 1
    admin = job.service.client(await job.service.key("ada", "admin"))
    scraped = (await admin.get("http://octrain/metrics")).text
    assert 'route="/jobs/{job_id}/metrics"' in scraped


async def test_a_curve_takes_two_statements(
    job: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One finds the job, its blocks and its series, one reads the buckets; the names of columns
    are read once in a process."""
    records = [helpers.metric(step, {"train/loss": float(step)}) for step in range(2000)]
    await job.send(*records)
    await job.restart()
    await job.compact()
    statements: list[str] = []
    fetch = lookup.MetricLookup._fetch

    async def counted(self: Any, query: Any, **values: Any) -> Any:
        statements.append(query)
        return await fetch(self, query, **values)

    monkeypatch.setattr(lookup.MetricLookup, "_fetch", counted)
    taken = []
    for _ in range(2):
        statements.clear()
        (series,) = (await job.get(name="train/loss", form="buckets", max_points=10))["series"]
        assert series["width"] == 256
        assert sum(series["buckets"]["count"]) == 2000
        taken.append(len(statements))
    assert taken == [3, 2]


def test_layouts_are_forgotten_by_use() -> None:
    known = layouts.KnownLayouts(max_names=5)
    first = known.keep(b"1", ["a", "b"])
    known.keep(b"2", ["c", "d"])
    assert known.get(b"1") is first
    known.keep(b"3", ["e", "f"])
    assert known.get(b"2") is None
    assert known.get(b"1") is first
    # One that is too large on its own is kept until the next.
    known.keep(b"4", [str(n) for n in range(9)])
    assert [known.get(key) is None for key in (b"1", b"2", b"3", b"4")] == [True, True, True, False]
    assert known.keep(b"5", ["b", "a"]).of(["a", "none", "b"]) == [(0, "b"), (1, "a")]
    assert known.get(b"4") is None
