"""A stored response as it comes out of a row: read strictly, since what is replayed is believed. The same for both SQL
stores."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import Any

import orjson

from oncekey.core.record import RESPONSE_SCHEMA_VERSION, StoredResponse
from oncekey.errors import StoreError


def stored_response(status: Any, headers: Any, body: Any, version: Any) -> StoredResponse:
    """StoreError where the columns are not what we write: a damaged row is an outage of its key, never a wrong answer.

    Another version's response is a tombstone, and its columns are not read: who knows how it lays them out.
    """
    if type(status) is not int or not 100 <= status <= 599:
        raise StoreError("the stored status of a row is damaged")
    if version != RESPONSE_SCHEMA_VERSION:
        return StoredResponse(status, (), None, version)
    if body is not None and type(body) is not bytes:
        raise StoreError("the stored body of a row is damaged")
    try:
        pairs = _remembered_headers(headers) if len(headers) <= REMEMBERED_LENGTH else _headers(headers)
    except (TypeError, ValueError) as error:
        raise StoreError("the stored headers of a row are damaged") from error
    return StoredResponse(status, pairs, body, version)


def _headers(text: str) -> tuple[tuple[str, str], ...]:
    pairs = orjson.loads(text)
    if type(pairs) is not list or not _are_headers(pairs):
        raise ValueError("not a list of pairs of texts")
    return tuple(map(tuple, pairs))


REMEMBERED_LENGTH = 200
_remembered_headers = lru_cache(maxsize=256)(_headers)
"""Most responses of an API have one and the same header, their type."""


_only_lists, _only_twos, _only_texts = (
    frozenset({list}).issuperset,
    frozenset({2}).issuperset,
    frozenset({str}).issuperset,
)


def _are_headers(pairs: list[Any]) -> bool:
    """Lists of two texts; without a Python function for each, since every replay comes here."""
    return (
        _only_lists(map(type, pairs))
        and _only_twos(map(len, pairs))
        and _only_texts(map(type, chain.from_iterable(pairs)))
    )
