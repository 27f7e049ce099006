"""A stored response as it comes out of a row: read strictly, since what is replayed is believed. The same for both SQL
stores."""

from __future__ import annotations

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
        pairs = orjson.loads(headers)
    except (TypeError, ValueError) as error:
        raise StoreError("the stored headers of a row are damaged") from error
    if type(pairs) is not list or not _are_headers(pairs):
        raise StoreError("the stored headers of a row are damaged")
    return StoredResponse(status, tuple(map(tuple, pairs)), body, version)


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
