"""The fingerprint: what was asked, in 32 bytes. It shows when a client reuses a key for another request.

Version 2 is SHA-256 over a fixed head and six fields:

    version, form of the query, form of the body, and the six lengths, as big-endian 1 + 1 + 1 + 6 x 8 bytes
    method, path, query in its form, media type, headers, body in its form

All lengths come first and have a fixed width, so no content of one field can be read as part of another. The
form names how the body was read, so a body in one form never equals a body in another:

    RAW        the bytes as they came: for every other type, and for a body that is not what its type says
    JSON       RFC 8785: white space, the order of names, and the spelling of strings and numbers do not count
    FIELDS     RFC 8785 of the chosen members only; a body that has none of them is hashed whole, as JSON
    MULTIPART  the parts of form data, without the boundary (core/multipart.py)
    PAIRS      form text in the order of its names (core/form_text.py); a query is RAW or PAIRS

The headers are those that the policy names and the request has, sorted by name: the length of the name and the number
of lines (8 bytes each), the name, and each line after its length. So an absent header differs from an empty one,
several lines keep their order, and if a policy names one more header, requests without it keep their fingerprint.

Version 1, which rows of older deploys have, has no form of the query (it is RAW), no headers (five lengths), and no
PAIRS. In version 1, JSON may have any number of fractions (core/json_form.py).

**Keyed fingerprints.** A reader of the database could guess a body and compare hashes. So an app with a keyring
(``OnceKey(encryption=…)``) stores an HMAC of the row's name and the version 2 hash (encryption/fingerprints.py), after
CHECK_BYTES bytes that identify the key. The version in the row then is the id of the key times KEY_STEP, plus the
version of the hash. Below KEY_STEP there is no key.

If in doubt, the form is RAW. Then a retry with another spelling is a mismatch, which the client can correct. The other
error, two requests with one fingerprint, would give one request the other's answer, and must not happen.

Must not: do I/O, depend on the state of the process (limits on stack or digits, decimal context), or raise
because of anything that a client sent. The form of a body depends on its bytes and its type alone. If what is
hashed changes, FINGERPRINT_VERSION changes too. Old versions stay computable, because rows outlive deploys.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from struct import Struct
from typing import Final

from oncekey.core.form_text import in_order
from oncekey.core.json_form import MAX_FLOATS, fast, select, slow
from oncekey.core.media_type import FIELDS, JSON, MULTIPART, PAIRS, RAW, media_type, read_media_type
from oncekey.core.multipart import canonical_parts

__all__ = [
    "CHECK_BYTES",
    "FINGERPRINT_VERSION",
    "KEY_STEP",
    "KNOWN_VERSIONS",
    "LOST_KEY",
    "UnderKey",
    "digest",
    "fingerprint",
    "one_key",
]

FINGERPRINT_VERSION: Final = 2
KNOWN_VERSIONS: Final = frozenset({1, 2})
KEY_STEP: Final = 256
CHECK_BYTES: Final = 4

UnderKey = Callable[[int, str, str, bytes], bytes | None]
"""The keyed fingerprint of a hash, under the key with this id, in the row of this scope and key. None: there is no such
key. ``LOST_KEY``: the keyring declares this key lost for good."""
LOST_KEY: Final = b""
"""Equals no keyed fingerprint."""

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
    """Return the fingerprint of a request; nothing that a client sends makes it fail.

    `path` is the undecoded path, if the server has it: `/a%2Fb` is not `/a/b`. `headers` are the lines of the chosen
    headers, names in lower case. `fields` are dotted names of JSON members (`"amountCents"`, `"customer.id"`) that are
    hashed instead of the whole body. Without `fields`, or if the body is not a JSON object, the whole body is hashed.
    """
    if isinstance(fields, str):
        raise TypeError("fields is a sequence of names, not one string")
    return digest(method, path, query, content_type, body, headers, fields, version)


def one_key(keyed: bytes, other: bytes) -> bool:
    """Whether one key made these two keyed fingerprints."""
    return keyed[:CHECK_BYTES] == other[:CHECK_BYTES]


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
    """:func:`fingerprint` with positional parameters, which are faster: it runs for every request."""
    # A client invented a type that is this long: do not let it fill the cache.
    read = read_media_type if content_type and len(content_type) > 100 else media_type
    media, form, boundary = read(content_type)
    content = body
    if form == JSON:
        limit = MAX_FLOATS if version > 1 else sys.maxsize
        parsed = fast(body, limit) or slow(body, limit)
        # Only a JSON object has members to select. The route does not expect another value, so hash its bytes.
        if parsed is None or (fields and type(parsed[0]) is not dict):
            form = RAW
        else:
            value, dump = parsed
            if fields:
                chosen = select(value, fields)
                if chosen or version == 1:  # if the body has none of them (a misspelt name), the whole body is hashed
                    form, value = FIELDS, chosen
            content = dump(value)
    elif form == MULTIPART:
        parts = canonical_parts(body, boundary)
        if parts is None:
            form = RAW
            # Raw bytes have a meaning only together with their boundary.
            media += b';boundary="' + boundary + b'"'
        else:
            content = b"".join(parts)
    elif form == PAIRS:
        ordered = in_order(body) if version > 1 else None
        form, content = (RAW, body) if ordered is None else (PAIRS, ordered)

    # surrogatepass is one to one, and accepts the surrogates that some servers make of undecodable bytes.
    method_ = method.encode() if method.isascii() else method.encode("utf-8", "surrogatepass")
    path_ = path.encode() if path.isascii() else path.encode("utf-8", "surrogatepass")
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
