"""The dashboard at `/dashboard`: its files, the index for every page of it, strict headers."""

from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse

from octrain_api.dashboard.files import HASHED, INDEX, BuiltFile, dashboard_folder, find_file
from octrain_api.jobs.tags import matches
from octrain_api.problems import Problem
from octrain_api.settings import DashboardSettings

# Everything comes from this service: no inline script or style, no frame, no other address.
_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_FOR_EVER = "public, max-age=31536000, immutable"
_ASK_AGAIN = "no-cache"

_NOT_BUILT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Octrain: the dashboard is not built</title>
<h1>The dashboard is not built</h1>
<p>This service runs from a checkout without the dashboard's files. In the checkout's folder run</p>
<pre>make dashboard</pre>
<p>and reload this page; the service need not be started again. The wheel and the image bring the
files along. The API and its <a href="/docs">reference</a> work without them.</p>
</html>
"""


def install(app: FastAPI, settings: DashboardSettings) -> None:
    """Serve the dashboard of this application."""
    given = settings.folder

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    def root() -> Response:
        return RedirectResponse("/dashboard", status_code=307)

    @app.api_route("/dashboard", methods=["GET", "HEAD"], include_in_schema=False)
    @app.api_route("/dashboard/{path:path}", methods=["GET", "HEAD"], include_in_schema=False)
    def dashboard(request: Request, path: str = "") -> Response:
        return answer(given or dashboard_folder(), path, request)


def answer(folder: Path, path: str, request: Request) -> Response:
    """The file of this path, or the index, whose program knows what to show there."""
    accepted = request.headers.get("accept-encoding", "")
    found = find_file(folder, path, accepted) if path else None
    if found is None and path.startswith(HASHED):
        # A page of an older build asks for a part that is gone: it must not be given the index.
        raise Problem(404, "not-found", "Not found", f"There is no file {path!r}.")
    if found is None:
        found = find_file(folder, INDEX, accepted)
    if found is None:
        return HTMLResponse(
            _NOT_BUILT, status_code=503, headers={**_HEADERS, "Cache-Control": "no-store"}
        )
    return _sent(found, request.headers.get("if-none-match"))


def _sent(found: BuiltFile, known: str | None) -> Response:
    headers = {
        **_HEADERS,
        "Cache-Control": _FOR_EVER if found.hashed else _ASK_AGAIN,
        "ETag": found.etag,
        "Vary": "Accept-Encoding",
    }
    if known is not None and matches(known, found.etag):
        return Response(status_code=304, headers=headers)
    if found.coding is not None:
        headers["Content-Encoding"] = found.coding
    return FileResponse(found.path, media_type=found.media_type, headers=headers)
