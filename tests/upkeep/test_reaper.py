"""The reaper: what is over goes, in the right order, and nothing that is in flight."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from oncekey.core.audit import Audit
from oncekey.core.jobs import Conclusion, JobEnd, JobState
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.errors import ConfigurationError
from oncekey.telemetry.emitter import Emitter
from oncekey.upkeep import Reaper
from oncekey.upkeep.reaper import AUDIT_RETENTION, KEEP_JOBS_SECONDS, timed_out_response
from tests.upkeep.key_store import RESPONSE, RETENTION, KeyStore

NOTHING = {"timed_out": 0, "doubted": 0, "expired": 0, "deleted": 0, "jobs": 0, "audit_lines": 0}


def _reaper(rows: KeyStore, **how: object) -> Reaper:
    return Reaper(rows.store, emitter=Emitter(rows.told.append), share=1.0, **how)  # type: ignore[arg-type]


def test_reaper_removes_only_expired_keys(rows: KeyStore) -> None:
    """Final and retryable keys past their expiry go; what is in flight or unknown never does."""
    done = rows.finished(3)
    retryable = rows.moved(rows.reserved(2), Event.RELEASE)
    live, unknown = rows.reserved(2), rows.unknown(2)
    rows.age(RETENTION + 1)
    fresh = rows.finished(1)
    reaped = _reaper(rows).run()
    assert reaped.as_json() == NOTHING | {"deleted": 5}
    assert rows.states([*done, *retryable]) == [None] * 5
    assert rows.states([*live, *unknown, *fresh]) == [
        *(State.IN_PROGRESS, State.IN_PROGRESS, State.UNKNOWN, State.UNKNOWN, State.COMPLETED)
    ]
    assert [(type(event).__name__, event.amount) for event in rows.told] == [("Pruned", 5)]
    assert _reaper(rows).run().as_json() == NOTHING


def test_kept_for_as_long_as_its_route_says_from_its_end(rows: KeyStore) -> None:
    """Retention stands in the row, and counts from the end of the work: a slow request is kept no shorter."""
    records = rows.reserved(1, retention=3600.0) + rows.reserved(1, retention=86400.0)
    rows.age(3000)
    done = rows.moved(records, Event.COMPLETE, response=RESPONSE)
    rows.age(3000)  # 6,000 s after it began, 3,000 after it ended
    assert _reaper(rows).run().deleted == 0
    rows.age(601)
    assert _reaper(rows).run().deleted == 1
    assert rows.states(done) == [None, State.COMPLETED]


def test_expired_half_done_key_becomes_unknown(rows: KeyStore) -> None:
    """Unknown, and first on the reconciler's list: a resolver may still find out. Never deleted."""
    (record,) = rows.half_done()
    rows.age(RETENTION + 1)
    assert _reaper(rows).run().as_json() == NOTHING | {"doubted": 1}
    found = rows.get(record)
    assert (found.state, found.reconcile_tries) == (State.UNKNOWN, 0)
    assert found.reconcile_at is not None
    assert found.reconcile_at <= found.now
    assert rows.names() == ["Doubted", "ReconcileScheduled"]


def test_soft_expiry_keeps_the_key_without_its_response(rows: KeyStore) -> None:
    """For as long again as the key was kept; then it goes."""
    (record,) = rows.finished()
    rows.age(RETENTION + 1)
    assert _reaper(rows, soft=True).run().as_json() == NOTHING | {"expired": 1}
    found = rows.get(record)
    assert (found.state, found.response) == (State.EXPIRED, None)
    rows.age(RETENTION - 10)
    assert _reaper(rows, soft=True).run().as_json() == NOTHING
    rows.age(20)
    assert _reaper(rows, soft=True).run().as_json() == NOTHING | {"deleted": 1}
    assert rows.states([record]) == [None]


def test_soft_deletes_only_keys_in_the_state_expired(rows: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that expires right after the look for such keys waits for the next turn."""
    (record,) = rows.finished()
    rows.age(RETENTION + 1)
    monkeypatch.setattr(rows.store, "due", lambda duty, limit: [])
    assert _reaper(rows, soft=True).run().as_json() == NOTHING
    assert rows.states([record]) == [State.COMPLETED]


def test_expired_keys_go_when_soft_is_switched_off(rows: KeyStore) -> None:
    rows.finished()
    rows.age(RETENTION + 1)
    _reaper(rows, soft=True).run()
    rows.age(RETENTION + 1)
    assert _reaper(rows).run().deleted == 1


def test_expired_deferred_key_fails_with_408(shop: KeyStore) -> None:
    """A deferred request past its expiry is failed with 408, and its job cancelled; never while a worker runs it."""
    idle, running, orphan = shop.pending(3)
    job, busy = shop.job(idle), shop.job(running)
    shop.age(RETENTION - 60)
    (claimed,) = [each for each in shop.outbox.claim("worker", ["charge"], 2, 300.0) if each.id == busy]
    shop.outbox.conclude([Conclusion(job, "worker", JobEnd.RELEASE)])
    shop.age(61)
    assert _reaper(shop).run().as_json() == NOTHING | {"timed_out": 2}
    assert shop.states([idle, running, orphan]) == [State.FAILED, State.PENDING, State.FAILED]
    found = shop.get(idle)
    assert found.response == timed_out_response("ietf")
    assert found.response is not None
    assert found.response.status == 408
    assert shop.outbox.job(job).state is JobState.CANCELLED  # type: ignore[union-attr]
    assert place_names(shop) == {"TimedOut": 2}
    # It is kept for its whole retention now, and the worker still settles the other one.
    assert _reaper(shop).run().as_json() == NOTHING
    settled = Conclusion(busy, "worker", JobEnd.DONE, settle=State.COMPLETED, response=RESPONSE)
    assert (claimed.owner, shop.outbox.conclude([settled])) == ("worker", [True])
    assert shop.get(running).state is State.COMPLETED


def place_names(rows: KeyStore) -> dict[str, int]:
    return {type(event).__name__: event.amount for event in rows.told}


def test_done_jobs_are_deleted_after_a_week(shop: KeyStore) -> None:
    """Deleted after a week. Dead letters stay."""
    records = shop.finished(2)
    done, dead = (shop.job(record, settles=False) for record in records)
    shop.outbox.claim("worker", ["charge"], 2, 60.0)
    shop.outbox.conclude([Conclusion(done, "worker", JobEnd.DONE), Conclusion(dead, "worker", JobEnd.DEAD, error="no")])
    shop.age(KEEP_JOBS_SECONDS - 60)
    assert _reaper(shop).run().jobs == 0
    shop.age(61)
    assert _reaper(shop).run().jobs == 1
    assert (shop.outbox.job(done), shop.outbox.job(dead) is not None) == (None, True)


def test_audit_of_keys_that_are_over_ends_after_its_retention(rows: KeyStore) -> None:
    """400 days, or what the reaper was told, in batches. The lines of a key that is still unknown stay."""
    why = Audit("ana@example.com", "the provider's ledger has it")
    unknown, *settled = rows.unknown(4)
    rows.moved([unknown], Event.POSTPONE, Actor.OPERATOR, reconcile_in=0.0, audit=why)
    settled = rows.moved(settled, Event.CONFIRM, Actor.OPERATOR, response=RESPONSE, audit=why)

    def lines() -> list[int]:
        return [len(rows.store.audit(record.scope, record.key, 10)) for record in (unknown, *settled)]

    rows.age(AUDIT_RETENTION.total_seconds() - 60)
    assert _reaper(rows).run().audit_lines == 0
    rows.age(61)
    assert (_reaper(rows, audit_retention=None).run().audit_lines, lines()) == (0, [1, 1, 1, 1])
    stop = _Stop()
    assert (_reaper(rows, batch=2).run(stop).audit_lines, lines()) == (3, [1, 0, 0, 0])
    assert len(stop.pauses) == 1
    assert _reaper(rows, audit_retention=timedelta(seconds=1)).run().audit_lines == 0
    with pytest.raises(ConfigurationError, match="None keeps the audit for ever"):
        Reaper(rows.store, audit_retention=timedelta(0))


def test_a_dry_run_counts(shop: KeyStore) -> None:
    """What would go, and nothing goes."""
    keys = [*shop.finished(3), *shop.pending(2), *shop.half_done(1)]
    shop.age(RETENTION + 1)
    before = shop.states(keys)
    assert _reaper(shop).run(dry_run=True).as_json() == NOTHING | {"timed_out": 2, "doubted": 1, "deleted": 3}
    assert _reaper(shop, soft=True).run(dry_run=True).expired == 3
    assert (shop.states(keys), shop.told) == (before, [])


class _Stop(threading.Event):
    """Counts the pauses that are taken, and takes none."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0.0)
        return self.is_set()


def test_reaper_pauses_between_full_batches(rows: KeyStore) -> None:
    """Between two full batches it pauses for as long as its share of the time says; never after the last one."""
    rows.finished(5)
    rows.age(RETENTION + 1)
    stop = _Stop()
    assert Reaper(rows.store, batch=2, share=0.2).run(stop).deleted == 5
    assert len(stop.pauses) == 2
    assert all(pause > 0 for pause in stop.pauses)


def test_stop_event_ends_the_run(rows: KeyStore) -> None:
    rows.finished(5)
    rows.age(RETENTION + 1)
    stop = threading.Event()
    stop.set()
    assert _reaper(rows).run(stop).as_json() == NOTHING


def test_a_share_that_makes_no_sense(rows: KeyStore) -> None:
    for share in (0.0, 1.5, -1.0):
        with pytest.raises(ConfigurationError, match="share"):
            Reaper(rows.store, share=share)


def test_a_key_that_starts_over(rows: KeyStore) -> None:
    """A request that took an expired key a moment before the reaper came is in flight, and stays."""
    (record,) = rows.finished(effects=Effects.REPEATABLE)
    rows.age(RETENTION + 1)
    (wanted,) = rows.reservations(1)
    rows.moved([record], Event.RESERVE, Actor.REQUEST, reservation=wanted)
    assert _reaper(rows).run().as_json() == NOTHING
