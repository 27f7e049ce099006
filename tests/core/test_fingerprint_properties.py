"""The fingerprint of any JSON text: the fast path is the reference, spelling never counts, and any change does."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from typing import Any
from urllib.parse import unquote_plus

import orjson
import rfc8785
from hypothesis import assume, example, given
from hypothesis import strategies as st

from oncekey.core.form_text import in_order
from oncekey.core.json_form import MAX_FLOATS, _read, fast, slow
from tests.core.fingerprints import DEEP, DOCUMENTS, RNG, TAME, of, spell

# ---------------------------------------------------------------- the fast path


def agree(body: bytes) -> None:
    """Each path gives nothing, or what rfc8785 makes of the value; the fast one nothing that the other refuses."""
    quick, severe = fast(body), slow(body)
    if severe is None:
        assert quick is None
        return
    reference = rfc8785.dumps(_read(body.decode(), MAX_FLOATS))
    assert severe[1](severe[0]) == reference
    assert quick is None or quick[1](quick[0]) == reference


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
    parsed = slow(body)
    assert parsed is not None
    assert parsed[1](parsed[0]) == rfc8785.dumps(value)


@given(text=DOCUMENTS, at=st.integers(0, 60), extra=st.binary(min_size=1, max_size=2), cut=st.booleans())
def test_fast_path_is_the_reference_on_broken_text(text: str, at: int, extra: bytes, cut: bool) -> None:
    """On bytes that are no longer JSON neither path fails, and they still agree."""
    data = text.encode("utf-8")
    broken = data[:at] + extra + data[at + len(extra) * cut :]
    agree(broken)
    assert of(broken) == of(broken, fields=())


# ---------------------------------------------------------------- what counts


@given(value=TAME, rng=RNG)
def test_spelling_of_json_never_changes_the_fingerprint(value: Any, rng: random.Random) -> None:
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
def test_different_documents_have_different_fingerprints(one: str, other: str) -> None:
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


# ---------------------------------------------------------------- form text


FORM_NAMES = st.sampled_from(
    ["a", "b", "ab", "a%62", "%61b", "a[x]", "a[]", "a%5Bx%5D", "a.b", "B", "a+b", "%ff", "%fe", ""]
)
FORM_VALUES = st.sampled_from(["", "1", "2", "x+y", "x%20y", "%zz", "%", "a=b", "é", "1;b=2", "%26", "[1]"])
PAIRS = st.tuples(FORM_NAMES, FORM_VALUES).map("=".join) | st.sampled_from(["", "a", "b;a=1", "&"])
FORM_TEXTS = st.lists(PAIRS, max_size=5).map(lambda pairs: "&".join(pairs).encode())
FORM = "application/x-www-form-urlencoded"


def parsers(text: bytes) -> list[Any]:
    """The text as servers may read it: values by name, in order. Each splits, decodes and groups in its own way."""
    read = []
    for separators in ("&", "&;"):
        for errors in ("replace", "surrogateescape"):
            for cut in ("", "[", "."):
                found: dict[str, list[str]] = {}
                for pair in re.split(f"[{separators}]", text.decode("latin-1")):
                    name, equals, rest = pair.partition("=")
                    if pair:
                        name = unquote_plus(name, errors=errors)
                        group = name.partition(cut)[0] if cut else name
                        found.setdefault(group, []).append(f"{name}{equals}{rest}")
                read.append(found)
    return read


@given(one=FORM_TEXTS, other=FORM_TEXTS)
def test_form_texts_meet_only_where_every_server_reads_the_same(one: bytes, other: bytes) -> None:
    if of(query=one) == of(query=other) or of(one, content_type=FORM) == of(other, content_type=FORM):
        assert parsers(one) == parsers(other)


@given(text=FORM_TEXTS, rng=RNG)
def test_shuffled_form_text_meets_only_where_every_server_reads_the_same(text: bytes, rng: random.Random) -> None:
    """Near misses: the same pairs in another order."""
    pairs = text.split(b"&")
    rng.shuffle(pairs)
    other = b"&".join(pairs)
    if of(query=text) == of(query=other):
        assert parsers(text) == parsers(other)


PLAIN_PAIRS = st.dictionaries(
    st.sampled_from(["a", "b", "amount", "meta[x]", "c_d", "e-f"]),
    st.lists(st.sampled_from(["", "1", "2", "x+y", "%C3%A9"]), min_size=1),
)


@given(pairs=PLAIN_PAIRS, rng=RNG)
def test_order_of_names_never_counts_in_plain_form_text(pairs: dict[str, list[str]], rng: random.Random) -> None:
    def written(names: list[str]) -> bytes:
        return "&".join(f"{name}={text}" for name in names for text in pairs[name]).encode()

    names = list(pairs)
    rng.shuffle(names)
    one, other = written(list(pairs)), written(names)
    assert of(query=one) == of(query=other)
    assert of(body=one, content_type=FORM) == of(body=other, content_type=FORM)


@given(text=FORM_TEXTS)
def test_ordered_form_text_has_the_same_pairs_and_stays_as_it_is(text: bytes) -> None:
    ordered = in_order(text)
    if ordered is not None:
        assert sorted(ordered.split(b"&")) == sorted(text.split(b"&"))
        assert in_order(ordered) == ordered
