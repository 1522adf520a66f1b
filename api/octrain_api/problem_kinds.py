"""Every kind of problem that the service answers with: the one table behind types and pages.

A kind's name is part of its type URI, `/problems/<name>`, and never changes its meaning. The page
at that address and `docs/problems.md` are made of this table.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProblemKind:
    """What a type means: its HTTP statuses, its title, why it comes, and what to do about it."""

    name: str
    statuses: tuple[int, ...]
    title: str
    meaning: str
    remedy: str


def _kind(name: str, status: int | tuple[int, ...], title: str, meaning: str, remedy: str) -> None:
    statuses = status if isinstance(status, tuple) else (status,)
    KINDS[name] = ProblemKind(name, statuses, title, meaning, remedy)


KINDS: dict[str, ProblemKind] = {}

_kind(
    "bad-request",
    400,
    "Bad request",
    "The request is not HTTP as this service takes it: it cannot be parsed, or its URL holds a "
    "character that no resource has.",
    "Correct the request; `detail` says what is wrong with it.",
)
_kind(
    "not-authenticated",
    401,
    "Not authenticated",
    "No API key was sent, or the key is unknown, expired or revoked. For enrolment: the token is "
    "unknown, expired or used.",
    "Send `Authorization: Bearer oct_...` with a key that is valid; an administrator makes one "
    "with `POST /keys`.",
)
_kind(
    "scope-missing",
    403,
    "Not allowed",
    "The key is valid, but lacks the scope that this route needs; `required_scope` names it.",
    "Use a key with that scope.",
)
_kind(
    "csrf-refused",
    403,
    "Not allowed",
    "The request came with the cookie of a session, but without the proof that a page of this "
    "service sent it: from another origin, or without the session's CSRF token.",
    "Send `csrf_token` of `GET /session` in the header `X-Octrain-CSRF`; or use an API key in "
    "`Authorization`, for which none of this is asked.",
)
_kind(
    "node-name-taken",
    403,
    "Not allowed",
    "A node of this name belongs to another owner, or is registered with another key that is "
    "still valid.",
    "Choose another name; or revoke the other key; or enrol the machine with a token that names "
    "the node, which replaces its key.",
)
_kind(
    "node-key-bound",
    403,
    "Not allowed",
    "A key of the scope `node` speaks for one node: the first one that it registered, or the one "
    "it was made for. It was used for another.",
    "Enrol the machine, so that it gets a key of its own (docs/security.md).",
)
_kind(
    "quota-exceeded",
    403,
    "Quota exceeded",
    "The owner of the key has as many queued jobs, or has used as many GPU-hours, as the operator "
    "allows. `quota`, `limit` and `used` say which.",
    "Wait until jobs have left the queue or the window has moved on, cancel jobs, or ask the "
    "operator for more. `GET /usage` shows all quotas.",
)
_kind(
    "not-found",
    404,
    "Not found",
    "There is nothing at this address, or this key may not see it: the two look the same.",
    "Check the address and the identifier, and that the key belongs to the owner of the job.",
)
_kind(
    "report-too-large",
    404,
    "Not found",
    "The report is too large to be shown inside an answer.",
    "Download it as an artifact; `detail` names it.",
)
_kind(
    "file-not-in-store",
    404,
    "Not found",
    "The file was registered, but the artifact store does not hold it, or holds it damaged, or "
    "cannot be read by this server.",
    "It was removed, or lies in a store that only its node reaches; `detail` says what is known, "
    "the operator knows more.",
)
_kind(
    "method-not-allowed",
    405,
    "Method not allowed",
    "The address exists, but does not offer this method; the header `Allow` lists those it does.",
    "Use one of the methods of `Allow`.",
)
_kind(
    "not-acceptable",
    406,
    "Not acceptable",
    "The service cannot answer in a form that the header `Accept` asks for.",
    "Ask for `application/json`, or for what the route's description names.",
)
_kind(
    "request-timeout",
    408,
    "Request too slow",
    "The request did not arrive in time: its head, or its body at the least rate, was too slow.",
    "Send it again over a better connection, or in smaller parts.",
)
_kind(
    "stale-attempt",
    409,
    "Conflict with the present state",
    "Workers only: the attempt has ended, is on another node, or was claimed by another "
    "supervisor. Nothing can be written to it.",
    "Stop the trainer of this attempt.",
)
_kind(
    "sequence-gap",
    409,
    "Conflict with the present state",
    "Workers only: telemetry records are missing before those sent.",
    "Send from `expected_seq` on.",
)
_kind(
    "job-in-use",
    409,
    "Conflict with the present state",
    "Another job that has not ended begins with the model of this one; `job_id` names it.",
    "Delete the job once the other has ended.",
)
_kind(
    "wrong-status",
    409,
    "Conflict with the present state",
    "The job's status does not allow the change; `job_status` says what it is.",
    "`detail` says what can be done instead.",
)
_kind(
    "key-revoked",
    409,
    "Conflict with the present state",
    "A revoked key can be neither changed nor rotated.",
    "Make a new key; it cannot be had back.",
)
_kind(
    "too-many-webhooks",
    409,
    "Conflict with the present state",
    "The owner has as many webhooks as the operator allows.",
    "Delete one that is no longer needed, or let one serve several purposes.",
)
_kind(
    "delivery-in-flight",
    409,
    "Conflict with the present state",
    "The delivery is being sent at this moment, so it cannot be sent again.",
    "Wait for its outcome, then send it again if it failed.",
)
_kind(
    "webhook-disabled",
    409,
    "Conflict with the present state",
    "The webhook is disabled: by its owner, or because it has taken nothing for days.",
    "Correct the endpoint, enable the webhook, and send again.",
)
_kind(
    "body-too-large",
    413,
    "Body too large",
    "The body has more bytes than this route takes.",
    "Send less; large data is uploaded in parts or read from a path.",
)
_kind(
    "url-too-long",
    414,
    "URL too long",
    "The path or the query is longer than the service takes.",
    "Ask for less at once, for example for fewer metric names.",
)
_kind(
    "unsupported-media-type",
    415,
    "Unsupported media type",
    "The body is of a type that this route does not read.",
    "Send JSON with `Content-Type: application/json`.",
)
_kind(
    "range-not-satisfiable",
    416,
    "Range not satisfiable",
    "The header `Range` asks for bytes that the file does not have.",
    "Ask within the size that `Content-Range` names.",
)
_kind(
    "request-invalid",
    422,
    "Request not valid",
    "A value in the path, the query, a header or the body is not valid, or the query has a "
    "parameter that the route does not know; `errors` lists each with a JSON pointer.",
    "Correct the values named in `errors`.",
)
_kind(
    "body-too-complex",
    422,
    "Body too complex",
    "The JSON is nested deeper, or holds more values, than the service takes.",
    "Send a flatter or smaller document.",
)
_kind(
    "spec-invalid",
    422,
    "The job's spec is not valid",
    "The job's spec has errors; `errors` lists all of them, each with a JSON pointer, and a "
    "suggestion where there is one.",
    "Correct the spec; docs/spec.md describes every field.",
)
_kind(
    "no-capable-node",
    422,
    "No registered node can run this job",
    "Nodes are registered, but none of them could ever run this job; `errors` says why for each.",
    "Ask for other resources or another engine, add a node, or send `?allow_waiting=true` to "
    "queue it all the same.",
)
_kind(
    "idempotency-key-reused",
    422,
    "Idempotency-Key used before",
    "This Idempotency-Key was sent within the last 24 hours with another request: another path, "
    "query or body. `target` is what that one made.",
    "Use a new key for a new request.",
)
_kind(
    "idempotency-key-in-flight",
    409,
    "Conflict with the present state",
    "Another request with this Idempotency-Key is being worked on at this moment. Whether it will "
    "make anything is not known yet; this one made nothing.",
    "Send the same request again after the seconds in `Retry-After`: it gets what the other one "
    "made, or makes it where that one failed.",
)
_kind(
    "secret-shown-once",
    409,
    "Conflict with the present state",
    "An earlier request with this Idempotency-Key made the key or the token, `target`. Its secret "
    "stood in that answer and is stored as a hash only, so it cannot be shown again.",
    "Where that answer was lost: rotate the key, or end the token and make another with a new "
    "Idempotency-Key.",
)
_kind(
    "rate-limited",
    429,
    "Too many requests",
    "This key (or, without a valid key, this address) has sent more requests than its limit; the "
    "headers `RateLimit` and `RateLimit-Policy` tell it.",
    "Wait for the seconds in `Retry-After`; use the stream or `?wait=` instead of polling.",
)
_kind(
    "head-too-large",
    431,
    "Request head too large",
    "The headers together, or in number, are more than the service takes.",
    "Send fewer or shorter headers.",
)
_kind(
    "internal-error",
    500,
    "Internal error",
    "The service made an error. Its log has the details under the `request_id` of this answer.",
    "Try again; if it stays, tell the operator the `request_id`.",
)
_kind(
    "overloaded",
    503,
    "Too many connections",
    "The server has as many open connections as it allows.",
    "Try again after the seconds in `Retry-After`, and close streams that nobody reads.",
)
_kind(
    "too-many-streams",
    503,
    "Too many streams",
    "This server process serves as many live streams as it allows.",
    "Try again after the seconds in `Retry-After`; close streams that nobody reads, or poll.",
)
_kind(
    "database-unavailable",
    503,
    "Database unavailable",
    "The database cannot be reached now, or gives no answer. What the request was to change may "
    "have been changed all the same: only the answer is sure to be missing.",
    "Try again after the seconds in `Retry-After`; what makes something with the same "
    "`Idempotency-Key`, which makes nothing twice.",
)
_kind(
    "http-error",
    (400, 401, 402, 403, 406, 409, 410, 411, 412, 416, 417, 421, 423, 424, 426, 428, 501, 502, 504),
    "Request refused",
    "HTTP itself refuses the request, for a reason that has no type of its own.",
    "The status and `detail` say what is wrong.",
)
_kind(
    "dataset-too-large",
    413,
    "Data set too large",
    "A single data set may not have so many bytes.",
    "Upload it as several data sets, or ask the operator for a path that nodes share.",
)
_kind(
    "dataset-quota-exceeded",
    409,
    "Conflict with the present state",
    "The owner's data sets use all that one may store; `bytes_used` and `bytes_allowed` say it.",
    "Delete data sets that are no longer needed.",
)
_kind(
    "dataset-in-use",
    409,
    "Conflict with the present state",
    "Jobs that have not ended read this data set; `jobs` names some.",
    "Cancel them, or wait for their end.",
)
_kind(
    "wrong-offset",
    409,
    "Conflict with the present state",
    "An upload goes on only where it stands: `upload_offset`.",
    "Send the part that begins at `upload_offset`.",
)
_kind(
    "upload-complete",
    409,
    "Conflict with the present state",
    "All bytes of this data set have been received.",
    "Read the data set: its check may still be under way.",
)
_kind(
    "upload-too-long",
    413,
    "Upload too long",
    "More bytes came than the announced size leaves room for; nothing of the part was stored.",
    "Check that the file has not changed since it was announced.",
)
_kind(
    "too-many-parts",
    409,
    "Conflict with the present state",
    "The upload was sent in as many parts as an upload may have.",
    "Delete the data set and upload it again in larger parts.",
)


def markdown() -> str:
    """The table as a page, with a section for each kind: `docs/problems.md`."""
    lines = [
        "# Problems",
        "",
        "Every error of the HTTP API is a problem document ([RFC 9457](https://www.rfc-editor.org/"
        "rfc/rfc9457)), `application/problem+json`.",
        "Its `type` is one of the names below and keeps its meaning; the server explains each at "
        "`GET /problems/<name>`.",
        "",
        "Made by `python -m octrain_api problems`.",
        "",
        "| type | status | title |",
        "|---|---|---|",
    ]
    kinds = sorted(KINDS.values(), key=lambda kind: (kind.statuses, kind.name))
    for kind in kinds:
        status = str(kind.statuses[0]) if len(kind.statuses) == 1 else "any other"
        lines.append(f"| [`/problems/{kind.name}`](#{kind.name}) | {status} | {kind.title} |")
    for kind in kinds:
        lines += ["", f"## {kind.name}", "", kind.meaning, "", f"What to do: {kind.remedy}"]
    return "\n".join(lines) + "\n"
