"""What the tests of the keeper share: operations that are watched, and an outcome that could not be stored."""

from __future__ import annotations

from datetime import timedelta

from oncekey.core.policy import Policy
from oncekey.core.record import Record
from oncekey.core.states import Actor, Event
from oncekey.core.swaps import swap
from oncekey.engine.batching.ticket import SyncTicket
from oncekey.engine.engine import Engine
from oncekey.engine.keeper import Unfinished
from oncekey.engine.operation import Operation
from tests.engine.doubles import (
    PATIENCE,
    RESPONSE,
    Clock,
    FakeStore,
    Heard,
    listening,
    operation_of,
    reservation,
)


def policy(lease: float = 60.0, timeout: float = 5.0) -> Policy:
    return Policy(lease=timedelta(seconds=lease), begin_timeout=timedelta(seconds=timeout))


class Kept:
    """An engine over a fake store, with operations that are watched."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.store = FakeStore(clock=clock)
        self.engine: Engine
        self.heard: Heard
        self.engine, self.heard = listening(self.store)
        self.keeper = self.engine.keeper

    def start(self, key: str = "key-1", lease: float = 60.0, *, timeout: float = 5.0) -> Operation:
        record = self.store.put(reservation(key, lease=lease))
        operation = operation_of(record, policy(lease, timeout))
        self.keeper.watch(operation)
        return operation

    def settle(self) -> None:
        """Everything that was submitted is answered, what that led to included."""
        for _ in range(3):
            for work in (("tenant-1", "x"), ("tenant-1", "y")):
                ticket = SyncTicket(work)
                self.engine.router.submit(ticket)
                ticket.wait(PATIENCE)

    def move(self, operation: Operation, event: Event, by: Actor = Actor.OWNER) -> Record | None:
        return self.store.inner.swap([swap(operation.record, event, by)])[0]

    def lease_left(self, key: str = "key-1") -> float:
        row = self.store.row(key)
        assert row is not None
        return row.lease_until - self.clock.now


def taken_over(kept: Kept, operation: Operation) -> None:
    kept.move(operation, Event.DISCARD)
    kept.store.put(reservation(operation.key, owner="rival"))


def unfinished(operation: Operation) -> Unfinished:
    return Unfinished(operation, Event.COMPLETE, RESPONSE, None)
