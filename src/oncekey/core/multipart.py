"""multipart/form-data without its boundary: one form for all tries of one request.

A client chooses a new boundary for every try, so the bytes of a retry differ although the request is the same.
`canonical_parts` gives the parts as length-prefixed pieces to be hashed instead, or None: "hash the bytes".

This module reads the framing strictly: two bodies that any server's parser could read as different must stay
different. So it refuses what parsers disagree about: a preamble, an epilogue, bare CR or LF as line ends, folded or
repeated part headers, padding after a boundary, and the boundary's text anywhere that is not a delimiter (a lenient
parser may split there under one boundary and not under another). A refusal is no error: the caller hashes the raw
bytes; at worst a retry with a new boundary is a mismatch.

All headers of a part are hashed as they were sent, except the case of their names, their order, and the white
space around their values. Values are not parsed, because a server could parse name, filename and filename* in another
way; the same client sends them in the same way again. The order of parts counts.

Must not: decode content, write files, or import anything from outside the standard library.
"""

from __future__ import annotations

import re
from struct import Struct

__all__ = ["MAX_PARTS", "canonical_parts", "is_boundary"]

# Servers stop at about 1,000 parts. A body with more than this is hashed as bytes, which costs nothing per part.
MAX_PARTS = 2000

# RFC 2046 section 5.1.1: 1 to 70 characters, the last one is not a space.
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]", re.ASCII).fullmatch
_FIELD_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch
_BAD_IN_VALUE = re.compile(rb"[\x00\r\n]").search

_count = Struct(">I").pack
_length = Struct(">Q").pack
_lengths = Struct(">QQ").pack


def is_boundary(text: str) -> bool:
    """Say whether `text` is a valid boundary."""
    return _BOUNDARY(text) is not None


def canonical_parts(body: bytes, boundary: bytes) -> list[bytes] | None:
    """Return pieces whose concatenation represents the parts of `body`, one to one; None if it is not strict."""
    delimiter = b"--" + boundary
    if not body.startswith(delimiter):
        return None
    pieces = body.split(b"\r\n" + delimiter, MAX_PARTS + 1)
    if len(pieces) > MAX_PARTS + 1:
        return None
    # One delimiter opens the body and one stands between two pieces. Any other is in the wrong place.
    if body.count(delimiter) != len(pieces):
        return None
    pieces[0] = pieces[0][len(delimiter) :]
    if pieces.pop() not in (b"--", b"--\r\n"):
        return None

    form: list[bytes] = []
    for piece in pieces:
        if not piece.startswith(b"\r\n"):
            return None
        head, blank_line, content = piece[2:].partition(b"\r\n\r\n")
        fields = _fields(head) if blank_line else None
        if fields is None:
            return None
        form.append(_count(len(fields)))
        for name, value in sorted(fields.items()):
            form += (_lengths(len(name), len(value)), name, value)
        form += (_length(len(content)), content)
    return form


def _fields(head: bytes) -> dict[bytes, bytes] | None:
    """Return the headers of a part of form data, names in lower case; None if they are not strict."""
    fields: dict[bytes, bytes] = {}
    for line in head.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        name = name.lower()
        # A folded line begins with white space, so it fails as a field name.
        if not colon or name in fields or not _FIELD_NAME(name) or _BAD_IN_VALUE(value):
            return None
        fields[name] = value.strip(b" \t")
    if not fields.get(b"content-disposition", b"").lower().startswith(b"form-data"):
        return None
    return fields
