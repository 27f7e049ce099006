"""How a key and an error are shown to people who must not see either whole (hazard 28)."""

from __future__ import annotations

import hashlib
import re


def redact(key: str) -> str:
    """Shows that it is the same key, and not which: at most 4 characters, and 8 hex digits of its hash.

    Of a key shorter than 12 characters only the hash: 4 characters of it would be too much of it.
    """
    mark = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    start = key[:4] if len(key) >= 12 else ""
    return f"{start}~{mark}" if start.isprintable() else f"~{mark}"


_VALUES = re.compile(
    r"""'(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" | \w+://\S+ | =\s*\([^)]*\)""",
    re.VERBOSE,
)
"""Where messages of databases and drivers put values: in quotes, in URLs, and after ``Key (a, b)=``."""


def describe(error: BaseException) -> str:
    """The class and the message without values: its first line (later ones quote the row), quotes emptied."""
    lines = str(error).splitlines()
    message = _VALUES.sub("…", lines[0])[:200] if lines else ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
