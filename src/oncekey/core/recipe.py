"""The recipe of a fingerprint: which parts of a request it was made of. A row keeps its recipe.

A policy names JSON members and headers, and a deploy may change them while clients still retry. So a row keeps the
version and the recipe of its fingerprint. A request is compared by the recipe of the row, not by the recipe of the
present policy. So an identical retry stays identical.

In a row, NULL is the default recipe of the version: the whole body, and in version 2 the headers DEFAULT_HEADERS. Every
other recipe is JSON: ``{"fields":["amount"],"headers":["if-match"]}``, each list sorted, without ``fields`` if the
whole body is hashed. Version 1 has no recipes: a recipe in such a row belongs to an earlier request (an older process
that starts a key over does not clear it). The recipe of a function's call names the arguments that count (``only``), or
those that do not (``ignored``). The route may have had ``fingerprint_fields``, so the request is compared
twice: with the whole body, and with the fields of the present policy. The two cannot be confused, because the form of
the body is hashed too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import orjson

from oncekey.core.fingerprint import FINGERPRINT_VERSION, KEY_STEP, KNOWN_VERSIONS, digest, one_key
from oncekey.core.values import value
from oncekey.errors import ConfigurationError

__all__ = ["DEFAULT_HEADERS", "Call", "Parts", "Recipe", "same_request"]

DEFAULT_HEADERS: Final = ("if-match", "if-none-match")

ReadLines = Callable[[frozenset[bytes]], Sequence[tuple[bytes, bytes]]]
"""Returns the lines of the headers with these names (in lower case), in the order in which they came."""

Parts = tuple[str, str, bytes, str | None, bytes, ReadLines]
"""The parts of a request: method, path, query, content type, body, and a function that reads its headers. A tuple is
cheap, and every request makes one."""


class Call:
    """In :data:`Parts` of a call, which has no headers: how its body is made of the arguments by another recipe.

    ``body(only, ignored)`` raises ConfigurationError if an argument that counts by that recipe has no form.
    """

    __slots__ = ("body",)

    def __init__(self, body: Callable[[frozenset[str] | None, frozenset[str]], bytes]) -> None:
        self.body = body

    def __call__(self, _: frozenset[bytes]) -> Sequence[tuple[bytes, bytes]]:
        return ()


@value
class Recipe:
    """Build it with :meth:`of`, which puts the names in order."""

    fields: tuple[str, ...] | None
    headers: frozenset[bytes]
    text: str | None
    """The recipe as a row of the newest version keeps it."""
    only: frozenset[str] | None = None
    """The arguments of a call that count; None: all but those in ``ignored``."""
    ignored: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        fields: Iterable[str] | None,
        headers: Iterable[str],
        only: Iterable[str] | None = None,
        ignored: Iterable[str] = (),
    ) -> Recipe:
        """``headers``: names in lower case."""
        members = None if fields is None else tuple(sorted(set(fields)))
        names, without = sorted(set(headers)), sorted(set(ignored))
        document: dict[str, Sequence[str]] = {} if members is None else {"fields": members}
        document["headers"] = names
        if without:
            document["ignored"] = without
        if only is not None:
            document["only"] = sorted(set(only))
        text = None
        if len(document) > 1 or names != sorted(DEFAULT_HEADERS):
            text = json.dumps(document, separators=(",", ":"))
        counted = None if only is None else frozenset(only)
        return cls(members, frozenset(name.encode() for name in names), text, counted, frozenset(without))

    def fingerprint(self, parts: Parts, version: int = FINGERPRINT_VERSION) -> bytes:
        method, path, query, content_type, body, read_lines = parts
        if isinstance(read_lines, Call):
            body = read_lines.body(self.only, self.ignored)
        lines = read_lines(self.headers) if self.headers else ()
        return digest(method, path, query, content_type, body, lines, self.fields, version)


DEFAULT: Final = Recipe.of(None, DEFAULT_HEADERS)
_MEMBERS: Final = frozenset({"fields", "headers", "bind", "only", "ignored"})


def same_request(
    version: int,
    text: str | None,
    stored: bytes,
    parts: Parts,
    ours: str | None,
    under_key: Callable[[int, bytes], bytes | None] | None = None,
) -> bool | None:
    """Whether the request of these parts made the row with this version and recipe; None: this process cannot tell.

    ``ours`` is the recipe of the present policy. ``under_key`` makes a keyed fingerprint for this row; None: there is
    no keyring.
    """
    key_id, version = divmod(version, KEY_STEP)
    if version not in KNOWN_VERSIONS:
        return None
    if key_id == 0 and version == 1:
        now = _read(ours)
        choices = {None, now.fields if now is not None else None}
        return any(Recipe(fields, frozenset(), None).fingerprint(parts, 1) == stored for fields in choices)
    recipe = _read(text)
    if recipe is None:
        return None
    try:
        plain = recipe.fingerprint(parts, version)
    except ConfigurationError:
        return False  # an argument that counted for the first call has no form in this one
    if key_id == 0:
        return plain == stored
    keyed = None if under_key is None else under_key(key_id, plain)
    if not keyed or not one_key(keyed, stored):
        return None
    return keyed == stored


def _read(text: str | None) -> Recipe | None:
    """The recipe in a row; None: this version does not know it."""
    if text is None:
        return DEFAULT
    try:
        members: Any = orjson.loads(text)
    except ValueError:
        return None
    if not isinstance(members, dict) or "headers" not in members or not members.keys() <= _MEMBERS:
        return None
    members.pop("bind", None)  # no part of the fingerprint: core/binding.py compares it
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in members.values()):
        return None
    return Recipe.of(members.get("fields"), members["headers"], members.get("only"), members.get("ignored", ()))
