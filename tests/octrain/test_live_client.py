"""Both clients against the real application over real sockets."""

from __future__ import annotations

import asyncio
import math
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import octrain
from octrain.client import (
    Conflict,
    InvalidRequest,
    JobFailed,
    NotAuthenticated,
    NotFound,
    ScopeMissing,
    SpecInvalid,
    WaitTimeout,
    WrongStatus,
)
from tests.octrain.service import LiveServer, Node

MODEL = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 4000}


@pytest.fixture
def client(live: LiveServer, owner_key: str) -> Iterator[octrain.Client]:
    with octrain.Client(live.url, owner_key) as made:
        yield made


@pytest.fixture
async def async_client(live: LiveServer, owner_key: str) -> AsyncIterator[octrain.AsyncClient]:
    async with octrain.AsyncClient(live.url, owner_key) as made:
        yield made


def losses(first: int, *values: Any) -> list[dict[str, Any]]:
    return [
        {"type": "metrics", "step": first + n, "values": {"train/loss": value}}
        for n, value in enumerate(values)
    ]


def test_a_job_from_draft_to_download(
    client: octrain.Client, node: Node, spec: dict[str, Any], tmp_path: Path
) -> None:
    job = client.jobs.create(spec, draft=True)
    assert job.status == "draft"
    job.edit(labels={"team": None, "stage": "try"}, notes="a note", spec={"name": "renamed"})
    assert (job.data.labels, job.data.notes) == ({"stage": "try"}, "a note")
    assert job.start() is job
    assert job.status == "queued"
    with pytest.raises(WaitTimeout):
        job.wait(timeout=0.05)
    node.take(job.id)
    node.tell(job.id, *losses(1, 5.0, 4.0, "NaN", 3.0))
    node.model(job.id, MODEL)
    node.finish(job.id)
    assert job.wait(timeout=60, check=True).status == "succeeded"

    events = list(job.stream(include=["status", "metrics"], metrics=["train/*"]))
    assert events[-1].type == "end"
    assert "running" in [e.data.get("status") for e in events if e.type == "status"]

    found = job.metrics("train/*")
    assert found[0].steps == [1, 2, 3, 4]
    assert found.to_numpy()["train/loss"].shape == (4, 2)
    frame = found.to_pandas()
    assert list(frame.columns) == ["job_id", "name", "attempt", "step", "value"]
    assert frame["value"].isna().tolist() == [False, False, True, False]
    assert found.to_pandas(wide=True).loc[4, "train/loss"] == 3.0
    table = found.to_arrow()
    assert (table.num_rows, set(table["job_id"].to_pylist())) == (4, {job.id})
    assert math.isnan(table["value"][2].as_py())
    assert [m.value for m in job.latest_metrics("train/loss")] == [3.0]
    saved = job.save_metrics(tmp_path / "m.csv", "train/loss").read_text().splitlines()
    assert len(saved) == 5

    folder = job.download("model", tmp_path / "model")
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == MODEL
    with tarfile.open(job.download_model(tmp_path / "model.tar")) as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert set(MODEL) <= names
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []

    page = job._repr_html_()
    assert "<polyline" in page
    assert "train/loss" in page

    kinds = [event.kind for event in job.events()]
    job.delete()
    with pytest.raises(NotFound):
        client.jobs.get(job.id)
    assert [event.kind for event in client.jobs.events(job.id)][: len(kinds)] == kinds


def test_an_archive_goes_on_where_it_broke_off(
    client: octrain.Client, node: Node, spec: dict[str, Any], tmp_path: Path
) -> None:
    job = client.jobs.create(spec)
    node.take(job.id)
    node.model(job.id, MODEL)
    node.finish(job.id)
    whole = job.download_model(tmp_path / "whole.tar").read_bytes()

    class Stop(Exception):
        pass

    def stop(path: str, received: int, total: int) -> None:
        if received > total // 3:
            raise Stop

    target = tmp_path / "again.tar"
    with pytest.raises(Stop):
        job.download_model(target, on_progress=stop)
    have = (tmp_path / ".again.tar.part").stat().st_size
    assert 0 < have < len(whole)
    etag = (tmp_path / ".again.tar.part.etag").read_text()
    seen: list[int] = []
    job.download_model(target, on_progress=lambda p, r, t: seen.append(r))
    assert seen[0] > have, "it began after what was there"
    assert target.read_bytes() == whole

    # Of another version of the model nothing is kept.
    (tmp_path / ".again.tar.part").write_bytes(b"x" * 1000)
    (tmp_path / ".again.tar.part.etag").write_text('"another"')
    assert job.download_model(target).read_bytes() == whole
    # Broken off between the last byte and the name.
    (tmp_path / ".again.tar.part").write_bytes(whole)
    (tmp_path / ".again.tar.part.etag").write_text(etag)
    target.unlink()
    assert job.download_model(target).read_bytes() == whole
    assert {path.name for path in tmp_path.iterdir()} == {"whole.tar", "again.tar"}


def test_lists_are_narrowed_and_sorted(client: octrain.Client, spec: dict[str, Any]) -> None:
    ids = [client.jobs.create(spec | {"name": f"n{n}", "priority": n}).id for n in range(3)]
    assert [job.id for job in client.jobs.list(sort="priority")] == ids
    assert [job.id for job in client.jobs.list(q="n1")] == [ids[1]]
    assert [job.id for job in client.jobs.list(labels={"team": "nlp"}, limit=2)] == ids[:0:-1]
    assert list(client.jobs.list(created_before="2020-01-01T00:00:00Z")) == []
    copy = client.jobs.get(ids[0]).clone({"training": {"optimizer": {"lr": 1e-4}}}, draft=True)
    assert copy.data.spec["training"]["optimizer"]["lr"] == 1e-4
    results = client.jobs.cancel_many([ids[0], "job_none"])
    assert [(r.status, r.problem is None) for r in results] == [("cancelled", True), (None, False)]
    assert {r.job_id for r in client.jobs.cancel_many(every=True)} >= set(ids[1:])


def test_problems_are_exceptions_of_their_types(
    client: octrain.Client, live: LiveServer, spec: dict[str, Any]
) -> None:
    with pytest.raises(SpecInvalid) as wrong:
        client.jobs.create(spec | {"recipe": {"amax_hist_len": 3}})
    assert any(p.startswith("/recipe/") for p in wrong.value.pointers)
    assert client.jobs.validate(spec | {"typo": 1}, wait=0).valid is False
    with pytest.raises(NotFound):
        client.jobs.get("job_none")
    job = client.jobs.create(spec, idempotency_key="one")
    assert client.jobs.create(spec, idempotency_key="one").id == job.id
    with pytest.raises(InvalidRequest):
        client.jobs.create(spec | {"name": "other"}, idempotency_key="one")
    job.cancel()
    with pytest.raises(WrongStatus):
        job.pause()
    assert issubclass(WrongStatus, Conflict)
    with pytest.raises(ScopeMissing):
        list(client.keys.list())
    with pytest.raises(NotAuthenticated):
        octrain.Client(live.url, "oct_wrong").nodes()


async def test_the_asynchronous_client_does_the_same(
    async_client: octrain.AsyncClient, node: Node, spec: dict[str, Any], tmp_path: Path
) -> None:
    job = await async_client.jobs.create(spec)

    async def follow() -> list[str]:
        return [event.type async for event in job.stream(include=["status", "metrics"])]

    def train() -> None:
        node.take(job.id)
        node.tell(job.id, *losses(1, 2.0, 1.0))
        node.model(job.id, MODEL)
        node.finish(job.id, "failed", "diverged")

    followed, waited, _ = await asyncio.gather(follow(), job.wait(60), asyncio.to_thread(train))
    assert followed[-1] == "end"
    assert waited is job
    assert job.status == "failed"
    with pytest.raises(JobFailed):
        await job.wait(check=True)
    assert (await job.metrics("train/loss"))[0].values == [2.0, 1.0]
    assert [one.id async for one in async_client.jobs.list()] == [job.id]
    folder = await job.download("model", tmp_path / "m")
    assert (folder / "config.json").read_bytes() == b"{}"
    archive = await job.download_model(tmp_path / "m.tar")
    assert tarfile.is_tarfile(archive)
    await job.load_curve()
    assert "<polyline" in job._repr_html_()
    with pytest.raises(SpecInvalid):
        await async_client.jobs.create({})


async def test_data_sets_are_uploaded_from_a_loop(
    async_client: octrain.AsyncClient, tmp_path: Path
) -> None:
    file = tmp_path / "train.txt"
    file.write_text("words and words\n" * 100)
    told: list[int] = []
    uploaded = await async_client.datasets.upload(
        file, wait=False, progress=lambda received, total: told.append(received)
    )
    assert told[-1] == file.stat().st_size
    assert [one.id async for one in async_client.datasets.list()] == [uploaded.id]
    with pytest.raises(NotFound):
        await async_client.datasets.get("none")


def test_recipes_webhooks_keys_and_usage(live: LiveServer, client: octrain.Client) -> None:
    assert any(recipe.preset for recipe in client.recipes.list())
    client.recipes.save("mine", {"recipe": {"engine": "amp", "dtype": "bf16"}}, "first")
    assert client.recipes.save("mine", {"recipe": {"engine": "amp", "dtype": "fp32"}}).version == 2
    assert client.recipes.get("mine", 1).fragment["recipe"]["dtype"] == "bf16"
    assert [one.version for one in client.recipes.versions("mine")] == [2, 1]
    client.recipes.withdraw("mine")
    assert "mine" not in [recipe.name for recipe in client.recipes.list()]

    hook = client.webhooks.create("https://example.com/hook", events=["job.failed"])
    assert hook.secret.startswith("whsec_")
    assert hook.secret not in repr(hook)
    assert client.webhooks.edit(hook.id, active=False).active is False
    assert client.webhooks.rotate(hook.id, keep_seconds=0).secret != hook.secret
    assert [one.id for one in client.webhooks.list()] == [hook.id]
    assert list(client.webhooks.deliveries(hook.id)) == []
    client.webhooks.delete(hook.id)

    assert client.usage().queued == 0
    with octrain.Client(live.url, live.key("root", "admin")) as admin:
        made = admin.keys.create("laptop", "ada", ["jobs:read"])
        assert made.key not in repr(made)
        rotated = admin.keys.rotate(made.id, grace_seconds=0)
        assert rotated.key != made.key
        assert admin.keys.edit(made.id, name="desk").name == "desk"
        assert admin.keys.revoke(made.id).revoked_at is not None
        assert made.id not in [key.id for key in admin.keys.list(revoked=False)]
        assert admin.set_quotas("ada", queued=3).queued == 3
        assert admin.usage("ada").quotas.queued == 3
        admin.reset_quotas("ada")
        assert any(entry.target == made.id for entry in admin.audit(limit=50))
