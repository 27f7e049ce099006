"""What the parts of the public store suite share: the hooks a subclass fills in, a clock, and ways to a state.

Owns no test. The ways are found in ``core.states.TABLE``, so a state that is added there can be reached here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from oncekey.core.record import Record, Reservation, StoredResponse, Swap, swap
from oncekey.core.states import FINAL, STARTS, TABLE, Actor, Condition, Effects, Event, State, Transition, find
from oncekey.stores.base import Store

LEASE = 60.0
RETENTION = 3600.0
QUARANTINE = 30.0
AGES = 100 * RETENTION
"""Older than anything here."""

RESPONSE = StoredResponse(201, (("content-type", "application/json"),), b'{"id":"pay_1"}')

Move = tuple[Transition, Actor]


class Clock:
    """A clock that stands still until it is moved; give it to a store that takes one."""

    def __init__(self, start: float = 1_800_000_000.0) -> None:
        self.now = start

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def _ways() -> dict[State, list[Move]]:
    """For each state, the shortest list of moves that leads there from no row."""
    ways: dict[State | None, list[Move]] = {None: []}
    queue: list[State | None] = [None]
    while queue:
        source = queue.pop(0)
        for row in TABLE:
            if row.source == source and row.target not in ways:
                ways[row.target] = [*ways[source], (row, min(row.by))]
                queue.append(row.target)
    return {state: way for state, way in ways.items() if state is not None}


WAYS = _ways()


class SuiteBase:
    """Fill in :meth:`make_store`, and :meth:`age` where the store does not take ``self.clock``."""

    clock: Clock

    def make_store(self) -> Store:
        """A store without rows, of this test alone. Called again in one test: another object, the same rows."""
        raise NotImplementedError("say how to make the store")

    def age(self, store: Store, scope: str, key: str, seconds: float) -> None:
        """Let ``seconds`` pass for this row (negative: back). Whether they pass for others too does not matter.

        A store with a clock of its own moves all times of the row back instead.
        """
        del store, scope, key
        self.clock.advance(seconds)

    @pytest.fixture(autouse=True)
    def _own_clock(self) -> None:
        self.clock = Clock()
        self._numbers = count(1)

    @pytest.fixture
    def store(self, _own_clock: None) -> Iterator[Store]:
        store = self.make_store()
        store.migrate()
        yield store
        store.close()

    # values

    def reservation(
        self,
        key: str = "key-1",
        *,
        scope: str = "tenant-1",
        lease: float = LEASE,
        retention: float = RETENTION,
        effects: Effects = Effects.REPEATABLE,
        owner: str | None = None,
        recipe: str | None = None,
    ) -> Reservation:
        """A request like no other: its owner and its fingerprint are new."""
        number = next(self._numbers)
        return Reservation(
            scope=scope,
            key=key,
            operation="POST /payments",
            fingerprint=number.to_bytes(32, "big"),
            fingerprint_version=2,
            effects=effects,
            owner=owner or f"owner-{number}",
            lease_seconds=lease,
            retention_seconds=retention,
            fingerprint_recipe=recipe,
        )

    # moves

    def change(self, record: Record, move: Move, *, retention: float = RETENTION) -> Swap:
        """The Swap for a row of the table, with everything set that such a move can set."""
        row, actor = move
        starts = row.event in STARTS
        return swap(
            record,
            row.event,
            actor,
            to_state=row.target,
            reservation=self._new(record, retention) if starts else None,
            lease_seconds=LEASE if row.event in (Event.RENEW, Event.ADVANCE) else None,
            response=RESPONSE if row.target in FINAL else None,
            last_error=None if starts or row.target in FINAL else f"after {row.event}",
            recovery_point="charge_created" if row.event is Event.ADVANCE else None,
            quarantine_seconds=QUARANTINE,
        )

    def _new(self, record: Record, retention: float) -> Reservation:
        # Other effects than the row has: the code that runs now says where they live.
        return self.reservation(record.key, scope=record.scope, retention=retention, effects=Effects.TRANSACTIONAL)

    def ripen(self, store: Store, record: Record, move: Move) -> None:
        """Let the time pass that the move asks for; it can then be made, and could not before."""
        if (seconds := waiting_time(record, move)) > 0:
            self.age(store, record.scope, record.key, seconds)

    def drive(
        self,
        store: Store,
        state: State,
        key: str = "key-1",
        *,
        scope: str = "tenant-1",
        retention: float = RETENTION,
        steps: bool = False,
    ) -> Record:
        """A row in this state, brought there by moves of the table; with ``steps`` one of them is done."""
        wanted = self.reservation(key, scope=scope, retention=retention, recipe='{"headers":["accept"]}')
        record = one(store.reserve([wanted])[0].record)
        if steps:
            advance = find(State.IN_PROGRESS, Event.ADVANCE, Actor.OWNER)
            record = one(store.swap([self.change(record, (advance, Actor.OWNER))])[0])
        for move in WAYS[state][1:]:
            self.ripen(store, record, move)
            record = one(store.swap([self.change(record, move)])[0])
        return record


def waiting_time(record: Record, move: Move) -> float:
    when = move[0].when
    seconds = 0.0
    if Condition.LEASE_OVER in when:
        seconds = LEASE + 1
    if Condition.QUARANTINE_OVER in when:
        seconds = LEASE + QUARANTINE + 1
    if Condition.PAST_EXPIRY in when:
        seconds = max(seconds, record.expires_at - record.now + 1)
    return seconds


def one(record: Record | None) -> Record:
    """The record, which must be there."""
    assert record is not None
    return record


def stored(store: Store, scope: str = "tenant-1", key: str = "key-1") -> Record | None:
    """The row as it is committed, without the moment of reading: equal means untouched."""
    (record,) = store.read([(scope, key)])
    return None if record is None else replace(record, now=0.0)
