"""The fingerprint: what was asked, in 32 bytes, so that a key reused for another request is noticed.

Version 1 is SHA-256 over a fixed head and five fields:

    version, form, and the five lengths, as big-endian 1 + 1 + 5 x 8 bytes
    method, path, query, media type, body in its form

All lengths come first and have a fixed width, so no content of one field can be read as part of another. The
form names how the body was read, so a body in one form never equals a body in another:

    RAW        the bytes as they came: every type but the two below, and whatever is not what its type says
    JSON       RFC 8785: white space, the order of names, and the spelling of strings and numbers do not count
    FIELDS     RFC 8785 of the chosen members only
    MULTIPART  the parts of form data, whatever the boundary (core/multipart.py)

The rule in doubt is RAW. A retry that is spelled differently is then a mismatch, which is a nuisance; two
requests with one fingerprint would share an answer, which must not happen. Hence JSON must be I-JSON (RFC
7493), read severely: no duplicate names, no lone surrogates, valid UTF-8 without BOM, at most MAX_DEPTH
levels, no number past 2^53 - 1 however it is spelled, and none that a double would round: 0.1 and 0.10 are
one value, but 4503599627370497.25 is not 4503599627370497, whatever a parser makes of it.

Media types: type and subtype in lower case, parameters sorted and unquoted. `charset=utf-8` is dropped for
JSON, which is always UTF-8; JSON in another charset is RAW. Elsewhere a charset changes what the bytes mean
and stays. The boundary is dropped where the parts are hashed.

Must not: do I/O, depend on the state of the process (limits on stack or digits, decimal context), or raise
because of anything a client sent. What the form of a body is depends on its bytes and its type alone. A
change of what is hashed is a new FINGERPRINT_VERSION: rows outlive deploys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache
from hashlib import sha256
from json import JSONDecoder
from struct import Struct
from typing import Any, Final

import orjson
import rfc8785

from oncekey.core.multipart import canonical_parts, is_boundary

__all__ = ["FINGERPRINT_VERSION", "MAX_DEPTH", "fingerprint"]

FINGERPRINT_VERSION: Final = 1
# Deep enough for any real request, and so shallow that neither library comes near a limit of its own: those
# depend on the interpreter and on who called us, and the same bytes must have one fingerprint everywhere.
MAX_DEPTH: Final = 100

_RAW, _JSON, _FIELDS, _MULTIPART = range(4)
_head = Struct(">BBQQQQQ").pack

_Dump = Callable[[Any], bytes]


def fingerprint(
    *,
    method: str,
    path: str,
    query: bytes,
    content_type: str | None,
    body: bytes,
    fields: Sequence[str] | None = None,
) -> bytes:
    """Return the fingerprint of a request; never fails for what the client sent.

    `path` is best the undecoded one, where the server has it: `/a%2Fb` is not `/a/b`. `fields` are dotted
    names of JSON members (`"amountCents"`, `"customer.id"`) that stand for the whole body; none chosen means
    the whole body. They apply where the body is a JSON object; otherwise all of it counts.
    """
    if isinstance(fields, str):
        raise TypeError("fields is a sequence of names, not one string")
    # A long type is a client's invention and not worth a place in memory.
    media_type = _media_type if content_type and len(content_type) > 100 else _remembered_media_type
    media, form, boundary = media_type(content_type)
    content = body
    if form == _JSON:
        parsed = _fast(body) or _slow(body)
        # What cannot be selected from counts whole, and as bytes: it is not what the route expects anyway.
        if parsed is None or (fields and type(parsed[0]) is not dict):
            form = _RAW
        else:
            value, dump = parsed
            if fields:
                form, value = _FIELDS, _select(value, fields)
            content = dump(value)
    elif form == _MULTIPART:
        parts = canonical_parts(body, boundary)
        if parts is None:
            form = _RAW
            # Raw bytes mean something only together with their boundary.
            media += b';boundary="' + boundary + b'"'
        else:
            content = b"".join(parts)

    # surrogatepass: one to one, and a server that hands over undecodable bytes as surrogates is no error.
    method_ = method.encode("utf-8", "surrogatepass")
    path_ = path.encode("utf-8", "surrogatepass")
    head = _head(FINGERPRINT_VERSION, form, len(method_), len(path_), len(query), len(media), len(content))
    return sha256(b"".join((head, method_, path_, query, media, content))).digest()


# --- JSON, the fast way ---------------------------------------------------------------------------

_JSON_SPACE = b" \t\r\n"
_without_floats = frozenset((str, int, bool, type(None))).issuperset
_ASTRAL = re.compile(rb"[\xf0-\xf4]").search


def _dump_fast(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _fast(body: bytes) -> tuple[Any, _Dump] | None:
    """Parse with orjson where its sorted output is provably the RFC 8785 form; None says nothing about body.

    The proof. (1) orjson takes only RFC 8259 texts in UTF-8. (2) `body` and its unsorted round trip are equal
    once the white space is out of both. Inside strings only 0x20 can go, and never from within an escape, so
    this leaves the tokens of both in place, strings merely shorter; equal bytes are then equal tokens, so the
    same number of colons: no name was dropped, there was no duplicate. What json.dumps sends, with a space
    after every colon, passes too. (3) Strings: orjson writes every code point as RFC 8785 does (a test tries
    all of them). (4) Integers: OPT_STRICT_INTEGER refuses those past 2^53 - 1; -0 and integers that orjson
    reads as floats fail (2). (5) Floats: see _is_plain; by (2) the literal was the shortest one, nothing was
    rounded. (6) Order: orjson sorts by code point, RFC 8785 by UTF-16 unit; these differ only when there is
    a character past U+FFFF, so a text with a 4-byte UTF-8 sequence is refused. (7) Depth: as in _slow.
    """
    try:
        value = orjson.loads(body)
        plain = orjson.dumps(value, option=orjson.OPT_STRICT_INTEGER)
    except (ValueError, TypeError):  # orjson's decode error is the one, its encode error the other
        return None
    if plain != body and plain.replace(b" ", b"") != body.translate(None, _JSON_SPACE):
        return None
    if not plain.isascii() and _ASTRAL(plain):
        return None
    if type(value) is dict and _without_floats(map(type, value.values())):
        return value, _dump_fast  # flat, hence not deep either: the commonest request ends here
    if not _is_plain(value) or _too_deep(body):
        return None
    return value, _dump_fast


def _is_plain(value: Any) -> bool:
    """Say whether every float in a document is written by orjson as RFC 8785 writes it.

    Costs one C-level pass per object or array, not a Python step per value (and beats a regular expression
    over the bytes, which would also have to tell numbers from what is inside strings).
    """
    containers: list[Any] = [[value]]
    for container in containers:  # grows as it goes: an explicit stack, so depth does not matter
        members = container.values() if type(container) is dict else container
        if _without_floats(map(type, members)):
            continue
        for member in members:
            kind = type(member)
            if kind is dict or kind is list:
                containers.append(member)
            elif kind is float and (member.is_integer() or orjson.dumps(member) != repr(member).encode()):
                # rfc8785 starts from repr and changes it for integers (1.0), and where the exponent is past -10
                # (1e-05); there orjson and repr differ. What is left is written alike by all three.
                return False
    return True


# --- JSON, the reference way ----------------------------------------------------------------------


def _integer(literal: str) -> int:
    # Longer literals are past 2^53 anyway; int() would take quadratic time or hit the interpreter's limit.
    if len(literal) > 17 or not -(2**53) < (number := int(literal)) < 2**53:
        raise ValueError("integer past 2^53 - 1")
    return number


def _float(literal: str) -> float:
    # The decimal value must survive: else different amounts would have one form. 64 characters are more than
    # any double needs, and keep an exponent far from what Decimal cannot hold.
    if len(literal) > 64:
        raise ValueError("number too long")
    number = float(literal)
    # From here up every double is an integer, and RFC 8785 writes most of them as one that _integer refuses.
    if abs(number) >= 2**53:
        raise ValueError("number past 2^53 - 1")
    if number == 0.0:
        # Apart from Decimal, which has limits to its exponent: 0e-99999999999999999999 is still a zero.
        if literal.lower().partition("e")[0].strip("-0."):
            raise ValueError("number too small for a double")
    elif Decimal(literal) != Decimal(repr(number)):
        raise ValueError("number with more digits than a double has")
    return number


def _constant(literal: str) -> float:
    raise ValueError(f"{literal} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("duplicate name")
    return members


_decode = JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant
).decode


# Valid UTF-8 has no surrogates, so they can come from escapes only.
_SURROGATE = re.compile(r"\\u[Dd][89A-Fa-f]").search


def _slow(body: bytes) -> tuple[Any, _Dump] | None:
    """Parse severely; None if the body is not I-JSON. RecursionError is not caught: within MAX_DEPTH it means
    that the caller's stack was nearly full, and a fingerprint must not depend on that."""
    if _too_deep(body):
        return None
    try:
        text = body.decode("utf-8")
        value = _decode(text)
        if _SURROGATE(text):
            rfc8785.dumps(value)  # refuses lone ones, wherever they are, and takes pairs
    except ValueError:
        return None
    return value, rfc8785.dumps


_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_NOT_BRACKETS_NOR_QUOTES = bytes(set(range(256)) - set(b'[]{}"'))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
# The closing quote is optional and the repeat possessive, so that an unclosed string costs linear time.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def _too_deep(body: bytes) -> bool:
    """Say whether a JSON text nests deeper than MAX_DEPTH; for what is not JSON, either answer is right.

    Measured on the bytes, and exactly, since nesting is part of the value: the same document in other white
    space or order must get the same answer, whichever way it is parsed.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    # Strings go first, for they may hold brackets. Without escapes a string that holds none is now two quotes
    # in a row; a quote left over after those are gone means that some string holds a bracket.
    brackets = body.translate(_ONE_KIND, _NOT_BRACKETS_NOR_QUOTES).replace(b'""', b"")
    if b'"' in brackets or b"\\" in body:
        brackets = _STRINGS.sub(b"", body).translate(_ONE_KIND, _NOT_BRACKETS)
    # Each round takes away the innermost level, everywhere at once.
    for _ in range(MAX_DEPTH):
        inner_gone = brackets.replace(b"[]", b"")
        if len(inner_gone) == len(brackets):
            break
        brackets = inner_gone
    return bool(brackets)


def _select(document: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return the chosen members under their dotted names; an absent one is absent, which null is not.

    A dot always means nesting, never a dot in a name: else a decoy member could stand for the real one. Where
    the way down ends early (`customer` is no object), what is there counts, under the name that leads to it.
    """
    chosen: dict[str, Any] = {}
    for field in fields:
        value: Any = document
        walked: list[str] = []
        for name in field.split("."):
            if type(value) is not dict:
                break
            if name not in value:
                walked.clear()
                break
            value = value[name]
            walked.append(name)
        if walked:
            chosen[".".join(walked)] = value
    return chosen


# --- media types ----------------------------------------------------------------------------------

_WORD = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_ESSENCE = re.compile(rf"[ \t]*({_WORD}/{_WORD})").match
_PARAMETER = re.compile(rf'[ \t]*;[ \t]*(?:({_WORD})=("(?:[^"\\]|\\.)*+"|{_WORD}))?', re.DOTALL).match
_UNQUOTE = re.compile(r"\\(.)", re.DOTALL)


def _media_type(content_type: str | None) -> tuple[bytes, int, bytes]:
    """Return the normal form of a Content-Type without boundary, the form to try for the body, the boundary.

    What is no media type, or names a parameter twice, is kept as it is, and its body is RAW: it is not known
    what a server would make of it.
    """
    if not content_type:
        return b"", _RAW, b""
    as_it_is = content_type.encode("utf-8", "surrogatepass"), _RAW, b""
    text = content_type.rstrip(" \t")
    found = _ESSENCE(text)
    if found is None:
        return as_it_is
    essence = found[1].lower()
    parameters: dict[str, str] = {}
    at = found.end()
    while at < len(text):
        parameter = _PARAMETER(text, at)
        if parameter is None:
            return as_it_is
        at = parameter.end()
        if parameter[1] is None:  # a stray semicolon
            continue
        name, value = parameter[1].lower(), parameter[2]
        if name in parameters:
            return as_it_is
        if value[0] == '"':
            value = _UNQUOTE.sub(r"\1", value[1:-1])
        parameters[name] = value.lower() if name == "charset" else value

    form, boundary = _RAW, b""
    if essence == "application/json" or essence.endswith("+json"):
        if parameters.get("charset") in ("utf-8", "utf8"):
            del parameters["charset"]
        if "charset" not in parameters:
            form = _JSON
    elif essence == "multipart/form-data" and is_boundary(parameters.get("boundary", "")):
        form, boundary = _MULTIPART, parameters.pop("boundary").encode()
    for name in sorted(parameters):
        quoted = parameters[name].replace("\\", "\\\\").replace('"', '\\"')
        essence += f';{name}="{quoted}"'
    return essence.encode("utf-8", "surrogatepass"), form, boundary


# Few spellings make nearly all requests.
_remembered_media_type = lru_cache(maxsize=256)(_media_type)
