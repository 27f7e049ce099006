"""Form data is hashed part by part: a new boundary is the same request, anything else is another one."""

from __future__ import annotations

from struct import pack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncekey.core.fingerprint import fingerprint
from oncekey.core.multipart import MAX_PARTS, canonical_parts, is_boundary

Part = tuple[list[bytes], bytes]
NAME = b'Content-Disposition: form-data; name="a"'
FILE = [b'Content-Disposition: form-data; name="f"; filename="x.png"', b"Content-Type: image/png"]
PARTS: list[Part] = [([NAME], b"1999"), (FILE, b"\x89PNG\r\n\x1a\n\r\n\r\n--")]


def body(parts: list[Part], boundary: bytes = b"XX") -> bytes:
    """Form data as clients write it."""
    framed = [b"--" + boundary + b"\r\n" + b"\r\n".join(head) + b"\r\n\r\n" + data + b"\r\n" for head, data in parts]
    return b"".join(framed) + b"--" + boundary + b"--\r\n"


def form(parts: list[Part], boundary: bytes = b"XX") -> bytes | None:
    """The canonical form in one piece."""
    pieces = canonical_parts(body(parts, boundary), boundary)
    return None if pieces is None else b"".join(pieces)


def hashed(data: bytes, content_type: str) -> bytes:
    """The fingerprint of a request with this body."""
    return fingerprint(method="POST", path="/up", query=b"", content_type=content_type, body=data)


def test_a_new_boundary_is_the_same_request() -> None:
    """The boundary, its quotes and the case of the type do not count."""
    first = hashed(body(PARTS, b"XX"), "multipart/form-data; boundary=XX")
    assert hashed(body(PARTS, b"y(y)/3"), 'Multipart/Form-Data;  boundary="y(y)/3"') == first


@pytest.mark.parametrize(
    "other",
    [
        [([NAME], b"1998"), PARTS[1]],
        [([NAME.replace(b'"a"', b'"b"')], b"1999"), PARTS[1]],
        [PARTS[0], ([FILE[0].replace(b"x.png", b"y.png"), FILE[1]], PARTS[1][1])],
        [PARTS[0], ([FILE[0], b"Content-Type: image/gif"], PARTS[1][1])],
        [PARTS[0], ([FILE[0]], PARTS[1][1])],
        [PARTS[1], PARTS[0]],
        [PARTS[0]],
        [*PARTS, PARTS[0]],
        [],
    ],
)
def test_everything_in_the_parts_counts(other: list[Part]) -> None:
    """Another content, name, filename, type, order or number of parts is another request."""
    assert form(other) is not None
    assert form(other) != form(PARTS)


def test_lengths_keep_pieces_apart() -> None:
    """Content that imitates our own framing, and headers cut in another place, are other requests."""
    name, value = NAME.lower()[:19], NAME[21:]
    fake = pack(">IQQ", 1, len(name), len(value)) + name + value
    assert form([([NAME], b"x" + fake + b"y"), ([NAME], b"z")]) != form([([NAME], b"x"), ([NAME], b"y" + fake + b"z")])
    assert form([([NAME, b"ab: c"], b"")]) != form([([NAME, b"a: bc"], b"")])
    assert form([([NAME, b"x: 1"], b"")]) != form([([NAME], b"x1")])


def test_spelling_of_part_headers_changes_nothing() -> None:
    """Case of header names, their order and white space around values do not count."""
    spelled = [FILE[1].replace(b"Content-Type: ", b"content-type:"), FILE[0].replace(b": ", b":\t ") + b" "]
    assert form([PARTS[0], (spelled, PARTS[1][1])]) == form(PARTS)


def test_the_end_of_the_body_may_lack_its_line_end() -> None:
    """Some clients leave out the last CRLF: the same parts."""
    whole = body(PARTS)
    assert canonical_parts(whole[:-2], b"XX") == canonical_parts(whole, b"XX") is not None


GOOD = body([([NAME], b"1")])


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"--XX",
        b"\r\n" + GOOD,
        b"preamble\r\n" + GOOD,
        GOOD + b"epilogue",
        GOOD[:-4],
        GOOD.replace(b"\r\n", b"\n"),
        GOOD.replace(b"--XX\r\n", b"--XX \r\n"),
        GOOD.replace(b"--XX\r\n", b"--XXY\r\n"),
        GOOD.replace(b"--XX\r\n", b"--XXab"),
        b"abcd\r\n" + NAME + b"\r\n\r\nx--XX\r\n--XX--\r\n",
        b"--XX\r\n" + NAME + b"\r\n--XX--\r\n",
        body([([NAME], b"1\r\n--XXY\r\n2")]),
        body([([NAME], b"1\n--XX\n2")]),
        body([([NAME], b"1--XX--")]),
        body([([], b"1")]),
        body([([b"Content-Type: text/plain"], b"1")]),
        body([([b'Content-Disposition: attachment; name="a"'], b"1")]),
        body([([NAME, NAME], b"1")]),
        body([([NAME, b" folded"], b"1")]),
        body([([NAME, b"no colon"], b"1")]),
        body([([NAME, b"X : 1"], b"1")]),
        body([([NAME, b"X: a\nb"], b"1")]),
        body([([NAME, b"X: a\rb"], b"1")]),
        body([([NAME, b"X: a\0b"], b"1")]),
        GOOD.replace(b"\r\n\r\n", b"\r\n"),
    ],
)
def test_multipart_that_is_not_strict_is_hashed_raw(bad: bytes) -> None:
    """Whatever parsers could read differently has no form, and its raw bytes count with their boundary."""
    assert canonical_parts(bad, b"XX") is None
    assert hashed(bad, "multipart/form-data; boundary=XX") != hashed(bad, "multipart/form-data; boundary=X")


def test_boundary_text_inside_content_depends_on_the_boundary() -> None:
    """Content that a lenient parser would split under one boundary only is never equal under both."""
    inside: list[Part] = [([NAME], b'1\n--XX\nContent-Disposition: form-data; name="b"\n\n2')]
    split = hashed(body(inside, b"XX"), "multipart/form-data; boundary=XX")
    assert split != hashed(body(inside, b"YY"), "multipart/form-data; boundary=YY")


def test_too_many_parts_are_raw() -> None:
    """The number of parts that is looked at is bounded."""
    assert form([([NAME], b"")] * MAX_PARTS) is not None
    assert form([([NAME], b"")] * (MAX_PARTS + 1)) is None


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        "multipart/form-data; boundary=XX; boundary=XX",
        'multipart/form-data; boundary="XX "',
        "multipart/form-data; boundary=" + "X" * 71,
        "multipart/mixed; boundary=XX",
    ],
)
def test_types_without_a_usable_boundary_are_raw(content_type: str) -> None:
    """Without one valid boundary, or in another multipart type, the bytes count as they are."""
    assert hashed(GOOD, content_type) != hashed(GOOD[:-2], content_type)


def test_malformed_boundary_is_refused() -> None:
    """A boundary has 1 to 70 characters of RFC 2046's set and does not end in a space."""
    assert all(is_boundary(text) for text in ("a", "a b", "-" * 70, "0'()+_,-./:=?"))
    assert not any(is_boundary(text) for text in ("", "a ", "a" * 71, "a\r\n", "é", "a\n", '"', "a*"))


def test_other_parameters_of_the_type_count() -> None:
    """Only the boundary is dropped from the type."""
    plain = hashed(GOOD, "multipart/form-data; boundary=XX")
    assert hashed(GOOD, "multipart/form-data; boundary=XX; charset=latin-1") != plain


BOUNDARIES = st.sampled_from([b"XX", b"--", b"-", b"a b", b"X", b"----WebKitFormBoundary7MA4YWxkTrZu0gW"])
PIECES = st.sampled_from([b"--XX", b"\r\n", b"--", b"-", b"\n", b"X", b"a", NAME, b":", b" ", b"\r\n\r\n", b"\0"])
DATA = st.lists(PIECES | st.binary(max_size=4), max_size=6).map(b"".join)


@given(
    parts=st.lists(st.tuples(st.just([NAME]) | st.just(FILE), DATA), max_size=3),
    first=BOUNDARIES,
    second=BOUNDARIES,
)
def test_any_content_under_any_boundary(parts: Any, first: bytes, second: bytes) -> None:
    """Where a form exists under two boundaries it is the same; it exists if the boundary is not in the content."""
    one, other = form(parts, first), form(parts, second)
    if one is not None and other is not None:
        assert one == other
    if not any(b"--" + first in data for _, data in parts):
        assert one is not None


@given(
    one=st.lists(st.tuples(st.just([NAME]) | st.just(FILE), DATA), max_size=3),
    other=st.lists(st.tuples(st.just([NAME]) | st.just(FILE), DATA), max_size=3),
)
def test_different_parts_have_different_forms(one: Any, other: Any) -> None:
    """Two lists of parts have one form only if they are equal: nothing in a content looks like framing."""
    if one != other and form(one) is not None:
        assert form(one) != form(other)


@given(data=DATA, boundary=BOUNDARIES)
def test_no_bytes_are_an_error(data: bytes, boundary: bytes) -> None:
    """Whatever the bytes, the answer is a form or None."""
    framed = b"--" + boundary + b"\r\n" + data + b"\r\n--" + boundary + b"--"
    for attempt in (data, framed, framed + data):
        pieces = canonical_parts(attempt, boundary)
        assert pieces is None or isinstance(b"".join(pieces), bytes)
