"""Problem types: one table, one page each, and nothing raised that is not in it."""

from __future__ import annotations

import ast
import html
from pathlib import Path
from typing import Any

import pytest

import octrain_api
from octrain_api.problem_kinds import KINDS, markdown

PACKAGE = Path(octrain_api.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
REPOSITORY = Path(__file__).parents[2]


def _raised() -> list[tuple[str, int | None, str, str | None]]:
    """(place, status, type, title) of every Problem(...) and conflict(...) in the sources."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            values = [a.value if isinstance(a, ast.Constant) else None for a in node.args]
            place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
            if node.func.id == "Problem":
                found.append((place, values[0], values[1], values[2]))
            elif node.func.id == "conflict":
                found.append((place, 409, values[0], None))
    return found


def test_whatever_is_raised_is_in_the_table() -> None:
    raised = _raised()
    assert len(raised) > 20
    for place, status, name, title in raised:
        if name is None:
            # Handed on, by `conflict` for example.
            assert place.split(":")[0] in HANDED_ON, place
            continue
        assert name in KINDS, f"{place} raises {name!r}, which problem_kinds.py does not explain"
        assert status in KINDS[name].statuses, place
        if title is not None:
            assert title == KINDS[name].title, place


# Modules with one helper that raises what its callers name; the names stand in its calls.
HANDED_ON = {"problems.py", "recipes/service.py"}


def test_every_kind_is_explained() -> None:
    for kind in KINDS.values():
        assert len(kind.meaning) > 30
        assert len(kind.remedy) > 20
        assert kind.name == kind.name.lower()
        assert "_" not in kind.name


def test_the_page_in_the_docs_is_made_of_the_table() -> None:
    page = (REPOSITORY / "docs" / "problems.md").read_text(encoding="utf-8")
    assert page == markdown(), "run: python -m octrain_api problems > docs/problems.md"


async def test_each_type_is_explained_where_it_points(service: Any) -> None:
    client = service.client(None)
    listed = await client.get("http://octrain/problems", headers={"Accept": "application/json"})
    assert {item["type"] for item in listed.json()["items"]} == {f"/problems/{n}" for n in KINDS}
    for name, kind in KINDS.items():
        page = await client.get(f"http://octrain/problems/{name}", headers={"Accept": "text/html"})
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert html.escape(kind.title) in page.text
    page = await client.get("http://octrain/problems/none", headers={"Accept": "text/html"})
    assert (page.status_code, page.json()["type"]) == (404, "/problems/not-found")
    index = await client.get("http://octrain/problems")
    assert "rate-limited" in index.text


@pytest.mark.parametrize(
    ("method", "path", "headers", "content", "status", "name"),
    [
        ("GET", "/v1/jobs/job_x/nothing", {}, None, 404, "not-found"),
        ("PATCH", "/v1/nodes", {}, None, 405, "method-not-allowed"),
        ("POST", "/v1/jobs", {"Content-Type": "text/plain"}, b"{}", 415, "unsupported-media-type"),
        ("POST", "/v1/jobs", {"Content-Type": "application/json"}, b"{", 422, "spec-invalid"),
        ("POST", "/v1/jobs", {}, b"[" * 65 + b"]" * 65, 422, "body-too-complex"),
        ("GET", "/v1/jobs?name=" + "x" * 17_000, {}, None, 414, "url-too-long"),
        ("GET", "/v1/jobs", {f"X-{n}": "x" for n in range(101)}, None, 431, "head-too-large"),
        ("GET", "/v1/jobs", {"X-Long": "x" * 70_000}, None, 431, "head-too-large"),
    ],
)
async def test_each_refusal_is_a_problem_document(
    service: Any,
    method: str,
    path: str,
    headers: dict[str, str],
    content: bytes | None,
    status: int,
    name: str,
) -> None:
    user = await service.user()
    answer = await user.request(method, f"http://octrain{path}", headers=headers, content=content)
    assert (answer.status_code, answer.json()["type"]) == (status, f"/problems/{name}")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status
    assert answer.json()["title"] == KINDS[name].title
    if status == 405:
        assert "GET" in answer.headers["allow"]
