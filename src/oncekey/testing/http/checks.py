"""What the suite asks of a response, or of a key."""

from __future__ import annotations

import httpx

from oncekey.core.policy_headers import STORED_HEADERS
from oncekey.testing.http.stack import Stack

MARKER = ("idempotency-replayed", "true")
OURS = {"idempotency-key", "idempotency-expires", "content-length"}


def lines(response: httpx.Response) -> list[tuple[str, str]]:
    """The headers as they are on the wire: order between different names means nothing in HTTP, all else does."""
    return sorted((name.decode().lower(), value.decode()) for name, value in response.headers.raw)


def stored_lines(response: httpx.Response) -> list[tuple[str, str]]:
    """The headers of a first response that its replay must have, too."""
    return [line for line in lines(response) if line[0] in STORED_HEADERS | OURS]


def replays(first: httpx.Response, second: httpx.Response) -> bool:
    """Whether the second response is the first, byte for byte, with the header that marks a replay."""
    same = (first.status_code, first.content) == (second.status_code, second.content)
    return same and lines(second) == sorted([*stored_lines(first), MARKER])


def problem(response: httpx.Response) -> str:
    """The situation that the problem document names, such as ``in-flight``."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    return str(response.json()["type"]).rpartition(":")[2]


def state_of(stack: Stack, key: str = "k-1") -> str | None:
    record = stack.record(key)
    return record.state.value if record else None
