"""How events and messages show a key or an error without its secrets (hazard 28)."""

from __future__ import annotations

import hashlib
import re

from oncekey.errors import OnceKeyError


def redact(key: str) -> str:
    """Show enough to recognise a key, but not the key: its first 4 characters and 8 hex digits of its hash.

    A key shorter than 12 characters shows only the hash: 4 characters would be too large a part of it.
    """
    mark = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    start = key[:4] if len(key) >= 12 else ""
    return f"{start}~{mark}" if start.isprintable() else f"~{mark}"


LONGEST, LONGEST_OF_OURS = 200, 600
"""How much of a message is shown. A sentence of oncekey's own ends with what to do, so it is shown whole."""

_VALUES = re.compile(
    r"""'(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" | \w+://\S+ | =\s*\([^)]*\)""",
    re.VERBOSE,
)
"""Where messages of databases and drivers put values: in quotes, in URLs, and after ``Key (a, b)=``."""


def describe(error: BaseException) -> str:
    """The class and the first line of the message, with ``…`` for every value. Later lines are left out, because
    they quote the row."""
    lines = str(error).splitlines()
    longest = LONGEST_OF_OURS if isinstance(error, OnceKeyError) else LONGEST
    message = _VALUES.sub("…", lines[0])[:longest] if lines else ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
