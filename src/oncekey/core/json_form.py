"""JSON in its RFC 8785 form: all spellings of one value have one form.

Owns which texts have a form. A text must be I-JSON (RFC 7493), read strictly: no duplicate names, no lone surrogates,
valid UTF-8 without BOM, at most MAX_DEPTH levels, no number past 2^53 - 1 in any spelling, and no number that a
double would round. So 0.1 and 0.10 are one value, but 4503599627370497.25 has no form: a parser may read it as
4503599627370497. The caller limits the number of fractions: each costs a Python step, and one MiB of them took half a
second.

Must not: depend on the state of the process (limits on stack or digits, decimal context), or raise because of
anything that is in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from json import JSONDecoder
from typing import Any, Final

import orjson
import rfc8785

__all__ = ["MAX_DEPTH", "MAX_FLOATS", "fast", "select", "slow"]

# Deep enough for any real request, and far below the limits of both libraries. Those limits depend on the interpreter
# and on the depth of the caller's stack, and the same bytes must have one fingerprint everywhere.
MAX_DEPTH: Final = 100
MAX_FLOATS: Final = 10_000
"""How many numbers with a fraction or an exponent a document may have. A document with more is hashed as raw bytes."""

Dump = Callable[[Any], bytes]


# --- JSON, the fast way ---------------------------------------------------------------------------

_JSON_SPACE = b" \t\r\n"
_without_floats = frozenset((str, int, bool, type(None))).issuperset
_ASTRAL = re.compile(rb"[\xf0-\xf4]").search
_LIMIT = 2.0**53  # from here up every double is whole, and several numbers round to it


def _dump_fast(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def fast(body: bytes, max_floats: int = MAX_FLOATS) -> tuple[Any, Dump] | None:
    """Parse with orjson if its sorted output is provably the RFC 8785 form. None: use :func:`slow`.

    The proof. (1) orjson takes only RFC 8259 texts in UTF-8. (2) `body` and its unsorted round trip are equal
    after white space is removed from both. Inside strings this removes only 0x20, and never inside an escape, so
    both keep their tokens, with shorter strings. Equal bytes are then equal tokens, with the same number of
    colons: orjson dropped no name, so there was no duplicate. The output of json.dumps, with a space after every
    colon, passes too. (3) Strings: orjson writes every code point as RFC 8785 does (a test tries all of them).
    (4) Integers: OPT_STRICT_INTEGER refuses those past 2^53 - 1; -0 and integers that orjson reads as floats
    fail (2). (5) Floats: see _for_orjson; by (2) the literal was the shortest one, so nothing was rounded.
    (6) Order: orjson sorts by code point, RFC 8785 by UTF-16 unit. These differ only if a name has a character
    past U+FFFF; see _for_orjson. (7) Depth and the number of floats: as in slow.
    """
    try:
        value = orjson.loads(body)
        plain = orjson.dumps(value, option=orjson.OPT_STRICT_INTEGER)
    except (ValueError, TypeError):  # orjson's decode error is a ValueError, its encode error a TypeError
        return None
    if plain != body and plain.replace(b" ", b"") != body.translate(None, _JSON_SPACE):
        return None
    astral = not plain.isascii() and _ASTRAL(plain) is not None
    if not astral and type(value) is dict and _without_floats(map(type, value.values())):
        return value, _dump_fast  # a flat object is not deep; most requests end here
    return None if _too_deep(body) else _for_orjson(value, max_floats, astral=astral)


def _for_orjson(value: Any, max_floats: int, *, astral: bool) -> tuple[Any, Dump] | None:
    """Return a document that orjson writes as RFC 8785 does, and orjson's dump; None if orjson would not.

    Whole floats become integers, in place: RFC 8785 writes 1.0 as 1. The library rfc8785 writes floats near zero
    (0.00001 or 1e-7). For all other floats, orjson and RFC 8785 both use the fewest digits and no exponent.
    ``astral``: the document has characters past U+FFFF, so this function sorts objects, and orjson keeps their order.

    It costs a few C-level passes per object or array, and a Python step only for floats: a hostile document costs only
    a few times what parsing it costs.
    """
    top = [value]
    containers: list[Any] = [top]
    for container in containers:  # the list grows during the loop: it replaces recursion
        is_object = type(container) is dict
        if astral and is_object and len(container) > 1:
            members = sorted(container.items(), key=_by_utf16)
            container.clear()
            container.update(members)
        members = container.values() if is_object else container
        kinds = set(map(type, members))
        if _without_floats(kinds):
            continue
        if float in kinds:
            floats = members if len(kinds) == 1 else [member for member in members if type(member) is float]
            max_floats -= len(floats)
            if max_floats < 0:
                return None
            if max(floats) >= _LIMIT or min(floats) <= -_LIMIT:
                return None
            items = list(container.items() if is_object else enumerate(container))
            for at, number in items:
                if type(number) is float and (number.is_integer() or -1e-4 < number < 1e-4):
                    container[at] = int(number) if number.is_integer() else orjson.Fragment(rfc8785.dumps(number))
        if dict in kinds or list in kinds:
            containers += [member for member in members if type(member) is dict or type(member) is list]
    return top[0], orjson.dumps if astral else _dump_fast


def _by_utf16(member: tuple[str, Any]) -> bytes:
    return member[0].encode("utf-16-be")


# --- JSON, the reference way ----------------------------------------------------------------------


def _integer(literal: str) -> int:
    # Longer literals are past 2^53 anyway; int() would take quadratic time or hit the interpreter's limit.
    if len(literal) > 17 or not -(2**53) < (number := int(literal)) < 2**53:
        raise ValueError("integer past 2^53 - 1")
    return number


def _float(literal: str) -> float:
    # The decimal value must not change, or different amounts would have one form. 64 characters are more than
    # any double needs, and keep the exponent within the limits of Decimal.
    if len(literal) > 64:
        raise ValueError("number too long")
    number = float(literal)
    # From here up every double is an integer, and RFC 8785 writes most of them as integers that _integer refuses.
    if abs(number) >= 2**53:
        raise ValueError("number past 2^53 - 1")
    if number == 0.0:
        # Not by Decimal, whose exponent is limited: 0e-99999999999999999999 is still a zero.
        if literal.lower().partition("e")[0].strip("-0."):
            raise ValueError("number too small for a double")
    # Zeros at the end of a fraction do not change the value. (Zeros at the end of an exponent do; then repr differs.)
    # Decimal is six times as slow, so it comes second.
    elif literal.rstrip("0") != (text := repr(number)).rstrip("0") and Decimal(literal) != Decimal(text):
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


# Valid UTF-8 has no surrogates, so only escapes can make them.
_SURROGATE = re.compile(r"\\u[Dd][89A-Fa-f]").search


def slow(body: bytes, max_floats: int = MAX_FLOATS) -> tuple[Any, Dump] | None:
    """Parse strictly; None if the body is not I-JSON. RecursionError is not caught: within MAX_DEPTH it means
    that the caller's stack was nearly full, and a fingerprint must not depend on that."""
    if _too_deep(body):
        return None
    try:
        text = body.decode("utf-8")
        value = _read(text, max_floats)
        if astral := _SURROGATE(text) is not None:
            orjson.dumps(value)  # refuses lone surrogates and accepts pairs
    except (ValueError, TypeError):  # ValueError from the strict reader, TypeError from orjson's encoder
        return None
    return _for_orjson(value, max_floats, astral=astral or _ASTRAL(body) is not None)


def _read(text: str, max_floats: int) -> Any:
    if text.count(".") + text.count("e") + text.count("E") <= max_floats:  # every float has one of these characters
        return _decode(text)
    left = max_floats

    def counted(literal: str) -> float:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError("too many numbers with a fraction or an exponent")
        return _float(literal)

    decoder = JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_float=counted, parse_constant=_constant)
    return decoder.decode(text)


_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_NOT_BRACKETS_NOR_QUOTES = bytes(set(range(256)) - set(b'[]{}"'))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
# The closing quote is optional and the repeat possessive, so that an unclosed string costs linear time.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def _too_deep(body: bytes) -> bool:
    """Say whether a JSON text nests deeper than MAX_DEPTH; for a text that is not JSON, either answer is right.

    It measures the bytes, and exactly: the same document with other white space or order must get the same answer
    from :func:`fast` and :func:`slow`.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    # Remove strings first, because they may contain brackets. Without escapes, a string without brackets is now two
    # quotes in a row. If a quote is left after these are removed, some string contains a bracket.
    brackets = body.translate(_ONE_KIND, _NOT_BRACKETS_NOR_QUOTES).replace(b'""', b"")
    if b'"' in brackets or b"\\" in body:
        brackets = _STRINGS.sub(b"", body).translate(_ONE_KIND, _NOT_BRACKETS)
    # Each round removes the innermost level everywhere.
    for _ in range(MAX_DEPTH):
        inner_gone = brackets.replace(b"[]", b"")
        if len(inner_gone) == len(brackets):
            break
        brackets = inner_gone
    return bool(brackets)


def select(document: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return the chosen members under their dotted names. An absent member is left out, so it differs from null.

    A dot always means nesting, never a dot in a name, so a client cannot replace a nested member by a flat one.
    If a member on the way is not an object (`customer` in `customer.id`), its value is used, under its own name.
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
    return dict(sorted(chosen.items(), key=_by_utf16))
