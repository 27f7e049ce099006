"""Describes protected operations in an OpenAPI document. Pure: a document and the routes in, a new document out.

Owns the fragments: the header parameter, oncekey's answers as responses, its headers, ``x-idempotency``. Statuses,
media types and examples come from ``core/problems.py``, so the document says what clients really get. A framework's
module makes and serves its document; this module knows no framework.

What the app declared itself stays: if it declares a response of the same status, oncekey's content is added, and a
header parameter that the app already has keeps its description.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from oncekey.core.policy import Policy
from oncekey.core.problems import Answer, ProfileName, Situation, problem, replay_marker
from oncekey.core.routes import Route
from oncekey.telemetry.redaction import redact

HEADER = "Idempotency-Key"
EXTENSION = "x-idempotency"
EXAMPLE_KEY = "550e8400-e29b-41d4-a716-446655440000"

Fragment = dict[str, Any]

_METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")


def declare(
    document: Mapping[str, Any],
    match: Callable[[str, str], Route | None],
    *,
    profile: ProfileName = "ietf",
    docs_url: str | None = None,
    authenticates: bool = True,
    authorizes: bool = False,
    prefix: str = "",
) -> Fragment:
    """A copy of ``document`` in which every protected operation is described so.

    ``match``: takes a method and a path, and returns the route; None: it is not protected.
    ``authenticates``: the app's scope function may answer 401; ``authorizes``: its authorize function may
    answer 403. ``prefix``: where the document's paths are mounted.
    """
    declared: Fragment = deepcopy(dict(document))
    shared = _Shared(declared, profile, docs_url)
    for path, item in declared.get("paths", {}).items():
        for method in _METHODS:
            if method in item and (route := match(method.upper(), prefix + path)) is not None:
                answers = situations(route.policy, authenticates=authenticates, authorizes=authorizes)
                _declare_operation(item[method], route.policy, shared, answers)
    return declared


def parameter(policy: Policy) -> Fragment:
    """The Idempotency-Key header as a parameter of an operation."""
    quoted = policy.key_syntax == "strict"
    schema: Fragment = {"type": "string", "minLength": policy.key_min_length, "maxLength": policy.key_max_length}
    if quoted:
        # The two quotes are added, and every character of the key may be escaped.
        schema = {"type": "string", "minLength": policy.key_min_length + 2, "maxLength": 2 * policy.key_max_length + 2}
        schema["pattern"] = '^"[0-9A-Fa-f-]{36}"$' if policy.key_format == "uuid" else '^".+"$'
    elif policy.key_format is not None:
        schema["format"] = policy.key_format
    return {
        "name": HEADER,
        "in": "header",
        "required": policy.required,
        "description": description(policy),
        "schema": schema,
        "example": f'"{EXAMPLE_KEY}"' if quoted else EXAMPLE_KEY,
    }


def description(policy: Policy) -> str:
    """What the header does, for readers of the API's documentation."""
    kept = in_words(policy.retention_seconds)
    of = "of this endpoint" if policy.key_per == "endpoint" else "across all endpoints"
    sentences = [
        "A unique value, such as a UUID, that the client makes for one operation and sends with every retry of it.",
        f"The operation runs once: the same request with the same key gets the first response again, for {kept}.",
        f"A key stands for one request {of}: with a different request it is refused.",
    ]
    if policy.key_syntax == "strict":
        sentences.append("It is sent in double quotes, as an RFC 8941 String.")
    if policy.pii == "refuse":
        sentences.append("It must not be an e-mail address, a phone number, a card number or a token.")
    if not policy.required:
        sentences.append("Without it, the request is executed every time that it is sent.")
    return " ".join(sentences)


def in_words(seconds: float) -> str:
    """A length of time in words: ``24 hours``, ``7 days``, ``90 minutes``."""
    units = [(172_800, 86_400, "day"), (3_600, 3_600, "hour"), (60, 60, "minute"), (0, 1, "second")]
    whole = round(seconds)
    size, unit = next((size, unit) for least, size, unit in units if whole >= least and not whole % size)
    count = whole // size
    return f"{count} {unit}" if count == 1 else f"{count} {unit}s"


def extension(policy: Policy) -> Fragment:
    """The value of ``x-idempotency``, for client generators and reviewers."""
    shown: Fragment = {
        "required": policy.required,
        "effects": policy.effects,
        "retention_seconds": int(policy.retention_seconds),
        "scope": policy.key_per,
        "in_flight": policy.in_flight,
    }
    return shown if policy.pii is None else shown | {"pii": policy.pii}


def situations(policy: Policy, *, authenticates: bool = True, authorizes: bool = False) -> list[Situation]:
    """The situations in which a request to such a route gets oncekey's own answer."""
    found = [Situation.KEY_MISSING] if policy.required else []
    found += [Situation.KEY_MALFORMED, Situation.MISMATCH, Situation.IN_FLIGHT, Situation.UNKNOWN]
    if policy.in_flight == "accepted":
        found.append(Situation.ACCEPTED)
    found += [Situation.BODY_TOO_LARGE, Situation.STORE_UNAVAILABLE, Situation.NOT_STORED]
    found += [Situation.NOT_EXECUTED, Situation.NOT_FINISHED]
    if policy.pii == "refuse":
        found.append(Situation.KEY_PERSONAL)
    if policy.max_age is not None:
        found.append(Situation.TIMESTAMP_REFUSED)
    if policy.limit is not None:
        found.append(Situation.LIMITED)
    if policy.verify is not None:
        found.append(Situation.SIGNATURE_INVALID)
    if authenticates and policy.sender is None:
        found.append(Situation.NOT_AUTHENTICATED)
    if authorizes and policy.sender is None:
        found.append(Situation.NOT_AUTHORIZED)
    return found


# -- into an operation -----------------------------------------------------------------------------------------------


def _declare_operation(operation: Fragment, policy: Policy, shared: _Shared, answers: list[Situation]) -> None:
    if policy.key_from is None:
        _declare_header(operation.setdefault("parameters", []), policy)
    responses = operation.setdefault("responses", {})
    for status, response in responses.items():
        if str(status)[0] in "23d" and "$ref" not in response:  # d: default, which covers success too
            response["headers"] = shared.success_headers(policy) | response.get("headers", {})
    for situation in answers:
        shared.add_answer(responses, situation)
    operation["responses"] = {str(status): responses[status] for status in sorted(responses, key=str)}
    operation[EXTENSION] = extension(policy)


def _declare_header(parameters: list[Fragment], policy: Policy) -> None:
    own = next((at for at, known in enumerate(parameters) if _is_ours(known)), None)
    if own is None:
        parameters.append(parameter(policy))
    else:
        texts = {name: parameters[own][name] for name in ("description", "example") if name in parameters[own]}
        parameters[own] = parameter(policy) | texts


def _is_ours(known: Mapping[str, Any]) -> bool:
    return known.get("in") == "header" and str(known.get("name", "")).lower() == HEADER.lower()


class _Shared:
    """The document's components: everything that several operations share, under names that the app does not use."""

    def __init__(self, document: Fragment, profile: ProfileName, docs_url: str | None) -> None:
        self._document = document
        self._profile: ProfileName = profile
        self._docs_url = docs_url

    def success_headers(self, policy: Policy) -> Fragment:
        headers: Fragment = {}
        if policy.key_from is None:
            sent = _header("The key of the request, as it was sent.")
            headers[HEADER] = self._refer("headers", "IdempotencyKey", sent)
        until = _header("Until when this response is kept for retries, as an HTTP date.")
        headers["Idempotency-Expires"] = self._refer("headers", "IdempotencyExpires", until)
        if (marker := replay_marker(self._profile)) is not None:
            name, content = marker[0].decode().title(), marker[1].decode()
            header = _header("Present, with this value, on a response that was stored earlier and is sent again.")
            header["schema"] = {"type": "string", "enum": [content]}
            headers[name] = self._refer("headers", name.replace("-", ""), header)
        return headers

    def add_answer(self, responses: Fragment, situation: Situation) -> None:
        """Add one situation under its status, and keep what the app declares there."""
        reference = redact(EXAMPLE_KEY) if situation is Situation.UNKNOWN else None
        answer = problem(self._profile, situation, docs_url=self._docs_url, reference=reference)
        body = json.loads(answer.body)
        title = _title(situation)
        response = responses.setdefault(str(answer.status), {})
        if "$ref" in response:
            return  # a shared component of the app: other operations use it too, so do not change it
        description = response.get("description")
        response["description"] = f"{description}; or: {title}" if description else title
        content = response.setdefault("content", {}).setdefault(_media_type(answer), {})
        content["schema"] = _either(content.get("schema"), self._refer("schemas", *_schema(self._profile, situation)))
        example = self._refer("examples", f"Idempotency{_camel(situation)}", {"summary": title, "value": body})
        if "example" not in content:  # the two exclude each other
            content.setdefault("examples", {})[str(situation)] = example
        for name, value in _header_fragments(answer):
            response.setdefault("headers", {}).setdefault(name, self._refer("headers", name.replace("-", ""), value))

    def _refer(self, kind: str, name: str, value: Fragment) -> Fragment:
        """A reference to a component, which is added if it is missing, under a name that the app does not use."""
        known = self._document.setdefault("components", {}).setdefault(kind, {})
        while name in known and known[name] != value:
            name += "_"
        known[name] = value
        return {"$ref": f"#/components/{kind}/{name}"}


def _either(there: Fragment | None, ours: Fragment) -> Fragment:
    """Both schemas, if the app has one of its own under the same media type."""
    if there is None or there == ours:
        return ours
    if not there:
        return there  # it allows everything
    choices = there.get("anyOf", [there]) if set(there) <= {"anyOf"} else [there]
    return {"anyOf": choices if ours in choices else [*choices, ours]}


def _media_type(answer: Answer) -> str:
    return dict(answer.headers)[b"content-type"].decode()


def _header_fragments(answer: Answer) -> Iterator[tuple[str, Fragment]]:
    names = {name for name, _ in answer.headers}
    if b"retry-after" in names:
        description = "How many seconds to wait before the same request is sent again with the same key."
        yield "Retry-After", _header(description, {"type": "integer", "minimum": 1})
    if answer.status == 202:
        schema = {"type": "string", "format": "uri-reference"}
        yield "Location", _header("Where to ask what became of the request.", schema)
    if b"www-authenticate" in names:
        yield "WWW-Authenticate", _header("How to authenticate.")


def _header(description: str, schema: Fragment | None = None) -> Fragment:
    return {"description": description, "schema": schema or {"type": "string"}}


def _title(situation: Situation) -> str:
    """A short title. Only the ietf profile has one for every situation; it is right for the other profiles too."""
    title: str = json.loads(problem("ietf", situation).body)["title"]
    return title


def _camel(situation: Situation) -> str:
    return "".join(part.capitalize() for part in situation.split("-"))


def _object(properties: Fragment, required: list[str] | None = None, **more: Any) -> Fragment:
    return {"type": "object", "properties": properties, "required": required or list(properties), **more}


_TEXT = {"type": "string"}
_REFERENCE = {"type": "string", "description": "For the support of this API: where the outcome is not known."}

_PROGRESS = (
    "IdempotencyProgress",
    _object(
        {"state": {"type": "string", "enum": ["in_progress", "pending"]}, "title": _TEXT, "detail": _TEXT},
        description="The request with this Idempotency-Key is being worked on. This is not its result.",
    ),
)


def _schema(profile: ProfileName, situation: Situation) -> tuple[str, Fragment]:
    return _PROGRESS if situation is Situation.ACCEPTED else _SCHEMAS[profile]


_SCHEMAS: dict[ProfileName, tuple[str, Fragment]] = {
    "ietf": (
        "IdempotencyProblem",
        _object(
            {"type": {"type": "string", "format": "uri-reference"}, "title": _TEXT, "status": {"type": "integer"}}
            | {"detail": _TEXT, "reference": _REFERENCE},
            ["type", "title", "status", "detail"],
            description="Why an Idempotency-Key got no result, as an RFC 9457 problem.",
        ),
    ),
    "stripe": (
        "IdempotencyError",
        _object(
            {
                "error": _object(
                    {"type": _TEXT, "code": _TEXT, "message": _TEXT, "doc_url": _TEXT, "reference": _REFERENCE},
                    ["type", "code", "message"],
                )
            },
            description="Why an Idempotency-Key got no result.",
        ),
    ),
    "governance": (
        "IdempotencyFault",
        _object(
            {
                "fault": _object(
                    {
                        "faultId": _TEXT,
                        "traceId": _TEXT,
                        "errors": {
                            "type": "array",
                            "items": _object(
                                {"errorCode": _TEXT, "description": _TEXT, "reference": _REFERENCE},
                                ["errorCode", "description"],
                            ),
                        },
                    }
                )
            },
            description="Why an Idempotency-Key got no result.",
        ),
    ),
}
