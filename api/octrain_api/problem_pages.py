"""The page behind each problem type: `GET /problems/<name>`, open to everybody."""

import html

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from octrain_api.problem_kinds import KINDS, ProblemKind
from octrain_api.problems import not_found

router = APIRouter(prefix="/problems", include_in_schema=False)

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>body{{font:1rem/1.5 system-ui,sans-serif;max-width:42rem;margin:3rem auto;padding:0 1rem;
color-scheme:light dark}}code{{font-family:ui-monospace,monospace}}</style>
<main>{content}</main></html>
"""


def _wants_json(request: Request) -> bool:
    accept = request.headers.get("accept", "")
    return "json" in accept and "text/html" not in accept


def _described(kind: ProblemKind) -> dict[str, object]:
    return {
        "type": f"/problems/{kind.name}",
        "title": kind.title,
        "statuses": list(kind.statuses),
        "meaning": kind.meaning,
        "remedy": kind.remedy,
    }


def _marked(text: str) -> str:
    """The text as HTML, with what stands between backticks as code."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


@router.get("")
async def list_problems(request: Request) -> Response:
    """Every problem type."""
    kinds = sorted(KINDS.values(), key=lambda kind: (kind.statuses, kind.name))
    if _wants_json(request):
        return JSONResponse({"items": [_described(kind) for kind in kinds]})
    rows = "".join(
        f'<li><a href="/problems/{kind.name}">{kind.name}</a>: {html.escape(kind.title)}</li>'
        for kind in kinds
    )
    content = f"<h1>Problems</h1><ul>{rows}</ul>"
    return HTMLResponse(_PAGE.format(title="Problems", content=content))


@router.get("/{name}")
async def explain_problem(name: str, request: Request) -> Response:
    """What a problem type means and what to do about it."""
    kind = KINDS.get(name)
    if kind is None:
        raise not_found("problem type", name)
    if _wants_json(request):
        return JSONResponse(_described(kind))
    status = ", ".join(map(str, kind.statuses))
    content = (
        f"<h1>{html.escape(kind.title)}</h1><p><code>/problems/{kind.name}</code>, HTTP {status}"
        f"</p><p>{_marked(kind.meaning)}</p><h2>What to do</h2><p>{_marked(kind.remedy)}</p>"
        '<p><a href="/problems">All problems</a></p>'
    )
    return HTMLResponse(_PAGE.format(title=html.escape(kind.title), content=content))
