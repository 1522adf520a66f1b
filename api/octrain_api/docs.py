"""The page of the OpenAPI document, which loads nothing from another address."""

import importlib.util
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

from octrain_api.openapi import document

_ASSETS = "/docs/assets"


def _assets_folder() -> Path:
    """The Swagger UI files, shipped by a package that is used for its files alone."""
    spec = importlib.util.find_spec("fastapi_offline")
    if spec is None or spec.origin is None:
        raise RuntimeError("the package fastapi-offline, which ships the page of /docs, is missing")
    return Path(spec.origin).parent / "static"


def install(app: FastAPI) -> None:
    """Serve /docs, and the complete document as /openapi.json."""
    app.mount(_ASSETS, StaticFiles(directory=_assets_folder()), name="docs-assets")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url=app.openapi_url or "/openapi.json",
            title=f"{app.title} API",
            swagger_js_url=f"{_ASSETS}/swagger-ui-bundle.js",
            swagger_css_url=f"{_ASSETS}/swagger-ui.css",
            swagger_favicon_url=f"{_ASSETS}/favicon.png",
            swagger_ui_parameters={"persistAuthorization": True, "tryItOutEnabled": True},
        )

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
