"""Writes the batches of the two packets that every request waits for: ``reserve`` and ``end`` of keys.sql. Pure.

An UPDATE that joined a derived table took MariaDB 45 µs a row; one that names its rows by the literals of their primary
keys takes 24. Each literal takes up to 1 µs, so a value that is the same in the whole batch is written once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from oncekey.core.record import Record, Reservation
from oncekey.core.states import State
from oncekey.core.swaps import Swap
from oncekey.stores.mysql.packets import Text, literal, micros, table
from oncekey.stores.mysql.rows import headers, reservation_columns

_MATCH_COLUMNS = frozenset({"scope", "key"})


def among(keys: Iterable[tuple[str, str]]) -> Text:
    """The condition that ``k`` is one of these keys. Both servers read such rows by ranges of the primary key."""
    by_scope: dict[str, list[str]] = {}
    for scope, key in keys:
        by_scope.setdefault(scope, []).append(literal(key))
    return _any_scope({scope: f"k.`key` IN ({', '.join(theirs)})" for scope, theirs in by_scope.items()})


def owned(batch: Sequence[Swap]) -> Text:
    """The condition that ``k`` is a key of the batch and has the owner that its swap names."""
    by_scope: dict[str, list[tuple[str, str]]] = {}
    for change in batch:
        by_scope.setdefault(change.scope, []).append((literal(change.key), literal(change.owner)))
    return _any_scope({scope: _pairs(theirs) for scope, theirs in by_scope.items()})


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
    if len(pairs) == 1:  # MariaDB's UPDATE reads the whole table for a list of one pair
        ((key, owner),) = pairs
        return f"k.`key` = {key} AND k.owner = {owner}"
    return f"(k.`key`, k.owner) IN ({', '.join(f'({key}, {owner})' for key, owner in pairs)})"


def _any_scope(conditions: Mapping[str, str]) -> Text:
    return Text(" OR ".join(f"(k.scope = {literal(scope)} AND {theirs})" for scope, theirs in conditions.items()))


def reservations(batch: Sequence[Reservation]) -> dict[str, Text]:
    """``wanted``: the rows as a derived table. ``want_…``: each other column, as a name of that table or a literal."""
    varying: dict[str, Sequence[Any]] = {}
    written: dict[str, Text] = {}
    for name, values in reservation_columns(batch).items():
        if name in _MATCH_COLUMNS or not _all_equal(values):
            varying[name] = values
            written[f"want_{name}"] = Text(f"w.`{name}`")
        else:
            written[f"want_{name}"] = Text(literal(values[0]))
    return {"wanted": table(varying), **written}


def can_end_together(batch: Sequence[Swap]) -> bool:
    """``ending`` finds the values of a row by its owner. Owners are random, but a caller may still use one twice."""
    return len({change.owner for change in batch}) == len(batch)


def ending(batch: Sequence[Swap]) -> dict[str, Text]:
    """The new value of each column, as SQL: one literal, or the element of a list whose number is ``response_status``.

    ``place`` is the number of the row's owner in the batch. `end` writes it into ``response_status`` first, and the
    status itself last: both servers evaluate the assignments of an UPDATE from left to right.
    """
    responses = [change.response for change in batch]
    columns: dict[str, list[Any]] = {
        "state": [None if change.to_state is None else change.to_state.value for change in batch],
        "status": [response and response.status for response in responses],
        "headers": [response and headers(response) for response in responses],
        "body": [response and response.body for response in responses],
        "schema_version": [response and response.schema_version for response in responses],
        "last_error": [change.last_error for change in batch],
        "retention": [micros(change.seen.retention_seconds) if change.seen else None for change in batch],
    }
    place = f"field(k.owner, {', '.join(literal(change.owner) for change in batch)})"
    return {"place": Text(place), **{f"new_{name}": _value(values) for name, values in columns.items()}}


def _value(values: Sequence[Any]) -> Text:
    if _all_equal(values):
        return Text(literal(values[0]))
    return Text(f"elt(k.response_status, {', '.join(map(literal, values))})")


def _all_equal(values: Sequence[Any]) -> bool:
    return values.count(values[0]) == len(values)


def reserved(wanted: Reservation, now: int) -> Record:
    """The record of a row that ``reserve`` has just inserted at ``now``, in microseconds."""
    lease, retention = micros(wanted.lease_seconds) or 0, micros(wanted.retention_seconds) or 0
    quarantine = wanted.quarantine_seconds
    return Record(
        wanted.scope, wanted.key, wanted.operation, wanted.fingerprint, wanted.fingerprint_version, wanted.effects,
        State.IN_PROGRESS, 1, wanted.owner, (now + lease) / 1e6, None, None, None, None, 0, now / 1e6, None,
        float(wanted.retention_seconds), (now + retention) / 1e6, now / 1e6, wanted.fingerprint_recipe,
        None if quarantine is None else float(quarantine),
    )  # fmt: skip
