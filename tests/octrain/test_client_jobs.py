"""Jobs as the client lists them, waits for them and shows them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest

from octrain.client import (
    JobData,
    JobFailed,
    Metrics,
    MissingExtra,
    NotFound,
    Series,
    WaitTimeout,
)
from octrain.client.curves import job_html

JobObject = Callable[..., dict[str, Any]]


def test_list_follows_the_pages_and_stops_at_the_limit(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    def page(request: Any) -> Any:
        start = int(request.query.get("cursor", 0))
        size = int(request.query["limit"])
        items = [job_object(id=f"job_{n}") for n in range(start, min(start + size, 150))]
        more = str(start + size) if start + size < 150 else None
        return reply({"items": items, "next_cursor": more})

    server.routes["GET /v1/jobs"] = page
    assert len([job.id for job in client.jobs.list()]) == 150
    assert len(list(client.jobs.list(limit=120, labels={"team": "nlp"}))) == 120
    assert server.requests[-1].query["label.team"] == "nlp"
    assert len(list(client.jobs.list(limit=7))) == 7


def test_a_newer_server_breaks_nothing(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    newer = job_object(
        status="hibernating",
        reason="full_moon",
        shiny={"new": True},
        latest_metrics={"train/loss": "NaN", "train/grad_norm": "Infinity"},
    )
    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(newer)
    job = client.jobs.get("job_1")
    assert (job.status, job.data.reason) == ("hibernating", "full_moon")
    assert math.isnan(job.data.latest_metrics["train/loss"])
    assert job.data.latest_metrics["train/grad_norm"] == math.inf
    assert job.data.model_extra == {"shiny": {"new": True}}
    again = json.loads(job.data.model_dump_json())
    assert again["latest_metrics"] == {"train/loss": "NaN", "train/grad_norm": "Infinity"}


def test_wait_long_polls_from_the_version_it_knows(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    def answer(request: Any) -> Any:
        if "since_version" not in request.query:
            return reply(job_object(version=4))
        assert request.query["since_version"] == "4"
        return reply(job_object(version=5, status="failed", is_final=True, reason="diverged"))

    server.routes["GET /v1/jobs/job_1"] = answer
    job = client.jobs.get("job_1")
    assert job.wait().status == "failed"
    with pytest.raises(JobFailed, match="diverged"):
        job.wait(check=True)


def test_wait_outlasts_a_server_that_is_started_again(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    away = [reply({"detail": "later"}, 503, {"Retry-After": "0"})] * 6  # a request bears 3
    ended = job_object(status="succeeded", is_final=True)
    answers = iter([reply(job_object()), reply(job_object()), *away, reply(ended)])
    server.routes["GET /v1/jobs/job_1"] = lambda r: next(answers)
    assert client.jobs.get("job_1").wait().status == "succeeded"
    gone = iter([reply(job_object()), reply(job_object()), reply({"detail": "none"}, 404)])
    server.routes["GET /v1/jobs/job_1"] = lambda r: next(gone)
    with pytest.raises(NotFound):
        client.jobs.get("job_1").wait()


def test_wait_gives_up_after_its_timeout(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object())
    with pytest.raises(WaitTimeout, match="still running"):
        client.jobs.get("job_1").wait(timeout=0.2)


def test_metrics_become_numbers_and_arrays(
    client: Any, server: Any, reply: Any, job_object: JobObject
) -> None:
    np = pytest.importorskip("numpy")
    series = {"name": "train/loss", "attempt": 1, "points": [[1, 3.5], [2, "NaN"], [3, 2.5]]}
    server.routes["GET /v1/jobs/job_1"] = lambda r: reply(job_object())
    server.routes["GET /v1/jobs/job_1/metrics"] = lambda r: reply({"series": [series]})
    (found,) = client.jobs.get("job_1").metrics("train/loss", "eval/loss", max_points=100)
    assert server.requests[-1].query == {"keys": "train/loss,eval/loss", "max_points": "100"}
    assert found.steps == [1, 2, 3]
    np.testing.assert_array_equal(found.to_numpy(), [[1, 3.5], [2, np.nan], [3, 2.5]])


def test_jobs_beside_each_other_in_one_frame() -> None:
    pytest.importorskip("pandas")
    found = Metrics(
        [
            Series(job_id="job_1", name="train/loss", attempt=1, points=[(1, 3.0), (2, 2.9)]),
            Series(job_id="job_1", name="train/loss", attempt=2, points=[(2, 2.0)]),
            Series(job_id="job_2", name="train/loss", attempt=1, points=[(1, 5.0), (2, 4.0)]),
        ]
    )
    wide = found.to_pandas(wide=True)
    assert wide[("job_1", "train/loss")].tolist() == [3.0, 2.0], "the later attempt's"
    assert wide[("job_2", "train/loss")].tolist() == [5.0, 4.0]
    assert list(Metrics(found[:2]).to_pandas(wide=True).columns) == ["train/loss"]


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Metrics([Series(name="a", points=[(1, 2.0)])])
    for module, convert in (
        ("numpy", found.to_numpy),
        ("pandas", found.to_pandas),
        ("pyarrow", found.to_arrow),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(
            MissingExtra, match=rf"needs {module}: pip install 'octrain\[analysis\]'"
        ):
            convert()


def test_a_notebook_shows_a_job_without_trusting_it(job_object: JobObject) -> None:
    evil = job_object(name="<script>", detail="<img onerror=x>", reason="<b>")
    points = [(1, 3.0), (2, 2.5), (3, math.nan), (4, 2.0), (5, 1.0)]
    page = job_html(JobData.model_validate(evil), [Series(name="<i>", points=points)])
    assert page.count("<polyline") == 2, "NaN breaks the line"
    assert not any(tag in page for tag in ("<script", "<img", "<i>", "onerror=x>"))
    assert "nan" not in page
    assert "<svg" not in job_html(JobData.model_validate(evil), [])
