"""A batch of rows as the calls of a script, and the answers as rows. Pure: threads and event loops share it.

Every request pays for this, so a batch costs few steps a row (docs/performance.md). One call takes all rows of a batch,
because one server may touch all buckets in a script; only in a cluster each bucket needs its own call. Values that
all rows share (the route's name, lease and retention; the state) are sent once. Rows that differ in them go into
different calls, in the same round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

from oncekey.core.record import Record, Reservation
from oncekey.core.swaps import End, Swap
from oncekey.stores.redis import rows
from oncekey.stores.redis.buckets import Names, name_of
from oncekey.stores.redis.scripts import END, RESERVE, Script


class Call(NamedTuple):
    bucket: int
    """One of its buckets: it tells which server is called."""
    script: Script
    keys: Sequence[bytes]
    """The epochs of its buckets first."""
    values: Sequence[bytes]
    positions: Sequence[int]
    """Where its rows are in the batch."""


class Way(NamedTuple):
    """What all calls of one batch share."""

    names: Names
    epoch: bytes
    together: bool
    """Whether a script may touch several buckets."""
    beat: bytes
    """b"1": WAIT follows."""


def calls(
    way: Way, script: Script, names: Sequence[bytes], values: Callable[[Sequence[int]], Iterable[bytes]]
) -> list[Call]:
    """The calls for all rows. ``values`` are those of the rows at these positions."""
    return _calls(way, script, names, range(len(names)), values)


def _calls(
    way: Way,
    script: Script,
    names: Sequence[bytes],
    positions: Sequence[int],
    values: Callable[[Sequence[int]], Iterable[bytes]],
) -> list[Call]:
    epochs, prefixes = way.names.epochs, way.names.rows
    if way.together:
        buckets = [crc32(names[position]) & 15 for position in positions]
        touched = set(buckets)
        keys = [epochs[bucket] for bucket in touched]
        keys += [prefixes[bucket] + names[position] for bucket, position in zip(buckets, positions, strict=True)]
        first = (way.epoch, b"%d" % len(touched), way.beat)
        return [Call(buckets[0], script, keys, (*first, *values(positions)), positions)]
    grouped: dict[int, list[int]] = {}
    for position in positions:
        grouped.setdefault(crc32(names[position]) & 15, []).append(position)
    first = (way.epoch, b"1", way.beat)
    return [
        Call(
            bucket,
            script,
            [epochs[bucket], *[prefixes[bucket] + names[position] for position in theirs]],
            (*first, *values(theirs)),
            theirs,
        )
        for bucket, theirs in grouped.items()
    ]


# -- reserve -------------------------------------------------------------------------------------------------------


def reserve_calls(way: Way, batch: Sequence[Reservation]) -> list[Call]:
    def values(positions: Sequence[int]) -> tuple[bytes, ...]:
        chosen = [batch[position] for position in positions]
        each = [value for wanted in chosen for value in (wanted.fingerprint.hex(), wanted.owner)]
        return (*_terms(*_terms_of(chosen[0])), rows.json(each))

    names = [name_of(wanted.scope, wanted.key) for wanted in batch]
    one = batch[0]
    if (
        [wanted.operation for wanted in batch].count(one.operation)
        == [wanted.fingerprint_version for wanted in batch].count(one.fingerprint_version)
        == [wanted.effects for wanted in batch].count(one.effects)
        == [wanted.lease_seconds for wanted in batch].count(one.lease_seconds)
        == [wanted.retention_seconds for wanted in batch].count(one.retention_seconds)
        == [wanted.fingerprint_recipe for wanted in batch].count(one.fingerprint_recipe)
        == [wanted.quarantine_seconds for wanted in batch].count(one.quarantine_seconds)
        == len(batch)
    ):
        return calls(way, RESERVE, names, values)
    return _by(_terms_of, way, RESERVE, batch, names, values)


def _terms_of(wanted: Reservation) -> tuple[Any, ...]:
    return (
        wanted.operation, wanted.fingerprint_version, wanted.fingerprint_recipe, wanted.quarantine_seconds,
        wanted.effects, wanted.lease_seconds, wanted.retention_seconds,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _terms(
    operation: str,
    version: int,
    recipe: str | None,
    quarantine: float | None,
    effects: str,
    lease: float,
    retention: float,
) -> tuple[bytes, ...]:
    """As ``reserve.lua`` takes them: the end of ``fixed``, effects, lease and retention."""
    rest = rows.json((operation, version, recipe, quarantine))[1:-1]
    return rest, effects.encode(), b"%d" % rows.micros(lease), b"%d" % rows.micros(retention)


def found(batch: Sequence[Reservation], asked: Sequence[Call], replies: Sequence[Any]) -> list[float | Record]:
    """The time in seconds if a key was inserted, otherwise the row that was there."""
    answers: list[Any] = [None] * len(batch)
    for call, reply in zip(asked, replies, strict=True):
        now = int(reply[0]) / 1e6
        if len(reply) == 1:  # all were inserted
            for position in call.positions:
                answers[position] = now
            continue
        bodies = iter(reply[2:])
        for position, values in zip(call.positions, rows.values(reply[1]), strict=True):
            if values is None:
                answers[position] = now
            else:
                wanted = batch[position]
                answers[position] = rows.record_of(wanted.scope, wanted.key, values, now, bodies)
    return answers


# -- end -----------------------------------------------------------------------------------------------------------


def end_calls(way: Way, batch: Sequence[End | Swap]) -> list[Call]:
    def values(positions: Sequence[int]) -> list[bytes]:
        chosen = [batch[position] for position in positions]
        state, failure = _ending_of(chosen[0])
        owners = rows.json([change.owner for change in chosen])
        sent = [state.encode(), rows.NONE if failure is None else b"=" + rows.text(failure), owners]
        for change in chosen:
            sent += rows.response(change.response)
        return sent

    names = [name_of(change.scope, change.key) for change in batch]
    one = batch[0]
    if (
        [change.to_state for change in batch].count(one.to_state)
        == [change.last_error for change in batch].count(one.last_error)
        == len(batch)
    ):
        return calls(way, END, names, values)
    return _by(_ending_of, way, END, batch, names, values)


def _ending_of(change: End | Swap) -> tuple[str, str | None]:
    return change.to_state or "", change.last_error


def times(count: int, asked: Sequence[Call], replies: Sequence[Any]) -> list[float | None]:
    """When each row was moved, in seconds; None: it was not."""
    answers: list[float | None] = [None] * count
    for call, (now, *refused) in zip(asked, replies, strict=True):
        at = int(now) / 1e6
        for position in call.positions:
            answers[position] = at
        for number in refused:
            answers[call.positions[number - 1]] = None
    return answers


def _by(
    kind_of: Callable[[Any], tuple[Any, ...]],
    way: Way,
    script: Script,
    batch: Sequence[Any],
    names: Sequence[bytes],
    values: Callable[[Sequence[int]], Iterable[bytes]],
) -> list[Call]:
    """The calls of rows that differ in what a call says once."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for position, each in enumerate(batch):
        kinds.setdefault(kind_of(each), []).append(position)
    return [call for positions in kinds.values() for call in _calls(way, script, names, positions, values)]
