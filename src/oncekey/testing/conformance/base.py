"""What the parts of the public store suite share: the methods that a subclass defines, a clock, and ways to a state.

It has no tests. The ways come from ``core.states.TABLE``, so a state that is added there can be reached here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import ClassVar

import pytest

from oncekey.core.record import Record, Reservation, StoredResponse
from oncekey.core.states import FENCES, FINAL, STARTS, TABLE, Actor, Condition, Effects, Event, State, Transition, find
from oncekey.core.steps import STARTED, Step, StepKind, StepState
from oncekey.core.swaps import Swap, swap
from oncekey.stores.api import Keys, Store

LEASE = 60.0
RETENTION = 3600.0
QUARANTINE = 30.0
AGES = 100 * RETENTION
"""Longer than every other time in the suite."""

RESPONSE = StoredResponse(201, (("content-type", "application/json"),), b'{"id":"pay_1"}')

Move = tuple[Transition, Actor]


class Clock:
    """A clock that changes only when a test moves it. Give it to a store that takes a clock."""

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
    """Define :meth:`make_store`, and :meth:`age` if the store does not take ``self.clock``."""

    clock: Clock
    needs: ClassVar[type] = Keys
    """The protocol of ``stores/api.py`` that the tests of this class are about."""

    def make_store(self) -> Store:
        """Make a store without rows, for this test alone. A second call in a test: another object, the same rows."""
        raise NotImplementedError("say how to make the store")

    def age(self, store: Store, scope: str, key: str, seconds: float) -> None:
        """Let ``seconds`` pass for this row (negative: back). They may pass for other rows too.

        A store with a clock of its own moves all times of the row back instead.
        """
        del store, scope, key
        self.clock.advance(seconds)

    @pytest.fixture(autouse=True)
    def _own_clock(self) -> None:
        self.clock = Clock()
        self._numbers = count(1)

    @pytest.fixture
    def store(self, _own_clock: None, request: pytest.FixtureRequest) -> Iterator[Store]:
        """A store. A test about a protocol that the store does not have is skipped, and the reason says why."""
        store = self.make_store()
        part = next(kind for kind in type(self).__mro__ if request.function.__name__ in vars(kind))
        if missing := missing_methods(store, getattr(part, "needs", Keys)):
            pytest.skip(missing)
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
        quarantine: float | None = None,
    ) -> Reservation:
        """A reservation with a new owner and a new fingerprint."""
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
            quarantine_seconds=quarantine,
        )

    # moves

    def change(self, record: Record, move: Move, *, retention: float = RETENTION) -> Swap:
        """The Swap for a row of the table. It sets every field that such a move can set."""
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
            recovery_point="charge_created" if row.event in (Event.ADVANCE, Event.HAPPENED) else None,
            effects=Effects.PHASED if row.event in FENCES and row.target is State.FAILED_RETRYABLE else None,
            step=IN_DOUBT if row.event in FENCES else None,
            new_owner=f"settled-{next(self._numbers)}" if row.event in FENCES else None,
        )

    def _new(self, record: Record, retention: float) -> Reservation:
        # Other effects than the row has: the reservation decides them, not the row.
        return self.reservation(record.key, scope=record.scope, retention=retention, effects=Effects.TRANSACTIONAL)

    def ripen(self, store: Store, record: Record, move: Move) -> None:
        """Let the time pass that the move needs. Before that the store must refuse it."""
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
        doubted: bool = False,
    ) -> Record:
        """Bring a row into this state by moves of the table. With ``steps``, one step of it is done."""
        wanted = self.reservation(
            key, scope=scope, retention=retention, recipe='{"headers":["accept"]}', quarantine=QUARANTINE
        )
        record = one(store.reserve([wanted])[0].record)
        if steps:
            advance = find(State.IN_PROGRESS, Event.ADVANCE, Actor.OWNER)
            record = one(store.swap([self.change(record, (advance, Actor.OWNER))])[0])
        if doubted:
            record = one(store.swap([intend(record, IN_DOUBT)])[0])
        for move in WAYS[state][1:]:
            self.ripen(store, record, move)
            record = one(store.swap([self.change(record, move)])[0])
        return record


def missing_methods(store: object, protocol: type) -> str:
    """Why ``store`` does not have this protocol: the methods that it lacks; "" where it has it."""
    names = (name for kind in protocol.__mro__ for name in vars(kind) if not name.startswith("_"))
    lacks = sorted({name for name in names if getattr(store, name, None) is None and name != "file"})
    return f"{type(store).__name__} is no {protocol.__name__}: it has no {', '.join(lacks)}" if lacks else ""


IN_DOUBT = Step("charge_created", StepKind.EFFECT, StepState.INTENDED, False, None, "down-1")
"""An effect that may not be repeated: while it is under way, the record says ``external``."""


def intend(record: Record, step: Step) -> Swap:
    """The owner is about to call an effect."""
    return swap(
        *(record, Event.ADVANCE, Actor.OWNER),
        lease_seconds=LEASE,
        recovery_point=record.recovery_point or STARTED,
        effects=record.effects if step.repeatable else Effects.EXTERNAL,
        step=step,
    )


def waiting_time(record: Record, move: Move) -> float:
    when = move[0].when
    seconds = 0.0
    if Condition.LEASE_OVER in when:
        seconds = LEASE + 1
    if Condition.QUARANTINE_OVER in when:
        seconds = QUARANTINE + 1  # the doubt has ended the lease
    if Condition.PAST_EXPIRY in when:
        seconds = max(seconds, record.expires_at - record.now + 1)
    return seconds


def one(record: Record | None) -> Record:
    """The record, which must be there."""
    assert record is not None
    return record


def stored(store: Store, scope: str = "tenant-1", key: str = "key-1") -> Record | None:
    """The committed row, without the time of the read. If two of them are equal, the row did not change."""
    (record,) = store.read([(scope, key)])
    return None if record is None else replace(record, now=0.0)
