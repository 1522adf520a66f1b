"""What schemathesis is told beside its configuration, when it runs test_contract.py.

A request that fits the OpenAPI document and is refused all the same must have a reason here: a rule
that JSON Schema cannot say. The built-in check knows of statuses alone; this one goes by operation,
kind of problem and code of the error.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import schemathesis

from octrain_api.numbers import clean_text

# Refusals of requests that the document allows: (operation, or * for all; problem; code, or *).
REASONED: dict[tuple[str, str, str], str] = {
    ("*", "request-invalid", "cursor"): "cursors are the service's own, and of one list",
    ("*", "idempotency-key-reused", "*"): "which keys were used already",
    ("*", "bad-request", "*"): "a URL with a NUL",
    ("*", "url-too-long", "*"): "all parameters of a request together",
    ("*", "head-too-large", "*"): "the URL and all headers of a request together",
    ("*", "body-too-large", "*"): "the operator's limit",
    ("*", "body-too-complex", "*"): "the operator's limit",
    ("*", "request-invalid", "text"): "NUL and half surrogates can be stored nowhere",
    ("validate_job", "spec-invalid", "text"): "NUL and half surrogates can be stored nowhere",
    ("create_job", "spec-invalid", "*"): "rules between the values of a spec, and of its model",
    ("clone_job", "spec-invalid", "*"): "what a patch makes of a spec is known when it is one",
    ("change_job", "spec-invalid", "*"): "what a patch makes of a spec is known when it is one",
    ("start_job", "spec-invalid", "*"): "files and secrets that a spec names may be gone",
    ("create_job", "no-capable-node", "*"): "which nodes there are",
    ("clone_job", "no-capable-node", "*"): "which nodes there are",
    ("start_job", "no-capable-node", "*"): "which nodes there are",
    ("create_dataset", "dataset-too-large", "*"): "the operator's limit",
    ("create_dataset", "request-invalid", "value_error"): "plain text has no fields",
    ("upload_part", "upload-too-long", "*"): "the data set says how many bytes may come",
    ("cancel_jobs", "request-invalid", "conflict"): "ids, filters and `every` exclude each other",
    ("save_recipe", "request-invalid", "*"): "a fragment is checked as a part of a spec",
    ("save_recipe", "spec-invalid", "*"): "a fragment is checked as a part of a spec",
    ("read_metrics", "request-invalid", "too_many_points"): "points of all series together",
    ("query_metrics", "request-invalid", "too_many_points"): "points of all series together",
    ("stream_events", "request-invalid", "enum"): "names joined by commas",
    ("stream_job", "request-invalid", "enum"): "names joined by commas",
    ("stream_job", "request-invalid", "too_long"): "each of the patterns joined by commas",
    ("stream_events", "request-invalid", "position"): "ids are the stream's own",
    ("stream_job", "request-invalid", "number"): "ids are the stream's own",
    ("read_logs", "request-invalid", "conflict"): "`tail` excludes `after` and `before`",
    ("create_webhook", "request-invalid", "url"): "which addresses may be called is configured",
    ("change_webhook", "request-invalid", "url"): "which addresses may be called is configured",
    ("create_key", "request-invalid", "value_error"): "the scope `node` stands alone",
    ("create_key", "request-invalid", "past"): "what time it is",
    ("change_key", "request-invalid", "past"): "what time it is",
}

# Paths of what this run has deleted.
_deleted: set[str] = set()


@schemathesis.hook
def before_call(context: Any, case: Any, **_: Any) -> None:
    """Spare the key that this run holds: what would end it meets another one instead."""
    parameters = case.path_parameters
    if parameters and parameters.get("key_id") == os.environ["OCTRAIN_TEST_KEY_ID"]:
        parameters["key_id"] = os.environ["OCTRAIN_TEST_SPARE_ID"]


@schemathesis.check
def what_stays_tells_its_end(context: Any, response: Any, case: Any) -> None:
    """What can be read after its DELETE says that it ended."""
    url = urlsplit(response.request.url)
    if response.status_code >= 300:
        return
    if case.method == "DELETE":
        _deleted.add(url.path)
        return
    operation = case.operation.definition.raw.get("operationId", "")
    if operation == "get_key" and url.path in _deleted:
        assert response.json()["revoked_at"] is not None, f"{url.path} was revoked"
    # A part of the trail need not hold its end.
    if operation == "list_events" and not url.query:
        last = response.json()["items"][-1]["kind"]
        assert (last == "deleted") == (url.path.removesuffix("/events") in _deleted), (
            f"{url.path} ends with {last}"
        )


@schemathesis.check
def refusals_are_reasoned(context: Any, response: Any, case: Any) -> None:
    """A request that fits the document is refused only for what the document cannot say."""
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    if response.status_code not in (400, 413, 414, 415, 422, 431):
        return
    operation = case.operation.definition.raw.get("operationId", "")
    problem = response.json()
    kind = str(problem["type"]).rpartition("/")[2]
    for error in problem.get("errors") or [{"code": "*", "pointer": ""}]:
        known = any(
            (about, kind, code) in REASONED
            for about in (operation, "*")
            for code in (error["code"], "*")
        )
        assert known or _is_no_number_of_the_service(_value_at(case.body, error["pointer"])), (
            f"{operation} refused what the document allows: {kind}: {error}, {problem['detail']}"
        )


def _is_no_number_of_the_service(value: Any) -> bool:
    """Whether it is 10.0, an integer to JSON Schema and a float to every strict reader; or 2**63,
    in a part of a body that may be any JSON. (Where numbers are told, they are told with bounds:
    see test_openapi.py.)
    """
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and abs(value) >= 2**63


def _value_at(body: Any, pointer: str) -> Any:
    """What stands there; None where nothing does."""
    value = body
    for step in pointer.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        try:
            if isinstance(value, list):
                value = value[int(step)]
            else:
                # A pointer is told as text that can be sent: without NUL.
                value = {clean_text(key): item for key, item in value.items()}[step]
        except (KeyError, IndexError, AttributeError, ValueError):
            return None
    return value
