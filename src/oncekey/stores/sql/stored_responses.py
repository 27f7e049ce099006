"""Reads the stored response out of a row, for both SQL stores. Clients trust a replay, so every column is checked."""

from __future__ import annotations

from typing import Any

import orjson

from oncekey.core.record import RESPONSE_SCHEMA_VERSION, StoredResponse
from oncekey.errors import StoreError


def stored_response(status: Any, headers: Any, body: Any, version: Any) -> StoredResponse:
    """StoreError if the columns are not as oncekey writes them: a damaged row gives an error, never a wrong answer.

    The response of another schema version counts as a tombstone: this version does not know its columns.
    """
    if type(status) is not int or not 100 <= status <= 599:
        raise StoreError("the stored status of a row is damaged")
    if version != RESPONSE_SCHEMA_VERSION:
        return StoredResponse(status, (), None, version)
    if body is not None and type(body) is not bytes:
        raise StoreError("the stored body of a row is damaged")
    try:
        pairs = _headers(headers)
    except (TypeError, ValueError) as error:
        raise StoreError("the stored headers of a row are damaged") from error
    return StoredResponse(status, pairs, body, version)


def _headers(text: str) -> tuple[tuple[str, str], ...]:
    read = orjson.loads(text)
    if type(read) is not list:
        raise ValueError("not a list")
    pairs = []
    for pair in read:
        name, content = pair
        if type(pair) is not list or type(name) is not str or type(content) is not str:
            raise ValueError("not a pair of texts")
        pairs.append((name, content))
    return tuple(pairs)
