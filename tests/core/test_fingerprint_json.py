"""The fingerprint of JSON, case by case: what is the same, what counts by its bytes, and how deep it may be."""

from __future__ import annotations

import json
import sys
from decimal import localcontext
from pathlib import Path
from typing import Any

import orjson
import pytest
import rfc8785
from hypothesis import example, given
from hypothesis import strategies as st

from oncekey.core.json_form import MAX_DEPTH, MAX_FLOATS, _for_orjson, _integer, fast, slow
from tests.core.fingerprints import is_raw, nested, of

VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "jcs"


# ---------------------------------------------------------------- what is the same


def vectors() -> list[Any]:
    """Names of the public cases."""
    return sorted(path.name for path in (VECTORS / "input").iterdir())


@pytest.mark.parametrize("name", vectors())
def test_rfc_8785_vectors_have_their_canonical_form(name: str) -> None:
    """Input and output of the RFC 8785 suite are one request, and the canonical form is the output itself."""
    given_, expected = ((VECTORS / side / name).read_bytes() for side in ("input", "output"))
    for parsed in filter(None, (fast(given_), slow(given_), fast(expected), slow(expected))):
        assert parsed[1](parsed[0]) == expected.strip()
    assert slow(given_) is not None
    assert of(given_) == of(expected)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a":1,"b":2}', '\n{ "b" : 2 ,\t"a" : 1 }\r\n'),
        ("[1.0, 10, 1e2, -0, 0.10, 1E-7]", "[1,1e1,100,0,0.1,0.0000001]"),
        ("[9007199254740991.0, 2251799813685249.5]", "[9007199254740991,22517998136852495e-1]"),
        ("[0.0, -0.0, 0e-99999999999999999999, 0e5]", "[0,0,0,0]"),
        (r'["\u00e9\u002F\/\u000a\ud83d\ude00"]', '["é//\\n\U0001f600"]'),
        ("9007199254740991", " 9007199254740991"),
        ("[-9007199254740991]", "[-9007199254740991 ]"),
        ('"x"', '"\\u0078"'),
        ('{"\U0001f600":1,"\ufb01":2}', '{"\ufb01":2,"\U0001f600":1}'),
        ('{"":{"":[]},"a":{}}', '{"a": {}, "": {"": []}}'),
    ],
)
def test_spellings_of_one_value_are_one_request(one: str, other: str) -> None:
    """Documents with one RFC 8785 form are one request."""
    assert of(one) == of(other)
    assert not is_raw(one)


def test_order_is_by_utf16_units() -> None:
    """Names past U+FFFF sort before U+E000 to U+FFFF, as RFC 8785 says and orjson does not."""
    body = '{"\ufb01":1,"\U0001f600":2}'.encode()
    for parsed in (fast(body), slow(body)):
        assert parsed is not None
        assert parsed[1](parsed[0]) == '{"\U0001f600":2,"\ufb01":1}'.encode()
    assert of(body, fields=["\ufb01", "\U0001f600"]) == of(body, fields=["\U0001f600", "\ufb01"])


def test_orjson_escapes_every_code_point_as_rfc8785() -> None:
    """All 1,112,064 characters are written alike by both libraries, alone and as a name."""
    for start in range(0, 0x110000, 0x400):
        block = "".join(map(chr, range(start, start + 0x400))) if not 0xD800 <= start < 0xE000 else ""
        assert orjson.dumps({block: block}) == rfc8785.dumps({block: block})


@given(number=st.floats(allow_nan=False, allow_infinity=False) | st.floats(-(10**6), 10**6).map(lambda f: round(f, 2)))
@example(number=1e-4)
@example(number=1e-6)
@example(number=1.5e-6)
@example(number=999999999999999.9)
@example(number=1e16)
@example(number=-0.0)
@example(number=123.0)
def test_floats_of_the_fast_path_are_written_as_rfc8785(number: float) -> None:
    """Any float, alone, in an array or in an object: orjson then writes what rfc8785 writes, or is not asked."""
    documents: list[Any] = [number, [number, "x"], {"a": number, "b": [number]}]
    for document in documents:
        expected = rfc8785.dumps(document)
        prepared = _for_orjson(document, MAX_FLOATS, astral=False)
        assert (prepared is None) == (abs(number) >= 2**53)
        assert prepared is None or prepared[1](prepared[0]) == expected


@pytest.mark.parametrize("price", ["19.99", "0.5", "-12.34", "0.0001", "123456.789"])
def test_prices_take_the_fast_path(price: str) -> None:
    """Ordinary decimal amounts are not sent the slow way."""
    assert fast(f'{{"amount": {price}, "items": [{{"p": {price}}}]}}'.encode()) is not None


@pytest.mark.parametrize(
    "dump", [json.dumps, lambda v: json.dumps(v, separators=(",", ":")), lambda v: json.dumps(v, indent=2)]
)
def test_common_requests_take_the_fast_path(dump: Any) -> None:
    """What clients send every day, compact, spaced or indented, in any order, is not sent the slow way."""
    body = {
        "b": 1999,
        "a": "EUR eur [",
        "c": {"id": "x y", "n": None},
        "d": [True, {"z": 1, "y": -2}],
        "é": "ü",
    }
    text = dump(body).encode() if "\\u" not in dump(body) else orjson.dumps(body)
    assert fast(text) is not None


# ---------------------------------------------------------------- what is raw


NOT_I_JSON = {
    "empty": b"",
    "blank": b" ",
    "duplicate name": b'{"a":1,"a":1}',
    "duplicate name, spaced": b'{"a": 1, "a": 2}',
    "duplicate name below": b'{"x":[{"a":1,"b":2,"a":1}]}',
    "duplicate name by escape": b'{"a":1,"\\u0061":1}',
    "duplicate empty name": b'{"":1,"":1}',
    "2^53": b'{"a":9007199254740992}',
    "-2^53": b"[-9007199254740992]",
    "2^53 + 1": b"[9007199254740993]",
    "2^64": b"[18446744073709551616]",
    "5,000 digits": b"[" + b"9" * 5000 + b"]",
    "5,000 digits, negative": b"[-" + b"9" * 5000 + b"]",
    "2^53 as a float": b"[9007199254740992.0]",
    "2^53 + 1 as a float": b"[9007199254740993.0]",
    "1e20": b"[-1e20]",
    "1e30": b"[1e30]",
    "rounded float": b"[4503599627370497.25]",
    "rounded fraction": b"[0.1000000000000000055511151231257827]",
    "rounded exponent": b"[9007199254740993e0]",
    "long fraction": b"[0." + b"1" * 100000 + b"]",
    "0.5 in 72 characters": b"[0.5" + b"0" * 69 + b"]",
    "overflow": b"[1e400]",
    "underflow": b"[1e-400]",
    "huge exponent": b"[1e99999999999999999999]",
    "tiny exponent": b"[1e-99999999999999999999]",
    "NaN": b"[NaN]",
    "Infinity": b"[-Infinity]",
    "bad UTF-8": b'["\xff"]',
    "overlong UTF-8": b'["\xc0\x80"]',
    "surrogate in UTF-8": b'["\xed\xa0\x80"]',
    "lone surrogate": b'["\\ud800"]',
    "lone surrogate in a name": b'{"\\uDFFF":1}',
    "surrogates in the wrong order": b'["\\ude00\\ud83d"]',
    "BOM": b"\xef\xbb\xbf{}",
    "UTF-16": '{"a":1}'.encode("utf-16-le"),
    "control character": b'["\x01"]',
    "leading zero": b"[01]",
    "trailing comma": b"[1,]",
    "two values": b"{} {}",
    "single quotes": b"{'a':1}",
    "form feed": b"{}\x0c",
    "other digits": "[\u0661]".encode(),
    "too deep": b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
    "10,000 deep": b"[" * 10_000 + b"]" * 10_000,
    "never closed": b"[" * 100_000,
    "never opened": b"]" * 100_000,
    "objects never closed": b'{"a":' * 100_000,
    "string never closed": b'["' + b'\\"' * 50_000 + b"[" * 200,
}


@pytest.mark.parametrize("body", NOT_I_JSON.values(), ids=NOT_I_JSON.keys())
def test_body_that_is_not_i_json_is_hashed_raw(body: bytes) -> None:
    """It is no error, it counts by its bytes, and is not the same as those bytes under another type."""
    assert fast(body) is None
    assert slow(body) is None
    assert is_raw(body)
    assert of(body) != of(body, content_type="application/octet-stream")


def test_raw_and_json_never_meet() -> None:
    """All bodies that a lax parser could take for one another are different requests."""
    spelled = [
        '{"a":2}',
        '{"a":1,"a":2}',
        '{"a":2,"a":2}',
        '{"a":1}',
        '{"a":null}',
        '{"a":"1"}',
        '{"a":true}',
        "{}",
        "[]",
    ]
    numbers = [
        "4503599627370497",
        "4503599627370497.25",
        "9007199254740991",
        "9007199254740992",
        "9007199254740993",
        "9007199254740992.0",
        "9007199254740993.0",
    ]
    assert len({of(body) for body in spelled + numbers}) == len(spelled + numbers)


def test_long_integers_are_not_even_read() -> None:
    """The length of an integer is looked at first: int() takes quadratic time, or has a limit of its own."""
    with pytest.raises(ValueError, match="past 2"):
        _integer("9" * 5000)


@pytest.mark.parametrize("digits", [0, 640])
def test_the_interpreter_s_limit_on_digits_does_not_matter(digits: int) -> None:
    """A long integer is raw whatever the process allows int() to read."""
    before, body = sys.get_int_max_str_digits(), b"[" + b"1" * 5000 + b"]"
    expected = of(body)
    sys.set_int_max_str_digits(digits)
    try:
        assert of(body) == expected
    finally:
        sys.set_int_max_str_digits(before)


def test_the_decimal_context_does_not_matter() -> None:
    """The app's decimal settings change neither what is raw nor what is not."""
    bodies = [
        b"[0.1000]",
        b"[123456789.125E0]",
        b"[9007199254740993.0]",
        b"[1e-99999999999999999999]",
        b"[0E-9999999999999999999]",
    ]
    expected = [of(body) for body in bodies]
    with localcontext() as context:
        context.prec = 1
        context.clear_traps()
        assert [of(body) for body in bodies] == expected
        for flag in context.traps:
            context.traps[flag] = True
        assert [of(body) for body in bodies] == expected


# ---------------------------------------------------------------- depth


DECOYS = ['"]"', r'"\"]"', r'"\"]\""', '"]]}}"', '"[[["', r'"\\"', '""']


@pytest.mark.parametrize("inside", ["1", "1.0", *DECOYS, "[]"])
def test_json_deeper_than_the_limit_is_raw(inside: str) -> None:
    """MAX_DEPTH levels are JSON, one more is raw, whichever way it is parsed and whatever strings contain."""
    room = MAX_DEPTH - (inside == "[]")
    assert not is_raw(nested(room, inside))
    assert is_raw(nested(room + 1, inside))


@pytest.mark.parametrize("decoy", DECOYS)
@pytest.mark.parametrize("levels", [MAX_DEPTH, MAX_DEPTH + 1])
def test_brackets_in_strings_do_not_hide_depth(decoy: str, levels: int) -> None:
    """Strings that seem to close what is open make a document neither shallow nor deep."""
    mirrored = decoy.replace("]", "[").replace("}", "{")
    text = f"[{decoy}," * levels + "1" + f",{mirrored}]" * levels
    assert is_raw(text) == (levels > MAX_DEPTH)


def test_wide_documents_are_not_deep() -> None:
    """Many brackets side by side are shallow: the document still counts by its value."""
    wide = "[" + ",".join(['{"a":["[","]",{}]}'] * 1000) + "]"
    assert not is_raw(wide)
    assert fast(wide.encode()) is not None


def test_depth_does_not_depend_on_the_stack() -> None:
    """The deepest JSON has one fingerprint, at whatever depth of calls it is taken."""
    body = nested(MAX_DEPTH, "1.0")

    def below(calls: int) -> bytes:
        return below(calls - 1) if calls else of(body)

    assert below(500) == of(body)


# ---------------------------------------------------------------- hostile documents


@pytest.mark.parametrize("literal", ["1.0", "1.00", "1e0", "0.1", "1e-5"])
@pytest.mark.parametrize("more", [0, 1])
def test_document_with_too_many_fractions_is_raw(literal: str, more: int) -> None:
    """However they are spelled: each costs a Python step, and a MiB of ``1.0,`` took half a second."""
    body = "[" + ",".join([literal] * (MAX_FLOATS + more)) + "]"
    assert is_raw(body) == bool(more)
    assert is_raw(f'{{"a": {body}, "b": "1.0 e E"}}') == bool(more)


def test_integers_and_strings_are_no_fractions() -> None:
    assert not is_raw("[" + ",".join(["1", '"1.0e5"', "-0"] * MAX_FLOATS) + "]")


HOSTILE = {
    "1.0": b"1.0,",
    "1.00": b"1.00,",
    "1e-5": b"1e-5,",
    "0.1": b"0.1,",
    "-0": b"-0,",
    "objects": b"{},",
    "surrogates": rb'"\ud83d\ude00",',
}


@pytest.mark.parametrize("piece", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("start", [b"[", b"[1e-5,", '["\U0001f600",'.encode()], ids=["alone", "tiny", "astral"])
def test_hostile_document_takes_no_python_step_for_each_value(start: bytes, piece: bytes) -> None:
    """Counted in calls, which the clock of a busy machine does not change: so many for fractions, and no more."""
    body = start + piece * 100_000 + b"1]"
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        of(body)
    finally:
        sys.setprofile(None)
    read_severely = body.count(b"-0") + body.count(b"{")
    assert calls < 3 * MAX_FLOATS + read_severely
