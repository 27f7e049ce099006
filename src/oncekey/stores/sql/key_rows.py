"""Reads the rows of keys and steps, for every SQL store. Pure.

Clients trust a replay, so every column of a stored response is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from oncekey.core.record import RESPONSE_SCHEMA_VERSION, StoredResponse
from oncekey.core.sealed import SEALED_RESPONSE
from oncekey.core.states import Effects, State
from oncekey.core.steps import Step, StepKind, StepState
from oncekey.errors import StoreError

# A dictionary is four times as fast as calling the enum, and rows are decoded on every replay.
STATES = {state.value: state for state in State}
EFFECTS = {effects.value: effects for effects in Effects}


def stored_response(
    status: Any, headers: Any, body: Any, version: Any, read: Callable[[Any], Any] = orjson.loads
) -> StoredResponse:
    """StoreError if the columns are not as oncekey writes them: a damaged row gives an error, never a wrong answer.

    The response of another schema version counts as a tombstone: this version does not know its columns. So does an
    encrypted one, until it is opened. ``read`` makes a list of the stored headers, for a store that does not keep them
    as text of their own.
    """
    if type(status) is not int or not 100 <= status <= 599:
        raise StoreError("the stored status of a row is damaged")
    if version != RESPONSE_SCHEMA_VERSION:
        sealed = version == SEALED_RESPONSE and type(body) is bytes
        return StoredResponse(status, (), body if sealed else None, version)
    if body is not None and type(body) is not bytes:
        raise StoreError("the stored body of a row is damaged")
    try:
        pairs = _headers(read(headers))
    except (TypeError, ValueError) as error:
        raise StoreError("the stored headers of a row are damaged") from error
    return StoredResponse(status, pairs, body, version)


def _headers(read: Any) -> tuple[tuple[str, str], ...]:
    if type(read) is not list:
        raise ValueError("not a list")
    pairs = []
    for pair in read:
        name, content = pair
        if type(pair) is not list or type(name) is not str or type(content) is not str:
            raise ValueError("not a pair of texts")
        pairs.append((name, content))
    return tuple(pairs)


def step(row: Sequence[Any]) -> Step:
    """A step, from its columns in the order of its fields."""
    name, kind, state, repeatable, result, downstream_key, provider_id = row
    try:
        of_kind, in_state = StepKind(kind), StepState(state)
    except ValueError as error:
        raise StoreError(f"a step says {error}, which this version of oncekey does not know") from error
    bytes_of_result = None if result is None else result.encode()
    return Step(name, of_kind, in_state, bool(repeatable), bytes_of_result, downstream_key, provider_id)


def json_text(data: bytes | None) -> str | None:
    """JSON as text, because operators read it in the table."""
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError as error:
        raise StoreError("the result of a step is not valid text, and cannot be stored") from error
