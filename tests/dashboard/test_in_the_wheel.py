"""The dashboard as an installed Octrain has it: served out of the wheel, without a checkout."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from tests.dashboard.browser import BUILT, REPOSITORY, settled, sign_in

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of a wheel that was built here, in a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    words = ["wheel", "--no-deps", "--quiet", "--retries", "5", "--wheel-dir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, str(REPOSITORY)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as built:
        built.extractall(folder / "site")
    return folder / "site"


@contextmanager
def serving(service: Any, site: Path, folder: Path) -> Iterator[str]:
    """Another API process of the same service, whose code is that of the wheel."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stack = service.stack
    environment = {name: value for name, value in os.environ.items() if "OCTRAIN" not in name}
    environment |= {
        "PYTHONPATH": str(site),
        "DATABASE_URL": stack.database_url,
        "REDIS_URL": stack.redis_url,
        "OCTRAIN_ARTIFACT_URL": stack.artifact_url,
    }
    where = [sys.executable, "-c", "import octrain_api; print(octrain_api.__file__)"]
    found = subprocess.run(where, env=environment, cwd=folder, capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(site), found.stdout + found.stderr
    command = ["-m", "octrain_api", "serve", "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with (folder / "api.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *command], env=environment, cwd=folder, stdout=log, stderr=log
        )
        try:

            def answers() -> bool:
                assert process.poll() is None, (folder / "api.log").read_text()
                try:
                    return httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
                except httpx.TransportError:
                    return False

            service.until(answers, "the API of the wheel is ready")
            yield url
        finally:
            process.terminate()
            process.wait(30)


def test_the_wheel_serves_the_whole_dashboard(
    service: Any, installed: Path, page: Any, tmp_path: Path
) -> None:
    dist = BUILT.parent
    inside = installed / "octrain_api" / "dashboard" / "dist"
    built = {path.relative_to(dist) for path in dist.rglob("*") if path.is_file()}
    wanted = {path for path in built if not any(part.startswith(".") for part in path.parts)}
    assert len(wanted) > 20
    assert {path.relative_to(inside) for path in inside.rglob("*") if path.is_file()} == wanted
    for path in wanted:
        assert (inside / path).read_bytes() == (dist / path).read_bytes(), path

    job = service.submit("of-the-wheel", training={"steps": 3})
    service.end(job)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    with serving(service, installed, tmp_path) as url:
        sign_in(page, url, service.stack.api_key)
        page.get_by_role("link", name="of-the-wheel").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("of-the-wheel")
        page.locator(".chart canvas").first.wait_for()
        for tab in ("FP8 health", "Timeline", "Logs", "Files", "Spec"):
            page.get_by_role("tab", name=tab).click()
            settled(page)
        for name in ("New job", "Compare", "Nodes", "Usage", "Webhooks", "Keys"):
            page.get_by_role("link", name=name, exact=True).click()
            expect(page.get_by_role("heading", level=1)).to_have_text(name)
            settled(page)
    # Nothing is asked of anybody else.
    assert asked
    assert {request for request in asked if not request.startswith((url, "data:"))} == set()
