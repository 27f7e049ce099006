"""A response that code writes by hand, instead of a handler: by a task that settles its key, by whoever confirms one.

Pure. What is kept of a handler's own response is ``web/wire.py``; here a header that must not be kept is refused rather
than left out, since somebody has spelled it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from oncekey.core.policy import NEVER_STORED
from oncekey.core.record import StoredResponse
from oncekey.errors import ConfigurationError

MAX_RESPONSE_BYTES = 1024 * 1024
"""A larger body settles the key as a tombstone, as a request's does."""
NOTHING: Final = object()
"""No JSON: None is one."""

_BREAKS = ("\r", "\n", "\0")


def written(
    what: str, status: int, json: Any, body: bytes | str | None, headers: Mapping[str, str] | None
) -> StoredResponse:
    """The response as it is kept. ``what`` names it in errors."""
    if not 200 <= status <= 599:
        raise ConfigurationError(f"{what}(status={status!r}): a final response has a status from 200 to 599")
    kept = {name.lower(): text for name, text in (headers or {}).items()}
    if refused := NEVER_STORED & kept.keys():
        raise ConfigurationError(
            f"{what}(headers=…): {', '.join(sorted(refused))} would leak to whoever repeats the key"
        )
    if any(_unsendable(part) for item in kept.items() for part in item):
        raise ConfigurationError(
            f"{what}(headers=…): a name or a value has a line break, a NUL, or what is not Latin-1 in it"
        )
    data = body.encode() if isinstance(body, str) else body or b""
    if json is not NOTHING:
        if body is not None:
            raise ConfigurationError(f"{what}(…): it takes json or body, not both")
        data = orjson.dumps(json)
        kept.setdefault("content-type", "application/json")
    return StoredResponse(status, tuple(kept.items()), data if len(data) <= MAX_RESPONSE_BYTES else None)


def _unsendable(part: str) -> bool:
    return any(mark in part for mark in _BREAKS) or any(ord(letter) > 0xFF for letter in part)
