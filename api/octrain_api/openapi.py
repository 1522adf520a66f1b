"""The OpenAPI 3.1 document, complete enough that a client can be generated from it.

FastAPI makes the paths and the schemas from the endpoints. Added here is what it cannot know: the
spec's own schema, every error (see octrain_api.openapi_errors), the scope that each operation
needs, the headers of answers, examples of bodies, and what the tags mean.
"""

import copy
from collections.abc import Iterator
from typing import Any, get_args

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi
from fastapi.routing import iter_route_contexts

from fp8core.spec import JobSpec
from octrain_api.auth import Admin, NodeWorker, Reader, Scope, Writer
from octrain_api.openapi_errors import answers_of, kinds_of, name_of
from octrain_api.openapi_examples import EXAMPLES
from octrain_api.problems import ProblemDetails
from octrain_api.sessions.cookies import COOKIE, CSRF_HEADER

DESCRIPTION = """
Octrain trains models in 8-bit floating point: POST a job, get a trained model, its metrics as they
come, and the proof of what FP8 did.

Requests need `Authorization: Bearer oct_...`. Every error is an RFC 9457 problem document whose
`type` leads to a page that explains it. Numbers that JSON cannot hold are the strings `"NaN"`,
`"Infinity"` and `"-Infinity"`; whole numbers have 64 bits at most, wherever they stand. New
members and new values of enumerations may come within `/v1`.
All paths below `/v1` are served without it as well.
"""
TAGS = {
    "jobs": "Submit jobs, follow them, stop them; their events, metrics, logs and live streams.",
    "artifacts": "What jobs made: checkpoints, models, reports; and how FP8 was applied.",
    "recipes": "Named precision recipes in versions: the service's presets and your own.",
    "datasets": "Upload data in parts that can go on after a cut.",
    "webhooks": "Signed messages to your own servers when jobs change.",
    "nodes": "Machines that train: what they can do, how they are, and how they enrol.",
    "usage": "What owners use and may use.",
    "keys": "API keys, for administrators.",
    "sessions": "Sign in with a key in a browser.",
    "operations": "Health, readiness, and the trail of changes.",
    "workers": "The protocol of nodes. Users need none of it.",
}
_REF = "#/components/schemas/{model}"
_BINARY = {"type": "string", "format": "binary"}
_TEXT = {"type": "string"}
# One message of a stream, its fields as text; a comment or a bare `retry` is none.
_MESSAGE = {
    "type": "object",
    "description": "A server-sent message. `data` is JSON; `id` goes into `Last-Event-ID`.",
    "properties": {"event": _TEXT, "id": _TEXT, "data": _TEXT},
}
# The scope that each dependency of octrain_api.auth lets pass.
_SCOPES = {
    get_args(annotated)[1].dependency: scope
    for annotated, scope in (
        (Reader, Scope.JOBS_READ),
        (Writer, Scope.JOBS_WRITE),
        (Admin, Scope.ADMIN),
        (NodeWorker, Scope.NODE),
    )
}
_HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": {
        "description": "By which the server's log has this request; the caller's own, if sent.",
        "schema": _TEXT,
    },
    "RateLimit": {
        "description": 'What is left of the limit that counted: `"write";r=5999;t=42`, where t is '
        "the seconds until it is full again.",
        "schema": _TEXT,
    },
    "RateLimit-Policy": {
        "description": 'The limit: `"write";q=6000;w=60` is 6000 requests in 60 seconds.',
        "schema": _TEXT,
    },
    "Set-Cookie": {"description": "The session, out of reach of scripts.", "schema": _TEXT},
    "Retry-After": {
        "description": "Seconds to wait before trying again.",
        "schema": {"type": "integer", "minimum": 0},
    },
    "WWW-Authenticate": {"description": "How to authenticate.", "schema": _TEXT},
    "ETag": {
        "description": "Names this state; send it as `If-None-Match` to be told of another only.",
        "schema": _TEXT,
    },
    "Location": {"description": "The path of what was made.", "schema": _TEXT},
    "Idempotent-Replayed": {
        "description": "`true` where an earlier request with this Idempotency-Key made it.",
        "schema": _TEXT,
    },
    "Accept-Ranges": {"description": "`bytes`: parts can be asked for.", "schema": _TEXT},
    "Content-Range": {"description": "Which bytes these are, and of how many.", "schema": _TEXT},
    "Content-Disposition": {"description": "A name for the file.", "schema": _TEXT},
}
_TAGGED = ("get_job", "list_jobs", "download_file", "download_model")
_LOCATED = ("create_job", "clone_job", "create_key", "create_webhook", "create_dataset")
_RANGED = ("download_file", "download_model")
# What they made is told again when the request is; what a key or token was, is not.
_REPLAYED = ("create_job", "clone_job", "create_dataset", "create_webhook", "save_recipe")
_WITH_IDEMPOTENCY_KEY = (*_REPLAYED, "create_key", "create_enrolment_token")
# Also answered: the same thing was there already.
_ALSO_200 = {
    **dict.fromkeys(_REPLAYED, "What an earlier request with this Idempotency-Key made"),
    "create_job": "The job that an earlier request with this Idempotency-Key made",
    "create_dataset": "The data set of this name, content and format, which was there already",
}


def document(app: FastAPI) -> dict[str, Any]:
    """The document of this application."""
    made = get_openapi(
        title=app.title,
        version=app.version,
        summary="FP8 training as a service",
        description=DESCRIPTION,
        routes=app.routes,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        servers=[{"url": "/", "description": "This server"}],
        tags=[{"name": name, "description": text} for name, text in TAGS.items()],
    )
    components = made["components"]
    _name_schemas(components["schemas"])
    components["securitySchemes"] = {
        "ApiKey": {
            "type": "http",
            "scheme": "bearer",
            "bearerFormat": "oct_...",
            "description": "An API key. Beside each operation stands the scope that it needs.",
        },
        "Session": {
            "type": "apiKey",
            "in": "cookie",
            "name": COOKIE,
            "description": "Set by `POST /session`; `__Host-" + COOKIE + "` over TLS. Requests "
            f"other than GET and HEAD send `{CSRF_HEADER}` as well.",
        },
    }
    components["responses"] = {}
    components["headers"] = copy.deepcopy(_HEADERS)
    scopes = dict(_scopes_by_operation(app))
    for path in made["paths"].values():
        for method, operation in path.items():
            _complete(method, operation, scopes[operation["operationId"]], components)
    _write_whole_bounds(made)
    return made


def _name_schemas(schemas: dict[str, Any]) -> None:
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for name, prefix, model in (
        ("JobSpec", "Spec", JobSpec),
        ("ProblemDetails", "", ProblemDetails),
    ):
        template = _REF.format(model=prefix + "{model}")
        schema = model.model_json_schema(ref_template=template)
        for inner, definition in schema.pop("$defs", {}).items():
            schemas[prefix + inner] = definition
        schemas[name] = schema
    _lift_unions(schemas)
    _bound_changes(schemas)
    # Generators name classes by titles; those of the spec and of the service may be the same.
    for name, schema in schemas.items():
        schema["title"] = name


def _lift_unions(schemas: dict[str, Any]) -> None:
    """Name the unions within the recipe's union: a discriminator can lead to names only."""
    recipe = schemas["JobSpec"]["properties"]["recipe"]
    mapping = recipe["discriminator"]["mapping"]
    members = []
    for value, member in mapping.items():
        if isinstance(member, dict):
            name = f"Spec{value.title()}Recipe"
            schemas[name] = {
                "title": f"{value} recipe",
                "description": f"A recipe of the engine `{value}`, by its `scaling`.",
                **member,
            }
            mapping[value] = _REF.format(model=name)
        members.append({"$ref": mapping[value]})
    recipe["oneOf"] = members


def _bound_changes(schemas: dict[str, Any]) -> None:
    """Say of a job's changes what they are judged by: what they would make of its spec."""
    changes, spec = (schemas[name]["properties"] for name in ("JobChanges", "JobSpec"))
    for name in ("name", "notes", "priority"):
        bounded = {key: value for key, value in spec[name].items() if key != "default"}
        changes[name] = {**changes[name], **bounded}


def _write_whole_bounds(part: Any) -> None:
    """Bounds of whole numbers as such: the framework made floats of them, and 2**62 as a float is
    written with fewer digits than it has.
    """
    if isinstance(part, list):
        for inner in part:
            _write_whole_bounds(inner)
    elif isinstance(part, dict):
        if part.get("type") == "integer":
            for bound in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
                if bound in part:
                    part[bound] = int(part[bound])
        for inner in part.values():
            _write_whole_bounds(inner)


def _scopes_by_operation(app: FastAPI) -> Iterator[tuple[str, Scope | None]]:
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        dependant = getattr(route, "dependant", None)
        if dependant is not None:
            yield route.name, _scope(dependant)  # type: ignore[attr-defined]


def _scope(dependant: Dependant) -> Scope | None:
    for inner in dependant.dependencies:
        found = _SCOPES.get(inner.call) or _scope(inner)
        if found is not None:
            return found
    return None


def _complete(
    method: str, operation: dict[str, Any], scope: Scope | None, components: dict[str, Any]
) -> None:
    schemas = components["schemas"]
    identifier = operation["operationId"]
    operation["summary"] = operation["summary"].capitalize()
    if "security" in operation:
        operation["security"] = [{"ApiKey": [scope.value] if scope is not None else []}]
        # No session is a node's.
        if scope != Scope.NODE:
            operation["security"].append({"Session": []})
    for parameter in operation.get("parameters", []):
        # Header names are told apart by no case; this is how they are written.
        if parameter["in"] == "header":
            parameter["name"] = "-".join(part.title() for part in parameter["name"].split("-"))
    if "requestBody" in operation:
        for content in operation["requestBody"]["content"].values():
            _show_example(content, schemas, EXAMPLES.get(identifier))
    answers = operation["responses"]
    answers.pop("422", None)
    if identifier in _ALSO_200:
        answers["200"] = {**answers["201"], "description": _ALSO_200[identifier]}
    for status, answer in answers.items():
        for media_type, content in answer.get("content", {}).items():
            # The framework says of a stream that it is text.
            if not content.get("schema") or media_type == "text/event-stream":
                content["schema"] = copy.deepcopy(_plain(media_type))
        _add_headers(identifier, status, answer)
    kinds = kinds_of(method, operation, scope)
    for status, answer in answers_of(kinds, has_content=method != "head").items():
        _add_headers(identifier, status, answer)
        if status in answers:
            # The operation has a form of its own for this status, beside that of problems.
            answers[status]["content"].update(answer["content"])
        elif method == "head" or status == "416":
            answers[status] = answer
        else:
            name = name_of(kinds, status)
            components["responses"].setdefault(name, answer)
            answers[status] = {"$ref": f"#/components/responses/{name}"}
    operation["responses"] = dict(sorted(answers.items()))


def _plain(media_type: str) -> dict[str, Any]:
    """The schema of what is no JSON."""
    if media_type == "text/event-stream":
        return _MESSAGE
    return _TEXT if media_type.startswith("text/") else _BINARY


def _add_headers(identifier: str, status: str, answer: dict[str, Any]) -> None:
    names = ["X-Request-Id", "RateLimit", "RateLimit-Policy"]
    if status in ("200", "206", "304") and identifier in _TAGGED:
        names.append("ETag")
    if status in ("200", "201") and identifier in _LOCATED:
        names.append("Location")
    if status == "200" and identifier in _REPLAYED:
        names.append("Idempotent-Replayed")
    if status in ("200", "206") and identifier in _RANGED:
        names += ["Accept-Ranges", "Content-Disposition"]
    if status in ("206", "416") and identifier in _RANGED:
        names.append("Content-Range")
    if (identifier, status) in (("create_session", "201"), ("delete_session", "204")):
        names.append("Set-Cookie")
    in_flight = status == "409" and identifier in _WITH_IDEMPOTENCY_KEY
    if status in ("429", "503") or in_flight:
        names.append("Retry-After")
    if status == "401":
        names.append("WWW-Authenticate")
    headers = answer.setdefault("headers", {})
    for name in names:
        headers[name] = {"$ref": f"#/components/headers/{name}"}


def _show_example(
    content: dict[str, Any], schemas: dict[str, Any], given: dict[str, Any] | None
) -> None:
    """Put an example beside the schema, where tools look for one: the schema's own, or `given`."""
    if given is not None:
        content["examples"] = {"default": {"value": given}}
    if "example" in content:
        content["examples"] = {"default": {"value": content.pop("example")}}
    if "examples" in content:
        return
    schema = content["schema"]
    for one in (schema, *schema.get("anyOf", ())):
        meant = schemas[one["$ref"].rpartition("/")[2]] if "$ref" in one else one
        if meant.get("examples"):
            content["examples"] = {"default": {"value": meant["examples"][0]}}
            return
