"""Which errors each operation can answer with: the one place that says so.

Most follow from what an operation is: whether it needs a key, takes a body, has an identifier in
its path. What only one operation can answer is in `_OWN`, by operation id and kind of problem.
"""

from collections.abc import Iterable
from typing import Any

from octrain_api.keys.principal import Scope
from octrain_api.problem_kinds import KINDS
from octrain_api.problems import CONTENT_TYPE

_ALWAYS = (
    "bad-request",
    "url-too-long",
    "rate-limited",
    "head-too-large",
    "internal-error",
    "overloaded",
    "database-unavailable",
)
_WITH_BODY = (
    "request-timeout",
    "body-too-large",
    "unsupported-media-type",
    "request-invalid",
    "body-too-complex",
)
_WITH_IDEMPOTENCY_KEY = ("idempotency-key-in-flight", "idempotency-key-reused")
# What the Idempotency-Key's first request made has been deleted since. (Versions of a recipe stay.)
_REPLAYED = ("not-found",)
_ATTEMPT = ("stale-attempt",)
_OWN: dict[str, tuple[str, ...]] = {
    "create_job": (
        *_REPLAYED,
        "quota-exceeded",
        "spec-invalid",
        "no-capable-node",
    ),
    "clone_job": ("quota-exceeded", "spec-invalid", "no-capable-node"),
    "start_job": ("quota-exceeded", "spec-invalid", "no-capable-node", "wrong-status"),
    "change_job": ("wrong-status", "spec-invalid"),
    "pause_job": ("wrong-status",),
    "resume_job": ("quota-exceeded", "wrong-status"),
    "delete_job": ("wrong-status", "job-in-use"),
    "stream_job": ("too-many-streams",),
    "stream_events": ("too-many-streams",),
    "read_metrics": ("not-acceptable",),
    "query_metrics": ("not-found", "not-acceptable"),
    "download_file": ("file-not-in-store", "range-not-satisfiable"),
    "download_model": ("file-not-in-store", "range-not-satisfiable"),
    "get_conversion": ("file-not-in-store", "report-too-large"),
    "get_precision": ("file-not-in-store", "report-too-large"),
    "save_recipe": ("spec-invalid",),
    "create_dataset": (*_REPLAYED, "dataset-too-large", "dataset-quota-exceeded"),
    "delete_dataset": ("dataset-in-use",),
    "upload_part": ("too-many-parts", "upload-complete", "wrong-offset", "upload-too-long"),
    "create_webhook": (*_REPLAYED, "too-many-webhooks"),
    "create_key": ("secret-shown-once",),
    "create_enrolment_token": ("secret-shown-once",),
    "test_webhook": ("webhook-disabled",),
    "redeliver_webhook_delivery": ("delivery-in-flight", "webhook-disabled"),
    "redeliver_failed_deliveries": ("webhook-disabled",),
    "change_key": ("key-revoked",),
    "rotate_key": ("key-revoked",),
    "create_session": ("not-authenticated", "scope-missing", "csrf-refused"),
    "get_session": ("not-found",),
    "delete_session": ("not-found",),
    "enrol_node": ("not-authenticated", "node-name-taken"),
    "register_node": ("node-name-taken", "node-key-bound"),
    "claim_attempt": _ATTEMPT,
    "heartbeat_attempt": _ATTEMPT,
    "send_telemetry": (*_ATTEMPT, "sequence-gap"),
    "register_artifact": _ATTEMPT,
    "finish_attempt": _ATTEMPT,
    # Open only where the operator said so.
    "prometheus_metrics": ("not-authenticated", "scope-missing"),
}
# Told by an answer of the operation's own form; and what a process without a database still does.
_NOT = {"readyz": {"database-unavailable"}, "healthz": {"database-unavailable"}}
_TITLES = {408: "Request timeout", 413: "Too large", 422: "Not valid", 503: "Unavailable"}


def kinds_of(method: str, operation: dict[str, Any], scope: str | None) -> tuple[str, ...]:
    """Names of the kinds of problem that the operation can answer with."""
    identifier = operation["operationId"]
    found = dict.fromkeys(_ALWAYS)
    parameters = operation.get("parameters", [])
    if operation.get("security"):
        found["not-authenticated"] = None
        if scope is not None:
            found["scope-missing"] = None
        if method not in ("get", "head") and scope != Scope.NODE:
            found["csrf-refused"] = None
    if any(one["in"] == "path" for one in parameters):
        found["not-found"] = None
    if "requestBody" in operation:
        found |= dict.fromkeys(_WITH_BODY)
    # Of a query parameter that it does not know, at least.
    found["request-invalid"] = None
    if any(one["name"] == "Idempotency-Key" for one in parameters):
        found |= dict.fromkeys(_WITH_IDEMPOTENCY_KEY)
    found |= dict.fromkeys(_OWN.get(identifier, ()))
    left_out = _NOT.get(identifier, set())
    return tuple(name for name in found if name not in left_out)


def answers_of(names: Iterable[str], *, has_content: bool) -> dict[str, Any]:
    """The `responses` of an operation for these kinds, by status; HEAD has no content."""
    by_status: dict[int, list[str]] = {}
    for name in names:
        by_status.setdefault(KINDS[name].statuses[0], []).append(name)
    answers = {}
    for status, kinds in sorted(by_status.items()):
        told = "; ".join(f"[`{kind}`](/problems/{kind})" for kind in kinds)
        title = KINDS[kinds[0]].title if len(kinds) == 1 else _TITLES.get(status, "Refused")
        answer: dict[str, Any] = {"description": f"{title}: {told}"}
        if has_content:
            answer["content"] = {
                CONTENT_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}
            }
        answers[str(status)] = answer
    return answers


def name_of(names: Iterable[str], status: str) -> str:
    """What the document calls the answer with these kinds of a status."""
    kinds = [name for name in names if KINDS[name].statuses[0] == int(status)]
    return "Or".join(kind.title().replace("-", "") for kind in kinds)


def declared_kinds(operations: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """What `_OWN` says of operations that are not among these: should be nothing."""
    known = set(operations)
    return {name: kinds for name, kinds in _OWN.items() if name not in known}
