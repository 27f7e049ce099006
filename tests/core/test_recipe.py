"""A request is compared by the recipe of the row, not by that of the day."""

from __future__ import annotations

from typing import Any

import pytest

from oncekey.core.recipe import DEFAULT_HEADERS, Parts, Recipe, same_request

LINES = [(b"if-match", b'"1"'), (b"accept", b"a/b")]


def parts(body: bytes = b'{"amount":1,"at":1}', lines: list[tuple[bytes, bytes]] = LINES, query: bytes = b"") -> Parts:
    def read(names: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
        return [line for line in lines if line[0] in names]

    return ("POST", "/payments", query, "application/json", body, read)


RECIPES = [
    Recipe.of(None, DEFAULT_HEADERS),
    Recipe.of(None, ()),
    Recipe.of(None, ("accept",)),
    Recipe.of(("amount",), DEFAULT_HEADERS),
    Recipe.of(("amount", "at"), ("accept", "if-match")),
]


@pytest.mark.parametrize("ours", RECIPES)
@pytest.mark.parametrize("row", RECIPES)
def test_identical_request_is_the_same_under_any_two_recipes(row: Recipe, ours: Recipe) -> None:
    digest = row.fingerprint(parts())
    assert same_request(2, row.text, digest, parts(), ours.text) is True
    assert same_request(2, row.text, digest, parts(b'{"at":1, "amount":1}'), ours.text) is True
    assert same_request(2, row.text, digest, parts(b'{"amount":2,"at":1}'), ours.text) is False


def test_comparison_uses_the_recipe_of_the_row() -> None:
    """A header that the row did not count makes no difference, one that it did does, whatever this process counts."""
    off, accept = Recipe.of(None, ()), Recipe.of(None, ("accept",))
    other = parts(lines=[(b"accept", b"c/d")])
    assert same_request(2, off.text, off.fingerprint(parts()), other, accept.text) is True
    assert same_request(2, accept.text, accept.fingerprint(parts()), other, off.text) is False


@pytest.mark.parametrize("then", [None, ("amount",)])
def test_row_of_version_1_is_compared_with_or_without_the_fields_of_today(then: Any) -> None:
    """It does not say which it had; nor what stands in its recipe, which an older process may have left there."""
    digest = Recipe(then, frozenset(), None).fingerprint(parts(), 1)
    ours = Recipe.of(("amount",), DEFAULT_HEADERS).text
    for text in (None, '{"headers":[]}', "left behind"):
        assert same_request(1, text, digest, parts(), ours) is True
        assert same_request(1, text, digest, parts(lines=[]), ours) is True
        assert same_request(1, text, digest, parts(b'{"amount":2,"at":1}'), ours) is False
        assert same_request(1, text, digest, parts(query=b"a=1"), ours) is False
    assert same_request(1, None, digest, parts(b'{"amount":1,"at":2}'), ours) is (then is not None)


@pytest.mark.parametrize("version", [0, 3, 99, -1])
def test_version_that_is_not_known_is_not_compared(version: int) -> None:
    assert same_request(version, None, b"", parts(), None) is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "{}", "[]", "null", "1", '{"headers":null}', '{"headers":[1]}', '{"headers":"accept"}'),
        *('{"fields":[]}', '{"headers":[],"cookies":[]}', '{"headers":[],"fields":{"a":1}}', "[" * 10_000),
    ],
)
def test_recipe_that_is_not_known_is_not_compared(text: str) -> None:
    assert same_request(2, text, RECIPES[0].fingerprint(parts()), parts(), None) is None


def test_recipe_has_one_text_whatever_the_order_of_its_names() -> None:
    assert Recipe.of(("b", "a", "b"), ("y", "x")).text == Recipe.of(("a", "b"), ("x", "y", "y")).text
    assert Recipe.of(None, reversed(DEFAULT_HEADERS)).text is None
