"""The value of the `Idempotency-Key` header: bytes in, the client's key out.

Owns the syntax of the key. Two spellings of one key are accepted, and `"K"` and `K` are the same key K:

* quoted: an RFC 8941 / RFC 9651 String, `"` + printable ASCII + `"`, where only `\\"` and `\\\\` are escapes.
  Parameters after it (`"K";a=1`) must be well formed and are then ignored, as the RFC asks of a receiver
  that does not know them. Every quoted value gives what `http-sfv` gives; the key's limits come after.
* bare: the opaque token that Stripe made common: one or more visible ASCII characters except `"` `,` `;` and
  backslash. So UUIDs, base64 with `+ / =`, colons, dots, tildes and slashes pass. The four that do not are
  the delimiters of structured fields. A bare value that has one may be a list of two keys, a key with parameters,
  or a quoted key that lost a quote. A guess could give one request two keys, so it is refused.

Stores compare keys as bytes, so this module does not fold case, trim inside quotes or normalise. It removes only the
optional white space (space, tab) around the whole field value, because HTTP says it is not part of it.

Must not: do I/O, know about policies or HTTP statuses, or let a key reach an error message (keys are
capabilities and messages end up in logs). It runs once per request, hence one regular expression for the
common forms; `http-sfv`, ten times slower, parses only what has parameters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from http_sfv.item import Item

__all__ = ["COMMON", "MAX_LENGTH", "BadKey", "parse_key"]

MAX_LENGTH = 255
"""No policy takes a longer key."""

# Group 1: a quoted String without escapes. Group 2: a bare key. `_uncommon` handles every other value.
COMMON = re.compile(rb'"([ !#-\[\]-~]*)"|([!#-+\--:<-\[\]-~]+)').fullmatch
# A complete String at the start of the value, with escapes; the rest of the value is checked separately.
_STRING = re.compile(rb'"((?:[ !#-\[\]-~]|\\["\\])*+)"').match
_ESCAPED = re.compile(rb'\\(["\\])')
# Any version, either case, with all dashes or with none (``uuid4().hex``): the client chooses. Two spellings of one
# UUID are two keys, because keys are compared as bytes. If this module normalised them, a key that was stored before
# that deploy would no longer be found, and its retry would run again.
_UUID = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}|[0-9A-Fa-f]{32}").fullmatch
# http-sfv copies the rest of the input at every step, so its time grows with the square of the parameters' length.
_MAX_PARAMETER_BYTES = 1024

_WORDS = {
    "missing": "The request has no Idempotency-Key header: send one with a new unique value, such as a UUID.",
    "empty": "The Idempotency-Key is empty or blank: send a unique value, such as a UUID.",
    "repeated": "There is more than one Idempotency-Key: send the header once, with a single value"
    " (a comma separates two keys in this header, so a key that contains one must be in double quotes).",
    "too_long": "The Idempotency-Key is longer than {max_length} characters: send a shorter one, such as a UUID.",
    "too_short": "The Idempotency-Key is shorter than {min_length} characters: send a longer one, such as a UUID.",
    "not_ascii": "The Idempotency-Key has a character outside ASCII: send printable ASCII characters only.",
    "unterminated": "The Idempotency-Key has an opening double quote but no closing one: send both or neither.",
    "bad_escape": "The quoted Idempotency-Key has a backslash that escapes nothing: inside quotes send"
    ' \\" for a quote and \\\\ for a backslash, and no other escape.',
    "trailing": "The Idempotency-Key has text after its closing double quote that is not a well-formed"
    " parameter: send the quoted value alone.",
    "bare_not_allowed": "The Idempotency-Key is not in double quotes and this API requires the quoted form:"
    " send the value inside double quotes, as RFC 8941 says of a String.",
    "not_uuid": "The Idempotency-Key is not a UUID: send one in the form of 8-4-4-4-12 hexadecimal digits,"
    " or of 32 without dashes.",
    "bad_character": "The Idempotency-Key has a character that is not allowed: send visible ASCII characters"
    " (a value with spaces, semicolons or backslashes must be in double quotes).",
}


class BadKey(ValueError):
    """A refused key: `rule` is the machine's name of the rule, the text says what to send instead.

    `key`: what the client sent, if only a rule of this operation refuses it. With other rules, such as those of an
    earlier deploy, it was a key.
    """

    def __init__(self, rule: str, *, key: str | None = None, min_length: int = 1, max_length: int = MAX_LENGTH) -> None:
        super().__init__(_WORDS[rule].format(min_length=min_length, max_length=max_length))
        self.rule = rule
        self.key = key if key is not None and len(key) <= MAX_LENGTH else None


def parse_key(
    values: Sequence[bytes],
    *,
    syntax: Literal["any", "strict"] = "any",
    key_format: Literal["uuid"] | None = None,
    min_length: int = 1,
    max_length: int = MAX_LENGTH,
) -> str:
    """Return the key in `values`, the raw values of all Idempotency-Key fields in order, or raise BadKey.

    `syntax="strict"` takes the quoted form only. The limits count characters of the key, without its quotes
    and escapes, so that both spellings are measured alike.
    """
    if len(values) != 1:
        raise BadKey("repeated" if values else "missing")
    raw = values[0].strip(b" \t")
    common = COMMON(raw)
    if common is None:
        key, bare = _uncommon(raw, syntax), False
    elif (quoted := common[1]) is not None:
        key, bare = quoted.decode("ascii"), False
    else:
        key, bare = raw.decode("ascii"), True

    # A client whose variable is not set sends a blank key. All its requests would share that key.
    if not key or key.isspace():
        raise BadKey("empty")
    if bare and syntax == "strict":
        raise BadKey("bare_not_allowed", key=key)
    if len(key) > max_length:
        raise BadKey("too_long", key=key, max_length=max_length)
    if len(key) < min_length:
        raise BadKey("too_short", key=key, min_length=min_length)
    if key_format == "uuid" and _UUID(key) is None:
        raise BadKey("not_uuid", key=key)
    return key


def _uncommon(raw: bytes, syntax: str) -> str:
    """Parse a value with escapes or parameters; for every other one, find the rule that it breaks."""
    if not raw:
        raise BadKey("empty")
    if not raw.isascii():
        raise BadKey("not_ascii")
    if raw[:1] != b'"':
        if syntax == "strict":
            raise BadKey("bare_not_allowed")
        raise BadKey("repeated" if b"," in raw else "bad_character")

    string = _STRING(raw)
    if string is None:
        raise BadKey(_why_no_string(raw))
    rest = raw[string.end() :]
    if rest and not _are_parameters(rest):
        raise BadKey("repeated" if rest.lstrip(b" \t")[:1] == b"," else "trailing")
    return _ESCAPED.sub(rb"\1", string[1]).decode("ascii")


def _are_parameters(rest: bytes) -> bool:
    """Say whether what follows a String is well-formed parameters, as http-sfv sees it."""
    if rest[:1] != b";" or len(rest) > _MAX_PARAMETER_BYTES:
        return False
    try:
        Item().parse(b'""' + rest)
    except ValueError:
        # Return only a flag: the library's error would quote characters of the header.
        return False
    return True


def _why_no_string(raw: bytes) -> str:
    """Name the first rule of RFC 9651 section 4.2.5 that a value with an opening quote breaks."""
    at = 1
    while at < len(raw):
        char = raw[at]
        if char == 0x5C:  # backslash
            if at + 1 == len(raw):
                return "unterminated"
            if raw[at + 1] not in b'"\\':
                return "bad_escape"
            at += 1
        elif not 0x20 <= char <= 0x7E:
            return "bad_character"
        at += 1
    return "unterminated"


def as_header(key: str) -> bytes:
    """The key as a client may send it: bare if possible, otherwise quoted."""
    try:
        if parse_key([key.encode("ascii")]) == key:
            return key.encode("ascii")
    except BadKey:
        pass
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'.encode("ascii")
