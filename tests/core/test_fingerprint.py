"""The fingerprint: one value for one request however it is spelled, and never one value for two requests."""

from __future__ import annotations

import json
import random
import sys
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import orjson
import pytest
import rfc8785
from hypothesis import assume, example, given
from hypothesis import strategies as st

from oncekey.core.fingerprint import FINGERPRINT_VERSION, MAX_DEPTH, _fast, _integer, _is_plain, _slow, fingerprint

VECTORS = Path(__file__).resolve().parents[2].parent / "shared" / "vectors" / "jcs"
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


# ---------------------------------------------------------------- stability


@pytest.mark.parametrize(
    ("request_", "digest"),
    [
        ({"body": b""}, "a913fedb96658958fc1fbba929b5768409cbfb35969f3af271fa126e2b4011fa"),
        (
            {"body": b'{"b": [1.50, null, "\\u00e9"], "a": 1}'},
            "f9b599437cdd48163455e500ac0fe6b6bba51285e7e031570bc6bb4358268668",
        ),
        (
            {"body": b'{"a":1,"a":2}', "query": b"x=1"},
            "443a8b25e278cd1a71eaa25ee3c0e299318a47fa704a7bb36fea7bd258be8af9",
        ),
        (
            {"body": b'{"a":1,"b":{"c":2}}', "fields": ["b.c", "z"]},
            "d86797c7c49f3ace4a27f2df806b3d05560c3b375948534fe9e50f04340dd90b",
        ),
        (
            {"body": b"a=1", "content_type": "Text/Plain; Charset=UTF-8", "method": "PATCH", "path": "/é"},
            "2f73d81ae67e83cfbc8350b39e1e2748839a6c5fc95d3dbe0c30c1a427b21452",
        ),
        (
            {
                "body": b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--B--\r\n',
                "content_type": "multipart/form-data; boundary=B",
            },
            "3431f82022ab3c25db467962355be22153dd63e401c4f254568cb0c9e2d3ce59",
        ),
    ],
)
def test_golden_values(request_: dict[str, Any], digest: str) -> None:
    """Version 1 gives these digests for ever: rows written by an older deploy are compared with them."""
    assert FINGERPRINT_VERSION == 1
    assert of(**request_).hex() == digest


# ---------------------------------------------------------------- fields of the request


def test_every_field_counts() -> None:
    """Method, path, query, type and body each make another request, and so does a body by another form."""
    seen = {
        of("{}"),
        of("{}", method="PATCH"),
        of("{}", method="post"),
        of("{}", path="/payments/"),
        of("{}", path="/Payments"),
        of("{}", query=b"a=1"),
        of("{}", content_type=None),
        of("{}", content_type="text/plain"),
        of("[]"),
        of(""),
        of("null"),
        of("{}", fields=["a"]),
    }
    assert len(seen) == 12


PIECES = st.sampled_from(["", "a", "b", "ab", "/", "?", "\0", "\n", ":", "1", "POST", "é", "\ud800"])
TEXTS = st.lists(PIECES, max_size=3).map("".join)
BYTES = TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass"))
REQUESTS = st.tuples(TEXTS, TEXTS, BYTES, st.sampled_from(["text/a", "text/ab", "x"]), BYTES)


@given(one=REQUESTS, other=REQUESTS)
def test_no_field_runs_into_the_next(one: Any, other: Any) -> None:
    """Two requests have one fingerprint only if all fields are equal, wherever a delimiter may hide."""
    names = ("method", "path", "query", "content_type", "body")
    same = fingerprint(**dict(zip(names, one, strict=True))) == fingerprint(**dict(zip(names, other, strict=True)))
    assert same == (one == other)


@pytest.mark.parametrize("mark", ["", "/", "\n", "\r\n", "\0", ":", "|", ",", " ", "\x1f", "?", "&"])
def test_no_delimiter_is_believed(mark: str) -> None:
    """Whatever might be taken for the end of a field, in a field: it still ends where it ends."""
    names = ("method", "path", "query", "content_type", "body")
    for first, second in ((0, 1), (1, 2), (2, 4), (0, 2), (1, 4)):
        one, other = ["", "", b"", "x", b""], ["", "", b"", "x", b""]
        for request, texts in ((one, (f"a{mark}b", "c")), (other, ("a", f"b{mark}c"))):
            for at, text in zip((first, second), texts, strict=True):
                request[at] = text if at < 2 else text.encode()
        assert fingerprint(**dict(zip(names, one, strict=True))) != fingerprint(**dict(zip(names, other, strict=True)))  # type: ignore[arg-type]


def test_text_moved_across_a_field() -> None:
    """The same characters cut in other places are other requests."""
    cuts = [("ab", "c", b"d"), ("a", "bc", b"d"), ("a", "b", b"cd"), ("abc", "", b"d"), ("", "abcd", b"")]
    assert len({of(method=m, path=p, query=q, content_type=None) for m, p, q in cuts}) == len(cuts)


# ---------------------------------------------------------------- media types


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json; charset=utf-8",
        "application/json;charset=UTF-8",
        'Application/JSON ; charset="utf-8"',
        " application/json;",
        "application/json; charset=utf8 ",
    ],
)
def test_spellings_of_json(content_type: str) -> None:
    """UTF-8 is what JSON is in, so saying so changes nothing."""
    assert of('{"a": 1}', content_type=content_type) == of('{"a":1}')


@pytest.mark.parametrize(
    "content_type", ["application/vnd.api+json", "application/problem+JSON; charset=utf-8", "a/b+json"]
)
def test_json_suffix(content_type: str) -> None:
    """Types that end in +json are JSON, each a type of its own."""
    assert of('{"b": 1, "a": 2}', content_type=content_type) == of('{"a":2,"b":1}', content_type=content_type)
    assert of("{}", content_type=content_type) != of("{}")


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/json-seq",
        "application/json5",
        "application/json; charset=utf-16",
        "application/json; charset=utf-8; charset=utf-8",
        "application/json, application/json",
        "application/json; charset = utf-8",
        "json",
        "application/",
        "é/json",
    ],
)
def test_other_types_are_raw(content_type: str | None) -> None:
    """Bodies of other types, and of JSON in another charset, count by their bytes."""
    assert of('{"a": 1}', content_type=content_type) != of('{"a":1}', content_type=content_type)


def test_parameters_that_change_the_meaning_stay() -> None:
    """A charset of text, or a version of JSON, makes another request; order, case and quotes of it do not."""
    types = [
        "text/plain",
        "text/plain; charset=latin-1",
        "text/plain; charset=utf-8",
        "text/plain; a=B",
        "text/plain; a=b",
    ]
    assert len({of("x", content_type=t) for t in types}) == len(types)
    assert of("x", content_type="text/plain; b=2; charset=A") == of("x", content_type='TEXT/plain;Charset=a;B="\\2"')
    assert of("{}", content_type="application/json; v=2") != of("{}", content_type="application/json; v=1")
    assert of('{ "a":1}', content_type="application/json; v=2") == of('{"a":1}', content_type="application/json; v=2")


def test_parameters_cannot_be_faked_by_quoting() -> None:
    """A quoted value that looks like two parameters is not two parameters."""
    assert of("x", content_type='a/b; x="1;y=2"') != of("x", content_type="a/b; x=1; y=2")
    assert of("x", content_type='a/b; x="1\\";y=\\"2"') != of("x", content_type="a/b; x=1; y=2")


def test_long_types_are_the_same_as_remembered_ones() -> None:
    """A type too long to be remembered is normalised all the same."""
    spelled = "application/json;" + " " * 200 + "charset=utf-8"
    assert of('{"a": 1}', content_type=spelled) == of('{"a":1}')


# ---------------------------------------------------------------- JSON: what is the same


def vectors() -> list[Any]:
    """Names of the public cases."""
    if not VECTORS.is_dir():
        return [pytest.param(None, marks=pytest.mark.skip(reason="no ../shared/vectors beside the checkout"))]
    return sorted(path.name for path in (VECTORS / "input").iterdir())


@pytest.mark.parametrize("name", vectors())
def test_public_vectors(name: str) -> None:
    """Input and output of the RFC 8785 suite are one request, and the canonical form is the output itself."""
    given_, expected = ((VECTORS / side / name).read_bytes() for side in ("input", "output"))
    for parsed in filter(None, (_fast(given_), _slow(given_), _fast(expected), _slow(expected))):
        assert parsed[1](parsed[0]) == expected.strip()
    assert _slow(given_) is not None
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
def test_spellings_of_one_value(one: str, other: str) -> None:
    """Documents with one RFC 8785 form are one request."""
    assert of(one) == of(other)
    assert not is_raw(one)


def test_order_is_by_utf16_units() -> None:
    """Names past U+FFFF sort before U+E000 to U+FFFF, as RFC 8785 says and orjson does not."""
    body = '{"\ufb01":1,"\U0001f600":2}'.encode()
    assert _fast(body) is None
    parsed = _slow(body)
    assert parsed is not None
    assert parsed[1](parsed[0]) == '{"\U0001f600":2,"\ufb01":1}'.encode()


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
    """A float that the fast path lets through is written alike by both libraries."""
    if _is_plain([number]):
        assert orjson.dumps(number) == rfc8785.dumps(number)


@pytest.mark.parametrize("price", ["19.99", "0.5", "-12.34", "0.0001", "123456.789"])
def test_prices_take_the_fast_path(price: str) -> None:
    """Ordinary decimal amounts are not sent the slow way."""
    assert _fast(f'{{"amount": {price}, "items": [{{"p": {price}}}]}}'.encode()) is not None


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
    assert _fast(text) is not None


# ---------------------------------------------------------------- JSON: what is raw

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
def test_what_is_not_i_json_is_raw(body: bytes) -> None:
    """It is no error, it counts by its bytes, and is not the same as those bytes under another type."""
    assert _fast(body) is None
    assert _slow(body) is None
    assert is_raw(body)
    assert of(body) == of(bytes(bytearray(body)))


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


def nested(levels: int, inside: str = "1") -> str:
    """A document of so many levels, objects and arrays in turn."""
    text = inside
    for level in range(levels):
        text = f"[{text}]" if level % 2 else f'{{"a":{text}}}'
    return text


DECOYS = ['"]"', r'"\"]"', r'"\"]\""', '"]]}}"', '"[[["', r'"\\"', '""']


@pytest.mark.parametrize("inside", ["1", "1.0", *DECOYS, "[]"])
def test_depth_is_exact(inside: str) -> None:
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
    assert _fast(wide.encode()) is not None


def test_depth_does_not_depend_on_the_stack() -> None:
    """The deepest JSON has one fingerprint, at whatever depth of calls it is taken."""
    body = nested(MAX_DEPTH, "1.0")

    def below(calls: int) -> bytes:
        return below(calls - 1) if calls else of(body)

    assert below(500) == of(body)


# ---------------------------------------------------------------- properties on JSON text

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


def agree(body: bytes) -> None:
    """The fast path gives nothing, or just what the reference gives."""
    quick = _fast(body)
    if quick is not None:
        reference = _slow(body)
        assert reference is not None
        assert quick[1](quick[0]) == reference[1](reference[0])


@given(text=DOCUMENTS | DEEP)
@example(text='{"a":1,"a":1}')
@example(text='{"a": 1, "a": 2}')
@example(text='{"a b":1,"ab":1}')
@example(text='{"\ufb01":1,"\U0001f600":2}')
@example(text="[9007199254740992]")
@example(text="[1.0]")
@example(text="[1e+16]")
@example(text="[1e-6]")
@example(text="[-0]")
def test_fast_path_is_the_reference_on_any_text(text: str) -> None:
    """On JSON text of any spelling the fast path is the slow one, wherever it is taken."""
    agree(text.encode("utf-8"))


@given(value=TAME, spaced=st.booleans())
def test_fast_path_is_the_reference_on_tame_values(value: Any, spaced: bool) -> None:
    """On what clients write with json.dumps or orjson the fast path is the slow one, wherever it is taken."""
    body = json.dumps(value, ensure_ascii=False).encode() if spaced else orjson.dumps(value)
    agree(body)
    parsed = _slow(body)
    assert parsed is not None
    assert parsed[1](parsed[0]) == rfc8785.dumps(value)


@given(text=DOCUMENTS, at=st.integers(0, 60), extra=st.binary(min_size=1, max_size=2), cut=st.booleans())
def test_fast_path_is_the_reference_on_broken_text(text: str, at: int, extra: bytes, cut: bool) -> None:
    """On bytes that are no longer JSON neither path fails, and they still agree."""
    data = text.encode("utf-8")
    broken = data[:at] + extra + data[at + len(extra) * cut :]
    agree(broken)
    assert of(broken) == of(broken, fields=())


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


RNG = st.randoms(use_true_random=False)


@given(value=TAME, rng=RNG)
def test_spelling_never_counts(value: Any, rng: random.Random) -> None:
    """White space, order of names, escapes and forms of numbers do not change the fingerprint."""
    assert of(spell(value, rng)) == of(spell(value, rng)) == of(rfc8785.dumps(value))


def plain(value: Any) -> Any:
    """A value for comparison: numbers by what they are, true apart from 1."""
    if isinstance(value, dict):
        return {name: plain(member) for name, member in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return (type(value) is bool, value)


def changed(value: Any, other: Any, rng: random.Random) -> Any:
    """The value with something in it replaced, removed or added."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        rest = {key: member for key, member in value.items() if key != name}
        return rest if rng.random() < 0.3 else {**rest, name: changed(value[name], other, rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return rng.choice(
            [value[:at], [*value, other], [*value[:at], changed(value[at], other, rng), *value[at + 1 :]]]
        )
    return other


@given(value=TAME, other=TAME, rng=RNG)
def test_any_change_of_a_value_counts(value: Any, other: Any, rng: random.Random) -> None:
    """A document with something changed in it is another request, however both are spelled."""
    edited = changed(value, other, rng)
    assume(plain(edited) != plain(value))
    assert of(spell(edited, rng)) != of(spell(value, rng))


@given(one=DOCUMENTS, other=DOCUMENTS)
def test_different_documents_never_meet(one: str, other: str) -> None:
    """Two texts have one fingerprint only if a parser with exact numbers and all members sees one value."""

    def exact(text: str) -> Any:
        def members(pairs: list[tuple[str, Any]]) -> Any:
            return (
                "object",
                pairs if len(dict(pairs)) != len(pairs) else sorted(pairs, key=lambda pair: pair[0]),
            )

        return json.loads(text, parse_int=Decimal, parse_float=Decimal, object_pairs_hook=members)

    if of(one) == of(other) and one != other:
        assert repr(exact_numbers(exact(one))) == repr(exact_numbers(exact(other)))


def exact_numbers(value: Any) -> Any:
    """Decimals in one form each, inside whatever holds them."""
    if isinstance(value, Decimal):
        return value.normalize() + 0
    if isinstance(value, (list, tuple)):
        return [exact_numbers(item) for item in value]
    return value


# ---------------------------------------------------------------- chosen fields


def test_only_chosen_fields_count() -> None:
    """Members that were not chosen may change, chosen ones may not, at the top or below."""
    fields = ["amountCents", "customer.id"]
    first = of('{"amountCents":1,"customer":{"id":"x","name":"A"},"trace":1}', fields=fields)
    assert of('{"trace":2.0, "customer":{"name":"B","id":"x"}, "amountCents":1e0}', fields=fields) == first
    assert of('{"amountCents":2,"customer":{"id":"x"}}', fields=fields) != first
    assert of('{"amountCents":1,"customer":{"id":"y"}}', fields=fields) != first
    assert of('{"amountCents":1,"customer":{"id":"x"}}', fields=list(reversed(fields))) == first


def test_absent_is_not_null() -> None:
    """Absent, null and empty are three things, and so are values where an object was expected."""
    bodies = [
        "{}",
        '{"c":null}',
        '{"c":{"id":null}}',
        '{"c":"id"}',
        '{"c":[]}',
        '{"c":{"id":{}}}',
        '{"c":{"id":[]}}',
    ]
    assert len({of(body, fields=["c.id"]) for body in bodies}) == len(bodies)
    assert of('{"c":{}}', fields=["c.id"]) == of("{}", fields=["c.id"])


def test_a_dot_in_a_name_is_no_path() -> None:
    """A decoy member with a dot in its name does not stand for the nested one."""
    fields = ["c.id"]
    assert of('{"c.id":1,"c":{"id":2}}', fields=fields) != of('{"c.id":1,"c":{"id":3}}', fields=fields)
    assert of('{"c.id":1,"c":{"id":2}}', fields=fields) == of('{"c.id":9,"c":{"id":2}}', fields=fields)


@pytest.mark.parametrize(
    "body",
    [
        "[1]",
        "1",
        "null",
        '"a"',
        '{"a":1,"b":1,"b":2}',
        '{"a":1,"b":9007199254740992}',
        '{"a":1,"b":"\\ud800"}',
        "",
        "a=1",
    ],
)
def test_fields_of_what_is_no_object_are_the_whole_body(body: str) -> None:
    """Where there is nothing to choose from, every byte counts, not just the part that would be chosen."""
    assert of(body, fields=["a"]) != of(body + " ", fields=["a"])
    assert of(body, fields=["a"]) != of('{"a":1}', fields=["a"])


def test_fields_do_not_apply_to_other_types() -> None:
    """A form counts whole, whatever fields are chosen."""
    kind = "application/x-www-form-urlencoded"
    assert of("a=1&b=2", content_type=kind, fields=["a"]) != of("a=1&b=3", content_type=kind, fields=["a"])


def test_chosen_fields_are_not_the_body_that_looks_like_them() -> None:
    """A chosen part has a form of its own; no choice at all is the whole body."""
    assert of('{"a":1}', fields=["a"]) != of('{"a":1}')
    assert of('{"a":1,"b":2}', fields=[]) == of('{"a":1,"b":2}')


def test_fields_given_as_one_string_is_a_mistake() -> None:
    """A single string would be taken letter by letter, so it is refused."""
    with pytest.raises(TypeError, match="sequence of names"):
        of("{}", fields="amount")


@given(value=st.dictionaries(st.sampled_from("abc"), TAME, max_size=3), rng=RNG)
def test_fields_by_either_path(value: dict[str, Any], rng: random.Random) -> None:
    """The chosen part has one fingerprint however the body is spelled."""
    fields = ["a", "b.a", "c"]
    assert of(spell(value, rng), fields=fields) == of(orjson.dumps(value), fields=fields)
