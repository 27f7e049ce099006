"""Other people's transactions on PostgreSQL stay open and hold rows: requests wait briefly, or not at all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from oncekey.core.record import Record
from oncekey.core.states import Actor, Event
from oncekey.core.swaps import swap
from oncekey.errors import StoreUnavailable
from oncekey.stores.postgres import PostgresStore
from tests.engine.doubles import PATIENCE, RESPONSE, reservation
from tests.stores.postgres import STEP, complete, holding, older, opened, put, row

HOLDS = {
    "an update": "UPDATE idempotency_keys SET last_error = 'mine' WHERE key = 'held'",
    "an enlisted row": "SELECT 1 FROM idempotency_keys WHERE key = 'held' FOR NO KEY UPDATE",
    "a lock": "SELECT 1 FROM idempotency_keys WHERE key = 'held' FOR UPDATE",
    "a deletion": "DELETE FROM idempotency_keys WHERE key = 'held'",
}


@pytest.fixture
def patient(ready_url: str) -> Iterator[PostgresStore]:
    """A store that would wait half a minute for a lock: a call that ends sooner has not waited."""
    with opened(ready_url, timeout=30.0, lock_timeout=30.0) as store:
        store.migrate()
        yield store


@pytest.mark.parametrize("hold", list(HOLDS))
def test_a_reservation_never_waits_for_a_transaction(patient: PostgresStore, ready_url: str, hold: str) -> None:
    """The held row is read as it was committed, at once, and its neighbours in the batch are inserted."""
    (held,) = put(patient, "held")
    wanted = [reservation(key) for key in ("after", "held", "before")]
    with holding(ready_url, HOLDS[hold]):
        begun = time.monotonic()
        found = patient.reserve(wanted)
        assert time.monotonic() - begun < 4
    owners = [answer.record and answer.record.owner for answer in found]
    assert owners == [wanted[0].owner, held.owner, wanted[2].owner]
    assert found[1].record is not None
    assert found[1].record.last_error is None


@pytest.mark.parametrize("hold", list(HOLDS))
@pytest.mark.parametrize("event", [Event.COMPLETE, Event.ADVANCE, Event.DISCARD, Event.RESERVE])
def test_a_move_never_waits_for_a_transaction(patient: PostgresStore, ready_url: str, hold: str, event: Event) -> None:
    """A held row is skipped, at once: None for it, and its neighbours in the batch move."""
    records = put(patient, "after", "held", "before")
    if event is Event.RESERVE:
        records = [one for one in patient.swap([complete(record) for record in records]) if one is not None]
        older(ready_url, 100_000)
    changes = [
        swap(
            record,
            event,
            Actor.REQUEST if event is Event.RESERVE else Actor.OWNER,
            response=RESPONSE if event is Event.COMPLETE else None,
            reservation=reservation(record.key) if event is Event.RESERVE else None,
            step=STEP if event is Event.ADVANCE else None,
        )
        for record in records
    ]
    with holding(ready_url, HOLDS[hold]):
        begun = time.monotonic()
        moved = patient.swap(changes)
        assert time.monotonic() - begun < 4
    assert [one and one.key for one in moved] == ["after", None, "before"]
    again = patient.swap([changes[1]])
    assert [one and one.key for one in again] == ["held"]


def test_discard_does_not_wait_for_a_referring_row(patient: PostgresStore, ready_url: str) -> None:
    """A business row that refers to a key locks it FOR KEY SHARE until it commits: busy, not waited for."""
    held, free = put(patient, "held", "free")
    changes = [swap(record, Event.DISCARD, Actor.OWNER) for record in (held, free)]

    def discard() -> list[Record | None]:
        try:
            return patient.swap(changes)
        finally:
            patient.disconnect()

    with (
        ThreadPoolExecutor(1) as pool,
        holding(ready_url, "SELECT 1 FROM idempotency_keys WHERE key = 'held' FOR KEY SHARE"),
    ):
        moved = pool.submit(discard)
        waited = not wait([moved], timeout=10.0).done
    assert not waited
    assert [one and one.key for one in moved.result(PATIENCE)] == [None, "free"]


def test_purge_skips_locked_rows(patient: PostgresStore, ready_url: str) -> None:
    """The held row is left for the next purge; the others go, at once."""
    patient.swap([complete(record) for record in put(patient, "held", "a", "b")])
    older(ready_url, 100_000)
    for lock in ("FOR UPDATE", "FOR KEY SHARE"):
        with holding(ready_url, f"SELECT 1 FROM idempotency_keys WHERE key = 'held' {lock}"):
            begun = time.monotonic()
            patient.purge(10)
            assert time.monotonic() - begun < 4
        assert row(patient, "held") is not None
    assert row(patient, "a") is None
    assert patient.purge(10) == 1


def test_a_lock_that_has_to_be_waited_for_ends_with_its_timeout(store: PostgresStore, ready_url: str) -> None:
    """An uncommitted insert of the same key is the one thing that a reservation waits for, and briefly."""
    statement = """
        INSERT INTO idempotency_keys (scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt,
            owner, lease_until, created_at, retention_seconds, expires_at)
        VALUES ('tenant-1', 'held', '', '', 1, 'external', 'in_progress', 1, 'rival', now(), now(), 1, now())
    """
    with opened(ready_url, lock_timeout=0.1) as lane, holding(ready_url, statement):
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable, match="did not answer in time"):
            lane.reserve([reservation("held")])
        assert time.monotonic() - begun < 4
