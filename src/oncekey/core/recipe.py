"""Which parts of a request its fingerprint was made of, as a row remembers them.

A policy names JSON members and headers; a deploy may change them while clients still retry. So a row has the version
of its fingerprint and its recipe beside it, and a request is compared by the recipe of the row, not by that of the
day: an identical retry stays identical.

In a row NULL is the default recipe of the version: the whole body, and in version 2 the headers DEFAULT_HEADERS. Any
other is JSON: ``{"fields":["amount"],"headers":["if-match"]}``, each list sorted, ``fields`` absent where the whole
body counts. Version 1 had no recipes: whatever stands in such a row is of an earlier request (an older process that
starts a key over leaves it there). Its route may have had ``fingerprint_fields``, so it is tried with the whole body
and with those of today; the form that is hashed with a body keeps the two apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import orjson

from oncekey.core.fingerprint import FINGERPRINT_VERSION, KNOWN_VERSIONS, digest
from oncekey.core.values import value

__all__ = ["DEFAULT_HEADERS", "Parts", "Recipe", "same_request"]

DEFAULT_HEADERS: Final = ("if-match", "if-none-match")

ReadLines = Callable[[frozenset[bytes]], Sequence[tuple[bytes, bytes]]]
"""The lines of the headers of these names, which are in lower case, in the order in which they came."""

Parts = tuple[str, str, bytes, str | None, bytes, ReadLines]
"""Of a request: method, path, query, content type, body, and what reads its headers. A tuple: it is made for each
one."""


@value
class Recipe:
    """Build it with :meth:`of`, which puts the names in order."""

    fields: tuple[str, ...] | None
    headers: frozenset[bytes]
    text: str | None
    """As it stands in a row of the newest version."""

    @classmethod
    def of(cls, fields: Iterable[str] | None, headers: Iterable[str]) -> Recipe:
        """``headers``: names in lower case."""
        members = None if fields is None else tuple(sorted(set(fields)))
        names = sorted(set(headers))
        text = None
        if members is not None or names != sorted(DEFAULT_HEADERS):
            said = {"headers": names} if members is None else {"fields": members, "headers": names}
            text = json.dumps(said, separators=(",", ":"))
        return cls(members, frozenset(name.encode() for name in names), text)

    def fingerprint(self, parts: Parts, version: int = FINGERPRINT_VERSION) -> bytes:
        method, path, query, content_type, body, read_lines = parts
        lines = read_lines(self.headers) if self.headers else ()
        return digest(method, path, query, content_type, body, lines, self.fields, version)


DEFAULT: Final = Recipe.of(None, DEFAULT_HEADERS)


def same_request(version: int, text: str | None, stored: bytes, parts: Parts, ours: str | None) -> bool | None:
    """Whether a row of this version and recipe was made by the request of these parts; None: they are not known here.

    ``ours`` is the recipe that this process would use.
    """
    if version not in KNOWN_VERSIONS:
        return None
    if version == 1:
        now = _read(ours)
        choices = {None, now.fields if now is not None else None}
        return any(Recipe(fields, frozenset(), None).fingerprint(parts, 1) == stored for fields in choices)
    recipe = _read(text)
    return None if recipe is None else recipe.fingerprint(parts, version) == stored


def _read(text: str | None) -> Recipe | None:
    """The recipe that stands in a row; None: not one that this version knows."""
    if text is None:
        return DEFAULT
    try:
        said: Any = orjson.loads(text)
    except ValueError:
        return None
    if not isinstance(said, dict) or "headers" not in said or not said.keys() <= {"fields", "headers"}:
        return None
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in said.values()):
        return None
    return Recipe.of(said.get("fields"), said["headers"])
