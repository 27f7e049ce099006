"""The fingerprint: what was asked, in 32 bytes, so that a key reused for another request is noticed.

Version 2 is SHA-256 over a fixed head and six fields:

    version, form of the query, form of the body, and the six lengths, as big-endian 1 + 1 + 1 + 6 x 8 bytes
    method, path, query in its form, media type, headers, body in its form

All lengths come first and have a fixed width, so no content of one field can be read as part of another. The
form names how the body was read, so a body in one form never equals a body in another:

    RAW        the bytes as they came: every type but those below, and whatever is not what its type says
    JSON       RFC 8785: white space, the order of names, and the spelling of strings and numbers do not count
    FIELDS     RFC 8785 of the chosen members only; a body that has none of them counts whole, as JSON
    MULTIPART  the parts of form data, whatever the boundary (core/multipart.py)
    PAIRS      form text in the order of its names (core/form_text.py); a query is RAW or PAIRS

The headers are those that were chosen and are there, by name: the length of the name and the number of lines (8 bytes
each), the name, and each line behind its length. So one that is absent differs from one that is empty, several lines
keep their order, and choosing one more header changes nothing for requests without it.

Version 1, which rows of older deploys have, is without the form of the query (it is RAW), without headers (five
lengths), and without PAIRS; and JSON with any number of fractions has a form in it (core/json_form.py).

The rule in doubt is RAW. A retry that is spelled differently is then a mismatch, which is a nuisance; two
requests with one fingerprint would share an answer, which must not happen.

Must not: do I/O, depend on the state of the process (limits on stack or digits, decimal context), or raise
because of anything a client sent. What the form of a body is depends on its bytes and its type alone. A
change of what is hashed is a new FINGERPRINT_VERSION, and the old ones stay computable: rows outlive deploys.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from hashlib import sha256
from struct import Struct
from typing import Final

from oncekey.core.form_text import in_order
from oncekey.core.json_form import MAX_FLOATS, fast, select, slow
from oncekey.core.media_type import FIELDS, JSON, MULTIPART, PAIRS, RAW, media_type, read_media_type
from oncekey.core.multipart import canonical_parts

__all__ = ["FINGERPRINT_VERSION", "KNOWN_VERSIONS", "digest", "fingerprint"]

FINGERPRINT_VERSION: Final = 2
KNOWN_VERSIONS: Final = frozenset({1, 2})

_head_1 = Struct(">BBQQQQQ").pack
_head = Struct(">BBBQQQQQQ").pack
_length = Struct(">Q").pack
_lengths = Struct(">QQ").pack


def fingerprint(
    *,
    method: str,
    path: str,
    query: bytes,
    content_type: str | None,
    body: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
    fields: Sequence[str] | None = None,
    version: int = FINGERPRINT_VERSION,
) -> bytes:
    """Return the fingerprint of a request; never fails for what the client sent.

    `path` is best the undecoded one, where the server has it: `/a%2Fb` is not `/a/b`. `headers` are the lines of the
    chosen headers, names in lower case. `fields` are dotted names of JSON members (`"amountCents"`, `"customer.id"`)
    that stand for the whole body; none chosen means the whole body. They apply where the body is a JSON object;
    otherwise all of it counts.
    """
    if isinstance(fields, str):
        raise TypeError("fields is a sequence of names, not one string")
    return digest(method, path, query, content_type, body, headers, fields, version)


def digest(
    method: str,
    path: str,
    query: bytes,
    content_type: str | None,
    body: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    fields: Sequence[str] | None,
    version: int,
) -> bytes:
    """As :func:`fingerprint`, by position: it runs for every request."""
    # A long type is a client's invention and not worth a place in memory.
    read = read_media_type if content_type and len(content_type) > 100 else media_type
    media, form, boundary = read(content_type)
    content = body
    if form == JSON:
        limit = MAX_FLOATS if version > 1 else sys.maxsize
        parsed = fast(body, limit) or slow(body, limit)
        # What cannot be selected from counts whole, and as bytes: it is not what the route expects anyway.
        if parsed is None or (fields and type(parsed[0]) is not dict):
            form = RAW
        else:
            value, dump = parsed
            if fields:
                chosen = select(value, fields)
                if chosen or version == 1:  # with none of them (a name misspelt, say) the whole body counts
                    form, value = FIELDS, chosen
            content = dump(value)
    elif form == MULTIPART:
        parts = canonical_parts(body, boundary)
        if parts is None:
            form = RAW
            # Raw bytes mean something only together with their boundary.
            media += b';boundary="' + boundary + b'"'
        else:
            content = b"".join(parts)
    elif form == PAIRS:
        ordered = in_order(body) if version > 1 else None
        form, content = (RAW, body) if ordered is None else (PAIRS, ordered)

    # surrogatepass: one to one, and a server that hands over undecodable bytes as surrogates is no error.
    method_ = method.encode("utf-8", "surrogatepass")
    path_ = path.encode("utf-8", "surrogatepass")
    if version == 1:
        head = _head_1(1, form, len(method_), len(path_), len(query), len(media), len(content))
        return sha256(b"".join((head, method_, path_, query, media, content))).digest()
    query_form = RAW
    if query and (ordered := in_order(query)) is not None:
        query_form, query = PAIRS, ordered
    lines = _lines(headers) if headers else b""
    head = _head(version, query_form, form, len(method_), len(path_), len(query), len(media), len(lines), len(content))
    return sha256(b"".join((head, method_, path_, query, media, lines, content))).digest()


def _lines(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    by_name: dict[bytes, list[bytes]] = {}
    for name, line in headers:
        by_name.setdefault(name, []).append(line.strip(b" \t"))
    pieces = []
    for name in sorted(by_name):
        pieces += [_lengths(len(name), len(by_name[name])), name]
        for line in by_name[name]:
            pieces += [_length(len(line)), line]
    return b"".join(pieces)
