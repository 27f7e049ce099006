"""Webhooks: verdicts that come by themselves, at any time, more than once, and for keys that were settled long ago."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import psycopg
import pytest

from oncekey import Confirmed, OnceKey, Policy, Refuted, StillUnknown
from oncekey.core.jobs import Conclusion, JobEnd
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.verdicts import Verdict
from oncekey.errors import ConfigurationError
from oncekey.upkeep import Inquiry, Outcome, Reconciler
from tests.upkeep.places import LEASE, OPERATION, RESPONSE, RETENTION, Place

PAID = Confirmed(201, {"id": "ch_1"}, reason="charge.succeeded", final=True)
QUARANTINE = 300.0


def _poll(once: OnceKey) -> None:
    reconciler = Reconciler(once)
    reconciler.run()
    reconciler.close()


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_webhook_and_poll(place: Place, when: str) -> None:
    """Before, during and after the poll, twice each: the same final record, and one line that changed something."""
    (record,) = place.reserved()
    record = place.step(record, "charge", "down-1", "ch_1")
    place.moved([record], Event.DOUBT)
    once = place.once()
    outcomes: list[Outcome] = []

    def webhook() -> None:
        outcomes.extend(once.ingest_blocking(PAID, provider_id="ch_1").outcome for _ in range(2))

    @once.resolver(OPERATION)
    def ask(inquiry: Inquiry) -> Verdict:
        if when == "during":
            webhook()
        return Confirmed(201, {"id": "ch_1"}, final=True)

    if when == "before":
        webhook()
    _poll(once)
    if when == "after":
        webhook()
    _poll(once)
    found = place.get(record)
    assert (found.state, found.reconcile_at) == (State.COMPLETED, None)
    assert found.response is not None
    assert (found.response.status, found.response.body) == (201, b'{"id":"ch_1"}')
    who = "reconciler" if when == "after" else "webhook"
    assert place.audit(record) == [(who, "unknown", "completed")]
    first = Outcome.ALREADY if when == "after" else Outcome.SETTLED
    assert outcomes == [first, Outcome.ALREADY]


@pytest.mark.parametrize("by", ["key", "downstream_key", "provider_id"])
async def test_by_whatever_name(place: Place, by: str) -> None:
    """The key itself, what we sent to the provider, or what it calls it; here from an event loop."""
    (record,) = place.reserved()
    record = place.step(record, "charge", "down-1", "ch_1")
    place.moved([record], Event.DOUBT)
    once = place.once()
    name = {"key": record.key, "downstream_key": "down-1", "provider_id": "ch_1"}[by]
    settled = await once.ingest(PAID, who="stripe", **{by: name})
    assert (settled.outcome, settled.over) == (Outcome.SETTLED, True)
    assert settled.record is not None
    assert settled.record.state is State.COMPLETED
    (line,) = place.store.audit(record.scope, record.key, 10)
    assert (line.who, line.why) == ("stripe", "charge.succeeded")
    assert (await once.ingest(PAID, key="no-such-key-of-ours")).outcome is Outcome.NOT_FOUND
    assert (await once.ingest(PAID, provider_id="ch_2")).outcome is Outcome.NOT_FOUND


def test_by_the_id_of_a_job(shop: Place) -> None:
    """A deferred request whose job was a dead letter: the webhook finds its key by the job's downstream key."""
    (record,) = shop.pending()
    shop.job(record, downstream_key="down-of-the-job")
    (job,) = shop.store.claim("worker", ["charge"], 1, 60.0)
    shop.store.conclude([Conclusion(job.id, "worker", JobEnd.DEAD, error="no", settle=State.UNKNOWN)])
    settled = shop.once().ingest_blocking(PAID, downstream_key="down-of-the-job")
    assert settled.outcome is Outcome.SETTLED
    assert shop.get(record).state is State.COMPLETED


def test_an_id_that_several_keys_carry(place: Place) -> None:
    """Nothing is changed: which one it is about, nobody knows."""
    records = [place.step(record, "charge", f"down-{n}", "ch_1") for n, record in enumerate(place.reserved(2))]
    place.moved(records, Event.DOUBT)
    assert place.once().ingest_blocking(PAID, provider_id="ch_1").outcome is Outcome.AMBIGUOUS
    assert place.states(records) == [State.UNKNOWN] * 2


def test_keys_of_tenants_and_endpoints(place: Place) -> None:
    """A key belongs to a scope; where each endpoint has keys of its own, also to an operation."""
    once = OnceKey(place.store, scope=lambda request: "acme", routes={"POST /refunds": Policy(key_per="endpoint")})
    (plain,) = place.unknown(scope="acme")
    (refund,) = place.unknown(scope="acme\x1fPOST /refunds", operation="POST /refunds")
    assert once.ingest_blocking(PAID, key=plain.key, scope="other").outcome is Outcome.NOT_FOUND
    assert once.ingest_blocking(PAID, key=refund.key, scope="acme").outcome is Outcome.NOT_FOUND
    assert once.ingest_blocking(PAID, key=plain.key, scope="acme", operation=OPERATION).over
    assert once.ingest_blocking(PAID, key=refund.key, scope="acme", operation="POST /refunds").over
    with pytest.raises(ConfigurationError, match="scope="):
        once.ingest_blocking(PAID, key=plain.key)
    once.close()


@pytest.mark.parametrize(
    "names", [{}, {"key": "a", "provider_id": "b"}, {"provider_id": ""}, {"downstream_key": "a\0b"}]
)
def test_named_in_no_way_or_in_two(place: Place, names: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="in one way"):
        place.once().ingest_blocking(PAID, **names)


def test_a_key_that_is_settled_already(place: Place) -> None:
    """By its own handler, for instance: the webhook of a payment that simply worked."""
    (record,) = place.finished()
    settled = place.once().ingest_blocking(PAID, key=record.key)
    assert (settled.outcome, settled.over) == (Outcome.ALREADY, True)
    found = place.get(record)
    assert found.response == RESPONSE
    assert place.audit(record) == []


def test_its_owner_is_still_at_work(place: Place) -> None:
    """The webhook is faster than the handler: nothing is changed, and it is told when to come again."""
    (record,) = place.reserved()
    settled = place.once().ingest_blocking(PAID, key=record.key)
    assert (settled.outcome, settled.over) == (Outcome.OPEN, False)
    assert settled.retry_in is not None
    assert LEASE - 5 < settled.retry_in <= LEASE
    assert place.get(record).state is State.IN_PROGRESS
    place.moved([record], Event.COMPLETE, response=RESPONSE)


def test_its_owner_is_dead_and_nobody_swept_yet(place: Place) -> None:
    """A webhook may come only once: it does not have to wait for the sweeper."""
    external, harmless = *place.reserved(), *place.reserved(effects=Effects.REPEATABLE)
    place.age(LEASE + 1)
    once = place.once()
    assert once.ingest_blocking(PAID, key=external.key).outcome is Outcome.SETTLED
    assert place.get(external).state is State.COMPLETED
    assert place.audit(external) == [("webhook", "unknown", "completed")]
    assert once.ingest_blocking(PAID, key=harmless.key).outcome is Outcome.OPEN, "a retry does it, without harm"
    assert place.get(harmless).state is State.IN_PROGRESS


def test_confirmed_although_it_counts_as_not_executed(place: Place) -> None:
    """There is no such move. But a retry would do it twice, so it is told."""
    (record,) = place.moved(place.reserved(), Event.RELEASE)
    assert place.once().ingest_blocking(PAID, key=record.key).outcome is Outcome.OPEN
    assert place.names() == ["ReconcileFailed"]


def test_refuted(place: Place) -> None:
    """Before the quarantine is over it is refused, with the time that is left; then it is done, and once."""
    (record,) = place.unknown()
    once = place.once()
    place.age(QUARANTINE - 20)
    early = once.ingest_blocking(Refuted("charge.canceled"), key=record.key)
    assert (early.outcome, early.over, place.audit(record)) == (Outcome.TOO_EARLY, False, [])
    assert early.retry_in is not None
    assert 10 < early.retry_in <= 20
    place.age(21)
    assert once.ingest_blocking(Refuted("charge.canceled"), key=record.key).outcome is Outcome.SETTLED
    again = once.ingest_blocking(Refuted("charge.canceled"), key=record.key)
    assert (again.outcome, place.get(record).state) == (Outcome.OPEN, State.FAILED_RETRYABLE)
    assert place.audit(record) == [("webhook", "unknown", "failed_retryable")]


def test_quarantine_of_the_row_counts_whatever_the_policy_says_now(place: Place) -> None:
    """The route's own, as it was when the key was reserved; and it counts from the doubt, not from the lease."""
    (short,), (long,) = place.unknown(quarantine=1.0), place.unknown(quarantine=900.0)
    place.age(2)
    once = place.once(quarantine=timedelta(seconds=1))
    assert once.ingest_blocking(Refuted("no"), key=short.key).outcome is Outcome.SETTLED
    early = once.ingest_blocking(Refuted("no"), key=long.key)
    assert early.outcome is Outcome.TOO_EARLY
    assert early.retry_in == pytest.approx(898, abs=2)


def test_quarantine_counts_from_the_lease_that_a_doubt_has_kept(place: Place) -> None:
    """The owner's handler may still run: nothing is refuted before its lease and the quarantine are over."""
    (record,) = place.moved(place.reserved(quarantine=10.0), Event.DOUBT, lease_seconds=LEASE)
    once = place.once()
    place.age(LEASE + 8)
    assert once.ingest_blocking(Refuted("no"), key=record.key).outcome is Outcome.TOO_EARLY
    place.age(3)
    assert once.ingest_blocking(Refuted("no"), key=record.key).outcome is Outcome.SETTLED


def test_quarantine_of_a_deferred_request_counts_from_the_dead_letter(shop: Place) -> None:
    """And not from the lease of a request that ended long before."""
    (record,) = shop.pending(quarantine=10.0)
    shop.job(record)
    shop.age(LEASE + 100)
    (job,) = shop.store.claim("worker", ["charge"], 1, 60.0)
    shop.store.conclude([Conclusion(job.id, "worker", JobEnd.DEAD, error="no", settle=State.UNKNOWN)])
    once = shop.once()
    assert once.ingest_blocking(Refuted("no"), key=record.key).outcome is Outcome.TOO_EARLY
    shop.age(11)
    assert once.ingest_blocking(Refuted("no"), key=record.key).outcome is Outcome.SETTLED


def test_still_unknown_changes_nothing(place: Place) -> None:
    (record,) = place.unknown()
    assert place.once().ingest_blocking(StillUnknown(), key=record.key).outcome is Outcome.UNDECIDED
    assert place.get(record).reconcile_tries == 0


def test_expired(place: Place) -> None:
    (record,) = place.finished()
    place.age(RETENTION + 1)
    place.moved([record], Event.EXPIRE, Actor.REAPER, to_state=State.EXPIRED)
    assert place.once().ingest_blocking(PAID, key=record.key).outcome is Outcome.NOT_FOUND


def test_many_webhooks_at_once(shop: Place) -> None:
    """From threads of two processes' worth of apps, all about the same keys: each is settled once."""
    records = shop.unknown(10)
    onces = [shop.once(), shop.once(shop.another())]
    outcomes: list[Outcome] = []

    def deliver(once: OnceKey) -> None:
        outcomes.extend(once.ingest_blocking(PAID, key=record.key).outcome for record in records)

    threads = [threading.Thread(target=deliver, args=(once,)) for once in onces * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (outcomes.count(Outcome.SETTLED), outcomes.count(Outcome.ALREADY)) == (10, 50)
    assert [shop.audit(record) for record in records] == [[("webhook", "unknown", "completed")]] * 10


async def test_somebody_holds_the_row_for_a_moment(postgres_url: str) -> None:
    """A late owner, say: it is tried again, and nobody is told that it is settled before it is."""
    place = Place(postgres_url)
    (record,) = place.unknown()
    once = place.once()
    async with await psycopg.AsyncConnection.connect(postgres_url) as own:
        await own.execute("SELECT FROM idempotency_keys WHERE key = %s FOR UPDATE", [record.key])
        waiting = asyncio.create_task(once.ingest(PAID, key=record.key))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await own.rollback()
        assert (await waiting).outcome is Outcome.SETTLED
    await once.aclose()
    place.close()
