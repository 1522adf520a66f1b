"""The OpenAPI document and its page, which loads nothing from another address."""

import importlib.util
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

from fp8core.spec import JobSpec
from octrain_api.problems import CONTENT_TYPE, ProblemDetails

DESCRIPTION = """
Octrain trains models in 8-bit floating point: POST a job, get a trained model, its metrics as they
come, and the proof of what FP8 did.

Every request needs `Authorization: Bearer oct_...`. Every error is an RFC 9457 problem document.
All paths are served with and without `/v1`.
"""
_ASSETS = "/docs/assets"


def _assets_folder() -> Path:
    """The Swagger UI files, shipped by a package that is used for its files alone."""
    spec = importlib.util.find_spec("fastapi_offline")
    if spec is None or spec.origin is None:
        raise RuntimeError("the package fastapi-offline, which ships the page of /docs, is missing")
    return Path(spec.origin).parent / "static"


def install(app: FastAPI) -> None:
    """Serve /docs, and describe every error and the spec in /openapi.json."""
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
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes
    )
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    template = "#/components/schemas/{model}"
    for name, schema in (
        ("JobSpec", JobSpec.model_json_schema(ref_template=template.format(model="Spec{model}"))),
        ("ProblemDetails", ProblemDetails.model_json_schema(ref_template=template)),
    ):
        prefix = "Spec" if name == "JobSpec" else ""
        for inner, definition in schema.pop("$defs", {}).items():
            schemas[prefix + inner] = definition
        schemas[name] = schema
    problem = {
        "description": "A problem document",
        "content": {CONTENT_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}},
    }
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = problem
    return document
