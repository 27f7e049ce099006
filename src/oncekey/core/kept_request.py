"""The request of a phased key (``Policy(keep_request=True)``), kept so that upkeep can resume without the client.

It is one more row of the key's steps, under a name that no step of an app can have. The row is an ``intended`` phase. A
real phase is never ``intended``, so a process of an older version, during a deploy, ignores the row.

Kept are the method, the path, the query, the body, the content type and the headers of the fingerprint. None of these
headers can be a credential: ``Policy(fingerprint_headers=…)`` refuses those.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import field
from typing import Any

import orjson

from oncekey.core.recipe import Parts
from oncekey.core.sealed import readable
from oncekey.core.steps import REQUEST, Step, StepKind, StepState
from oncekey.core.values import value


@value
class KeptRequest:
    """The first request that came with the key. To read, not to change."""

    method: str
    path: str
    """As it was sent: percent-encoded, if the server passes it on so."""
    query: str
    """Without the question mark."""
    headers: dict[str, str] = field(hash=False)
    """The content type and the headers of the fingerprint; names are in lower case."""
    body: bytes

    def json(self) -> Any:
        return orjson.loads(self.body)

    def __repr__(self) -> str:
        return f"KeptRequest({self.method}, {len(self.body)} bytes)"  # a log must not contain bodies


def kept_request(parts: Parts | None, header_names: frozenset[bytes]) -> KeptRequest | None:
    """What is kept of a request. ``header_names``: the headers of its fingerprint, in lower case."""
    if parts is None:
        return None
    method, path, query, content_type, body, read_lines = parts
    headers: dict[str, str] = {} if content_type is None else {"content-type": content_type}
    for line, text in read_lines(header_names) if header_names else ():
        name, content = line.decode("latin-1").lower(), text.decode("latin-1")
        headers[name] = f"{headers[name]}, {content}" if name in headers else content
    return KeptRequest(method, _text(path), query.decode("latin-1"), headers, body)


def as_step(request: KeptRequest) -> Step:
    members: dict[str, Any] = {
        "method": request.method,
        "path": request.path,
        "query": request.query,
        "headers": request.headers,
    }
    try:
        members["text"] = request.body.decode()
    except UnicodeDecodeError:
        members["base64"] = base64.b64encode(request.body).decode()
    return Step(REQUEST, StepKind.PHASE, StepState.INTENDED, True, orjson.dumps(members))


def request_in(steps: Sequence[Step]) -> KeptRequest | None:
    """The kept request among the steps of a key; None: there is none."""
    step = next((step for step in steps if step.is_request), None)
    if step is None or step.result is None:
        return None
    members = orjson.loads(readable(step.result, "the kept request"))
    body = base64.b64decode(members["base64"]) if "base64" in members else members["text"].encode()
    return KeptRequest(members["method"], members["path"], members["query"], members["headers"], body)


def _text(path: str) -> str:
    """The path without lone surrogates, which JSON cannot hold. Some servers make them of bytes that are not UTF-8."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
