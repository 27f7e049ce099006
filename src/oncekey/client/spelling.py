"""The key on the wire: made, put under a header, and spelled bare (``K``) or quoted (``"K"``, an RFC 8941 String).

Most APIs take the bare form only or both. The draft of the header, and APIs that follow it to the letter, want quotes.
oncekey's server says which spelling it refuses; the client then sends the other one, and remembers it for that origin.
"""

from __future__ import annotations

import re
from typing import Final, Literal, get_args
from uuid import uuid4

from oncekey.core.header import BadKey, parse_key
from oncekey.core.values import value
from oncekey.errors import ConfigurationError

Spelling = Literal["bare", "quoted"]
SPELLINGS: tuple[Spelling, ...] = get_args(Spelling)
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""RFC 9110, section 5.1: the name of a header."""


@value
class KeyForm:
    """How a request carries its key: under which header, and in which spelling.

    A server finds a key only in the form that it knows, so all tries of one intent use the form of the first.
    """

    header: str
    spelling: Spelling


def new_key() -> str:
    return str(uuid4())


def checked_key(key: str) -> str:
    """The key, if every server that follows the rules takes it in both spellings."""
    try:
        if not key.isascii() or parse_key([key.encode("ascii")]) != key:
            raise BadKey("bad_character")
    except BadKey as error:
        raise ConfigurationError(str(error)) from error
    return key


def checked_header(header: str) -> str:
    if not _TOKEN.fullmatch(header):
        raise ConfigurationError(f"{header!r} is no name of a header for the key, such as 'Idempotency-Key'")
    return header


def checked_spelling(spelling: Spelling) -> Spelling:
    if spelling not in SPELLINGS:
        raise ConfigurationError(f"spelling={spelling!r}: it takes 'bare' or 'quoted'")
    return spelling


def spelled(key: str, spelling: Spelling) -> str:
    if spelling == "bare":
        return key
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def other(spelling: Spelling) -> Spelling:
    return "quoted" if spelling == "bare" else "bare"
