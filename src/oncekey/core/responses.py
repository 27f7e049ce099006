"""A response that no handler returns: a task that settles its key writes it, or a resolver or operator that confirms.

Pure. ``web/responses.py`` chooses what is kept of a handler's response, and drops headers that must not be stored. Here
such a header is refused, because the app's code names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from oncekey.core.policy_headers import NEVER_STORED
from oncekey.core.record import StoredResponse
from oncekey.errors import ConfigurationError

MAX_RESPONSE_BYTES = 1024 * 1024
"""With a larger body the key becomes a tombstone, as with a large response of a handler."""
NOTHING: Final = object()
"""No JSON was given. (None is the JSON value null.)"""

_BREAKS = ("\r", "\n", "\0")


class Response:
    """The final response of a request, which every later retry of it gets: returned by a task that settles its key, and
    by a resume function.

    A status under 400 completes the key, any other fails it for good.
    """

    __slots__ = ("stored",)

    def __init__(
        self,
        status: int,
        json: Any = NOTHING,
        *,
        body: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.stored = written("Response", status, json, body, headers)


def written(
    what: str, status: int, json: Any, body: bytes | str | None, headers: Mapping[str, str] | None
) -> StoredResponse:
    """The response as it is stored. ``what`` names it in errors."""
    if not 200 <= status <= 599:
        raise ConfigurationError(f"{what}(status={status!r}): a final response has a status from 200 to 599")
    kept = {name.lower(): text for name, text in (headers or {}).items()}
    if refused := NEVER_STORED & kept.keys():
        raise ConfigurationError(
            f"{what}(headers=…): {', '.join(sorted(refused))} would go to every client that has the key"
        )
    if any(_unsendable(part) for item in kept.items() for part in item):
        raise ConfigurationError(
            f"{what}(headers=…): a name or a value has a line break, a NUL, or a character outside of Latin-1"
        )
    data = body.encode() if isinstance(body, str) else body or b""
    if json is not NOTHING:
        if body is not None:
            raise ConfigurationError(f"{what}(…): it takes json or body, not both")
        data = orjson.dumps(json)
        kept.setdefault("content-type", "application/json")
    return StoredResponse(status, tuple(kept.items()), data if len(data) <= MAX_RESPONSE_BYTES else None)


def as_response(result: object) -> StoredResponse | None:
    """The final response that a function of the app returned; None: its value is no response."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], int):
        result = Response(*result)
    return result.stored if isinstance(result, Response) else None


def _unsendable(part: str) -> bool:
    return any(mark in part for mark in _BREAKS) or any(ord(letter) > 0xFF for letter in part)
