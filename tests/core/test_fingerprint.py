"""The fingerprint: one value for one request however it is spelled, and never one value for two requests."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncekey.core.fingerprint import FINGERPRINT_VERSION, fingerprint
from tests.core.fingerprints import RNG, TAME, of, spell

FORM = "application/x-www-form-urlencoded"

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
def test_digests_of_version_1_never_change(request_: dict[str, Any], digest: str) -> None:
    """Version 1 gives these digests for ever: rows written by an older deploy are compared with them."""
    assert of(**request_, version=1).hex() == digest


@pytest.mark.parametrize(
    ("request_", "digest"),
    [
        ({"body": b""}, "2a6ce98eeef56aaec9cfae13063b0146945ca59d64d2fbda27c577854016073f"),
        (
            {"body": b'{"b": [1.50, null, "\\u00e9"], "a": 1}'},
            "0861663c00ed84080bb3850216fbb485120034103339163efda2f4bac2f15375",
        ),
        (
            {"body": b'{"a":1,"a":2}', "query": b"b=2&a=1&b=1"},
            "f69805d1e12b2c9e4282ca1274b1a732babd12209ea0fa9ec3a6709abce16275",
        ),
        (
            {"body": b'{"a":1,"b":{"c":2}}', "fields": ["b.c", "z"]},
            "4cd7a69e0296cd0e3945d27d844edf2ae631d45d0ee146c029c81bccb081063b",
        ),
        (
            {
                "body": b"b=2&a=1",
                "content_type": FORM,
                "headers": [(b"if-match", b"1"), (b"accept", b""), (b"if-match", b"2")],
            },
            "e7f8276f021fdc69df6737a4904e63843542e8ebcc87c29b380052f7e3805844",
        ),
        (
            {"body": b"a=1", "content_type": "Text/Plain; Charset=UTF-8", "method": "PATCH", "path": "/é"},
            "dae7d88b802f3bc5ada3ca4dc682b2742af90ff3110ad5feab92d9cf054127c4",
        ),
    ],
)
def test_golden_values_of_version_2(request_: dict[str, Any], digest: str) -> None:
    """The newest version, written down for the next one."""
    assert FINGERPRINT_VERSION == 2
    assert of(**request_).hex() == digest


# ---------------------------------------------------------------- fields of the request


def test_every_field_changes_the_fingerprint() -> None:
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
        of('{"a":1}'),
        of('{"a":1}', fields=["a"]),
    }
    assert len(seen) == 13


def test_chosen_headers_change_the_fingerprint() -> None:
    """By name and line: absent is not empty, lines keep their order, and a name is no part of a line."""
    seen = [
        of("{}", headers=headers)
        for headers in (
            [],
            [(b"a", b"")],
            [(b"a", b""), (b"a", b"")],
            [(b"a", b"1")],
            [(b"b", b"1")],
            [(b"a", b"1"), (b"a", b"2")],
            [(b"a", b"2"), (b"a", b"1")],
            [(b"a", b"1,2")],
            [(b"a", b"1"), (b"b", b"2")],
            [(b"ab", b"12")],
        )
    ]
    assert len(set(seen)) == len(seen)
    assert of("{}", headers=[(b"a", b"1"), (b"b", b"2"), (b"a", b"3")]) == of(
        "{}", headers=[(b"b", b"2"), (b"a", b"1"), (b"a", b"3")]
    )
    assert of("{}", headers=[(b"a", b" 1\t")]) == of("{}", headers=[(b"a", b"1")])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (b"a=1&b=2", b"b=2&a=1", True),
        (b"a=1&b=2&a=3", b"b=2&a=1&a=3", True),
        (b"a=1&a=2", b"a=2&a=1", False),
        (b"ab=1&a%62=2", b"a%62=2&ab=1", False),
        (b"m[a]=1&m[b]=2&z=1", b"z=1&m[a]=1&m[b]=2", True),
        (b"m[]=1&m[a]=2", b"m[a]=2&m[]=1", False),
        (b"m%5Ba%5D=1&m[b]=2", b"m[b]=2&m%5Ba%5D=1", False),
        (b"a=%41&b=1", b"a=A&b=1", False),
        (b"a=x+y&b=1", b"a=x%20y&b=1", False),
        (b"a&b=1", b"b=1&a", False),
        (b"a=1&&b=2", b"b=2&&a=1", False),
        (b"a=%zz&b=1", b"b=1&a=%zz", False),
        (b"%ff=1&%fe=2", b"%fe=2&%ff=1", False),
        (b"a=1;c=2&c=3", b"c=3&a=1;c=2", False),
        (b"=1&b=2", b"b=2&=1", False),
    ],
)
def test_order_of_names_in_form_text(one: bytes, other: bytes, same: bool) -> None:
    """In a query and in a form body alike; what is not plainly form text counts as it came."""
    assert (of(query=one) == of(query=other)) == same
    assert (of(one, content_type=FORM) == of(other, content_type=FORM)) == same
    assert of(one, content_type="text/plain") != of(other, content_type="text/plain")
    assert of(one, content_type=f"{FORM}; charset=utf-16") != of(other, content_type=f"{FORM}; charset=utf-16")
    assert of(query=one, version=1) != of(query=other, version=1)
    assert of(one, content_type=FORM, version=1) != of(other, content_type=FORM, version=1)


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
def test_delimiters_inside_a_field_do_not_end_it(mark: str) -> None:
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
def test_utf_8_charset_of_json_changes_nothing(content_type: str) -> None:
    """UTF-8 is what JSON is in, so saying so changes nothing."""
    assert of('{"a": 1}', content_type=content_type) == of('{"a":1}')


@pytest.mark.parametrize(
    "content_type", ["application/vnd.api+json", "application/problem+JSON; charset=utf-8", "a/b+json"]
)
def test_types_that_end_in_json_are_json(content_type: str) -> None:
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
    assert of('{"c":{},"d":1}', fields=["c.id", "d"]) == of('{"d":1}', fields=["c.id", "d"])


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
def test_fields_of_a_body_that_is_no_object_count_the_whole_body(body: str) -> None:
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
def test_chosen_fields_have_one_fingerprint_by_either_parser(value: dict[str, Any], rng: random.Random) -> None:
    """The chosen part has one fingerprint however the body is spelled."""
    fields = ["a", "b.a", "c"]
    assert of(spell(value, rng), fields=fields) == of(orjson.dumps(value), fields=fields)


def test_body_with_none_of_the_chosen_fields_counts_whole() -> None:
    """A name that is misspelt in the policy must not make all bodies the same."""

    def of(body: bytes, version: int = 2) -> bytes:
        return fingerprint(
            method="POST",
            path="/payments",
            query=b"",
            content_type="application/json",
            body=body,
            fields=("amount_cents",),
            version=version,
        )

    assert of(b'{"amountCents":1}') != of(b'{"amountCents":2}')
    assert of(b'{"amount_cents":1,"note":"a"}') == of(b'{"amount_cents":1,"note":"b"}')
    assert of(b'{"amountCents":1}', 1) == of(b'{"amountCents":2}', 1)  # as rows of version 1 were made
