"""The key on the wire: made, and spelled bare (``K``) or quoted (``"K"``, an RFC 8941 String).

Most APIs take the bare form only or both. The draft of the header, and APIs that follow it to the letter, want quotes.
oncekey's server says which spelling it refuses; the client then sends the other one, and remembers it for that origin.
"""

from __future__ import annotations

from typing import Literal, get_args
from uuid import uuid4

from oncekey.core.header import BadKey, parse_key
from oncekey.errors import ConfigurationError

Spelling = Literal["bare", "quoted"]
SPELLINGS: tuple[Spelling, ...] = get_args(Spelling)


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


def spelled(key: str, spelling: Spelling) -> str:
    if spelling == "bare":
        return key
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def other(spelling: Spelling) -> Spelling:
    return "quoted" if spelling == "bare" else "bare"
