"""The dashboard's files: which are sent, in which form, under which headers."""

from __future__ import annotations

import gzip
from pathlib import Path

import httpx
import pytest

from octrain_api.app import create_app
from octrain_api.dashboard import endpoints
from octrain_api.settings import DashboardSettings, Settings

SCRIPT = b"console.log('octrain');" * 50


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A build as Vite leaves it, compressed ahead, beside a file that is none of it."""
    dist = tmp_path / "dist"
    (dist / "assets").mkdir(parents=True)
    (dist / ".vite").mkdir()
    (dist / ".vite" / "manifest.json").write_text("{}")
    (dist / "index.html").write_text("<!doctype html><title>Octrain</title>")
    (dist / "octrain.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    (dist / "assets" / "index-abc123.js").write_bytes(SCRIPT)
    (dist / "assets" / "index-abc123.js.gz").write_bytes(gzip.compress(SCRIPT))
    (dist / "assets" / "index-abc123.js.br").write_bytes(b"as small as can be")
    (dist / "assets" / "index-def456.css").write_text("body{}")
    (tmp_path / "secret.txt").write_text("hunter2")
    (dist / "link.txt").symlink_to(tmp_path / "secret.txt")
    return dist


@pytest.fixture
def client(folder: Path) -> httpx.AsyncClient:
    """A browser without a key. None of this asks the database."""
    settings = Settings(dashboard=DashboardSettings(folder=folder))
    transport = httpx.ASGITransport(app=create_app(settings))
    return httpx.AsyncClient(transport=transport, base_url="http://octrain")


async def test_the_root_leads_to_the_dashboard(client: httpx.AsyncClient) -> None:
    answer = await client.get("/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/dashboard")


async def test_every_route_of_the_page_is_the_index(client: httpx.AsyncClient) -> None:
    for path in (
        "",
        "/",
        "/jobs",
        "/jobs/job_01jdx4c2m3",
        "/compare?jobs=a,b",
        "/nodes/gpu-1.rack",
    ):
        answer = await client.get(f"/dashboard{path}")
        assert answer.status_code == 200, path
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        assert "<title>Octrain</title>" in answer.text
        known = {"If-None-Match": answer.headers["etag"]}
        again = await client.get(f"/dashboard{path}", headers=known)
        assert (again.status_code, again.text) == (304, "")
    assert (await client.head("/dashboard/jobs")).status_code == 200


async def test_hashed_files_stay_for_ever_and_come_small(client: httpx.AsyncClient) -> None:
    url = "/dashboard/assets/index-abc123.js"
    tags = set()
    for accepted, coding in (
        ("gzip, deflate, br, zstd", "br"),
        ("gzip;q=1.0, br;q=0", "gzip"),
        ("GZIP", "gzip"),
        ("br;q=0.000, gzip;q=0", None),
        ("identity", None),
    ):
        async with client.stream("GET", url, headers={"Accept-Encoding": accepted}) as answer:
            raw = b"".join([part async for part in answer.aiter_raw()])
        assert answer.headers.get("content-encoding") == coding, accepted
        assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert answer.headers["vary"] == "Accept-Encoding"
        assert int(answer.headers["content-length"]) == len(raw)
        tags.add(answer.headers["etag"])
        wanted = {"br": b"as small as can be", "gzip": gzip.compress(SCRIPT), None: SCRIPT}
        if coding == "gzip":
            assert gzip.decompress(raw) == SCRIPT
        else:
            assert raw == wanted[coding]
    assert len(tags) == 3, "each form has a tag of its own"
    style = await client.get("/dashboard/assets/index-def456.css")
    assert style.headers["content-type"].startswith("text/css")
    icon = await client.get("/dashboard/octrain.svg")
    assert icon.headers["content-type"] == "image/svg+xml"
    assert icon.headers["cache-control"] == "no-cache", "its name says nothing of its content"


async def test_an_asset_that_is_gone_is_not_the_index(client: httpx.AsyncClient) -> None:
    answer = await client.get("/dashboard/assets/index-older.js")
    assert answer.status_code == 404
    assert answer.json()["type"] == "/problems/not-found"


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/..%2fsecret.txt",
        "/assets/../../secret.txt",
        "/assets/%2e%2e/%2e%2e/secret.txt",
        "//etc/passwd",
        "/link.txt",
        "/.vite/manifest.json",
        "/" + "x" * 5000,
    ],
)
async def test_nothing_beside_the_build_is_sent(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(f"http://octrain/dashboard{path}")
    assert "hunter2" not in answer.text
    assert "root:" not in answer.text
    assert answer.status_code == 404 or "<title>Octrain</title>" in answer.text


async def test_a_strict_policy_stands_on_every_answer(client: httpx.AsyncClient) -> None:
    for path in ("/dashboard", "/dashboard/jobs", "/dashboard/assets/index-abc123.js"):
        headers = (await client.get(path)).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["script-src"] == policy["style-src"] == "'self'"
        for name in ("object-src", "base-uri", "form-action", "frame-ancestors"):
            assert policy[name] == "'none'"
        assert "unsafe" not in headers["content-security-policy"]
        assert "http" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"


@pytest.fixture
def without_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout in which nobody has built the dashboard."""
    monkeypatch.setattr(endpoints, "dashboard_folder", lambda: tmp_path / "dist")
    return tmp_path / "dist"


async def test_without_a_build_the_command_is_told(without_a_build: Path) -> None:
    transport = httpx.ASGITransport(app=create_app(Settings()))
    async with httpx.AsyncClient(transport=transport, base_url="http://octrain") as client:
        answer = await client.get("/dashboard")
        assert answer.status_code == 503
        assert "<pre>make dashboard</pre>" in answer.text
        assert "script" not in answer.text
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        # Once it is built, the same process serves it.
        without_a_build.mkdir()
        (without_a_build / "index.html").write_text("built")
        assert (await client.get("/dashboard")).text == "built"
