"""The sweeper: expired leases go where their row says, and live owners are left alone."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import psycopg
import pytest

from oncekey.core.record import Record
from oncekey.core.states import Effects, Event, State
from oncekey.stores.api import Store
from oncekey.telemetry.emitter import Emitter
from oncekey.upkeep import Reaper, Sweeper
from tests.upkeep.key_store import LEASE, KeyStore


@pytest.mark.parametrize("effects", Effects)
def test_by_where_the_effects_live(rows: KeyStore, effects: Effects) -> None:
    """External keys become unknown and due for the reconciler; all others can be retried."""
    (record,) = rows.reserved(effects=effects)
    rows.age(LEASE + 1)
    swept = Sweeper(rows.store, emitter=Emitter(rows.told.append)).run()
    found = rows.get(record)
    assert found.last_error == "the lease ran out"
    if effects is Effects.EXTERNAL:
        assert (found.state, swept.released, swept.doubted) == (State.UNKNOWN, 0, 1)
        assert found.reconcile_at is not None
        assert found.reconcile_at <= found.now
        assert rows.names() == ["ZombieFound", "Doubted", "ReconcileScheduled"]
    else:
        assert (found.state, swept.released, swept.doubted) == (State.FAILED_RETRYABLE, 1, 0)
        assert rows.names() == ["ZombieFound", "Released"]


def test_the_row_decides_and_not_the_route(rows: KeyStore) -> None:
    """A phased request inside an effect that may not be repeated says so in its row, and is unknown."""
    (record,) = rows.reserved(effects=Effects.PHASED)
    (record,) = rows.moved(
        [record], Event.ADVANCE, recovery_point="started", effects=Effects.EXTERNAL, lease_seconds=LEASE
    )
    rows.age(LEASE + 1)
    Sweeper(rows.store).run()
    assert rows.get(record).state is State.UNKNOWN


def test_a_live_owner_is_left_alone(rows: KeyStore) -> None:
    """Also one second before the end of its lease, and one that has renewed it."""
    early = rows.reserved(2)
    rows.age(LEASE - 1)
    renewed = rows.moved(early[:1], Event.RENEW, lease_seconds=LEASE)
    assert Sweeper(rows.store).run().as_json() == {"released": 0, "doubted": 0}
    rows.age(2)
    Sweeper(rows.store).run()
    assert rows.states([*renewed, early[1]]) == [State.IN_PROGRESS, State.UNKNOWN]


def test_renewed_between_the_look_and_the_move(rows: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list that a sweeper works on may be old: the move itself compares the lease."""
    (record,) = rows.reserved()
    rows.age(LEASE + 1)
    due = rows.store.due

    def slowly(*asked: object) -> list[Record]:
        found = due(*asked)  # type: ignore[arg-type]
        rows.moved([record], Event.RENEW, lease_seconds=LEASE)
        return found

    monkeypatch.setattr(rows.store, "due", slowly)
    assert Sweeper(rows.store).run().doubted == 0
    assert rows.get(record).state is State.IN_PROGRESS


def test_sweeper_takes_all_keys_in_batches(rows: KeyStore) -> None:
    """More than one batch, and a last one that is not full."""
    rows.reserved(5)
    rows.age(LEASE + 1)
    assert Sweeper(rows.store, batch=2).run().doubted == 5


def test_a_dry_run_changes_nothing(rows: KeyStore) -> None:
    records = [*rows.reserved(2), *rows.reserved(3, effects=Effects.REPEATABLE)]
    rows.age(LEASE + 1)
    before = _rows(rows, records)
    assert Sweeper(rows.store).run(dry_run=True).as_json() == {"released": 3, "doubted": 2}
    assert _rows(rows, records) == before


def test_stop_event_ends_the_run(rows: KeyStore) -> None:
    """Nothing more is begun."""
    rows.reserved(2)
    rows.age(LEASE + 1)
    stop = threading.Event()
    stop.set()
    assert Sweeper(rows.store).run(stop).doubted == 0


def test_an_owner_inside_its_transaction(postgres_url: str) -> None:
    """It holds its row, so it lives: it is skipped, and not waited for."""
    rows = KeyStore(postgres_url)
    held, dead = rows.reserved(2)
    rows.age(LEASE + 1)
    with psycopg.connect(postgres_url) as own:
        own.execute("SELECT FROM idempotency_keys WHERE key = %s FOR NO KEY UPDATE", [held.key])
        assert Sweeper(rows.store, batch=1).run().doubted == 0  # the oldest is held, and a batch is one
        assert Sweeper(rows.store).run().doubted == 1
    assert rows.states([held, dead]) == [State.IN_PROGRESS, State.UNKNOWN]
    rows.close()


def test_sweepers_and_reapers_leave_live_owners_alone(shop: KeyStore) -> None:
    """1,000 keys in flight, past their expiry even, with three sweepers and two reapers at full speed: not one touched.

    Each of the five has its own idea of the time, an hour apart. On PostgreSQL that is no matter: the server's clock
    counts. (SQLite is one host with one clock, which the test holds still.) What is really due is moved once.
    """
    live = shop.reserved(1_000, retention=0.001)
    dead = shop.reserved(200, lease=0.001)
    shop.age(1.0)
    before = _rows(shop, live)
    told: list[object] = []
    emitter = Emitter(told.append)
    stores = [shop.another() for _ in range(5)]
    duties: list[Sweeper | Reaper] = [Sweeper(store, batch=50, emitter=emitter) for store in stores[:3]]
    duties += [Reaper(store, batch=50, share=1.0, emitter=emitter) for store in stores[3:]]

    def work(store: Store, duty: Sweeper | Reaper, hours: float) -> None:
        local.offset = hours * 3600
        for _ in range(20):
            duty.run()
        store.disconnect()

    local = threading.local()
    with _clocks(local):
        threads = [
            threading.Thread(target=work, args=turn) for turn in zip(stores, duties, (-1, 0, 1, -1, 1), strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert _rows(shop, live) == before
    assert shop.states(dead) == [State.UNKNOWN] * 200
    assert Counter(type(event).__name__ for event in told)["Doubted"] == 200


@contextmanager
def _clocks(local: threading.local) -> Iterator[None]:
    """Each thread reads another time."""
    real = time.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + getattr(local, "offset", 0.0))
        yield


def _rows(rows: KeyStore, records: list[Record]) -> list[Record]:
    records.sort(key=lambda record: record.key)
    found = rows.store.read([(record.scope, record.key) for record in records])
    return [replace(record, now=0.0) for record in found if record]
