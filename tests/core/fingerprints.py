"""What the tests of the fingerprint share: a request to take it of, and JSON text of any spelling."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

from oncekey.core.fingerprint import fingerprint
from oncekey.core.json_form import MAX_DEPTH

JSON = "application/json"


def of(body: bytes | str = b"", **changed: Any) -> bytes:
    """The fingerprint of a JSON request, but for what is changed."""
    data = body.encode() if isinstance(body, str) else body
    request: dict[str, Any] = {"method": "POST", "path": "/payments", "query": b"", "content_type": JSON}
    return fingerprint(**{**request, "body": data, **changed})


def is_raw(body: bytes | str) -> bool:
    """Say whether a body counts by its bytes: then a space behind it makes another request."""
    data = body.encode() if isinstance(body, str) else body
    return of(data) != of(data + b" ")


def nested(levels: int, inside: str = "1") -> str:
    """A document of so many levels, objects and arrays in turn."""
    text = inside
    for level in range(levels):
        text = f"[{text}]" if level % 2 else f'{{"a":{text}}}'
    return text


# ---------------------------------------------------------------- JSON text


SPACE = st.text(" \t\r\n", max_size=2)
PLAIN = "ab[]{}:,. '/é\x7f\u2028\ue000\ufb01\U0001f600"
ESCAPES = r"\" \\ \/ \n \b \u0061 \u00E9 \u0020 \u0000 \u001F \ud83d\ude00 \uD800"
CHARACTERS = st.sampled_from([*PLAIN, *ESCAPES.split(" ")])
STRINGS = st.lists(CHARACTERS, max_size=4).map(lambda chars: '"' + "".join(chars) + '"')
NAMES = st.sampled_from(['"a"', '"b"', '"a b"', '"ab"', r'"\u0061"', '""', '"é"', '"\ufb01"', '"\U0001f600"']) | STRINGS
ODD_NUMBERS = (
    "0 -0 -0.0 0.0 1.0 1e0 1E+2 10 1e16 1e+16 1e-7 0.000001 0.00001 1e21 1e22 0.1 0.10 19.99 5e-324 1e400 01 1. NaN "
    "9007199254740991 9007199254740992 -9007199254740991 -9007199254740992 9007199254740993.0 4503599627370497.25 "
    "18446744073709551615 18446744073709551616 1.8446744073709552e19 0.30000000000000004 123456789012345.6"
)
NUMBERS = (
    st.sampled_from(ODD_NUMBERS.split(" "))
    | st.from_regex(r"-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)
    | st.floats(allow_nan=False, allow_infinity=False).map(repr)
    | st.integers(-(10**4), 10**4).map(str)
)
LEAVES = st.sampled_from(["true", "false", "null"]) | STRINGS | NUMBERS


def padded(texts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """The same with random white space on both sides."""
    return st.tuples(SPACE, texts, SPACE).map("".join)


def containers(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Arrays and objects as text, names repeated now and then."""
    members = st.tuples(padded(NAMES), padded(children)).map(":".join)
    return st.lists(padded(children), max_size=4).map(lambda items: "[" + ",".join(items) + "]") | st.lists(
        members, max_size=4
    ).map(lambda items: "{" + ",".join(items) + "}")


DOCUMENTS = padded(st.recursive(LEAVES, containers, max_leaves=12))
DEEP = st.tuples(DOCUMENTS, st.integers(MAX_DEPTH - 4, MAX_DEPTH + 4)).map(lambda pair: nested(pair[1], pair[0]))


# ---------------------------------------------------------------- values and their spellings


# Compact and plain: here nearly every document takes the fast path, which the wild ones seldom do.
TAME = st.recursive(
    st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(-(2**53) + 1, 2**53 - 1)
    | st.decimals(-(10**6), 10**6, places=2).map(float)
    | st.text(max_size=4)
    | st.sampled_from([True, None, 1.0, 0.0, 1e-5, 0.5]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=10,
)

RNG = st.randoms(use_true_random=False)


def spell(value: Any, rng: random.Random) -> str:
    """One of the many texts of a value."""
    space = "".join(rng.choices(" \t\r\n", k=rng.randrange(3)))
    if isinstance(value, dict):
        members = [f"{spell(name, rng)}:{spell(member, rng)}" for name, member in value.items()]
        rng.shuffle(members)
        text = "{" + space + ",".join(members) + "}"
    elif isinstance(value, list):
        text = "[" + space + ",".join(spell(item, rng) for item in value) + "]"
    elif isinstance(value, str):
        units = value.encode("utf-16-be").hex()
        escaped = '"' + "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4)) + '"'
        text = rng.choice([json.dumps(value), json.dumps(value, ensure_ascii=False), escaped])
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        exact = Decimal(repr(value))
        forms = [repr(value), f"{exact:e}", f"{exact:E}"]
        if isinstance(value, int):
            forms += [f"{value}.0", f"{value}.00e0"]
        text = rng.choice(forms)
    else:
        text = json.dumps(value)
    return space + text + rng.choice(["", " "])
