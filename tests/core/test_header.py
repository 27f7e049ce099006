"""The key in the header: what is accepted, what is refused and by which rule, and agreement with http-sfv."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from http_sfv.item import Item
from hypothesis import example, given
from hypothesis import strategies as st

from oncekey.core.header import BadKey, parse_key

VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "structured-fields"
UUID = "550e8400-e29b-41d4-a716-446655440000"


def rule(*values: bytes, **options: Any) -> str:
    """The rule by which a key is refused."""
    with pytest.raises(BadKey) as caught:
        parse_key(values, **options)
    return caught.value.rule


@pytest.mark.parametrize(
    "key",
    [
        UUID,
        "a",
        "0",
        "pi_3MtwBwLkdIwHu7ix28a3tqPa",
        "bm8gcGFkZGluZw+/==",
        "order:4711:v1.2~x",
        "a/b?c=d&e@f#g$h%i^j*(k)[l]{m}|n<o>'p!`",
        "k" * 255,
    ],
)
def test_both_spellings_are_one_key(key: str) -> None:
    """A key means the same with and without quotes."""
    assert parse_key([key.encode()]) == key
    assert parse_key([b'"' + key.encode() + b'"']) == key


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (rb'"with \"quotes\" and \\"', 'with "quotes" and \\'),
        (b'"a, b; c"', "a, b; c"),
        (b'" padded "', " padded "),
        (b' \t "K"\t ', "K"),
        (b"\tK ", "K"),
        (b'"K";a', "K"),
        (b'"K"; a=1;b="x;y";c=?0', "K"),
        (rb'"\"";a=:YQ==:', '"'),
    ],
)
def test_the_value_without_its_dress(value: bytes, key: str) -> None:
    """Escapes are resolved, parameters ignored, and white space is trimmed outside the quotes only."""
    assert parse_key([value]) == key


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"", "empty"),
        (b" \t ", "empty"),
        (b'""', "empty"),
        (b'"   "', "empty"),
        (b'"";a=1', "empty"),
        (b"k" * 256, "too_long"),
        (b'"' + b"k" * 256 + b'"', "too_long"),
        (b'"' + rb"\"" * 256 + b'"', "too_long"),
        ("clé".encode(), "not_ascii"),
        ('"clé"'.encode(), "not_ascii"),
        (b"\xff", "not_ascii"),
        (b'"', "unterminated"),
        (b'"abc', "unterminated"),
        (b'"abc\\"', "unterminated"),
        (b'"abc\\', "unterminated"),
        (rb'"a\nb"', "bad_escape"),
        (b'"a" b', "trailing"),
        (b'"a"b', "trailing"),
        (b'"a""b"', "trailing"),
        (b'"a" ;b=1', "trailing"),
        (b'"a";B=1', "trailing"),
        (b'"a";b=', "trailing"),
        (b'"a";' + b";".join([b"b"] * 600), "trailing"),
        (b"a b", "bad_character"),
        (b"a\tb", "bad_character"),
        (b"a\x00", "bad_character"),
        (b"a\x7f", "bad_character"),
        (b'"a\x7f"', "bad_character"),
        (b'"a\tb"', "bad_character"),
        (b'"a\r\n"', "bad_character"),
        (b"a;b=1", "bad_character"),
        (b"a\\b", "bad_character"),
        (b'a"', "bad_character"),
        (b"a,b", "repeated"),
        (b"a, a", "repeated"),
        (b'"a", "b"', "repeated"),
        (b'"a","a"', "repeated"),
    ],
)
def test_malformed_value_is_refused_by_its_rule(value: bytes, expected: str) -> None:
    """Each malformed value is refused by the rule that it breaks."""
    assert rule(value) == expected


def test_absent_and_repeated_headers_are_refused() -> None:
    """No field at all and two fields are refused, two equal ones as well."""
    assert rule() == "missing"
    assert rule(b"a", b"b") == "repeated"
    assert rule(b'"a"', b'"a"') == "repeated"


@pytest.mark.parametrize("value", [b"a", b"42", b"1.5", b"?1", b":YWJj:", b"@1659578233", b'%"abc"', b"a b", b"(1)"])
def test_strict_syntax_refuses_items_that_are_no_string(value: bytes) -> None:
    """The strict syntax refuses every item that is not a String."""
    assert rule(value, syntax="strict") == "bare_not_allowed"


def test_strict_syntax_takes_quoted_strings() -> None:
    """The strict syntax takes the quoted form, escapes and parameters included."""
    assert parse_key([rb'"K"'], syntax="strict") == "K"
    assert parse_key([rb'"K\\";a=1'], syntax="strict") == "K\\"
    assert rule(b"", syntax="strict") == "empty"
    assert rule("clé".encode(), syntax="strict") == "not_ascii"


def test_lengths_count_characters_of_the_key() -> None:
    """Limits apply to the key itself: its quotes and escapes do not count."""
    assert parse_key([b'"' + rb"\"" * 255 + b'"']) == '"' * 255
    assert parse_key([b'"abcd"'], min_length=4, max_length=4) == "abcd"
    assert rule(b'"abc"', min_length=4) == "too_short"
    assert rule(b"abcde", max_length=4) == "too_long"


@pytest.mark.parametrize(
    "key",
    [UUID, UUID.upper(), "00000000-0000-7000-8000-000000000000", UUID.replace("-", ""), UUID.replace("-", "").upper()],
)
def test_uuid_format_takes_uuids_in_their_spelling(key: str) -> None:
    """A UUID of any version passes, quoted or bare, with dashes or without. Two spellings are two keys: a stored key
    is found by its bytes."""
    assert parse_key([key.encode()], key_format="uuid") == key
    assert parse_key([f'"{key}"'.encode()], key_format="uuid", syntax="strict") == key


@pytest.mark.parametrize(
    "key", ["abc", UUID.replace("-", "", 1), UUID.replace("-", "")[1:], "{" + UUID + "}", UUID + "0", UUID[:-1] + "g"]
)
def test_uuid_format_refuses_the_rest(key: str) -> None:
    """Whatever is not 8-4-4-4-12 or 32 hexadecimal digits is refused."""
    assert rule(key.encode(), key_format="uuid") == "not_uuid"


def test_keys_are_not_folded() -> None:
    """Keys that differ by case or inner padding stay different."""
    assert len({parse_key([v]) for v in (b"k", b"K", b'"k "', b'" k"', b'"k"')}) == 4


@pytest.mark.parametrize(
    "value",
    [
        b'"s3cr3t',
        b"s3cr3t s3cr3t",
        b'"s3cr3t" s3cr3t',
        b'"s3cr3t";S3CR3T',
        b'"s3cr3t\\s"',
        b"s3cr3t" * 50,
        b"s3cr3t,",
    ],
)
def test_errors_do_not_tell_the_key(value: bytes) -> None:
    """No part of the value is in the error or in an error behind it; the text is one sentence with advice."""
    with pytest.raises(BadKey) as caught:
        parse_key([value])
    assert "s3cr3t" not in f"{caught.value!r} {caught.value}".lower()
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert " send " in str(caught.value)
    assert str(caught.value).count(".") == 1


def test_limits_are_in_the_text() -> None:
    """The text for a wrong length says what the limit is."""
    with pytest.raises(BadKey, match="longer than 7 characters"):
        parse_key([b"12345678"], max_length=7)
    with pytest.raises(BadKey, match="shorter than 20 characters"):
        parse_key([b"12345678"], min_length=20)


# ---------------------------------------------------------------- against the reference


def reference(value: bytes) -> str | None:
    """What http-sfv makes of a field value: the String, or None."""
    item = Item()
    try:
        item.parse(value.strip(b" \t"))  # HTTP takes this white space off, before structured fields begin
    except ValueError:
        return None
    return item.value if type(item.value) is str else None


def ours(value: bytes, syntax: Any) -> str | None:
    """What we make of it, without limits; an empty String counts as accepted."""
    try:
        return parse_key([value], syntax=syntax, max_length=10**6)
    except BadKey as refused:
        if refused.rule == "empty" and value.strip(b" \t")[:1] == b'"':
            return reference(value)  # blank Strings are Strings: refused as keys, by a rule of our own
        return None


EDGES = st.sampled_from(
    [
        '"',
        '"',
        '"',
        "\\",
        '\\"',
        "\\\\",
        ";",
        ";a",
        "; b=1",
        ";a=",
        '="x"',
        "=?1",
        "=:YQ==:",
        "=1.5",
        ",",
        " ",
        "\t",
        "a",
        "K",
        "*",
        "é",
        "\x7f",
        "\x00",
        "\n",
        "[",
        "~",
        "!",
        "@1",
        '%"a%c3%a9"',
        "1111111111111111",
    ]
).map(str.encode)
QUOTED = st.lists(EDGES | st.binary(max_size=3), max_size=12).map(lambda pieces: b'"' + b"".join(pieces))


@given(value=QUOTED | QUOTED.map(lambda v: v + b'"') | QUOTED.map(lambda v: b' \t"K' + v + b" "))
@example(value=b'"a";b')
@example(value=b'"a\\"')
@example(value=b'"";a')
@example(value=b'"\x7f"')
def test_quoted_values_agree_with_http_sfv(value: bytes) -> None:
    """Whatever begins with a quote is accepted with the same value, or refused, by both parsers."""
    expected = reference(value)
    assert ours(value, "any") == expected
    assert ours(value, "strict") == expected


@given(key=st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=255))
def test_every_string_survives_http_sfv_serialisation(key: str) -> None:
    """A key that http-sfv wrote is read back as it was, unless it is blank."""
    value = str(Item(key)).encode()
    if key.isspace():
        assert rule(value) == "empty"
    else:
        assert parse_key([value], syntax="strict") == key


@given(value=st.binary(max_size=20) | st.lists(EDGES, max_size=6).map(b"".join))
def test_bare_keys_are_visible_ascii(value: bytes) -> None:
    """A bare value is accepted exactly if it has no space, control, quote, comma, semicolon or backslash."""
    trimmed = value.strip(b" \t")
    if trimmed[:1] == b'"':
        return
    if trimmed and all(0x21 <= char <= 0x7E and char not in b'",;\\' for char in trimmed):
        assert parse_key([value]) == trimmed.decode()
    else:
        assert rule(value) in {"empty", "not_ascii", "bad_character", "repeated"}


@given(values=st.lists(st.binary(max_size=12), max_size=2))
def test_only_badkey_is_raised(values: list[bytes]) -> None:
    """Whatever the bytes, the answer is a key or a BadKey."""
    try:
        key = parse_key(values)
    except BadKey:
        return
    assert key.isascii()
    assert key.isprintable()


def vectors() -> list[Any]:
    """Cases of the public suite that are items."""
    cases = [c for f in sorted(VECTORS.glob("*.json")) for c in json.loads(f.read_text()) if c["header_type"] == "item"]
    return [pytest.param(case, id=case["name"]) for case in cases]


@pytest.mark.parametrize("case", vectors())
def test_httpwg_vectors_parse_as_published(case: dict[str, Any]) -> None:
    """The httpwg suite: Strings give their value, everything else is refused in the strict syntax."""
    values = [line.encode("utf-8") for line in case["raw"]]
    expected = case.get("expected", [None])[0]
    if case.get("must_fail") or len(values) != 1 or type(expected) is not str or not expected.strip():
        assert rule(*values, syntax="strict", max_length=10**6)
    else:
        assert parse_key(values, syntax="strict", max_length=10**6) == expected
