"""Webhooks: verdicts that come by themselves, at any time, more than once, and for keys that were settled long ago."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from oncekey import Confirmed, OnceKey, Policy, Refuted, StillUnknown
from oncekey.core.jobs import Conclusion, JobEnd
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.verdicts import Verdict
from oncekey.errors import ConfigurationError
from oncekey.upkeep import Inquiry, Outcome, Reconciler
from tests.upkeep.key_store import LEASE, OPERATION, RESPONSE, RETENTION, KeyStore

PAID = Confirmed(201, {"id": "ch_1"}, reason="charge.succeeded", final=True)
QUARANTINE = 300.0


def _poll(once: OnceKey) -> None:
    reconciler = Reconciler(once)
    reconciler.run()
    reconciler.close()


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_webhook_and_poll_settle_a_key_once(rows: KeyStore, when: str) -> None:
    """Before, during and after the poll, twice each: the same final record, and one line that changed something."""
    (record,) = rows.reserved()
    record = rows.step(record, "charge", "down-1", "ch_1")
    rows.moved([record], Event.DOUBT)
    once = rows.once()
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
    found = rows.get(record)
    assert (found.state, found.reconcile_at) == (State.COMPLETED, None)
    assert found.response is not None
    assert (found.response.status, found.response.body) == (201, b'{"id":"ch_1"}')
    who = "reconciler" if when == "after" else "webhook"
    assert rows.audit(record) == [(who, "unknown", "completed")]
    first = Outcome.ALREADY if when == "after" else Outcome.SETTLED
    assert outcomes == [first, Outcome.ALREADY]


@pytest.mark.parametrize("by", ["key", "downstream_key", "provider_id"])
async def test_verdict_finds_its_key_by_any_of_its_names(rows: KeyStore, by: str) -> None:
    """The key itself, what we sent to the provider, or what it calls it; here from an event loop."""
    (record,) = rows.reserved()
    record = rows.step(record, "charge", "down-1", "ch_1")
    rows.moved([record], Event.DOUBT)
    once = rows.once()
    name = {"key": record.key, "downstream_key": "down-1", "provider_id": "ch_1"}[by]
    settled = await once.ingest(PAID, who="stripe", **{by: name})
    assert (settled.outcome, settled.over) == (Outcome.SETTLED, True)
    assert settled.record is not None
    assert settled.record.state is State.COMPLETED
    (line,) = rows.store.audit(record.scope, record.key, 10)
    assert (line.who, line.why) == ("stripe", "charge.succeeded")
    assert (await once.ingest(PAID, key="no-such-key-of-ours")).outcome is Outcome.NOT_FOUND
    assert (await once.ingest(PAID, provider_id="ch_2")).outcome is Outcome.NOT_FOUND


def test_by_the_id_of_a_job(shop: KeyStore) -> None:
    """A deferred request whose job was a dead letter: the webhook finds its key by the job's downstream key."""
    (record,) = shop.pending()
    shop.job(record, downstream_key="down-of-the-job")
    (job,) = shop.outbox.claim("worker", ["charge"], 1, 60.0)
    shop.outbox.conclude([Conclusion(job.id, "worker", JobEnd.DEAD, error="no", settle=State.UNKNOWN)])
    settled = shop.once().ingest_blocking(PAID, downstream_key="down-of-the-job")
    assert settled.outcome is Outcome.SETTLED
    assert shop.get(record).state is State.COMPLETED


def test_an_id_that_several_keys_carry(rows: KeyStore) -> None:
    """Nothing is changed: it is not known which one it is about."""
    records = [rows.step(record, "charge", f"down-{n}", "ch_1") for n, record in enumerate(rows.reserved(2))]
    rows.moved(records, Event.DOUBT)
    assert rows.once().ingest_blocking(PAID, provider_id="ch_1").outcome is Outcome.AMBIGUOUS
    assert rows.states(records) == [State.UNKNOWN] * 2


def test_keys_of_tenants_and_endpoints(rows: KeyStore) -> None:
    """A key belongs to a scope; where each endpoint has keys of its own, also to an operation."""
    once = OnceKey(rows.store, scope=lambda request: "acme", routes={"POST /refunds": Policy(key_per="endpoint")})
    (plain,) = rows.unknown(scope="acme")
    (refund,) = rows.unknown(scope="acme\x1fPOST /refunds", operation="POST /refunds")
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
def test_named_in_no_way_or_in_two(rows: KeyStore, names: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="in one way"):
        rows.once().ingest_blocking(PAID, **names)


def test_a_key_that_is_settled_already(rows: KeyStore) -> None:
    """By its own handler, for instance: the webhook of a payment that simply worked."""
    (record,) = rows.finished()
    settled = rows.once().ingest_blocking(PAID, key=record.key)
    assert (settled.outcome, settled.over) == (Outcome.ALREADY, True)
    found = rows.get(record)
    assert found.response == RESPONSE
    assert rows.audit(record) == []


def test_its_owner_is_still_at_work(rows: KeyStore) -> None:
    """The webhook is faster than the handler: nothing is changed, and it is told when to come again."""
    (record,) = rows.reserved()
    settled = rows.once().ingest_blocking(PAID, key=record.key)
    assert (settled.outcome, settled.over) == (Outcome.OPEN, False)
    assert settled.retry_in is not None
    assert LEASE - 5 < settled.retry_in <= LEASE
    assert rows.get(record).state is State.IN_PROGRESS
    rows.moved([record], Event.COMPLETE, response=RESPONSE)


def test_webhook_settles_a_lapsed_key_before_the_sweeper(rows: KeyStore) -> None:
    """A webhook may come only once: it does not have to wait for the sweeper."""
    external, harmless = *rows.reserved(), *rows.reserved(effects=Effects.REPEATABLE)
    rows.age(LEASE + 1)
    once = rows.once()
    assert once.ingest_blocking(PAID, key=external.key).outcome is Outcome.SETTLED
    assert rows.get(external).state is State.COMPLETED
    assert rows.audit(external) == [("webhook", "unknown", "completed")]
    assert once.ingest_blocking(PAID, key=harmless.key).outcome is Outcome.OPEN, "a retry does it, without harm"
    assert rows.get(harmless).state is State.IN_PROGRESS


def test_confirmed_although_it_counts_as_not_executed(rows: KeyStore) -> None:
    """There is no such move. But a retry would do it twice, so it is told."""
    (record,) = rows.moved(rows.reserved(), Event.RELEASE)
    settled = rows.once().ingest_blocking(PAID, key=record.key)
    assert (settled.outcome, settled.over) == (Outcome.CONTRADICTED, True)
    assert settled.reason == "the key counts as not executed, and a retry runs it"
    assert rows.names() == ["ReconcileFailed"]


def test_refuted_is_accepted_after_the_quarantine(rows: KeyStore) -> None:
    """Before the quarantine is over it is refused, with the time that is left; then it is done, and once."""
    (record,) = rows.unknown()
    once = rows.once()
    rows.age(QUARANTINE - 20)
    early = once.ingest_blocking(Refuted("charge.canceled"), key=record.key)
    assert (early.outcome, early.over, rows.audit(record)) == (Outcome.TOO_EARLY, False, [])
    assert early.retry_in is not None
    assert 10 < early.retry_in <= 20
    rows.age(21)
    assert once.ingest_blocking(Refuted("charge.canceled"), key=record.key).outcome is Outcome.SETTLED
    again = once.ingest_blocking(Refuted("charge.canceled"), key=record.key)
    assert (again.outcome, again.over, rows.get(record).state) == (Outcome.ALREADY, True, State.FAILED_RETRYABLE)
    assert rows.audit(record) == [("webhook", "unknown", "failed_retryable")]


def test_quarantine_of_the_row_counts_whatever_the_policy_says_now(rows: KeyStore) -> None:
    """The route's own, as it was when the key was reserved; and it counts from the doubt, not from the lease."""
    (short,), (long,) = rows.unknown(quarantine=1.0), rows.unknown(quarantine=900.0)
    rows.age(2)
    once = rows.once(quarantine=timedelta(seconds=1))
    assert once.ingest_blocking(Refuted("no"), key=short.key).outcome is Outcome.SETTLED
    early = once.ingest_blocking(Refuted("no"), key=long.key)
    assert early.outcome is Outcome.TOO_EARLY
    assert early.retry_in == pytest.approx(898, abs=2)


def test_quarantine_counts_from_the_end_of_a_kept_lease(rows: KeyStore) -> None:
    """The owner's handler may still run: nothing is refuted before its lease and the quarantine are over."""
    (record,) = rows.moved(rows.reserved(quarantine=10.0), Event.DOUBT, lease_seconds=LEASE)
    once = rows.once()
    rows.age(LEASE + 8)
    assert once.ingest_blocking(Refuted("no"), key=record.key).outcome is Outcome.TOO_EARLY
    rows.age(3)
    assert once.ingest_blocking(Refuted("no"), key=record.key).outcome is Outcome.SETTLED


def test_quarantine_of_a_deferred_request_counts_from_the_dead_letter(shop: KeyStore) -> None:
    """And not from the lease of a request that ended long before."""
    (record,) = shop.pending(quarantine=10.0)
    shop.job(record)
    shop.age(LEASE + 100)
    (job,) = shop.outbox.claim("worker", ["charge"], 1, 60.0)
    shop.outbox.conclude([Conclusion(job.id, "worker", JobEnd.DEAD, error="no", settle=State.UNKNOWN)])
    found = shop.get(record)
    assert found.lease_until == pytest.approx(found.now, abs=2)


def test_still_unknown_changes_nothing(rows: KeyStore) -> None:
    (record,) = rows.unknown()
    assert rows.once().ingest_blocking(StillUnknown(), key=record.key).outcome is Outcome.UNDECIDED
    assert rows.get(record).reconcile_tries == 0


def test_verdict_about_an_expired_key_changes_nothing(rows: KeyStore) -> None:
    (record,) = rows.finished()
    rows.age(RETENTION + 1)
    rows.moved([record], Event.EXPIRE, Actor.REAPER, to_state=State.EXPIRED)
    assert rows.once().ingest_blocking(PAID, key=record.key).outcome is Outcome.NOT_FOUND


def test_many_webhooks_at_once_settle_each_key_once(shop: KeyStore) -> None:
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


async def test_verdict_waits_for_a_row_that_is_locked(postgres_url: str) -> None:
    """A late owner, say: it is tried again, and not reported as settled before it is."""
    rows = KeyStore(postgres_url)
    (record,) = rows.unknown()
    once = rows.once()
    async with await psycopg.AsyncConnection.connect(postgres_url) as own:
        await own.execute("SELECT FROM idempotency_keys WHERE key = %s FOR UPDATE", [record.key])
        waiting = asyncio.create_task(once.ingest(PAID, key=record.key))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await own.rollback()
        assert (await waiting).outcome is Outcome.SETTLED
    await once.aclose()
    rows.close()


@pytest.mark.parametrize(
    ("wrong", "got"), [(None, "NoneType"), (Confirmed, "the class Confirmed"), ("paid", "str"), (RESPONSE, "Stored")]
)
@pytest.mark.parametrize("there", [True, False])
async def test_invalid_verdict_is_a_configuration_error(rows: KeyStore, wrong: Any, got: str, there: bool) -> None:
    """Whether the key is unknown or absent, and in both kinds of code."""
    key = rows.unknown()[0].key if there else "no-such-key-of-ours"
    once = rows.once()
    with pytest.raises(ConfigurationError, match=f"ingest\\({got}.*a verdict is Confirmed"):
        await once.ingest(wrong, key=key)
    with pytest.raises(ConfigurationError, match=f"ingest\\({got}"):
        once.ingest_blocking(wrong, key=key)
