"""Where a sender that sends no Idempotency-Key has its own id: functions for ``Policy(key_from=…)``."""

from __future__ import annotations

import re
from typing import Any

import orjson

from oncekey.engine.request import Request
from oncekey.errors import ConfigurationError

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch


class header:  # noqa: N801 - read as a function: key_from=header("webhook-id")
    """The key is the value of a header; of several headers, their values joined by ``|``."""

    def __init__(self, *names: str) -> None:
        if not names or not all(_NAME(str(name)) for name in names):
            raise ConfigurationError(f"header{names!r}: it takes the names of headers, such as header('webhook-id')")
        self.names = names
        self.where = f"the header{'s' if names[1:] else ''} {' and '.join(names)}"

    def __call__(self, request: Request, body: bytes) -> str | None:  # noqa: ARG002
        values = [request.headers.get(name, "").strip() for name in self.names]
        # A header that came twice is joined by a comma, by us or by the server. No sender's id has one.
        return "|".join(values) if all(values) and not any("," in value for value in values) else None

    def __repr__(self) -> str:
        return f"header({', '.join(map(repr, self.names))})"


class json_field:  # noqa: N801 - read as a function: key_from=json_field("id")
    """The key is a text or a whole number in a JSON body: ``json_field("id")``, ``json_field("event", "id")``."""

    def __init__(self, *path: str) -> None:
        if not path or not all(path):
            raise ConfigurationError(f"json_field{path!r}: it takes the names of members, such as json_field('id')")
        self.path = path
        self.where = f"the member {'.'.join(path)} of the JSON body"

    def __call__(self, request: Request, body: bytes) -> str | None:  # noqa: ARG002
        try:
            found: Any = orjson.loads(body)
        except ValueError:
            return None
        for name in self.path:
            found = found.get(name) if isinstance(found, dict) else None
        if isinstance(found, int) and not isinstance(found, bool):
            return str(found)
        return found if isinstance(found, str) else None

    def __repr__(self) -> str:
        return f"json_field({', '.join(map(repr, self.path))})"
