"""Health: what has waited too long is said in words."""

from __future__ import annotations

import time

import psycopg

from oncekey.core.health import NO_RESOLVER, WAITING_SECONDS, StoreHealth
from oncekey.core.jobs import Conclusion, JobEnd, OutboxHealth
from oncekey.core.states import Actor, Event, State
from oncekey.upkeep.health import DutyHealth, Health, look
from tests.upkeep.key_store import LEASE, RETENTION, KeyStore


def test_health_of_an_idle_store_is_ok(rows: KeyStore) -> None:
    rows.reserved(2)
    rows.finished(3)
    health = look(rows.store)
    assert health.problems == []
    shown = health.as_json()
    assert (shown["ok"], shown["keys"]["in_progress"], shown["keys"]["completed"]) == (True, 2, 3)
    assert (shown["oldest_expired_lease_seconds"], shown["dead_letters"]) == (0.0, {"keys": 0, "jobs": 0})


def test_no_connection_is_left_behind(postgres_url: str) -> None:
    """Threads of a web app that show the health come and go."""
    rows = KeyStore(postgres_url)
    rows.store.disconnect()
    look(rows.store)
    with psycopg.connect(postgres_url) as own:
        others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        deadline = time.monotonic() + 10
        while own.execute(others).fetchone() != (0,):
            assert time.monotonic() < deadline
            own.execute("SELECT pg_stat_clear_snapshot()")  # the server notices a client that left in its own time
    rows.close()


def test_health_names_work_that_no_upkeep_has_done(rows: KeyStore) -> None:
    """From what stands in the store alone: no sweeper, no reaper, no resolver asked, and a dead letter."""
    rows.reserved(1)
    unknown, dead = rows.unknown(2)
    rows.moved([dead], Event.POSTPONE, Actor.RECONCILER)
    rows.finished(1)
    rows.age(RETENTION + 90_000)
    health = look(rows.store)
    assert abs(health.keys.lease_over_seconds - (RETENTION + 90_000 - LEASE)) < 60
    assert abs(health.expired_over_seconds - 90_000) < 60
    assert abs(health.reconcile_over_seconds - (RETENTION + 90_000)) < 60
    assert abs(health.keys.oldest_unknown_seconds - (RETENTION + 90_000)) < 60
    words = "\n".join(health.problems)
    for part in ("was not swept", "no resolver was asked", "is still there", "1 keys are dead letters"):
        assert part in words
    assert rows.get(unknown).state is State.UNKNOWN
    assert health.as_json()["ok"] is False


def test_health_names_keys_that_resolvers_cannot_settle(rows: KeyStore) -> None:
    """A resolver is asked and does not know for hours: that is said, and not that none is asked."""
    records = rows.unknown(1)
    rows.age(7_000)
    rows.moved(records, Event.POSTPONE, Actor.RECONCILER, reconcile_in=600.0)
    (said,) = look(rows.store).problems
    assert "unknown for 70" in said


def test_unknown_keys_without_a_resolver(rows: KeyStore) -> None:
    """By operation, as the app's own upkeep has found them: in words with what to do, and as numbers."""
    records = rows.unknown(2, operation="POST /refunds")
    rows.moved(records, Event.POSTPONE, Actor.RECONCILER, reconcile_in=600.0, last_error=NO_RESOLVER)
    rows.unknown()
    health = look(rows.store)
    (said,) = health.problems
    assert said.startswith("2 keys are unknown and no resolver is registered for POST /refunds: register one with ")
    assert health.as_json()["unknown_without_resolver"] == {"POST /refunds": 2}


def test_half_done_keys_that_wait_are_a_problem(rows: KeyStore) -> None:
    rows.half_done(2, operation="POST /rides")
    assert look(rows.store).problems == []
    rows.age(LEASE + WAITING_SECONDS + 1)
    health = look(rows.store)
    (said,) = health.problems
    assert said.startswith(
        "2 keys are half done for over 10 min, without an attempt of a client or of upkeep, for POST /r"
    )
    assert health.as_json()["half_done_and_waiting"] == {"POST /rides": 2}


def test_health_names_waiting_and_dead_jobs(shop: KeyStore) -> None:
    late, dead = shop.finished(2)
    first, second = shop.job(late, settles=False), shop.job(dead, settles=False)
    shop.outbox.claim("worker", ["charge"], 2, 60.0)
    shop.outbox.conclude([Conclusion(second, "worker", JobEnd.DEAD, error="no")])
    shop.outbox.conclude([Conclusion(first, "worker", JobEnd.RELEASE)])
    shop.age(100)
    health = look(shop.store)
    assert 99 < health.outbox.lag_seconds < 130
    assert ["`oncekey worker`" in health.problems[0], "dead letters" in health.problems[1]] == [True, True]


def test_a_duty_that_is_late() -> None:
    """One failure is nothing; none succeeding for several turns is."""
    keys = StoreHealth(dict.fromkeys(State, 0), 0, 0.0, 0.0)

    def problems(ago: float | None, failures: int) -> list[str]:
        duty = DutyHealth("reap", 60.0, ago, failures, "StoreUnavailable" if failures else None)
        return Health((duty,), keys, OutboxHealth(0, 0.0, 0), 0.0, 0.0).problems

    assert problems(10.0, 0) == problems(100.0, 1) == problems(None, 0) == []
    assert problems(200.0, 3) == ["reap succeeded 200 s ago and failed 3 times since: StoreUnavailable"]
    assert problems(None, 1) == ["reap succeeded never and failed 1 times since: StoreUnavailable"]
